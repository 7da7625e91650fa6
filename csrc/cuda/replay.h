// Calls that come again with the same buffers are launched as graphs of ours: one launch instead of some dozens, which is what
// an eager call costs the host. In a training loop the caching allocator hands out the same buffers in every iteration, so most
// do.
//
// A graph holds what the launches of one call hold: addresses, sizes, the slot, the deadline. Epochs are counted on the device,
// so graphs, plain calls and graphs of torch's may follow each other.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "core/call.h"
#include "core/stats.h"

namespace ub_overlap::cuda {

// Everything that the launches of a call depend on; equal fingerprints mean equal launches. Short of the arena's addresses.
using Fingerprint = std::vector<uint64_t>;
Fingerprint fingerprint(const Call& call, int64_t timeout_ns);

struct Replay {
    cudaGraphExec_t graph = nullptr;  // null: not recorded yet
    std::vector<StepTime> steps;
    int met = 0;
    bool never = false;  // something in it cannot be recorded
};

class Replays {
  public:
    Replays() = default;
    Replays(const Replays&) = delete;
    Replays& operator=(const Replays&) = delete;
    ~Replays() { clear(); }

    // Counts the meeting. The reference lives until the next call.
    Replay& meet(const Fingerprint& print);
    // The addresses in them are no longer true.
    void clear();

  private:
    struct Hash {
        size_t operator()(const Fingerprint& print) const;
    };
    std::unordered_map<Fingerprint, Replay, Hash> known_;
};

}  // namespace ub_overlap::cuda
