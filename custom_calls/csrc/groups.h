// Which rows each group owns in the two token layouts (`custom_calls/layouts.py`).
#pragma once

#include <string>
#include <vector>

#include "ffi.h"

namespace jaxmoe {

// Rows [start, start + size) belong to one group.
struct RowRange {
  int64_t start;
  int64_t size;
};

// The groups of ContiguousTokens with `max_rows` rows; an error for a negative size.
Error ContiguousGroups(const char* op, const Int32s<1>& group_sizes, int64_t alignment,
                       int64_t max_rows, std::vector<RowRange>& groups);

// The groups of MaskedTokens as rows of [e * capacity, H]; an error for a negative count.
Error MaskedGroups(const char* op, const Int32s<1>& counts, int64_t capacity,
                   std::vector<RowRange>& groups);

}  // namespace jaxmoe
