// What a call prefetches of the operands of the next matmuls (core/fused_collective.h).
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <string>
#include <vector>

#include "bindings/builder.h"

namespace ub_overlap {

// Returns what a matmul reads first of its right operand [K, N], whose rows or columns are dense: of K as much as fits `bytes`.
inline Span first_part(const Builder& b, const at::Tensor& operand, int64_t bytes) {
    const bool is_matrix = operand.dim() == 2 && (operand.stride(0) == 1 || operand.stride(1) == 1);
    b.check(is_matrix, "a prefetched operand is no matrix with dense rows or columns", text_of(operand.sizes()),
            "[K, N], with stride 1 in one of the dims");
    const int64_t depth = operand.size(0), cols = operand.size(1), item = operand.element_size();
    const int64_t taken = cols == 0 ? 0 : std::min(depth, bytes / (cols * item));
    char* data = static_cast<char*>(operand.data_ptr());
    if (operand.stride(1) == 1) return {data, taken, operand.stride(0) * item, cols * item};
    return {data, cols, operand.stride(1) * item, taken * item};
}

// Returns what is prefetched of the operands, `bytes` at most, the first operand first.
inline std::vector<Span> prefetched_parts(const Builder& b, at::TensorList operands, int64_t bytes, at::Device device) {
    b.check(operands.size() <= most_prefetched, "too many operands are prefetched", std::to_string(operands.size()),
            "at most " + std::to_string(most_prefetched));
    std::vector<Span> parts;
    for (const at::Tensor& operand : operands) {
        b.check(operand.device() == device, "a prefetched operand is on another device", text_of(operand.device()),
                text_of(device));
        const Span part = first_part(b, operand, bytes);
        bytes -= part.blocks * part.bytes;
        if (part.blocks * part.bytes > 0) parts.push_back(part);
    }
    return parts;
}

}  // namespace ub_overlap
