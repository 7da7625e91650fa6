#include "bindings/matmul.h"

#include <ATen/ATen.h>

namespace ub_overlap {
namespace {

// Few blocks are multiplied one by one, by the very kernel that a caller of mm would get; many small ones in one batched call.
constexpr int64_t most_single_blocks = 16;

at::ScalarType scalar_type(DType type) {
    return type == DType::f32 ? at::kFloat : type == DType::bf16 ? at::kBFloat16 : at::kHalf;
}

at::Tensor view(const Matrix& m, int64_t block, int64_t step) {
    char* data = m.data ? m.data + block * step * size_of(m.type) : nullptr;
    return at::from_blob(data, {m.rows, m.cols}, {m.row_stride, m.col_stride}, at::TensorOptions(scalar_type(m.type)));
}

at::Tensor views(const Matrix& m, int64_t batch, int64_t step) {
    const at::TensorOptions options(scalar_type(m.type));
    return at::from_blob(m.data, {batch, m.rows, m.cols}, {step, m.row_stride, m.col_stride}, options);
}

}  // namespace

void aten_matmul(const MatmulTask& t) {
    if (t.batch == 0 || t.out.rows == 0 || t.out.cols == 0) return;
    // A contraction is formed in fp32, and so is a product of a narrow gathered piece with a wide operand.
    const auto operand = [&](at::Tensor tensor) { return tensor.to(scalar_type(t.out.type)); };
    if (t.batch > most_single_blocks) {
        at::Tensor out = views(t.out, t.batch, t.out_step);
        const at::Tensor a = operand(views(t.a, t.batch, t.a_step)), b = operand(views(t.b, t.batch, t.b_step));
        if (t.accumulate) {
            at::baddbmm_out(out, out, a, b);
        } else if (t.addend.data) {
            at::baddbmm_out(out, views(t.addend, t.batch, t.addend_step), a, b);
        } else {
            at::bmm_out(out, a, b);
        }
        return;
    }
    for (int64_t block = 0; block < t.batch; ++block) {
        at::Tensor out = view(t.out, block, t.out_step);
        const at::Tensor a = operand(view(t.a, block, t.a_step)), b = operand(view(t.b, block, t.b_step));
        if (t.accumulate) {
            at::addmm_out(out, out, a, b);
        } else if (t.addend.data) {
            at::addmm_out(out, view(t.addend, block, t.addend_step), a, b);
        } else {
            at::mm_out(out, a, b);
        }
    }
}

}  // namespace ub_overlap
