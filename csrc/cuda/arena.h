// The arena of a CUDA group. Slots, flags and abort words lie in symmetric memory, whose pointers Python hands in
// (runtime/session/symm_mem.py owns it). What only hosts read, texts and process ids, lies in the shared memory of a CPU arena.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/call.h"
#include "cpu/shm_arena.h"
#include "cuda/replay.h"
#include "cuda/state.h"

namespace ub_overlap::cuda {

// Bytes of symmetric memory for the words of one rank; zero before any rank uses them.
int64_t words_bytes(int ranks);

class CudaArena final : public Arena {
  public:
    // `words` and `data`: one pointer a rank, as seen by this process.
    CudaArena(int device, std::shared_ptr<ShmArena> host, const std::vector<uint64_t>& words, const std::vector<uint64_t>& data,
              int64_t slot_bytes);
    ~CudaArena() override;

    int rank() const override { return host_->rank(); }
    int ranks() const override { return host_->ranks(); }
    ControlBlock* control(int rank) override { return host_->control(rank); }
    FlagWord* flags(int rank) override { return host_->flags(rank); }  // unused: the device has its own
    char* slot(int rank, int slot) override { return data_[rank] + slot * slot_bytes_; }
    int64_t slot_bytes() const override { return slot_bytes_; }
    void poll() override;
    void quiesce() override;
    const Failure* aborted() override;
    void abort(const Failure& failure) override;

    // All ranks have stopped using the old slots.
    void replace(const std::vector<uint64_t>& data, int64_t slot_bytes);
    // Has every plain call of the group ended on the device? They end in the order of their issue, so the last one tells.
    // Replays of torch's graphs are not seen: what those may still use stays, see `captured`.
    bool ended() const;
    // May memory of this arena be freed? Besides its calls, the whole device must be at rest, for freeing waits for that
    // without a deadline. Takes a second at most.
    bool free_to_go() const;
    // For tests: as if a call had taken the turn and never ended.
    void hold_turn();

    int device() const { return device_; }
    const Group& group() const { return group_; }
    uint64_t* flag_word(int rank, uint32_t place) const;
    const uint64_t* source_word(int slot) const { return &group_.local->word[slot]; }
    // Remembers whose tag it is: kernels know calls by their tags alone.
    void note(const Call& call);
    // Some graph holds the addresses of this arena's slots.
    void set_captured() { captured_ = true; }
    bool captured() const { return captured_; }

    Replays& replays() { return replays_; }

    // Calls of a group run in issue order, whatever streams they are on: the end of the last call, and its stream.
    cudaEvent_t last_call = nullptr;
    cudaStream_t last_stream = nullptr;
    bool called = false;

  private:
    struct Name {
        std::string op, site, shape;
    };
    Failure failure_from(const WaitFailure& seen);
    void describe_mismatch(Failure& failure, int source, uint32_t seen_tag, uint32_t own_tag);
    int gone_rank();

    const int device_;
    std::shared_ptr<ShmArena> host_;
    Failure own_;  // what this rank's device met, once `met_` is set
    std::atomic<bool> met_{false};
    std::vector<char*> data_;
    int64_t slot_bytes_;
    Group group_{};
    Replays replays_;
    uint64_t* abort_source_ = nullptr;  // pinned
    cudaStream_t abort_stream_ = nullptr;
    std::mutex mutex_;
    std::map<uint32_t, Name> names_;
    Name last_;
    bool captured_ = false, reported_ = false;
};

// Makes a device current for a scope.
class OnDevice {
  public:
    explicit OnDevice(int device);
    ~OnDevice();
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

  private:
    int before_ = 0;
};

}  // namespace ub_overlap::cuda
