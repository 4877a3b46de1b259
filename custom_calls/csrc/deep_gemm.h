// DeepGEMM's kernels (github.com/deepseek-ai/DeepGEMM) launched on XLA's stream.
//
// A kernel is announced when a program that needs it is traced, compiled elsewhere meanwhile, and
// registered here, which loads it on every device. Making the program's executable (the handlers'
// instantiate stage) waits for it. A call then finds it by its id, makes the TMA descriptors of its
// operands and launches: nothing is allocated, nothing waits, and command buffers record it.
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

// Programs that need this kernel wait until it is registered or has failed.
void AnnounceDeepGemmKernel(int64_t id);
// Loads the cubin on all devices; registering an id again does nothing. Returns an error or "".
std::string RegisterDeepGemmKernel(int64_t id, const std::string& cubin, const DeepGemmKernel& kernel);
// Programs that need this kernel are refused with this text, until it is announced again.
void FailDeepGemmKernel(int64_t id, const std::string& error);

// Handler calls since the process started, by kind and layout ("fp8_masked"); "captured" are those
// of them that recorded a command buffer, which then replays without a call.
std::map<std::string, int64_t> DeepGemmLaunches();
// Host time spent in these calls.
int64_t DeepGemmHostNanoseconds();

XLA_FFI_DECLARE_HANDLER_SYMBOL(kDeepGemmInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kDeepGemmFp8);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kDeepGemmBf16);

}  // namespace jaxmoe
