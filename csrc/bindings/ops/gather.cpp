// all_gather -> matmuls.
#include "bindings/ops/frame.h"
#include "bindings/ops/ops.h"
#include "bindings/reference.h"

namespace ub_overlap {
namespace {

// What both gathers share: the shard, checked, its place in the call, and the gathered matrix's sizes.
struct Gather {
    Gather(Builder& b, const Tensor& shard, int64_t outer, bool last, bool keep, const std::string& strategy,
           Builder::Float8 float8) {
        Call& call = b.call;
        call.op = OpKind::all_gather_matmul;
        call.collective = Collective::gather;
        call.key.kind = "all_gather_matmul";
        call.key.keep = keep;
        call.last = last;
        call.type = call.out_type = b.type_of(shard.scalar_type(), float8);
        b.check(!call.key.striped, "a gather has no stripes", strategy, "'pipelined' or 'pipelined:chunks=N'");
        b.check(shard.dim() >= 1, "shard has no dims", text_of(shard.sizes()), "at least one dim");
        b.check(outer >= 0 && (!last || outer == 1), "outer is wrong", std::to_string(outer), last ? "1" : "0 or more");
        const int64_t width = shard.size(-1);
        for (int64_t d = 0; d + 1 < shard.dim(); ++d) rows *= shard.size(d);
        b.check(outer ? rows % outer == 0 : rows == 0, "the shard's rows do not divide by outer", std::to_string(rows),
                "a multiple of " + std::to_string(outer));
        if (last) {
            b.deal_equally(rows, width, 1);
        } else {
            b.deal_equally(outer, outer ? rows / outer : 0, width);
        }
        whole_rows = last ? rows : rows * call.ranks, whole_cols = last ? width * call.ranks : width;
        input = shard.contiguous();
        call.input = data_of(input);
        gathered = keep ? at::empty({whole_rows, whole_cols}, shard.options()) : at::empty({0}, shard.options());
        call.output = data_of(gathered);
        b.describe("shard", shard);
        b.note("outer", outer);
        b.note("last", last);
    }
    int64_t rows = 1, whole_rows = 0, whole_cols = 0;  // of the shard, of the gathered matrix
    Tensor input, gathered;
};

}  // namespace

TensorAndList all_gather_matmul(const Tensor& shard, at::TensorList operands, at::IntArrayRef modes, int64_t outer, bool last,
                                bool keep, std::string strategy, std::string group, std::string site) {
    return framed(shard.device(), [&]() -> TensorAndList {
        Builder b("all_gather_matmul", shard.device(), strategy, group, site);
        Call& call = b.call;
        Gather gather(b, shard, outer, last, keep, strategy, Builder::Float8::no);
        b.check(modes.size() == operands.size(), "modes and operands differ in number", std::to_string(modes.size()),
                std::to_string(operands.size()));
        const auto [whole_rows, whole_cols] = std::pair(gather.whole_rows, gather.whole_cols);
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
        if (!keep && operands.empty()) return {gather.gathered, outs};  // nobody wants anything
        b.note("modes", modes);
        const auto accumulators = [&](Call& call) {
            call.accumulators = call.results;
            for (size_t j = 0; j < outs.size(); ++j) {
                if (call.results[j].type == DType::f32 || !call.program->accumulates(static_cast<int>(j))) continue;
                sums.push_back(at::empty(outs[j].sizes(), shard.options().dtype(at::kFloat)));
                call.accumulators[j] = b.matrix(sums.back(), "an accumulator");
            }
        };
        if (run(b, accumulators)) return {gather.gathered, outs};
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
        return {results.at(0), std::vector<Tensor>(results.begin() + 1, results.end())};
    });
}

std::tuple<Tensor, Tensor, std::vector<Tensor>> all_gather_scaled_matmul(
    const Tensor& shard, const Tensor& shard_scale, at::TensorList operands, at::TensorList operand_scales,
    const c10::List<std::optional<Tensor>>& biases, int64_t outer, bool keep, const std::vector<at::ScalarType>& out_dtypes,
    bool fast_accum, std::string strategy, std::string group, std::string site) {
    return framed(shard.device(), [&]() -> std::tuple<Tensor, Tensor, std::vector<Tensor>> {
        Builder b("all_gather_scaled_matmul", shard.device(), strategy, group, site);
        Call& call = b.call;
        const Gather gather(b, shard, outer, false, keep, strategy, Builder::Float8::must);
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
        const Matrix whole{nullptr, gather.whole_rows, gather.whole_cols, gather.whole_cols, 1, call.type};
        std::vector<Tensor> outs;
        for (size_t j = 0; j < count; ++j) {
            const Matrix operand = b.matrix(operands[j], "an operand", Builder::Float8::must);
            b.check(operand.rows == gather.whole_cols, "an operand does not fit the gathered matrix",
                    text_of(operands[j].sizes()), std::to_string(gather.whole_cols) + " rows");
            b.check_float8(whole, operand);
            outs.push_back(at::empty({gather.whole_rows, operand.cols}, shard.options().dtype(out_dtypes[j])));
            call.rhs.push_back(operand);
            call.rhs_scales.push_back(b.scale(operand_scales[j], operand.cols, each, "an operand"));
            call.modes.push_back(0);
            call.key.contracts.push_back(false);
            call.results.push_back(b.matrix(outs.back(), "a result"));
            Matrix addend;
            if (const std::optional<Tensor> bias = biases.get(j); bias && bias->defined()) {
                b.check(bias->dim() == 1 && bias->size(0) == operand.cols, "a bias does not fit", text_of(bias->sizes()),
                        "[" + std::to_string(operand.cols) + "]");
                addend = b.matrix(bias->unsqueeze(0).expand({gather.whole_rows, operand.cols}), "a bias");
                b.check(addend.type == call.results[j].type, "a bias has another dtype than its result", name_of(addend.type),
                        name_of(call.results[j].type));
            }
            call.biases.push_back(addend);
        }
        Tensor scales = at::empty(keep && each ? std::vector<int64_t>{gather.whole_rows, 1} : std::vector<int64_t>{0},
                                  shard.options().dtype(at::kFloat));
        call.output_scales = keep && each ? data_of(scales) : nullptr;
        if (!keep && operands.empty()) return {gather.gathered, scales, outs};  // nobody wants anything
        b.note("scaling", each ? "row" : "tensor");
        if (run(b)) return {gather.gathered, scales, outs};
        WithGil gil;
        std::vector<Tensor> addends;
        for (size_t j = 0; j < count; ++j) addends.push_back(biases.get(j).value_or(Tensor()));
        std::vector<Tensor> results = ReferenceCall("all_gather_scaled_matmul")
                                          .tensor(shard)
                                          .tensor(shard_scale)
                                          .tensors(operands)
                                          .tensors(operand_scales)
                                          .tensors(addends)
                                          .integer(outer)
                                          .flag(keep)
                                          .dtypes(out_dtypes)
                                          .flag(fast_accum)
                                          .text(group)
                                          .run();
        return {results.at(0), results.at(1), std::vector<Tensor>(results.begin() + 2, results.end())};
    });
}

}  // namespace ub_overlap
