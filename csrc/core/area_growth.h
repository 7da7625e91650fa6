// When the areas of all_to_alls grow (core/call.h). All ranks must grow them at the same call, but a rank knows the sizes of
// its own pieces only.
//
//     a site's first call    The ranks exchange the size of their largest piece. So pieces whose sizes never change need one
//                            round from the second call on.
//     every `window` calls   The areas grow to what the window before the last one needed, and a quarter more. Each rank
//                            publishes what its calls of a window needed in its control block: bytes of all areas, since a
//                            call with one area and others share the slot. A rank waits for peers that have not ended that
//                            window: hosts are rarely so far apart.
//
// A piece that is larger than its area is sent in rounds.
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "core/call.h"

namespace ub_overlap {

// Bytes of all areas of a slot, at most. Larger pieces always take several rounds.
constexpr int64_t max_areas_bytes = int64_t{1} << 30;

// The all_to_alls of one split slot. Equal on all ranks but for the sizes.
class AreaGrowth {
  public:
    struct Need {
        bool is_first = false;  // of its site: the ranks exchange their sizes
        int64_t bytes = 0;      // that all areas together need at least; without `is_first` equal on all ranks
    };
    // Counts the call, publishes its sizes, and returns what its areas need. Throws CallFailed for a peer that stays behind.
    Need count(const Call& call, Arena& arena);

  private:
    static constexpr uint64_t window = 8;
    static_assert(area_windows > 4, "a rank reads window w - 2 while a peer writes w + 2");
    uint64_t calls_ = 0;
    std::set<std::string> sites_;
};

}  // namespace ub_overlap
