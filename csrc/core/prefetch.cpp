#include "core/prefetch.h"

#include <algorithm>

namespace ub_overlap {
namespace {

// Whether every run begins with a cache line.
bool begins_lines(const char* data, int64_t stride) {
    return (reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(stride)) % cache_line == 0;
}

// Returns the bytes of a run, of `bytes`, that touches `lines` cache lines at most.
int64_t run_bytes(int64_t bytes, int64_t lines, const char* data, int64_t stride) {
    const int64_t whole = begins_lines(data, stride) ? lines : std::max<int64_t>(lines - 1, 0);
    return std::min(bytes, whole * cache_line);
}

// Of one operand, `lines` at most.
Span first_part(const OperandLayout& o, int64_t lines) {
    if (o.depth == 0 || o.cols == 0) return {};
    const int64_t row_bytes = o.cols * o.item;
    if (o.col_stride == o.item && (o.row_stride == row_bytes || o.depth == 1)) {  // rows without gaps: one run
        return {o.data, 1, 0, run_bytes(o.depth * row_bytes, lines, o.data, 0)};
    }
    if (o.col_stride == o.item) {
        const int64_t rows = lines / lines_of_run({o.data, 1, o.row_stride, row_bytes});
        return {o.data, std::min(o.depth, rows), o.row_stride, row_bytes};
    }
    return {o.data, o.cols, o.col_stride, run_bytes(o.depth * o.item, lines / o.cols, o.data, o.col_stride)};
}

}  // namespace

int64_t lines_of_run(const Span& part) {
    const int64_t lines = (part.bytes + cache_line - 1) / cache_line;
    return lines == 0 || begins_lines(part.data, part.stride) ? lines : lines + 1;
}

int64_t lines_of(const Span& part) {
    return part.blocks * lines_of_run(part);
}

std::vector<Span> first_parts(const std::vector<OperandLayout>& operands, int64_t bytes) {
    std::vector<Span> parts;
    int64_t left = std::max<int64_t>(bytes, 0) / cache_line;
    for (const OperandLayout& operand : operands) {
        const Span part = first_part(operand, left);
        const int64_t lines = lines_of(part);
        if (lines > 0) parts.push_back(part);
        left -= lines;
    }
    return parts;
}

}  // namespace ub_overlap
