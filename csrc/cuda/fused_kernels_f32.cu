#include "cuda/fused_kernel.h"

namespace ub_overlap::cuda {

const void* fused_kernel_f32(Exchange exchange, int per_thread, Steps steps) {
    return kernel_of<float>(exchange, per_thread, steps);
}

}  // namespace ub_overlap::cuda
