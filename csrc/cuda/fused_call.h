// What the kernel of a fused collective is given, and where a block's memory lies (core/fused_collective.h).
#pragma once

#include <cstdint>

#include "cuda/elements.h"
#include "cuda/flag_wait.h"
#include "cuda/fused_variants.h"

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

// Indices of vectors within a block's slice have 32 bits: 64 take twice the instructions, and a thread has few to hide. What
// every block reads at once is at the front, in few lines of the constant cache, which is cold in every launch.
struct Parameters {
    int32_t row_vectors, block_vectors;  // FusedGrid
    int32_t cluster;                     // blocks that share a row, a power of two; `row_vectors` is the segment of one
    int32_t in_packets;
    const uint4 *input, *residual;
    int64_t vectors;  // FusedGrid
    NormParameters norm;
    uint4* output;
    char* normed;
    uint32_t tag;
    float inverse_cols;
    int64_t packets, region;  // bytes: of all packets, in front of the regions, and of a region
    uint64_t timeout_ns;
    Group group;
    char* memory[max_ranks];  // of each rank
    // Only read by full epilogues.
    int32_t has_branch, round_sum, is_e5m2, divide_by_scale;
    float divisor, branch_factor, amax_factor, least_scale;
    NormParameters branch_norm;
    const uint4 *addend, *linear_bias;
    const float* scale;
    float* row_scales;
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
    uint64_t word;   // epoch and tag; 0: the group has failed
    int64_t first;   // vector of its slice
    int32_t size;    // vectors of its slice
    uint32_t place;  // of the slot and the block, among all that fused collectives have
    __device__ void begin(uint64_t of_call);
};

__device__ inline Block slice_of(const Parameters& p) {
    Block block;
    block.first = int64_t{blockIdx.x} * p.block_vectors;
    const int64_t left = p.vectors - block.first;
    block.size = left < p.block_vectors ? static_cast<int32_t>(left) : p.block_vectors;
    return block;
}

__device__ inline int slot_of(uint64_t word) {
    return fused_slot + static_cast<int>(epoch_half(word) % fused_slots);
}

__device__ inline void Block::begin(uint64_t of_call) {
    word = of_call;
    place = static_cast<uint32_t>(slot_of(word) - fused_slot) * fused_blocks + blockIdx.x;
}

// The region of this block at `rank`, as vectors.
__device__ inline uint4* region_at(const Parameters& p, const Block& block, int rank) {
    return reinterpret_cast<uint4*>(p.memory[rank] + p.packets + block.place * p.region);
}

__device__ inline WaitWord wait_word(const Parameters& p, uint64_t word, FlagKind kind, int source) {
    WaitWord w{};
    w.place = static_cast<uint32_t>(flag_place(kind, slot_of(word), source, static_cast<int>(blockIdx.x), p.group.ranks));
    w.source = static_cast<uint16_t>(source), w.index = static_cast<uint16_t>(blockIdx.x);
    w.kind = static_cast<uint8_t>(kind);
    return w;
}

}  // namespace
}  // namespace ub_overlap::cuda
