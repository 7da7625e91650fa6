// Times of the steps of a call by the device's own clock. Kernels of one thread write them, so replayed graphs are timed too.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "core/call.h"
#include "core/stats.h"

namespace ub_overlap::cuda {

// Time stamps of one call in pinned host memory: begin and end of the call's first kernel, then of every step. They are never
// freed, as a graph may hold their address: trace for minutes, not for days.
class Trace {
  public:
    explicit Trace(size_t steps);
    void first_kernel_begins(cudaStream_t stream) { stamp(0, stream); }
    void first_kernel_ends(cudaStream_t stream) { stamp(1, stream); }
    void step_begins(int step, cudaStream_t stream) { stamp(2 + 2 * static_cast<size_t>(step), stream); }
    void step_ends(int step, cudaStream_t stream) { stamp(3 + 2 * static_cast<size_t>(step), stream); }
    // Waits for the device and fills in `times`, one per step. A step without stamps ran in the first kernel.
    std::vector<StepTime> read(std::vector<StepTime> times) const;

  private:
    void stamp(size_t index, cudaStream_t stream);
    uint64_t* stamps_ = nullptr;
    int device_ = 0;
};

}  // namespace ub_overlap::cuda
