// The matmuls of an op that are independent of its collective.
#pragma once

#include "bindings/builder.h"

namespace ub_overlap {

// Checks the operands, allocates the results, and puts both into the call, behind the results that it has.
inline std::vector<Tensor> add_independent(Builder& b, at::TensorList lhs, at::TensorList rhs) {
    Call& call = b.call;
    b.check(lhs.size() == rhs.size(), "the operands of the independent matmuls differ in number", std::to_string(lhs.size()),
            std::to_string(rhs.size()));
    call.key.independent = static_cast<int64_t>(lhs.size());
    std::vector<Tensor> outs;
    for (size_t j = 0; j < lhs.size(); ++j) {
        const Matrix x = b.matrix(lhs[j], "a left operand"), y = b.matrix(rhs[j], "a right operand");
        b.check(x.cols == y.rows && x.type == y.type, "the operands of a product do not fit",
                text_of(lhs[j].sizes()) + " @ " + text_of(rhs[j].sizes()), "[M, K] @ [K, N] of one dtype");
        outs.push_back(at::empty({x.rows, y.cols}, lhs[j].options()));
        call.independent_lhs.push_back(x);
        call.independent_rhs.push_back(y);
        call.results.push_back(b.matrix(outs.back(), "a result"));
    }
    return outs;
}

}  // namespace ub_overlap
