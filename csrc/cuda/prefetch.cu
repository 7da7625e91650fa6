// Prefetches alone, for tests and benchmarks.
#include "cuda/prefetch.h"

#include "cuda/launch.h"

namespace ub_overlap::cuda {
namespace {

constexpr int prefetch_threads = 256;

__global__ void __launch_bounds__(prefetch_threads) prefetch_kernel(const __grid_constant__ CachedSpans spans) {
    prefetch(spans, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
}

}  // namespace

void launch_prefetch(const std::vector<Span>& spans, cudaStream_t stream) {
    const CachedSpans cached = cached_spans(spans);
    const int64_t threads = (lines_of(cached) + lines_of_thread - 1) / lines_of_thread;
    if (threads == 0) return;
    launch(&prefetch_kernel, blocks_for(&prefetch_kernel, threads, prefetch_threads), prefetch_threads, stream, "prefetch",
           cached);
}

}  // namespace ub_overlap::cuda
