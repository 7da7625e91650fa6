// Casts a weight to float8 only if it has changed since the cached cast. A checksum over its bits tells.
//
//   checksum_kernel   checksum = sum of key(position) * word over all words, and the amax of each scale. The last block
//                     compares the checksum with the cached one. If they differ it computes the scales.
//   cast_kernel       if they differ: x / scale, clamped, rounded. The last block stores the new checksum. Else it returns.
//                     cast_both_kernel takes its place where a transposed copy of the cast is kept too.
//
// A weight is read as 16-bit numbers, two per word; float32 is rounded to them first. Keys and checksums have 64 bits, and keys
// are odd. One changed word always changes the checksum. Several cancel with a probability of about 2^-60, or 2^-32 if only
// signs change. The host reads nothing back, so calls can be captured. A replay casts what an optimizer in another graph has
// written.
//
// A block takes tiles of 32 neighboring lines of 16 elements, as wide as a warp. Each of its warps takes some rows of a tile.
// An amax is bits without their sign, which compare like integers: a NaN is larger than infinity, which is larger than all
// finite numbers.
#include "cuda/byte_tile.h"
#include "cuda/elements.h"

namespace ub_overlap::cuda {
namespace {

constexpr int threads = 256, warps = threads / 32;
constexpr int width = 32 * per_thread;  // of a tile
constexpr int words = per_thread / 2;
constexpr int at_once = 2;   // rows of a warp whose loads are in flight together
constexpr int resident = 4;  // blocks on a multiprocessor

// Which elements share a scale.
enum class Scales { tensor, rows, columns };

struct Weight {
    const char* x;
    int64_t rows, lines;  // lines: per row, 16 elements each
    int64_t all_lines;
    int64_t tiles;
    int tile_columns, rows_per_warp;  // tile_columns: neighboring tiles of a row
    int64_t scales;
    float inverse_max;
    char* q;
    char* transposed;  // [columns, rows], or null
    int64_t columns;
    float* scale;
    unsigned long long* checksum;  // of the cached cast, then of its transposed copy
    unsigned long long* sum;
    unsigned* ticket;
    unsigned* changed;
    unsigned long long* new_checksum;
    unsigned* amax;  // `scales` of them
};

template <typename H>
union Line {
    uint32_t word[words];
    uint4 whole[words / 4];
    H v[per_thread];
};

// 16 elements of T as H.
template <typename T, typename H>
__device__ inline Line<H> load_line(const char* x, int64_t at) {
    Line<H> line;
    if constexpr (sizeof(T) == sizeof(H)) {
#pragma unroll
        for (int i = 0; i < words / 4; ++i) line.whole[i] = __ldg(reinterpret_cast<const uint4*>(x) + at * (words / 4) + i);
    } else {
#pragma unroll
        for (int i = 0; i < per_thread / 4; ++i) {
            const float4 four = __ldg(reinterpret_cast<const float4*>(x) + at * (per_thread / 4) + i);
            from_float(four.x, line.v[4 * i]), from_float(four.y, line.v[4 * i + 1]);
            from_float(four.z, line.v[4 * i + 2]), from_float(four.w, line.v[4 * i + 3]);
        }
    }
    return line;
}

// Returns the key of a line: different for each of the first 2^32 - 1.
__device__ inline uint32_t key_of(int64_t at) {
    uint32_t key = static_cast<uint32_t>(at + 1) * 0x9e3779b1u;
    key ^= key >> 16, key *= 0x85ebca6bu, key ^= key >> 13;
    return key;
}

// Returns the key of a word of a line: odd, so that any change of one word changes the sum.
__device__ inline unsigned long long key_of_word(uint32_t key, int word) {
    constexpr uint32_t low[words] = {0x9e3779b1u, 0x85ebca77u, 0xc2b2ae3du, 0x27d4eb2fu,
                                     0x165667b1u, 0xd3a2646du, 0xfd7046c5u, 0xb55a4f09u};
    constexpr uint32_t high[words] = {0xcc9e2d51u, 0x1b873593u, 0xe6546b65u, 0x4cf5ad43u,
                                      0x2745937fu, 0x38b34ae5u, 0xa1e38b93u, 0x7feb352du};
    return (static_cast<unsigned long long>(key * high[word]) << 32) | ((key * low[word]) | 1u);
}

// Returns the maximum by halves of two words whose halves have no sign.
__device__ inline uint32_t larger(uint32_t a, uint32_t b) {
    return static_cast<uint32_t>(__vmaxs2(a, b));
}

__device__ inline uint32_t larger_half(uint32_t pair) {
    return max(pair & 0xffffu, pair >> 16);
}

// A warp's part of a tile: rows [row, end) of one line per lane.
struct WarpRows {
    int64_t row, end, line;
    __device__ WarpRows(const Weight& w, int64_t tile) {
        row = (tile / w.tile_columns * warps + threadIdx.x / 32) * w.rows_per_warp;
        end = min(row + w.rows_per_warp, w.rows);
        line = tile % w.tile_columns * 32 + threadIdx.x % 32;
    }
    __device__ bool has(const Weight& w, int64_t r) const { return r < end && line < w.lines && at(w, r) < w.all_lines; }
    __device__ int64_t at(const Weight& w, int64_t r) const { return r * w.lines + line; }
};

// Returns the scale of an amax. NaN and infinity stay, as in clamp_min.
__device__ inline float scale_of(float amax, float inverse_max) {
    const float scale = amax * inverse_max;
    return scale < least_scale ? least_scale : scale;
}

template <typename H>
__device__ inline float value_of_bits(unsigned bits) {
    const unsigned short half = static_cast<unsigned short>(bits);
    return to_float(*reinterpret_cast<const H*>(&half));
}

// Clamps to e4m3's range. NaN stays.
__device__ inline float clamped(float value) {
    return value == value ? fminf(fmaxf(value, -e4m3_max), e4m3_max) : value;
}

// Compares the checksums, in the last block, and computes the scales if they differ. All its threads take part.
template <typename H>
__device__ inline void compare_checksum(const Weight& w) {
    __shared__ bool changed;
    if (threadIdx.x == 0) {
        unsigned long long sum = atomicAdd(w.sum, 0ull);
        sum = sum == 0 ? 1 : sum;  // 0 means that nothing is cached
        // A graph captured before the copy was asked for casts without it.
        changed = sum != w.checksum[0] || (w.transposed != nullptr && sum != w.checksum[1]);
        *w.new_checksum = sum, *w.sum = 0, *w.ticket = 0, *w.changed = changed;
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < w.scales; i += threads) {
        if (changed) w.scale[i] = scale_of(value_of_bits<H>(__ldcg(w.amax + i)), w.inverse_max);
        w.amax[i] = 0;
    }
}

// Reduces the amax of each column of a tile over the block, and into the weight's. All threads take part.
__device__ inline void reduce_column_amax(const Weight& w, const WarpRows& part, const uint32_t (&amax)[words]) {
    __shared__ unsigned column_amax[width];
    for (int i = threadIdx.x; i < width; i += threads) column_amax[i] = 0;
    __syncthreads();
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < words; ++j) {
        atomicMax(column_amax + lane * per_thread + 2 * j, amax[j] & 0xffffu);
        atomicMax(column_amax + lane * per_thread + 2 * j + 1, amax[j] >> 16);
    }
    __syncthreads();
    const int64_t first = (part.line - lane) * per_thread;
    for (int i = threadIdx.x; i < width; i += threads) {
        if (first + i < w.scales && column_amax[i] > 0) atomicMax(w.amax + first + i, column_amax[i]);
    }
    __syncthreads();
}

// Reduces sum and amax over the block, and into the weight's. All threads take part. Returns true in the last block.
__device__ inline bool reduce_block(const Weight& w, unsigned long long sum, unsigned amax) {
    __shared__ unsigned long long sums[warps];
    __shared__ unsigned warp_amax[warps];
    __shared__ bool last;
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
    amax = __reduce_max_sync(0xffffffffu, amax);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum, warp_amax[threadIdx.x / 32] = amax;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 1; i < warps; ++i) sum += sums[i], amax = max(amax, warp_amax[i]);
        atomicAdd(w.sum, sum);
        if (amax > 0) atomicMax(w.amax, amax);
        __threadfence();
        last = atomicAdd(w.ticket, 1u) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    return last;
}

template <typename T, typename H, Scales by>
__global__ void __launch_bounds__(threads, resident) checksum_kernel(const Weight w) {
    unsigned long long sum = 0;
    uint32_t amax[words] = {};  // of this lane's columns, in pairs
    for (int64_t tile = blockIdx.x; tile < w.tiles; tile += gridDim.x) {
        const WarpRows part(w, tile);
        for (int64_t first = part.row; first < part.end; first += at_once) {
            Line<H> loaded[at_once] = {};
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                if (part.has(w, first + i)) loaded[i] = load_line<T, H>(w.x, part.at(w, first + i));
            }
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const uint32_t key = key_of(part.at(w, first + i));
                uint32_t row_pair = 0;
#pragma unroll
                for (int j = 0; j < words; ++j) {
                    const uint32_t word = loaded[i].word[j], size = word & 0x7fff7fffu;
                    sum += word * key_of_word(key, j);
                    if constexpr (by == Scales::rows) {
                        row_pair = larger(row_pair, size);
                    } else {
                        amax[j] = larger(amax[j], size);
                    }
                }
                if constexpr (by == Scales::rows) {
                    const unsigned row_amax = __reduce_max_sync(0xffffffffu, larger_half(row_pair));
                    if (threadIdx.x % 32 == 0 && first + i < part.end) atomicMax(w.amax + first + i, row_amax);
                }
            }
        }
        if constexpr (by == Scales::columns) {
            reduce_column_amax(w, part, amax);
#pragma unroll
            for (int j = 0; j < words; ++j) amax[j] = 0;
        }
    }
    uint32_t all = 0;
    if constexpr (by == Scales::tensor) {
#pragma unroll
        for (int j = 0; j < words; ++j) all = larger(all, amax[j]);
    }
    if (reduce_block(w, sum, larger_half(all))) compare_checksum<H>(w);
}

// Ends a cast: its last block stores the new checksum. checksum_kernel does not: a call on any stream that reads this checksum
// also reads the new q.
__device__ inline void finish_cast(const Weight& w) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x != 0 || atomicAdd(w.ticket, 1u) != gridDim.x - 1) return;
    __threadfence();
    w.checksum[0] = *w.new_checksum, *w.ticket = 0;
    if (w.transposed != nullptr) w.checksum[1] = *w.new_checksum;
}

template <typename T, typename H, Scales by>
__global__ void __launch_bounds__(threads, resident) cast_kernel(const Weight w) {
    if (*w.changed == 0) return;
    float inverse[by == Scales::columns ? per_thread : 1];
    if constexpr (by == Scales::tensor) inverse[0] = 1.0f / *w.scale;
    for (int64_t tile = blockIdx.x; tile < w.tiles; tile += gridDim.x) {
        const WarpRows part(w, tile);
        if constexpr (by == Scales::columns) {
            if (part.line >= w.lines) continue;
#pragma unroll
            for (int e = 0; e < per_thread; ++e) inverse[e] = 1.0f / w.scale[part.line * per_thread + e];
        }
        for (int64_t row = part.row; row < part.end; ++row) {
            if (!part.has(w, row)) continue;
            if constexpr (by == Scales::rows) inverse[0] = 1.0f / w.scale[row];
            const Line<H> line = load_line<T, H>(w.x, part.at(w, row));
            reinterpret_cast<uint4*>(w.q)[part.at(w, row)] = float8_line<__NV_E4M3>(
                [&](int e) { return clamped(to_float(line.v[e]) * inverse[by == Scales::columns ? e : 0]); });
        }
    }
    finish_cast(w);
}

// The same in tiles, which are stored transposed too. A thread casts 16 neighbors of a row.
template <typename T, typename H, Scales by>
__global__ void __launch_bounds__(threads, resident) cast_both_kernel(const Weight w) {
    static_assert(ByteTile::threads == threads && ByteTile::line_bytes == per_thread);
    __shared__ alignas(16) ByteTile tile;
    if (*w.changed == 0) return;
    const ByteTiles tiles{w.all_lines * per_thread / w.columns, w.columns};
    for (int64_t number = blockIdx.x; number < tiles.count(); number += gridDim.x) {
        const int64_t column = tiles.left(number) + ByteTile::column();
#pragma unroll
        for (int n = 0; n < ByteTile::lines; ++n) {
            const int64_t row = tiles.top(number) + ByteTile::row(n);
            if (row >= tiles.rows || column >= tiles.cols) continue;
            const int64_t at = (row * tiles.cols + column) / per_thread;
            const Line<H> line = load_line<T, H>(w.x, at);
            const float one = by == Scales::columns ? 0.0f : 1.0f / w.scale[by == Scales::rows ? row : 0];
            const uint4 cast = float8_line<__NV_E4M3>([&](int e) {
                return clamped(to_float(line.v[e]) * (by == Scales::columns ? 1.0f / w.scale[column + e] : one));
            });
            reinterpret_cast<uint4*>(w.q)[at] = cast;
            tile.store(n, cast);
        }
        __syncthreads();
        tiles.store_transposed(tile, number, w.transposed);
        __syncthreads();
    }
    finish_cast(w);
}

template <typename T, typename H, Scales by>
void launch_both(const Weight& w, cudaStream_t stream) {
    const auto cast = w.transposed == nullptr ? &cast_kernel<T, H, by> : &cast_both_kernel<T, H, by>;
    for (const auto kernel : {&checksum_kernel<T, H, by>, cast}) {
        const unsigned blocks = blocks_for(kernel, w.tiles * threads, threads);
        launch(kernel, blocks, threads, stream, "launch a weight's cast to float8", w);
    }
}

// Calls `body` with values of the C++ types of a weight and of what it is rounded to.
template <typename Body>
void with_types(DType type, DType round_to, Body body) {
    with_type(round_to, [&](auto h) {
        using H = decltype(h);
        if constexpr (sizeof(H) == 2) {
            if (type == round_to) return body(H{}, H{});
            if (type == DType::f32) return body(float{}, H{});
        }
    });
}

Weight make_weight(const WeightCast& c) {
    const int64_t lines = c.rows * c.cols / per_thread;
    Weight w{};
    w.x = c.x, w.q = c.q, w.transposed = c.transposed, w.columns = c.cols, w.scale = c.scale, w.all_lines = lines;
    w.inverse_max = static_cast<float>(1.0 / e4m3_max);
    w.rows = c.axis == 0 ? (lines + 31) / 32 : c.rows;  // one scale: a row is what a warp reads at a time
    w.lines = c.axis == 0 ? 32 : c.cols / per_thread;
    w.scales = c.axis == 0 ? 1 : c.axis == -1 ? c.rows : c.cols;
    w.tile_columns = static_cast<int>((w.lines + 31) / 32);
    w.rows_per_warp = c.axis == -2 ? 8 * at_once : 4 * at_once;
    w.tiles = (w.rows + warps * w.rows_per_warp - 1) / (warps * w.rows_per_warp) * w.tile_columns;
    w.checksum = reinterpret_cast<unsigned long long*>(c.checksum);
    w.sum = reinterpret_cast<unsigned long long*>(c.scratch);
    w.ticket = reinterpret_cast<unsigned*>(c.scratch + 1);
    w.changed = w.ticket + 1;
    w.new_checksum = w.sum + 2;
    w.amax = w.ticket + 4;
    return w;
}

}  // namespace

int64_t cached_weight_scratch_words(int64_t scales) {
    return 3 + (scales + 1) / 2;
}

void preload_cached_weight() {
    for (DType round_to : {DType::bf16, DType::f16}) {
        for (DType type : {round_to, DType::f32}) {
            with_types(type, round_to, [](auto t, auto h) {
                using T = decltype(t);
                using H = decltype(h);
                load(&checksum_kernel<T, H, Scales::tensor>, threads), load(&cast_kernel<T, H, Scales::tensor>, threads);
                load(&cast_both_kernel<T, H, Scales::tensor>, threads);
                load(&checksum_kernel<T, H, Scales::rows>, threads), load(&cast_kernel<T, H, Scales::rows>, threads);
                load(&cast_both_kernel<T, H, Scales::rows>, threads);
                load(&checksum_kernel<T, H, Scales::columns>, threads), load(&cast_kernel<T, H, Scales::columns>, threads);
                load(&cast_both_kernel<T, H, Scales::columns>, threads);
            });
        }
    }
}

void launch_weight_cast(const WeightCast& cast, DType type, DType round_to, cudaStream_t stream) {
    const Weight w = make_weight(cast);
    with_types(type, round_to, [&](auto t, auto h) {
        using T = decltype(t);
        using H = decltype(h);
        if (cast.axis == 0) return launch_both<T, H, Scales::tensor>(w, stream);
        if (cast.axis == -1) return launch_both<T, H, Scales::rows>(w, stream);
        launch_both<T, H, Scales::columns>(w, stream);
    });
}

}  // namespace ub_overlap::cuda
