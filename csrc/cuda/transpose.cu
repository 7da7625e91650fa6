// Transposes matrices of bytes, in tiles.
#include "cuda/byte_tile.h"
#include "cuda/elements.h"

namespace ub_overlap::cuda {
namespace {

constexpr int resident = 4;  // blocks on a multiprocessor

// A thread's lines of a tile, as ByteTile stores them.
struct Lines {
    uint4 line[ByteTile::lines];
};

__device__ inline Lines load_lines(const ByteTiles& m, const char* from, int64_t number) {
    Lines loaded{};
    if (number >= m.count()) return loaded;
    const int64_t column = m.left(number) + ByteTile::column();
#pragma unroll
    for (int n = 0; n < ByteTile::lines; ++n) {
        const int64_t row = m.top(number) + ByteTile::row(n);
        if (row < m.rows && column < m.cols) {
            loaded.line[n] = load_vector<uint4>(from, (row * m.cols + column) / ByteTile::line_bytes);
        }
    }
    return loaded;
}

__global__ void __launch_bounds__(ByteTile::threads, resident) transpose_kernel(const ByteTiles m, const char* from, char* to) {
    __shared__ alignas(16) ByteTile tile;
    Lines lines = load_lines(m, from, blockIdx.x);
    for (int64_t number = blockIdx.x; number < m.count(); number += gridDim.x) {
#pragma unroll
        for (int n = 0; n < ByteTile::lines; ++n) tile.store(n, lines.line[n]);
        __syncthreads();
        lines = load_lines(m, from, number + gridDim.x);  // in flight while this tile is stored
        m.store_transposed(tile, number, to);
        __syncthreads();
    }
}

}  // namespace

void preload_transpose() {
    load(&transpose_kernel, ByteTile::threads);
}

void launch_transpose(const char* from, int64_t rows, int64_t cols, char* to, cudaStream_t stream) {
    const ByteTiles tiles{rows, cols};
    const unsigned blocks = blocks_for(&transpose_kernel, tiles.count() * ByteTile::threads, ByteTile::threads);
    launch(&transpose_kernel, blocks, ByteTile::threads, stream, "launch a transpose", tiles, from, to);
}

}  // namespace ub_overlap::cuda
