// When the steps of a call ran, by the device's own clock: kernels of one thread write it, so replayed graphs are timed too.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "core/call.h"
#include "core/stats.h"

namespace ub_overlap::cuda {

// Stamps of one call in pinned host memory: begin and end of the call's first kernel, then of every step. It is never freed,
// for a graph may hold its address; tracing is for looking, not for days.
class Trace {
  public:
    explicit Trace(size_t steps);
    void begin(cudaStream_t stream) { stamp(0, stream); }
    void begun(cudaStream_t stream) { stamp(1, stream); }
    void step_begins(int step, cudaStream_t stream) { stamp(2 + 2 * static_cast<size_t>(step), stream); }
    void step_ends(int step, cudaStream_t stream) { stamp(3 + 2 * static_cast<size_t>(step), stream); }
    // Waits for the device; `times` say which steps there are. A step without stamps ran in the first kernel.
    std::vector<StepTime> read(std::vector<StepTime> times) const;

  private:
    void stamp(size_t place, cudaStream_t stream);
    uint64_t* stamps_ = nullptr;
    int device_ = 0;
};

}  // namespace ub_overlap::cuda
