// Several weights as one matrix: their own memory where they lie next to each other, else a copy.
#include "bindings/ops/ops.h"

namespace ub_overlap {

at::Tensor packed_weight(at::TensorList weights) {
    TORCH_CHECK(!weights.empty(), "packed_weight: expected one weight or more");
    const at::Tensor& first = weights[0];
    const auto* end = static_cast<const char*>(first.const_data_ptr());
    int64_t rows = 0;
    for (const at::Tensor& weight : weights) {
        const bool fits = weight.dim() == 2 && weight.size(1) == first.size(1) && weight.is_contiguous() &&
                          weight.scalar_type() == first.scalar_type() && weight.device() == first.device();
        if (!fits || weight.const_data_ptr() != end) return at::cat(weights);
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
