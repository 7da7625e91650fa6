#include "core/prefetch.h"

#include <algorithm>

namespace ub_overlap {

int64_t lines_of_run(const Span& part) {
    const bool begins_lines = (reinterpret_cast<uintptr_t>(part.data) | static_cast<uintptr_t>(part.stride)) % cache_line == 0;
    const int64_t lines = (part.bytes + cache_line - 1) / cache_line;
    return lines == 0 || begins_lines ? lines : lines + 1;
}

int64_t lines_of(const Span& part) {
    return part.blocks * lines_of_run(part);
}

Span first_part(const OperandLayout& o, int64_t bytes) {
    if (o.depth == 0 || o.cols == 0) return {};
    const int64_t row_bytes = o.cols * o.item, lines = bytes / cache_line;
    if (o.col_stride == o.item && (o.row_stride == row_bytes || o.depth == 1)) {  // rows without gaps: one run
        return {o.data, 1, 0, std::min(o.depth * row_bytes, lines * cache_line)};
    }
    if (o.col_stride == o.item) {
        const int64_t rows = lines / lines_of_run({o.data, 1, o.row_stride, row_bytes});
        return {o.data, std::min(o.depth, rows), o.row_stride, row_bytes};
    }
    const int64_t most = lines / o.cols;  // lines of a column
    const bool begins_lines = lines_of_run({o.data, 1, o.col_stride, cache_line}) == 1;
    const int64_t whole = begins_lines || most == 0 ? most : most - 1;
    return {o.data, o.cols, o.col_stride, std::min(o.depth * o.item, whole * cache_line)};
}

}  // namespace ub_overlap
