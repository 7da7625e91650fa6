// Host memory of a group's channels: one segment of shared memory a rank.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/point_to_point.h"
#include "cpu/shm_segment.h"

namespace ub_overlap {

// `has_slots`: words and slots of the channels lie here too (CPU).
class ChannelSegment final : public ChannelBoard {
  public:
    ChannelSegment(int rank, ChannelSizes sizes, bool has_slots);

    const ChannelSizes& sizes() const override { return sizes_; }
    void note(int source, int destination, bool sends, uint64_t number, const std::string& text) override;
    std::string text_of(int source, int destination, bool sends, uint32_t number) override;

    FlagWord& ready(int source, int destination, int slot) { return inbox(destination, source).ready[slot]; }
    FlagWord& done(int source, int destination) { return inbox(source, destination).done; }
    // Counts, by peer, the threads of `rank` that block until a message to or from the peer is completed. For blame.
    std::atomic<int32_t>& blocked(int rank, int peer) { return inbox(rank, peer).blocked; }
    char* slot(int source, int destination, int slot) {
        return segments_[destination]->data() + inboxes_bytes() + sizes_.offset(source, destination) +
               slot * sizes_.slot_bytes(source, destination);
    }

    const std::string& address() const { return segments_[rank_]->address(); }
    // Attaches to a peer's segment. Returns why this process cannot reach it, "" where it can.
    std::string attach(int rank, const std::string& address);
    void stop_sharing() { segments_[rank_]->stop_sharing(); }

  private:
    static constexpr int records = 64;  // messages of a channel whose texts are kept
    struct Record {
        std::atomic<uint64_t> number;
        char text[168];
    };
    // What a rank keeps for one peer: as destination of the peer's messages, and of its own messages to the peer (`done`).
    struct Inbox {
        FlagWord ready[max_channel_slots];
        alignas(64) FlagWord done;
        std::atomic<int32_t> blocked;
        alignas(64) Record messages[2][records];  // received, sent by the peer
    };
    Inbox& inbox(int rank, int peer) { return reinterpret_cast<Inbox*>(segments_[rank]->data())[peer]; }
    int64_t inboxes_bytes() const { return static_cast<int64_t>(sizeof(Inbox)) * sizes_.ranks; }
    int64_t bytes() const { return inboxes_bytes() + (has_slots_ ? sizes_.total_bytes() : 0); }

    const int rank_;
    const ChannelSizes sizes_;
    const bool has_slots_;
    std::vector<std::unique_ptr<ShmSegment>> segments_;
};

}  // namespace ub_overlap
