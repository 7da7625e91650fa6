// Casts to float8 on CUDA for runtime/fp8/amax_history/, which spells them in ATen for other devices.
#ifdef UB_OVERLAP_CUDA
#include <c10/cuda/CUDAStream.h>

#include "bindings/ops/ops.h"
#include "bindings/ops/run_op.h"
#include "cuda/kernels.h"

namespace ub_overlap {
TwoTensors fp8_cast(const at::Tensor& x, const at::Tensor& most, int64_t at, at::Tensor& noted, at::ScalarType format,
                    double headroom) {
    return run_op(x.device(), [&]() -> TwoTensors {
        const bool e4m3 = format == at::kFloat8_e4m3fn;
        expect("fp8_cast", e4m3 || format == at::kFloat8_e5m2, "no such float8", c10::toString(format),
               "float8_e4m3fn or float8_e5m2");
        const at::ScalarType wide = x.scalar_type();
        const DType type = wide == at::kFloat ? DType::f32 : wide == at::kBFloat16 ? DType::bf16 : DType::f16;
        expect("fp8_cast", type != DType::f16 || wide == at::kHalf, "not a type that is cast", c10::toString(wide),
               "float32, bfloat16, float16");
        for (const at::Tensor* list : std::initializer_list<const at::Tensor*>{&most, &noted}) {
            expect("fp8_cast", list->scalar_type() == at::kFloat && list->is_contiguous() && list->device() == x.device(),
                   "magnitudes are elsewhere", list->toString(), "contiguous float32 on the device of x");
        }
        expect("fp8_cast", 0 <= at && at < most.numel() && noted.numel() == 1, "no such magnitude", std::to_string(at),
               "one of `most`");
        const at::Tensor dense = x.contiguous();
        const at::TensorOptions magnitudes = x.options().dtype(at::kFloat);
        at::Tensor q = at::empty(x.sizes(), x.options().dtype(format)), scale = at::empty({}, magnitudes);
        const at::Tensor first = at::empty({1}, magnitudes);
        const cuda::Fp8Cast cast{static_cast<const char*>(dense.const_data_ptr()),
                                 dense.numel(),
                                 e4m3 ? DType::e4m3 : DType::e5m2,
                                 most.const_data_ptr<float>() + at,
                                 static_cast<float>(headroom),
                                 first.mutable_data_ptr<float>(),
                                 static_cast<char*>(q.mutable_data_ptr()),
                                 scale.mutable_data_ptr<float>(),
                                 noted.mutable_data_ptr<float>()};
        cuda::launch_fp8_cast(cast, type, c10::cuda::getCurrentCUDAStream(x.device().index()).stream());
        return {q, scale};
    });
}

}  // namespace ub_overlap
#endif
