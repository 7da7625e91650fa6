// Several strategies in one text, and the rule by which a call picks one: the grammar of compiler/plan/strategy.py.
//
//     1536=none;6144=pipelined:chunks=1;*=pipelined      by the rows of the call, up to each limit; "*": any
//     pipelined|none                                     alternatives: the first, until the session has timed them (tuning.h)
//
// What a call picks depends on its rows alone, which its ranks have in common, and on what they have agreed on.
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

    // The choice that `text` holds, or null where it is a single strategy. Parsed once for every distinct text. Throws
    // NamedError on what is no choice.
    static const DispatchTable* of(const std::string& text);

    // Number of the bucket for a call of `rows` rows.
    size_t at(int64_t rows) const;
    const Bucket& bucket(size_t number) const { return buckets_[number]; }
    bool sized() const { return buckets_.size() > 1; }

  private:
    explicit DispatchTable(const std::string& text);

    std::vector<Bucket> buckets_;
};

// Why the call that this thread makes runs by the strategy it does: for statistics. "" where its op carries one alone.
const char*& dispatched_by();

}  // namespace ub_overlap
