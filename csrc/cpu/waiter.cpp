#include "cpu/waiter.h"

#include <sched.h>
#include <time.h>

#include <algorithm>

#include "core/settings.h"
#include "cpu/shm_arena.h"

namespace ub_overlap {
namespace {

constexpr int64_t fresh_ns = 1'000'000'000;        // a rank that waits shows a sign of life at least this often
constexpr int64_t look_for_dead_ns = 100'000'000;  // reading /proc is slow

Failure failure_at(const Call& call, const FlagWait& wait, FailureCode code, int culprit, int64_t waited_ns) {
    Failure failure;
    failure.code = code;
    failure.reporter = call.rank;
    failure.culprit = culprit;
    failure.chunk = wait.flag.index;
    failure.expected = static_cast<uint32_t>(call.epoch - wait.back);
    failure.waited_s = static_cast<double>(waited_ns) * 1e-9;
    set_text(failure.op, call.op_name);
    set_text(failure.site, call.site);
    set_text(failure.phase, name_of(wait.flag.kind));
    const int64_t seen = call.arena->control(culprit)->heartbeat_ns.load(std::memory_order_relaxed);
    failure.silent_s = static_cast<double>(now_ns() - seen) * 1e-9;
    return failure;
}

// The peer is in a call of our epoch: is it the same call?
void compare_calls(const Call& call, const FlagWait& wait, uint32_t seen_tag, int64_t waited_ns) {
    const CallDescriptor& theirs = call.arena->control(wait.flag.source)->calls[call.slot()];
    const uint64_t stamp = theirs.stamp.load(std::memory_order_acquire);
    const bool described = epoch_of(stamp) == static_cast<uint32_t>(call.epoch);
    if (described && tag_of(stamp) == call.tag && seen_tag == call.tag) return;
    const bool same_site = described && call.site == theirs.site && call.op_name == theirs.op;
    Failure failure = failure_at(call, wait, same_site ? FailureCode::shape_mismatch : FailureCode::site_mismatch,
                                 wait.flag.source, waited_ns);
    set_text(failure.got, same_site   ? std::string(theirs.shape)
                          : described ? std::string(theirs.op) + " at site '" + theirs.site + "'"
                                      : std::string("a call of another epoch"));
    set_text(failure.wanted, same_site ? call.shape_text : call.op_name + " at site '" + call.site + "'");
    throw CallFailed(failure);
}

// The rank that delays `peer`: `peer` itself, unless it is alive and waits for another rank.
int culprit_behind(const Call& call, int peer) {
    int blamed = peer;
    for (int hops = 0; hops < call.ranks; ++hops) {
        const ControlBlock* block = call.arena->control(blamed);
        if (gone(block) || now_ns() - block->heartbeat_ns.load(std::memory_order_relaxed) > fresh_ns) return blamed;
        int next = block->waiting[copy_queue].load(std::memory_order_relaxed);
        if (!next) next = block->waiting[compute_queue].load(std::memory_order_relaxed);
        if (!next || next - 1 == call.rank) return blamed;
        blamed = next - 1;
    }
    return peer;  // they wait in a circle
}

}  // namespace

bool wait_until(const std::function<bool()>& condition, int64_t deadline_ns, const std::function<void()>& look) {
    for (int i = 0; i < 200; ++i) {
        if (condition()) return true;
    }
    for (int i = 0; i < 50; ++i) {
        sched_yield();
        if (condition()) return true;
    }
    for (int64_t sleep_ns = 20'000;; sleep_ns = std::min<int64_t>(sleep_ns * 5 / 4, 300'000)) {
        look();
        if (condition()) return true;
        if (now_ns() > deadline_ns) return false;
        timespec t{0, sleep_ns};
        nanosleep(&t, nullptr);
    }
}

void wait_for_flag(const Call& call, const FlagWait& wait, int queue, const std::atomic<bool>& stop) {
    if (call.epoch <= static_cast<uint64_t>(wait.back)) return;  // before the first call of the group
    const uint64_t epoch = call.epoch - wait.back;
    const FlagWord& word =
        call.arena->flag(call.rank, wait.flag.kind, static_cast<int>(epoch % slots), wait.flag.source, wait.flag.index);
    uint64_t seen = 0;
    const auto arrived = [&] {
        seen = word.load(std::memory_order_acquire);
        // An empty word is no epoch: after 2^31 calls zero would look like the future.
        return seen != 0 && reached(epoch_of(seen), static_cast<uint32_t>(epoch));
    };
    if (!arrived()) {
        ControlBlock* mine = call.arena->control(call.rank);
        const int64_t begin = now_ns();
        int64_t looked_for_dead = begin;
        mine->waiting[queue].store(wait.flag.source + 1, std::memory_order_relaxed);
        const auto look = [&] {
            const int64_t now = now_ns();
            mine->heartbeat_ns.store(now, std::memory_order_relaxed);
            if (stop.load(std::memory_order_acquire)) throw CallStopped();
            // A peer that failed in a later call has sent all of this one: what has arrived still counts.
            const Failure* failure = call.arena->aborted();
            if (failure && !arrived()) throw CallFailed(*failure);
            const uint64_t stamp =
                call.arena->control(wait.flag.source)->calls[call.slot()].stamp.load(std::memory_order_acquire);
            if (epoch_of(stamp) == static_cast<uint32_t>(call.epoch)) compare_calls(call, wait, call.tag, now - begin);
            if (now - looked_for_dead > look_for_dead_ns) {
                looked_for_dead = now;
                if (const auto check_signals = settings().check_signals.load()) check_signals();
                // Its last signal may have come between our look at the word and its end.
                if (gone(call.arena->control(wait.flag.source)) && !arrived()) {
                    throw CallFailed(failure_at(call, wait, FailureCode::peer_died, wait.flag.source, now - begin));
                }
            }
        };
        bool came = false;
        try {
            came = wait_until(arrived, begin + settings().step_timeout_ns.load(std::memory_order_relaxed), look);
        } catch (...) {
            mine->waiting[queue].store(0, std::memory_order_relaxed);
            throw;
        }
        mine->waiting[queue].store(0, std::memory_order_relaxed);
        if (!came) {
            const int culprit = culprit_behind(call, wait.flag.source);
            Failure failure = failure_at(call, wait, FailureCode::peer_timeout, culprit, now_ns() - begin);
            failure.observed = epoch_of(seen);
            throw CallFailed(failure);
        }
    }
    if (wait.back == 0 && (epoch_of(seen) != static_cast<uint32_t>(epoch) || tag_of(seen) != call.tag)) {
        compare_calls(call, wait, tag_of(seen), 0);
        Failure failure = failure_at(call, wait, FailureCode::site_mismatch, wait.flag.source, 0);
        set_text(failure.got, "epoch " + std::to_string(epoch_of(seen)));
        set_text(failure.wanted, "epoch " + std::to_string(epoch));
        throw CallFailed(failure);
    }
}

}  // namespace ub_overlap
