// The variants of the kernel of fused collectives (cuda/fused_kernel.h), by what is known when they are compiled. Each dtype
// has a file of its own, so that they compile at the same time.
#pragma once

#include "core/fused_collective.h"

namespace ub_overlap::cuda {

enum class Exchange { gather, scatter, one_shot, two_shot };

// What follows the reduction. plain: at most a residual and an RMSNorm, without bias or offset, and no average. Most models
// need no more, and code that knows it is shorter.
enum class EpilogueKind { plain, full };

// `per_thread`: FusedGrid. Full variants stand in where there is no plain one. Gathers know no dtype: ask for fp32.
const void* fused_kernel_f32(Exchange exchange, int per_thread, EpilogueKind kind);
const void* fused_kernel_bf16(Exchange exchange, int per_thread, EpilogueKind kind);
const void* fused_kernel_f16(Exchange exchange, int per_thread, EpilogueKind kind);

}  // namespace ub_overlap::cuda
