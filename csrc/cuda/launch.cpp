#include "cuda/launch.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

namespace ub_overlap::cuda {
namespace {

KernelLimits query_limits(int device, const void* kernel, int threads) {
    const RelaxedCapture relaxed;  // the first query of a kernel loads it
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, kernel), "load a kernel");
    int multiprocessors = 0, per_multiprocessor = 0, major = 0;
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "count the multiprocessors");
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "read the compute capability");
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, threads, 0), "compute an occupancy");
    // ptxVersion: the architecture that the code was compiled for, __CUDA_ARCH__ / 10. PTX for 8.0 also runs on 9.0.
    return {int64_t{multiprocessors} * std::max(1, per_multiprocessor), major >= 9 && attributes.ptxVersion >= 90};
}

}  // namespace

KernelLimits limits_of(const void* kernel, int threads) {
    static std::mutex mutex;
    static auto* all = new std::map<std::tuple<int, const void*, int>, KernelLimits>;  // never destroyed: threads may launch
    int device = 0;
    check(cudaGetDevice(&device), "get the current device");
    const std::lock_guard<std::mutex> lock(mutex);
    const auto entry = all->find({device, kernel, threads});
    if (entry != all->end()) return entry->second;
    return all->emplace(std::make_tuple(device, kernel, threads), query_limits(device, kernel, threads)).first->second;
}

}  // namespace ub_overlap::cuda
