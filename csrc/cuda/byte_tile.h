// A tile of 128 x 128 bytes in shared memory: a block of 256 threads stores it by rows and loads it by columns. For .cu files.
//
//     store     number n of a thread: 16 neighbors of row 32 n + t / 8, from column 16 (t % 8) on
//     load      16 rows from 16 (t % 8) on, of the 4 columns from 4 (t / 8) on: 4 lines of 16 neighbors of a column
//
// So 8 neighboring threads read or write 128 bytes of global memory. Word w of row r is at place w ^ 4 (r / 16), and all 32
// threads of a warp use different banks.
#pragma once

#include <cstdint>

namespace ub_overlap::cuda {

struct ByteTile {
    static constexpr int side = 128, threads = 256;
    static constexpr int line_bytes = 16;                             // of a thread's access to global memory
    static constexpr int lines = side * side / line_bytes / threads;  // of a thread, to store and to load
    static constexpr int columns = 4;                                 // of a thread, when it loads

    uint32_t words[side][side / 4];

    // The place of a thread's line `n` that it stores.
    __device__ static int row(int n) { return static_cast<int>(threadIdx.x) / 8 + n * (threads / 8); }
    __device__ static int column() { return static_cast<int>(threadIdx.x) % 8 * line_bytes; }
    // The first row and the first column of the lines that a thread loads.
    __device__ static int first_row() { return static_cast<int>(threadIdx.x) % 8 * line_bytes; }
    __device__ static int first_column() { return static_cast<int>(threadIdx.x) / 8 * columns; }

    __device__ void store(int n, const uint4& line) {
        const int r = row(n);
        *reinterpret_cast<uint4*>(&words[r][(column() / 4) ^ (r / line_bytes * 4)]) = line;
    }

    // Sets line j to 16 rows of column first_column() + j.
    __device__ void load(uint4 (&line)[columns]) const {
        const int r = first_row(), place = (first_column() / 4) ^ (r / line_bytes * 4);
        uint32_t out[columns][4];
#pragma unroll
        for (int four = 0; four < 4; ++four) {
            const uint32_t a = words[r + 4 * four][place], b = words[r + 4 * four + 1][place];
            const uint32_t c = words[r + 4 * four + 2][place], d = words[r + 4 * four + 3][place];
            const uint32_t ab = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);  // a0 b0 a1 b1, a2 b2 a3 b3
            const uint32_t cd = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
            out[0][four] = __byte_perm(ab, cd, 0x5410), out[1][four] = __byte_perm(ab, cd, 0x7632);
            out[2][four] = __byte_perm(ab_high, cd_high, 0x5410), out[3][four] = __byte_perm(ab_high, cd_high, 0x7632);
        }
#pragma unroll
        for (int j = 0; j < columns; ++j) line[j] = make_uint4(out[j][0], out[j][1], out[j][2], out[j][3]);
    }
};

// The tiles of a matrix [rows, cols] of bytes, both multiples of 16.
struct ByteTiles {
    int64_t rows, cols;

    __host__ __device__ int64_t across() const { return (cols + ByteTile::side - 1) / ByteTile::side; }
    __host__ __device__ int64_t count() const { return (rows + ByteTile::side - 1) / ByteTile::side * across(); }
    __device__ int64_t top(int64_t number) const { return number / across() * ByteTile::side; }
    __device__ int64_t left(int64_t number) const { return number % across() * ByteTile::side; }

    // Stores the columns of tile `number` as rows of `to` [cols, rows].
    __device__ void store_transposed(const ByteTile& tile, int64_t number, char* to) const {
        const int64_t row = top(number) + ByteTile::first_row(), column = left(number) + ByteTile::first_column();
        if (row >= rows || column >= cols) return;
        uint4 line[ByteTile::columns];
        tile.load(line);
#pragma unroll
        for (int j = 0; j < ByteTile::columns; ++j) {
            *reinterpret_cast<uint4*>(to + (column + j) * rows + row) = line[j];
        }
    }
};

}  // namespace ub_overlap::cuda
