// Delayed casts to float8 on CUDA. runtime/fp8/amax_history/ spells them in ATen for other devices.
#ifdef UB_OVERLAP_CUDA
#include <c10/cuda/CUDAStream.h>

#include "bindings/ops/ops.h"
#include "bindings/ops/run_op.h"
#include "cuda/kernels.h"

namespace ub_overlap {
TwoTensors fp8_delayed_cast(const at::Tensor& x, const at::Tensor& amax, int64_t index, at::Tensor& amax_out,
                            at::ScalarType format, double headroom) {
    return run_op(x.device(), [&]() -> TwoTensors {
        const char* where = "fp8_delayed_cast";
        const bool e4m3 = format == at::kFloat8_e4m3fn;
        expect(where, e4m3 || format == at::kFloat8_e5m2, "unknown float8 format", c10::toString(format),
               "float8_e4m3fn or float8_e5m2");
        const at::ScalarType dtype = x.scalar_type();
        const DType type = dtype == at::kFloat ? DType::f32 : dtype == at::kBFloat16 ? DType::bf16 : DType::f16;
        expect(where, type != DType::f16 || dtype == at::kHalf, "unsupported dtype of x", c10::toString(dtype),
               "float32, bfloat16, float16");
        for (const at::Tensor* list : std::initializer_list<const at::Tensor*>{&amax, &amax_out}) {
            expect(where, list->scalar_type() == at::kFloat && list->is_contiguous() && list->device() == x.device(),
                   "amax or amax_out does not fit", list->toString(), "contiguous float32 on the device of x");
        }
        expect(where, 0 <= index && index < amax.numel() && amax_out.numel() == 1, "index out of range", std::to_string(index),
               "an index into amax, and amax_out of one element");
        const at::Tensor dense = x.contiguous();
        const at::TensorOptions float32 = x.options().dtype(at::kFloat);
        at::Tensor q = at::empty(x.sizes(), x.options().dtype(format)), scale = at::empty({}, float32);
        const at::Tensor current_amax = at::empty({1}, float32);
        const cuda::DelayedCast cast{static_cast<const char*>(dense.const_data_ptr()),
                                     dense.numel(),
                                     e4m3 ? DType::e4m3 : DType::e5m2,
                                     amax.const_data_ptr<float>() + index,
                                     static_cast<float>(headroom),
                                     current_amax.mutable_data_ptr<float>(),
                                     static_cast<char*>(q.mutable_data_ptr()),
                                     scale.mutable_data_ptr<float>(),
                                     amax_out.mutable_data_ptr<float>()};
        cuda::launch_delayed_cast(cast, type, c10::cuda::getCurrentCUDAStream(x.device().index()).stream());
        return {q, scale};
    });
}

}  // namespace ub_overlap
#endif
