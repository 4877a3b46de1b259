// DeepGEMM's kernels (github.com/deepseek-ai/DeepGEMM) launched on XLA's stream.
//
// A kernel is compiled elsewhere and registered here once, which loads it on every device; a handler
// finds it by its id, makes the TMA descriptors of its operands and launches. Nothing is allocated,
// nothing waits, and calls are recorded by command buffers.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "ffi.h"

namespace jaxmoe {

enum class GemmLayout : int64_t { kDense = 0, kContiguous = 1, kMasked = 2 };

// What a kernel was compiled for.
struct DeepGemmKernel {
  bool is_fp8;
  GemmLayout layout;
  int64_t num_groups, num_out, depth;
  int64_t block_m, block_n;
  int64_t swizzle_d;  // bytes
  int64_t num_threads, shared_bytes, cluster_size, num_sms;
};

// Loads the cubin on all devices; registering an id again does nothing. Returns an error or "".
std::string RegisterDeepGemmKernel(int64_t id, const std::string& cubin, const DeepGemmKernel& kernel);

// Handler calls since the process started, by kind and layout ("fp8_masked"); "captured" are those
// of them that recorded a command buffer, which then replays without a call.
std::map<std::string, int64_t> DeepGemmLaunches();
// Host time spent in these calls.
int64_t DeepGemmHostNanoseconds();

XLA_FFI_DECLARE_HANDLER_SYMBOL(kDeepGemmFp8);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kDeepGemmBf16);

}  // namespace jaxmoe
