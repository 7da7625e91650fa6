// Runs a call. One instance per device type; several threads may run calls of different groups at once.
#pragma once

#include <vector>

#include "core/call.h"
#include "core/stats.h"

namespace ub_overlap {

class Executor {
  public:
    virtual ~Executor() = default;
    // CPU: returns when the call's results are there, with the times of its steps. Throws CallFailed when a peer does not
    // come. No step of the call is running any more when it returns or throws. CUDA: returns when all is issued.
    virtual std::vector<StepTime> run(const Call& call) = 0;
};

}  // namespace ub_overlap
