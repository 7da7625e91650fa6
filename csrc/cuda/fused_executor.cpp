#include "cuda/fused_executor.h"

#include "core/schedule.h"
#include "cuda/kernels.h"

namespace ub_overlap::cuda {

void compare_form(Call& call) {
    const FusedForm form = form_of(call);
    call.tag ^= static_cast<uint32_t>(form.cluster) << 1 | static_cast<uint32_t>(form.in_packets);
    call.shape_text +=
        "launched with " + std::to_string(form.cluster) + " blocks a row, by " + (form.in_packets ? "packets; " : "regions; ");
}

namespace {

// In mirror mode (benchmarks/mirror) both processes are rank 0, and each stands for all peers of the other: where rank 0 pushes
// to peer p, it is rank R - p. The kernel pushes as rank 0. So the memory and the words of p begin further behind, by those of
// R - p sources. After a failure the abort of peers lies there too, and they find it at their deadlines.
void mirror(const Call& call, Group& group, std::vector<char*>& memory) {
    const int64_t bytes = bytes_of_source(call);
    for (int peer = 1; peer < call.ranks; ++peer) {
        const int source = call.ranks - peer;
        memory[static_cast<size_t>(peer)] += source * bytes;
        group.shared[peer] = words_of_source(group.shared[peer], source);
    }
}

}  // namespace

void issue_fused_collective(const Call& call, CudaArena& arena, int64_t timeout_ns) {
    std::vector<char*> memory;
    for (int rank = 0; rank < call.ranks; ++rank) memory.push_back(arena.slot(rank, fused_slot));
    const int64_t region = fused_region_of(arena.slot_bytes(fused_slot), call.ranks);
    Group group = arena.group();
    if (ProgramCache::is_mirrored()) mirror(call, group, memory);
    launch_fused_collective(group, call, memory, region, timeout_ns, static_cast<cudaStream_t>(call.stream));
}

}  // namespace ub_overlap::cuda
