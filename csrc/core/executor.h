// Runs a call. One instance per device type; several threads may run calls of different groups at once.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/call.h"
#include "core/stats.h"

namespace ub_overlap {

// The work of a split collective between its start and its finish. Destroyed without a finish, it leaves no step running.
class OpenWork {
  public:
    virtual ~OpenWork() = default;
    // The CUDA graph that the start is part of; 0 for none.
    virtual uint64_t capture() const { return 0; }
};

class Executor {
  public:
    virtual ~Executor() = default;
    // CPU: returns when the call's results are there, with the times of its steps. Throws CallFailed when a peer does not
    // come. No step of the call is running any more when it returns or throws. CUDA: returns when all is issued.
    virtual std::vector<StepTime> run(const Call& call) = 0;
    // The start of a split collective: begins its pushes and returns. `call` must outlive the work.
    virtual std::unique_ptr<OpenWork> start(const Call& call) = 0;
    // Its finish, as `run` for the next steps. Returns the times of the steps so far. `call.output` is set
    // by now.
    virtual std::vector<StepTime> finish(OpenWork& work) = 0;
    // The release of a zero-copy gather: tells the peers that its result was read. Returns the times of all steps.
    virtual std::vector<StepTime> release(OpenWork& work) = 0;
    // The CUDA graph that a call is captured for; 0 for none.
    virtual uint64_t capture_of(const Call&) const { return 0; }
};

}  // namespace ub_overlap
