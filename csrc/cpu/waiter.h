// Waiting, bounded: every wait of the CPU executor ends by its condition, by a peer that gave up, or by its deadline.
#pragma once

#include <atomic>

#include "core/call.h"

namespace ub_overlap {

// Thrown inside one call when its other thread has failed; never leaves the executor.
struct CallStopped {};

// Waits for `wait` on behalf of `queue`. Throws CallFailed when a peer does not come, gave up, is gone, or is somewhere else.
void wait_for_flag(const Call& call, const FlagWait& wait, int queue, const std::atomic<bool>& stop);

}  // namespace ub_overlap
