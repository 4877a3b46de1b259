// Register-blocked matrix products and the functions that go with them.
//
// No standard header with inline functions may be included here: the linker keeps one copy of such
// a function, and it could be the one that was compiled for AVX-512.
#include "kernels.h"

namespace jaxmoe::JAXMOE_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kLanes = kVectorBytes / sizeof(float);

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
typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));
typedef float Quad __attribute__((vector_size(16)));
typedef uint32_t QuadBits __attribute__((vector_size(16)));

#define INLINE inline __attribute__((always_inline))

// bfloat16 to the nearest even, on the bits of floats.
template <class B, class F>
INLINE B Round(F values) {
  B bits = (B)values;
  B nearest_even = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  B quiet_nan = (bits >> 16) | 0x40u;
  B is_nan = (B)(values != values);
  return (is_nan & quiet_nan) | (~is_nan & nearest_even);
}

INLINE Vector LoadLanes(const float* p) {
  Vector v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

INLINE Vector LoadLanes(const uint16_t* p) {
  Halves halves;
  __builtin_memcpy(&halves, p, sizeof(halves));
  return (Vector)(__builtin_convertvector(halves, Bits) << 16);
}

INLINE void StoreLanes(Vector v, float* p) { __builtin_memcpy(p, &v, sizeof(v)); }

INLINE void StoreLanes(Vector v, uint16_t* p) {
  Halves halves = __builtin_convertvector(Round<Bits>(v), Halves);
  __builtin_memcpy(p, &halves, sizeof(halves));
}

INLINE float Widen(float value) { return value; }

INLINE float Widen(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  __builtin_memcpy(&value, &wide, sizeof(value));
  return value;
}

INLINE void Narrow(float value, float* to) { *to = value; }

INLINE void Narrow(float value, uint16_t* to) {
  *to = static_cast<uint16_t>(Round<QuadBits>(Quad{value})[0]);
}

// ---- dot ----

// A step takes kParts vectors of k from each row. A word holds two bf16; the even ones form the
// first part and the odd ones the second, which costs a shift or a mask and no shuffle.
template <class T>
constexpr int kParts = sizeof(float) / sizeof(T);
template <class T>
constexpr int kStep = kVectorBytes / sizeof(T);

template <int kPart>
INLINE Vector Load(const float* p) {
  return LoadLanes(p);
}

template <int kPart>
INLINE Vector Load(const uint16_t* p) {
  Bits bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  return (Vector)(kPart == 0 ? bits << 16 : bits & 0xffff0000u);
}

template <int kPart, class T, int R, int C>
INLINE void MultiplyAdd(Rows<const T> x, Rows<const T> w, Vector (&acc)[R][C]) {
  Vector xs[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) xs[r] = Load<kPart>(x.data + r * x.stride);
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) {
    Vector ws = Load<kPart>(w.data + c * w.stride);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[r][c] += xs[r] * ws;
  }
}

template <class T, int R, int C>
INLINE void Step(Rows<const T> x, Rows<const T> w, Vector (&acc)[R][C]) {
  MultiplyAdd<0>(x, w, acc);
  if constexpr (kParts<T> == 2) MultiplyAdd<1>(x, w, acc);
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
  QuadBits rounded = Round<QuadBits>(sums);
#pragma GCC unroll 4
  for (int c = 0; c < C; ++c) y[c] = static_cast<uint16_t>(rounded[c]);
}

// Weights come from memory once, so what counts is how fast they arrive. Walking C rows side by side
// hides from the hardware that the memory is read from front to back; asking for it in that order,
// two blocks of C rows ahead, doubles the rate.
template <bool kPrefetch, class T, class U, int R, int C>
void DotTile(Rows<const T> x, Rows<const T> w, Rows<U> y, int64_t depth) {
  Vector acc[R][C] = {};
  int64_t k = 0;
  for (; k + kStep<T> <= depth; k += kStep<T>) {
    if constexpr (kPrefetch) {
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        __builtin_prefetch(w.data + 2 * C * w.stride + C * k + c * kStep<T>, 0, 2);
      }
    }
    Step<T>(x.Skip(0, k), w.Skip(0, k), acc);
  }
  if (k < depth) {
    T x_tail[R][kStep<T>] = {};
    T w_tail[C][kStep<T>] = {};
    for (int64_t i = 0; i < depth - k; ++i) {
      for (int r = 0; r < R; ++r) x_tail[r][i] = x.data[r * x.stride + k + i];
      for (int c = 0; c < C; ++c) w_tail[c][i] = w.data[c * w.stride + k + i];
    }
    Step<T>(Rows<const T>{&x_tail[0][0], kStep<T>}, Rows<const T>{&w_tail[0][0], kStep<T>}, acc);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    Quad folded[4] = {};
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) folded[c] = Fold(acc[r][c]);
    Store<C>(Sums(folded[0], folded[1], folded[2], folded[3]), y.data + r * y.stride);
  }
}

template <class T, class U, int C>
void DotColumns(Rows<const T> x, Rows<const T> w, Rows<U> y, int64_t rows, int64_t depth) {
  if (rows >= kRows) {
    DotTile<C == kCols, T, U, kRows, C>(x, w, y, depth);
    for (rows -= kRows; rows >= kRows; rows -= kRows) {
      x = x.Skip(kRows);
      y = y.Skip(kRows);
      DotTile<false, T, U, kRows, C>(x, w, y, depth);
    }
    x = x.Skip(kRows);
    y = y.Skip(kRows);
    if (rows == 3) DotTile<false, T, U, 3, C>(x, w, y, depth);
    if (rows == 2) DotTile<false, T, U, 2, C>(x, w, y, depth);
    if (rows == 1) DotTile<false, T, U, 1, C>(x, w, y, depth);
    return;
  }
  if (rows == 3) DotTile<C == kCols, T, U, 3, C>(x, w, y, depth);
  if (rows == 2) DotTile<C == kCols, T, U, 2, C>(x, w, y, depth);
  if (rows == 1) DotTile<C == kCols, T, U, 1, C>(x, w, y, depth);
}

template <class T, class U>
void Dot(Rows<const T> x, Rows<const T> w, Rows<U> y, int64_t rows, int64_t cols, int64_t depth) {
  for (; cols >= kCols; cols -= kCols) {
    DotColumns<T, U, kCols>(x, w, y, rows, depth);
    w = w.Skip(kCols);
    y.data += kCols;
  }
  if (cols == 3) DotColumns<T, U, 3>(x, w, y, rows, depth);
  if (cols == 2) DotColumns<T, U, 2>(x, w, y, rows, depth);
  if (cols == 1) DotColumns<T, U, 1>(x, w, y, rows, depth);
}

// ---- mix ----

template <class X, class T, class U, int R, int V>
void MixTile(Rows<const X> x, Rows<const T> w, const float* shrink, Rows<U> y, int64_t depth) {
  Vector acc[R][V] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Vector xs[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) xs[r] = Vector{} + Widen(x.data[r * x.stride + k]);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      Vector ws = LoadLanes(w.data + k * w.stride + v * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[r][v] += xs[r] * ws;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      U* to = y.data + r * y.stride + v * kLanes;
      StoreLanes(shrink ? LoadLanes(to) * shrink[r] + acc[r][v] : acc[r][v], to);
    }
  }
}

template <class X, class T, class U, int V>
void MixColumns(Rows<const X> x, Rows<const T> w, const float* shrink, Rows<U> y, int64_t rows,
                int64_t depth) {
  for (; rows >= kRows; rows -= kRows) {
    MixTile<X, T, U, kRows, V>(x, w, shrink, y, depth);
    x = x.Skip(kRows);
    y = y.Skip(kRows);
    if (shrink) shrink += kRows;
  }
  if (rows == 3) MixTile<X, T, U, 3, V>(x, w, shrink, y, depth);
  if (rows == 2) MixTile<X, T, U, 2, V>(x, w, shrink, y, depth);
  if (rows == 1) MixTile<X, T, U, 1, V>(x, w, shrink, y, depth);
}

template <class X, class T, class U>
void MixInto(Rows<const X> x, Rows<const T> w, const float* shrink, Rows<U> y, int64_t rows,
             int64_t cols, int64_t depth) {
  for (; cols >= kCols * kLanes; cols -= kCols * kLanes) {
    MixColumns<X, T, U, kCols>(x, w, shrink, y, rows, depth);
    w.data += kCols * kLanes;
    y.data += kCols * kLanes;
  }
  for (; cols >= kLanes; cols -= kLanes) {
    MixColumns<X, T, U, 1>(x, w, shrink, y, rows, depth);
    w.data += kLanes;
    y.data += kLanes;
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t n = 0; n < cols; ++n) {
      float sum = 0;
      for (int64_t k = 0; k < depth; ++k) {
        sum += Widen(x.data[r * x.stride + k]) * Widen(w.data[k * w.stride + n]);
      }
      U* to = y.data + r * y.stride + n;
      Narrow(shrink ? Widen(*to) * shrink[r] + sum : sum, to);
    }
  }
}

template <class T, class U>
void Mix(Rows<const T> x, Rows<const T> w, Rows<U> y, int64_t rows, int64_t cols, int64_t depth) {
  MixInto<T, T, U>(x, w, nullptr, y, rows, cols, depth);
}

template <class T>
void Accumulate(Rows<const float> p, Rows<const T> values, const float* shrink, Rows<float> y,
                int64_t rows, int64_t cols, int64_t depth) {
  MixInto<float, T, float>(p, values, shrink, y, rows, cols, depth);
}

// ---- exp ----

INLINE Vector Select(Bits mask, Vector yes, Vector no) {
  return (Vector)((mask & (Bits)yes) | (~mask & (Bits)no));
}

// exp(x), within 2 ulp; 0 where it is too small for a normal number, infinity above 88.37.
INLINE Vector Exp(Vector x) {
  constexpr float kSmallest = -87.33f, kLargest = 88.7f;
  Bits is_zero = (Bits)(x < kSmallest);
  x = Select(is_zero, Vector{} + kSmallest, x);
  x = Select((Bits)(x > kLargest), Vector{} + kLargest, x);
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
  constexpr float kRound = 12582912.0f;
  Vector shifted = x * 1.44269504f + kRound;
  Vector n = shifted - kRound;
  Vector r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  Vector power = (Vector)(((Bits)shifted << 23) + (127u << 23));
  return Select(is_zero, Vector{}, p * power);
}

// The first n lanes from p, the others `fill`.
template <class T>
INLINE Vector LoadSome(const T* p, int64_t n, float fill) {
  Vector v = Vector{} + fill;
  for (int64_t i = 0; i < n; ++i) v[i] = Widen(p[i]);
  return v;
}

template <class T>
INLINE void StoreSome(Vector v, T* p, int64_t n) {
  for (int64_t i = 0; i < n; ++i) Narrow(v[i], p + i);
}

float Weigh(float* scores, int64_t n, float scale, float* maximum, float* total) {
  if (n <= 0) return 1.0f;
  Vector largest = Vector{} + *maximum;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Vector v = LoadLanes(scores + i) * scale;
    largest = Select((Bits)(v > largest), v, largest);
  }
  if (i < n) {
    Vector v = LoadSome(scores + i, n - i, 0.0f) * scale;
    for (int64_t j = 0; j < n - i; ++j) {
      if (v[j] > largest[j]) largest[j] = v[j];
    }
  }
  float top = largest[0];
  for (int j = 1; j < kLanes; ++j) top = largest[j] > top ? largest[j] : top;

  Vector sums = {};
  for (i = 0; i + kLanes <= n; i += kLanes) {
    Vector p = Exp(LoadLanes(scores + i) * scale - top);
    sums += p;
    StoreLanes(p, scores + i);
  }
  if (i < n) {
    Vector p = Exp(LoadSome(scores + i, n - i, 0.0f) * scale - top);
    for (int64_t j = 0; j < n - i; ++j) {
      sums[j] += p[j];
      scores[i + j] = p[j];
    }
  }
  float sum = 0;
  for (int j = 0; j < kLanes; ++j) sum += sums[j];
  float shrink = Exp(Vector{} + (*maximum - top))[0];
  *total = *total * shrink + sum;
  *maximum = top;
  return shrink;
}

template <class T>
void Scale(const float* x, float factor, T* y, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) StoreLanes(LoadLanes(x + i) * factor, y + i);
  for (; i < n; ++i) Narrow(x[i] * factor, y + i);
}

INLINE Vector Silu(Vector x) { return x / (1.0f + Exp(-x)); }

template <class T>
void SiluMul(const T* gate, const T* up, T* y, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    StoreLanes(Silu(LoadLanes(gate + i)) * LoadLanes(up + i), y + i);
  }
  if (i < n) {
    Vector v = Silu(LoadSome(gate + i, n - i, 0.0f)) * LoadSome(up + i, n - i, 0.0f);
    StoreSome(v, y + i, n - i);
  }
}

}  // namespace

constexpr Kernels<float, float> kF32 = {Dot<float, float>, Mix<float, float>};
constexpr Kernels<uint16_t, uint16_t> kBF16 = {Dot<uint16_t, uint16_t>, Mix<uint16_t, uint16_t>};
constexpr Kernels<uint16_t, float> kBF16ToF32 = {Dot<uint16_t, float>, Mix<uint16_t, float>};
constexpr AttentionKernels<float> kAttentionF32 = {Weigh, Accumulate<float>, Scale<float>};
constexpr AttentionKernels<uint16_t> kAttentionBF16 = {Weigh, Accumulate<uint16_t>,
                                                       Scale<uint16_t>};
constexpr SiluAndMul<float> kSiluAndMulF32 = SiluMul<float>;
constexpr SiluAndMul<uint16_t> kSiluAndMulBF16 = SiluMul<uint16_t>;

}  // namespace jaxmoe::JAXMOE_ISA
