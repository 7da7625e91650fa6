// all_gather -> matmuls.
#include "bindings/fallback.h"
#include "bindings/ops/independent.h"
#include "bindings/ops/ops.h"
#include "bindings/ops/run_op.h"

namespace ub_overlap {
namespace {

// What both gathers share: the checked shard, its place in the call, and the sizes of the gathered matrix.
struct GatherOperands {
    GatherOperands(Builder& b, const Tensor& shard, int64_t outer, bool shard_dim_is_last, bool return_gathered,
                   Builder::Float8 float8) {
        Call& call = b.call;
        call.op = OpKind::all_gather_matmul;
        call.collective = Collective::gather;
        call.key.kind = "all_gather_matmul";
        call.key.keep = return_gathered;
        call.shard_dim_is_last = shard_dim_is_last;
        call.type = call.out_type = b.type_of(shard.scalar_type(), float8);
        b.check(!call.key.striped && !call.key.direct, "a gather has neither stripes nor products at their owners",
                call.strategy, "'pipelined' or 'pipelined:chunks=N'");
        b.check(shard.dim() >= 1, "shard has no dims", text_of(shard.sizes()), "at least one dim");
        b.check(outer >= 0 && (!shard_dim_is_last || outer == 1), "outer is wrong", std::to_string(outer),
                shard_dim_is_last ? "1" : "0 or more");
        const int64_t width = shard.size(-1);
        for (int64_t d = 0; d + 1 < shard.dim(); ++d) rows *= shard.size(d);
        b.check(outer ? rows % outer == 0 : rows == 0, "the shard's rows do not divide by outer", std::to_string(rows),
                "a multiple of " + std::to_string(outer));
        if (shard_dim_is_last) {
            b.deal_equally(rows, width, 1);
        } else {
            b.deal_equally(outer, outer ? rows / outer : 0, width);
        }
        gathered_rows = shard_dim_is_last ? rows : rows * call.ranks;
        gathered_cols = shard_dim_is_last ? width * call.ranks : width;
        input = shard.contiguous();
        call.input = data_of(input);
        gathered =
            return_gathered ? at::empty({gathered_rows, gathered_cols}, shard.options()) : at::empty({0}, shard.options());
        call.output = data_of(gathered);
        b.describe("shard", shard);
        b.note("outer", outer);
        b.note("shard_dim_is_last", shard_dim_is_last);
    }
    int64_t rows = 1, gathered_rows = 0, gathered_cols = 0;  // rows: of the shard
    Tensor input, gathered;
};

}  // namespace

TensorAndList all_gather_matmul(const Site& site, const Tensor& shard, at::TensorList operands,
                                const c10::List<bool>& transpose_gathered, const c10::List<bool>& transpose_out, int64_t outer,
                                bool shard_dim_is_last, bool return_gathered, at::TensorList independent_lhs,
                                at::TensorList independent_rhs) {
    return run_op(shard.device(), [&]() -> TensorAndList {
        Builder b("all_gather_matmul", shard.device(), site);
        Call& call = b.call;
        GatherOperands gather(b, shard, outer, shard_dim_is_last, return_gathered, Builder::Float8::no);
        b.check(transpose_gathered.size() == operands.size() && transpose_out.size() == operands.size(),
                "transpose_gathered or transpose_out differs in number from operands",
                std::to_string(transpose_gathered.size()) + ", " + std::to_string(transpose_out.size()),
                std::to_string(operands.size()));
        const auto [gathered_rows, gathered_cols] = std::pair(gather.gathered_rows, gather.gathered_cols);
        std::vector<Tensor> outs, sums;
        for (size_t j = 0; j < operands.size(); ++j) {
            const bool transposed = transpose_gathered.get(j), out_transposed = transpose_out.get(j);
            const Matrix operand = b.matrix(operands[j], "an operand");
            // A wider operand widens the product: what travels stays narrow, and each piece is cast as it is multiplied.
            b.check(operand.type == call.type || operand.type == DType::f32, "an operand has another dtype than the shard",
                    name_of(operand.type), std::string(name_of(call.type)) + " or float32");
            b.check(operand.rows == (transposed ? gathered_rows : gathered_cols), "an operand does not fit the gathered matrix",
                    text_of(operands[j].sizes()), std::to_string(transposed ? gathered_rows : gathered_cols) + " rows");
            const int64_t product_rows = transposed ? gathered_cols : gathered_rows;
            const std::vector<int64_t> sizes = out_transposed ? std::vector<int64_t>{operand.cols, product_rows}
                                                              : std::vector<int64_t>{product_rows, operand.cols};
            outs.push_back(at::empty(sizes, operands[j].options()));
            call.rhs.push_back(operand);
            call.transpose_gathered.push_back(transposed);
            call.transpose_out.push_back(out_transposed);
            call.key.contracts.push_back(transposed != shard_dim_is_last);
            call.results.push_back(b.matrix(outs.back(), "a result"));
        }
        const bool is_used = return_gathered || !operands.empty();
        b.check(is_used || independent_lhs.empty(), "independent matmuls without a use of the gathered tensor",
                std::to_string(independent_lhs.size()), "an operand, or return_gathered");
        if (!is_used) return {gather.gathered, outs};  // nothing to compute
        const std::vector<Tensor> independent = add_independent(b, independent_lhs, independent_rhs);
        b.note("transpose_gathered", transpose_gathered);
        b.note("transpose_out", transpose_out);
        const auto accumulators = [&](Call& call) {
            call.accumulators = call.results;
            for (size_t j = 0; j < outs.size(); ++j) {
                if (call.results[j].type == DType::f32 || !call.program->accumulates(static_cast<int>(j))) continue;
                sums.push_back(at::empty(outs[j].sizes(), shard.options().dtype(at::kFloat)));
                call.accumulators[j] = b.matrix(sums.back(), "an accumulator");
            }
        };
        if (run_on_transport(b, accumulators)) {
            outs.insert(outs.end(), independent.begin(), independent.end());
            return {gather.gathered, outs};
        }
        WithGil gil;
        std::vector<Tensor> results = FallbackCall("all_gather_matmul")
                                          .tensor(shard)
                                          .tensors(operands)
                                          .flags(transpose_gathered)
                                          .flags(transpose_out)
                                          .integer(outer)
                                          .flag(shard_dim_is_last)
                                          .flag(return_gathered)
                                          .tensors(independent_lhs)
                                          .tensors(independent_rhs)
                                          .run(site);
        return {results.at(0), std::vector<Tensor>(results.begin() + 1, results.end())};
    });
}

std::tuple<Tensor, Tensor, std::vector<Tensor>> all_gather_scaled_matmul(
    const Site& site, const Tensor& shard, const Tensor& shard_scale, at::TensorList operands, at::TensorList operand_scales,
    const c10::List<std::optional<Tensor>>& biases, int64_t outer, bool return_gathered,
    const std::vector<at::ScalarType>& out_dtypes, bool fast_accum) {
    return run_op(shard.device(), [&]() -> std::tuple<Tensor, Tensor, std::vector<Tensor>> {
        Builder b("all_gather_scaled_matmul", shard.device(), site);
        Call& call = b.call;
        const GatherOperands gather(b, shard, outer, false, return_gathered, Builder::Float8::must);
        const size_t count = operands.size();
        b.check(operand_scales.size() == count && biases.size() == count && out_dtypes.size() == count,
                "operand_scales, biases or out_dtypes differ in number from operands",
                std::to_string(operand_scales.size()) + ", " + std::to_string(biases.size()) + ", " +
                    std::to_string(out_dtypes.size()),
                std::to_string(count));
        const bool each = count ? operand_scales[0].numel() != 1 : shard_scale.numel() != 1;
        call.input_scale = b.scale(shard_scale, gather.rows, each, "the shard");
        call.scales_a_row = each;
        call.fast_sums = fast_accum;
        const Matrix gathered{nullptr, gather.gathered_rows, gather.gathered_cols, gather.gathered_cols, 1, call.type};
        std::vector<Tensor> outs;
        for (size_t j = 0; j < count; ++j) {
            const Matrix operand = b.matrix(operands[j], "an operand", Builder::Float8::must);
            b.check(operand.rows == gather.gathered_cols, "an operand does not fit the gathered matrix",
                    text_of(operands[j].sizes()), std::to_string(gather.gathered_cols) + " rows");
            b.check_float8(gathered, operand);
            outs.push_back(at::empty({gather.gathered_rows, operand.cols}, shard.options().dtype(out_dtypes[j])));
            call.rhs.push_back(operand);
            call.rhs_scales.push_back(b.scale(operand_scales[j], operand.cols, each, "an operand"));
            call.transpose_gathered.push_back(false);
            call.transpose_out.push_back(false);
            call.key.contracts.push_back(false);
            call.results.push_back(b.matrix(outs.back(), "a result"));
            Matrix addend;
            if (const std::optional<Tensor> bias = biases.get(j); bias && bias->defined()) {
                b.check(bias->dim() == 1 && bias->size(0) == operand.cols, "a bias does not fit", text_of(bias->sizes()),
                        "[" + std::to_string(operand.cols) + "]");
                addend = b.matrix(bias->unsqueeze(0).expand({gather.gathered_rows, operand.cols}), "a bias");
                b.check(addend.type == call.results[j].type, "a bias has another dtype than its result", name_of(addend.type),
                        name_of(call.results[j].type));
            }
            call.biases.push_back(addend);
        }
        Tensor scales =
            at::empty(return_gathered && each ? std::vector<int64_t>{gather.gathered_rows, 1} : std::vector<int64_t>{0},
                      shard.options().dtype(at::kFloat));
        call.output_scales = return_gathered && each ? data_of(scales) : nullptr;
        if (!return_gathered && operands.empty()) return {gather.gathered, scales, outs};  // nothing to compute
        b.note("scaling", each ? "row" : "tensor");
        if (run_on_transport(b)) return {gather.gathered, scales, outs};
        WithGil gil;
        std::vector<Tensor> addends;
        for (size_t j = 0; j < count; ++j) addends.push_back(biases.get(j).value_or(Tensor()));
        std::vector<Tensor> results = FallbackCall("all_gather_scaled_matmul")
                                          .tensor(shard)
                                          .tensor(shard_scale)
                                          .tensors(operands)
                                          .tensors(operand_scales)
                                          .tensors(addends)
                                          .integer(outer)
                                          .flag(return_gathered)
                                          .dtypes(out_dtypes)
                                          .flag(fast_accum)
                                          .run(site);
        return {results.at(0), results.at(1), std::vector<Tensor>(results.begin() + 2, results.end())};
    });
}

}  // namespace ub_overlap
