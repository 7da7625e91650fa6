// The rule when backward may reuse the cast of a weight that its forward left in the cache. The caches of Python
// (runtime/fp8/weight_cache) and of C++ (bindings/ops/fp8_cached_weight.cpp) both ask it.
#pragma once

#include <cstdint>

namespace ub_overlap {

// Backward may reuse the cast if exactly one forward has used it since backward last did, in the same capture. A second forward
// may have seen other elements: between the two, a caller may have swapped the weight's elements for a while. Autograd's
// versions need not show that.
//
//     count   use of forward         use of backward (reuse_forward)
//     0       refresh, count = 1     refresh, count = 0
//     1       refresh, count = 2     reuse,   count = 0
//     >= 2    refresh, count + 1     refresh, count = 0
//
// A use in another capture than the last one begins with count = 0.
struct ForwardUses {
    uint64_t capture = 0;  // the CUDA graph capture of the last use, 0 for none
    int64_t count = 0;     // uses by forwards there since backward used the cast

    bool can_reuse(bool reuse_forward, uint64_t in_capture) const {
        return reuse_forward && capture == in_capture && count == 1;
    }
    // Counts a use that has succeeded.
    void record(bool reuse_forward, uint64_t in_capture) {
        if (capture != in_capture) count = 0;
        capture = in_capture;
        count = reuse_forward ? 0 : count + 1;
    }
};

}  // namespace ub_overlap
