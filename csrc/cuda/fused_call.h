// What the kernel of a fused collective is given, and where a block's memory lies (core/fused_collective.h).
#pragma once

#include <cstdint>

#include "cuda/elements.h"
#include "cuda/flag_wait.h"
#include "cuda/prefetch.h"

namespace ub_overlap::cuda {
namespace {

// A norm of rows. kind: Norm. weight and bias: of all columns, or null.
struct NormParameters {
    Norm kind;
    int32_t round_before_weight;
    float epsilon, weight_offset;
    const uint4 *weight, *bias;
    __device__ bool exists() const { return kind != Norm::none; }
    // How many sums over a row it needs.
    __device__ int sums() const { return static_cast<int>(kind); }
};
static_assert(static_cast<int>(Norm::none) == 0 && static_cast<int>(Norm::rms) == 1 && static_cast<int>(Norm::layer) == 2);

struct Parameters {
    Group group;
    char *packets[max_ranks], *regions[max_ranks];  // of each rank
    int64_t region;                                 // bytes
    uint64_t timeout_ns;
    uint32_t tag;
    int32_t has_branch, round_sum, is_e5m2, divide_by_scale;
    int32_t cluster;                              // blocks that share a row; `row_vectors` is the segment of one
    int64_t vectors, row_vectors, block_vectors;  // FusedGrid
    float divisor, inverse_cols, branch_factor, amax_factor, least_scale;
    const uint4 *input, *residual, *addend, *linear_bias;
    NormParameters branch_norm, norm;
    const float* scale;
    float* row_scales;
    uint4* output;
    char* normed;
    int32_t normed_bytes;  // of a vector's elements
    int32_t blocks;        // those behind them prefetch
    CachedSpans prefetched;
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
    return reinterpret_cast<uint4*>(p.regions[rank] + number * p.region);
}

__device__ inline WaitWord wait_word(const Parameters& p, const Block& block, FlagKind kind, int source) {
    WaitWord w{};
    w.place = static_cast<uint32_t>(flag_place(kind, block.slot, source, static_cast<int>(blockIdx.x), p.group.ranks));
    w.source = static_cast<uint16_t>(source), w.index = static_cast<uint16_t>(blockIdx.x);
    w.kind = static_cast<uint8_t>(kind);
    return w;
}

}  // namespace
}  // namespace ub_overlap::cuda
