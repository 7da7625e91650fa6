// Runs schedules on CUDA: COMPUTE steps on the caller's stream, COPY steps on the device's one copy stream.
#pragma once

#include "core/executor.h"

namespace ub_overlap {

class CudaExecutor final : public Executor {
  public:
    explicit CudaExecutor(MatmulFn matmul) : matmul_(matmul) {}
    // Returns when all steps have been issued; `call.stream` then orders the results. A failure of a peer is raised by a later
    // call or an explicit check, and fills the outputs with NaN.
    std::vector<StepTime> run(const Call& call) override;
    // All must run eagerly, or in one capture.
    std::unique_ptr<OpenWork> start(const Call& call) override;
    std::vector<StepTime> finish(OpenWork& work) override;
    std::vector<StepTime> release(OpenWork& work) override;
    uint64_t capture_of(const Call& call) const override;

  private:
    MatmulFn matmul_;
};

}  // namespace ub_overlap
