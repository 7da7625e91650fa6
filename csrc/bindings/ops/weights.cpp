// Casts of weights to float8 on CUDA for runtime/weights/, which spells them in ATen for other devices.
#ifdef UB_OVERLAP_CUDA
#include <c10/cuda/CUDAStream.h>

#include "bindings/ops/frame.h"
#include "bindings/ops/ops.h"
#include "cuda/kernels.h"

namespace ub_overlap {
namespace {

void expect(bool fits, const char* what, const std::string& got, const char* expected) {
    if (!fits) {
        throw NamedError("UbOverlapError", {{"what", what},
                                            {"where", "fp8_weight_refresh"},
                                            {"got", got},
                                            {"expected", expected},
                                            {"fix", "report this as a bug"}});
    }
}

bool on(const at::Tensor& t, const at::Tensor& beside, at::ScalarType type, int64_t count) {
    return t.scalar_type() == type && t.is_contiguous() && t.device() == beside.device() && t.numel() == count;
}

}  // namespace

void fp8_weight_refresh(const at::Tensor& weight, at::ScalarType through, std::optional<int64_t> axis, at::Tensor& q,
                        at::Tensor& scale, at::Tensor& kept, at::Tensor& scratch) {
    framed(weight.device(), [&]() {
        const bool bf16 = through == at::kBFloat16;
        const at::ScalarType wide = weight.scalar_type();
        expect(bf16 || through == at::kHalf, "not a type to round to", c10::toString(through), "bfloat16 or float16");
        expect(wide == through || wide == at::kFloat, "not a type that is cast", c10::toString(wide), "`through` or float32");
        const std::string shape = c10::str(weight.sizes(), " of strides ", weight.strides());
        expect(weight.dim() == 2 && weight.is_contiguous() && weight.size(0) % 16 == 0 && weight.size(1) % 16 == 0, "weight",
               shape, "contiguous [R, C] that divide by 16");
        expect(!axis || *axis == -1 || *axis == -2, "axis", std::to_string(axis.value_or(0)), "none, -1 or -2");
        const int64_t scales = !axis ? 1 : *axis == -1 ? weight.size(0) : weight.size(1);
        expect(on(q, weight, at::kFloat8_e4m3fn, weight.numel()) && on(scale, weight, at::kFloat, scales) &&
                   on(kept, weight, at::kLong, 1) && on(scratch, weight, at::kLong, cuda::weight_scratch_words(scales)),
               "memory", shape, "q, scale, kept and scratch of the weight's sizes on its device");
        if (weight.numel() == 0) return;
        const bool aligned = reinterpret_cast<uint64_t>(weight.const_data_ptr()) % 16 == 0;
        const at::Tensor dense = aligned ? weight : weight.clone();
        const cuda::WeightCast cast{static_cast<const char*>(dense.const_data_ptr()),
                                    weight.size(0),
                                    weight.size(1),
                                    static_cast<int>(axis.value_or(0)),
                                    static_cast<char*>(q.mutable_data_ptr()),
                                    scale.mutable_data_ptr<float>(),
                                    kept.mutable_data_ptr<int64_t>(),
                                    scratch.mutable_data_ptr<int64_t>()};
        const DType type = wide == at::kFloat ? DType::f32 : bf16 ? DType::bf16 : DType::f16;
        cuda::launch_weight_cast(cast, type, bf16 ? DType::bf16 : DType::f16,
                                 c10::cuda::getCurrentCUDAStream(weight.device().index()).stream());
    });
}

}  // namespace ub_overlap
#endif
