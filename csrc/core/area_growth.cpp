#include "core/area_growth.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "core/settings.h"

namespace ub_overlap {
namespace {

// Waits until `peer` has counted `calls` all_to_alls in the slot of `call`.
void wait_for_calls(const Call& call, Arena& arena, int peer, uint64_t calls) {
    const std::atomic<uint64_t>& counted = arena.control(peer)->areas[call.split_slot].calls;
    ControlBlock* own = arena.control(call.rank);
    std::atomic<int32_t>& waiting = own->waiting[compute_queue];
    const auto begin = std::chrono::steady_clock::now();
    while (counted.load(std::memory_order_acquire) < calls) {
        waiting.store(peer + 1, std::memory_order_relaxed);
        const auto now = std::chrono::steady_clock::now();
        own->heartbeat_ns.store(std::chrono::nanoseconds(now.time_since_epoch()).count(), std::memory_order_relaxed);
        arena.poll();
        if (const Failure* failure = arena.aborted()) throw CallFailed(*failure);
        if (const auto check_signals = settings().check_signals.load()) check_signals();
        if (now - begin > std::chrono::nanoseconds(settings().step_timeout_ns.load(std::memory_order_relaxed))) {
            Failure failure;
            failure.code = FailureCode::peer_timeout;
            failure.reporter = call.rank;
            failure.culprit = peer;
            failure.waited_s = std::chrono::duration<double>(now - begin).count();
            set_text(failure.op, call.op_name);
            set_text(failure.site, call.site);
            set_text(failure.phase, "AREAS");
            throw CallFailed(arena.in_origin(failure));
        }
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    waiting.store(0, std::memory_order_relaxed);
}

}  // namespace

AreaGrowth::Need AreaGrowth::count(const Call& call, Arena& arena) {
    const uint64_t number = calls_++, current = number / window;
    const int64_t limit = max_areas_bytes / call.areas() / slot_line * slot_line;
    const int64_t own = std::min(whole_lines(call.largest_piece()), limit) * call.areas();
    AreaRecord& record = arena.control(call.rank)->areas[call.split_slot];
    std::atomic<int64_t>& largest = record.largest[current % area_windows];
    const int64_t before = number % window == 0 ? 0 : largest.load(std::memory_order_relaxed);
    largest.store(std::max(before, own), std::memory_order_relaxed);
    record.calls.store(number + 1, std::memory_order_release);
    if (sites_.insert(call.site).second) return {true, own};
    if (number % window != 0 || current < 2) return {};
    int64_t needed = 0;
    for (int peer = 0; peer < call.ranks; ++peer) {
        wait_for_calls(call, arena, peer, (current - 1) * window);
        const AreaRecord& theirs = arena.control(peer)->areas[call.split_slot];
        needed = std::max(needed, theirs.largest[(current - 2) % area_windows].load(std::memory_order_relaxed));
    }
    return {false, needed};
}

}  // namespace ub_overlap
