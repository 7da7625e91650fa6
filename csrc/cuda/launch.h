// Grids and launches of our kernels. For .cu files.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/kernels.h"

namespace ub_overlap::cuda {

// What the current device does with a kernel in blocks of a given size. Looked up once; also while a stream is being captured.
struct KernelLimits {
    int64_t resident_blocks = 1;         // that run at once on the whole device
    bool waits_for_predecessor = false;  // its code has griddepcontrol.wait, which needs compute capability 9.0
};
KernelLimits limits_of(const void* kernel, int threads);

template <typename... Parameters>
void load(void (*kernel)(Parameters...), int threads) {
    limits_of(reinterpret_cast<const void*>(kernel), threads);
}

// Returns the blocks of a kernel that run at once on the whole device.
template <typename... Parameters>
int64_t resident_blocks(void (*kernel)(Parameters...), int threads) {
    return limits_of(reinterpret_cast<const void*>(kernel), threads).resident_blocks;
}

// Returns the grid of a kernel that loops over `items` in steps of its grid, an item per thread. All of its blocks are resident
// at once, so they start and end together. There are no more than the work needs.
template <typename... Parameters>
unsigned blocks_for(void (*kernel)(Parameters...), int64_t items, int threads) {
    return static_cast<unsigned>(
        std::max<int64_t>(1, std::min((items + threads - 1) / threads, resident_blocks(kernel, threads))));
}

// Waits until the kernels before this one on its stream have ended and what they wrote is visible. A kernel that is launched
// early calls it before it reads, writes or signals anything. It also ends behind them then, so that later work of the stream,
// which waits for this kernel alone, is behind them too. No effect in other launches.
__device__ inline void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Launches `kernel`. `early`: its blocks may start while the kernel before it on the stream ends (programmatic stream
// serialization). That hides the latency of the launch. Ignored where the kernel's code cannot wait for its predecessor.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), unsigned blocks, int threads, bool early, cudaStream_t stream, const char* what,
            Arguments... arguments) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks), config.blockDim = dim3(static_cast<unsigned>(threads)), config.stream = stream;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    if (early && limits_of(reinterpret_cast<const void*>(kernel), threads).waits_for_predecessor) {
        config.attrs = &attribute, config.numAttrs = 1;
    }
    check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), what);
}

}  // namespace ub_overlap::cuda
