// A fused collective: an all_gather, reduce_scatter or all_reduce of few tokens, and what follows a reduction (a bias, a norm,
// a residual, another norm, a cast to float8), as one kernel.
//
// Strategies. One-shot: every rank sends its data to all peers, and each sums all of it. Two-shot (all_reduce): each rank sums
// its part, then sends the sum to all peers. One-shot takes one step and sends R - 1 tensors, two-shot two steps and two
// tensors at most.
//
// The result is dealt out to blocks, each a slice of complete rows. A block is a CUDA thread block, and a protocol of its own:
// it has flags, an epoch and memory at every rank. So no step spans the grid, and calls with fewer blocks leave the others
// unused.
//
//     memory of a rank       [packets] [2 slots][fused_blocks][region]     slot = the block's epoch modulo 2
//     region, one-shot       [R sources][slice]
//     region, two-shot       [R sources][largest part of the slice] [slice]
//     packets                small slices of one-shot on CUDA, in place of a region (cuda/fused_packets.h)
//
// Who may write when: a block that has seen READY of all peers for epoch e - 1, and their packets, may write slot e, since its
// peers have read e - 2 by then. No other flag is needed (runtime/schedule proves it).
#pragma once

#include <cstdint>

#include "core/flags.h"
#include "core/types.h"

namespace ub_overlap {

constexpr int fused_blocks = max_pieces;  // one flag word per source and block

enum class Norm : int32_t { none = 0, rms = 1, layer = 2 };

// A norm of rows: norm(x) * (weight_offset + weight) + bias, in fp32, rounded to T.
struct RowNorm {
    Norm kind = Norm::none;
    bool round_before_weight = false;  // round to T before the product with the weight too
    float epsilon = 0, weight_offset = 0;
    const char *weight = nullptr, *bias = nullptr;  // null: none
    bool exists() const { return kind != Norm::none; }
};

// What follows the reduction. T is the dtype of the collective. Each step rounds to T.
//
//     branch = branch_norm(reduced + linear_bias) * branch_factor + addend      reduced: the collective's result
//     summed = branch + residual
//     normed = norm(summed)                  without `round_sum` of the sum in fp32
//     cast   = float8(normed / scale)        one scale for the tensor, or one for each row, from the amax of `normed`:
//                                            max(amax * amax_factor, least_scale)
struct Epilogue {
    RowNorm branch_norm, norm;
    float branch_factor = 1;
    bool round_sum = true;                                                      // the norm reads `summed`, not the sum in fp32
    const char *linear_bias = nullptr, *addend = nullptr, *residual = nullptr;  // null: none
    const float* scale = nullptr;                                               // of the tensor
    float* row_scales = nullptr;                                                // results; null: no scales for rows
    float amax_factor = 0, least_scale = 0;                                     // of row scales
    bool divide_by_scale = false;                                               // else multiply by its reciprocal
    char* normed = nullptr;                                                     // float8 where there are scales
    DType normed_type = DType::f32;
    bool has_branch() const { return linear_bias || branch_norm.exists() || branch_factor != 1 || addend; }
};

// A tensor of `vectors` vectors of 16 bytes as slices of complete rows: block b has the vectors from b * block_vectors on.
struct FusedGrid {
    int64_t vectors = 0, row_vectors = 1, block_vectors = 0;
    int blocks = 0, threads = 32, per_thread = 1;  // per_thread: vectors of a row that a thread has, 1, 2 or fused_vectors
};

constexpr int64_t vector_size = 16;
constexpr int fused_threads = 512, fused_vectors = 8;                             // at most
constexpr int64_t fused_row_limit = fused_vectors * fused_threads * vector_size;  // bytes of a row that a norm can read
// Packets of a block's slice, and vectors that a rank sends to all peers, at most: beyond, twice the bytes take as long as a
// fence.
constexpr int64_t packet_size = 2 * vector_size, packet_vectors = 256, packet_sent_vectors = 16384;

// Chooses the threads of a block, and the vectors of each, for `row_vectors`.
void spread_rows(FusedGrid& grid);
// `rows` rows of `row_bytes`, a multiple of 16. Other rows are chosen without `keep_rows`.
FusedGrid make_fused_grid(int64_t rows, int64_t row_bytes, bool keep_rows);

// Bytes of a block's region in one slot.
int64_t fused_region_bytes(const FusedGrid& grid, int ranks, bool two_shot);
// Bytes of all packets of a rank.
int64_t fused_packet_bytes(int ranks);
// Bytes of memory per rank that hold packets and such regions, and the region of a block in memory of `bytes`.
int64_t fused_memory_bytes(int64_t region_bytes, int ranks);
int64_t fused_region_of(int64_t bytes, int ranks);

}  // namespace ub_overlap
