// Handlers of `custom_calls/attention`: pages are read where they lie, and only the entries that a
// token attends to.
#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "handlers.h"
#include "kernels.h"
#include "parallel.h"

namespace jaxmoe {
namespace {

// Below this a thread costs more than it saves.
constexpr int64_t kMinParallelMultiplyAdds = 1 << 19;

constexpr float kMasked = -1e30f;  // as in the reference

template <class T>
const T* Data(const AnyBuffer& buffer) {
  return static_cast<const T*>(buffer.untyped_data());
}

void Widen(const float* from, float* to, int64_t n) { std::copy_n(from, n, to); }

void Widen(const uint16_t* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
    std::memcpy(to + i, &bits, sizeof(bits));
  }
}

template <class Work>
void RunUnits(ThreadPool& pool, int64_t num_units, int64_t multiply_adds, Work work) {
  if (multiply_adds < kMinParallelMultiplyAdds) {
    for (int64_t i = 0; i < num_units; ++i) work(i);
  } else {
    ParallelFor(pool, num_units, work);
  }
}

// The softmax-weighted sums of some rows, which meet their keys and values a page at a time.
template <class T>
class OnlineSoftmax {
 public:
  OnlineSoftmax(int64_t rows, int64_t features)
      : features_(features),
        maximum_(rows, kMasked),
        total_(rows, 0.0f),
        sums_(rows * features, 0.0f),
        shrink_(rows) {}

  // Row r, the i-th of `scores`, sees the first `visible[i]` of the scores and values.
  void Add(int64_t row, Rows<float> scores, Rows<const T> values, float scale,
           const int64_t* visible, int64_t rows) {
    float* shrink = shrink_.data() + row;
    for (int64_t i = 0; i < rows; ++i) {
      shrink[i] = kernels_.weigh(scores.Skip(i).data, visible[i], scale, &maximum_[row + i],
                                 &total_[row + i]);
    }
    // Rows that see as much share the loads of the values; what a row does not see it never reads.
    const Rows<float> sums = {sums_.data() + row * features_, features_};
    for (int64_t i = 0, size; i < rows; i += size) {
      for (size = 1; i + size < rows && visible[i + size] == visible[i];) ++size;
      if (visible[i] == 0) continue;
      kernels_.accumulate({scores.Skip(i).data, scores.stride}, values, shrink + i, sums.Skip(i),
                          size, features_, visible[i]);
    }
  }

  void Write(int64_t row, T* to) const {
    const float total = total_[row];
    kernels_.scale(sums_.data() + row * features_, total > 0 || total != total ? 1 / total : 0.0f,
                   to, features_);
  }

 private:
  const AttentionKernels<T> kernels_ = BestAttentionKernels<T>();
  const int64_t features_;
  std::vector<float> maximum_, total_, sums_, shrink_;
};

std::string BadPage(const char* op, int32_t page, int64_t num_pages) {
  return std::string(op) + ": page " + std::to_string(page) + " is not one of the " +
         std::to_string(num_pages) + " pages";
}

// ---- decode ----

template <class T>
Error Decode(ThreadPool& pool, const AnyBuffer& q_latent, const AnyBuffer& q_rope,
             const AnyBuffer& pages, const Int32s<2>& page_table, const Int32s<1>& lengths,
             float scale, AnyBuffer& out) {
  constexpr int64_t kHeads = 16;  // of one unit: few enough to spread, enough to share the loads
  const auto qs = q_latent.dimensions(), ps = pages.dimensions();
  const int64_t batch = qs[0], num_heads = qs[1], rank = qs[2], rope = q_rope.dimensions()[2];
  const int64_t page_size = ps[1], latent = ps[2], table_width = page_table.dimensions()[1];
  const int32_t* table = page_table.typed_data();
  const int32_t* length = lengths.typed_data();

  int64_t num_entries = 0;
  for (int64_t b = 0; b < batch; ++b) {
    JAXMOE_REQUIRE(length[b] <= table_width * page_size,
                   "mla_decode: length " + std::to_string(length[b]) + " needs more pages than " +
                       std::to_string(table_width));
    for (int64_t w = 0; w * page_size < length[b]; ++w) {
      const int32_t page = table[b * table_width + w];
      JAXMOE_REQUIRE(page >= 0 && page < ps[0], BadPage("mla_decode", page, ps[0]));
    }
    num_entries += std::max(length[b], 0);
  }

  const auto dot = BestKernels<T, float>().dot;
  const int64_t head_blocks = (num_heads + kHeads - 1) / kHeads;
  auto work = [&](int64_t unit) {
    const int64_t b = unit / head_blocks, first = unit % head_blocks * kHeads;
    const int64_t heads = std::min(kHeads, num_heads - first);
    const int64_t row = b * num_heads + first;
    std::vector<T> q(heads * latent);
    for (int64_t n = 0; n < heads; ++n) {
      std::copy_n(Data<T>(q_latent) + (row + n) * rank, rank, q.data() + n * latent);
      std::copy_n(Data<T>(q_rope) + (row + n) * rope, rope, q.data() + n * latent + rank);
    }
    std::vector<float> scores(heads * page_size);
    OnlineSoftmax<T> softmax(heads, rank);
    for (int64_t w = 0; w * page_size < length[b]; ++w) {
      const int64_t page = table[b * table_width + w];
      const int64_t size = std::min(page_size, length[b] - w * page_size);
      const Rows<const T> entries = {Data<T>(pages) + page * page_size * latent, latent};
      dot({q.data(), latent}, entries, {scores.data(), page_size}, heads, size, latent);
      int64_t visible[kHeads];
      std::fill_n(visible, heads, size);
      softmax.Add(0, {scores.data(), page_size}, entries, scale, visible, heads);
    }
    for (int64_t n = 0; n < heads; ++n) {
      softmax.Write(n, static_cast<T*>(out.untyped_data()) + (row + n) * rank);
    }
  };
  RunUnits(pool, batch * head_blocks, num_entries * num_heads * (latent + rank), work);
  return Error::Success();
}

Error RunDecode(ThreadPool pool, AnyBuffer q_latent, AnyBuffer q_rope, AnyBuffer pages,
                Int32s<2> page_table, Int32s<1> lengths, float scale, Out<AnyBuffer> out) {
  const auto qs = q_latent.dimensions(), rs = q_rope.dimensions(), ps = pages.dimensions();
  const auto os = out->dimensions();
  JAXMOE_REQUIRE(qs.size() == 3 && rs.size() == 3 && ps.size() == 3 && os.size() == 3 &&
                     rs[0] == qs[0] && rs[1] == qs[1] && ps[2] == qs[2] + rs[2] &&
                     std::equal(qs.begin(), qs.end(), os.begin()) &&
                     page_table.dimensions()[0] == qs[0] && lengths.dimensions()[0] == qs[0],
                 "mla_decode: q_latent [B, N, rank], q_rope [B, N, rope], pages [pages, page_size, "
                 "rank + rope], page_table [B, W], lengths [B] and the result [B, N, rank] do not "
                 "fit together: q_latent " + ToString(q_latent) + ", q_rope " + ToString(q_rope) +
                     ", pages " + ToString(pages) + ", page_table " + ToString(page_table));
  const DataType dtype = q_latent.element_type();
  JAXMOE_REQUIRE(q_rope.element_type() == dtype && pages.element_type() == dtype &&
                     out->element_type() == dtype,
                 "mla_decode: queries, pages and the result must have one dtype");
  if (dtype == DataType::F32) {
    return Decode<float>(pool, q_latent, q_rope, pages, page_table, lengths, scale, *out);
  }
  if (dtype == DataType::BF16) {
    return Decode<uint16_t>(pool, q_latent, q_rope, pages, page_table, lengths, scale, *out);
  }
  return Error::InvalidArgument("mla_decode: dtype must be float32 or bfloat16");
}

// ---- prefill ----

struct PrefillArguments {
  AnyBuffer q_nope, q_rope, pages, w_key, w_value;
  Int32s<1> positions, request, page_ids, page_request, page_start;
  int64_t num_pages;
  float scale;
};

// Tokens [start, start + size), neighbours of one request.
struct Run {
  int64_t start;
  int64_t size;
  int32_t request;
};

// One head of one run: every page is expanded into keys and values once, then meets all tokens.
template <class T>
void PrefillRun(const PrefillArguments& a, const Run& run, int64_t head, T* out) {
  constexpr int64_t kBlock = 16;  // tokens whose scores are alive at once
  const auto qs = a.q_nope.dimensions(), ps = a.pages.dimensions();
  const int64_t num_heads = qs[1], nope = qs[2], rope = a.q_rope.dimensions()[2];
  const int64_t page_size = ps[1], latent = ps[2], rank = latent - rope;
  const int64_t v_dim = a.w_value.dimensions()[1], key_dim = nope + rope;
  const int32_t* positions = a.positions.typed_data() + run.start;
  const int64_t last = *std::max_element(positions, positions + run.size);

  const Rows<const T> w_key = {Data<T>(a.w_key) + head * nope * rank, rank};
  const Rows<const T> w_value = {Data<T>(a.w_value) + head * v_dim * rank, rank};
  std::vector<float> q(run.size * key_dim), scores(kBlock * page_size);
  std::vector<float> keys(page_size * key_dim), values(page_size * v_dim);
  for (int64_t t = 0; t < run.size; ++t) {
    const int64_t row = (run.start + t) * num_heads + head;
    Widen(Data<T>(a.q_nope) + row * nope, q.data() + t * key_dim, nope);
    Widen(Data<T>(a.q_rope) + row * rope, q.data() + t * key_dim + nope, rope);
  }

  const auto expand = BestKernels<T, float>().dot;
  const auto dot = BestKernels<float, float>().dot;
  OnlineSoftmax<float> softmax(run.size, v_dim);
  for (int64_t w = 0; w < a.num_pages; ++w) {
    const int64_t start = a.page_start.typed_data()[w];
    if (a.page_request.typed_data()[w] != run.request || start > last) continue;
    const int64_t page = a.page_ids.typed_data()[w];
    const Rows<const T> entries = {Data<T>(a.pages) + page * page_size * latent, latent};
    const int64_t size = std::min(page_size, last - start + 1);
    expand(entries, w_key, {keys.data(), key_dim}, size, nope, rank);
    expand(entries, w_value, {values.data(), v_dim}, size, v_dim, rank);
    for (int64_t s = 0; s < size; ++s) {
      Widen(entries.Skip(s, rank).data, keys.data() + s * key_dim + nope, rope);
    }
    for (int64_t t = 0; t < run.size; t += kBlock) {
      const int64_t tokens = std::min(kBlock, run.size - t);
      int64_t visible[kBlock], most = 0;
      for (int64_t i = 0; i < tokens; ++i) {
        visible[i] = std::clamp<int64_t>(positions[t + i] - start + 1, 0, page_size);
        most = std::max(most, visible[i]);
      }
      if (most == 0) continue;
      dot({q.data() + t * key_dim, key_dim}, {keys.data(), key_dim}, {scores.data(), page_size},
          tokens, most, key_dim);
      softmax.Add(t, {scores.data(), page_size}, {values.data(), v_dim}, a.scale, visible, tokens);
    }
  }

  std::vector<float> result(v_dim);
  for (int64_t t = 0; t < run.size; ++t) {
    softmax.Write(t, result.data());
    BestAttentionKernels<T>().scale(
        result.data(), 1.0f, out + ((run.start + t) * num_heads + head) * v_dim, v_dim);
  }
}

template <class T>
Error Prefill(ThreadPool& pool, const PrefillArguments& a, AnyBuffer& out) {
  // Enough tokens to make up for expanding the pages, few enough for their sums to stay in cache.
  constexpr int64_t kRunTokens = 1024;
  const auto qs = a.q_nope.dimensions();
  const int64_t num_tokens = qs[0], num_heads = qs[1], v_dim = a.w_value.dimensions()[1];
  const int64_t pool_size = a.pages.dimensions()[0], page_size = a.pages.dimensions()[1];
  const int64_t rank = a.w_key.dimensions()[2];
  const int32_t* request = a.request.typed_data();
  T* to = static_cast<T*>(out.untyped_data());

  JAXMOE_REQUIRE(a.num_pages <= a.page_ids.dimensions()[0],
                 "mla_prefill: num_pages " + std::to_string(a.num_pages) + " is more than " +
                     std::to_string(a.page_ids.dimensions()[0]));
  int64_t num_listed = 0;
  for (int64_t w = 0; w < a.num_pages; ++w) {
    if (a.page_request.typed_data()[w] < 0) continue;
    const int32_t page = a.page_ids.typed_data()[w];
    JAXMOE_REQUIRE(page >= 0 && page < pool_size, BadPage("mla_prefill", page, pool_size));
    ++num_listed;
  }
  std::vector<Run> runs;
  for (int64_t t = 0, size; t < num_tokens; t += size) {
    for (size = 1; t + size < num_tokens && request[t + size] == request[t];) ++size;
    if (request[t] < 0) {
      std::fill_n(to + t * num_heads * v_dim, size * num_heads * v_dim, T{});
      continue;
    }
    size = std::min(size, kRunTokens);
    runs.push_back({t, size, request[t]});
  }

  const int64_t multiply_adds =
      num_listed * page_size * num_heads * (qs[2] + v_dim) * rank;
  RunUnits(pool, static_cast<int64_t>(runs.size()) * num_heads, multiply_adds, [&](int64_t unit) {
    PrefillRun<T>(a, runs[unit / num_heads], unit % num_heads, to);
  });
  return Error::Success();
}

Error RunPrefill(ThreadPool pool, AnyBuffer q_nope, AnyBuffer q_rope, AnyBuffer pages,
                 AnyBuffer w_key, AnyBuffer w_value, Int32s<1> positions, Int32s<1> request,
                 Int32s<1> page_ids, Int32s<1> page_request, Int32s<1> page_start,
                 Int32s<0> num_pages, float scale, Out<AnyBuffer> out) {
  const auto qs = q_nope.dimensions(), rs = q_rope.dimensions(), ps = pages.dimensions();
  const auto ks = w_key.dimensions(), vs = w_value.dimensions(), os = out->dimensions();
  JAXMOE_REQUIRE(qs.size() == 3 && rs.size() == 3 && ps.size() == 3 && ks.size() == 3 &&
                     vs.size() == 3 && os.size() == 3 && rs[0] == qs[0] && rs[1] == qs[1] &&
                     ks[0] == qs[1] && ks[1] == qs[2] && vs[0] == qs[1] && vs[2] == ks[2] &&
                     ps[2] == ks[2] + rs[2] && os[0] == qs[0] && os[1] == qs[1] && os[2] == vs[1],
                 "mla_prefill: q_nope [T, N, nope], q_rope [T, N, rope], pages [pages, page_size, "
                 "rank + rope], w_key [N, nope, rank], w_value [N, v, rank] and the result "
                 "[T, N, v] do not fit together: q_nope " + ToString(q_nope) + ", q_rope " +
                     ToString(q_rope) + ", pages " + ToString(pages) + ", w_key " +
                     ToString(w_key) + ", w_value " + ToString(w_value));
  JAXMOE_REQUIRE(positions.dimensions()[0] == qs[0] && request.dimensions()[0] == qs[0],
                 "mla_prefill: positions and request must have one number for each token");
  JAXMOE_REQUIRE(page_request.dimensions()[0] == page_ids.dimensions()[0] &&
                     page_start.dimensions()[0] == page_ids.dimensions()[0],
                 "mla_prefill: page_request and page_start must be as long as page_ids");
  const DataType dtype = q_nope.element_type();
  for (const AnyBuffer* buffer : {&q_rope, &pages, &w_key, &w_value, &*out}) {
    JAXMOE_REQUIRE(buffer->element_type() == dtype,
                   "mla_prefill: queries, pages, weights and the result must have one dtype");
  }
  const PrefillArguments arguments = {
      q_nope,    q_rope,  pages,    w_key,        w_value,    positions,
      request,   page_ids, page_request, page_start, *num_pages.typed_data(), scale};
  if (dtype == DataType::F32) return Prefill<float>(pool, arguments, *out);
  if (dtype == DataType::BF16) return Prefill<uint16_t>(pool, arguments, *out);
  return Error::InvalidArgument("mla_prefill: dtype must be float32 or bfloat16");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(kMlaDecode, RunDecode,
                              Ffi::Bind()
                                  .Ctx<ThreadPool>()
                                  .Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>()
                                  .Arg<Int32s<2>>()
                                  .Arg<Int32s<1>>()
                                  .Attr<float>("scale")
                                  .Ret<AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(kMlaPrefill, RunPrefill,
                              Ffi::Bind()
                                  .Ctx<ThreadPool>()
                                  .Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>()
                                  .Arg<Int32s<1>>()
                                  .Arg<Int32s<1>>()
                                  .Arg<Int32s<1>>()
                                  .Arg<Int32s<1>>()
                                  .Arg<Int32s<1>>()
                                  .Arg<Int32s<0>>()
                                  .Attr<float>("scale")
                                  .Ret<AnyBuffer>());

}  // namespace jaxmoe
