// Runs schedules on the CPU: COMPUTE steps on the calling thread, COPY steps on the copy engine's thread.
#pragma once

#include "core/executor.h"

namespace ub_overlap {

class CpuExecutor final : public Executor {
  public:
    explicit CpuExecutor(MatmulFn matmul) : matmul_(matmul) {}
    std::vector<StepTime> run(const Call& call) override;
    std::unique_ptr<OpenWork> start(const Call& call) override;
    std::vector<StepTime> finish(OpenWork& work) override;
    std::vector<StepTime> release(OpenWork& work) override;

  private:
    MatmulFn matmul_;
};

}  // namespace ub_overlap
