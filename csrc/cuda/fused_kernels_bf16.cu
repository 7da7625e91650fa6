#include "cuda/fused_kernel.h"

namespace ub_overlap::cuda {

const void* fused_kernel_bf16(Exchange exchange, int per_thread, Steps steps) {
    return kernel_of<__nv_bfloat16>(exchange, per_thread, steps);
}

}  // namespace ub_overlap::cuda
