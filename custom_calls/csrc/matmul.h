// Spreads matrix products over threads in blocks that fit the caches.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "parallel.h"

namespace jaxmoe {

// y = x w^T when `w_is_transposed` is false, w [cols, depth]; else y = x w, w [depth, cols].
template <class T, class U>
struct Product {
  Rows<const T> x;
  Rows<const T> w;
  Rows<U> y;
  int64_t rows;
};

template <class T, class U>
void RunProducts(ThreadPool& pool, const std::vector<Product<T, U>>& products, int64_t cols,
                 int64_t depth, bool w_is_transposed = false) {
  // Below this a thread costs more than it saves.
  constexpr int64_t kMinParallelMultiplyAdds = 1 << 20;
  // A block of x rows stays in the L2 cache while the weights stream past it.
  constexpr int64_t kBlockBytes = 128 << 10;
  constexpr int64_t kBlockCols = 64;
  struct Unit {
    int64_t product;
    int64_t row;
    int64_t col;
  };

  const auto kernels = BestKernels<T, U>();
  const auto kernel = w_is_transposed ? kernels.mix : kernels.dot;
  auto multiply = [&](const Product<T, U>& p, int64_t row, int64_t rows, int64_t col,
                      int64_t num_cols) {
    kernel(p.x.Skip(row), w_is_transposed ? p.w.Skip(0, col) : p.w.Skip(col), p.y.Skip(row, col),
           rows, num_cols, depth);
  };
  const int64_t row_bytes = std::max<int64_t>(1, depth * sizeof(T));
  const int64_t block_rows = std::clamp<int64_t>(kBlockBytes / row_bytes / 12 * 12, 12, 96);
  int64_t num_rows = 0;
  for (const Product<T, U>& p : products) num_rows += p.rows;

  // A row of x with nothing to multiply still writes its zeros, hence the one.
  if (num_rows * cols * std::max<int64_t>(1, depth) < kMinParallelMultiplyAdds) {
    for (const Product<T, U>& p : products) {
      for (int64_t r = 0; r < p.rows; r += block_rows) {
        multiply(p, r, std::min(block_rows, p.rows - r), 0, cols);
      }
    }
    return;
  }
  std::vector<Unit> units;
  for (size_t i = 0; i < products.size(); ++i) {
    for (int64_t r = 0; r < products[i].rows; r += block_rows) {
      for (int64_t c = 0; c < cols; c += kBlockCols) {
        units.push_back({static_cast<int64_t>(i), r, c});
      }
    }
  }
  ParallelFor(pool, static_cast<int64_t>(units.size()), [&](int64_t i) {
    const Unit& unit = units[i];
    const Product<T, U>& p = products[unit.product];
    multiply(p, unit.row, std::min(block_rows, p.rows - unit.row), unit.col,
             std::min(kBlockCols, cols - unit.col));
  });
}

}  // namespace jaxmoe
