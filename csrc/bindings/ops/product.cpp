// Matmuls -> reduce_scatter or all_reduce.
#include "bindings/ops/frame.h"
#include "bindings/ops/ops.h"
#include "bindings/reference.h"

namespace ub_overlap {

namespace {

// What matmul_reduce_scatter and matmul_all_reduce share: the terms of the product, checked, and where it is put.
struct Product {
    Product(Builder& b, at::TensorList lhs, at::TensorList rhs, const std::optional<Tensor>& addend, at::ScalarType out_dtype,
            const std::string& reduce_op) {
        Call& call = b.call;
        b.check(!lhs.empty() && lhs.size() == rhs.size(), "lhs and rhs are not the terms of a sum",
                std::to_string(lhs.size()) + " and " + std::to_string(rhs.size()),
                "as many of one as of the other, one or more");
        b.reduce_by(reduce_op);
        call.key.terms = static_cast<int64_t>(lhs.size());
        call.type = b.type_of(lhs[0].scalar_type());
        call.out_type = b.type_of(out_dtype);
        rows = lhs[0].size(0);
        cols = rhs[0].size(-1);
        for (size_t t = 0; t < lhs.size(); ++t) {
            call.lhs.push_back(b.matrix(lhs[t], "a left operand"));
            call.rhs.push_back(b.matrix(rhs[t], "a right operand"));
            const Matrix &x = call.lhs.back(), &y = call.rhs.back();
            b.check(x.rows == rows && y.cols == cols && x.cols == y.rows, "the operands of a term do not fit",
                    text_of(lhs[t].sizes()) + " @ " + text_of(rhs[t].sizes()),
                    "[" + std::to_string(rows) + ", K] @ [K, " + std::to_string(cols) + "]");
            b.check(x.type == call.type && y.type == call.type, "the operands differ in dtype",
                    std::string(name_of(x.type)) + " and " + name_of(y.type), name_of(call.type));
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
        partial = at::empty({rows, cols}, lhs[0].options());
        call.partial = data_of(partial);
        // The inner sizes are a rank's own: the last channels of a layer may lie on fewer ranks.
        b.describe("product", partial);
        b.note("reduce_op", reduce_op);
        b.note("out_dtype", c10::toString(out_dtype));
    }

    // The op's results, by our transport or plainly; `arguments` writes what the plain op is called with.
    template <typename Arguments>
    TwoTensors finish(Builder& b, const Tensor& out, bool keep, Arguments arguments) const {
        if (run(b)) return {out, keep ? partial : at::empty({0}, partial.options())};
        WithGil gil;
        ReferenceCall plain(b.call.op_name);
        arguments(plain);
        std::vector<Tensor> results = plain.run();
        return {results.at(0), results.at(1)};
    }

    int64_t rows = 0, cols = 0;
    Tensor partial;
};

}  // namespace

TwoTensors matmul_reduce_scatter(at::TensorList lhs, at::TensorList rhs, const std::optional<Tensor>& addend, int64_t outer,
                                 bool last, std::string reduce_op, at::ScalarType out_dtype, bool keep, std::string strategy,
                                 std::string group, std::string site) {
    return framed(device_of(lhs), [&]() -> TwoTensors {
        Builder b("matmul_reduce_scatter", device_of(lhs), strategy, group, site);
        Call& call = b.call;
        call.op = OpKind::matmul_reduce_scatter;
        call.collective = Collective::scatter;
        call.key.kind = "matmul_reduce_scatter";
        call.last = last;
        Product product(b, lhs, rhs, addend, out_dtype, reduce_op);
        const int64_t parts = last ? call.ranks : outer * call.ranks, size = last ? product.cols : product.rows;
        b.check(outer >= 0 && (!last || outer == 1), "outer is wrong", std::to_string(outer), last ? "1" : "0 or more");
        b.check(parts ? size % parts == 0 : size == 0, "the product cannot be scattered evenly",
                std::to_string(size) + (last ? " columns" : " rows"), "a multiple of " + std::to_string(parts));
        const int64_t shard = parts ? size / parts : 0;
        if (last) {
            b.deal_equally(product.rows, shard, 1);
        } else {
            b.deal_equally(outer, shard, product.cols);
        }
        Tensor out =
            at::empty({last ? product.rows : outer * shard, last ? shard : product.cols}, lhs[0].options().dtype(out_dtype));
        call.output = data_of(out);
        b.note("outer", outer);
        b.note("last", last);
        return product.finish(b, out, keep, [&](ReferenceCall& plain) {
            plain.tensors(lhs).tensors(rhs).tensor(addend ? *addend : Tensor());
            plain.integer(outer).flag(last).text(reduce_op).dtype(out_dtype).flag(keep).text(group);
        });
    });
}

TwoTensors matmul_all_reduce(at::TensorList lhs, at::TensorList rhs, const std::optional<Tensor>& addend, std::string reduce_op,
                             at::ScalarType out_dtype, bool keep, std::string strategy, std::string group, std::string site) {
    return framed(device_of(lhs), [&]() -> TwoTensors {
        Builder b("matmul_all_reduce", device_of(lhs), strategy, group, site);
        Call& call = b.call;
        call.op = OpKind::matmul_all_reduce;
        call.collective = Collective::reduce;
        call.key.kind = "matmul_all_reduce";
        Product product(b, lhs, rhs, addend, out_dtype, reduce_op);
        b.deal_floor(product.rows, product.cols);
        Tensor out = at::empty({product.rows, product.cols}, lhs[0].options().dtype(out_dtype));
        call.output = data_of(out);
        return product.finish(b, out, keep, [&](ReferenceCall& plain) {
            plain.tensors(lhs).tensors(rhs).tensor(addend ? *addend : Tensor());
            plain.text(reduce_op).dtype(out_dtype).flag(keep).text(group);
        });
    });
}

}  // namespace ub_overlap
