#include "cuda/fused_executor.h"

#include "cuda/kernels.h"

namespace ub_overlap::cuda {

void compare_form(Call& call) {
    const FusedForm form = form_of(call);
    call.tag ^= static_cast<uint32_t>(form.cluster) << 1 | static_cast<uint32_t>(form.in_packets);
    call.shape_text +=
        "launched with " + std::to_string(form.cluster) + " blocks a row, by " + (form.in_packets ? "packets; " : "regions; ");
}

void issue_fused_collective(const Call& call, CudaArena& arena, int64_t timeout_ns) {
    std::vector<char*> memory;
    for (int rank = 0; rank < call.ranks; ++rank) memory.push_back(arena.slot(rank, fused_slot));
    const int64_t region = fused_region_of(arena.slot_bytes(fused_slot), call.ranks);
    launch_fused_collective(arena.group(), call, memory, region, timeout_ns, static_cast<cudaStream_t>(call.stream));
}

}  // namespace ub_overlap::cuda
