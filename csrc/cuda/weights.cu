// Casting a weight to float8 anew only where it has changed: what it was is known by a sum over its bits.
//
//   look_kernel   sum of key(position) * word over all words, and the largest magnitudes; the last block compares the sum with
//                 the kept one. Where they differ it computes the scales.
//   cast_kernel   where they differed: x / scale, clamped, rounded; the last block keeps the new sum. Else it ends at once.
//
// A weight is read as 16-bit numbers, two a word; float32 is rounded to them first. Keys and sums have 64 bits, and keys are
// odd: one changed word always shows, and several cancel by an accident of about 2^-60, or of 2^-32 where nothing but signs
// changes. Nobody tells the host, so calls may be captured, and a replay casts what an optimizer in another graph has written.
//
// A block takes tiles of 32 lines of 16 elements beside each other, as wide as a warp; each of its warps goes down some rows of
// them. Magnitudes are bits without their sign, which compare like integers: a NaN is larger than infinity, which is larger
// than all others.
#include "cuda/elements.h"

namespace ub_overlap::cuda {
namespace {

constexpr int threads = 256, warps = threads / 32;
constexpr int width = 32 * per_thread;  // of a tile
constexpr int words = per_thread / 2;
constexpr int at_once = 2;                            // rows of a warp whose loads are under way together
constexpr int resident = 4;                           // blocks on a multiprocessor
constexpr float least_scale = 7.52316384526264e-37f;  // 2^-120
constexpr float largest = 448.0f;

// Which magnitudes share a scale.
enum class Scales { tensor, rows, columns };

struct Weight {
    const char* x;
    int64_t rows, lines;  // lines: of a row, 16 elements each
    int64_t all_lines;
    int64_t tiles;
    int across, rows_per_warp;  // across: tiles beside each other
    int64_t scales;
    float share;
    char* q;
    float* scale;
    unsigned long long* kept;
    unsigned long long* sum;
    unsigned* ticket;
    unsigned* changed;
    unsigned long long* found;  // what the sum became, where it changed
    unsigned* most;             // `scales` of them
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
    Line<H> found;
    if constexpr (sizeof(T) == sizeof(H)) {
#pragma unroll
        for (int i = 0; i < words / 4; ++i) found.whole[i] = __ldg(reinterpret_cast<const uint4*>(x) + at * (words / 4) + i);
    } else {
#pragma unroll
        for (int i = 0; i < per_thread / 4; ++i) {
            const float4 four = __ldg(reinterpret_cast<const float4*>(x) + at * (per_thread / 4) + i);
            from_float(four.x, found.v[4 * i]), from_float(four.y, found.v[4 * i + 1]);
            from_float(four.z, found.v[4 * i + 2]), from_float(four.w, found.v[4 * i + 3]);
        }
    }
    return found;
}

// Of a line: another for each of the first 2^32 - 1.
__device__ inline uint32_t key_of(int64_t at) {
    uint32_t key = static_cast<uint32_t>(at + 1) * 0x9e3779b1u;
    key ^= key >> 16, key *= 0x85ebca6bu, key ^= key >> 13;
    return key;
}

// Of a word of a line: odd, so that no change of a word goes unseen.
__device__ inline unsigned long long key_of_word(uint32_t key, int word) {
    constexpr uint32_t low[words] = {0x9e3779b1u, 0x85ebca77u, 0xc2b2ae3du, 0x27d4eb2fu,
                                     0x165667b1u, 0xd3a2646du, 0xfd7046c5u, 0xb55a4f09u};
    constexpr uint32_t high[words] = {0xcc9e2d51u, 0x1b873593u, 0xe6546b65u, 0x4cf5ad43u,
                                      0x2745937fu, 0x38b34ae5u, 0xa1e38b93u, 0x7feb352du};
    return (static_cast<unsigned long long>(key * high[word]) << 32) | ((key * low[word]) | 1u);
}

// The larger one of both halves of two words whose halves have no sign.
__device__ inline uint32_t larger(uint32_t a, uint32_t b) {
    return static_cast<uint32_t>(__vmaxs2(a, b));
}

__device__ inline uint32_t larger_half(uint32_t pair) {
    return max(pair & 0xffffu, pair >> 16);
}

// What a warp has of a tile: rows [row, end) of a line for each lane.
struct Part {
    int64_t row, end, line;
    __device__ Part(const Weight& w, int64_t tile) {
        row = (tile / w.across * warps + threadIdx.x / 32) * w.rows_per_warp;
        end = min(row + w.rows_per_warp, w.rows);
        line = tile % w.across * 32 + threadIdx.x % 32;
    }
    __device__ bool has(const Weight& w, int64_t r) const { return r < end && line < w.lines && at(w, r) < w.all_lines; }
    __device__ int64_t at(const Weight& w, int64_t r) const { return r * w.lines + line; }
};

// NaN and infinity stay what they are, as in clamp_min.
__device__ inline float unit_of(float most, float share) {
    const float unit = most * share;
    return unit < least_scale ? least_scale : unit;
}

template <typename H>
__device__ inline float value_of_bits(unsigned bits) {
    const unsigned short half = static_cast<unsigned short>(bits);
    return to_float(*reinterpret_cast<const H*>(&half));
}

// Within float8's range; a NaN stays one.
__device__ inline float bounded(float value) {
    return value == value ? fminf(fmaxf(value, -largest), largest) : value;
}

// The block that is through last: are the bits as they were? All its threads take part.
template <typename H>
__device__ inline void conclude(const Weight& w) {
    __shared__ bool changed;
    if (threadIdx.x == 0) {
        unsigned long long sum = atomicAdd(w.sum, 0ull);
        sum = sum == 0 ? 1 : sum;  // 0 is what no weight is
        changed = sum != *w.kept;
        *w.found = sum, *w.sum = 0, *w.ticket = 0, *w.changed = changed;
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < w.scales; i += threads) {
        if (changed) w.scale[i] = unit_of(value_of_bits<H>(__ldcg(w.most + i)), w.share);
        w.most[i] = 0;
    }
}

// The block's largest magnitude of each column of a tile goes to the weight's. All threads take part.
__device__ inline void note_columns(const Weight& w, const Part& part, const uint32_t (&most)[words]) {
    __shared__ unsigned of_column[width];
    for (int i = threadIdx.x; i < width; i += threads) of_column[i] = 0;
    __syncthreads();
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < words; ++j) {
        atomicMax(of_column + lane * per_thread + 2 * j, most[j] & 0xffffu);
        atomicMax(of_column + lane * per_thread + 2 * j + 1, most[j] >> 16);
    }
    __syncthreads();
    const int64_t first = (part.line - lane) * per_thread;
    for (int i = threadIdx.x; i < width; i += threads) {
        if (first + i < w.scales && of_column[i] > 0) atomicMax(w.most + first + i, of_column[i]);
    }
    __syncthreads();
}

// A block's sum and largest magnitude go to the weight's. All threads take part; true for those of the block that is last.
__device__ inline bool note(const Weight& w, unsigned long long sum, unsigned most) {
    __shared__ unsigned long long sums[warps];
    __shared__ unsigned largest_of[warps];
    __shared__ bool last;
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
    most = __reduce_max_sync(0xffffffffu, most);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum, largest_of[threadIdx.x / 32] = most;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 1; i < warps; ++i) sum += sums[i], most = max(most, largest_of[i]);
        atomicAdd(w.sum, sum);
        if (most > 0) atomicMax(w.most, most);
        __threadfence();
        last = atomicAdd(w.ticket, 1u) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    return last;
}

template <typename T, typename H, Scales by>
__global__ void __launch_bounds__(threads, resident) look_kernel(const Weight w) {
    unsigned long long sum = 0;
    uint32_t most[words] = {};  // of this lane's columns, in pairs
    for (int64_t tile = blockIdx.x; tile < w.tiles; tile += gridDim.x) {
        const Part part(w, tile);
        for (int64_t first = part.row; first < part.end; first += at_once) {
            Line<H> found[at_once] = {};
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                if (part.has(w, first + i)) found[i] = load_line<T, H>(w.x, part.at(w, first + i));
            }
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const uint32_t key = key_of(part.at(w, first + i));
                uint32_t of_row = 0;
#pragma unroll
                for (int j = 0; j < words; ++j) {
                    const uint32_t word = found[i].word[j], size = word & 0x7fff7fffu;
                    sum += word * key_of_word(key, j);
                    if constexpr (by == Scales::rows) {
                        of_row = larger(of_row, size);
                    } else {
                        most[j] = larger(most[j], size);
                    }
                }
                if constexpr (by == Scales::rows) {
                    const unsigned row_most = __reduce_max_sync(0xffffffffu, larger_half(of_row));
                    if (threadIdx.x % 32 == 0 && first + i < part.end) atomicMax(w.most + first + i, row_most);
                }
            }
        }
        if constexpr (by == Scales::columns) {
            note_columns(w, part, most);
#pragma unroll
            for (int j = 0; j < words; ++j) most[j] = 0;
        }
    }
    uint32_t all = 0;
    if constexpr (by == Scales::tensor) {
#pragma unroll
        for (int j = 0; j < words; ++j) all = larger(all, most[j]);
    }
    if (note(w, sum, larger_half(all))) conclude<H>(w);
}

template <typename T, typename H, Scales by>
__global__ void __launch_bounds__(threads, resident) cast_kernel(const Weight w) {
    if (*w.changed == 0) return;
    float inverse[by == Scales::columns ? per_thread : 1];
    if constexpr (by == Scales::tensor) inverse[0] = 1.0f / *w.scale;
    for (int64_t tile = blockIdx.x; tile < w.tiles; tile += gridDim.x) {
        const Part part(w, tile);
        if constexpr (by == Scales::columns) {
            if (part.line >= w.lines) continue;
#pragma unroll
            for (int e = 0; e < per_thread; ++e) inverse[e] = 1.0f / w.scale[part.line * per_thread + e];
        }
        for (int64_t row = part.row; row < part.end; ++row) {
            if (!part.has(w, row)) continue;
            if constexpr (by == Scales::rows) inverse[0] = 1.0f / w.scale[row];
            const Line<H> found = load_line<T, H>(w.x, part.at(w, row));
            reinterpret_cast<uint4*>(w.q)[part.at(w, row)] = float8_line<__NV_E4M3>(
                [&](int e) { return bounded(to_float(found.v[e]) * inverse[by == Scales::columns ? e : 0]); });
        }
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x != 0 || atomicAdd(w.ticket, 1u) != gridDim.x - 1) return;
    // Now, and not with the look: who finds this sum, on another stream too, finds q.
    __threadfence();
    *w.kept = *w.found, *w.ticket = 0;
}

template <typename T, typename H, Scales by>
void launch(const Weight& w, cudaStream_t stream) {
    const unsigned blocks = static_cast<unsigned>(std::min<int64_t>(w.tiles, 132 * resident));
    look_kernel<T, H, by><<<blocks, threads, 0, stream>>>(w);
    cast_kernel<T, H, by><<<blocks, threads, 0, stream>>>(w);
    check(cudaGetLastError(), "launch a weight's cast to float8");
}

// Calls `body` with values of the types that stand for a weight's own and the one that it is rounded to.
template <typename Body>
void with_types(DType type, DType through, Body body) {
    with_type(through, [&](auto h) {
        using H = decltype(h);
        if constexpr (sizeof(H) == 2) {
            if (type == through) return body(H{}, H{});
            if (type == DType::f32) return body(float{}, H{});
        }
    });
}

Weight laid_out(const WeightCast& c) {
    const int64_t lines = c.rows * c.cols / per_thread;
    Weight w{};
    w.x = c.x, w.q = c.q, w.scale = c.scale, w.all_lines = lines;
    w.share = static_cast<float>(1.0 / largest);
    w.rows = c.axis == 0 ? (lines + 31) / 32 : c.rows;  // one scale: a row is what a warp reads
    w.lines = c.axis == 0 ? 32 : c.cols / per_thread;
    w.scales = c.axis == 0 ? 1 : c.axis == -1 ? c.rows : c.cols;
    w.across = static_cast<int>((w.lines + 31) / 32);
    w.rows_per_warp = c.axis == -2 ? 8 * at_once : 4 * at_once;
    w.tiles = (w.rows + warps * w.rows_per_warp - 1) / (warps * w.rows_per_warp) * w.across;
    w.kept = reinterpret_cast<unsigned long long*>(c.kept);
    w.sum = reinterpret_cast<unsigned long long*>(c.scratch);
    w.ticket = reinterpret_cast<unsigned*>(c.scratch + 1);
    w.changed = w.ticket + 1;
    w.found = w.sum + 2;
    w.most = w.ticket + 4;
    return w;
}

}  // namespace

int64_t weight_scratch_words(int64_t scales) {
    return 3 + (scales + 1) / 2;
}

void preload_weights() {
    for (DType through : {DType::bf16, DType::f16}) {
        for (DType type : {through, DType::f32}) {
            with_types(type, through, [](auto t, auto h) {
                using T = decltype(t);
                using H = decltype(h);
                load(&look_kernel<T, H, Scales::tensor>), load(&cast_kernel<T, H, Scales::tensor>);
                load(&look_kernel<T, H, Scales::rows>), load(&cast_kernel<T, H, Scales::rows>);
                load(&look_kernel<T, H, Scales::columns>), load(&cast_kernel<T, H, Scales::columns>);
            });
        }
    }
}

void launch_weight_cast(const WeightCast& cast, DType type, DType through, cudaStream_t stream) {
    const Weight w = laid_out(cast);
    with_types(type, through, [&](auto t, auto h) {
        using T = decltype(t);
        using H = decltype(h);
        if (cast.axis == 0) return launch<T, H, Scales::tensor>(w, stream);
        if (cast.axis == -1) return launch<T, H, Scales::rows>(w, stream);
        launch<T, H, Scales::columns>(w, stream);
    });
}

}  // namespace ub_overlap::cuda
