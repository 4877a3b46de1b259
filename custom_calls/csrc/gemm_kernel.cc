// Register-blocked dot products over the shared, contiguous dimension of x and w.
//
// No standard header with inline functions may be included here: the linker keeps one copy of such
// a function, and it could be the one that was compiled for AVX-512.
#include "gemm_kernel.h"

namespace jaxmoe::JAXMOE_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

// kRows * kCols accumulators, kRows vectors of x and one of w have to fit the registers:
// 16 with SSE and AVX2, 32 with AVX-512 and NEON.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRows = 4;
#else
constexpr int kRows = 3;
#endif
constexpr int kCols = 4;

typedef float Vector __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Bits __attribute__((vector_size(kVectorBytes)));
typedef float Quad __attribute__((vector_size(16)));
typedef uint32_t QuadBits __attribute__((vector_size(16)));

#define INLINE inline __attribute__((always_inline))

// A step takes kParts vectors of k from each row. A word holds two bf16; the even ones form the
// first part and the odd ones the second, which costs a shift or a mask and no shuffle.
template <class T>
constexpr int kParts = sizeof(float) / sizeof(T);
template <class T>
constexpr int kStep = kVectorBytes / sizeof(T);

template <int kPart>
INLINE Vector Load(const float* p) {
  Vector v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

template <int kPart>
INLINE Vector Load(const uint16_t* p) {
  Bits bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  return (Vector)(kPart == 0 ? bits << 16 : bits & 0xffff0000u);
}

template <int kPart, class T, int R, int C>
INLINE void MultiplyAdd(const T* x, const T* w, int64_t stride, Vector (&acc)[R][C]) {
  Vector xs[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) xs[r] = Load<kPart>(x + r * stride);
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) {
    Vector ws = Load<kPart>(w + c * stride);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[r][c] += xs[r] * ws;
  }
}

template <class T, int R, int C>
INLINE void Step(const T* x, const T* w, int64_t stride, Vector (&acc)[R][C]) {
  MultiplyAdd<0>(x, w, stride, acc);
  if constexpr (kParts<T> == 2) MultiplyAdd<1>(x, w, stride, acc);
}

#if defined(__AVX512F__)
typedef float Octet __attribute__((vector_size(32)));
INLINE Quad Fold(Vector v) {
  Octet half = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
               __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  return __builtin_shufflevector(half, half, 0, 1, 2, 3) +
         __builtin_shufflevector(half, half, 4, 5, 6, 7);
}
#elif defined(__AVX2__)
INLINE Quad Fold(Vector v) {
  return __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
}
#else
INLINE Quad Fold(Vector v) { return v; }
#endif

// The sums of four vectors; each is (v0 + v2) + (v1 + v3) of its folded vector.
INLINE Quad Sums(Quad a, Quad b, Quad c, Quad d) {
  Quad ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
  Quad cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

template <int C>
INLINE void Store(Quad sums, float* y) {
  __builtin_memcpy(y, &sums, C * sizeof(float));
}

template <int C>
INLINE void Store(Quad sums, uint16_t* y) {
  QuadBits bits = (QuadBits)sums;
  QuadBits nearest_even = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  QuadBits quiet_nan = (bits >> 16) | 0x40u;
  QuadBits is_nan = (QuadBits)(sums != sums);
  QuadBits rounded = (is_nan & quiet_nan) | (~is_nan & nearest_even);
#pragma GCC unroll 4
  for (int c = 0; c < C; ++c) y[c] = static_cast<uint16_t>(rounded[c]);
}

template <class T, int R, int C>
void Tile(const T* x, const T* w, T* y, int64_t depth, int64_t y_stride) {
  Vector acc[R][C] = {};
  int64_t k = 0;
  for (; k + kStep<T> <= depth; k += kStep<T>) Step<T>(x + k, w + k, depth, acc);
  if (k < depth) {
    T x_tail[R][kStep<T>] = {};
    T w_tail[C][kStep<T>] = {};
    for (int64_t i = 0; i < depth - k; ++i) {
      for (int r = 0; r < R; ++r) x_tail[r][i] = x[r * depth + k + i];
      for (int c = 0; c < C; ++c) w_tail[c][i] = w[c * depth + k + i];
    }
    Step<T>(&x_tail[0][0], &w_tail[0][0], kStep<T>, acc);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    Quad folded[4] = {};
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) folded[c] = Fold(acc[r][c]);
    Store<C>(Sums(folded[0], folded[1], folded[2], folded[3]), y + r * y_stride);
  }
}

template <class T, int C>
void Columns(const T* x, const T* w, T* y, int64_t rows, int64_t depth, int64_t y_stride) {
  for (; rows >= kRows; rows -= kRows) {
    Tile<T, kRows, C>(x, w, y, depth, y_stride);
    x += kRows * depth;
    y += kRows * y_stride;
  }
  if (rows == 3) Tile<T, 3, C>(x, w, y, depth, y_stride);
  if (rows == 2) Tile<T, 2, C>(x, w, y, depth, y_stride);
  if (rows == 1) Tile<T, 1, C>(x, w, y, depth, y_stride);
}

template <class T>
void Multiply(const T* x, const T* w, T* y, int64_t rows, int64_t cols, int64_t depth,
              int64_t y_stride) {
  for (; cols >= kCols; cols -= kCols) {
    Columns<T, kCols>(x, w, y, rows, depth, y_stride);
    w += kCols * depth;
    y += kCols;
  }
  if (cols == 3) Columns<T, 3>(x, w, y, rows, depth, y_stride);
  if (cols == 2) Columns<T, 2>(x, w, y, rows, depth, y_stride);
  if (cols == 1) Columns<T, 1>(x, w, y, rows, depth, y_stride);
}

}  // namespace

void GemmF32(const float* x, const float* w, float* y, int64_t rows, int64_t cols, int64_t depth,
             int64_t y_stride) {
  Multiply(x, w, y, rows, cols, depth, y_stride);
}

void GemmBF16(const uint16_t* x, const uint16_t* w, uint16_t* y, int64_t rows, int64_t cols,
              int64_t depth, int64_t y_stride) {
  Multiply(x, w, y, rows, cols, depth, y_stride);
}

}  // namespace jaxmoe::JAXMOE_ISA
