#include "core/published_calls.h"

#include <string>
#include <utility>

namespace ub_overlap {
namespace {

int votes_for(Arena& arena, uint64_t stamp, int slot) {
    int votes = 0;
    for (int rank = 0; rank < arena.ranks(); ++rank) votes += published_stamp(arena, rank, slot) == stamp;
    return votes;
}

}  // namespace

uint64_t published_stamp(Arena& arena, int rank, int slot) {
    const ControlBlock* block = arena.control(rank);
    return block ? block->calls[slot].stamp.load(std::memory_order_acquire) : 0;
}

bool is_outvoted(Arena& arena, int peer, int slot) {
    const uint64_t own = published_stamp(arena, arena.rank(), slot), theirs = published_stamp(arena, peer, slot);
    return epoch_of(own) == epoch_of(theirs) && votes_for(arena, theirs, slot) > votes_for(arena, own, slot);
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
        failure.reporter = arena.rank();
        failure.culprit = rank;
        set_text(failure.op, own.op);
        set_text(failure.site, own.site);
        std::string got = op + " at site '" + site + "'", wanted = std::string(own.op) + " at site '" + own.site + "'";
        if (is_outvoted(arena, rank, slot)) std::swap(got, wanted), std::swap(failure.reporter, failure.culprit);
        set_text(failure.got, got);
        set_text(failure.wanted, wanted);
        arena.abort(failure);
        throw CallFailed(failure);
    }
}

}  // namespace ub_overlap
