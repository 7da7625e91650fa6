// Process-wide knobs that Python sets: deadlines, tracing, and what tests inject.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace ub_overlap {

struct Settings {
    std::atomic<int64_t> step_timeout_ns{100'000'000'000};
    std::atomic<int64_t> flight_calls{256};  // that the flight recorder of a group keeps; 0: off
    std::atomic<bool> trace{false};
    std::atomic<bool> replay{true};
    std::atomic<int> nccl_multiprocessors{0};  // that matmuls leave to a split collective of NCCL
    std::atomic<bool> nvtx{false};             // NVTX ranges around calls
    // Called regularly by the thread of a waiting call; throws on Ctrl-C.
    std::atomic<void (*)()> check_signals{nullptr};
};

inline Settings& settings() {
    static Settings one;
    return one;
}

// Faults that tests inject into a call. Null otherwise: one pointer test per call.
struct Injection {
    // (i, j): matmul i of a call (counted from 0) may not end before copy j of its COPY queue has begun, nor that copy begin
    // before that matmul: they do run at the same time, or the call fails.
    std::vector<std::pair<int, int>> latches;
    int64_t max_delay_us = 0;  // random delay before every step
    uint64_t seed = 0;
    std::map<int, int64_t> delays_us;  // fixed delay before step number n of the schedule
    int only_rank = -1;                // the fixed delays hold for this rank of a group alone, -1: for all
};

class Injections {
  public:
    static std::shared_ptr<const Injection> current() {
        State& s = state();
        if (!s.active.load(std::memory_order_relaxed)) return nullptr;
        std::lock_guard<std::mutex> lock(s.mutex);
        return s.injection;
    }
    static void set(std::shared_ptr<const Injection> next) {
        State& s = state();
        std::lock_guard<std::mutex> lock(s.mutex);
        s.active.store(next != nullptr, std::memory_order_relaxed);
        s.injection = std::move(next);
    }

  private:
    struct State {
        std::atomic<bool> active{false};
        std::mutex mutex;
        std::shared_ptr<const Injection> injection;
    };
    static State& state() {
        static State one;
        return one;
    }
};

}  // namespace ub_overlap
