#include "core/flight.h"

#include <time.h>

#include <algorithm>

namespace ub_overlap {
namespace {

int64_t wall_ns() {
    timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

}  // namespace

FlightRecorder::FlightRecorder(int64_t capacity)
    : capacity_(std::max<int64_t>(capacity, 0)), records_(new Record[static_cast<size_t>(capacity_)]) {}

const CallText* FlightRecorder::intern(uint32_t tag, const CallTextView& text) {
    const auto known = by_tag_.find(tag);
    if (known != by_tag_.end()) {
        const CallText& old = *known->second;  // tags are hashes
        if (old.site == text.site && old.op == text.op && old.shape == text.shape && old.strategy == text.strategy) return &old;
    }
    const std::lock_guard<std::mutex> lock(texts_mutex_);
    if (static_cast<int64_t>(young_.size()) >= std::max<int64_t>(4 * capacity_, 1024)) {
        old_ = std::move(young_);
        young_.clear();
        by_tag_.clear();
    }
    young_.push_back(std::make_unique<const CallText>(
        CallText{std::string(text.op), std::string(text.site), std::string(text.strategy), std::string(text.shape)}));
    return by_tag_[tag] = young_.back().get();
}

uint64_t FlightRecorder::begin(uint64_t epoch, uint32_t tag, const CallTextView& text) {
    if (capacity_ == 0) return 0;
    const CallText* interned = intern(tag, text);
    const uint64_t number = count_.load(std::memory_order_relaxed) + 1;
    Record& record = records_[number % static_cast<uint64_t>(capacity_)];
    record.number.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    record.epoch.store(epoch, std::memory_order_relaxed);
    record.tag.store(tag, std::memory_order_relaxed);
    record.text.store(interned, std::memory_order_relaxed);
    record.state.store(static_cast<uint32_t>(CallState::enqueued), std::memory_order_relaxed);
    record.enqueued_ns.store(wall_ns(), std::memory_order_relaxed);
    record.started_ns.store(0, std::memory_order_relaxed);
    record.ended_ns.store(0, std::memory_order_relaxed);
    record.number.store(number, std::memory_order_release);
    count_.store(number, std::memory_order_release);
    return number;
}

void FlightRecorder::set_state(uint64_t number, CallState state) {
    if (capacity_ == 0 || number == 0) return;
    Record& record = records_[number % static_cast<uint64_t>(capacity_)];
    if (record.number.load(std::memory_order_relaxed) != number) return;
    const bool runs = state == CallState::started || state == CallState::issued;
    (runs ? record.started_ns : record.ended_ns).store(wall_ns(), std::memory_order_relaxed);
    record.state.store(static_cast<uint32_t>(state), std::memory_order_release);
}

std::vector<FlightEntry> FlightRecorder::entries() const {
    std::vector<FlightEntry> list;
    const std::lock_guard<std::mutex> lock(texts_mutex_);  // no text ends meanwhile
    const uint64_t last = count(), first = last > static_cast<uint64_t>(capacity_) ? last - capacity_ + 1 : 1;
    for (uint64_t number = first; number <= last; ++number) {
        const Record& record = records_[number % static_cast<uint64_t>(capacity_)];
        if (record.number.load(std::memory_order_acquire) != number) continue;
        FlightEntry entry;
        entry.number = number;
        entry.state = static_cast<CallState>(record.state.load(std::memory_order_acquire));
        entry.epoch = record.epoch.load(std::memory_order_relaxed);
        entry.tag = record.tag.load(std::memory_order_relaxed);
        entry.enqueued_ns = record.enqueued_ns.load(std::memory_order_relaxed);
        entry.started_ns = record.started_ns.load(std::memory_order_relaxed);
        entry.ended_ns = record.ended_ns.load(std::memory_order_relaxed);
        const CallText* text = record.text.load(std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_acquire);
        if (record.number.load(std::memory_order_relaxed) != number) continue;
        entry.text = *text;
        list.push_back(std::move(entry));
    }
    return list;
}

}  // namespace ub_overlap
