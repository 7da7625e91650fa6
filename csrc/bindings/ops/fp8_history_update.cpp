// How a call changes amax histories: by kernels on CUDA (cuda/fp8_amax_history.cu), by ATen on other devices.
#include "bindings/ops/ops.h"
#include "bindings/ops/run_op.h"
#ifdef UB_OVERLAP_CUDA
#include <c10/cuda/CUDAStream.h>

#include "cuda/kernels.h"
#endif

namespace ub_overlap {
namespace {

TwoTensors advance_in_aten(at::Tensor& current, at::Tensor& past, const at::Tensor& slots, bool is_step) {
    at::Tensor rows = past.index_select(1, slots);
    if (is_step) {
        const at::Tensor newest = current.index_select(0, slots);
        current.index_fill_(0, slots, 0.0);
        const at::Tensor pushed = at::cat({newest.unsqueeze(0), rows.slice(0, 0, -1)});
        rows = at::where(newest.gt(0), pushed, rows);
        past.index_copy_(1, slots, rows);
    }
    return {rows.amax(0), slots.clone()};
}

at::Tensor raise_in_aten(at::Tensor& current, const at::Tensor& slots, int64_t index,
                         const std::optional<at::Tensor>& quantized, const at::Tensor& scale, const at::Tensor& sample) {
    const at::Tensor slot = slots.slice(0, index, index + 1);
    at::Tensor amax = sample;
    if (quantized && quantized->numel() > 0) {
        const at::Tensor values = quantized->to(at::kFloat).abs();
        amax = at::maximum(amax, at::where(values.isfinite(), values, at::zeros({}, values.options())).amax() * scale);
    }
    current.index_copy_(0, slot, at::maximum(current.index_select(0, slot), amax.reshape({1})));
    return scale.clone();
}

#ifdef UB_OVERLAP_CUDA
void expect_floats(const char* where, const char* what, const at::Tensor& t, const at::Tensor& slots, int64_t count) {
    expect(where, t.scalar_type() == at::kFloat && t.is_contiguous() && t.device() == slots.device() && t.numel() == count,
           what, c10::str(t.toString(), " ", t.sizes(), ", needed: ", count, " elements"),
           "contiguous float32 on the device of slots");
}

cuda::AmaxHistories histories_of(const char* where, const at::Tensor& current, const at::Tensor& slots) {
    expect(where, slots.scalar_type() == at::kLong && slots.is_contiguous(), "slots do not fit", slots.toString(),
           "contiguous int64");
    expect_floats(where, "current does not fit", current, slots, current.numel());
    return {slots.const_data_ptr<int64_t>(), slots.numel(), current.numel(), current.mutable_data_ptr<float>(), nullptr, 0};
}

TwoTensors advance_on_cuda(at::Tensor& current, at::Tensor& past, const at::Tensor& slots, bool is_step) {
    const char* where = "fp8_advance_histories";
    cuda::AmaxHistories histories = histories_of(where, current, slots);
    expect(where, past.dim() == 2, "past does not fit", c10::str(past.sizes()), "[calls, capacity]");
    expect_floats(where, "past does not fit", past, slots, past.size(0) * current.numel());
    histories.past = past.mutable_data_ptr<float>();
    histories.history_length = past.size(0);
    const at::Tensor amax = at::empty({slots.numel()}, current.options()), copy = at::empty_like(slots);
    cuda::launch_advance_histories(histories, is_step, amax.mutable_data_ptr<float>(), copy.mutable_data_ptr<int64_t>(),
                                   c10::cuda::getCurrentCUDAStream(slots.device().index()).stream());
    return {amax, copy};
}

at::Tensor raise_on_cuda(at::Tensor& current, const at::Tensor& slots, int64_t index,
                         const std::optional<at::Tensor>& quantized, const at::Tensor& scale, const at::Tensor& sample) {
    const char* where = "fp8_raise_amax";
    const cuda::AmaxHistories histories = histories_of(where, current, slots);
    expect(where, index >= 0 && index < slots.numel(), "index does not fit", std::to_string(index), "an index of slots");
    expect_floats(where, "scale does not fit", scale, slots, 1);
    expect_floats(where, "sample does not fit", sample, slots, 1);
    cuda::Quantized cast{nullptr, 0, false, scale.const_data_ptr<float>()};
    at::Tensor dense;
    if (quantized) {
        const at::ScalarType format = quantized->scalar_type();
        expect(where, (format == at::kFloat8_e4m3fn || format == at::kFloat8_e5m2) && quantized->device() == slots.device(),
               "quantized does not fit", quantized->toString(), "float8_e4m3fn or float8_e5m2 on the device of slots");
        const at::Tensor bytes = quantized->view(at::kByte);
        const bool readable =
            bytes.is_non_overlapping_and_dense() && reinterpret_cast<uint64_t>(bytes.const_data_ptr()) % 16 == 0;
        dense = readable ? bytes : bytes.clone(at::MemoryFormat::Contiguous);
        cast = {dense.const_data_ptr<uint8_t>(), dense.numel(), format == at::kFloat8_e5m2, cast.scale};
    }
    at::Tensor copy = at::empty({}, scale.options());
    cuda::launch_raise_amax(histories, index, cast, sample.const_data_ptr<float>(), copy.mutable_data_ptr<float>(),
                            c10::cuda::getCurrentCUDAStream(slots.device().index()).stream());
    return copy;
}
#endif

}  // namespace

TwoTensors fp8_advance_histories(at::Tensor& current, at::Tensor& past, const at::Tensor& slots, bool is_step) {
    return run_op(slots.device(), [&]() -> TwoTensors {
#ifdef UB_OVERLAP_CUDA
        if (slots.is_cuda()) return advance_on_cuda(current, past, slots, is_step);
#endif
        return advance_in_aten(current, past, slots, is_step);
    });
}

at::Tensor fp8_raise_amax(at::Tensor& current, const at::Tensor& slots, int64_t index,
                          const std::optional<at::Tensor>& quantized, const at::Tensor& scale, const at::Tensor& sample) {
    return run_op(slots.device(), [&]() -> at::Tensor {
#ifdef UB_OVERLAP_CUDA
        if (slots.is_cuda()) return raise_on_cuda(current, slots, index, quantized, scale, sample);
#endif
        return raise_in_aten(current, slots, index, quantized, scale, sample);
    });
}

}  // namespace ub_overlap
