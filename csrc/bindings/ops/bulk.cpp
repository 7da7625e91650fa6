// A collective concurrent with matmuls that are independent of it.
#include "bindings/fallback.h"
#include "bindings/ops/independent.h"
#include "bindings/ops/ops.h"
#include "bindings/ops/run_op.h"

namespace ub_overlap {

TensorAndList bulk(const Site& site, const Tensor& input, at::TensorList lhs, at::TensorList rhs, std::string collective,
                   std::string reduce_op, at::ScalarType out_dtype) {
    return run_op(input.device(), [&]() -> TensorAndList {
        Builder b("bulk " + collective, input.device(), site);
        Call& call = b.call;
        call.op = OpKind::bulk;
        b.check(!call.key.striped && !call.key.direct, "bulk has neither stripes nor products at their owners", call.strategy,
                "'bulk' or 'bulk:chunks=N'");
        call.key.kind = "bulk_" + collective;
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
        const Tensor dense = input.contiguous();
        call.input = data_of(dense);
        Tensor out = at::empty(sizes, input.options().dtype(out_dtype));
        call.output = data_of(out);
        const std::vector<Tensor> outs = add_independent(b, lhs, rhs);
        b.describe("input", input);
        b.note("reduce_op", reduce_op);
        b.note("out_dtype", c10::toString(out_dtype));
        if (run_on_transport(b)) return {out, outs};
        WithGil gil;
        FallbackCall fallback("bulk");
        fallback.tensor(input).tensors(lhs).tensors(rhs).text(collective).text(reduce_op).dtype(out_dtype);
        std::vector<Tensor> results = fallback.run(site);
        return {results.at(0), std::vector<Tensor>(results.begin() + 1, results.end())};
    });
}

}  // namespace ub_overlap
