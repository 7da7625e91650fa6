// Schedules as C++ sees them: the decoded steps of runtime/schedule/steps.py. Sizes are fractions; Call::span makes them rows.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "core/flags.h"

namespace ub_overlap {

enum class StepKind : int32_t {
    copy = 0,
    signal = 1,
    wait = 2,
    compute = 3,
    reduce = 4,
    finish = 5,
    return_ = 6,
    release = 7,
    round = 8
};
enum class ComputeKind : int32_t { matmul = 0 };
enum class Buf : int32_t { input = 0, partial = 1, landing = 2, landing2 = 3, output = 4, result = 5, operand = 6 };
enum Queue : int32_t { compute_queue = 0, copy_queue = 1 };

// A fraction of a shard; `of` maps it to a row. Monotone, so disjoint pieces stay disjoint and a cover stays a cover.
struct Cut {
    int64_t num = 0, den = 1;
    int64_t of(int64_t rows) const { return rows * num / den; }
};

struct Region {
    Buf buf = Buf::input;
    int rank = 0, shard = 0;
    Cut lo, hi;
    int index = 0;
};

struct FlagId {
    FlagKind kind = FlagKind::ready;
    int rank = 0, source = 0, index = 0;
};

struct FlagWait {
    FlagId flag;
    int back = 0;
};

struct Step {
    StepKind kind = StepKind::copy;
    int queue = compute_queue;
    int record = -1;
    std::vector<int> after;
    ComputeKind compute = ComputeKind::matmul;
    int index = 0;                // compute, finish: consumer or term
    bool accumulate = false;      // compute
    std::vector<Region> reads;    // copy: the source; reduce: the sources; release: the result that was read
    std::vector<Region> writes;   // copy, reduce: the destination
    FlagId flag;                  // signal
    std::vector<FlagWait> waits;  // wait: one; compute: its gates
};

struct Key {
    std::string kind;
    int ranks = 1;
    int64_t chunks = 0;
    std::vector<bool> contracts;
    int64_t terms = 0, independent = 0;
    bool shard_dim_is_last = false, keep = false, striped = false, direct = false, zero_copy = false, engine_copies = false;

    auto tied() const {
        return std::tie(kind, ranks, chunks, contracts, terms, independent, shard_dim_is_last, keep, striped, direct, zero_copy,
                        engine_copies);
    }
    bool operator<(const Key& other) const { return tied() < other.tied(); }
};

// The steps of one rank, and for each queue their numbers in issue order.
struct Program {
    std::vector<Step> steps;
    std::vector<int> queues[2];
    int events = 0;
    // Of a split collective: the number of the first step of its finish, and of its release (all steps where it has none).
    int finish_begin = 0, release_begin = 0;
    // Of an all_to_all: the steps of its second round, which are repeated for each further one. Else behind all steps.
    int round_begin = 0, round_end = 0;
    uint64_t id = 0;  // no other program of this process has it

    // Whether several matmuls accumulate this consumer's product in fp32.
    bool accumulates(int consumer) const {
        for (const Step& step : steps) {
            if (step.kind == StepKind::finish && step.index == consumer) return true;
        }
        return false;
    }
};

using EncodedSchedule = std::vector<std::vector<int64_t>>;

// Throws NamedError on steps that no executor can run.
// `mirrored`: its signals are in the name of other ranks, as in benchmarks/mirror.
Program decode(const EncodedSchedule& encoded, int rank, int ranks, bool mirrored = false);

// Decoded programs by key and rank, for the whole process. Calls `provider` for unknown keys.
class ProgramCache {
  public:
    using Provider = std::function<EncodedSchedule(const Key&, int rank)>;
    static std::shared_ptr<const Program> get(const Key& key, int rank);
    static void set_provider(Provider provider);
    static int64_t provider_calls();
    static void clear();
    // Whether schedules are `mirrored`. Forgets all schedules.
    static void set_mirrored(bool on);
    static bool is_mirrored();
};

}  // namespace ub_overlap
