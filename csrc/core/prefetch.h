// Operands of later matmuls, of which a kernel that waits for peers reads the first part into the device's L2 cache meanwhile.
#pragma once

#include <cstdint>
#include <vector>

#include "core/call.h"

namespace ub_overlap {

constexpr int64_t cache_line = 128;

// A right operand [depth, cols] of a matmul: `item` bytes per element, and the bytes from one row and column to the next.
struct OperandLayout {
    char* data = nullptr;
    int64_t depth = 0, cols = 0, row_stride = 0, col_stride = 0, item = 0;
    // Whether the elements of a row, or of a column, lie next to each other.
    bool has_dense_dim() const { return row_stride == item || col_stride == item; }
};

// Returns what matmuls read first of their operands: of `depth` as much as fits `bytes`, the first operand first. Whole cache
// lines count. An operand of which nothing fits has no part.
std::vector<Span> first_parts(const std::vector<OperandLayout>& operands, int64_t bytes);
// The cache lines of a part: one more for each run that begins within a line.
int64_t lines_of_run(const Span& part);
int64_t lines_of(const Span& part);

}  // namespace ub_overlap
