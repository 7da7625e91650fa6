// Transposes matrices of bytes. A block takes tiles of 64 x 64, and a thread reads and writes 16 neighbors at a time.
#include "cuda/elements.h"

namespace ub_overlap::cuda {
namespace {

constexpr int side = 64, per_line = 16, lines_per_side = side / per_line;
constexpr int threads = side * lines_per_side;
constexpr int resident = 8;  // blocks on a multiprocessor

struct Matrix {
    const char* from;
    int64_t rows, cols;
    char* to;
    int64_t tiles;
    int64_t across;  // tiles of a row
};

// The place of a thread in a tile: 16 neighbors of a row of `from`, and of a row of `to`.
struct Place {
    int outer = static_cast<int>(threadIdx.x) / lines_per_side, inner = threadIdx.x % lines_per_side * per_line;
};

__device__ inline uint4 load_line(const Matrix& m, int64_t tile, const Place& place) {
    const int64_t row = tile / m.across * side + place.outer, col = tile % m.across * side + place.inner;
    const bool exists = tile < m.tiles && row < m.rows && col < m.cols;
    return exists ? load_vector<uint4>(m.from, (row * m.cols + col) / per_line) : uint4{};
}

__global__ void __launch_bounds__(threads, resident) transpose_kernel(const Matrix m) {
    __shared__ alignas(16) uint8_t bytes[side][side + 4];  // 4: neighboring rows begin in different banks
    const Place place;
    uint4 line = load_line(m, blockIdx.x, place);
    for (int64_t tile = blockIdx.x; tile < m.tiles; tile += gridDim.x) {
        auto* words = reinterpret_cast<uint32_t*>(&bytes[place.outer][place.inner]);
        words[0] = line.x, words[1] = line.y, words[2] = line.z, words[3] = line.w;
        __syncthreads();
        line = load_line(m, tile + gridDim.x, place);  // in flight while this tile is stored
        const int64_t col = tile % m.across * side + place.outer, row = tile / m.across * side + place.inner;
        if (row < m.rows && col < m.cols) {
            uint32_t word[4] = {};
#pragma unroll
            for (int i = 0; i < per_line; ++i) {
                word[i / 4] |= uint32_t{bytes[place.inner + i][place.outer]} << 8 * (i % 4);
            }
            reinterpret_cast<uint4*>(m.to)[(col * m.rows + row) / per_line] = make_uint4(word[0], word[1], word[2], word[3]);
        }
        __syncthreads();
    }
}

}  // namespace

void preload_transpose() {
    load(&transpose_kernel, threads);
}

void launch_transpose(const char* from, int64_t rows, int64_t cols, char* to, cudaStream_t stream) {
    const int64_t across = (cols + side - 1) / side, tiles = (rows + side - 1) / side * across;
    launch(&transpose_kernel, blocks_for(&transpose_kernel, tiles * threads, threads), threads, stream, "launch a transpose",
           Matrix{from, rows, cols, to, tiles, across});
}

}  // namespace ub_overlap::cuda
