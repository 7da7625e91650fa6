// What ranks publish of their calls in control blocks (CallDescriptor), compared.
#pragma once

#include <cstdint>
#include <utility>

#include "core/arena.h"

namespace ub_overlap {

// The call of `peer` in `slot` is not that of this rank, and either may be at fault: the call of most ranks is the right one.
// Ranks that have not published theirs get a moment to do so, where they decide it. Returns (culprit, a rank in the right
// call). Throws CallFailed where a rank reports a failure meanwhile.
std::pair<int, int> find_odd_one(Arena& arena, int peer, int slot);

// Throws CallFailed where a peer has published another site for the call that this rank has published in `slot`. Such a peer
// does not come to what the ranks exchange before this call. On CUDA it waits on its device, which does not read what hosts
// publish. A peer whose host is in a later call of the slot by now is not seen: its device finds out at its deadline.
void check_site(Arena& arena, int slot);

}  // namespace ub_overlap
