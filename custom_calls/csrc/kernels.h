// The inner loops, compiled once per instruction set (see CMakeLists.txt).
#pragma once

#include <cstdint>

namespace jaxmoe {

// Rows of T with `stride` elements from one to the next.
template <class T>
struct Rows {
  T* data;
  int64_t stride;

  // Always inlined: the linker would keep one copy for all instruction sets.
  __attribute__((always_inline)) Rows Skip(int64_t rows, int64_t cols = 0) const {
    return {data + rows * stride + cols, stride};
  }
};

// One instruction set's kernels for operands of T: float, or bfloat16 as its bits, which is
// accumulated in float. U is the type of the result: T or float.
//
// An element of a result depends on nothing but the operands' rows or columns that it is made of,
// in the order of k, and on the instruction set: not on how many rows or columns a call has.
template <class T, class U>
struct Kernels {
  // y[m, n] = sum_k x[m, k] * w[n, k]
  void (*dot)(Rows<const T> x, Rows<const T> w, Rows<U> y, int64_t rows, int64_t cols,
              int64_t depth);

  // y[m, n] = sum_k x[m, k] * w[k, n]
  void (*mix)(Rows<const T> x, Rows<const T> w, Rows<U> y, int64_t rows, int64_t cols,
              int64_t depth);
};

// The parts of a softmax that meets its terms a page at a time (Milakov and Gimelshein,
// arXiv:1805.02867).
template <class T>
struct AttentionKernels {
  // Turns scores [n] into weights exp(scale * score - maximum) and takes them into the row's
  // maximum and total; returns what sums from before have to be multiplied by.
  float (*weigh)(float* scores, int64_t n, float scale, float* maximum, float* total);

  // y[m, n] = shrink[m] * y[m, n] + sum_k p[m, k] * values[k, n]
  void (*accumulate)(Rows<const float> p, Rows<const T> values, const float* shrink, Rows<float> y,
                     int64_t rows, int64_t cols, int64_t depth);

  // y[n] = x[n] * factor
  void (*scale)(const float* x, float factor, T* y, int64_t n);
};

// y[i] = silu(gate[i]) * up[i], in float.
template <class T>
using SiluAndMul = void (*)(const T* gate, const T* up, T* y, int64_t n);

#define JAXMOE_DECLARE_KERNELS(ISA)                          \
  namespace ISA {                                            \
  extern const Kernels<float, float> kF32;                   \
  extern const Kernels<uint16_t, uint16_t> kBF16;            \
  extern const Kernels<uint16_t, float> kBF16ToF32;          \
  extern const AttentionKernels<float> kAttentionF32;        \
  extern const AttentionKernels<uint16_t> kAttentionBF16;    \
  extern const SiluAndMul<float> kSiluAndMulF32;             \
  extern const SiluAndMul<uint16_t> kSiluAndMulBF16;         \
  }

JAXMOE_DECLARE_KERNELS(baseline)
#ifdef JAXMOE_X86
JAXMOE_DECLARE_KERNELS(avx2)
JAXMOE_DECLARE_KERNELS(avx512)
#endif

#undef JAXMOE_DECLARE_KERNELS

// The best of `kernels` for this machine.
#ifdef JAXMOE_X86
#define JAXMOE_BEST(kernels)                                                              \
  (__builtin_cpu_supports("avx512f")                                   ? avx512::kernels  \
   : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? avx2::kernels    \
                                                                       : baseline::kernels)
#else
#define JAXMOE_BEST(kernels) (baseline::kernels)
#endif

template <class T, class U>
const Kernels<T, U>& BestKernels() {
  if constexpr (sizeof(T) == sizeof(float)) {
    return JAXMOE_BEST(kF32);
  } else if constexpr (sizeof(U) == sizeof(float)) {
    return JAXMOE_BEST(kBF16ToF32);
  } else {
    return JAXMOE_BEST(kBF16);
  }
}

template <class T>
const AttentionKernels<T>& BestAttentionKernels() {
  if constexpr (sizeof(T) == sizeof(float)) {
    return JAXMOE_BEST(kAttentionF32);
  } else {
    return JAXMOE_BEST(kAttentionBF16);
  }
}

template <class T>
SiluAndMul<T> BestSiluAndMul() {
  if constexpr (sizeof(T) == sizeof(float)) {
    return JAXMOE_BEST(kSiluAndMulF32);
  } else {
    return JAXMOE_BEST(kSiluAndMulBF16);
  }
}

#undef JAXMOE_BEST

}  // namespace jaxmoe
