// Dispatch and combine between the GPUs of one host, with DeepEP's kernels on XLA's stream.
//
// The ranks of a group are GPUs of this process and of others; each has one block of memory that
// all ranks write to, by peer access within a process and by CUDA IPC between processes. Handlers
// launch and return: it is the kernels that wait for the other ranks.
//
// Memory of a rank that others write to, for each micro-batch: the low-latency buffers, then the
// normal ones with their barrier. What others do not see is in a second block.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "deep_ep_library.h"
#include "ffi.h"

namespace jaxmoe {

struct DeepEpSizes {
  int64_t num_ranks;    // the most there may be
  int64_t num_experts;  // of all of them
  int64_t hidden;
  int64_t num_micro_batches;
  int64_t low_latency_bytes;  // of one micro-batch; 0: the mode is not used
  int64_t normal_bytes;
  int64_t low_latency_sms;  // 0: all
  int64_t normal_sms;
  int64_t dispatch_send_tokens, combine_send_tokens, receive_tokens;  // of a channel's queue
};

class DeepEpGroup {
 public:
  // Allocates on each device, of consecutive ranks. All methods throw std::runtime_error.
  DeepEpGroup(std::shared_ptr<const DeepEpLibrary> library, DeepEpSizes sizes, int64_t first_rank,
              std::vector<int64_t> devices);
  ~DeepEpGroup();
  DeepEpGroup(const DeepEpGroup&) = delete;
  DeepEpGroup& operator=(const DeepEpGroup&) = delete;

  // By which other processes open the memory of this one's ranks.
  std::vector<std::string> Handles() const;
  // `handles` are those of all ranks; "" where there is none.
  void Connect(const std::vector<std::string>& handles);
  // The other ranks are neither sent to nor waited for. Between steps.
  void SetActive(const std::vector<int64_t>& ranks);
  // Active ranks that a kernel of this process waited for in vain. Between steps.
  std::vector<int64_t> Lost() const;
  // Forgets what was under way. Between steps; no rank may send before all have done so.
  void Clear();

  // A rank of this process.
  struct Rank {
    int device;
    int rank;
    int num_device_sms;
    char* shared = nullptr;
    char* own = nullptr;
    std::vector<char*> peers;  // by rank
    std::vector<void*> opened;
  };
  struct Tables {  // in a rank's own memory
    void** peers;
    int* mask;
    void** buffers;  // of a micro-batch, by rank
    int** barriers;
    void* workspace;
  };

  const DeepEpLibrary& library() const { return *library_; }
  const DeepEpSizes& sizes() const { return sizes_; }
  const Rank* Find(int device) const;
  char* LowLatencyHeap(char* shared, int64_t micro_batch) const;
  char* NormalBuffer(char* shared, int64_t micro_batch) const;
  Tables TablesOf(const Rank& rank, int64_t micro_batch) const;
  bool all_active() const { return all_active_; }

 private:
  DeepEpGroup(std::shared_ptr<const DeepEpLibrary> library, DeepEpSizes sizes);
  void Check(cudaError_t result, const char* what) const;
  void Use(const Rank& rank) const;
  int64_t SharedBytes() const;
  int64_t OwnBytes() const;
  void WriteTables(const Rank& rank);

  std::shared_ptr<const DeepEpLibrary> library_;
  DeepEpSizes sizes_;
  std::vector<Rank> ranks_;
  std::vector<int> mask_;
  bool all_active_ = true;
};

// The group that handlers of this process use from now on; null: none.
void SetDeepEpGroup(std::shared_ptr<DeepEpGroup> group);

// Kernels launched since the process started, by name; "captured" are those of them that recorded a
// command buffer, which then replays without a call.
std::map<std::string, int64_t> DeepEpLaunches();

XLA_FFI_DECLARE_HANDLER_SYMBOL(kDeepEpLowLatencyDispatchStart);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kDeepEpLowLatencyDispatchFinish);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kDeepEpLowLatencyCombineStart);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kDeepEpLowLatencyCombineFinish);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kDeepEpNormalDispatch);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kDeepEpNormalCombine);

}  // namespace jaxmoe
