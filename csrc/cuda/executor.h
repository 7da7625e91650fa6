// Runs schedules on CUDA: COMPUTE steps on the caller's stream, COPY steps on the device's one copy stream.
#pragma once

#include "core/executor.h"

namespace ub_overlap {

class CudaExecutor final : public Executor {
  public:
    explicit CudaExecutor(MatmulFn matmul) : matmul_(matmul) {}
    // Returns when everything has been issued; `call.stream` then orders the results. Failures of peers show at a later call,
    // or at an explicit check, and in outputs full of NaN.
    std::vector<StepTime> run(const Call& call) override;

  private:
    MatmulFn matmul_;
};

}  // namespace ub_overlap
