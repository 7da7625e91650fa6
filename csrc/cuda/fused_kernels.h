// The kernels of fused collectives, by what is known when they are compiled. Each dtype has a file of its own, so that they
// compile side by side.
#pragma once

#include "core/fused_collective.h"

namespace ub_overlap::cuda {

enum class Exchange { gather, scatter, one_shot, two_shot };

// What follows the reduction. `plain`: at most a residual and an RMSNorm, without bias or offset, and no average. Most models
// need no more, and code that knows it is shorter.
enum class Steps { plain, all };

// `per_thread`: FusedGrid. Kernels of all steps stand in where there is no plain one. Gathers know no dtype: ask for fp32.
const void* fused_kernel_f32(Exchange exchange, int per_thread, Steps steps);
const void* fused_kernel_bf16(Exchange exchange, int per_thread, Steps steps);
const void* fused_kernel_f16(Exchange exchange, int per_thread, Steps steps);

}  // namespace ub_overlap::cuda
