// Handlers of `custom_calls/gemm`.
#include "handlers.h"
#include "matmul.h"

namespace jaxmoe {
namespace {

template <class T>
Rows<const T> RowsOf(const AnyBuffer& buffer, int64_t stride) {
  return {static_cast<const T*>(buffer.untyped_data()), stride};
}

template <class T, class U>
Error RunGemm(ThreadPool& pool, const AnyBuffer& x, const AnyBuffer& weight, AnyBuffer& y) {
  const int64_t rows = x.dimensions()[0], depth = x.dimensions()[1], cols = y.dimensions()[1];
  const Rows<U> to = {static_cast<U*>(y.untyped_data()), cols};
  RunProducts<T, U>(pool, {{RowsOf<T>(x, depth), RowsOf<T>(weight, depth), to, rows}}, cols,
                    depth);
  return Error::Success();
}

Error RunGemmOf(ThreadPool pool, AnyBuffer x, AnyBuffer weight, Out<AnyBuffer> y) {
  const auto xs = x.dimensions(), ws = weight.dimensions(), ys = y->dimensions();
  JAXMOE_REQUIRE(xs.size() == 2 && ws.size() == 2 && ys.size() == 2 && xs[1] == ws[1] &&
                     ys[0] == xs[0] && ys[1] == ws[0],
                 "gemm: x [M, K], weight [N, K] and y [M, N] do not fit together: x " +
                     ToString(x) + ", weight " + ToString(weight) + ", y " + ToString(*y));
  const DataType from = x.element_type(), to = y->element_type();
  JAXMOE_REQUIRE(weight.element_type() == from, "gemm: x and weight must have one dtype");
  if (from == DataType::F32 && to == DataType::F32) {
    return RunGemm<float, float>(pool, x, weight, *y);
  }
  if (from == DataType::BF16 && to == DataType::BF16) {
    return RunGemm<uint16_t, uint16_t>(pool, x, weight, *y);
  }
  if (from == DataType::BF16 && to == DataType::F32) {
    return RunGemm<uint16_t, float>(pool, x, weight, *y);
  }
  return Error::InvalidArgument(
      "gemm: x must be float32 or bfloat16, and y float32 or of the dtype of x");
}

template <class T>
Error RunByHead(ThreadPool& pool, const AnyBuffer& x, const AnyBuffer& weight, int64_t start,
                bool is_transposed, AnyBuffer& y) {
  const int64_t num_tokens = x.dimensions()[0], num_heads = x.dimensions()[1];
  const int64_t depth = x.dimensions()[2], cols = y.dimensions()[2];
  const int64_t rows = weight.dimensions()[1], width = weight.dimensions()[2];
  const Rows<const T> xs = RowsOf<T>(x, num_heads * depth), ws = RowsOf<T>(weight, width);
  const Rows<T> ys = {static_cast<T*>(y.untyped_data()), num_heads * cols};
  std::vector<Product<T, T>> products;
  for (int64_t n = 0; n < num_heads; ++n) {
    products.push_back({xs.Skip(0, n * depth), ws.Skip(n * rows + start), ys.Skip(0, n * cols),
                        num_tokens});
  }
  RunProducts(pool, products, cols, depth, is_transposed);
  return Error::Success();
}

Error RunGemmByHead(ThreadPool pool, AnyBuffer x, AnyBuffer weight, int64_t start, int64_t stop,
                    bool transposed, Out<AnyBuffer> y) {
  const auto xs = x.dimensions(), ws = weight.dimensions(), ys = y->dimensions();
  const std::string shapes = "x " + ToString(x) + ", weight " + ToString(weight) + ", rows " +
                             std::to_string(start) + " to " + std::to_string(stop) + ", y " +
                             ToString(*y);
  JAXMOE_REQUIRE(xs.size() == 3 && ws.size() == 3 && ys.size() == 3 && ws[0] == xs[1] &&
                     ys[0] == xs[0] && ys[1] == xs[1],
                 "gemm_by_head: x [T, N, K], weight [N, R, C] and y [T, N, O] do not fit "
                 "together: " + shapes);
  const int64_t size = stop - start;
  JAXMOE_REQUIRE(0 <= start && start <= stop && stop <= ws[1] &&
                     xs[2] == (transposed ? size : ws[2]) && ys[2] == (transposed ? ws[2] : size),
                 "gemm_by_head: the rows of weight do not fit x and y: " + shapes);
  JAXMOE_REQUIRE(x.element_type() == weight.element_type() &&
                     x.element_type() == y->element_type(),
                 "gemm_by_head: x, weight and y must have one dtype");
  if (x.element_type() == DataType::F32) {
    return RunByHead<float>(pool, x, weight, start, transposed, *y);
  }
  if (x.element_type() == DataType::BF16) {
    return RunByHead<uint16_t>(pool, x, weight, start, transposed, *y);
  }
  return Error::InvalidArgument("gemm_by_head: dtype must be float32 or bfloat16");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(kGemm, RunGemmOf,
                              Ffi::Bind()
                                  .Ctx<ThreadPool>()
                                  .Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>()
                                  .Ret<AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(kGemmByHead, RunGemmByHead,
                              Ffi::Bind()
                                  .Ctx<ThreadPool>()
                                  .Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>()
                                  .Attr<int64_t>("start")
                                  .Attr<int64_t>("stop")
                                  .Attr<bool>("transposed")
                                  .Ret<AnyBuffer>());

}  // namespace jaxmoe
