// Waiting, bounded: every wait of the CPU executor ends by its condition, by a peer that gave up, or by its deadline.
#pragma once

#include <atomic>
#include <functional>

#include "core/call.h"

namespace ub_overlap {

// Thrown inside one call when its other thread has failed; never leaves the executor.
struct CallStopped {};

// Spins, then yields, then sleeps a little longer each time: many ranks may share few cores. Returns false after the deadline.
// `look` runs before every sleep; it may throw.
bool wait_until(const std::function<bool()>& condition, int64_t deadline_ns, const std::function<void()>& look);

// Waits for `wait` on behalf of `queue`. Throws CallFailed when a peer does not come, gave up, is gone, or is somewhere else.
void wait_for_flag(const Call& call, const FlagWait& wait, int queue, const std::atomic<bool>& stop);

}  // namespace ub_overlap
