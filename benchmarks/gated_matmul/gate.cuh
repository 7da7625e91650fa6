// Waiting for the arrival of a shard, on the GPU and never for ever.
#pragma once
#include <cstdint>

namespace gated {

constexpr uint64_t DEADLINE_NS = 2'000'000'000;

__device__ inline bool arrived(const uint32_t* flag) {
    uint32_t seen;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    return seen != 0;
}

__device__ inline uint64_t now() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

// Return once *flag is not zero. After DEADLINE_NS, count a late shard and return all the same.
__device__ inline void await(const uint32_t* flag, uint32_t* late) {
    if (arrived(flag)) return;
    const uint64_t start = now();
    while (!arrived(flag)) {
        if (now() - start > DEADLINE_NS) {
            atomicAdd(late, 1);
            return;
        }
        __nanosleep(32);
    }
}

}  // namespace gated
