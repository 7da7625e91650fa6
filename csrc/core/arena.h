// The memory that the ranks of a group share, as an executor sees it: for every rank a control block and the slots.
//
//     control block of rank r   header | descriptors of r's current calls | abort record | flag words that r waits on
//     slot s of rank r          LANDING | LANDING2: what peers pushed to r in the calls whose epoch modulo 2 is s; behind
//                               these the split slots, whose memory is made by the first start that uses it
//
// Who writes what in the control block of rank r:
//     r itself      descriptor of the call (before its first flag), heartbeat and `waiting` (while it waits)
//     any peer      its own flag words (release, after the data), the abort record (first one wins, by compare-and-swap)
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/failure.h"
#include "core/flags.h"
#include "core/flight.h"
#include "core/origin_group.h"
#include "core/wait_until.h"

namespace ub_overlap {

constexpr uint64_t arena_magic = 0x75625f6f7665726cULL;
constexpr uint32_t arena_version = 5;

// What a rank is doing in the call of one epoch. `stamp` (epoch, tag) is stored last, with release; the text of an epoch stays
// until the epoch after the next, which its owner cannot reach before all peers have left this one. A split slot's stays until
// its next start, when all peers have received this rank's data.
struct CallDescriptor {
    std::atomic<uint64_t> stamp;
    char op[32], site[224], shape[640];
};

// What a rank publishes of its all_to_alls in a split slot (core/area_growth.h): how many it has started, and the bytes of its
// largest piece in each of the last windows of calls. A rank that begins window w reads what its peers have written of window
// w - 2. On CUDA the host of a peer may run ahead meanwhile, up to the first call of window w + 2, where it waits for this
// rank.
constexpr int area_windows = 5;
struct AreaRecord {
    std::atomic<uint64_t> calls;
    std::atomic<int64_t> largest[area_windows];
};

struct ControlBlock {
    uint64_t magic;
    uint32_t version;
    int32_t rank, ranks, pid;
    uint64_t start_time;                // of the process, in clock ticks since boot: tells a reused pid
    std::atomic<int64_t> heartbeat_ns;  // CLOCK_MONOTONIC, the same for all processes of a host
    // 1 + the rank whose flag this rank waits for, 0 when it waits for none: by queue, then COPY of each split collective.
    std::atomic<int32_t> waiting[2 + split_slots];
    std::atomic<int64_t> elsewhere_ns;  // when this rank last waited in another group of its origin group
    std::atomic<uint32_t> abort_state;  // 0 none, 1 being written, 2 readable
    Failure abort;
    CallDescriptor calls[all_slots];
    AreaRecord areas[split_slots];
};

class Arena {
  public:
    virtual ~Arena() = default;
    virtual int rank() const = 0;
    virtual int ranks() const = 0;
    virtual ControlBlock* control(int rank) = 0;
    virtual FlagWord* flags(int rank) = 0;
    virtual char* slot(int rank, int slot) = 0;
    virtual int64_t slot_bytes(int slot) const = 0;

    FlagWord& flag(int rank, FlagKind kind, int slot, int source, int index) {
        return flags(rank)[flag_place(kind, slot, source, index, ranks())];
    }
    // Looks for a failure that a device has written down, and tells the group of it.
    virtual void poll() {}
    // Called regularly by a watchdog thread: tells the other groups of the origin group of a failure, and ends waits of a
    // device for a rank whose process is gone, or that has failed.
    virtual void watch() {
        if (const Failure* failure = aborted()) abort(*failure);
    }
    // Sets the states of calls that were issued to a device. Takes a fraction of a second at most.
    virtual void refine(std::vector<FlightEntry>& entries) { (void)entries; }
    // Ranks whose flags this rank waits for now. Racy: for messages.
    virtual std::vector<int> waiting_for() {
        std::vector<int> list;
        for (const auto& word : control(rank())->waiting) {
            if (const int next = word.load(std::memory_order_relaxed)) list.push_back(next - 1);
        }
        return list;
    }
    // Returns when no device works on this arena any more, or a step's deadline is over.
    virtual void quiesce() {}
    // The code under which a rank records `failure`: a group that its peer aborted has failed because of that peer.
    FailureCode code_at(int rank, const Failure& failure) const {
        const bool is_peer_abort = failure.code == FailureCode::group_aborted && rank != this->rank();
        return is_peer_abort ? FailureCode::peer_failed : failure.code;
    }
    // Makes this the arena of a group that has `ranks` of the group `name`, which the user named; of all of them where `ranks`
    // is empty. `key`: of its OriginGroup. Before the first failure.
    static void join_origin(const std::shared_ptr<Arena>& arena, const std::string& key, const std::string& name,
                            std::vector<int> ranks) {
        arena->origin_name_ = name;
        arena->origin_ranks_ = std::move(ranks);
        arena->origin_ = OriginGroup::get(key);
        arena->origin_->add(arena);
    }
    // Returns the number that a rank has in the group which the user named.
    int origin_rank(int rank) const { return rank < 0 || origin_ranks_.empty() ? rank : origin_ranks_[rank]; }
    // Returns the rank that has this number there, -1 where it is in another group.
    int rank_of_origin(int origin_rank) const {
        if (origin_ranks_.empty()) return origin_rank;
        for (int rank = 0; rank < static_cast<int>(origin_ranks_.size()); ++rank) {
            if (origin_ranks_[rank] == origin_rank) return rank;
        }
        return -1;
    }
    // Returns `failure`, made with ranks of this arena, with those of the group that the user named.
    Failure in_origin(Failure failure) const {
        failure.culprit = origin_rank(failure.culprit);
        failure.reporter = origin_rank(failure.reporter);
        set_text(failure.group, origin_name_);
        return failure;
    }
    // Shows the peers in other groups of the origin group that this rank waits here.
    void show_wait() const {
        if (origin_) origin_->show_wait(this);
    }
    // Whether `rank` has waited in another group of the origin group within the last second.
    bool waits_elsewhere(int rank) {
        return now_ns() - control(rank)->elsewhere_ns.load(std::memory_order_relaxed) < 1'000'000'000;
    }
    // Tells every rank, this one too, that the group is broken, and the other groups of its origin group. A record that is
    // there already stays. Any thread may call it.
    void abort(const Failure& failure) {
        abort_alone(failure);
        if (origin_) origin_->fail(failure, this);
    }
    // Does the same for this group alone.
    virtual void abort_alone(const Failure& failure) {
        for (int r = 0; r < ranks(); ++r) {
            ControlBlock* block = control(r);
            uint32_t none = 0;
            if (block && block->abort_state.compare_exchange_strong(none, 1, std::memory_order_acq_rel)) {
                block->abort = failure;
                block->abort.code = code_at(r, failure);
                block->abort_state.store(2, std::memory_order_release);
            }
        }
    }
    // The group's failure, or null while there is none.
    virtual const Failure* aborted() {
        ControlBlock* block = control(rank());
        return block->abort_state.load(std::memory_order_acquire) == 2 ? &block->abort : nullptr;
    }

  protected:
    std::string origin_name_;
    std::vector<int> origin_ranks_;  // by rank; empty: they are equal

  private:
    std::shared_ptr<OriginGroup> origin_;
};

}  // namespace ub_overlap
