// Sums of rows, in float whatever their type.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace jaxmoe {

inline float Widen(float value) { return value; }

inline float Widen(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

inline void Narrow(float value, float* to) { *to = value; }

inline void Narrow(float value, uint16_t* to) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t nearest_even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  *to = static_cast<uint16_t>(value != value ? (bits >> 16) | 0x40 : nearest_even);
}

// to[h] = the sum over i of scale(i) * row(i)[h], in order of i; a null row counts as nothing.
template <class T, class Row, class Scale>
void SumRows(int64_t num_rows, int64_t hidden, Row row, Scale scale, T* to) {
  constexpr int64_t kChunk = 1024;
  float sum[kChunk];
  for (int64_t h = 0; h < hidden; h += kChunk) {
    const int64_t size = std::min(kChunk, hidden - h);
    std::fill_n(sum, size, 0.0f);
    for (int64_t i = 0; i < num_rows; ++i) {
      const T* values = row(i);
      if (values == nullptr) continue;
      values += h;
      const float factor = scale(i);
      for (int64_t j = 0; j < size; ++j) sum[j] += factor * Widen(values[j]);
    }
    for (int64_t j = 0; j < size; ++j) Narrow(sum[j], to + h + j);
  }
}

}  // namespace jaxmoe
