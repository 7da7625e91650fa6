// all_gather -> matmuls.
#include "bindings/ops/frame.h"
#include "bindings/ops/ops.h"
#include "bindings/reference.h"

namespace ub_overlap {

TensorAndList all_gather_matmul(const Tensor& shard, at::TensorList operands, at::IntArrayRef modes, int64_t outer, bool last,
                                bool keep, std::string strategy, std::string group, std::string site) {
    return framed(shard.device(), [&]() -> TensorAndList {
        Builder b("all_gather_matmul", shard.device(), strategy, group, site);
        Call& call = b.call;
        call.op = OpKind::all_gather_matmul;
        call.collective = Collective::gather;
        call.key.kind = "all_gather_matmul";
        call.key.keep = keep;
        call.last = last;
        call.type = call.out_type = b.type_of(shard.scalar_type());
        b.check(!call.key.striped, "a gather has no stripes", strategy, "'pipelined' or 'pipelined:chunks=N'");
        b.check(shard.dim() >= 1, "shard has no dims", text_of(shard.sizes()), "at least one dim");
        b.check(modes.size() == operands.size(), "modes and operands differ in number", std::to_string(modes.size()),
                std::to_string(operands.size()));
        b.check(outer >= 0 && (!last || outer == 1), "outer is wrong", std::to_string(outer), last ? "1" : "0 or more");
        const int64_t width = shard.size(-1);
        int64_t rows = 1;
        for (int64_t d = 0; d + 1 < shard.dim(); ++d) rows *= shard.size(d);
        b.check(outer ? rows % outer == 0 : rows == 0, "the shard's rows do not divide by outer", std::to_string(rows),
                "a multiple of " + std::to_string(outer));
        if (last) {
            b.deal_equally(rows, width, 1);
        } else {
            b.deal_equally(outer, outer ? rows / outer : 0, width);
        }
        const int64_t whole_rows = last ? rows : rows * call.ranks, whole_cols = last ? width * call.ranks : width;

        const Tensor input = shard.contiguous();
        call.input = data_of(input);
        std::vector<Tensor> outs, sums;
        for (size_t j = 0; j < operands.size(); ++j) {
            const int64_t mode = modes[j];
            b.check(mode >= 0 && mode <= 3, "this mode is unknown", std::to_string(mode), "0, 1, 2 or 3");
            const bool flip = mode >= 2, contracts = flip != last;
            const Matrix operand = b.matrix(operands[j], "an operand");
            // A wider operand widens the product: what travels stays narrow, and each piece is cast as it is multiplied.
            b.check(operand.type == call.type || operand.type == DType::f32, "an operand has another dtype than the shard",
                    name_of(operand.type), std::string(name_of(call.type)) + " or float32");
            b.check(operand.rows == (flip ? whole_rows : whole_cols), "an operand does not fit the gathered matrix",
                    text_of(operands[j].sizes()), std::to_string(flip ? whole_rows : whole_cols) + " rows");
            const int64_t product_rows = flip ? whole_cols : whole_rows;
            const std::vector<int64_t> sizes =
                mode % 2 ? std::vector<int64_t>{operand.cols, product_rows} : std::vector<int64_t>{product_rows, operand.cols};
            outs.push_back(at::empty(sizes, operands[j].options()));
            call.rhs.push_back(operand);
            call.modes.push_back(mode);
            call.key.contracts.push_back(contracts);
            call.results.push_back(b.matrix(outs.back(), "a result"));
        }
        Tensor gathered = keep ? at::empty({whole_rows, whole_cols}, shard.options()) : at::empty({0}, shard.options());
        call.output = data_of(gathered);
        if (!keep && operands.empty()) return {gathered, outs};  // nobody wants anything
        b.describe("shard", shard);
        b.note("modes", modes);
        b.note("outer", outer);
        b.note("last", last);
        const auto accumulators = [&](Call& call) {
            call.accumulators = call.results;
            for (size_t j = 0; j < outs.size(); ++j) {
                if (call.results[j].type == DType::f32 || !call.program->accumulates(static_cast<int>(j))) continue;
                sums.push_back(at::empty(outs[j].sizes(), shard.options().dtype(at::kFloat)));
                call.accumulators[j] = b.matrix(sums.back(), "an accumulator");
            }
        };
        if (run(b, accumulators)) return {gathered, outs};
        WithGil gil;
        std::vector<Tensor> results = ReferenceCall("all_gather_matmul")
                                          .tensor(shard)
                                          .tensors(operands)
                                          .integers(modes)
                                          .integer(outer)
                                          .flag(last)
                                          .flag(keep)
                                          .text(group)
                                          .run();
        gathered = results.at(0);
        return {gathered, std::vector<Tensor>(results.begin() + 1, results.end())};
    });
}

}  // namespace ub_overlap
