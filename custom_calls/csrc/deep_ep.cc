#include "deep_ep.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <stdexcept>

namespace jaxmoe {
namespace {

using ffi::DeviceOrdinal;
using ffi::PlatformStream;

constexpr int64_t kBarrierBytes = 128;
constexpr int64_t kWorkspaceBytes = 32 << 20;  // what DeepEP's own buffer has
constexpr int64_t kMaxNormalRanks = 8;         // of DeepEP's intranode kernels

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

enum Kernel {
  kLowLatencyDispatch,
  kLowLatencyDispatchSend,
  kLowLatencyDispatchReceive,
  kLowLatencyCombine,
  kLowLatencyCombineSend,
  kLowLatencyCombineReceive,
  kNormalDispatch,
  kNormalCombine,
  kNumKernels
};
constexpr std::array<const char*, kNumKernels> kKernelNames = {
    "low_latency_dispatch", "low_latency_dispatch_send", "low_latency_dispatch_receive",
    "low_latency_combine",  "low_latency_combine_send",  "low_latency_combine_receive",
    "normal_dispatch",      "normal_combine"};
std::array<std::atomic<int64_t>, kNumKernels> launches;
std::atomic<int64_t> captured;

struct Current {
  std::mutex mutex;
  std::shared_ptr<DeepEpGroup> group;
};

Current& GetCurrent() {
  static Current* current = new Current;
  return *current;
}

}  // namespace

DeepEpGroup::DeepEpGroup(std::shared_ptr<const DeepEpLibrary> library, DeepEpSizes sizes)
    : library_(std::move(library)), sizes_(sizes), mask_(sizes.num_ranks, 0) {}

DeepEpGroup::DeepEpGroup(std::shared_ptr<const DeepEpLibrary> library, DeepEpSizes sizes,
                         int64_t first_rank, std::vector<int64_t> devices)
    : DeepEpGroup(std::move(library), sizes) {  // from here on, the destructor frees
  const CudaRuntime& cuda = library_->cuda;
  for (int64_t device : devices) {
    Rank rank;
    rank.device = static_cast<int>(device);
    rank.rank = static_cast<int>(first_rank + static_cast<int64_t>(ranks_.size()));
    rank.peers.resize(sizes_.num_ranks, nullptr);
    Use(rank);
    Check(cuda.DeviceGetAttribute(&rank.num_device_sms, cudaDevAttrMultiProcessorCount,
                                  rank.device),
          "cudaDeviceGetAttribute");
    ranks_.push_back(rank);
    Check(cuda.Malloc(reinterpret_cast<void**>(&ranks_.back().shared), SharedBytes()),
          "allocating the group's buffers");
    Check(cuda.Malloc(reinterpret_cast<void**>(&ranks_.back().own), OwnBytes()),
          "allocating the group's workspace");
    for (int64_t peer : devices) {
      if (peer == device) continue;
      cudaError_t result = cuda.DeviceEnablePeerAccess(static_cast<int>(peer), 0);
      if (result == cudaErrorPeerAccessAlreadyEnabled) {
        cuda.GetLastError();  // it is no error, and must not be found by somebody else
      } else {
        Check(result, "peer access between two of this process's GPUs");
      }
    }
  }
  Clear();
}

DeepEpGroup::~DeepEpGroup() {
  const CudaRuntime& cuda = library_->cuda;
  for (const Rank& rank : ranks_) {
    if (cuda.SetDevice(rank.device) != cudaSuccess) continue;
    cuda.DeviceSynchronize();
    for (void* memory : rank.opened) cuda.IpcCloseMemHandle(memory);
  }
  for (const Rank& rank : ranks_) {
    if (cuda.SetDevice(rank.device) != cudaSuccess) continue;
    cuda.Free(rank.shared);
    cuda.Free(rank.own);
  }
}

std::vector<std::string> DeepEpGroup::Handles() const {
  std::vector<std::string> handles;
  for (const Rank& rank : ranks_) {
    Use(rank);
    cudaIpcMemHandle_t handle;
    Check(library_->cuda.IpcGetMemHandle(&handle, rank.shared), "cudaIpcGetMemHandle");
    handles.emplace_back(reinterpret_cast<const char*>(&handle), sizeof(handle));
  }
  return handles;
}

void DeepEpGroup::Connect(const std::vector<std::string>& handles) {
  const int64_t first = ranks_.front().rank, last = ranks_.back().rank;
  for (Rank& rank : ranks_) {
    Use(rank);
    for (int64_t peer = 0; peer < static_cast<int64_t>(handles.size()); ++peer) {
      if (first <= peer && peer <= last) {
        rank.peers[peer] = ranks_[peer - first].shared;
      } else if (!handles[peer].empty()) {
        cudaIpcMemHandle_t handle;
        if (handles[peer].size() != sizeof(handle)) throw std::runtime_error("not an IPC handle");
        std::copy(handles[peer].begin(), handles[peer].end(), reinterpret_cast<char*>(&handle));
        void* memory = nullptr;
        Check(library_->cuda.IpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess),
              "cudaIpcOpenMemHandle");
        rank.opened.push_back(memory);
        rank.peers[peer] = static_cast<char*>(memory);
      }
    }
    WriteTables(rank);
  }
}

void DeepEpGroup::SetActive(const std::vector<int64_t>& ranks) {
  std::fill(mask_.begin(), mask_.end(), 1);
  for (int64_t rank : ranks) mask_.at(rank) = 0;
  all_active_ = static_cast<int64_t>(ranks.size()) == sizes_.num_ranks;
  for (const Rank& rank : ranks_) {
    Use(rank);
    Check(library_->cuda.Memcpy(TablesOf(rank, 0).mask, mask_.data(), mask_.size() * sizeof(int),
                                cudaMemcpyHostToDevice),
          "writing the mask of ranks");
  }
}

std::vector<int64_t> DeepEpGroup::Lost() const {
  std::vector<int> lost(mask_.size(), 0), found(mask_.size());
  for (const Rank& rank : ranks_) {
    Use(rank);
    Check(library_->cuda.Memcpy(found.data(), TablesOf(rank, 0).mask, found.size() * sizeof(int),
                                cudaMemcpyDeviceToHost),
          "reading the mask of ranks");
    for (size_t i = 0; i < lost.size(); ++i) lost[i] |= found[i] != 0 && mask_[i] == 0;
  }
  std::vector<int64_t> ranks;
  for (size_t i = 0; i < lost.size(); ++i) {
    if (lost[i]) ranks.push_back(static_cast<int64_t>(i));
  }
  return ranks;
}

void DeepEpGroup::Clear() {
  for (const Rank& rank : ranks_) {
    Use(rank);
    Check(library_->cuda.DeviceSynchronize(), "cudaDeviceSynchronize");
    Check(library_->cuda.Memset(rank.shared, 0, SharedBytes()), "clearing the group's buffers");
    Check(library_->cuda.Memset(rank.own, 0, OwnBytes()), "clearing the group's workspace");
    WriteTables(rank);
  }
}

const DeepEpGroup::Rank* DeepEpGroup::Find(int device) const {
  for (const Rank& rank : ranks_) {
    if (rank.device == device) return &rank;
  }
  return nullptr;
}

char* DeepEpGroup::LowLatencyHeap(char* shared, int64_t micro_batch) const {
  return shared + micro_batch * sizes_.low_latency_bytes;
}

char* DeepEpGroup::NormalBuffer(char* shared, int64_t micro_batch) const {
  return shared + sizes_.num_micro_batches * sizes_.low_latency_bytes +
         micro_batch * (sizes_.normal_bytes + kBarrierBytes);
}

DeepEpGroup::Tables DeepEpGroup::TablesOf(const Rank& rank, int64_t micro_batch) const {
  char* at = rank.own;
  auto take = [&](int64_t bytes) {
    char* taken = at;
    at += RoundUp(bytes, 256);
    return taken;
  };
  Tables tables;
  tables.peers = reinterpret_cast<void**>(take(sizes_.num_ranks * sizeof(void*)));
  tables.mask = reinterpret_cast<int*>(take(sizes_.num_ranks * sizeof(int)));
  const int64_t row = kMaxNormalRanks * sizeof(void*);
  tables.buffers = reinterpret_cast<void**>(take(sizes_.num_micro_batches * row) + micro_batch * row);
  tables.barriers = reinterpret_cast<int**>(take(sizes_.num_micro_batches * row) + micro_batch * row);
  tables.workspace = at + micro_batch * kWorkspaceBytes;
  return tables;
}

int64_t DeepEpGroup::SharedBytes() const {
  return sizes_.num_micro_batches *
         (sizes_.low_latency_bytes + sizes_.normal_bytes + kBarrierBytes);
}

int64_t DeepEpGroup::OwnBytes() const {
  Rank nowhere{};
  char* end = static_cast<char*>(TablesOf(nowhere, sizes_.num_micro_batches).workspace);
  return end - nowhere.own;
}

void DeepEpGroup::WriteTables(const Rank& rank) {
  const CudaRuntime& cuda = library_->cuda;
  Use(rank);
  auto write = [&](void* to, const void* from, size_t bytes) {
    Check(cuda.Memcpy(to, from, bytes, cudaMemcpyHostToDevice), "writing the group's tables");
  };
  const Tables first = TablesOf(rank, 0);
  write(first.peers, rank.peers.data(), rank.peers.size() * sizeof(char*));
  write(first.mask, mask_.data(), mask_.size() * sizeof(int));
  if (sizes_.normal_bytes > 0) {
    for (int64_t batch = 0; batch < sizes_.num_micro_batches; ++batch) {
      std::array<char*, kMaxNormalRanks> buffers{}, barriers{};
      for (size_t peer = 0; peer < rank.peers.size(); ++peer) {
        if (rank.peers[peer] == nullptr) continue;
        buffers[peer] = NormalBuffer(rank.peers[peer], batch);
        barriers[peer] = buffers[peer] + sizes_.normal_bytes;
      }
      const Tables tables = TablesOf(rank, batch);
      write(tables.buffers, buffers.data(), sizeof(buffers));
      write(tables.barriers, barriers.data(), sizeof(barriers));
    }
  }
  if (sizes_.low_latency_bytes > 0) {
    auto device_address = [&](const void* symbol) {
      void* address = nullptr;
      Check(cuda.GetSymbolAddress(&address, symbol), "cudaGetSymbolAddress");
      return static_cast<char*>(address);
    };
    char* state = device_address(library_->nvshmem_state);
    const int num_ranks = static_cast<int>(sizes_.num_ranks);
    const size_t heap_bytes = static_cast<size_t>(SharedBytes());
    write(state + NvshmemState::kRank, &rank.rank, sizeof(int));
    write(state + NvshmemState::kNumRanks, &num_ranks, sizeof(int));
    write(state + NvshmemState::kHeap, &rank.shared, sizeof(char*));
    write(state + NvshmemState::kHeapSize, &heap_bytes, sizeof(size_t));
    write(state + NvshmemState::kPeerHeaps, &first.peers, sizeof(void**));
    const unsigned many = 1u << 20;  // nothing leaves the host, so any number does
    write(device_address(library_->ibgda_state) + IbgdaState::kNumConnections, &many,
          sizeof(unsigned));
  }
}

void DeepEpGroup::Check(cudaError_t result, const char* what) const {
  if (result == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + library_->cuda.GetErrorString(result));
}

void DeepEpGroup::Use(const Rank& rank) const {
  Check(library_->cuda.SetDevice(rank.device), "cudaSetDevice");
}

void SetDeepEpGroup(std::shared_ptr<DeepEpGroup> group) {
  std::lock_guard lock(GetCurrent().mutex);
  GetCurrent().group = std::move(group);
}

std::map<std::string, int64_t> DeepEpLaunches() {
  std::map<std::string, int64_t> counts;
  for (int i = 0; i < kNumKernels; ++i) counts[kKernelNames[i]] = launches[i];
  counts["captured"] = captured;
  return counts;
}

namespace {

// The parts of a micro-batch's low-latency memory, as DeepEP divides it. Dispatch and combine take
// turns: each cleans the other's signals, which nobody waits for at that time.
enum Turn { kDispatchTurn = 0, kCombineTurn = 1 };

struct LowLatencyBuffers {
  int* signals;
  int* other_signals;
  char* send;
  char* receive;
  int64_t bytes;  // of all of it
};

LowLatencyBuffers Divide(char* heap, int64_t tokens, int64_t hidden, int64_t num_experts,
                         Turn turn) {
  const int64_t scales = hidden / 128;
  const int64_t dispatched = 16 + std::max(2 * hidden, hidden + 4 * scales);
  const int64_t combined = 4 * scales + 2 * hidden;
  const int64_t send = std::max(tokens * dispatched, num_experts * tokens * combined);
  const int64_t receive = num_experts * tokens * std::max(dispatched, combined);
  const int64_t signals = RoundUp(4 * num_experts, 128);
  return {reinterpret_cast<int*>(heap + signals * turn),
          reinterpret_cast<int*>(heap + signals * (1 - turn)),
          heap + 2 * signals + send * turn,
          heap + 2 * signals + 2 * send + receive * turn,
          2 * (signals + send + receive)};
}

// One handler's call: the group, the rank it runs for and the stream.
struct Call {
  std::shared_ptr<DeepEpGroup> group;
  const DeepEpGroup::Rank* rank;
  DeepEpGroup::Tables tables;
  cudaStream_t stream;

  const DeepEpLibrary& library() const { return group->library(); }
  const DeepEpSizes& sizes() const { return group->sizes(); }
  int num_ranks() const { return static_cast<int>(sizes().num_ranks); }
  int num_experts() const { return static_cast<int>(sizes().num_experts); }
};

Error Prepare(int32_t device, int64_t micro_batch, cudaStream_t stream, Call* call) {
  {
    std::lock_guard lock(GetCurrent().mutex);
    call->group = GetCurrent().group;
  }
  JAXMOE_REQUIRE(call->group != nullptr,
                 "there is no expert-parallel group: call custom_calls.runtime.bootstrap first");
  call->rank = call->group->Find(device);
  JAXMOE_REQUIRE(call->rank != nullptr,
                 "device " + std::to_string(device) + " is no rank of the expert-parallel group");
  JAXMOE_REQUIRE(0 <= micro_batch && micro_batch < call->sizes().num_micro_batches,
                 "the group has " + std::to_string(call->sizes().num_micro_batches) +
                     " micro-batches, got number " + std::to_string(micro_batch));
  call->tables = call->group->TablesOf(*call->rank, micro_batch);
  call->stream = stream;
  return Error::Success();
}

// Launches, with the launchers' exceptions and CUDA's own errors as this call's.
template <class Function>
Error Launch(const Call& call, Kernel kernel, Function&& function) {
  const CudaRuntime& cuda = call.library().cuda;
  try {
    cuda.SetDevice(call.rank->device);
    function();
  } catch (const std::exception& error) {
    return Error::Internal(std::string("DeepEP ") + kKernelNames[kernel] + ": " + error.what());
  }
  if (cudaError_t result = cuda.GetLastError(); result != cudaSuccess) {
    return Error::Internal(std::string("DeepEP ") + kKernelNames[kernel] + ": " +
                           cuda.GetErrorString(result));
  }
  ++launches[kernel];
  cudaStreamCaptureStatus status;
  if (cuda.StreamIsCapturing(call.stream, &status) == cudaSuccess &&
      status == cudaStreamCaptureStatusActive) {
    ++captured;
  }
  return Error::Success();
}

template <class T, class Buffer>
T* Data(Buffer& buffer) {
  return static_cast<T*>(buffer.untyped_data());
}

template <class T>
T* Data(Out<AnyBuffer>& buffer) {
  return static_cast<T*>(buffer->untyped_data());
}

constexpr int kSend = 1, kReceive = 2;

Error PrepareLowLatency(int32_t device, int64_t micro_batch, int64_t tokens_per_rank,
                        cudaStream_t stream, Turn turn, Call* call, LowLatencyBuffers* buffers) {
  JAXMOE_RETURN_IF_ERROR(Prepare(device, micro_batch, stream, call));
  const DeepEpSizes& sizes = call->sizes();
  *buffers = Divide(call->group->LowLatencyHeap(call->rank->shared, micro_batch), tokens_per_rank,
                    sizes.hidden, sizes.num_experts, turn);
  JAXMOE_REQUIRE(buffers->bytes <= sizes.low_latency_bytes,
                 "low-latency dispatch of " + std::to_string(tokens_per_rank) +
                     " tokens a rank needs " + std::to_string(buffers->bytes) +
                     " bytes, the group has " + std::to_string(sizes.low_latency_bytes));
  return Error::Success();
}

int LowLatencySms(const Call& call) {
  const int64_t sms = call.sizes().low_latency_sms;
  return sms > 0 ? static_cast<int>(sms) : call.rank->num_device_sms;
}

Error RunLowLatencyDispatch(const Call& call, const LowLatencyBuffers& buffers, int phases,
                            const void* x, const int64_t* topk_idx, int64_t num_tokens,
                            int64_t top_k, int64_t tokens_per_rank, Out<AnyBuffer>& received,
                            Out<AnyBuffer>& scale, Out<AnyBuffer>& source, Out<AnyBuffer>& range,
                            Out<AnyBuffer>& counts) {
  const DeepEpSizes& sizes = call.sizes();
  const auto shape = received->dimensions();
  const int64_t slots = sizes.num_experts / sizes.num_ranks;
  JAXMOE_REQUIRE(shape.size() == 3 && shape[0] == slots &&
                     shape[1] == sizes.num_ranks * tokens_per_rank && shape[2] == sizes.hidden,
                 "the tokens " + ToString(*received) + " must be [slots " + std::to_string(slots) +
                     ", ranks x tokens " + std::to_string(sizes.num_ranks * tokens_per_rank) +
                     ", hidden " + std::to_string(sizes.hidden) + "]");
  const bool is_fp8 = received->element_type() == DataType::F8E4M3FN;
  JAXMOE_REQUIRE(is_fp8 || received->element_type() == DataType::BF16,
                 "low-latency dispatch makes bfloat16 or float8_e4m3fn");
  // The kernel's distance between the scales of two experts is rounded up to that of 128 rows.
  JAXMOE_REQUIRE(!is_fp8 || shape[1] % 128 == 0,
                 "low-latency dispatch in FP8 needs a multiple of 128 rows an expert, got " +
                     std::to_string(shape[1]));
  const Kernel kernel = phases == kSend      ? kLowLatencyDispatchSend
                        : phases == kReceive ? kLowLatencyDispatchReceive
                                             : kLowLatencyDispatch;
  return Launch(call, kernel, [&] {
    call.library().low_latency_dispatch(
        Data<void>(received), is_fp8 ? Data<void>(scale) : nullptr, Data<int>(source),
        Data<int64_t>(range), Data<int>(counts), call.tables.mask, nullptr, nullptr, nullptr,
        buffers.receive, buffers.signals, buffers.send, x, topk_idx, buffers.other_signals,
        call.num_experts(), static_cast<int>(num_tokens), static_cast<int>(sizes.hidden),
        static_cast<int>(tokens_per_rank), static_cast<int>(top_k), call.num_experts(),
        call.rank->rank, call.num_ranks(), is_fp8, false, false, false, call.tables.workspace,
        LowLatencySms(call), call.stream, phases);
  });
}

// x bf16[T, H]; topk_idx s64[T, K] as s32[T, K, 2]; after, anything; received [e, D * M, H];
// scale f32[e, H/128, D * M] in FP8; source s32[e, D * M]; range s64[e, D] as s32[e, D, 2];
// counts s32[e]. Split, it only sends, and the results are made by the finish.
Error LowLatencyDispatchStart(cudaStream_t stream, int32_t device, AnyBuffer x, AnyBuffer topk_idx,
                              AnyBuffer, Out<AnyBuffer> received, Out<AnyBuffer> scale,
                              Out<AnyBuffer> source, Out<AnyBuffer> range, Out<AnyBuffer> counts,
                              int64_t micro_batch, int64_t tokens_per_rank, bool split) {
  Call call;
  LowLatencyBuffers buffers;
  JAXMOE_RETURN_IF_ERROR(PrepareLowLatency(device, micro_batch, tokens_per_rank, stream,
                                           kDispatchTurn, &call, &buffers));
  const auto idx_shape = topk_idx.dimensions(), x_shape = x.dimensions();
  JAXMOE_REQUIRE(idx_shape.size() == 3 && x_shape.size() == 2 && idx_shape[0] == x_shape[0] &&
                     x_shape[0] <= tokens_per_rank && x.element_type() == DataType::BF16,
                 "x " + ToString(x) + " must be bfloat16, at most " +
                     std::to_string(tokens_per_rank) + " tokens, with topk_idx " +
                     ToString(topk_idx));
  return RunLowLatencyDispatch(call, buffers, split ? kSend : kSend | kReceive, x.untyped_data(),
                               Data<int64_t>(topk_idx), x_shape[0], idx_shape[1], tokens_per_rank,
                               received, scale, source, range, counts);
}

// The results of a split start, each in the place of the operand before it.
Error LowLatencyDispatchFinish(cudaStream_t stream, int32_t device, AnyBuffer, AnyBuffer,
                               AnyBuffer, AnyBuffer, AnyBuffer, Out<AnyBuffer> received,
                               Out<AnyBuffer> scale, Out<AnyBuffer> source, Out<AnyBuffer> range,
                               Out<AnyBuffer> counts, int64_t micro_batch, int64_t tokens_per_rank,
                               int64_t top_k) {
  Call call;
  LowLatencyBuffers buffers;
  JAXMOE_RETURN_IF_ERROR(PrepareLowLatency(device, micro_batch, tokens_per_rank, stream,
                                           kDispatchTurn, &call, &buffers));
  return RunLowLatencyDispatch(call, buffers, kReceive, nullptr, nullptr, 0, top_k,
                               tokens_per_rank, received, scale, source, range, counts);
}

Error RunLowLatencyCombine(const Call& call, const LowLatencyBuffers& buffers, int phases,
                           const void* y, AnyBuffer& topk_idx, AnyBuffer& weights,
                           const int* source, const int64_t* range, int64_t tokens_per_rank,
                           Out<AnyBuffer>& combined) {
  const DeepEpSizes& sizes = call.sizes();
  const auto shape = combined->dimensions(), idx_shape = topk_idx.dimensions();
  JAXMOE_REQUIRE(shape.size() == 2 && shape[1] == sizes.hidden && idx_shape.size() == 3 &&
                     idx_shape[0] == shape[0] && shape[0] <= tokens_per_rank &&
                     combined->element_type() == DataType::BF16,
                 "the result " + ToString(*combined) + " must be bfloat16, one row for each of " +
                     ToString(topk_idx));
  const Kernel kernel = phases == kSend      ? kLowLatencyCombineSend
                        : phases == kReceive ? kLowLatencyCombineReceive
                                             : kLowLatencyCombine;
  return Launch(call, kernel, [&] {
    call.library().low_latency_combine(
        Data<void>(combined), buffers.receive, buffers.signals, buffers.send, y,
        Data<int64_t>(topk_idx), Data<float>(weights), source, range, call.tables.mask, nullptr,
        buffers.other_signals, call.num_experts(), static_cast<int>(shape[0]),
        static_cast<int>(sizes.hidden), static_cast<int>(tokens_per_rank),
        static_cast<int>(idx_shape[1]), call.num_experts(), call.rank->rank, call.num_ranks(),
        false, call.tables.workspace, LowLatencySms(call), call.stream, phases, false, false,
        nullptr, 0);
  });
}

// y bf16[e, D * M, H]; topk_idx s32[T, K, 2]; weights f32[T, K]; source and range as dispatch made
// them; combined bf16[T, H]. Split, it only sends.
Error LowLatencyCombineStart(cudaStream_t stream, int32_t device, AnyBuffer y, AnyBuffer topk_idx,
                             AnyBuffer weights, AnyBuffer source, AnyBuffer range,
                             Out<AnyBuffer> combined, int64_t micro_batch, int64_t tokens_per_rank,
                             bool split) {
  Call call;
  LowLatencyBuffers buffers;
  JAXMOE_RETURN_IF_ERROR(PrepareLowLatency(device, micro_batch, tokens_per_rank, stream,
                                           kCombineTurn, &call, &buffers));
  const auto shape = y.dimensions();
  JAXMOE_REQUIRE(shape.size() == 3 && shape[1] == call.sizes().num_ranks * tokens_per_rank &&
                     y.element_type() == DataType::BF16,
                 "y " + ToString(y) + " must be bfloat16 with " +
                     std::to_string(call.sizes().num_ranks * tokens_per_rank) +
                     " rows an expert");
  return RunLowLatencyCombine(call, buffers, split ? kSend : kSend | kReceive, y.untyped_data(),
                              topk_idx, weights, Data<int>(source), Data<int64_t>(range),
                              tokens_per_rank, combined);
}

// The result of a split start, in the place of its first operand.
Error LowLatencyCombineFinish(cudaStream_t stream, int32_t device, AnyBuffer, AnyBuffer topk_idx,
                              AnyBuffer weights, Out<AnyBuffer> combined, int64_t micro_batch,
                              int64_t tokens_per_rank) {
  Call call;
  LowLatencyBuffers buffers;
  JAXMOE_RETURN_IF_ERROR(PrepareLowLatency(device, micro_batch, tokens_per_rank, stream,
                                           kCombineTurn, &call, &buffers));
  return RunLowLatencyCombine(call, buffers, kReceive, nullptr, topk_idx, weights, nullptr, nullptr,
                              tokens_per_rank, combined);
}

Error PrepareNormal(int32_t device, int64_t micro_batch, cudaStream_t stream, Call* call) {
  JAXMOE_RETURN_IF_ERROR(Prepare(device, micro_batch, stream, call));
  JAXMOE_REQUIRE(call->sizes().normal_bytes > 0, "the group has no buffers for normal dispatch");
  JAXMOE_REQUIRE(call->group->all_active(),
                 "DeepEP's normal dispatch needs all " + std::to_string(call->num_ranks()) +
                     " ranks to be active");
  return Error::Success();
}

// x [T, R] of any type; topk_idx s32[T, K, 2]; weights f32[T, K]; after, anything. Of the D * T rows
// that may arrive: rows [D * T, R]; source s32[D * T]; row_topk_idx s32[D * T, K, 2], local, -1
// where there is nothing; row_weights f32[D * T, K]. For combine: rank_prefix s32[D, D];
// channel_prefix s32[D, C]; send_head s32[T, D]. Scratch: own_channel_prefix s32[D, C],
// per_rank s32[D], per_expert s32[E], in_rank pred[T, D], expert_counts s32[E/D + 1].
Error NormalDispatch(cudaStream_t stream, int32_t device, AnyBuffer x, AnyBuffer topk_idx,
                     AnyBuffer weights, AnyBuffer, Out<AnyBuffer> rows, Out<AnyBuffer> source,
                     Out<AnyBuffer> row_topk_idx, Out<AnyBuffer> row_weights,
                     Out<AnyBuffer> rank_prefix, Out<AnyBuffer> channel_prefix,
                     Out<AnyBuffer> send_head, Out<AnyBuffer> own_channel_prefix,
                     Out<AnyBuffer> per_rank, Out<AnyBuffer> per_expert, Out<AnyBuffer> in_rank,
                     Out<AnyBuffer> expert_counts, int64_t micro_batch) {
  Call call;
  JAXMOE_RETURN_IF_ERROR(PrepareNormal(device, micro_batch, stream, &call));
  const DeepEpSizes& sizes = call.sizes();
  const auto shape = x.dimensions(), idx_shape = topk_idx.dimensions();
  const int64_t row_bytes = shape.size() == 2 ? static_cast<int64_t>(x.size_bytes()) / shape[0] : 0;
  JAXMOE_REQUIRE(shape.size() == 2 && idx_shape.size() == 3 && idx_shape[0] == shape[0] &&
                     row_bytes % 32 == 0,
                 "x " + ToString(x) + " must have one row of a multiple of 32 bytes for each of " +
                     ToString(topk_idx));
  const int num_tokens = static_cast<int>(shape[0]), top_k = static_cast<int>(idx_shape[1]);
  const int num_rows = static_cast<int>(rows->dimensions()[0]);
  JAXMOE_REQUIRE(num_rows == call.num_ranks() * num_tokens,
                 "there may arrive " + std::to_string(call.num_ranks() * num_tokens) +
                     " rows, got room for " + ToString(*rows));
  const int num_sms = static_cast<int>(sizes.normal_sms), num_channels = num_sms / 2;
  const DeepEpLibrary& library = call.library();
  return Launch(call, kNormalDispatch, [&] {
    library.get_dispatch_layout(Data<int64_t>(topk_idx), Data<int>(per_rank), nullptr,
                                Data<int>(per_expert), Data<bool>(in_rank), num_tokens, top_k,
                                call.num_ranks(), call.num_experts(), stream);
    int* counts = Data<int>(expert_counts);
    library.notify_dispatch(Data<int>(per_rank), counts, call.num_ranks(), Data<int>(per_expert),
                            counts + 1, call.num_experts(), num_tokens, Data<bool>(in_rank),
                            Data<int>(own_channel_prefix), Data<int>(rank_prefix),
                            num_channels * call.num_ranks() * 4, 1, call.tables.buffers,
                            call.tables.barriers, call.rank->rank, stream, num_channels);
    library.normal_dispatch(
        Data<void>(rows), nullptr, Data<int>(source), Data<int64_t>(row_topk_idx),
        Data<float>(row_weights), Data<int>(channel_prefix), Data<int>(send_head),
        x.untyped_data(), nullptr, Data<int64_t>(topk_idx), Data<float>(weights),
        Data<bool>(in_rank), Data<int>(own_channel_prefix), num_tokens, num_rows,
        static_cast<int>(row_bytes / 16), top_k, call.num_experts(), 0, 0, 0, call.tables.buffers,
        call.rank->rank, call.num_ranks(), stream, num_sms,
        static_cast<int>(sizes.dispatch_send_tokens), static_cast<int>(sizes.receive_tokens));
  });
}

// y bf16[D * T, H], a row for each that arrived; the others as dispatch made them. The first result
// is in the place of send_head, which the kernels write to; combined bf16[T, H].
Error NormalCombine(cudaStream_t stream, int32_t device, AnyBuffer y, AnyBuffer source,
                    AnyBuffer rank_prefix, AnyBuffer channel_prefix, AnyBuffer,
                    Out<AnyBuffer> send_head, Out<AnyBuffer> combined, int64_t micro_batch) {
  Call call;
  JAXMOE_RETURN_IF_ERROR(PrepareNormal(device, micro_batch, stream, &call));
  const DeepEpSizes& sizes = call.sizes();
  const auto shape = combined->dimensions(), y_shape = y.dimensions();
  JAXMOE_REQUIRE(shape.size() == 2 && y_shape.size() == 2 && y_shape[1] == shape[1] &&
                     y_shape[0] == call.num_ranks() * shape[0] &&
                     y.element_type() == DataType::BF16 && shape[1] % 8 == 0,
                 "y " + ToString(y) + " must be bfloat16, for a result " + ToString(*combined));
  const int num_tokens = static_cast<int>(shape[0]);
  const int num_sms = static_cast<int>(sizes.normal_sms), num_channels = num_sms / 2;
  const DeepEpLibrary& library = call.library();
  return Launch(call, kNormalCombine, [&] {
    library.cached_notify_combine(call.tables.buffers, Data<int>(send_head), num_channels,
                                  num_tokens, num_channels * call.num_ranks() * 2,
                                  call.tables.barriers, call.rank->rank, call.num_ranks(), stream);
    library.normal_combine(
        CUDA_R_16BF, Data<void>(combined), nullptr, y.untyped_data(), nullptr, nullptr, nullptr,
        Data<int>(source), Data<int>(rank_prefix), Data<int>(channel_prefix), Data<int>(send_head),
        static_cast<int>(y_shape[0]), num_tokens, static_cast<int>(shape[1]), 0,
        call.tables.buffers, call.rank->rank, call.num_ranks(), stream, num_sms,
        static_cast<int>(sizes.combine_send_tokens), static_cast<int>(sizes.receive_tokens));
  });
}

// What every handler takes: the stream, the device, so many arrays and results, the micro-batch.
template <int kArgs, int kResults, class Binding>
auto Arrays(Binding&& binding) {
  if constexpr (kArgs > 0) {
    return Arrays<kArgs - 1, kResults>(std::move(binding).template Arg<AnyBuffer>());
  } else if constexpr (kResults > 0) {
    return Arrays<0, kResults - 1>(std::move(binding).template Ret<AnyBuffer>());
  } else {
    return std::move(binding).template Attr<int64_t>("micro_batch");
  }
}

template <int kArgs, int kResults>
auto Bind() {
  return Arrays<kArgs, kResults>(
      Ffi::Bind().Ctx<PlatformStream<cudaStream_t>>().Ctx<DeviceOrdinal>());
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    kDeepEpLowLatencyDispatchStart, LowLatencyDispatchStart,
    (Bind<3, 5>().Attr<int64_t>("tokens_per_rank").Attr<bool>("split")),
    {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    kDeepEpLowLatencyDispatchFinish, LowLatencyDispatchFinish,
    (Bind<5, 5>().Attr<int64_t>("tokens_per_rank").Attr<int64_t>("top_k")),
    {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    kDeepEpLowLatencyCombineStart, LowLatencyCombineStart,
    (Bind<5, 1>().Attr<int64_t>("tokens_per_rank").Attr<bool>("split")),
    {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(kDeepEpLowLatencyCombineFinish, LowLatencyCombineFinish,
                              (Bind<3, 1>().Attr<int64_t>("tokens_per_rank")),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(kDeepEpNormalDispatch, NormalDispatch, (Bind<4, 12>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(kDeepEpNormalCombine, NormalCombine, (Bind<5, 2>()),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxmoe
