// Words of the host in device memory, without a copy from host memory that would have to outlive a captured launch.
#include <algorithm>

#include "cuda/launch.h"

namespace ub_overlap::cuda {
namespace {

constexpr int words_at_once = 256;  // 2 KiB of the 4 KiB of a kernel's parameters

struct Words {
    uint64_t word[words_at_once];
};

__global__ void __launch_bounds__(words_at_once)
    store_words_kernel(const __grid_constant__ Words words, int count, uint64_t* to) {
    const int i = static_cast<int>(threadIdx.x);
    if (i < count) to[i] = words.word[i];
}

}  // namespace

void preload_words() {
    load(&store_words_kernel, words_at_once);
}

void launch_store_words(const std::vector<uint64_t>& words, uint64_t* to, cudaStream_t stream) {
    for (size_t first = 0; first < words.size(); first += words_at_once) {
        const size_t count = std::min<size_t>(words_at_once, words.size() - first);
        Words part{};
        std::copy_n(words.begin() + static_cast<std::ptrdiff_t>(first), count, part.word);
        store_words_kernel<<<1, words_at_once, 0, stream>>>(part, static_cast<int>(count), to + first);
        check(cudaGetLastError(), "store addresses");
    }
}

}  // namespace ub_overlap::cuda
