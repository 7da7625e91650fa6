// The sizes of a plain collective over dim 0, for ops that run one of several.
#pragma once

#include "bindings/builder.h"

namespace ub_overlap {

// Checks the input, deals its rows to the ranks, and returns the sizes of the result.
inline std::vector<int64_t> deal_rows(Builder& b, const Tensor& input, const std::string& collective,
                                      const std::string& reduce_op, at::ScalarType out_dtype) {
    Call& call = b.call;
    call.op = OpKind::bulk;
    const auto float8 = collective == "all_gather" ? Builder::Float8::may : Builder::Float8::no;
    call.type = b.type_of(input.scalar_type(), float8);
    call.out_type = b.type_of(out_dtype, float8);
    const int64_t rows = input.dim() ? input.size(0) : 1;
    int64_t inner = 1;
    for (int64_t d = 1; d < input.dim(); ++d) inner *= input.size(d);
    std::vector<int64_t> sizes = input.sizes().vec();
    if (collective == "all_gather") {
        b.check(input.dim() > 0, "a tensor without dims cannot be gathered", "[]", "at least one dim");
        b.check(out_dtype == input.scalar_type(), "an all_gather keeps the input's dtype", c10::toString(out_dtype),
                c10::toString(input.scalar_type()));
        call.collective = Collective::gather;
        b.deal_equally(1, rows, inner);
        sizes[0] = rows * call.ranks;
    } else if (collective == "reduce_scatter") {
        b.check(input.dim() > 0 && rows % call.ranks == 0, "the input cannot be scattered evenly", text_of(input.sizes()),
                "a multiple of " + std::to_string(call.ranks) + " rows");
        call.collective = Collective::scatter;
        b.reduce_by(reduce_op);
        b.deal_equally(1, rows / call.ranks, inner);
        sizes[0] = rows / call.ranks;
    } else {
        b.check(collective == "all_reduce", "this collective is unknown", "'" + collective + "'",
                "'all_gather', 'reduce_scatter' or 'all_reduce'");
        call.collective = Collective::reduce;
        b.reduce_by(reduce_op);
        b.deal_floor(rows, inner);
    }
    return sizes;
}

}  // namespace ub_overlap
