// What a call prefetches of the operands of the next matmuls (core/prefetch.h).
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "bindings/builder.h"
#include "core/prefetch.h"

namespace ub_overlap {

// Checks right operands [K, N] and returns what is prefetched of them.
inline std::vector<Span> prefetched_parts(const Builder& b, at::TensorList operands, int64_t bytes, at::Device device) {
    b.check(operands.size() <= most_prefetched, "too many operands are prefetched", std::to_string(operands.size()),
            "at most " + std::to_string(most_prefetched));
    std::vector<OperandLayout> layouts;
    for (const at::Tensor& t : operands) {
        b.check(t.device() == device, "a prefetched operand is on another device", text_of(t.device()), text_of(device));
        b.check(t.dim() == 2, "a prefetched operand is no matrix", text_of(t.sizes()), "[K, N]");
        const int64_t item = t.element_size();
        const OperandLayout layout{
            static_cast<char*>(t.data_ptr()), t.size(0), t.size(1), t.stride(0) * item, t.stride(1) * item, item};
        b.check(layout.has_dense_dim(), "a prefetched operand has gaps in its rows and columns", text_of(t.strides()),
                "stride 1 in one of the dims");
        layouts.push_back(layout);
    }
    return first_parts(layouts, bytes);
}

}  // namespace ub_overlap
