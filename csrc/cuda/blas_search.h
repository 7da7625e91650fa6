// What a search for the fastest algorithm of a matmul needs. The search itself is in runtime/matmul_algorithms.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/types.h"

namespace ub_overlap::cuda {

// A buffer of a matmul: "a", "b", "c", "out", "bias", "a_scale" or "b_scale". `alignment`: the largest power of two that
// divides its address, up to 256.
struct SearchBuffer {
    std::string name;
    DType type = DType::f32;
    int64_t bytes = 0;
    uint32_t alignment = 256;
};

// A matmul that has run on the current device. `uses`: launches; a replayed call is none.
struct SearchProblem {
    std::string key, text;
    int64_t uses = 0;
    bool has_chosen = false;       // it runs by an algorithm of a search
    bool stores_at_peers = false;  // in use its results lie in other ranks' memory
    std::vector<SearchBuffer> buffers;
};
std::vector<SearchProblem> search_problems();

// Returns up to `count` algorithms for a matmul in the order of the library's estimate, as bytes.
std::vector<std::string> propose_algorithms(const std::string& key, int count);
// Enqueues the matmul by an algorithm on buffers of the same sizes. `workspace`: blas_workspace_bytes. NamedError if the
// library refuses the algorithm.
void run_algorithm(const std::string& key, const std::string& algorithm, const std::map<std::string, uint64_t>& buffers,
                   uint64_t workspace, cudaStream_t stream);

// Returns the version of the library that is loaded. Algorithms are valid for one version.
int64_t blas_version();

}  // namespace ub_overlap::cuda
