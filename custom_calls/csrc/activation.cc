// Handlers of `custom_calls/activation`.
#include "groups.h"
#include "handlers.h"
#include "kernels.h"
#include "parallel.h"

namespace jaxmoe {
namespace {

// x [.., 2F] and y [.., F] as plain rows.
template <class T>
void Run(ThreadPool& pool, const std::vector<RowRange>& groups, const AnyBuffer& x, AnyBuffer& y) {
  // Below this a thread costs more than it saves.
  constexpr int64_t kMinParallelElements = 1 << 17;
  constexpr int64_t kBlockRows = 64;

  const int64_t width = y.dimensions().back();
  const T* from = static_cast<const T*>(x.untyped_data());
  T* to = static_cast<T*>(y.untyped_data());
  const SiluAndMul<T> silu_and_mul = BestSiluAndMul<T>();
  auto run = [=](RowRange rows) {
    for (int64_t r = rows.start; r < rows.start + rows.size; ++r) {
      silu_and_mul(from + 2 * r * width, from + (2 * r + 1) * width, to + r * width, width);
    }
  };

  int64_t num_rows = 0;
  for (const RowRange& group : groups) num_rows += group.size;
  if (num_rows * width < kMinParallelElements) {
    for (const RowRange& group : groups) run(group);
    return;
  }
  std::vector<RowRange> blocks;
  for (const RowRange& group : groups) {
    for (int64_t r = 0; r < group.size; r += kBlockRows) {
      blocks.push_back({group.start + r, std::min(kBlockRows, group.size - r)});
    }
  }
  ParallelFor(pool, static_cast<int64_t>(blocks.size()), [&](int64_t i) { run(blocks[i]); });
}

Error Dispatch(ThreadPool& pool, const std::vector<RowRange>& groups, const AnyBuffer& x,
               AnyBuffer& y) {
  JAXMOE_REQUIRE(x.element_type() == y.element_type(), "silu_and_mul: x and y must have one dtype");
  if (x.element_type() == DataType::F32) {
    Run<float>(pool, groups, x, y);
  } else if (x.element_type() == DataType::BF16) {
    Run<uint16_t>(pool, groups, x, y);
  } else {
    return Error::InvalidArgument("silu_and_mul: dtype must be float32 or bfloat16");
  }
  return Error::Success();
}

Error Contiguous(ThreadPool pool, AnyBuffer x, Int32s<1> group_sizes, int64_t alignment,
                 Out<AnyBuffer> y) {
  const auto xs = x.dimensions(), ys = y->dimensions();
  JAXMOE_REQUIRE(xs.size() == 2 && ys.size() == 2 && xs[0] == ys[0] && xs[1] == 2 * ys[1],
                 "silu_and_mul: x [M, 2F] and y [M, F] do not fit together: x " + ToString(x) +
                     ", y " + ToString(*y));
  std::vector<RowRange> groups;
  JAXMOE_RETURN_IF_ERROR(ContiguousGroups("silu_and_mul", group_sizes, alignment, xs[0], groups));
  return Dispatch(pool, groups, x, *y);
}

Error Masked(ThreadPool pool, AnyBuffer x, Int32s<1> counts, Out<AnyBuffer> y) {
  const auto xs = x.dimensions(), ys = y->dimensions();
  JAXMOE_REQUIRE(xs.size() == 3 && ys.size() == 3 && xs[0] == counts.dimensions()[0] &&
                     xs[0] == ys[0] && xs[1] == ys[1] && xs[2] == 2 * ys[2],
                 "silu_and_mul: x [e, C, 2F], counts [e] and y [e, C, F] do not fit together: x " +
                     ToString(x) + ", counts " + ToString(counts) + ", y " + ToString(*y));
  std::vector<RowRange> groups;
  JAXMOE_RETURN_IF_ERROR(MaskedGroups("silu_and_mul", counts, xs[1], groups));
  return Dispatch(pool, groups, x, *y);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(kSiluAndMulContiguous, Contiguous,
                              Ffi::Bind()
                                  .Ctx<ThreadPool>()
                                  .Arg<AnyBuffer>()
                                  .Arg<Int32s<1>>()
                                  .Attr<int64_t>("alignment")
                                  .Ret<AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(kSiluAndMulMasked, Masked,
                              Ffi::Bind()
                                  .Ctx<ThreadPool>()
                                  .Arg<AnyBuffer>()
                                  .Arg<Int32s<1>>()
                                  .Ret<AnyBuffer>());

}  // namespace jaxmoe
