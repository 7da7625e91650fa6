// An arena in POSIX shared memory: one control segment and one data segment (the slots) a rank.
//
// Names are 128 random bits, files are 0600, and they are unlinked as soon as all ranks have attached, so that nothing stays in
// /dev/shm whatever happens later. Pages are allocated at once: a full /dev/shm is an error here, not a SIGBUS in a copy.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/arena.h"

namespace ub_overlap {

// One mapped segment. Unmapped when destroyed; unlinked then, too, if its maker did not do so before.
class ShmSegment {
  public:
    static std::unique_ptr<ShmSegment> create(int64_t bytes);
    static std::unique_ptr<ShmSegment> attach(const std::string& name, int64_t bytes);
    ~ShmSegment();
    ShmSegment(const ShmSegment&) = delete;
    ShmSegment& operator=(const ShmSegment&) = delete;

    void unlink();
    char* data() const { return data_; }
    int64_t bytes() const { return bytes_; }
    const std::string& name() const { return name_; }

  private:
    ShmSegment(std::string name, char* data, int64_t bytes, bool made);
    std::string name_;
    char* data_;
    int64_t bytes_;
    bool linked_;
    int pid_;
};

class ShmArena final : public Arena {
  public:
    ShmArena(int rank, int ranks, int64_t slot_bytes);

    int rank() const override { return rank_; }
    int ranks() const override { return ranks_; }
    ControlBlock* control(int rank) override;
    FlagWord* flags(int rank) override;
    char* slot(int rank, int slot) override { return data_[rank]->data() + slot * slot_bytes_; }
    int64_t slot_bytes() const override { return slot_bytes_; }

    const std::string& control_name() const { return control_[rank_]->name(); }
    const std::string& data_name() const { return (next_[rank_] ? next_ : data_)[rank_]->name(); }
    void attach(int rank, const std::string& control_name, const std::string& data_name);
    // Growth: make bigger slots here, attach to the peers', then take them all into use. Flags and epochs live on.
    void grow_begin(int64_t slot_bytes);
    void grow_attach(int rank, const std::string& data_name);
    void grow_commit();
    // Removes all names of this arena. A failed bind or growth calls it too.
    void unlink();

  private:
    int rank_, ranks_;
    int64_t slot_bytes_, next_slot_bytes_ = 0;
    std::vector<std::unique_ptr<ShmSegment>> control_, data_, next_;
};

// Unlinks a segment that a dead peer left behind. Refuses names that this library does not make.
void unlink_name(const std::string& name);

// Start time of a process in clock ticks since boot, 0 where there is none (or only a zombie).
uint64_t start_time_of(int pid);
// Whether the process that made this block has ended.
bool gone(const ControlBlock* block);

int64_t now_ns();

}  // namespace ub_overlap
