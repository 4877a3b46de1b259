// Handlers of `custom_calls/grouped_gemm`.
#include "groups.h"
#include "handlers.h"
#include "matmul.h"

namespace jaxmoe {
namespace {

// x [.., K] and y [.., N] as plain rows, weights [e, N, K].
template <class T>
void Run(ThreadPool& pool, const std::vector<RowRange>& groups, const AnyBuffer& x,
         const AnyBuffer& weights, AnyBuffer& y) {
  const int64_t cols = weights.dimensions()[1];
  const int64_t depth = weights.dimensions()[2];
  const Rows<const T> xs = {static_cast<const T*>(x.untyped_data()), depth};
  const Rows<const T> ws = {static_cast<const T*>(weights.untyped_data()), depth};
  const Rows<T> ys = {static_cast<T*>(y.untyped_data()), cols};
  std::vector<Product<T, T>> products;
  for (size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].size == 0) continue;
    products.push_back({xs.Skip(groups[g].start), ws.Skip(static_cast<int64_t>(g) * cols),
                        ys.Skip(groups[g].start), groups[g].size});
  }
  RunProducts(pool, products, cols, depth);
}

Error Dispatch(ThreadPool& pool, const std::vector<RowRange>& groups, const AnyBuffer& x,
               const AnyBuffer& weights, AnyBuffer& y) {
  const DataType dtype = x.element_type();
  JAXMOE_REQUIRE(weights.element_type() == dtype && y.element_type() == dtype,
                 "grouped_gemm: x, weights and y must have one dtype");
  if (dtype == DataType::F32) {
    Run<float>(pool, groups, x, weights, y);
  } else if (dtype == DataType::BF16) {
    Run<uint16_t>(pool, groups, x, weights, y);
  } else {
    return Error::InvalidArgument("grouped_gemm: dtype must be float32 or bfloat16");
  }
  return Error::Success();
}

Error Contiguous(ThreadPool pool, AnyBuffer x, AnyBuffer weights, Int32s<1> group_sizes,
                 int64_t alignment, Out<AnyBuffer> y) {
  const auto xs = x.dimensions(), ws = weights.dimensions(), ys = y->dimensions();
  const int64_t num_groups = group_sizes.dimensions()[0];
  JAXMOE_REQUIRE(xs.size() == 2 && ws.size() == 3 && ys.size() == 2 && ws[0] == num_groups &&
                     ws[2] == xs[1] && ys[0] == xs[0] && ys[1] == ws[1],
                 "grouped_gemm: x [M, K], weights [e, N, K], group_sizes [e] and y [M, N] do not "
                 "fit together: x " + ToString(x) + ", weights " + ToString(weights) +
                     ", group_sizes " + ToString(group_sizes) + ", y " + ToString(*y));
  std::vector<RowRange> groups;
  JAXMOE_RETURN_IF_ERROR(ContiguousGroups("grouped_gemm", group_sizes, alignment, xs[0], groups));
  return Dispatch(pool, groups, x, weights, *y);
}

Error Masked(ThreadPool pool, AnyBuffer x, AnyBuffer weights, Int32s<1> counts,
             Out<AnyBuffer> y) {
  const auto xs = x.dimensions(), ws = weights.dimensions(), ys = y->dimensions();
  const int64_t num_groups = counts.dimensions()[0];
  JAXMOE_REQUIRE(xs.size() == 3 && ws.size() == 3 && ys.size() == 3 && xs[0] == num_groups &&
                     ws[0] == num_groups && ws[2] == xs[2] && ys[0] == num_groups &&
                     ys[1] == xs[1] && ys[2] == ws[1],
                 "grouped_gemm: x [e, C, K], weights [e, N, K], counts [e] and y [e, C, N] do not "
                 "fit together: x " + ToString(x) + ", weights " + ToString(weights) +
                     ", counts " + ToString(counts) + ", y " + ToString(*y));
  std::vector<RowRange> groups;
  JAXMOE_RETURN_IF_ERROR(MaskedGroups("grouped_gemm", counts, xs[1], groups));
  return Dispatch(pool, groups, x, weights, *y);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(kGroupedGemmContiguous, Contiguous,
                              Ffi::Bind()
                                  .Ctx<ThreadPool>()
                                  .Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>()
                                  .Arg<Int32s<1>>()
                                  .Attr<int64_t>("alignment")
                                  .Ret<AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(kGroupedGemmMasked, Masked,
                              Ffi::Bind()
                                  .Ctx<ThreadPool>()
                                  .Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>()
                                  .Arg<Int32s<1>>()
                                  .Ret<AnyBuffer>());

}  // namespace jaxmoe
