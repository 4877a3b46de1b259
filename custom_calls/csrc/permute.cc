// Handlers of `custom_calls/permute`.
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "handlers.h"
#include "parallel.h"
#include "rows.h"

namespace jaxmoe {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

// Below this a thread costs more than it saves.
constexpr int64_t kMinParallelBytes = 1 << 20;

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

Error RunContiguous(ThreadPool pool, AnyBuffer x, Int32s<2> group_idx, int64_t alignment,
                        Out<AnyBuffer> rows, Out<Int32s<1>> group_sizes, Out<Int32s<2>> row_of) {
  JAXMOE_RETURN_IF_ERROR(CheckPermute(x, group_idx, *group_sizes, *row_of, *rows, 2));
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

Error RunMasked(ThreadPool pool, AnyBuffer x, Int32s<2> group_idx, Out<AnyBuffer> rows,
                    Out<Int32s<1>> counts, Out<Int32s<2>> row_of) {
  JAXMOE_RETURN_IF_ERROR(CheckPermute(x, group_idx, *counts, *row_of, *rows, 3));
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
    for (int64_t t = i * block; t < std::min(num_tokens, (i + 1) * block); ++t) {
      const auto row_at = [&](int64_t k) -> const T* {
        const int64_t source = row[t * top_k + k];
        return source < 0 || source >= max_rows ? nullptr : from + source * hidden;
      };
      SumRows(top_k, hidden, row_at, [&](int64_t k) { return weight[t * top_k + k]; },
              to + t * hidden);
    }
  });
}

Error RunUnpermuteOf(ThreadPool pool, AnyBuffer rows, Int32s<2> row_of, Floats<2> weights,
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

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(kPermuteContiguous, RunContiguous,
                              Ffi::Bind()
                                  .Ctx<ThreadPool>()
                                  .Arg<AnyBuffer>()
                                  .Arg<Int32s<2>>()
                                  .Attr<int64_t>("alignment")
                                  .Ret<AnyBuffer>()
                                  .Ret<Int32s<1>>()
                                  .Ret<Int32s<2>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(kPermuteMasked, RunMasked,
                              Ffi::Bind()
                                  .Ctx<ThreadPool>()
                                  .Arg<AnyBuffer>()
                                  .Arg<Int32s<2>>()
                                  .Ret<AnyBuffer>()
                                  .Ret<Int32s<1>>()
                                  .Ret<Int32s<2>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(kUnpermute, RunUnpermuteOf,
                              Ffi::Bind()
                                  .Ctx<ThreadPool>()
                                  .Arg<AnyBuffer>()
                                  .Arg<Int32s<2>>()
                                  .Arg<Floats<2>>()
                                  .Ret<AnyBuffer>());

}  // namespace jaxmoe
