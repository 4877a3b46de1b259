// The launchers of DeepEP's kernels (github.com/deepseek-ai/DeepEP), taken out of the extension
// module that the package sgl-deep-ep installs.
//
// The module is opened as a library, not imported: PyTorch, NVSHMEM and NCCL are not needed, since
// the launchers used here call nothing but the CUDA runtime. Stubs of our own stand for those
// libraries; functions nobody calls stay unresolved.
#pragma once

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda_runtime_library.h"

namespace jaxmoe {

struct DeepEpLibrary {
  // Throws std::runtime_error, in words, when one of the libraries cannot be opened or the
  // extension is not what it must be: a symbol is missing or a structure has another size.
  DeepEpLibrary(const std::string& extension, const std::string& cuda_runtime,
                const std::vector<std::string>& stubs);

  CudaRuntime cuda;

  // For which sizes the package has kernels.
  std::vector<int64_t> low_latency_hidden_sizes;
  int64_t low_latency_max_top_k = 0;
  std::vector<int64_t> normal_num_ranks;

  // NVSHMEM's state on the current device, of which the kernels read the fields below.
  const void* nvshmem_state = nullptr;
  const void* ibgda_state = nullptr;

  // The package's own signatures.
  void (*get_dispatch_layout)(const int64_t* topk_idx, int* num_tokens_per_rank,
                              int* num_tokens_per_rdma_rank, int* num_tokens_per_expert,
                              bool* is_token_in_rank, int num_tokens, int num_topk, int num_ranks,
                              int num_experts, cudaStream_t stream);
  void (*notify_dispatch)(const int* num_tokens_per_rank, int* moe_recv_counter, int num_ranks,
                          const int* num_tokens_per_expert, int* moe_recv_expert_counter,
                          int num_experts, int num_tokens, const bool* is_token_in_rank,
                          int* channel_prefix_matrix, int* rank_prefix_matrix, int num_memset_int,
                          int expert_alignment, void** buffers, int** barriers, int rank,
                          cudaStream_t stream, int num_channels);
  void (*normal_dispatch)(void* recv_x, float* recv_x_scales, int* recv_src_idx,
                          int64_t* recv_topk_idx, float* recv_topk_weights,
                          int* recv_channel_offset, int* send_head, const void* x,
                          const float* x_scales, const int64_t* topk_idx,
                          const float* topk_weights, const bool* is_token_in_rank,
                          const int* channel_prefix_matrix, int num_tokens, int num_worst_tokens,
                          int hidden_int4, int num_topk, int num_experts, int num_scales,
                          int scale_token_stride, int scale_hidden_stride, void** buffers,
                          int rank, int num_ranks, cudaStream_t stream, int num_sms,
                          int num_max_send_tokens, int num_recv_buffer_tokens);
  void (*cached_notify_combine)(void** buffers, int* send_head, int num_channels,
                                int num_recv_tokens, int num_memset_int, int** barriers, int rank,
                                int num_ranks, cudaStream_t stream);
  void (*normal_combine)(cudaDataType_t type, void* recv_x, float* recv_topk_weights,
                         const void* x, const float* topk_weights, const void* bias_0,
                         const void* bias_1, const int* src_idx, const int* rank_prefix_matrix,
                         const int* channel_prefix_matrix, int* send_head, int num_tokens,
                         int num_recv_tokens, int hidden, int num_topk, void** buffers, int rank,
                         int num_ranks, cudaStream_t stream, int num_sms, int num_max_send_tokens,
                         int num_recv_buffer_tokens);
  void (*low_latency_dispatch)(void* recv_x, void* recv_x_scales, int* recv_src_info,
                               int64_t* recv_layout_range, int* recv_count, int* mask,
                               int* cumulative_recv_stats, int64_t* wait_cost_stats,
                               const float* x_global_scale, void* receive, int* receive_counts,
                               void* send, const void* x, const int64_t* topk_idx,
                               int* next_clean, int num_next_clean, int num_tokens, int hidden,
                               int max_tokens_per_rank, int num_topk, int num_experts, int rank,
                               int num_ranks, bool use_fp8, bool round_scale, bool use_ue8m0,
                               bool use_nvfp4, void* workspace, int num_device_sms,
                               cudaStream_t stream, int phases);
  void (*low_latency_combine)(void* combined_x, void* receive, int* receive_flags, void* send,
                              const void* x, const int64_t* topk_idx, const float* topk_weights,
                              const int* src_info, const int64_t* layout_range, int* mask,
                              int64_t* wait_cost_stats, int* next_clean, int num_next_clean,
                              int num_combined_tokens, int hidden, int max_tokens_per_rank,
                              int num_topk, int num_experts, int rank, int num_ranks,
                              bool use_logfmt, void* workspace, int num_device_sms,
                              cudaStream_t stream, int phases, bool zero_copy, bool overlap,
                              unsigned* signals, unsigned block_m);
};

// Byte offsets of what the intranode kernels read of NVSHMEM's structures.
struct NvshmemState {
  static constexpr size_t kSize = 776;
  static constexpr size_t kRank = 4, kNumRanks = 8;                    // int
  static constexpr size_t kHeap = 40, kHeapSize = 48, kPeerHeaps = 56;  // char*, size_t, char**
};
struct IbgdaState {
  static constexpr size_t kSize = 8384;
  static constexpr size_t kNumConnections = 28;  // unsigned; low latency checks it, and no more
};

}  // namespace jaxmoe
