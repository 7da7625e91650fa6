// Repeated calls with the same buffers are launched as CUDA graphs of ours: one launch instead of dozens, which dominate the
// host time of an eager call. In a training loop the caching allocator returns the same buffers in every iteration, so most
// calls repeat.
//
// A graph holds the arguments of the launches of one call: addresses, sizes, the slot, the deadline. Epochs are counted on the
// device, so our graphs, eager calls and graphs of torch's may follow each other.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "core/call.h"
#include "core/recent_map.h"
#include "core/stats.h"

namespace ub_overlap::cuda {

// Everything that the launches of a call depend on, except the arena's addresses. Equal fingerprints mean equal launches.
using Fingerprint = std::vector<uint64_t>;
Fingerprint make_fingerprint(const Call& call, int64_t timeout_ns);

struct RecordedCall {
    cudaGraphExec_t graph = nullptr;  // null: not recorded yet
    std::vector<StepTime> steps;
    int calls = 0;
    bool unrecordable = false;
};

class RecordedCalls {
  public:
    RecordedCalls() = default;
    RecordedCalls(const RecordedCalls&) = delete;
    RecordedCalls& operator=(const RecordedCalls&) = delete;
    ~RecordedCalls() { clear(); }

    // Returns the entry of a call and counts the call. The reference is valid until the next `count`. A new entry evicts the
    // one used least recently once there are more than the ops of a step of a large model, in both slots.
    RecordedCall& count(const Fingerprint& print);
    // Destroys all graphs: the addresses in them are stale.
    void clear();

  private:
    struct Hash {
        size_t operator()(const Fingerprint& print) const;
    };
    RecentMap<Fingerprint, RecordedCall, Hash> calls_{8192};
    uint64_t algorithms_ = 0;  // generation of MatmulAlgorithms that the graphs hold
};

}  // namespace ub_overlap::cuda
