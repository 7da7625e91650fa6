// Reductions over the threads that share a row: of one block, or of a cluster of blocks through distributed shared memory.
#pragma once

#include <cooperative_groups.h>

#include "cuda/fused_call.h"

namespace ub_overlap::cuda {
namespace {

constexpr int warps = fused_threads / 32;
constexpr int most_in_cluster = 4;

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
    const int sums = p.branch_norm.sums() + p.norm.sums();
    for (int number = 1; number <= sums; ++number) reduce_in_cluster(p, __uint_as_float(nan), number, Add());
    if (p.row_scales) reduce_in_cluster(p, nan, sums + 1, Larger());
}

}  // namespace
}  // namespace ub_overlap::cuda
