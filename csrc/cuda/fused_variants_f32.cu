#include "cuda/fused_kernel.h"

namespace ub_overlap::cuda {

const void* fused_kernel_f32(Exchange exchange, int per_thread, EpilogueKind kind) {
    return variant_of<float>(exchange, per_thread, kind);
}

}  // namespace ub_overlap::cuda
