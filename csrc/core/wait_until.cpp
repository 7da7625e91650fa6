#include "core/wait_until.h"

#include <sched.h>
#include <time.h>

#include <algorithm>

namespace ub_overlap {
namespace {

constexpr int64_t overslept_ns = 1'000'000'000;  // a process that wakes so late did not run meanwhile

}  // namespace

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

bool wait_until(const std::function<bool()>& condition, int64_t deadline_ns, const std::function<void()>& look) {
    for (int i = 0; i < 200; ++i) {
        if (condition()) return true;
    }
    const int64_t begin = now_ns();
    for (int i = 0; i < 50; ++i) {
        sched_yield();
        if (condition()) return true;
    }
    int64_t last = begin;
    for (int64_t sleep_ns = 20'000;; sleep_ns = std::min<int64_t>(sleep_ns * 5 / 4, 300'000)) {
        look();
        if (condition()) return true;
        const int64_t now = now_ns(), paused = now - last;
        // The process was stopped, or its machine was: the peers probably too. Only the first second of that counts. It does
        // count: else a `look` that takes so long would never reach the deadline.
        if (paused > overslept_ns && deadline_ns < INT64_MAX - paused) deadline_ns += paused - overslept_ns;
        last = now;
        if (now > deadline_ns) return false;
        timespec t{0, sleep_ns};
        nanosleep(&t, nullptr);
    }
}

}  // namespace ub_overlap
