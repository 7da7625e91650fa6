#include "cpu/waiter.h"

#include <algorithm>
#include <vector>

#include "core/published_calls.h"
#include "core/settings.h"
#include "core/wait_until.h"
#include "cpu/shm_arena.h"

namespace ub_overlap {
namespace {

constexpr int64_t fresh_ns = 1'000'000'000;        // a rank that waits shows a sign of life at least this often
constexpr int64_t look_for_dead_ns = 100'000'000;  // reading /proc is slow

// How long after its deadline a rank has reported which rank is late (_REPORT_S of runtime/ops/plain_collective.py).
int64_t report_ns(int64_t timeout_ns) {
    return std::min<int64_t>(timeout_ns, 5'000'000'000) + 1'000'000'000;
}

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
    if (described && tag_of(stamp) == call.tag && seen_tag == call.word_tag(wait.flag)) return;
    // All calls of an all_to_all's site have one tag: a peer that is in a later one was in this one before.
    const bool later = !described && call.is_all_to_all() && tag_of(stamp) == call.tag;
    const bool same_site = (described || later) && call.site == theirs.site && call.op_name == theirs.op;
    Failure failure = failure_at(call, wait, same_site ? FailureCode::shape_mismatch : FailureCode::site_mismatch,
                                 wait.flag.source, waited_ns);
    std::string got = same_site   ? (later ? "another size in this call; in a later one " : "") + std::string(theirs.shape)
                      : described ? std::string(theirs.op) + " at site '" + theirs.site + "'"
                                  : std::string("a call of another epoch");
    std::string wanted = same_site ? call.shape_text : call.op_name + " at site '" + call.site + "'";
    if (described) {
        const auto [culprit, other] = find_odd_one(*call.arena, wait.flag.source, call.slot());
        if (culprit == call.rank) std::swap(got, wanted);
        failure.culprit = culprit;
        failure.reporter = other;
    }
    set_text(failure.got, got);
    set_text(failure.wanted, wanted);
    throw CallFailed(call.arena->in_origin(failure));
}

// The epoch of the last call that a rank has published, split collectives apart.
uint32_t last_epoch(Arena& arena, int rank) {
    uint32_t last = 0;
    for (int slot = 0; slot < slots; ++slot) {
        const uint32_t epoch = epoch_of(arena.control(rank)->calls[slot].stamp.load(std::memory_order_relaxed));
        if (epoch && (!last || reached(epoch, last))) last = epoch;
    }
    return last;
}

// The rank that delays the group: one that the waits from `peer` on lead to, over both queues of each rank, and that is gone,
// does not run, or waits for no rank. Of several the one in the earliest call, then the one silent for longest. What a rank
// that does not run has been waiting for tells nothing, but is followed too: an innocent rank may run late on a busy machine.
int find_culprit(const Call& call, int peer, int64_t waited_ns) {
    struct Candidate {
        int rank;
        uint32_t epoch;
        int64_t silent_ns;
    };
    std::vector<Candidate> candidates;
    std::vector<int> todo{peer};
    std::vector<bool> seen(static_cast<size_t>(call.ranks));
    while (!todo.empty()) {
        const int rank = todo.back();
        todo.pop_back();
        if (seen[rank]) continue;
        seen[rank] = true;
        const ControlBlock* block = call.arena->control(rank);
        bool waits = false;
        for (const auto& word : block->waiting) {
            const int next = word.load(std::memory_order_relaxed);
            if (next) todo.push_back(next - 1), waits = true;
        }
        if (rank == call.rank) continue;
        if (gone(block)) return rank;
        const int64_t silent = now_ns() - block->heartbeat_ns.load(std::memory_order_relaxed);
        if (!waits || silent > std::max(fresh_ns, waited_ns / 4)) {
            candidates.push_back({rank, last_epoch(*call.arena, rank), silent});
        }
    }
    if (candidates.empty()) return peer;  // they wait in a circle
    return std::min_element(candidates.begin(), candidates.end(),
                            [](const Candidate& a, const Candidate& b) {
                                if (a.epoch != b.epoch) return !reached(a.epoch, b.epoch);
                                return a.silent_ns > b.silent_ns;
                            })
        ->rank;
}

}  // namespace

void wait_for_flag(const Call& call, const FlagWait& wait, int queue, const std::atomic<bool>& stop) {
    if (call.epoch <= static_cast<uint64_t>(wait.back)) return;  // before the first call of the group
    const uint64_t epoch = call.epoch - wait.back;
    FlagWord& word =
        call.arena->flag(call.rank, wait.flag.kind, call.slot(wait.back), wait.flag.source, call.word_index(wait.flag));
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
        std::atomic<int32_t>& waiting =
            mine->waiting[queue == copy_queue && call.split_slot >= 0 ? 2 + call.split_slot : queue];
        waiting.store(wait.flag.source + 1, std::memory_order_relaxed);
        const auto look = [&] {
            const int64_t now = now_ns();
            mine->heartbeat_ns.store(now, std::memory_order_relaxed);
            call.arena->show_wait();
            if (stop.load(std::memory_order_acquire)) throw CallStopped();
            // A peer that failed in a later call has sent all of this one: what has arrived still counts.
            const Failure* failure = call.arena->aborted();
            if (failure && !arrived()) throw CallFailed(*failure);
            const uint64_t stamp =
                call.arena->control(wait.flag.source)->calls[call.slot()].stamp.load(std::memory_order_acquire);
            // A peer with our tag may leave this call meanwhile, and describe its next one.
            if (epoch_of(stamp) == static_cast<uint32_t>(call.epoch) && tag_of(stamp) != call.tag) {
                compare_calls(call, wait, call.word_tag(wait.flag), now - begin);
            }
            if (now - looked_for_dead > look_for_dead_ns) {
                looked_for_dead = now;
                if (const auto check_signals = settings().check_signals.load()) check_signals();
                // Its last signal may have come between our look at the word and its end.
                if (gone(call.arena->control(wait.flag.source)) && !arrived()) {
                    const Failure died = failure_at(call, wait, FailureCode::peer_died, wait.flag.source, now - begin);
                    throw CallFailed(call.arena->in_origin(died));
                }
            }
        };
        // A wait that fails leaves `waiting`: it shows the others, which may fail at the same time, whom this rank waited for.
        const int64_t timeout_ns = settings().step_timeout_ns.load(std::memory_order_relaxed);
        const auto late = [&] { return find_culprit(call, wait.flag.source, now_ns() - begin); };
        // A rank that waits in another group of the origin group soon tells which rank is late there.
        if (!wait_until(arrived, begin + timeout_ns, look) &&
            !(call.arena->waits_elsewhere(late()) && wait_until(arrived, now_ns() + report_ns(timeout_ns), look))) {
            Failure failure = failure_at(call, wait, FailureCode::peer_timeout, late(), now_ns() - begin);
            failure.observed = epoch_of(seen);
            throw CallFailed(call.arena->in_origin(failure));
        }
        waiting.store(0, std::memory_order_relaxed);
    }
    const uint32_t tag = call.word_tag(wait.flag);
    if (wait.back == 0 && (epoch_of(seen) != static_cast<uint32_t>(epoch) || tag_of(seen) != tag)) {
        compare_calls(call, wait, tag_of(seen), 0);
        Failure failure = failure_at(call, wait, FailureCode::site_mismatch, wait.flag.source, 0);
        set_text(failure.got, "epoch " + std::to_string(epoch_of(seen)));
        set_text(failure.wanted, "epoch " + std::to_string(epoch));
        throw CallFailed(call.arena->in_origin(failure));
    }
    if (wait.back == 0 && call.is_all_to_all()) word.store(0, std::memory_order_relaxed);  // for the next round
}

}  // namespace ub_overlap
