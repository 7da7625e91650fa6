// An arena in shared memory: one control segment and one data segment (the slots) a rank.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/arena.h"
#include "cpu/shm_segment.h"

namespace ub_overlap {

class ShmArena final : public Arena {
  public:
    ShmArena(int rank, int ranks, int64_t slot_bytes);

    int rank() const override { return rank_; }
    int ranks() const override { return ranks_; }
    ControlBlock* control(int rank) override;
    FlagWord* flags(int rank) override;
    char* slot(int rank, int slot) override {
        const Memory& memory = memories_[memory_of(slot)];
        const int64_t first = slot < slots ? slot * memory.slot_bytes : fused_offset(slot, memory.slot_bytes);
        return memory.segments[rank]->data() + first;
    }
    int64_t slot_bytes(int slot) const override { return memories_[memory_of(slot)].slot_bytes; }

    const std::string& control_address() const { return control_[rank_]->address(); }
    const std::string& data_address() const {
        return (next_.segments[rank_] ? next_ : memories_[0]).segments[rank_]->address();
    }
    // Attaches to a peer's segments. Returns why this process cannot reach them, "" where it can. `made_as`: the rank that
    // their process has in its own arena, -1 for `rank`. Another one only in benchmarks/mirror, where a process stands for many
    // ranks.
    std::string attach(int rank, const std::string& control_address, const std::string& data_address, int made_as = -1);
    // Growth of a split slot, or of all other slots: make bigger ones here, attach to the peers', then take them all into use.
    // Flags and epochs live on, and so does the data of other slots.
    void grow_begin(int64_t slot_bytes, int slot);
    void grow_attach(int rank, const std::string& data_address);
    void grow_commit();
    // Frees the bigger slots.
    void grow_abort();
    // Closes the descriptors by which peers attach. After a failed bind or growth too.
    void stop_sharing();

  private:
    // One segment for each rank. The first memory holds `slots` slots, the others one split slot each, the last the slots of
    // fused collectives.
    struct Memory {
        int64_t slot_bytes = 0;
        std::vector<std::unique_ptr<ShmSegment>> segments;
        int64_t bytes(int which) const { return (which == 0 ? slots : 1) * slot_bytes; }
    };
    static int memory_of(int slot) { return slot < slots ? 0 : 1 + further_memory(slot); }

    int rank_, ranks_;
    std::vector<std::unique_ptr<ShmSegment>> control_;
    Memory memories_[1 + further_memories], next_;
    int growing_ = 0;  // the memory that `next_` replaces
};

// Start time of a process in clock ticks since boot, 0 where there is none (or only a zombie). Nothing where it cannot be
// looked up, as in a process that may open no further file.
std::optional<uint64_t> start_time_of(int pid);
// Whether the process that made this block has ended, for all that can be seen.
bool gone(const ControlBlock* block);

}  // namespace ub_overlap
