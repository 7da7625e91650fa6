// Grids and launches of our kernels. For .cu files.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/kernels.h"

namespace ub_overlap::cuda {

// Returns the blocks of a kernel that run at once on the whole current device. Looked up once, which loads the kernel; also
// while a stream is being captured.
int64_t resident_blocks(const void* kernel, int threads);

// Returns the clusters of `cluster` blocks that run at once on the whole current device: 0 where the kernel was compiled for an
// architecture without clusters. Looked up once, as above. Throws where the device gives no answer: a rank that then launched
// without clusters would differ from its peers.
int64_t resident_clusters(const void* kernel, int threads, int cluster);

// The attribute of a launch in clusters of `cluster` blocks.
inline cudaLaunchAttribute cluster_attribute(int cluster) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    return attribute;
}

template <typename... Parameters>
void load(void (*kernel)(Parameters...), int threads) {
    resident_blocks(reinterpret_cast<const void*>(kernel), threads);
}

// Returns the grid of a kernel that loops over `items` in steps of its grid, an item per thread. All of its blocks are resident
// at once, so they start and end together. There are no more than the work needs.
template <typename... Parameters>
unsigned blocks_for(void (*kernel)(Parameters...), int64_t items, int threads) {
    return static_cast<unsigned>(std::max<int64_t>(
        1, std::min((items + threads - 1) / threads, resident_blocks(reinterpret_cast<const void*>(kernel), threads))));
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), unsigned blocks, int threads, cudaStream_t stream, const char* what,
            Arguments... arguments) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks), config.blockDim = dim3(static_cast<unsigned>(threads)), config.stream = stream;
    check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), what);
}

}  // namespace ub_overlap::cuda
