// Updates of amax histories on CUDA. runtime/fp8/amax_history/history_update.py spells them in ATen for other devices.
#ifdef UB_OVERLAP_CUDA
#include <c10/cuda/CUDAStream.h>

#include "bindings/ops/ops.h"
#include "bindings/ops/run_op.h"
#include "cuda/kernels.h"

namespace ub_overlap {
namespace {

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

}  // namespace

at::Tensor fp8_advance_histories(at::Tensor& current, at::Tensor& past, const at::Tensor& slots, bool is_step) {
    return run_op(slots.device(), [&]() -> at::Tensor {
        const char* where = "fp8_advance_histories";
        cuda::AmaxHistories histories = histories_of(where, current, slots);
        expect(where, past.dim() == 2, "past does not fit", c10::str(past.sizes()), "[calls, capacity]");
        expect_floats(where, "past does not fit", past, slots, past.size(0) * current.numel());
        histories.past = past.mutable_data_ptr<float>();
        histories.history_length = past.size(0);
        at::Tensor amax = at::empty({slots.numel()}, current.options());
        cuda::launch_advance_histories(histories, is_step, amax.mutable_data_ptr<float>(),
                                       c10::cuda::getCurrentCUDAStream(slots.device().index()).stream());
        return amax;
    });
}

at::Tensor fp8_raise_amax(at::Tensor& current, const at::Tensor& slots, int64_t index,
                          const std::optional<at::Tensor>& quantized, const at::Tensor& scale, const at::Tensor& sample) {
    return run_op(slots.device(), [&]() -> at::Tensor {
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
    });
}

}  // namespace ub_overlap
#endif
