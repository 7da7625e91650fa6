// SIGUSR1 as a request to dump the flight recorder. The handler only sets a flag, which a watchdog thread reads: it works while
// every other thread is stuck.
#pragma once

#include <signal.h>

#include <atomic>

namespace ub_overlap {

class DumpSignal {
  public:
    // Takes the signal unless the process already handles or ignores it. A handler that the process sets later replaces ours.
    static bool install() {
        struct sigaction now{};
        if (sigaction(SIGUSR1, nullptr, &now) != 0) return false;
        if ((now.sa_flags & SA_SIGINFO) != 0 || now.sa_handler != SIG_DFL) return now.sa_handler == &handle;
        struct sigaction ours{};
        ours.sa_handler = &handle;
        ours.sa_flags = SA_RESTART;
        sigemptyset(&ours.sa_mask);
        return sigaction(SIGUSR1, &ours, nullptr) == 0;
    }
    // Gives the signal back: the process no longer wants dumps, or is a forked child.
    static void uninstall() {
        struct sigaction now{};
        if (sigaction(SIGUSR1, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) == 0 && now.sa_handler == &handle) {
            signal(SIGUSR1, SIG_DFL);
        }
    }
    // Whether the signal came since the last call.
    static bool take() { return flag().exchange(false, std::memory_order_acq_rel); }

  private:
    static void handle(int) { flag().store(true, std::memory_order_release); }
    static std::atomic<bool>& flag() {
        static std::atomic<bool> requested{false};
        return requested;
    }
    static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler may only use lock-free atomics");
};

}  // namespace ub_overlap
