// The clock of deadlines, and a bounded wait of a host thread.
#pragma once

#include <cstdint>
#include <functional>

namespace ub_overlap {

// Nanoseconds of a clock that never jumps.
int64_t now_ns();

// Spins, then yields, then sleeps a little longer each time: many ranks may share few cores. Returns false after the deadline.
// `look` runs before every sleep; it may throw.
bool wait_until(const std::function<bool()>& condition, int64_t deadline_ns, const std::function<void()>& look);

}  // namespace ub_overlap
