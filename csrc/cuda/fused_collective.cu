// Fused collectives: a collective of few tokens, and what follows a reduction, in one launch (core/fused_collective.h).
//
//     one-shot   push the slice to all peers | READY to each | residual and weight into registers | wait | rows
//     two-shot   push part p of the slice to rank p | READY | wait | push the sum of part `rank` to all | READY2 | wait | rows
//     rows       sum in fp32, in rank order, rounded | add the residual, rounded | norm | amax of the row | cast
//
// A thread has the same vectors of every row, so it reads only what it wrote itself, or what was pushed before a flag that the
// block has awaited. Rows are summed one after the other. A norm needs one or two sums over the threads of the block,
// and the scale of a row a maximum.
//
// Of few long rows each is dealt out to a cluster of blocks, so that more multiprocessors take part. These reductions
// then go over the cluster, through distributed shared memory. A block that fails takes part with NaN: no block waits for it.
//
// The order of memory: all threads push, the block meets at a barrier, then one thread per peer releases the flag at system
// scope, which is cumulative over the barrier. The peer's thread acquires it at system scope, and its block meets at a barrier
// before it reads.
#include <cooperative_groups.h>

#include <cstdint>

#include "cuda/elements.h"
#include "cuda/flag_wait.h"

namespace ub_overlap::cuda {
namespace {

constexpr int warps = fused_threads / 32;
constexpr int most_in_cluster = 4;
constexpr int64_t least_segment = 256;  // vectors of a row that a block of a cluster has, at least

enum class Exchange { gather, scatter, one_shot, two_shot };

struct Parameters {
    Group group;
    char* memory[max_ranks];  // of each rank
    int64_t region;           // bytes
    uint64_t timeout_ns;
    uint32_t tag;
    int32_t has_norm, is_layer_norm, round_sum, round_before_weight, is_e5m2, divide_by_scale;
    int32_t cluster;                              // blocks that share a row; `row_vectors` is the segment of one
    int64_t vectors, row_vectors, block_vectors;  // FusedGrid
    float divisor, epsilon, inverse_cols, weight_offset, amax_factor, least_scale;
    const uint4 *input, *residual, *weight, *bias;
    const float* scale;
    float* row_scales;
    uint4* output;
    char* normed;
    int32_t normed_bytes;  // of a vector's elements
};

template <typename T>
constexpr int elements_of_vector = 16 / static_cast<int>(sizeof(T));

template <typename T>
union Vector {
    uint4 line;
    T v[elements_of_vector<T>];
};

template <typename T>
__device__ inline T rounded(float value) {
    T result;
    from_float(value, result);
    return result;
}

// What a block knows of its call.
struct Block {
    uint64_t word;        // epoch and tag
    int slot;             // fused_slot or the next
    int64_t first, size;  // vectors of its slice
};

// The region of this block at `rank`, as vectors.
__device__ inline uint4* region_at(const Parameters& p, const Block& block, int rank) {
    const int64_t number = static_cast<int64_t>(block.slot - fused_slot) * fused_blocks + blockIdx.x;
    return reinterpret_cast<uint4*>(p.memory[rank] + number * p.region);
}

__device__ inline WaitWord wait_word(const Parameters& p, const Block& block, FlagKind kind, int source) {
    WaitWord w{};
    w.place = static_cast<uint32_t>(flag_place(kind, block.slot, source, static_cast<int>(blockIdx.x), p.group.ranks));
    w.source = static_cast<uint16_t>(source), w.index = static_cast<uint16_t>(blockIdx.x);
    w.kind = static_cast<uint8_t>(kind);
    return w;
}

// Takes the block's lock and counts its epoch. Returns the call's word, 0 where the group has failed. Run by one thread.
__device__ uint64_t begin(const Parameters& p) {
    const Group& g = p.group;
    uint64_t* state = &g.local->fused[blockIdx.x];
    const auto lock = [state] {
        uint64_t old;
        asm volatile("atom.acquire.gpu.global.or.b64 %0, [%1], %2;" : "=l"(old) : "l"(state), "l"(fused_lock) : "memory");
        return old;
    };
    uint64_t old = lock();
    const uint64_t abort = load_acquire(&g.shared[g.rank]->abort);
    WaitWord own{};
    own.source = static_cast<uint16_t>(g.rank), own.index = static_cast<uint16_t>(blockIdx.x);
    if (old & fused_lock) {
        const uint64_t start = now_ns();
        while (((old = lock()) & fused_lock) && load_failed(g.local) == 0) {
            __nanosleep(256);
            const uint64_t waited = now_ns() - start;
            if (waited > p.timeout_ns) fail(g, own, WaitOutcome::group_lock, old << 32 | p.tag, 0, 0, waited);
        }
    }
    uint32_t epoch = static_cast<uint32_t>(old) + 1;
    if (epoch == 0) epoch = fused_slots;  // 0 is no epoch, and the slots go on in turn
    const uint64_t word = static_cast<uint64_t>(epoch) << 32 | p.tag;
    if (abort != 0) fail(g, own, WaitOutcome::aborted, word, 0, abort, 0);
    if (blockIdx.x == 0) *reinterpret_cast<volatile uint64_t*>(&g.local->word[fused_slot]) = word;
    return load_failed(g.local) ? 0 : word;
}

// Lets the next kernel use the block. Called by all threads.
__device__ void end(const Parameters& p, uint32_t epoch) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    uint64_t* state = &p.group.local->fused[blockIdx.x];
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(state), "l"(static_cast<uint64_t>(epoch)) : "memory");
}

// Calls `store(i, load(i))` for each vector i < size, `width` loads of a thread at a time.
template <int width = 4, typename Load, typename Store>
__device__ inline void for_vectors(int64_t size, Load load, Store store) {
    for (int64_t base = threadIdx.x; base < size; base += width * int64_t{blockDim.x}) {
        uint4 loaded[width];
#pragma unroll
        for (int k = 0; k < width; ++k) {
            if (base + k * int64_t{blockDim.x} < size) loaded[k] = load(base + k * int64_t{blockDim.x});
        }
#pragma unroll
        for (int k = 0; k < width; ++k) {
            if (base + k * int64_t{blockDim.x} < size) store(base + k * int64_t{blockDim.x}, loaded[k]);
        }
    }
}

// Calls `body` with each peer, the next rank first: no two ranks begin with the same one.
template <typename Body>
__device__ inline void for_peers(const Group& g, Body body) {
    for (int i = 1; i < g.ranks; ++i) body(g.rank + i < g.ranks ? g.rank + i : g.rank + i - g.ranks);
}

// Stores `value` at all peers, at `to(region)`.
template <typename To>
__device__ inline void store_at_peers(const Parameters& p, const Block& block, uint4 value, To to) {
    for_peers(p.group, [&](int peer) { *to(region_at(p, block, peer)) = value; });
}

// Signals that all pushes of the block have landed, and waits for those of all peers. Called by all threads; they may read what
// the peers pushed if the result is true. Else the group has failed.
__device__ bool meet(const Parameters& p, const Block& block, FlagKind kind) {
    const Group& g = p.group;
    __syncthreads();
    bool failed = false;
    if (threadIdx.x < g.ranks && threadIdx.x != g.rank) {
        const int peer = static_cast<int>(threadIdx.x);
        const auto place = flag_place(kind, block.slot, g.rank, static_cast<int>(blockIdx.x), g.ranks);
        store_release(flag_words(g.shared[peer]) + place, block.word);
        const WaitWord w = wait_word(p, block, kind, peer);
        const uint32_t expected = epoch_half(block.word);
        const auto arrived = [expected](uint64_t seen) {
            return seen != 0 && static_cast<int32_t>(epoch_half(seen) - expected) >= 0;
        };
        const uint64_t seen = spin_for_flag(g, w, block.word, p.timeout_ns, arrived, [](uint64_t word) { return word; });
        failed = seen != block.word;
        if (seen != 0 && failed) fail(g, w, WaitOutcome::mismatch, block.word, seen, 0, 0);
    }
    return !__syncthreads_or(failed);
}

struct Add {
    __device__ float operator()(float a, float b) const { return a + b; }
};
// Of the bits of absolute values: a NaN is above all numbers.
struct Larger {
    __device__ uint32_t operator()(uint32_t a, uint32_t b) const { return a > b ? a : b; }
};

// Returns the sum or maximum of `value` over all threads of the block, the same bits in each. 0 is neutral. `turn`: 0 and 1 in
// alternation.
template <typename Value, typename Op>
__device__ inline Value reduce_in_block(Value value, int turn, Op op) {
    __shared__ Value parts[2][warps];
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) value = op(value, __shfl_xor_sync(0xffffffffu, value, lane));
    if (threadIdx.x % 32 == 0) parts[turn][threadIdx.x / 32] = value;
    __syncthreads();
    value = threadIdx.x % 32 < blockDim.x / 32 ? parts[turn][threadIdx.x % 32] : Value(0);
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) value = op(value, __shfl_xor_sync(0xffffffffu, value, lane));
    return value;
}

// Tells the other blocks of a cluster that this one has begun. Their first reduction waits for that.
__device__ inline void begin_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}

// Returns the sum or maximum over the blocks of a cluster, which have equal `value` in all threads. `number`: 1 for the block's
// first reduction, 2 for the next. They use two places in turn.
template <typename Value, typename Op>
__device__ inline Value reduce_in_cluster(const Parameters& p, Value value, int number, Op op) {
#if __CUDA_ARCH__ >= 900
    __shared__ Value parts[2][most_in_cluster];
    const int turn = number % 2;
    if (number == 1) asm volatile("barrier.cluster.wait;" ::: "memory");
    const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    const int block = static_cast<int>(threadIdx.x);
    if (block < p.cluster) *cluster.map_shared_rank(&parts[turn][cluster.block_rank()], block) = value;
    asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
    value = parts[turn][0];
    for (int other = 1; other < p.cluster; ++other) value = op(value, parts[turn][other]);
#endif
    return value;
}

// Takes part in the reductions of a cluster whose other blocks may have succeeded, with NaN.
__device__ inline void fail_cluster(const Parameters& p) {
    if (p.cluster == 1) return;
    constexpr uint32_t nan = 0x7fffffff;
    int number = 0;
    for (int sums = p.is_layer_norm ? 2 : 1; sums > 0; --sums) reduce_in_cluster(p, __uint_as_float(nan), ++number, Add());
    if (p.row_scales) reduce_in_cluster(p, nan, ++number, Larger());
}

// Returns the sum over ranks, in their order, of one vector, rounded to T. `source(rank)`: where its vector lies.
template <typename T, typename Source>
__device__ inline uint4 sum_of(const Parameters& p, Source source) {
    constexpr int n = elements_of_vector<T>, width = 4;
    float sum[n];
    for (int base = 0; base < p.group.ranks; base += width) {
        Vector<T> loaded[width];
#pragma unroll
        for (int k = 0; k < width; ++k) {
            if (base + k < p.group.ranks) loaded[k].line = __ldcg(source(base + k));
        }
#pragma unroll
        for (int k = 0; k < width; ++k) {
            if (base + k >= p.group.ranks) continue;
#pragma unroll
            for (int e = 0; e < n; ++e) {
                const float value = to_float(loaded[k].v[e]);
                sum[e] = base + k == 0 ? value : sum[e] + value;
            }
        }
    }
    Vector<T> result;
#pragma unroll
    for (int e = 0; e < n; ++e) from_float(p.divisor == 1.0f ? sum[e] : sum[e] / p.divisor, result.v[e]);
    return result.line;
}

// Scales a vector of numbers, rounds it to float8 and stores it.
template <int n>
__device__ inline void store_float8(const Parameters& p, int64_t at, const float (&value)[n], float scale) {
    union {
        uint64_t bits;
        __nv_fp8x2_storage_t pair[4];
    } line{};
    const auto format = p.is_e5m2 ? __NV_E5M2 : __NV_E4M3;
    const float inverse = 1.0f / scale;
    const auto scaled = [&](float x) { return p.divide_by_scale ? x / scale : x * inverse; };
#pragma unroll
    for (int e = 0; e < n; e += 2) {
        const float2 two = make_float2(scaled(value[e]), scaled(value[e + 1]));
        line.pair[e / 2] = __nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, format);
    }
    if (n == 8) {
        reinterpret_cast<uint64_t*>(p.normed)[at] = line.bits;
    } else {
        reinterpret_cast<uint32_t*>(p.normed)[at] = static_cast<uint32_t>(line.bits);
    }
}

// What follows the reduction, for the rows of one block. `per_thread`: vectors of a row that a thread has.
template <typename T, int per_thread>
class Rows {
  public:
    // Loads what does not depend on the peers.
    __device__ Rows(const Parameters& p, const Block& block) : p_(p), block_(block) {
        load_residual(0);
        if (!p.has_norm) return;
        const int64_t segment = p.cluster == 1 ? 0 : blockIdx.x % p.cluster * p.row_vectors;
        for_own([&](int v, int64_t at) {
            if (p_.weight) weight_[v].line = p_.weight[segment + at];
            if (p_.bias) bias_[v].line = p_.bias[segment + at];
        });
        if (p.scale) scale_ = *p.scale;
    }

    // `reduced(i)`: the reduced vector i of the slice.
    template <typename Reduced>
    __device__ void run(Reduced reduced) {
        for (int64_t row = 0; row < block_.size; row += p_.row_vectors) {
            Vector<T> own[per_thread];  // the sums, or what was reduced where the norm reads sums in fp32
            for_own([&](int v, int64_t at) {
                if (row + at >= block_.size) return;  // the last row without a norm may be short
                own[v].line = reduced(row + at);
                Vector<T> summed = own[v];
                if (p_.residual) add_residual(summed, residual_[v]);
                p_.output[block_.first + row + at] = summed.line;
                if (p_.round_sum) own[v] = summed;
            });
            if (p_.round_sum) load_residual(row + p_.row_vectors);
            if (p_.has_norm) normalize(own, block_.first + row);
            if (!p_.round_sum) load_residual(row + p_.row_vectors);
        }
    }

  private:
    static constexpr int n = elements_of_vector<T>;

    // Calls `body(v, at)` for each vector `at` of a row that this thread has.
    template <typename Body>
    __device__ void for_own(Body body) {
#pragma unroll
        for (int v = 0; v < per_thread; ++v) {
            const int64_t at = threadIdx.x + v * int64_t{blockDim.x};
            if (at < p_.row_vectors) body(v, at);
        }
    }
    __device__ void load_residual(int64_t row) {
        if (!p_.residual) return;
        for_own([&](int v, int64_t at) {
            if (row + at < block_.size) residual_[v].line = p_.residual[block_.first + row + at];
        });
    }
    __device__ static void add_residual(Vector<T>& to, const Vector<T>& residual) {
#pragma unroll
        for (int e = 0; e < n; ++e) from_float(to_float(to.v[e]) + to_float(residual.v[e]), to.v[e]);
    }
    // Returns number `e` of vector `v`, as the norm reads it.
    __device__ float number(const Vector<T> (&row)[per_thread], int v, int e) const {
        const float x = to_float(row[v].v[e]);
        return p_.round_sum ? x : x + to_float(residual_[v].v[e]);
    }
    // Reduces a value of each thread over the threads that share the row.
    template <typename Value, typename Op>
    __device__ Value reduce(Value value, Op op) {
        ++reductions_;
        value = reduce_in_block(value, reductions_ % 2, op);
        return p_.cluster == 1 ? value : reduce_in_cluster(p_, value, reductions_, op);
    }
    // Sums `term(x)` over the numbers x of a row.
    template <typename Term>
    __device__ float row_sum(const Vector<T> (&row)[per_thread], Term term) {
        float sum = 0;
        for_own([&](int v, int64_t) {
#pragma unroll
            for (int e = 0; e < n; ++e) sum += term(number(row, v, e));
        });
        return reduce(sum, Add());
    }
    // Returns the scale of a row with these elements. NaN where one is NaN.
    __device__ float row_scale(const Vector<T> (&row)[per_thread]) {
        uint32_t amax = 0;
        for_own([&](int v, int64_t) {
#pragma unroll
            for (int e = 0; e < n; ++e) amax = Larger()(amax, __float_as_uint(fabsf(to_float(row[v].v[e]))));
        });
        const float scale = __uint_as_float(reduce(amax, Larger())) * p_.amax_factor;
        return scale < p_.least_scale ? p_.least_scale : scale;
    }
    // Norms a row in its place and stores it, in T or as float8. `first`: its place in the tensor.
    __device__ void normalize(Vector<T> (&row)[per_thread], int64_t first) {
        float mean = 0;
        if (p_.is_layer_norm) mean = row_sum(row, [](float x) { return x; }) * p_.inverse_cols;
        const float squares = row_sum(row, [mean](float x) { return (x - mean) * (x - mean); });
        const float factor = rsqrtf(squares * p_.inverse_cols + p_.epsilon);
        for_own([&](int v, int64_t) {
#pragma unroll
            for (int e = 0; e < n; ++e) {
                float x = (number(row, v, e) - mean) * factor;
                if (p_.round_before_weight) x = to_float(rounded<T>(x));
                if (p_.weight) x *= p_.weight_offset + to_float(weight_[v].v[e]);
                if (p_.bias) x += to_float(bias_[v].v[e]);
                from_float(x, row[v].v[e]);
            }
        });
        if (p_.row_scales) {
            scale_ = row_scale(row);
            const bool is_first = threadIdx.x == 0 && blockIdx.x % p_.cluster == 0;
            if (is_first) p_.row_scales[first / (p_.row_vectors * p_.cluster)] = scale_;
        }
        for_own([&](int v, int64_t at) {
            if (!p_.scale && !p_.row_scales) {
                reinterpret_cast<uint4*>(p_.normed)[first + at] = row[v].line;
                return;
            }
            float value[n];
#pragma unroll
            for (int e = 0; e < n; ++e) value[e] = to_float(row[v].v[e]);
            store_float8<n>(p_, first + at, value, scale_);
        });
    }

    const Parameters& p_;
    const Block& block_;
    Vector<T> residual_[per_thread], weight_[per_thread], bias_[per_thread];
    float scale_ = 1.0f;
    int reductions_ = 0;
};

// Fills the block's results with NaN.
__device__ void poison(const Parameters& p, const Block& block, int copies) {
    const uint4 ones = make_uint4(~0u, ~0u, ~0u, ~0u);
    for (int64_t i = threadIdx.x; i < block.size; i += blockDim.x) {
        for (int k = 0; k < copies; ++k) p.output[k * p.vectors + block.first + i] = ones;
    }
    if (!p.has_norm) return;
    auto* words = reinterpret_cast<uint32_t*>(p.normed) + block.first * p.normed_bytes / 4;
    for (int64_t i = threadIdx.x; i < block.size * p.normed_bytes / 4; i += blockDim.x) words[i] = ~0u;
    if (!p.row_scales) return;
    float* scales = p.row_scales + block.first / (p.row_vectors * p.cluster);
    for (int64_t i = threadIdx.x; i < block.size / p.row_vectors; i += blockDim.x) scales[i] = __uint_as_float(~0u);
}

__device__ bool gather(const Parameters& p, const Block& block) {
    const Group& g = p.group;
    const uint4* own = p.input + block.first;
    for_vectors(
        block.size, [&](int64_t i) { return own[i]; },
        [&](int64_t i, uint4 value) {
            store_at_peers(p, block, value, [&](uint4* to) { return to + g.rank * p.block_vectors + i; });
            p.output[g.rank * p.vectors + block.first + i] = value;
        });
    if (!meet(p, block, FlagKind::ready)) return false;
    const uint4* landed = region_at(p, block, g.rank);
    for_peers(g, [&](int source) {
        for_vectors(
            block.size, [&](int64_t i) { return __ldcg(landed + source * p.block_vectors + i); },
            [&](int64_t i, uint4 value) { p.output[source * p.vectors + block.first + i] = value; });
    });
    return true;
}

// reduce_scatter, and one-shot all_reduce: peers get another slice of the input, or the same.
template <typename T, int per_thread, bool is_scatter>
__device__ bool reduce_one_shot(const Parameters& p, const Block& block) {
    const Group& g = p.group;
    if (is_scatter) {
        for_peers(g, [&](int peer) {
            uint4* to = region_at(p, block, peer) + g.rank * p.block_vectors;
            const uint4* from = p.input + peer * p.vectors + block.first;
            for_vectors(block.size, [&](int64_t i) { return from[i]; }, [&](int64_t i, uint4 value) { to[i] = value; });
        });
    } else {
        const uint4* from = p.input + block.first;
        for_vectors(
            block.size, [&](int64_t i) { return from[i]; },
            [&](int64_t i, uint4 value) {
                store_at_peers(p, block, value, [&](uint4* to) { return to + g.rank * p.block_vectors + i; });
            });
    }
    Rows<T, per_thread> rows(p, block);
    if (!meet(p, block, FlagKind::ready)) return false;
    const uint4* own = p.input + (is_scatter ? g.rank * p.vectors : 0) + block.first;
    const uint4* landed = region_at(p, block, g.rank);
    rows.run([&](int64_t i) {
        return sum_of<T>(p, [&](int rank) { return rank == g.rank ? own + i : landed + rank * p.block_vectors + i; });
    });
    return true;
}

template <typename T, int per_thread>
__device__ bool reduce_two_shot(const Parameters& p, const Block& block) {
    const Group& g = p.group;
    const auto part_begin = [&](int rank) { return block.size * rank / g.ranks; };
    const int64_t largest = (p.block_vectors + g.ranks - 1) / g.ranks, sums = g.ranks * largest;  // the slice of sums
    const uint4* from = p.input + block.first;
    for_peers(g, [&](int peer) {
        const int64_t begin = part_begin(peer);
        uint4* to = region_at(p, block, peer) + g.rank * largest;
        for_vectors(
            part_begin(peer + 1) - begin, [&](int64_t i) { return from[begin + i]; },
            [&](int64_t i, uint4 value) { to[i] = value; });
    });
    if (!meet(p, block, FlagKind::ready)) return false;
    uint4* landed = region_at(p, block, g.rank);
    const int64_t begin = part_begin(g.rank);
    const auto summed = [&](int64_t i) {
        return sum_of<T>(p, [&](int rank) { return rank == g.rank ? from + begin + i : landed + rank * largest + i; });
    };
    for_vectors<1>(part_begin(g.rank + 1) - begin, summed, [&](int64_t i, uint4 value) {
        store_at_peers(p, block, value, [&](uint4* to) { return to + sums + begin + i; });
        landed[sums + begin + i] = value;
    });
    Rows<T, per_thread> rows(p, block);
    if (!meet(p, block, FlagKind::ready2)) return false;
    rows.run([&](int64_t i) { return __ldcg(landed + sums + i); });
    return true;
}

template <Exchange exchange, typename T, int per_thread>
__global__ void __launch_bounds__(fused_threads) fused_kernel(const __grid_constant__ Parameters p) {
    __shared__ uint64_t word;
    if (p.cluster > 1) begin_cluster();
    if (threadIdx.x == 0) word = begin(p);
    __syncthreads();
    Block block;
    block.word = word;
    block.slot = fused_slot + static_cast<int>(epoch_half(word) % fused_slots);
    block.first = blockIdx.x * p.block_vectors;
    block.size = p.vectors - block.first < p.block_vectors ? p.vectors - block.first : p.block_vectors;
    bool good = word != 0;
    if (good) {
        if constexpr (exchange == Exchange::gather) good = gather(p, block);
        if constexpr (exchange == Exchange::scatter) good = reduce_one_shot<T, per_thread, true>(p, block);
        if constexpr (exchange == Exchange::one_shot) good = reduce_one_shot<T, per_thread, false>(p, block);
        if constexpr (exchange == Exchange::two_shot) good = reduce_two_shot<T, per_thread>(p, block);
    }
    if (!good) fail_cluster(p);
    if (!good) poison(p, block, exchange == Exchange::gather ? p.group.ranks : 1);
    end(p, epoch_half(word));
}

using FusedKernel = void (*)(Parameters);

template <typename T, int per_thread>
FusedKernel kernel_for(Exchange exchange) {
    switch (exchange) {
        case Exchange::gather:
            return &fused_kernel<Exchange::gather, float, 1>;
        case Exchange::scatter:
            return &fused_kernel<Exchange::scatter, T, per_thread>;
        case Exchange::one_shot:
            return &fused_kernel<Exchange::one_shot, T, per_thread>;
        default:
            return &fused_kernel<Exchange::two_shot, T, per_thread>;
    }
}

FusedKernel kernel_of(Exchange exchange, DType type, int per_thread) {
    FusedKernel kernel = nullptr;
    if (exchange == Exchange::gather) return kernel_for<float, 1>(exchange);
    with_type(type, [&](auto t) {
        using T = decltype(t);
        kernel = per_thread == 1   ? kernel_for<T, 1>(exchange)
                 : per_thread == 2 ? kernel_for<T, 2>(exchange)
                                   : kernel_for<T, fused_vectors>(exchange);
    });
    return kernel;
}

Exchange exchange_of(const Call& call) {
    if (call.collective == Collective::gather) return Exchange::gather;
    if (call.collective == Collective::scatter) return Exchange::scatter;
    return call.two_shot ? Exchange::two_shot : Exchange::one_shot;
}

// Returns how many blocks share a row: more than one where a row is long, and each block would have one.
int cluster_of(const FusedGrid& grid, bool has_norm) {
    int device = 0, generation = 0;
    check(cudaGetDevice(&device), "get the current device");
    check(cudaDeviceGetAttribute(&generation, cudaDevAttrComputeCapabilityMajor, device), "get the device's generation");
    if (!has_norm || generation < 9 || grid.block_vectors != grid.row_vectors) return 1;
    int cluster = most_in_cluster;
    const auto fits = [&] {
        return grid.blocks * cluster <= fused_blocks && grid.row_vectors % cluster == 0 &&
               grid.row_vectors / cluster >= least_segment;
    };
    while (cluster > 1 && !fits()) cluster /= 2;
    return cluster;
}

// Returns `grid` with `cluster` blocks for each of its own.
FusedGrid divide(FusedGrid grid, int cluster) {
    if (cluster == 1) return grid;
    grid.row_vectors /= cluster, grid.block_vectors /= cluster, grid.blocks *= cluster;
    const int64_t needed = (grid.row_vectors + fused_threads - 1) / fused_threads;
    grid.per_thread = needed <= 2 ? static_cast<int>(needed) : fused_vectors;
    grid.threads = static_cast<int>((grid.row_vectors + grid.per_thread * 32 - 1) / (grid.per_thread * 32) * 32);
    return grid;
}

}  // namespace

void preload_fused_collectives() {
    for (const Exchange exchange : {Exchange::gather, Exchange::scatter, Exchange::one_shot, Exchange::two_shot}) {
        for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
            for (const int per_thread : {1, 2, fused_vectors}) load(kernel_of(exchange, type, per_thread), fused_threads);
        }
    }
}

void launch_fused_collective(const Group& group, const Call& call, const std::vector<char*>& memory, int64_t region,
                             int64_t timeout_ns, cudaStream_t stream) {
    if (call.grid.blocks == 0) return;
    const Epilogue& epilogue = call.epilogue;
    const int cluster = cluster_of(call.grid, epilogue.norm != Norm::none);
    const FusedGrid grid = divide(call.grid, cluster);
    const FusedKernel kernel = kernel_of(exchange_of(call), call.type, grid.per_thread);
    // Blocks wait for their like at the peers, so all of them must run at once.
    const int64_t resident = resident_blocks(reinterpret_cast<const void*>(kernel), fused_threads);
    if (resident < grid.blocks) {
        throw NamedError("UbOverlapError", {{"what", "the device is too small for a fused collective"},
                                            {"where", call.op_name + " at site '" + call.site + "'"},
                                            {"got", std::to_string(resident) + " blocks that run at once"},
                                            {"expected", std::to_string(grid.blocks) + " or more"},
                                            {"fix", "use another strategy"}});
    }
    Parameters p{};
    p.group = group;
    for (size_t r = 0; r < memory.size(); ++r) p.memory[r] = memory[r];
    p.region = region, p.timeout_ns = static_cast<uint64_t>(timeout_ns), p.tag = call.tag;
    p.cluster = cluster;
    p.vectors = grid.vectors, p.row_vectors = grid.row_vectors, p.block_vectors = grid.block_vectors;
    p.divisor = call.average ? static_cast<float>(call.ranks) : 1.0f;
    p.input = reinterpret_cast<const uint4*>(call.input), p.output = reinterpret_cast<uint4*>(call.output);
    p.residual = reinterpret_cast<const uint4*>(epilogue.residual);
    p.has_norm = epilogue.norm != Norm::none, p.is_layer_norm = epilogue.norm == Norm::layer;
    p.round_sum = epilogue.round_sum, p.round_before_weight = epilogue.round_before_weight;
    p.is_e5m2 = epilogue.normed_type == DType::e5m2, p.divide_by_scale = epilogue.divide_by_scale;
    p.weight_offset = epilogue.weight_offset;
    p.epsilon = epilogue.epsilon, p.amax_factor = epilogue.amax_factor, p.least_scale = epilogue.least_scale;
    p.inverse_cols = 1.0f / static_cast<float>(call.grid.row_vectors * vector_size / size_of(call.type));
    p.weight = reinterpret_cast<const uint4*>(epilogue.weight), p.bias = reinterpret_cast<const uint4*>(epilogue.bias);
    p.scale = epilogue.scale, p.row_scales = epilogue.row_scales, p.normed = epilogue.normed;
    p.normed_bytes = static_cast<int32_t>(vector_size / size_of(call.type) * size_of(epilogue.normed_type));
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(grid.blocks)), config.blockDim = dim3(static_cast<unsigned>(grid.threads));
    config.stream = stream, config.attrs = &attribute, config.numAttrs = cluster > 1 ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kernel, p), "launch a fused collective");
}

}  // namespace ub_overlap::cuda
