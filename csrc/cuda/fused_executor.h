// Issues fused collectives, which are one kernel.
#pragma once

#include "cuda/arena.h"

namespace ub_overlap::cuda {

// Launches the kernel of `call` on its stream.
void issue_fused_collective(const Call& call, CudaArena& arena, int64_t timeout_ns);

}  // namespace ub_overlap::cuda
