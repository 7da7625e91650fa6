#include "cuda/launch.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

namespace ub_overlap::cuda {
namespace {

int64_t query(int device, const void* kernel, int threads) {
    const RelaxedCapture relaxed;  // the first query of a kernel loads it
    int multiprocessors = 0, per_multiprocessor = 0;
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "count the multiprocessors");
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, threads, 0), "compute an occupancy");
    return int64_t{multiprocessors} * std::max(1, per_multiprocessor);
}

int64_t query_clusters(const void* kernel, int threads, int cluster) {
    const RelaxedCapture relaxed;
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, kernel), "look up a kernel");
    if (attributes.ptxVersion < 90) return 0;
    cudaLaunchAttribute attribute = cluster_attribute(cluster);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(cluster)), config.blockDim = dim3(static_cast<unsigned>(threads));
    config.attrs = &attribute, config.numAttrs = 1;
    int clusters = 0;
    const cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
    if (error == cudaErrorInvalidClusterSize || error == cudaErrorNotSupported) {
        cudaGetLastError();  // clears it: this device runs without clusters of this size
        return 0;
    }
    check(error, "compute an occupancy of clusters");
    return clusters;
}

// Calls `query` once for each key. Keys hold the current device.
template <typename Key, typename Query>
int64_t look_up(const Key& key, Query query) {
    static std::mutex mutex;
    static auto* all = new std::map<Key, int64_t>;  // never destroyed: threads may launch
    const std::lock_guard<std::mutex> lock(mutex);
    const auto entry = all->find(key);
    return entry != all->end() ? entry->second : all->emplace(key, query()).first->second;
}

int current_device() {
    int device = 0;
    check(cudaGetDevice(&device), "get the current device");
    return device;
}

}  // namespace

int64_t resident_blocks(const void* kernel, int threads) {
    const int device = current_device();
    return look_up(std::make_tuple(device, kernel, threads), [=] { return query(device, kernel, threads); });
}

int64_t resident_clusters(const void* kernel, int threads, int cluster) {
    return look_up(std::make_tuple(current_device(), kernel, threads, cluster),
                   [=] { return query_clusters(kernel, threads, cluster); });
}

}  // namespace ub_overlap::cuda
