// A collective of few tokens with what follows a reduction: one kernel on CUDA (core/fused_collective.h).
#include "bindings/fallback.h"
#include "bindings/ops/collective_sizes.h"
#include "bindings/ops/ops.h"
#include "bindings/ops/run_op.h"
#include "core/float8.h"

namespace ub_overlap {
namespace {

using OptionalTensor = std::optional<Tensor>;

bool has(const OptionalTensor& t) {
    return t && t->defined();
}

Norm norm_of(const Builder& b, const std::string& name) {
    if (name == "rms") return Norm::rms;
    if (name == "layer") return Norm::layer;
    b.check(name == "none", "this norm is unknown", "'" + name + "'", "'none', 'rms' or 'layer'");
    return Norm::none;
}

// Contiguous, at a multiple of a vector's size.
Tensor aligned(const Tensor& t) {
    const Tensor dense = t.contiguous();
    return reinterpret_cast<uintptr_t>(dense.data_ptr()) % vector_size == 0 ? dense : dense.clone();
}

struct Operands {
    Tensor input, residual, weight, bias, scale;
};

// Checks and keeps an operand of the epilogue. `numel`: how many elements it must have.
Tensor operand(const Builder& b, const OptionalTensor& t, const char* name, const Tensor& input, int64_t numel) {
    if (!has(t)) return {};
    b.check(t->device() == input.device(), std::string(name) + " is on another device", text_of(t->device()),
            text_of(input.device()));
    b.check(t->scalar_type() == input.scalar_type(), std::string(name) + " has another dtype than the input",
            c10::toString(t->scalar_type()), c10::toString(input.scalar_type()));
    b.check(t->numel() == numel, std::string(name) + " does not fit", text_of(t->sizes()), std::to_string(numel) + " elements");
    return aligned(*t);
}

// Casts `x` to float8 by the scale of the tensor, or by scales of its rows. Returns those too.
TwoTensors cast_to_float8(const Tensor& x, const Operands& o, const Epilogue& e, at::ScalarType dtype) {
    const Tensor wide = x.to(at::kFloat);
    const bool by_row = e.amax_factor > 0;
    const Tensor scale =
        by_row ? wide.abs().amax(-1, true).mul(e.amax_factor).clamp_min(e.least_scale) : o.scale.view(at::IntArrayRef{});
    const float most = e.normed_type == DType::e5m2 ? e5m2_max : e4m3_max;
    const Tensor scaled = e.divide_by_scale ? wide / scale : wide * scale.reciprocal();
    return {scaled.clamp(-most, most).to(dtype), by_row ? scale : at::empty({0}, wide.options())};
}

// The epilogue on `reduced`, for calls that are not one kernel.
ThreeTensors apply_epilogue(const Tensor& reduced, const Operands& o, const Epilogue& e, at::ScalarType normed_dtype) {
    const Tensor residual = o.residual.defined() ? o.residual.view(reduced.sizes()) : Tensor();
    const Tensor summed = residual.defined() ? at::add(reduced, residual) : reduced;
    const auto empty = [&](at::ScalarType dtype) { return at::empty({0}, reduced.options().dtype(dtype)); };
    if (e.norm == Norm::none) return {summed, empty(normed_dtype), empty(at::kFloat)};
    const at::ScalarType type = summed.scalar_type();
    const bool is_wide = residual.defined() && !e.round_sum;
    Tensor x = is_wide ? at::add(reduced.to(at::kFloat), residual) : summed.to(at::kFloat);
    if (e.norm == Norm::layer) x = x - x.mean(-1, true);
    x = x * at::rsqrt(x.square().mean(-1, true) + e.epsilon);
    if (e.round_before_weight) x = x.to(type).to(at::kFloat);
    if (o.weight.defined()) x = x * (o.weight.to(at::kFloat) + e.weight_offset);
    if (o.bias.defined()) x = x + o.bias.to(at::kFloat);
    x = x.to(type);
    if (!is_float8(e.normed_type)) return {summed, x, empty(at::kFloat)};
    const auto [cast, scales] = cast_to_float8(x, o, e, normed_dtype);
    return {summed, cast, scales};
}

}  // namespace

ThreeTensors fused_collective(const Site& site, const Tensor& input, std::string collective, std::string reduce_op,
                              const OptionalTensor& residual, std::string norm, const OptionalTensor& weight,
                              const OptionalTensor& bias, double epsilon, bool round_sum, bool round_before_weight,
                              double weight_offset, const OptionalTensor& scale, double amax_factor, double least_scale,
                              bool divide_by_scale, at::ScalarType normed_dtype) {
    return run_op(input.device(), [&]() -> ThreeTensors {
        Builder b("fused_collective", input.device(), site);
        Call& call = b.call;
        Epilogue& e = call.epilogue;
        const std::vector<int64_t> sizes = deal_rows(b, input, collective, reduce_op, input.scalar_type());
        const bool reduces = call.collective != Collective::gather;
        b.check(!call.two_shot || call.collective == Collective::reduce, "two_shot is a strategy of all_reduces", collective,
                "'all_reduce', or strategy 'one_shot'");
        call.key.kind = (call.two_shot ? "two_shot_" : "one_shot_") + collective;
        e.norm = norm_of(b, norm);
        const bool has_norm = e.norm != Norm::none;
        b.check(reduces || (!has(residual) && !has_norm), "an all_gather has no epilogue", norm, "no residual and norm 'none'");
        const bool by_row = amax_factor > 0, narrow = has(scale) || by_row;
        b.check(has_norm || (!has(weight) && !has(bias) && !narrow), "without a norm there are no weight, bias and scale",
                "norm 'none'", "'rms' or 'layer'");
        b.check(!by_row || !has(scale), "rows have scales of their own, and the tensor has one too",
                "amax_factor " + std::to_string(amax_factor) + " and a scale", "one of them");
        b.check(!by_row || least_scale > 0, "the scale of a row of zeros would be 0", std::to_string(least_scale), "above 0");
        b.check(!has_norm || input.dim() > 0, "a tensor without dims has no rows", "[]", "at least one dim");

        const int64_t total = c10::multiply_integers(sizes), cols = has_norm ? sizes.back() : total;
        b.check(!by_row || cols > 0, "rows without elements have no amax", text_of(input.sizes()), "a last dim above 0");
        const int64_t rows = cols ? total / cols : 0, row_bytes = cols * size_of(call.type);
        const int64_t shard_bytes = (reduces ? total : input.numel()) * size_of(call.type);
        Operands o;
        o.input = aligned(input);
        o.residual = operand(b, residual, "the residual", input, total);
        o.weight = operand(b, weight, "the weight", input, cols), o.bias = operand(b, bias, "the bias", input, cols);
        if (has(scale)) o.scale = scale->contiguous(), e.scale = b.scale(o.scale, 1, false, "the normed rows").data;
        e.normed_type = b.type_of(normed_dtype, narrow ? Builder::Float8::must : Builder::Float8::no);
        b.check(!has_norm || narrow || normed_dtype == input.scalar_type(), "the normed rows keep the input's dtype",
                c10::toString(normed_dtype), c10::toString(input.scalar_type()));
        if (call.is_fused) {
            b.check((has_norm ? row_bytes : shard_bytes) % vector_size == 0, "rows are no multiple of 16 bytes",
                    std::to_string(has_norm ? row_bytes : shard_bytes) + " bytes", "a multiple of 16, or strategy 'none'");
            b.check(!has_norm || row_bytes <= fused_row_limit, "rows are too long for a fused norm",
                    std::to_string(row_bytes) + " bytes",
                    "at most " + std::to_string(fused_row_limit) + ", or strategy 'none'");
            call.grid = has_norm ? make_fused_grid(rows, row_bytes, true) : make_fused_grid(1, shard_bytes, false);
        }
        e.epsilon = static_cast<float>(epsilon), e.round_before_weight = round_before_weight;
        e.weight_offset = static_cast<float>(weight_offset);
        e.round_sum = round_sum || !has_norm || !has(residual), e.divide_by_scale = divide_by_scale;
        e.amax_factor = static_cast<float>(amax_factor), e.least_scale = static_cast<float>(least_scale);
        b.describe("input", input);
        b.note("reduce_op", reduce_op), b.note("norm", norm), b.note("residual", has(residual));
        b.note("normed_dtype", c10::toString(normed_dtype)), b.note("row_scales", by_row);

        if (call.ranks == 1) return apply_epilogue(o.input.clone(), o, e, normed_dtype);
        const Tensor summed = at::empty(sizes, input.options());
        Tensor normed = at::empty(has_norm ? sizes : std::vector<int64_t>{0}, input.options().dtype(normed_dtype));
        std::vector<int64_t> scale_sizes{0};
        if (by_row) scale_sizes = sizes, scale_sizes.back() = 1;
        Tensor row_scales = at::empty(scale_sizes, input.options().dtype(at::kFloat));
        call.input = data_of(o.input), call.output = data_of(summed);
        e.residual = data_of(o.residual), e.weight = data_of(o.weight), e.bias = data_of(o.bias), e.normed = data_of(normed);
        e.row_scales = by_row ? row_scales.data_ptr<float>() : nullptr;
        if (run_on_transport(b)) {
            if (input.is_cuda()) return {summed, normed, row_scales};
            return apply_epilogue(summed, o, e, normed_dtype);
        }
        WithGil gil;
        const std::vector<Tensor> results = FallbackCall("fused_collective")
                                                .tensor(input)
                                                .text(collective)
                                                .text(reduce_op)
                                                .tensor(residual.value_or(Tensor()))
                                                .text(norm)
                                                .tensor(weight.value_or(Tensor()))
                                                .tensor(bias.value_or(Tensor()))
                                                .real(epsilon)
                                                .flag(round_sum)
                                                .flag(round_before_weight)
                                                .real(weight_offset)
                                                .tensor(scale.value_or(Tensor()))
                                                .real(amax_factor)
                                                .real(least_scale)
                                                .flag(divide_by_scale)
                                                .dtype(normed_dtype)
                                                .run(site);
        return {results.at(0), results.at(1), results.at(2)};
    });
}

}  // namespace ub_overlap
