// The inner matrix product, compiled once per instruction set (see CMakeLists.txt).
#pragma once

#include <cstdint>

namespace jaxmoe {

// y[m, n] = sum_k x[m, k] * w[n, k] for x [rows, depth], w [cols, depth], both dense, and y with
// `y_stride` elements from row to row. bf16 travels as its bits and is accumulated in float.
// An element of y depends on nothing but its row of x, its row of w and the instruction set.
template <class T>
using Gemm = void (*)(const T* x, const T* w, T* y, int64_t rows, int64_t cols, int64_t depth,
                      int64_t y_stride);

#define JAXMOE_DECLARE_GEMM(ISA)                                                         \
  namespace ISA {                                                                        \
  void GemmF32(const float* x, const float* w, float* y, int64_t rows, int64_t cols,     \
               int64_t depth, int64_t y_stride);                                         \
  void GemmBF16(const uint16_t* x, const uint16_t* w, uint16_t* y, int64_t rows,         \
                int64_t cols, int64_t depth, int64_t y_stride);                          \
  }

JAXMOE_DECLARE_GEMM(baseline)
#ifdef JAXMOE_X86
JAXMOE_DECLARE_GEMM(avx2)
JAXMOE_DECLARE_GEMM(avx512)
#endif

#undef JAXMOE_DECLARE_GEMM

}  // namespace jaxmoe
