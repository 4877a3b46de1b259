// CPU handlers of grouped_gemm and permute, and the Python module that hands them out.
//
// Handlers keep no state and trust no operand: what depends on shapes and types alone is an error
// when it is wrong, and counts and indices can never lead outside a buffer. Rows that no group owns
// are neither read nor written.
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "nanobind/nanobind.h"

#include "ffi.h"
#include "gemm_kernel.h"
#include "parallel.h"

namespace jaxmoe {
namespace {

namespace nb = ::nanobind;

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

// Below these a thread costs more than it saves.
constexpr int64_t kMinParallelMultiplyAdds = 1 << 21;
constexpr int64_t kMinParallelBytes = 1 << 20;

// A block of x rows stays in the L2 cache while the weights stream past it.
constexpr int64_t kBlockBytes = 128 << 10;
constexpr int64_t kBlockCols = 128;

// Rows [start, start + size) of x and y belong to one group.
struct RowRange {
  int64_t start;
  int64_t size;
};

struct GemmUnit {
  int64_t group;
  int64_t row;
  int64_t num_rows;
  int64_t col;
  int64_t num_cols;
};

template <class T>
Gemm<T> ChooseGemm();

template <>
Gemm<float> ChooseGemm<float>() {
#ifdef JAXMOE_X86
  if (__builtin_cpu_supports("avx512f")) return avx512::GemmF32;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2::GemmF32;
#endif
  return baseline::GemmF32;
}

template <>
Gemm<uint16_t> ChooseGemm<uint16_t>() {
#ifdef JAXMOE_X86
  if (__builtin_cpu_supports("avx512f")) return avx512::GemmBF16;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2::GemmBF16;
#endif
  return baseline::GemmBF16;
}

// x [.., K] and y [.., N] as plain rows, weights [e, N, K].
template <class T>
void RunGroupedGemm(ThreadPool& pool, const std::vector<RowRange>& groups, const AnyBuffer& x,
                    const AnyBuffer& weights, AnyBuffer& y) {
  const int64_t cols = weights.dimensions()[1];
  const int64_t depth = weights.dimensions()[2];
  const T* x_data = static_cast<const T*>(x.untyped_data());
  const T* w_data = static_cast<const T*>(weights.untyped_data());
  T* y_data = static_cast<T*>(y.untyped_data());

  const int64_t row_bytes = std::max<int64_t>(1, depth * sizeof(T));
  const int64_t block_rows = std::clamp<int64_t>(kBlockBytes / row_bytes / 12 * 12, 12, 96);

  std::vector<GemmUnit> units;
  int64_t num_rows = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    num_rows += groups[g].size;
    for (int64_t r = 0; r < groups[g].size; r += block_rows) {
      for (int64_t c = 0; c < cols; c += kBlockCols) {
        units.push_back({static_cast<int64_t>(g), groups[g].start + r,
                         std::min(block_rows, groups[g].size - r), c,
                         std::min(kBlockCols, cols - c)});
      }
    }
  }

  const Gemm<T> gemm = ChooseGemm<T>();
  auto work = [&](int64_t i) {
    const GemmUnit& unit = units[i];
    gemm(x_data + unit.row * depth, w_data + (unit.group * cols + unit.col) * depth,
         y_data + unit.row * cols + unit.col, unit.num_rows, unit.num_cols, depth, cols);
  };
  const int64_t num_units = static_cast<int64_t>(units.size());
  // A row of x with nothing to multiply still writes its zeros, hence the one.
  if (num_rows * cols * std::max<int64_t>(1, depth) < kMinParallelMultiplyAdds) {
    for (int64_t i = 0; i < num_units; ++i) work(i);
  } else {
    ParallelFor(pool, num_units, work);
  }
}

Error GroupedGemm(ThreadPool& pool, const std::vector<RowRange>& groups, const AnyBuffer& x,
                  const AnyBuffer& weights, AnyBuffer& y) {
  const DataType dtype = x.element_type();
  JAXMOE_REQUIRE(weights.element_type() == dtype && y.element_type() == dtype,
                 "grouped_gemm: x, weights and y must have one dtype");
  if (dtype == DataType::F32) {
    RunGroupedGemm<float>(pool, groups, x, weights, y);
  } else if (dtype == DataType::BF16) {
    RunGroupedGemm<uint16_t>(pool, groups, x, weights, y);
  } else {
    return Error::InvalidArgument("grouped_gemm: dtype must be float32 or bfloat16");
  }
  return Error::Success();
}

std::string NegativeCount(const char* what, int32_t value, int64_t group) {
  return std::string("grouped_gemm: ") + what + "[" + std::to_string(group) +
         "] must not be negative, got " + std::to_string(value);
}

Error GroupedGemmContiguous(ThreadPool pool, AnyBuffer x, AnyBuffer weights,
                            Int32s<1> group_sizes, int64_t alignment, Out<AnyBuffer> y) {
  const auto xs = x.dimensions(), ws = weights.dimensions(), ys = y->dimensions();
  const int64_t num_groups = group_sizes.dimensions()[0];
  JAXMOE_REQUIRE(xs.size() == 2 && ws.size() == 3 && ys.size() == 2 && ws[0] == num_groups &&
                     ws[2] == xs[1] && ys[0] == xs[0] && ys[1] == ws[1],
                 "grouped_gemm: x [M, K], weights [e, N, K], group_sizes [e] and y [M, N] do not "
                 "fit together: x " + ToString(x) + ", weights " + ToString(weights) +
                     ", group_sizes " + ToString(group_sizes) + ", y " + ToString(*y));
  JAXMOE_REQUIRE(alignment >= 1,
                 "grouped_gemm: alignment must be positive, got " + std::to_string(alignment));

  const int32_t* sizes = group_sizes.typed_data();
  const int64_t max_rows = xs[0];
  std::vector<RowRange> groups(num_groups);
  int64_t start = 0;
  for (int64_t g = 0; g < num_groups; ++g) {
    JAXMOE_REQUIRE(sizes[g] >= 0, NegativeCount("group_sizes", sizes[g], g));
    start = std::min(start, max_rows);
    groups[g] = {start, std::min<int64_t>(sizes[g], max_rows - start)};
    // Aligned starts beyond the last row are all alike, which keeps a huge alignment from
    // overflowing the sum.
    const int64_t rest = sizes[g] % alignment;
    start += std::min<int64_t>(max_rows, sizes[g] + (rest ? alignment - rest : 0));
  }
  return GroupedGemm(pool, groups, x, weights, *y);
}

Error GroupedGemmMasked(ThreadPool pool, AnyBuffer x, AnyBuffer weights, Int32s<1> counts,
                        Out<AnyBuffer> y) {
  const auto xs = x.dimensions(), ws = weights.dimensions(), ys = y->dimensions();
  const int64_t num_groups = counts.dimensions()[0];
  JAXMOE_REQUIRE(xs.size() == 3 && ws.size() == 3 && ys.size() == 3 && xs[0] == num_groups &&
                     ws[0] == num_groups && ws[2] == xs[2] && ys[0] == num_groups &&
                     ys[1] == xs[1] && ys[2] == ws[1],
                 "grouped_gemm: x [e, C, K], weights [e, N, K], counts [e] and y [e, C, N] do not "
                 "fit together: x " + ToString(x) + ", weights " + ToString(weights) +
                     ", counts " + ToString(counts) + ", y " + ToString(*y));

  const int64_t capacity = xs[1];
  std::vector<RowRange> groups(num_groups);
  for (int64_t g = 0; g < num_groups; ++g) {
    const int32_t count = counts.typed_data()[g];
    JAXMOE_REQUIRE(count >= 0, NegativeCount("counts", count, g));
    groups[g] = {g * capacity, std::min<int64_t>(count, capacity)};
  }
  return GroupedGemm(pool, groups, x, weights, *y);
}

void CopyRows(ThreadPool& pool, const AnyBuffer& x, const Int32s<2>& row_of, AnyBuffer& rows) {
  const int64_t num_tokens = row_of.dimensions()[0], top_k = row_of.dimensions()[1];
  const int64_t row_bytes = x.dimensions()[1] * ffi::ByteWidth(x.element_type());
  const char* from = static_cast<const char*>(x.untyped_data());
  char* to = static_cast<char*>(rows.untyped_data());
  const int32_t* row = row_of.typed_data();
  if (row_bytes == 0) return;

  const bool is_parallel = num_tokens * top_k * row_bytes >= kMinParallelBytes;
  const int64_t block = is_parallel ? 64 : std::max<int64_t>(1, num_tokens);
  ParallelFor(pool, (num_tokens + block - 1) / block, [=](int64_t i) {
    for (int64_t t = i * block; t < std::min(num_tokens, (i + 1) * block); ++t) {
      for (int64_t k = 0; k < top_k; ++k) {
        const int32_t target = row[t * top_k + k];
        if (target >= 0) std::memcpy(to + target * row_bytes, from + t * row_bytes, row_bytes);
      }
    }
  });
}

Error CheckPermute(const AnyBuffer& x, const Int32s<2>& group_idx, const Int32s<1>& sizes,
                   const Int32s<2>& row_of, const AnyBuffer& rows, size_t rows_rank) {
  const auto xs = x.dimensions(), is = group_idx.dimensions(), rs = rows.dimensions();
  JAXMOE_REQUIRE(xs.size() == 2 && is[0] == xs[0] && row_of.dimensions()[0] == is[0] &&
                     row_of.dimensions()[1] == is[1] && rs.size() == rows_rank &&
                     rs[rows_rank - 1] == xs[1] &&
                     (rows_rank == 2 || rs[0] == sizes.dimensions()[0]),
                 "permute: x [T, H], group_idx [T, K], row_of [T, K] and the rows do not fit "
                 "together: x " + ToString(x) + ", group_idx " + ToString(group_idx) +
                     ", row_of " + ToString(row_of) + ", rows " + ToString(rows));
  JAXMOE_REQUIRE(rows.element_type() == x.element_type() && ffi::ByteWidth(x.element_type()) > 0,
                 "permute: x and the rows must have one dtype of whole bytes");
  int64_t num_rows = 1;
  for (size_t i = 0; i + 1 < rows_rank; ++i) num_rows *= rs[i];
  JAXMOE_REQUIRE(is[0] * is[1] <= kMaxInt32 && num_rows <= kMaxInt32,
                 "permute: row numbers must fit int32: group_idx " + ToString(group_idx) +
                     ", rows " + ToString(rows));
  return Error::Success();
}

Error PermuteContiguous(ThreadPool pool, AnyBuffer x, Int32s<2> group_idx, int64_t alignment,
                        Out<AnyBuffer> rows, Out<Int32s<1>> group_sizes, Out<Int32s<2>> row_of) {
  if (Error error = CheckPermute(x, group_idx, *group_sizes, *row_of, *rows, 2); error.failure()) {
    return error;
  }
  JAXMOE_REQUIRE(alignment >= 1 && alignment <= kMaxInt32,
                 "permute: alignment must be positive, got " + std::to_string(alignment));
  const int64_t num_copies = group_idx.element_count();
  const int64_t num_groups = group_sizes->dimensions()[0];
  const int64_t max_rows = rows->dimensions()[0];
  const int32_t* group_of = group_idx.typed_data();
  int32_t* sizes = group_sizes->typed_data();
  int32_t* row = row_of->typed_data();

  std::fill_n(sizes, num_groups, 0);
  for (int64_t i = 0; i < num_copies; ++i) {
    if (group_of[i] >= 0 && group_of[i] < num_groups) ++sizes[group_of[i]];
  }
  std::vector<int64_t> next(num_groups);
  for (int64_t g = 0, start = 0; g < num_groups; ++g) {
    next[g] = start;
    start += (sizes[g] + alignment - 1) / alignment * alignment;
  }
  for (int64_t i = 0; i < num_copies; ++i) {
    const bool has_group = group_of[i] >= 0 && group_of[i] < num_groups;
    const int64_t target = has_group ? next[group_of[i]]++ : max_rows;
    row[i] = target < max_rows ? static_cast<int32_t>(target) : -1;
  }
  CopyRows(pool, x, *row_of, *rows);
  return Error::Success();
}

Error PermuteMasked(ThreadPool pool, AnyBuffer x, Int32s<2> group_idx, Out<AnyBuffer> rows,
                    Out<Int32s<1>> counts, Out<Int32s<2>> row_of) {
  if (Error error = CheckPermute(x, group_idx, *counts, *row_of, *rows, 3); error.failure()) {
    return error;
  }
  const int64_t num_copies = group_idx.element_count();
  const int64_t num_groups = counts->dimensions()[0];
  const int64_t capacity = rows->dimensions()[1];
  const int32_t* group_of = group_idx.typed_data();
  int32_t* count = counts->typed_data();
  int32_t* row = row_of->typed_data();

  std::fill_n(count, num_groups, 0);
  for (int64_t i = 0; i < num_copies; ++i) {
    const int64_t group = group_of[i];
    const bool has_group = group >= 0 && group < num_groups;
    const int64_t position = has_group ? count[group]++ : capacity;
    row[i] = position < capacity ? static_cast<int32_t>(group * capacity + position) : -1;
  }
  CopyRows(pool, x, *row_of, *rows);
  return Error::Success();
}

float Widen(float value) { return value; }

float Widen(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

void Narrow(float value, float* to) { *to = value; }

void Narrow(float value, uint16_t* to) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t nearest_even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  *to = static_cast<uint16_t>(value != value ? (bits >> 16) | 0x40 : nearest_even);
}

template <class T>
void RunUnpermute(ThreadPool& pool, const AnyBuffer& rows, const Int32s<2>& row_of,
                  const Floats<2>& weights, AnyBuffer& out) {
  const int64_t max_rows = rows.dimensions()[0], hidden = rows.dimensions()[1];
  const int64_t num_tokens = row_of.dimensions()[0], top_k = row_of.dimensions()[1];
  const T* from = static_cast<const T*>(rows.untyped_data());
  T* to = static_cast<T*>(out.untyped_data());
  const int32_t* row = row_of.typed_data();
  const float* weight = weights.typed_data();

  const int64_t num_bytes = num_tokens * top_k * hidden * static_cast<int64_t>(sizeof(T));
  const int64_t block = num_bytes >= kMinParallelBytes ? 64 : std::max<int64_t>(1, num_tokens);
  ParallelFor(pool, (num_tokens + block - 1) / block, [=](int64_t i) {
    constexpr int64_t kChunk = 1024;
    float sum[kChunk];
    for (int64_t t = i * block; t < std::min(num_tokens, (i + 1) * block); ++t) {
      for (int64_t h = 0; h < hidden; h += kChunk) {
        const int64_t size = std::min(kChunk, hidden - h);
        std::fill_n(sum, size, 0.0f);
        for (int64_t k = 0; k < top_k; ++k) {
          const int64_t source = row[t * top_k + k];
          if (source < 0 || source >= max_rows) continue;
          const T* values = from + source * hidden + h;
          const float scale = weight[t * top_k + k];
          for (int64_t j = 0; j < size; ++j) sum[j] += scale * Widen(values[j]);
        }
        for (int64_t j = 0; j < size; ++j) Narrow(sum[j], to + t * hidden + h + j);
      }
    }
  });
}

Error Unpermute(ThreadPool pool, AnyBuffer rows, Int32s<2> row_of, Floats<2> weights,
                Out<AnyBuffer> out) {
  const auto rs = rows.dimensions(), is = row_of.dimensions(), os = out->dimensions();
  JAXMOE_REQUIRE(rs.size() == 2 && os.size() == 2 && os[0] == is[0] && os[1] == rs[1] &&
                     weights.dimensions()[0] == is[0] && weights.dimensions()[1] == is[1],
                 "unpermute: rows [M, H], row_of [T, K], weights [T, K] and out [T, H] do not fit "
                 "together: rows " + ToString(rows) + ", row_of " + ToString(row_of) +
                     ", weights " + ToString(weights) + ", out " + ToString(*out));
  JAXMOE_REQUIRE(rows.element_type() == out->element_type(),
                 "unpermute: rows and out must have one dtype");
  if (rows.element_type() == DataType::F32) {
    RunUnpermute<float>(pool, rows, row_of, weights, *out);
  } else if (rows.element_type() == DataType::BF16) {
    RunUnpermute<uint16_t>(pool, rows, row_of, weights, *out);
  } else {
    return Error::InvalidArgument("unpermute: dtype must be float32 or bfloat16");
  }
  return Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kGroupedGemmContiguous, GroupedGemmContiguous,
                       Ffi::Bind()
                           .Ctx<ThreadPool>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<Int32s<1>>()
                           .Attr<int64_t>("alignment")
                           .Ret<AnyBuffer>());

XLA_FFI_DEFINE_HANDLER(kGroupedGemmMasked, GroupedGemmMasked,
                       Ffi::Bind()
                           .Ctx<ThreadPool>()
                           .Arg<AnyBuffer>()
                           .Arg<AnyBuffer>()
                           .Arg<Int32s<1>>()
                           .Ret<AnyBuffer>());

XLA_FFI_DEFINE_HANDLER(kPermuteContiguous, PermuteContiguous,
                       Ffi::Bind()
                           .Ctx<ThreadPool>()
                           .Arg<AnyBuffer>()
                           .Arg<Int32s<2>>()
                           .Attr<int64_t>("alignment")
                           .Ret<AnyBuffer>()
                           .Ret<Int32s<1>>()
                           .Ret<Int32s<2>>());

XLA_FFI_DEFINE_HANDLER(kPermuteMasked, PermuteMasked,
                       Ffi::Bind()
                           .Ctx<ThreadPool>()
                           .Arg<AnyBuffer>()
                           .Arg<Int32s<2>>()
                           .Ret<AnyBuffer>()
                           .Ret<Int32s<1>>()
                           .Ret<Int32s<2>>());

XLA_FFI_DEFINE_HANDLER(kUnpermute, Unpermute,
                       Ffi::Bind()
                           .Ctx<ThreadPool>()
                           .Arg<AnyBuffer>()
                           .Arg<Int32s<2>>()
                           .Arg<Floats<2>>()
                           .Ret<AnyBuffer>());

nb::dict Registrations() {
  nb::dict targets;
  auto add = [&](const char* name, XLA_FFI_Handler* handler) {
    targets[name] = nb::capsule(reinterpret_cast<void*>(handler));
  };
  add("jaxmoe_cpu_grouped_gemm_contiguous", kGroupedGemmContiguous);
  add("jaxmoe_cpu_grouped_gemm_masked", kGroupedGemmMasked);
  add("jaxmoe_cpu_permute_contiguous", kPermuteContiguous);
  add("jaxmoe_cpu_permute_masked", kPermuteMasked);
  add("jaxmoe_cpu_unpermute", kUnpermute);
  return targets;
}

}  // namespace

NB_MODULE(_cpu, m) { m.def("registrations", &Registrations); }

}  // namespace jaxmoe
