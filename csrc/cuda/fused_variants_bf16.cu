#include "cuda/fused_kernel.h"

namespace ub_overlap::cuda {

const void* fused_kernel_bf16(Exchange exchange, int per_thread, EpilogueKind kind) {
    return variant_of<__nv_bfloat16>(exchange, per_thread, kind);
}

}  // namespace ub_overlap::cuda
