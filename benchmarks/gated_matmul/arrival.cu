// The arrival of shards, simulated by copy engines, and the kernel that awaits one in front of a matmul of its own.
#include <cuda_runtime.h>

#include "gate.cuh"

__global__ void await_flag(const uint32_t* flag, uint32_t* late) {
    gated::await(flag, late);
}

extern "C" int wait_flag(const uint32_t* flag, uint32_t* late, cudaStream_t stream) {
    await_flag<<<1, 1, 0, stream>>>(flag, late);
    return static_cast<int>(cudaGetLastError());
}

extern "C" int copy(void* to, const void* from, size_t bytes, cudaStream_t stream) {
    return static_cast<int>(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
}

extern "C" int fill(void* to, int byte, size_t bytes, cudaStream_t stream) {
    return static_cast<int>(cudaMemsetAsync(to, byte, bytes, stream));
}
