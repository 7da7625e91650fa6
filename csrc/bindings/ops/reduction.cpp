// Matmuls -> reduce_scatter or all_reduce.
#include "bindings/fallback.h"
#include "bindings/ops/independent.h"
#include "bindings/ops/ops.h"
#include "bindings/ops/run_op.h"

namespace ub_overlap {
namespace {

// What the reductions share: the checked terms of the product, and the tensor that holds it.
struct ReductionOperands {
    // `scales`: those of the terms' left and right operands, which are float8 then; null where they have the product's type.
    struct Scales {
        at::TensorList lhs, rhs;
    };
    ReductionOperands(Builder& b, at::TensorList lhs, at::TensorList rhs, const Scales* scales,
                      const std::optional<Tensor>& addend, at::ScalarType product_dtype, at::ScalarType out_dtype,
                      const std::string& reduce_op) {
        Call& call = b.call;
        b.check(!lhs.empty() && lhs.size() == rhs.size(), "lhs and rhs are not the terms of a sum",
                std::to_string(lhs.size()) + " and " + std::to_string(rhs.size()),
                "as many of one as of the other, one or more");
        b.check(!scales || (scales->lhs.size() == lhs.size() && scales->rhs.size() == lhs.size()),
                "lhs_scales or rhs_scales differ in number from lhs", scales ? std::to_string(scales->lhs.size()) : "",
                std::to_string(lhs.size()));
        b.reduce_by(reduce_op);
        call.key.terms = static_cast<int64_t>(lhs.size());
        call.type = b.type_of(product_dtype);
        call.out_type = b.type_of(out_dtype);
        rows = lhs[0].size(0);
        cols = rhs[0].size(-1);
        const auto float8 = scales ? Builder::Float8::must : Builder::Float8::no;
        for (size_t t = 0; t < lhs.size(); ++t) {
            call.lhs.push_back(b.matrix(lhs[t], "a left operand", float8));
            call.rhs.push_back(b.matrix(rhs[t], "a right operand", float8));
            const Matrix &x = call.lhs.back(), &y = call.rhs.back();
            b.check(x.rows == rows && y.cols == cols && x.cols == y.rows, "the operands of a term do not fit",
                    text_of(lhs[t].sizes()) + " @ " + text_of(rhs[t].sizes()),
                    "[" + std::to_string(rows) + ", K] @ [K, " + std::to_string(cols) + "]");
            if (scales) {
                const bool each = scales->rhs[t].numel() != 1;
                b.check_float8(x, y);
                call.lhs_scales.push_back(b.scale(scales->lhs[t], rows, each, "a left operand"));
                call.rhs_scales.push_back(b.scale(scales->rhs[t], cols, each, "a right operand"));
            } else {
                b.check(x.type == call.type && y.type == call.type, "the operands differ in dtype",
                        std::string(name_of(x.type)) + " and " + name_of(y.type), name_of(call.type));
            }
        }
        if (addend && addend->defined()) {
            const bool fits = addend->dim() <= 2 && addend->dim() >= 1 && addend->size(-1) == cols &&
                              (addend->dim() == 1 || addend->size(0) == rows);
            b.check(fits, "the addend does not fit", text_of(addend->sizes()),
                    "[" + std::to_string(cols) + "] or [" + std::to_string(rows) + ", " + std::to_string(cols) + "]");
            call.addend = b.matrix(addend->dim() == 1 ? addend->unsqueeze(0).expand({rows, cols}) : *addend, "the addend");
            b.check(call.addend.type == call.type, "the addend has another dtype than the product", name_of(call.addend.type),
                    name_of(call.type));
        }
        options = lhs[0].options().dtype(product_dtype);
        // The inner sizes are a rank's own: the last channels of a layer may lie on fewer ranks.
        b.describe("product", {rows, cols}, options.dtype());
        if (scales) b.note("scaling", call.rhs_scales[0].each ? "row" : "tensor");
        b.note("reduce_op", reduce_op);
        b.note("out_dtype", c10::toString(out_dtype));
    }

    // Deals the product's rows (shard_dim_is_last: columns) out to the ranks. Returns this rank's share, which the call fills.
    Tensor scatter(Builder& b, int64_t outer, bool shard_dim_is_last, at::ScalarType out_dtype) {
        Call& call = b.call;
        call.op = OpKind::matmul_reduce_scatter;
        call.collective = Collective::scatter;
        call.key.kind = "matmul_reduce_scatter";
        call.shard_dim_is_last = shard_dim_is_last;
        const int64_t parts = shard_dim_is_last ? call.ranks : outer * call.ranks, size = shard_dim_is_last ? cols : rows;
        b.check(outer >= 0 && (!shard_dim_is_last || outer == 1), "outer is wrong", std::to_string(outer),
                shard_dim_is_last ? "1" : "0 or more");
        b.check(parts ? size % parts == 0 : size == 0, "the product cannot be scattered evenly",
                std::to_string(size) + (shard_dim_is_last ? " columns" : " rows"), "a multiple of " + std::to_string(parts));
        const int64_t shard = parts ? size / parts : 0;
        if (shard_dim_is_last) {
            b.deal_equally(rows, shard, 1);
        } else {
            b.deal_equally(outer, shard, cols);
        }
        const Tensor out =
            at::empty({shard_dim_is_last ? rows : outer * shard, shard_dim_is_last ? shard : cols}, options.dtype(out_dtype));
        call.output = data_of(out);
        b.note("outer", outer);
        b.note("shard_dim_is_last", shard_dim_is_last);
        return out;
    }

    // Sets what travels. wire "float8": rows sent to peers are rounded into a buffer that lives until the copies end.
    void set_wire(Builder& b, const std::string& wire) {
        Call& call = b.call;
        b.note("wire", wire);
        if (wire == "plain") return;
        b.check(wire == "float8", "this wire is unknown", "'" + wire + "'", "'plain' or 'float8'");
        b.check(!call.shard_dim_is_last, "columns cannot travel as float8", "shard_dim_is_last=True",
                "shard_dim_is_last=False, or wire 'plain'");
        b.check(cols % scale_block == 0, "rows cannot be cut into the segments of a float8 wire",
                std::to_string(cols) + " columns", "a multiple of " + std::to_string(scale_block) + ", or wire 'plain'");
        call.narrow_wire = true;
        call.scales_a_row = cols / scale_block;
        if (call.ranks == 1) return;
        rounded = at::empty({rows, cols}, options.dtype(at::kByte));
        scales = at::empty({rows, call.scales_a_row}, options.dtype(at::kFloat));
        call.wire = data_of(rounded), call.wire_scales = data_of(scales);
    }

    // Returns the op's results, from our transport or from the fallback. `add_arguments` writes the fallback's arguments.
    template <typename AddArguments>
    TwoTensorsAndList run(Builder& b, const Site& site, const Tensor& out, bool return_partial,
                          const std::vector<Tensor>& independent, AddArguments add_arguments) const {
        Call& call = b.call;
        // Other calls have something to do with the product before it travels, or no peer: they run as "pipelined". The two
        // strategies look alike to a peer (the same rows and flags), so a rank may decide this alone.
        call.key.direct = call.key.direct && call.ranks > 1 && call.key.terms == 1 && !call.shard_dim_is_last &&
                          !call.narrow_wire && call.lhs_scales.empty() && !return_partial;
        const Tensor partial = at::empty({call.key.direct ? 0 : rows, cols}, options);
        call.partial = call.key.direct ? nullptr : data_of(partial);
        if (run_on_transport(b)) return {out, return_partial ? partial : at::empty({0}, options), independent};
        WithGil gil;
        FallbackCall fallback(b.call.op_name);
        add_arguments(fallback);
        const std::vector<Tensor> results = fallback.run(site);
        if (results.size() < 2) return {results.at(0), Tensor(), {}};
        return {results[0], results[1], std::vector<Tensor>(results.begin() + 2, results.end())};
    }

    int64_t rows = 0, cols = 0;
    at::TensorOptions options;  // of the product
    Tensor rounded, scales;
};

at::ScalarType dtype_of_first(at::TensorList list) {
    return list.empty() ? at::kFloat : list[0].scalar_type();
}

}  // namespace

TwoTensorsAndList matmul_reduce_scatter(const Site& site, at::TensorList lhs, at::TensorList rhs,
                                        const std::optional<Tensor>& addend, int64_t outer, bool shard_dim_is_last,
                                        std::string reduce_op, at::ScalarType out_dtype, bool return_partial, std::string wire,
                                        at::TensorList independent_lhs, at::TensorList independent_rhs) {
    return run_op(device_of(lhs), [&]() -> TwoTensorsAndList {
        Builder b("matmul_reduce_scatter", device_of(lhs), site);
        ReductionOperands operands(b, lhs, rhs, nullptr, addend, dtype_of_first(lhs), out_dtype, reduce_op);
        const Tensor out = operands.scatter(b, outer, shard_dim_is_last, out_dtype);
        operands.set_wire(b, wire);
        const std::vector<Tensor> independent = add_independent(b, independent_lhs, independent_rhs);
        return operands.run(b, site, out, return_partial, independent, [&](FallbackCall& fallback) {
            fallback.tensors(lhs).tensors(rhs).tensor(addend ? *addend : Tensor()).integer(outer).flag(shard_dim_is_last);
            fallback.text(reduce_op).dtype(out_dtype).flag(return_partial).text(wire);
            fallback.tensors(independent_lhs).tensors(independent_rhs);
        });
    });
}

Tensor scaled_matmul_reduce_scatter(const Site& site, at::TensorList lhs, at::TensorList rhs, at::TensorList lhs_scales,
                                    at::TensorList rhs_scales, const std::optional<Tensor>& addend, int64_t outer,
                                    std::string reduce_op, at::ScalarType product_dtype, at::ScalarType out_dtype,
                                    bool fast_accum, std::string wire) {
    return run_op(device_of(lhs), [&]() -> Tensor {
        Builder b("scaled_matmul_reduce_scatter", device_of(lhs), site);
        const ReductionOperands::Scales scales{lhs_scales, rhs_scales};
        ReductionOperands operands(b, lhs, rhs, &scales, addend, product_dtype, out_dtype, reduce_op);
        b.call.fast_sums = fast_accum;
        const Tensor out = operands.scatter(b, outer, false, out_dtype);
        operands.set_wire(b, wire);
        return std::get<0>(operands.run(b, site, out, false, {}, [&](FallbackCall& fallback) {
            fallback.tensors(lhs).tensors(rhs).tensors(lhs_scales).tensors(rhs_scales).tensor(addend ? *addend : Tensor());
            fallback.integer(outer).text(reduce_op).dtype(product_dtype).dtype(out_dtype).flag(fast_accum).text(wire);
        }));
    });
}

TwoTensorsAndList matmul_all_reduce(const Site& site, at::TensorList lhs, at::TensorList rhs,
                                    const std::optional<Tensor>& addend, std::string reduce_op, at::ScalarType out_dtype,
                                    bool return_partial, at::TensorList independent_lhs, at::TensorList independent_rhs) {
    return run_op(device_of(lhs), [&]() -> TwoTensorsAndList {
        Builder b("matmul_all_reduce", device_of(lhs), site);
        Call& call = b.call;
        call.op = OpKind::matmul_all_reduce;
        call.collective = Collective::reduce;
        call.key.kind = "matmul_all_reduce";
        const ReductionOperands operands(b, lhs, rhs, nullptr, addend, dtype_of_first(lhs), out_dtype, reduce_op);
        b.deal_floor(operands.rows, operands.cols);
        Tensor out = at::empty({operands.rows, operands.cols}, lhs[0].options().dtype(out_dtype));
        call.output = data_of(out);
        const std::vector<Tensor> independent = add_independent(b, independent_lhs, independent_rhs);
        return operands.run(b, site, out, return_partial, independent, [&](FallbackCall& fallback) {
            fallback.tensors(lhs).tensors(rhs).tensor(addend ? *addend : Tensor());
            fallback.text(reduce_op).dtype(out_dtype).flag(return_partial);
            fallback.tensors(independent_lhs).tensors(independent_rhs);
        });
    });
}

}  // namespace ub_overlap
