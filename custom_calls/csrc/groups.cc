#include "groups.h"

#include <algorithm>

namespace jaxmoe {
namespace {

std::string NegativeCount(const char* op, const char* what, int32_t value, int64_t group) {
  return std::string(op) + ": " + what + "[" + std::to_string(group) +
         "] must not be negative, got " + std::to_string(value);
}

}  // namespace

Error ContiguousGroups(const char* op, const Int32s<1>& group_sizes, int64_t alignment,
                       int64_t max_rows, std::vector<RowRange>& groups) {
  JAXMOE_REQUIRE(alignment >= 1, std::string(op) + ": alignment must be positive, got " +
                                     std::to_string(alignment));
  const int64_t num_groups = group_sizes.dimensions()[0];
  const int32_t* sizes = group_sizes.typed_data();
  groups.resize(num_groups);
  int64_t start = 0;
  for (int64_t g = 0; g < num_groups; ++g) {
    JAXMOE_REQUIRE(sizes[g] >= 0, NegativeCount(op, "group_sizes", sizes[g], g));
    start = std::min(start, max_rows);
    groups[g] = {start, std::min<int64_t>(sizes[g], max_rows - start)};
    // Aligned starts beyond the last row are all alike, which keeps a huge alignment from
    // overflowing the sum.
    const int64_t rest = sizes[g] % alignment;
    start += std::min<int64_t>(max_rows, sizes[g] + (rest ? alignment - rest : 0));
  }
  return Error::Success();
}

Error MaskedGroups(const char* op, const Int32s<1>& counts, int64_t capacity,
                   std::vector<RowRange>& groups) {
  const int64_t num_groups = counts.dimensions()[0];
  groups.resize(num_groups);
  for (int64_t g = 0; g < num_groups; ++g) {
    const int32_t count = counts.typed_data()[g];
    JAXMOE_REQUIRE(count >= 0, NegativeCount(op, "counts", count, g));
    groups[g] = {g * capacity, std::min<int64_t>(count, capacity)};
  }
  return Error::Success();
}

}  // namespace jaxmoe
