// A collective concurrent with matmuls that are independent of it.
#include "bindings/fallback.h"
#include "bindings/ops/collective_sizes.h"
#include "bindings/ops/independent.h"
#include "bindings/ops/ops.h"
#include "bindings/ops/run_op.h"

namespace ub_overlap {

TensorAndList bulk(const Site& site, const Tensor& input, at::TensorList lhs, at::TensorList rhs, std::string collective,
                   std::string reduce_op, at::ScalarType out_dtype) {
    return run_op(input.device(), [&]() -> TensorAndList {
        Builder b("bulk " + collective, input.device(), site);
        Call& call = b.call;
        b.check(!call.key.striped && !call.key.direct, "bulk has neither stripes nor products at their owners", call.strategy,
                "'bulk' or 'bulk:chunks=N'");
        call.key.kind = "bulk_" + collective;
        const std::vector<int64_t> sizes = deal_rows(b, input, collective, reduce_op, out_dtype);
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
