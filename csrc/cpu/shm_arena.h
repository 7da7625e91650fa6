// An arena in shared memory: one control segment and one data segment (the slots) a rank.
#pragma once

#include <memory>
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
    char* slot(int rank, int slot) override { return data_[rank]->data() + slot * slot_bytes_; }
    int64_t slot_bytes() const override { return slot_bytes_; }

    const std::string& control_address() const { return control_[rank_]->address(); }
    const std::string& data_address() const { return (next_[rank_] ? next_ : data_)[rank_]->address(); }
    // Attaches to a peer's segments. Returns why this process cannot reach them, "" where it can. `made_as`: the rank that
    // their process has in its own arena, -1 for `rank`. Another one only in benchmarks/mirror, where a process stands for many
    // ranks.
    std::string attach(int rank, const std::string& control_address, const std::string& data_address, int made_as = -1);
    // Growth: make bigger slots here, attach to the peers', then take them all into use. Flags and epochs live on.
    void grow_begin(int64_t slot_bytes);
    void grow_attach(int rank, const std::string& data_address);
    void grow_commit();
    // Frees the bigger slots.
    void grow_abort();
    // Closes the descriptors by which peers attach. After a failed bind or growth too.
    void stop_sharing();

  private:
    int rank_, ranks_;
    int64_t slot_bytes_, next_slot_bytes_ = 0;
    std::vector<std::unique_ptr<ShmSegment>> control_, data_, next_;
};

// Start time of a process in clock ticks since boot, 0 where there is none (or only a zombie).
uint64_t start_time_of(int pid);
// Whether the process that made this block has ended.
bool gone(const ControlBlock* block);

int64_t now_ns();

}  // namespace ub_overlap
