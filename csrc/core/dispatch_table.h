// Several strategies in one text, and the rule by which a call picks one: the grammar of compiler/plan/strategy.py.
//
//     1536=none;6144=pipelined:chunks=1;*=pipelined      by the rows of the call, up to each limit; "*": any
//     pipelined|none                                     alternatives: the first, until the session has timed them (tuning.h)
//
// A call's strategy depends only on its rows, which are equal on all ranks, and on what the ranks agreed on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ub_overlap {

class DispatchTable {
  public:
    struct Bucket {
        int64_t limit = -1;  // most rows, -1: any
        std::vector<std::string> strategies;
    };

    // The table that `text` holds, or null where it is a single strategy. Parsed once per distinct text. Throws NamedError on
    // a malformed table.
    static const DispatchTable* of(const std::string& text);

    // Number of the bucket for a call of `rows` rows.
    size_t at(int64_t rows) const;
    const Bucket& bucket(size_t number) const { return buckets_[number]; }
    bool sized() const { return buckets_.size() > 1; }

  private:
    explicit DispatchTable(const std::string& text);

    std::vector<Bucket> buckets_;
};

// Why this thread's call runs its strategy, for statistics. "" where the op carries a single strategy.
const char*& dispatched_by();

}  // namespace ub_overlap
