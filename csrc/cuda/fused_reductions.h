// Reductions over the threads that share a row: of one block, or of a cluster of blocks through distributed shared memory.
#pragma once

#include "cuda/fused_call.h"

namespace ub_overlap::cuda {
namespace {

constexpr int warps = fused_threads / 32;
constexpr int most_in_cluster = 8;

struct Add {
    __device__ float operator()(float a, float b) const { return a + b; }
};
// Of the bits of absolute values: a NaN is above all numbers.
struct Larger {
    __device__ uint32_t operator()(uint32_t a, uint32_t b) const { return a > b ? a : b; }
};

// Where the warps that share a row leave their results: in all blocks of the cluster. Two places are used in turn.
struct RowParts {
    uint32_t values[2][most_in_cluster * warps];
    uint64_t barriers[2];  // of a cluster: complete when all values of a turn are there
};

__device__ inline RowParts& row_parts() {
    __shared__ RowParts parts;
    return parts;
}

// The same place in the shared memory of block `rank` of the cluster.
__device__ inline uint32_t shared_address(const void* at, int rank) {
    uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(at));
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
#endif
    return address;
}

// Lets the other blocks of a cluster write to this one. Their first reduction waits for that. Called by all threads.
__device__ inline void begin_cluster() {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
        for (uint64_t& barrier : row_parts().barriers) {
            const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(&barrier));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}

// Leaves the value of each warp in all blocks of the cluster, and waits for those of all their warps. `number`: as below.
// A cluster-wide barrier with release would wait until all stores of the block are performed, those at peers as well. These
// stores wait for nothing.
__device__ inline void exchange_in_cluster(const Parameters& p, uint32_t value, int number) {
#if __CUDA_ARCH__ >= 900
    RowParts& parts = row_parts();
    const int turn = number % 2, lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int in_block = static_cast<int>(blockDim.x) / 32;
    const auto barrier = static_cast<uint32_t>(__cvta_generic_to_shared(&parts.barriers[turn]));
    if (number == 1) asm volatile("barrier.cluster.wait;" ::: "memory");
    if (threadIdx.x == 0) {
        const auto bytes = static_cast<uint32_t>(in_block * p.cluster) * 4;
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    }
    if (lane < p.cluster) {
        const int own = static_cast<int>(blockIdx.x & (p.cluster - 1)) * in_block + warp;
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                         shared_address(&parts.values[turn][own], lane)),
                     "r"(value), "r"(shared_address(&parts.barriers[turn], lane))
                     : "memory");
    }
    const uint32_t parity = static_cast<uint32_t>(number - 1) / 2 % 2;  // of the uses of this barrier
    uint32_t done = 0;
    while (done == 0) {
        asm volatile(
            "{\n\t.reg .pred p;\n\t"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
            "selp.u32 %0, 1, 0, p;\n\t}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    }
#endif
}

__device__ inline uint32_t bits_of(uint32_t value) {
    return value;
}
__device__ inline uint32_t bits_of(float value) {
    return __float_as_uint(value);
}
template <typename Value>
__device__ inline Value from_bits(uint32_t bits);
template <>
__device__ inline uint32_t from_bits<uint32_t>(uint32_t bits) {
    return bits;
}
template <>
__device__ inline float from_bits<float>(uint32_t bits) {
    return __uint_as_float(bits);
}

// Returns the sum or maximum of `value` over the threads that share a row, the same bits in each. 0 is neutral. `number`: 1 for
// the block's first reduction, 2 for the next.
template <typename Value, typename Op>
__device__ inline Value reduce_over_row(const Parameters& p, Value value, int number, Op op) {
    uint32_t* place = row_parts().values[number % 2];
    int count = static_cast<int>(blockDim.x) / 32;
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) value = op(value, __shfl_xor_sync(0xffffffffu, value, lane));
    if (p.cluster > 1) {
        exchange_in_cluster(p, bits_of(value), number);
        count *= p.cluster;
    } else {
        if (threadIdx.x % 32 == 0) place[threadIdx.x / 32] = bits_of(value);
        __syncthreads();
    }
    // Of as many lanes as there are values, rounded up. The other lanes compute the same again.
    const int lanes = count <= 8 ? 8 : count <= 16 ? 16 : 32, part = static_cast<int>(threadIdx.x) & (lanes - 1);
    value = part < count ? from_bits<Value>(place[part]) : Value(0);
    for (int other = part + 32; other < count; other += 32) value = op(value, from_bits<Value>(place[other]));
    for (int lane = lanes / 2; lane > 0; lane /= 2) value = op(value, __shfl_xor_sync(0xffffffffu, value, lane));
    return value;
}

// Takes part in the reductions of a cluster whose other blocks may have succeeded, with NaN.
__device__ inline void fail_cluster(const Parameters& p) {
    if (p.cluster == 1) return;
    constexpr uint32_t nan = 0x7fffffff;
    const int sums = p.branch_norm.sums() + p.norm.sums();
    for (int number = 1; number <= sums; ++number) reduce_over_row(p, __uint_as_float(nan), number, Add());
    if (p.row_scales) reduce_over_row(p, nan, sums + 1, Larger());
}

}  // namespace
}  // namespace ub_overlap::cuda
