// The arena of a CUDA group. Slots, flags and abort words lie in symmetric memory. runtime/session/symm_mem.py owns it and
// passes the pointers. Data that only hosts read, texts and process ids, lies in the shared memory of a CPU arena.
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
#include "core/point_to_point.h"
#include "cpu/shm_arena.h"
#include "cuda/device.h"
#include "cuda/replay.h"
#include "cuda/state.h"

namespace ub_overlap::cuda {

// Returns the bytes of symmetric memory for the words of one rank. They must be zero before any rank uses them.
int64_t words_bytes(int ranks);

class CudaArena final : public Arena {
  public:
    // `words` and `data`: one pointer per rank, as mapped in this process.
    CudaArena(int device, std::shared_ptr<ShmArena> host, const std::vector<uint64_t>& words, const std::vector<uint64_t>& data,
              int64_t slot_bytes);
    ~CudaArena() override;

    int rank() const override { return host_->rank(); }
    int ranks() const override { return host_->ranks(); }
    ControlBlock* control(int rank) override { return host_->control(rank); }
    FlagWord* flags(int rank) override { return host_->flags(rank); }  // unused: the flags lie on the device
    char* slot(int rank, int slot) override {
        if (slot < slots) return data_[rank] + slot * slot_bytes_;
        const FurtherMemory& memory = further_[further_memory(slot)];
        return memory.data[rank] + fused_offset(slot, memory.bytes);
    }
    int64_t slot_bytes(int slot) const override { return slot < slots ? slot_bytes_ : further_[further_memory(slot)].bytes; }
    void poll() override;
    void watch() override;
    void refine(std::vector<FlightEntry>& entries) override;
    std::vector<int> waiting_for() override;
    void quiesce() override;
    const Failure* aborted() override;
    void abort_alone(const Failure& failure) override;

    // Replaces a further memory (core/flags.h), or the other slots. All ranks have stopped using the old ones.
    void replace(const std::vector<uint64_t>& data, int64_t slot_bytes, int slot);
    // Returns whether every eager call of the group has ended on the device. They end in issue order, so the last one tells.
    // Replays of torch's graphs are not tracked: memory that they may use is not freed, see `is_captured`.
    bool has_ended() const;
    // Returns whether memory of this arena may be freed. The whole device must be idle, as freeing waits for that without a
    // deadline. Takes a second at most.
    bool can_free() const;
    // For tests: takes the group lock, as a call that never ends.
    void hold_group_lock();

    int device() const { return device_; }
    const Group& group() const { return group_; }
    uint64_t* flag_word(int rank, uint32_t place) const;
    // Records the call of a tag: kernels know calls only by tag.
    void record(const Call& call);
    // Notes that a graph holds the addresses of this arena's slots.
    void set_captured() { captured_ = true; }
    bool is_captured() const { return captured_; }

    // Sets the texts of the messages of this group's channels, for errors.
    void set_channels(std::shared_ptr<ChannelBoard> board);
    // Notes that a stream waits for message `number` to (sends) or from `peer`, and so for the earlier ones of the channel.
    void await_message(bool sends, int peer, uint64_t number);
    // The last such number, in pinned memory. Kernels that wait for a message read it, for blame.
    const uint64_t* awaited_message(bool sends, int peer) const { return awaited_ + 2 * peer + sends; }

    Events& split_events(int split_slot) { return further_[split_slot].events; }
    RecordedCalls& recorded_calls() { return recorded_calls_; }

    // The end of the last call, and its stream: calls of a group run in issue order on all streams.
    cudaEvent_t last_call_end = nullptr;
    cudaStream_t last_stream = nullptr;
    bool has_called = false;

  private:
    struct CallName {
        std::string op, site, shape;
    };
    // Returns the failure of this rank's device, with ranks of the group that the user named.
    Failure failure_from(const WaitFailure& seen);
    // Names the call that this rank's device waits in, from its state. `mutex_` is held.
    CallName waiting_call(const LocalState& local) const;
    void describe_mismatch(Failure& failure, int source, uint32_t seen_tag, uint32_t own_tag);
    void describe_message(Failure& failure, FlagKind kind, int peer) const;
    int find_dead_rank(uint64_t among = ~0ull);
    // What the device is doing, copied while its kernels run. `known` false where no copy arrived within `timeout_ns`.
    struct Progress {
        SharedState shared;
        LocalState local;
        bool known = false;
    };
    Progress read_progress(int64_t timeout_ns);

    const int device_;
    std::shared_ptr<ShmArena> host_;
    Failure own_failure_;  // of this rank's device, once `has_failed_` is set
    std::atomic<bool> has_failed_{false};
    std::vector<char*> data_;
    int64_t slot_bytes_;
    struct FurtherMemory {
        std::vector<char*> data;  // one pointer per rank
        int64_t bytes = 0;        // 0: not allocated yet
        Events events;
    };
    FurtherMemory further_[further_memories];
    Group group_{};
    RecordedCalls recorded_calls_;
    uint64_t* abort_source_ = nullptr;  // pinned: the word for this rank, the word for its peers
    uint64_t* awaited_ = nullptr;       // pinned: by peer and direction, see awaited_message
    cudaStream_t abort_stream_ = nullptr;
    std::mutex mutex_;
    std::map<uint32_t, CallName> names_;
    CallName last_;
    std::shared_ptr<ChannelBoard> channels_;
    bool captured_ = false, reported_ = false;
    std::mutex progress_mutex_;
    Progress* progress_ = nullptr;        // pinned
    cudaEvent_t progress_end_ = nullptr;  // of the last copy to it
    bool copying_progress_ = false;
    int suspect_ = -1;  // a dead rank that this rank's device waited for when
                        // `watch` last looked, in that epoch
    uint32_t suspect_epoch_ = 0;
};

}  // namespace ub_overlap::cuda
