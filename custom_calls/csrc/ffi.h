// Short names for the parts of XLA's FFI that handlers use.
#pragma once

#include <cstdint>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace jaxmoe {

namespace ffi = ::xla::ffi;

using ffi::AnyBuffer;
using ffi::DataType;
using ffi::Error;
using ffi::Ffi;
using ffi::ThreadPool;

template <size_t kRank>
using Int32s = ffi::Buffer<DataType::S32, kRank>;
template <size_t kRank>
using Floats = ffi::Buffer<DataType::F32, kRank>;
template <class T>
using Out = ffi::Result<T>;

template <class Buffer>
std::string ToString(const Buffer& buffer) {
  std::string text = "[";
  for (int64_t dim : buffer.dimensions()) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(dim);
  }
  return text + "]";
}

}  // namespace jaxmoe

// Returns an invalid-argument error from a handler unless the rule holds.
#define JAXMOE_REQUIRE(rule, message) \
  if (!(rule)) return ::jaxmoe::Error::InvalidArgument(message)

#define JAXMOE_RETURN_IF_ERROR(call) \
  if (::jaxmoe::Error jaxmoe_error = (call); jaxmoe_error.failure()) return jaxmoe_error
