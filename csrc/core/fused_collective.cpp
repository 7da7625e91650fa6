#include "core/fused_collective.h"

#include <algorithm>

namespace ub_overlap {
namespace {

constexpr int warp = 32;
constexpr int64_t least_row = 256, most_row = 1024, line = 256;  // vectors; bytes

int64_t divide_up(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

}  // namespace

void spread_rows(FusedGrid& grid) {
    const int64_t needed = divide_up(grid.row_vectors, fused_threads);
    grid.per_thread = needed <= 2 ? static_cast<int>(needed) : fused_vectors;
    grid.threads = static_cast<int>(divide_up(divide_up(grid.row_vectors, grid.per_thread), warp) * warp);
}

FusedGrid make_fused_grid(int64_t rows, int64_t row_bytes, bool keep_rows) {
    FusedGrid grid;
    grid.vectors = rows * row_bytes / vector_size;
    if (grid.vectors == 0) return grid;
    if (keep_rows) {
        grid.row_vectors = row_bytes / vector_size;
    } else {
        const int64_t even = divide_up(divide_up(grid.vectors, fused_blocks), warp) * warp;
        grid.row_vectors = std::min(grid.vectors, std::clamp(even, least_row, most_row));
    }
    spread_rows(grid);
    const int64_t all_rows = divide_up(grid.vectors, grid.row_vectors);
    const int64_t rows_of_block = divide_up(all_rows, fused_blocks);
    grid.block_vectors = rows_of_block * grid.row_vectors;
    grid.blocks = static_cast<int>(divide_up(all_rows, rows_of_block));
    return grid;
}

int64_t fused_region_bytes(const FusedGrid& grid, int ranks, bool two_shot) {
    const int64_t slice = grid.block_vectors, part = divide_up(slice, ranks);
    return (two_shot ? ranks * part + slice : ranks * slice) * vector_size;
}

int64_t fused_packet_bytes(int ranks) {
    return fused_slots * fused_blocks * ranks * packet_vectors * packet_size;
}

int64_t fused_memory_bytes(int64_t region_bytes, int ranks) {
    return fused_packet_bytes(ranks) + fused_slots * fused_blocks * divide_up(region_bytes, line) * line;
}

int64_t fused_region_of(int64_t bytes, int ranks) {
    return (bytes - fused_packet_bytes(ranks)) / (fused_slots * fused_blocks) / line * line;
}

}  // namespace ub_overlap
