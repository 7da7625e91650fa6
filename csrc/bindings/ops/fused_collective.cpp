// A collective of few tokens with what follows a reduction: one kernel on CUDA (core/fused_collective.h).
#include "bindings/fallback.h"
#include "bindings/ops/collective_sizes.h"
#include "bindings/ops/ops.h"
#include "bindings/ops/run_op.h"
#include "core/float8.h"
#ifdef UB_OVERLAP_CUDA
#include "cuda/fused_executor.h"
#endif

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

// The operands of a norm.
struct NormTensors {
    Tensor weight, bias;
};
struct Operands {
    Tensor input, linear_bias, addend, residual, scale;
    NormTensors branch_norm, norm;
};

// Checks and keeps an operand of the epilogue. `numel`: how many elements it must have.
Tensor operand(const Builder& b, const OptionalTensor& t, const std::string& name, const Tensor& input, int64_t numel) {
    if (!has(t)) return {};
    b.check(t->device() == input.device(), name + " is on another device", text_of(t->device()), text_of(input.device()));
    b.check(t->scalar_type() == input.scalar_type(), name + " has another dtype than the input",
            c10::toString(t->scalar_type()), c10::toString(input.scalar_type()));
    b.check(t->numel() == numel, name + " does not fit", text_of(t->sizes()), std::to_string(numel) + " elements");
    return aligned(*t);
}

// Checks and keeps a vector of the columns.
Tensor columns(const Builder& b, const OptionalTensor& t, const std::string& name, const Tensor& input, int64_t cols) {
    if (has(t)) b.check(t->dim() == 1, name + " is no vector", text_of(t->sizes()), "one dim");
    return operand(b, t, name, input, cols);
}

// Reads a norm and checks its operands. `norm` borrows their data.
NormTensors read_norm(const Builder& b, RowNorm& norm, const std::string& kind, const std::string& what, const Tensor& input,
                      int64_t cols, const OptionalTensor& weight, const OptionalTensor& bias) {
    norm.kind = norm_of(b, kind);
    b.check(norm.exists() || (!has(weight) && !has(bias)), "without " + what + " it has no weight and no bias", "'none'",
            "'rms' or 'layer'");
    const NormTensors tensors{columns(b, weight, "the weight of " + what, input, cols),
                              columns(b, bias, "the bias of " + what, input, cols)};
    norm.weight = data_of(tensors.weight), norm.bias = data_of(tensors.bias);
    return tensors;
}

// Norms fp32 rows. Rounds to `type`.
Tensor apply_norm(const Tensor& rows, const RowNorm& norm, const NormTensors& tensors, at::ScalarType type) {
    Tensor x = norm.kind == Norm::layer ? rows - rows.mean(-1, true) : rows;
    x = x * at::rsqrt(x.square().mean(-1, true) + norm.epsilon);
    if (norm.round_before_weight) x = x.to(type).to(at::kFloat);
    if (tensors.weight.defined()) x = x * (tensors.weight.to(at::kFloat) + norm.weight_offset);
    if (tensors.bias.defined()) x = x + tensors.bias.to(at::kFloat);
    return x.to(type);
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

// Completes what ranks compare of a call by what its device decides.
void complete(Call& call) {
#ifdef UB_OVERLAP_CUDA
    if (call.device >= 0) cuda::compare_form(call);
#else
    (void)call;
#endif
}

// The epilogue on `reduced`, for calls that are not one kernel.
ThreeTensors apply_epilogue(const Tensor& reduced, const Operands& o, const Epilogue& e, at::ScalarType normed_dtype) {
    const at::ScalarType type = reduced.scalar_type();
    Tensor branch = o.linear_bias.defined() ? at::add(reduced, o.linear_bias) : reduced;
    if (e.branch_norm.exists()) branch = apply_norm(branch.to(at::kFloat), e.branch_norm, o.branch_norm, type);
    if (e.branch_factor != 1) branch = branch * e.branch_factor;
    if (o.addend.defined()) branch = at::add(branch, o.addend.view(reduced.sizes()));
    const Tensor residual = o.residual.defined() ? o.residual.view(reduced.sizes()) : Tensor();
    const Tensor summed = residual.defined() ? at::add(branch, residual) : branch;
    const auto empty = [&](at::ScalarType dtype) { return at::empty({0}, reduced.options().dtype(dtype)); };
    if (!e.norm.exists()) return {summed, empty(normed_dtype), empty(at::kFloat)};
    const bool is_wide = residual.defined() && !e.round_sum;
    const Tensor x =
        apply_norm(is_wide ? at::add(branch.to(at::kFloat), residual) : summed.to(at::kFloat), e.norm, o.norm, type);
    if (!is_float8(e.normed_type)) return {summed, x, empty(at::kFloat)};
    const auto [cast, scales] = cast_to_float8(x, o, e, normed_dtype);
    return {summed, cast, scales};
}

}  // namespace

ThreeTensors fused_collective(const Site& site, const Tensor& input, std::string collective, std::string reduce_op,
                              const OptionalTensor& linear_bias, std::string branch_norm, const OptionalTensor& branch_weight,
                              const OptionalTensor& branch_bias, double branch_epsilon, bool branch_round_before_weight,
                              double branch_weight_offset, double branch_factor, const OptionalTensor& addend,
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
        const bool has_branch = has(linear_bias) || branch_norm != "none" || branch_factor != 1 || has(addend);
        if (!reduces) {
            const char* refused = has(residual) ? "a residual" : has_branch ? "a branch" : norm != "none" ? "a norm" : nullptr;
            b.check(!refused, "an all_gather has no epilogue", refused ? refused : "",
                    "no residual, no branch, and norm 'none'");
        }
        call.key.kind = (call.two_shot ? "two_shot_" : "one_shot_") + collective;
        const int64_t total = c10::multiply_integers(sizes), cols = sizes.empty() ? 1 : sizes.back();
        Operands o;
        o.input = aligned(input);
        o.linear_bias = columns(b, linear_bias, "the linear bias", input, cols);
        o.addend = operand(b, addend, "the addend", input, total),
        o.residual = operand(b, residual, "the residual", input, total);
        e.linear_bias = data_of(o.linear_bias), e.addend = data_of(o.addend), e.residual = data_of(o.residual);
        o.branch_norm = read_norm(b, e.branch_norm, branch_norm, "the branch's norm", input, cols, branch_weight, branch_bias);
        o.norm = read_norm(b, e.norm, norm, "the norm", input, cols, weight, bias);
        e.branch_factor = static_cast<float>(branch_factor);
        const bool has_norm = e.norm.exists(), by_row = amax_factor > 0, narrow = has(scale) || by_row;
        const bool has_rows = has_norm || has_branch;
        b.check(has_norm || !narrow, "without a norm there is no scale", "norm 'none'", "'rms' or 'layer'");
        b.check(!by_row || !has(scale), "rows have scales of their own, and the tensor has one too",
                "amax_factor " + std::to_string(amax_factor) + " and a scale", "one of them");
        b.check(!by_row || least_scale > 0, "the scale of a row of zeros would be 0", std::to_string(least_scale), "above 0");
        b.check(!has_rows || input.dim() > 0, "a tensor without dims has no rows", "[]", "at least one dim");
        b.check(!by_row || cols > 0, "rows without elements have no amax", text_of(input.sizes()), "a last dim above 0");
        const int64_t rows = cols ? total / cols : 0, row_bytes = cols * size_of(call.type);
        const int64_t shard_bytes = (reduces ? total : input.numel()) * size_of(call.type);
        if (has(scale)) o.scale = scale->contiguous(), e.scale = b.scale(o.scale, 1, false, "the normed rows").data;
        e.normed_type = b.type_of(normed_dtype, narrow ? Builder::Float8::must : Builder::Float8::no);
        b.check(!has_norm || narrow || normed_dtype == input.scalar_type(), "the normed rows keep the input's dtype",
                c10::toString(normed_dtype), c10::toString(input.scalar_type()));
        if (call.is_fused) {
            const int64_t whole = has_rows ? row_bytes : shard_bytes;
            b.check(whole % vector_size == 0, "rows are no multiple of 16 bytes", std::to_string(whole) + " bytes",
                    "a multiple of 16, or strategy 'none'");
            b.check(!has_rows || row_bytes <= fused_row_limit, "rows are too long for an epilogue",
                    std::to_string(row_bytes) + " bytes",
                    "at most " + std::to_string(fused_row_limit) + ", or strategy 'none'");
            call.grid = has_rows ? make_fused_grid(rows, row_bytes, true) : make_fused_grid(1, shard_bytes, false);
        }
        e.branch_norm.epsilon = static_cast<float>(branch_epsilon);
        e.branch_norm.round_before_weight = branch_round_before_weight;
        e.branch_norm.weight_offset = static_cast<float>(branch_weight_offset);
        e.norm.epsilon = static_cast<float>(epsilon), e.norm.round_before_weight = round_before_weight;
        e.norm.weight_offset = static_cast<float>(weight_offset);
        e.round_sum = round_sum || !has_norm || !has(residual), e.divide_by_scale = divide_by_scale;
        e.amax_factor = static_cast<float>(amax_factor), e.least_scale = static_cast<float>(least_scale);
        b.describe("input", input);
        b.note("reduce_op", reduce_op), b.note("norm", norm), b.note("residual", has(residual));
        b.note("branch_norm", branch_norm), b.note("linear_bias", has(linear_bias));
        b.note("addend", has(addend));
        b.note("normed_dtype", c10::toString(normed_dtype)), b.note("row_scales", by_row);

        if (call.ranks == 1) return apply_epilogue(o.input.clone(), o, e, normed_dtype);
        const Tensor summed = at::empty(sizes, input.options());
        Tensor normed = at::empty(has_norm ? sizes : std::vector<int64_t>{0}, input.options().dtype(normed_dtype));
        std::vector<int64_t> scale_sizes{0};
        if (by_row) scale_sizes = sizes, scale_sizes.back() = 1;
        Tensor row_scales = at::empty(scale_sizes, input.options().dtype(at::kFloat));
        call.input = data_of(o.input), call.output = data_of(summed), e.normed = data_of(normed);
        e.row_scales = by_row ? row_scales.data_ptr<float>() : nullptr;
        if (run_on_transport(b, complete)) {
            if (input.is_cuda()) return {summed, normed, row_scales};
            return apply_epilogue(summed, o, e, normed_dtype);
        }
        WithGil gil;
        const std::vector<Tensor> results = FallbackCall("fused_collective")
                                                .tensor(input)
                                                .text(collective)
                                                .text(reduce_op)
                                                .tensor(linear_bias.value_or(Tensor()))
                                                .text(branch_norm)
                                                .tensor(branch_weight.value_or(Tensor()))
                                                .tensor(branch_bias.value_or(Tensor()))
                                                .real(branch_epsilon)
                                                .flag(branch_round_before_weight)
                                                .real(branch_weight_offset)
                                                .real(branch_factor)
                                                .tensor(addend.value_or(Tensor()))
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
