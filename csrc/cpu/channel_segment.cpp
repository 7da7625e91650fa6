#include "cpu/channel_segment.h"

namespace ub_overlap {

ChannelSegment::ChannelSegment(int rank, ChannelSizes sizes, bool has_slots)
    : rank_(rank), sizes_(sizes), has_slots_(has_slots), segments_(static_cast<size_t>(sizes.ranks)) {
    if (sizes.slots < 1 || sizes.slots > max_channel_slots || sizes.near_bytes < 1 || sizes.far_bytes < 1) {
        throw NamedError("OptionError",
                         {{"what", "invalid sizes of channels"},
                          {"got", std::to_string(sizes.slots) + " slots of " + std::to_string(sizes.near_bytes) + " and " +
                                      std::to_string(sizes.far_bytes) + " bytes"},
                          {"expected", "1 to " + std::to_string(max_channel_slots) + " slots of 1 byte or more"}});
    }
    segments_[rank] = ShmSegment::create(bytes());  // its pages are zero: no message yet
}

std::string ChannelSegment::attach(int rank, const std::string& address) {
    std::string reason;
    segments_[rank] = ShmSegment::attach(address, bytes(), reason);
    return reason;
}

void ChannelSegment::note(int source, int destination, bool sends, uint64_t number, const std::string& text) {
    Record& record = inbox(destination, source).messages[sends][number % records];
    record.number.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    set_text(record.text, text);
    record.number.store(number, std::memory_order_release);
}

std::string ChannelSegment::text_of(int source, int destination, bool sends, uint32_t number) {
    const Record& record = inbox(destination, source).messages[sends][number % records];
    const uint64_t before = record.number.load(std::memory_order_acquire);
    if (before == 0 || static_cast<uint32_t>(before) != number) return "";
    char copy[sizeof record.text];
    std::copy(std::begin(record.text), std::end(record.text), copy);
    copy[sizeof copy - 1] = 0;
    std::atomic_thread_fence(std::memory_order_acquire);
    return record.number.load(std::memory_order_relaxed) == before ? copy : "";
}

}  // namespace ub_overlap
