// The session of one group on one device type: arena, epoch, verified plans, and the failure that made it unusable.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/area_growth.h"
#include "core/executor.h"
#include "core/point_to_point.h"
#include "core/tuning.h"

namespace ub_overlap {

// Callbacks into Python. Any of them but `tell_plain_groups` may throw; the session is then marked as failed, for its peers
// too.
struct SessionHooks {
    std::function<void(const std::string& digest, const Call& call)> verify;
    // Grows the slot of `call` to what it needs, equal on all ranks; `to_largest`: to what any needs, unless in a capture.
    std::function<void(const Call& call, bool to_largest)> grow;
    std::function<int(const Tuning& tuning)> tune;
    // Throws unless all ranks have abandoned the split collective `call`.
    std::function<void(const Call& call)> agree_on_abandoned;
    // Frees objects that only reference cycles hold.
    std::function<void()> collect_garbage;
    // Returns how many multiprocessors matmuls can leave at most to the collectives that c10d runs for the group.
    std::function<int()> most_spared;
    // Tells the groups of the same origin group that have no arena.
    std::function<void(const Failure& failure)> tell_plain_groups;
    // Returns memory on the call's device, for work of its stream.
    std::function<std::shared_ptr<char>(const Call& call, int64_t bytes)> allocate;
};

// What a program holds of an open collective: the tensors that are sent, and whether it can still call the next op. That needs
// the token, or the result of a zero-copy gather. A collective without them is *abandoned*, as after an exception.
struct HeldTensors {
    std::shared_ptr<void> sent;
    std::function<bool()> is_abandoned;
};

class Session {
  public:
    Session(std::string group, std::string device, int rank, int ranks, std::shared_ptr<Arena> arena, std::string transport,
            std::string reason);

    // Runs one call; the arguments have been checked. Blocks until the results are there (CPU) or on their way (CUDA).
    void run(Call& call, Executor& executor, const std::function<void(Call&)>& prepare);
    // The ops of a split collective. `start` begins the pushes of `call` and keeps its tensors until `finish`, which gets the
    // same call with an output. Between them the session may run any calls. None holds the session meanwhile.
    // A zero-copy gather's output is landing memory, which `finish` sets and `release` gives back.
    // A start in a slot whose collective is abandoned ends that one first, on all ranks.
    void start(Call call, HeldTensors tensors, Executor& executor);
    void finish(Call& call);
    // Returns the rounds in which this rank receives the all_to_all that is open in a slot; 1 without one.
    int64_t received_rounds(int split_slot);
    // Sets when the zero-copy gather that was finished in a slot is abandoned: its result is freed.
    void watch_result(int split_slot, std::function<bool()> is_abandoned);
    // `call`: its slot, site and stream.
    void release(const Call& call);
    // Returns this rank's landing memory of a split call that is to be started, grown to its needs: a gather whose input is at
    // its place there copies nothing on this rank. Collective where it grows.
    char* landing_memory(Call& call);
    // Returns how many multiprocessors matmuls leave while c10d runs a split collective of the group.
    int spared_multiprocessors();
    // Plan check alone, for calls that another transport carries out. Returns the call's number in the flight recorder.
    uint64_t verify_only(const Call& call);
    // The alternative that the ranks agreed on for a bucket of a site's table; -1 before they did.
    int picked(const std::string& site, int bucket);
    // The end of a call that another transport carried out. `number`: of verify_only.
    void end_plain(uint64_t number, bool failed);
    // The split slots whose collective c10d runs now.
    std::vector<int> open_plain();
    // Times the alternatives on all ranks together. Does nothing while a graph is being captured.
    void tune(const Tuning& tuning);
    // Throws the failure of a call that was only issued (CUDA), or of a peer.
    void check();
    // The last calls, oldest first, and the ranks that the call in flight waits for, of the group that the user named. Any
    // thread may call them.
    std::vector<FlightEntry> flight();
    std::vector<int> waiting_for();
    uint64_t calls() const { return flight_.count(); }
    void set_hooks(SessionHooks hooks);
    // The channels of the group, null before `set_channels`. They are closed with the session.
    void set_channels(std::shared_ptr<PointToPoint> channels);
    std::shared_ptr<PointToPoint> channels();
    // Ends the waits of this session's call, here and on the peers, and makes the session unusable. Does not wait for the call.
    // Idempotent. Any thread may call it at any time.
    void abort(const std::string& reason);
    void close();

    const std::string& group() const { return group_; }
    const std::string& device() const { return device_; }
    const std::string& transport() const { return transport_; }
    const std::string& reason() const { return reason_; }
    int rank() const { return rank_; }
    int ranks() const { return ranks_; }
    uint64_t epoch() const { return epoch_; }
    // The error that made the session unusable; empty while it is usable.
    const std::string& failure_text() const { return failure_text_; }
    Arena* arena() { return arena_.get(); }

  private:
    // A split collective between start and finish, or between start and release.
    struct OpenCollective {
        Call call;
        HeldTensors tensors;
        Executor* executor = nullptr;
        uint64_t number = 0;             // in the flight recorder
        bool is_finished = false;        // it waits for its release
        int64_t finish_ns = 0;           // when its finish began
        std::unique_ptr<OpenWork> work;  // refers to `call`, so it is destroyed first
    };
    [[noreturn]] void refuse_finish(const Call& call, const OpenCollective* open) const;
    // Whether the next op of an abandoned collective may run at the place of `next`. False where its steps are part of a CUDA
    // graph that is not being captured any more, so that there is nothing to end. Throws where only `next` is captured.
    bool can_continue(const OpenCollective& open, const Call& next) const;
    // Ends an abandoned collective in the slot of `next`. Throws where one is open that can still be finished.
    void free_slot(const Call& next);
    void end_abandoned(OpenCollective& open);
    // The start and the finish of a collective that c10d runs.
    void start_plain(OpenCollective& next);
    void finish_plain(OpenCollective& open);
    [[noreturn]] void refuse_start(const Call& call, const OpenCollective& open) const;
    // Runs one op of `call`. An error makes the session unusable, and is passed on.
    void run_op_of(const Call& call, uint64_t number, const std::function<void()>& body);
    // Does the same for an op of a split collective. An abort from another thread names that one meanwhile.
    void run_split_op_of(const Call& call, uint64_t number, const std::function<void()>& body);
    // Finds the schedule of a call, compares plans and grows its slot.
    void set_up(Call& call, const std::function<void(Call&)>& prepare);
    // Grows the areas of an all_to_all, if all ranks do so at this call, and sets their size.
    void grow_areas(Call& call);
    // Throws where the session cannot run `call`, or any call where that is null.
    void refuse_if_unusable(const Call* call);
    [[noreturn]] void throw_aborted(const Call* call);
    std::shared_ptr<Arena> living_arena();
    void publish(const Call& call);
    void verify(const Call& call);
    // Marks the session unusable and tells the peers; `text` is what later calls quote.
    void mark_failed(const Call& call, const std::string& text, const Failure* failure);

    const std::string group_, device_, transport_, reason_;
    const int rank_, ranks_;
    std::shared_ptr<Arena> arena_;  // null where there are no peers or no transport
    std::shared_ptr<PointToPoint> channels_;
    SessionHooks hooks_;
    FlightRecorder flight_;
    std::recursive_mutex mutex_;  // one call at a time
    uint64_t epoch_ = 0;
    uint64_t fused_epoch_ = 0;
    uint64_t split_epochs_[split_slots] = {};
    std::unique_ptr<OpenCollective> open_[split_slots];
    AreaGrowth areas_[split_slots];
    // The slot of the last call if its epochs are not those of the group: a fused collective, or a split one whose start,
    // finish or release runs. Else -1.
    std::atomic<int> slot_with_own_epochs_{-1};
    int most_spared_ = -1;  // not known yet
    std::set<std::string> verified_;
    std::map<std::pair<std::string, int>, int> picks_;
    std::string failure_text_;
    bool closed_ = false;
    // Guards `abort_reason_` and `channels_`, and `arena_` against its release: `mutex_` is held during calls.
    std::mutex abort_mutex_;
    std::string abort_reason_;
    std::atomic<bool> aborted_{false};
};

}  // namespace ub_overlap
