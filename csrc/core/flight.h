// Flight recorder of a group: its last calls, for errors and hangs.
//
// A ring of fixed-size records. One thread writes at a time, that of the session's call; any thread reads while it does. Texts
// are interned: a record points to the text of its call, which is kept for longer than the record. Recording a call that was
// made before takes three reads of the clock, one hash lookup and a dozen stores, and never a lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace ub_overlap {

// enqueued: the op was called, and may wait for its plan or for memory. issued: CUDA, all of it is on the device's streams.
// started: its steps run. finished: its results are there. An arena of a device turns `issued` into later states when the
// records are read (core/arena.h): a call does not wait to find out.
enum class CallState : uint32_t { enqueued = 0, started = 1, finished = 2, failed = 3, issued = 4 };

inline const char* name_of(CallState state) {
    constexpr const char* names[] = {"enqueued", "started", "finished", "failed", "issued"};
    return names[static_cast<uint32_t>(state)];
}

// The part of a record that calls of one kind share.
struct CallText {
    std::string op, site, strategy, shape;
};
struct CallTextView {
    std::string_view op, site, strategy, shape;
};

// A copy of one record. Times: CLOCK_REALTIME, 0: not yet.
struct FlightEntry {
    uint64_t number = 0, epoch = 0;
    uint32_t tag = 0;
    CallState state = CallState::enqueued;
    int64_t enqueued_ns = 0, started_ns = 0, ended_ns = 0;
    CallText text;
};

class FlightRecorder {
  public:
    // `capacity`: calls kept; 0 turns the recorder off.
    explicit FlightRecorder(int64_t capacity);

    // Records a call and returns its number, 1 for the first; 0 if off. Calls of one recorder must not overlap.
    uint64_t begin(uint64_t epoch, uint32_t tag, const CallTextView& text);
    // Sets the state of a call that is still kept, and the time of that. Any thread may call it.
    void set_state(uint64_t number, CallState state);

    uint64_t count() const { return count_.load(std::memory_order_acquire); }
    // Returns the records, oldest first. One that is being overwritten is left out. Any thread may call it.
    std::vector<FlightEntry> entries() const;

  private:
    // Relaxed atomics: a reader that sees `number` unchanged has read one record.
    struct Record {
        std::atomic<uint64_t> number{0}, epoch{0};
        std::atomic<int64_t> enqueued_ns{0}, started_ns{0}, ended_ns{0};
        std::atomic<const CallText*> text{nullptr};
        std::atomic<uint32_t> tag{0}, state{0};
    };
    const CallText* intern(uint32_t tag, const CallTextView& text);

    const int64_t capacity_;
    std::unique_ptr<Record[]> records_;
    std::atomic<uint64_t> count_{0};
    // Dynamic shapes give new texts without end. So texts live in two generations: the older one is dropped when the younger is
    // full, when all records point to younger texts.
    mutable std::mutex texts_mutex_;  // held by readers, and by the writer for a new text
    std::vector<std::unique_ptr<const CallText>> young_, old_;
    std::unordered_map<uint32_t, const CallText*> by_tag_;  // of the young ones; the writer alone uses it
};

}  // namespace ub_overlap
