// Several weights as one matrix: their own memory where they lie next to each other, else a copy.
#include <mutex>
#include <set>

#include "bindings/ops/ops.h"
#include "bindings/python.h"

namespace ub_overlap {
namespace {

// Copies `weights`. The first copy of a site is logged: each step pays for it, and only the program can end that.
at::Tensor copied(at::TensorList weights, const std::string& site) {
    static std::mutex mutex;
    static auto* warned = new std::set<std::string>;  // never destroyed: threads may still run ops
    bool is_first = false;
    {
        const std::lock_guard<std::mutex> lock(mutex);
        is_first = warned->insert(site).second;
    }
    if (is_first) {
        warn(
            "weights that ub_overlap.pack has put next to each other have moved: every step copies them into one matrix. "
            "Where: " +
            site + ". Got: " + std::to_string(weights.size()) +
            " weights apart. Expected: one block of memory. Fix: call ub_overlap.pack(model) again");
    }
    return at::cat(weights);
}

}  // namespace

at::Tensor packed_weight(at::TensorList weights, const std::string& site) {
    TORCH_CHECK(!weights.empty(), "packed_weight: expected one weight or more");
    const at::Tensor& first = weights[0];
    const auto* end = static_cast<const char*>(first.const_data_ptr());
    int64_t rows = 0;
    for (const at::Tensor& weight : weights) {
        const bool fits = weight.dim() == 2 && weight.size(1) == first.size(1) && weight.is_contiguous() &&
                          weight.scalar_type() == first.scalar_type() && weight.device() == first.device();
        if (!fits || weight.const_data_ptr() != end) return copied(weights, site);
        end += weight.nbytes();
        rows += weight.size(0);
    }
    // The result keeps the weights' memory alive, and is no view of them: it has no history and no version of theirs.
    return at::for_blob(const_cast<void*>(first.const_data_ptr()), {rows, first.size(1)})
        .deleter([held = weights.vec()](void*) {})
        .options(first.options())
        .target_device(first.device())
        .make_tensor();
}

}  // namespace ub_overlap
