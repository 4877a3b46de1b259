// Handlers of `custom_calls/ep/loopback.py`: dispatch and combine between the ranks of an `EpGroup`.
//
// Dispatch: a rank writes its tokens into its own window, each once, and every rank takes those that
// chose one of its experts. Combine: a rank writes results into the windows of the ranks they go back
// to. In normal mode that is one row for a token, the sum over the rank's experts; in low-latency
// mode one row for each expert, and the token's own rank weighs and adds them.
//
// A source names where a received row came from: (rank * tokens_per_rank + token), in low-latency
// mode times K plus the choice.
//
// Ranks that are not active are no part of it: a token for an expert of theirs is an error, and so is
// a token of theirs for any expert.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "ep_group.h"
#include "handlers.h"
#include "rows.h"

namespace jaxmoe {
namespace {

using ffi::Future;
using ffi::Promise;

int64_t RoundUp(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// What a rank sends, in its window: this, then experts, weights and rows.
struct Sent {
  int64_t num_tokens, top_k, row_bytes;

  const int32_t* topk_idx() const { return reinterpret_cast<const int32_t*>(this + 1); }
  const float* weights() const {
    return reinterpret_cast<const float*>(topk_idx() + num_tokens * top_k);
  }
  const char* row(int64_t token) const {
    const int64_t before = sizeof(Sent) + num_tokens * 2 * top_k * 4;
    return reinterpret_cast<const char*>(this) + RoundUp(before, 64) + token * row_bytes;
  }
  int64_t num_bytes() const { return row(num_tokens) - reinterpret_cast<const char*>(this); }
};

// A handler's group and rank, or what is wrong. What is handed to the group must not own it: the
// group's own threads would end it.
struct Place {
  std::shared_ptr<EpGroup> group;
  int64_t rank = -1;
  std::string error;

  Place(int32_t device, int64_t channel) : group(CurrentEpGroup()) {
    if (group == nullptr) {
      error = "there is no expert-parallel group: call custom_calls.runtime.bootstrap first";
      return;
    }
    rank = group->RankOf(device);
    if (rank < 0) {
      error = "device " + std::to_string(device) + " is not part of the expert-parallel group";
    } else if (channel < 0 || channel >= group->options().num_channels) {
      error = "the expert-parallel group has " + std::to_string(group->options().num_channels) +
              " channels, not channel " + std::to_string(channel) +
              ": bootstrap it for more micro-batches";
    }
  }
};

Future Failed(const std::string& message) {
  Promise promise;
  Future future(promise);
  promise.SetError(Error::Internal(message));
  return future;
}

std::function<void(const std::string&)> Completing(Promise promise) {
  return [promise = std::move(promise)](const std::string& error) mutable {
    if (error.empty()) {
      promise.SetAvailable();
    } else {
      promise.SetError(Error::Internal(error));
    }
  };
}

int64_t RowBytes(const AnyBuffer& rows) {
  return rows.dimensions().back() * ffi::ByteWidth(rows.element_type());
}

// The rank of an expert, -1 for none.
int64_t RankOf(int32_t expert, int64_t slots_per_rank) {
  return expert < 0 ? -1 : expert / slots_per_rank;
}

// Whether one of the choices before k is of the same rank: the token goes there already.
bool IsRepeated(const int32_t* choices, int64_t k, int64_t slots_per_rank) {
  for (int64_t i = 0; i < k; ++i) {
    if (RankOf(choices[i], slots_per_rank) == RankOf(choices[k], slots_per_rank)) return true;
  }
  return false;
}

Future DispatchStart(int32_t device, AnyBuffer x, Int32s<2> topk_idx, Floats<2> weights,
                     AnyBuffer after, int64_t channel, int64_t slots_per_rank,
                     bool by_expert, Out<Int32s<1>> token) {
  Place place(device, channel);
  if (!place.error.empty()) return Failed(place.error);
  EpGroup* group = place.group.get();
  const auto xs = x.dimensions(), is = topk_idx.dimensions();
  if (xs.size() != 2 || is[0] != xs[0] || weights.dimensions()[0] != is[0] ||
      weights.dimensions()[1] != is[1]) {
    return Failed("dispatch: x " + ToString(x) + ", topk_idx " + ToString(topk_idx) +
                  " and weights " + ToString(weights) + " must have one row for each token");
  }
  const Sent sent = {xs[0], is[1], RowBytes(x)};
  const int64_t num_bytes = sent.num_bytes();
  if (num_bytes > group->options().window_bytes) {
    return Failed("dispatch of x " + ToString(x) + " needs " + std::to_string(num_bytes) +
                  " bytes, the group's windows have " +
                  std::to_string(group->options().window_bytes) +
                  ": bootstrap it for more tokens or a larger hidden size");
  }
  (void)after;  // only orders the calls
  // The buffers' descriptions do not outlive the call, only what they point to does.
  const char* rows = static_cast<const char*>(x.untyped_data());
  const int32_t* idx = topk_idx.typed_data();
  const float* weight = weights.typed_data();
  int32_t* to_token = token->typed_data();
  const int64_t rank = place.rank;
  auto remote_rows = std::make_shared<int64_t>(0);
  Promise promise;
  Future future(promise);
  group->Start(
      {channel, rank,
       [=]() mutable -> std::string {
         Sent* window = reinterpret_cast<Sent*>(group->Window(channel, rank));
         const int64_t num_ranks = group->options().max_ranks, top_k = sent.top_k;
         const auto row_bytes = static_cast<size_t>(sent.row_bytes);
         *window = sent;
         auto* to_idx = const_cast<int32_t*>(window->topk_idx());
         auto* to_weights = const_cast<float*>(window->weights());
         std::copy_n(idx, sent.num_tokens * top_k, to_idx);
         std::copy_n(weight, sent.num_tokens * top_k, to_weights);
         int64_t remote = 0, local = 0;
         for (int64_t t = 0; t < sent.num_tokens; ++t) {
           const int32_t* choices = idx + t * top_k;
           bool has_expert = false;
           for (int64_t k = 0; k < top_k; ++k) {
             const int64_t to = RankOf(choices[k], slots_per_rank);
             if (to < 0) continue;
             if (to >= num_ranks || !group->AreConnected(rank, to)) {
               return "token " + std::to_string(t) + " is for physical expert " +
                      std::to_string(choices[k]) + " of rank " + std::to_string(to) +
                      (to >= num_ranks ? ", but the group has " + std::to_string(num_ranks) +
                                             " ranks"
                       : group->IsActive(to) ? ", but its own rank is not active"
                                             : ", which is not active");
             }
             has_expert = true;
             if (by_expert || !IsRepeated(choices, k, slots_per_rank)) ++(to == rank ? local : remote);
           }
           if (!has_expert) continue;
           std::memcpy(const_cast<char*>(window->row(t)), rows + t * row_bytes, row_bytes);
         }
         *remote_rows = remote;
         group->counters.remote_rows += remote;
         group->counters.remote_bytes += remote * sent.row_bytes;
         group->counters.local_rows += local;
         *to_token = 0;
         return "";
       },
       Completing(std::move(promise))},
      [=] { return *remote_rows * sent.row_bytes; });
  return future;
}

// What every active rank sent, checked against what this rank's program has room for.
std::string Received(const EpGroup& group, int64_t channel, int64_t rank, int64_t tokens_per_rank,
                     int64_t top_k, int64_t row_bytes, const Sent** sent) {
  *sent = reinterpret_cast<const Sent*>(group.Window(channel, rank));
  const Sent& got = **sent;
  if (got.num_tokens != tokens_per_rank) {
    return "rank " + std::to_string(rank) + " dispatched " + std::to_string(got.num_tokens) +
           " tokens and this rank " + std::to_string(tokens_per_rank) +
           ": all ranks must run steps of one size";
  }
  if (got.top_k != top_k || got.row_bytes != row_bytes) {
    return "rank " + std::to_string(rank) + " dispatched rows of " +
           std::to_string(got.row_bytes) + " bytes for " + std::to_string(got.top_k) +
           " experts each, this rank expects " + std::to_string(row_bytes) + " and " +
           std::to_string(top_k);
  }
  return "";
}

Future NormalDispatchFinish(int32_t device, Int32s<1> token, AnyBuffer, int64_t channel,
                            int64_t slots_per_rank, Out<AnyBuffer> x, Out<Int32s<2>> group_idx, Out<Floats<2>> weights,
                            Out<Int32s<1>> source) {
  Place place(device, channel);
  if (!place.error.empty()) return Failed(place.error);
  EpGroup* group = place.group.get();
  (void)token;  // only orders the calls
  const int64_t rank = place.rank, num_ranks = group->options().max_ranks;
  const int64_t max_rows = source->dimensions()[0], top_k = group_idx->dimensions()[1];
  const int64_t row_bytes = RowBytes(*x);
  char* to_rows = static_cast<char*>(x->untyped_data());
  int32_t* to_idx = group_idx->typed_data();
  float* to_weights = weights->typed_data();
  int32_t* to_source = source->typed_data();
  Promise promise;
  Future future(promise);
  group->Finish({channel, rank,
                 [=]() mutable -> std::string {
                   const int64_t tokens_per_rank = max_rows / num_ranks;
                   const int64_t first = rank * slots_per_rank;
                   int64_t row = 0;
                   for (int64_t from = 0; from < num_ranks; ++from) {
                     if (!group->AreConnected(rank, from)) continue;
                     const Sent* sent;
                     if (auto error = Received(*group, channel, from, tokens_per_rank, top_k,
                                               row_bytes, &sent);
                         !error.empty()) {
                       return error;
                     }
                     // A row is written before it is known whether it stays.
                     for (int64_t t = 0; t < sent->num_tokens && row < max_rows; ++t) {
                       bool is_mine = false;
                       for (int64_t k = 0; k < top_k; ++k) {
                         const int64_t slot = sent->topk_idx()[t * top_k + k] - first;
                         const bool is_here = 0 <= slot && slot < slots_per_rank;
                         to_idx[row * top_k + k] = is_here ? static_cast<int32_t>(slot) : -1;
                         is_mine |= is_here;
                       }
                       if (!is_mine) continue;
                       std::copy_n(sent->weights() + t * top_k, top_k, to_weights + row * top_k);
                       std::memcpy(to_rows + row * row_bytes, sent->row(t), row_bytes);
                       to_source[row++] = static_cast<int32_t>(from * tokens_per_rank + t);
                     }
                   }
                   std::fill(to_idx + row * top_k, to_idx + max_rows * top_k, -1);
                   std::fill(to_weights + row * top_k, to_weights + max_rows * top_k, 0.0f);
                   std::fill(to_source + row, to_source + max_rows, -1);
                   return "";
                 },
                 Completing(std::move(promise))});
  return future;
}

Future LowLatencyDispatchFinish(int32_t device, Int32s<1> token, AnyBuffer, int64_t channel,
                                int64_t tokens_per_rank, int64_t top_k, Out<AnyBuffer> x,
                                Out<Int32s<1>> counts, Out<Int32s<2>> source) {
  Place place(device, channel);
  if (!place.error.empty()) return Failed(place.error);
  EpGroup* group = place.group.get();
  (void)token;  // only orders the calls
  const int64_t rank = place.rank;
  const int64_t num_slots = x->dimensions()[0], capacity = x->dimensions()[1];
  const int64_t row_bytes = RowBytes(*x);
  char* to_rows = static_cast<char*>(x->untyped_data());
  int32_t* count = counts->typed_data();
  int32_t* to_source = source->typed_data();
  Promise promise;
  Future future(promise);
  group->Finish({channel, rank,
                 [=]() mutable -> std::string {
                   const int64_t first = rank * num_slots;
                   std::fill_n(count, num_slots, 0);
                   for (int64_t from = 0; from < group->options().max_ranks; ++from) {
                     if (!group->AreConnected(rank, from)) continue;
                     const Sent* sent;
                     if (auto error = Received(*group, channel, from, tokens_per_rank, top_k,
                                               row_bytes, &sent);
                         !error.empty()) {
                       return error;
                     }
                     for (int64_t i = 0; i < sent->num_tokens * top_k; ++i) {
                       const int64_t slot = sent->topk_idx()[i] - first;
                       if (slot < 0 || slot >= num_slots) continue;
                       const int64_t position = count[slot]++;
                       if (position >= capacity) {
                         return "more than " + std::to_string(capacity) +
                                " tokens for physical expert " + std::to_string(first + slot);
                       }
                       const int64_t row = slot * capacity + position, t = i / top_k;
                       std::memcpy(to_rows + row * row_bytes, sent->row(t), row_bytes);
                       to_source[row] =
                           static_cast<int32_t>(from * tokens_per_rank * top_k + i);
                     }
                   }
                   for (int64_t slot = 0; slot < num_slots; ++slot) {
                     std::fill(to_source + slot * capacity + count[slot],
                               to_source + (slot + 1) * capacity, -1);
                   }
                   return "";
                 },
                 Completing(std::move(promise))});
  return future;
}

// Sends rows to where they came from: `rows_per_rank` sources are of one rank.
Future CombineStart(int32_t device, AnyBuffer rows, AnyBuffer source, int64_t channel,
                    int64_t rows_per_rank, bool by_expert, Out<Int32s<1>> token) {
  Place place(device, channel);
  if (!place.error.empty()) return Failed(place.error);
  EpGroup* group = place.group.get();
  const int64_t rank = place.rank, row_bytes = RowBytes(rows);
  const int64_t num_rows = static_cast<int64_t>(source.element_count());
  if (static_cast<int64_t>(rows.size_bytes()) != num_rows * row_bytes ||
      source.element_type() != DataType::S32) {
    return Failed("combine: rows " + ToString(rows) + " and sources " + ToString(source) +
                  " do not fit together");
  }
  // In normal mode each rank has a part of the window of its own.
  const int64_t start = by_expert ? 0 : rank * rows_per_rank * row_bytes;
  const int64_t num_bytes =
      rows_per_rank * row_bytes * (by_expert ? 1 : group->options().max_ranks);
  if (num_bytes > group->options().window_bytes) {
    return Failed("combine of rows " + ToString(rows) + " needs " + std::to_string(num_bytes) +
                  " bytes, the group's windows have " +
                  std::to_string(group->options().window_bytes) +
                  ": bootstrap it for more tokens or a larger hidden size");
  }
  const int32_t* from = static_cast<const int32_t*>(source.untyped_data());
  const char* data = static_cast<const char*>(rows.untyped_data());
  int32_t* to_token = token->typed_data();
  auto remote_rows = std::make_shared<int64_t>(0);
  Promise promise;
  Future future(promise);
  group->Start({channel, rank,
                [=]() mutable -> std::string {
                  int64_t remote = 0, local = 0;
                  for (int64_t i = 0; i < num_rows; ++i) {
                    if (from[i] < 0) continue;
                    const int64_t home = from[i] / rows_per_rank;
                    if (home >= group->options().max_ranks) {
                      return "combine: source " + std::to_string(from[i]) + " is of no rank";
                    }
                    std::memcpy(group->Window(channel, home) + start +
                                    from[i] % rows_per_rank * row_bytes,
                                data + i * row_bytes, row_bytes);
                    ++(home == rank ? local : remote);
                  }
                  *remote_rows = remote;
                  group->counters.remote_rows += remote;
                  group->counters.remote_bytes += remote * row_bytes;
                  group->counters.local_rows += local;
                  *to_token = 0;
                  return "";
                },
                Completing(std::move(promise))},
               [=] { return *remote_rows * row_bytes; });
  return future;
}

struct Totals {
  const int32_t* topk_idx;
  const float* weights;
  void* y;
  int64_t num_tokens, top_k, hidden, num_ranks, slots_per_rank;
  bool by_expert;
};

template <class T>
void AddUp(const char* window, const Totals& totals) {
  const auto [topk_idx, weights, y, num_tokens, top_k, hidden, num_ranks, slots_per_rank,
              by_expert] = totals;
  const T* rows = reinterpret_cast<const T*>(window);
  std::vector<uint8_t> comes_from(num_ranks);
  for (int64_t t = 0; t < num_tokens; ++t) {
    const int32_t* choices = topk_idx + t * top_k;
    T* to = static_cast<T*>(y) + t * hidden;
    if (by_expert) {
      const T* of_token = rows + t * top_k * hidden;
      const float* weight = weights + t * top_k;
      SumRows(
          top_k, hidden,
          [=, h = hidden](int64_t k) { return choices[k] < 0 ? nullptr : of_token + k * h; },
          [=](int64_t k) { return weight[k]; }, to);
      continue;
    }
    std::fill(comes_from.begin(), comes_from.end(), 0);
    for (int64_t k = 0; k < top_k; ++k) {
      if (const int64_t from = RankOf(choices[k], slots_per_rank); from >= 0) comes_from[from] = 1;
    }
    const T* of_token = rows + t * hidden;
    const int64_t stride = num_tokens * hidden;
    SumRows(
        num_ranks, hidden,
        [&](int64_t from) { return comes_from[from] ? of_token + from * stride : nullptr; },
        [](int64_t) { return 1.0f; }, to);
  }
}

Future CombineFinish(int32_t device, Int32s<1> token, AnyBuffer, Int32s<2> topk_idx, Floats<2> weights,
                     int64_t channel, int64_t slots_per_rank, bool by_expert, Out<AnyBuffer> y) {
  Place place(device, channel);
  if (!place.error.empty()) return Failed(place.error);
  const DataType type = y->element_type();
  if (type != DataType::F32 && type != DataType::BF16) {
    return Failed("combine: dtype must be float32 or bfloat16");
  }
  EpGroup* group = place.group.get();
  (void)token;  // only orders the calls
  const int64_t rank = place.rank;
  const Totals totals = {topk_idx.typed_data(),   weights.typed_data(),
                         y->untyped_data(),       y->dimensions()[0],
                         topk_idx.dimensions()[1], y->dimensions()[1],
                         group->options().max_ranks, slots_per_rank, by_expert};
  Promise promise;
  Future future(promise);
  group->Finish({channel, rank,
                 [=]() -> std::string {
                   const char* window = group->Window(channel, rank);
                   if (type == DataType::F32) {
                     AddUp<float>(window, totals);
                   } else {
                     AddUp<uint16_t>(window, totals);
                   }
                   return "";
                 },
                 Completing(std::move(promise))});
  return future;
}

Error Rank(int32_t device, Out<Int32s<0>> rank) {
  Place place(device, 0);
  JAXMOE_REQUIRE(place.error.empty(), place.error);
  *rank->typed_data() = static_cast<int32_t>(place.rank);
  return Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(kEpRank, Rank,
                              Ffi::Bind().Ctx<ffi::DeviceOrdinal>().Ret<Int32s<0>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(kEpDispatchStart, DispatchStart,
                              Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<AnyBuffer>()
                                  .Arg<Int32s<2>>()
                                  .Arg<Floats<2>>()
                                  .Arg<AnyBuffer>()
                                  .Attr<int64_t>("channel")
                                  .Attr<int64_t>("slots_per_rank")
                                  .Attr<bool>("by_expert")
                                  .Ret<Int32s<1>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(kEpNormalDispatchFinish, NormalDispatchFinish,
                              Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<Int32s<1>>()
                                  .Arg<AnyBuffer>()
                                  .Attr<int64_t>("channel")
                                  .Attr<int64_t>("slots_per_rank")
                                  .Ret<AnyBuffer>()
                                  .Ret<Int32s<2>>()
                                  .Ret<Floats<2>>()
                                  .Ret<Int32s<1>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(kEpLowLatencyDispatchFinish, LowLatencyDispatchFinish,
                              Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<Int32s<1>>()
                                  .Arg<AnyBuffer>()
                                  .Attr<int64_t>("channel")
                                  .Attr<int64_t>("tokens_per_rank")
                                  .Attr<int64_t>("top_k")
                                  .Ret<AnyBuffer>()
                                  .Ret<Int32s<1>>()
                                  .Ret<Int32s<2>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(kEpCombineStart, CombineStart,
                              Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>()
                                  .Attr<int64_t>("channel")
                                  .Attr<int64_t>("rows_per_rank")
                                  .Attr<bool>("by_expert")
                                  .Ret<Int32s<1>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(kEpCombineFinish, CombineFinish,
                              Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<Int32s<1>>()
                                  .Arg<AnyBuffer>()
                                  .Arg<Int32s<2>>()
                                  .Arg<Floats<2>>()
                                  .Attr<int64_t>("channel")
                                  .Attr<int64_t>("slots_per_rank")
                                  .Attr<bool>("by_expert")
                                  .Ret<AnyBuffer>());

}  // namespace jaxmoe
