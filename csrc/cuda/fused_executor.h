// Issues fused collectives, which are one kernel.
#pragma once

#include "cuda/arena.h"

namespace ub_overlap::cuda {

// Adds the form of the launch on the current device to what ranks compare, the tag and the text of `call`. Ranks whose devices
// differ find a mismatch at once, and do not read each other's packets as regions.
void compare_form(Call& call);
// Launches the kernel of `call` on its stream.
void issue_fused_collective(const Call& call, CudaArena& arena, int64_t timeout_ns);

}  // namespace ub_overlap::cuda
