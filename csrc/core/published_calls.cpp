#include "core/published_calls.h"

#include <algorithm>
#include <cstdlib>
#include <string>
#include <tuple>
#include <vector>

#include "core/settings.h"
#include "core/wait_until.h"

namespace ub_overlap {
namespace {

constexpr int64_t vote_ns = 2'000'000'000;  // for the calls of other ranks, once two ranks are in different calls

// Epoch and tag of the last call that `rank` has published in `slot`; 0 without any, or where the rank is not attached yet.
uint64_t published_stamp(Arena& arena, int rank, int slot) {
    const ControlBlock* block = arena.control(rank);
    return block ? block->calls[slot].stamp.load(std::memory_order_acquire) : 0;
}

}  // namespace

std::pair<int, int> find_odd_one(Arena& arena, int peer, int slot) {
    const uint64_t own = published_stamp(arena, arena.rank(), slot), theirs = published_stamp(arena, peer, slot);
    if (epoch_of(own) != epoch_of(theirs)) return {peer, arena.rank()};
    // The calls of all ranks at this epoch, as seen first: a host that runs ahead publishes its next one soon.
    std::vector<uint64_t> calls(arena.ranks());
    calls[arena.rank()] = own;
    calls[peer] = theirs;
    const auto votes_for = [&](uint64_t stamp) { return std::count(calls.begin(), calls.end(), stamp); };
    const auto is_decided = [&] {
        for (int rank = 0; rank < arena.ranks(); ++rank) {
            const uint64_t stamp = published_stamp(arena, rank, slot);
            if (calls[rank] == 0 && epoch_of(stamp) == epoch_of(own)) calls[rank] = stamp;
        }
        return votes_for(0) == 0 || std::abs(votes_for(own) - votes_for(theirs)) > votes_for(0);
    };
    const int64_t patience = std::min(vote_ns, settings().step_timeout_ns.load(std::memory_order_relaxed) / 2);
    wait_until(is_decided, now_ns() + patience, [&] {
        arena.control(arena.rank())
            ->heartbeat_ns.store(now_ns(), std::memory_order_relaxed);  // this rank is not the silent one
        if (const Failure* failure = arena.aborted()) throw CallFailed(*failure);
    });
    return votes_for(theirs) > votes_for(own) ? std::pair(arena.rank(), peer) : std::pair(peer, arena.rank());
}

void check_site(Arena& arena, int slot) {
    const CallDescriptor& own = arena.control(arena.rank())->calls[slot];
    const uint64_t stamp = own.stamp.load(std::memory_order_acquire);
    for (int rank = 0; stamp != 0 && rank < arena.ranks(); ++rank) {
        const uint64_t seen = published_stamp(arena, rank, slot);
        if (epoch_of(seen) != epoch_of(stamp) || tag_of(seen) == tag_of(stamp)) continue;
        const CallDescriptor& theirs = arena.control(rank)->calls[slot];
        const std::string op = theirs.op, site = theirs.site;
        if (published_stamp(arena, rank, slot) != seen) continue;  // it is in a later call by now
        if (op == own.op && site == own.site) continue;            // other sizes: the exchange says which
        Failure failure;
        failure.code = FailureCode::site_mismatch;
        set_text(failure.op, own.op);
        set_text(failure.site, own.site);
        std::string got = op + " at site '" + site + "'", wanted = std::string(own.op) + " at site '" + own.site + "'";
        std::tie(failure.culprit, failure.reporter) = find_odd_one(arena, rank, slot);
        if (failure.culprit == arena.rank()) std::swap(got, wanted);
        set_text(failure.got, got);
        set_text(failure.wanted, wanted);
        failure = arena.in_origin(failure);
        arena.abort(failure);
        throw CallFailed(failure);
    }
}

}  // namespace ub_overlap
