// Point-to-point messages between ranks of a group.
//
// A channel is a directed pair of ranks. Messages of a channel arrive in the order in which both ends issue them. Channels
// share neither slots, words nor queues, so a receive that is issued early delays nothing but later receives of its own
// channel.
//
//     memory of the destination   for each source: slots that the source pushes to, and a READY word for each
//     memory of the source        for each destination: a DONE word, the number of pieces that the destination has copied out
//
// A message is one piece, or several where it is larger than a slot. Both ends count the pieces of a channel from 1; piece n
// uses slot n modulo `slots`. A READY word holds (n, hash of the message), a DONE word (n, 1). The source pushes piece n after
// it has seen DONE of piece n - slots: the steps are those of the schedule "point_to_point" (runtime/schedule), which the
// checker proves.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/schedule.h"

namespace ub_overlap {

constexpr int max_channel_slots = 64;

// The sizes of all channels of a group; the same on all ranks. Ranks r and r + 1, modulo the ranks, are neighbours.
struct ChannelSizes {
    int ranks = 0, slots = 0;
    int64_t near_bytes = 0, far_bytes = 0;  // of a slot, between neighbours and between other ranks

    int64_t slot_bytes(int source, int destination) const {
        const int distance = source < destination ? destination - source : source - destination;
        return distance == 1 || distance == ranks - 1 ? near_bytes : far_bytes;
    }
    // Where the slots from `source` begin in the memory of `destination`. For source == ranks: the bytes of all slots.
    int64_t offset(int source, int destination) const {
        int64_t sum = 0;
        for (int s = 0; s < source; ++s) sum += s == destination ? 0 : slots * slot_bytes(s, destination);
        return sum;
    }
    int64_t total_bytes() const { return offset(ranks, 0); }
};

// One message of this rank, to or from `peer`.
struct Message {
    bool sends = false;
    int peer = 0;
    char* data = nullptr;
    int64_t bytes = 0;
    std::string text;   // dtype, sizes and tag: equal on both ends
    uint32_t hash = 0;  // of dtype, bytes and tag; not 0
    int device = -1;    // CUDA: index of the tensor's device, and the caller's current stream on it
    void* stream = nullptr;
    std::shared_ptr<void> tensor;  // keeps `data`

    const char* op() const { return sends ? "send" : "recv"; }
    std::string site(int rank) const {
        return "channel " + std::to_string(sends ? rank : peer) + " -> " + std::to_string(sends ? peer : rank);
    }
};

// A message that was issued.
class Transfer {
  public:
    virtual ~Transfer() = default;
    // CPU: the tensor was sent or received, or that failed. CUDA: so on the device.
    virtual bool is_completed() = 0;
    // CPU: returns when the message is completed, or throws its failure. CUDA: makes the stream wait for it.
    virtual void wait(void* stream) = 0;
};

// Host memory of the channels, of which each rank has some: texts of messages for errors; on the CPU also words and slots.
class ChannelBoard {
  public:
    virtual ~ChannelBoard() = default;
    virtual const ChannelSizes& sizes() const = 0;
    // Notes the text of the message that begins with piece `number`, on behalf of its source (sends) or destination.
    virtual void note(int source, int destination, bool sends, uint64_t number, const std::string& text) = 0;
    // Returns that text, "" where it is not known (any more).
    virtual std::string text_of(int source, int destination, bool sends, uint32_t number) = 0;
    // Sets the texts of both ends' messages in a failure. `sends`: the reporter's end. `peer`: the other rank of the channel.
    void describe(Failure& failure, bool sends, int peer);
};

// All channels of this rank. Any thread may use it.
class PointToPoint {
  public:
    PointToPoint(std::shared_ptr<Arena> arena, std::shared_ptr<ChannelBoard> board);
    virtual ~PointToPoint() = default;

    // Issues a message behind the earlier ones of its channel and direction. Does not wait for the peer.
    std::shared_ptr<Transfer> issue(Message message);
    // Ends all transfers; those that are not completed fail. Idempotent.
    virtual void close() = 0;
    int64_t slot_bytes(int peer) const { return board_->sizes().slot_bytes(peer, arena_->rank()); }

  protected:
    // Called with the lock held. `first`: number of the message's first piece. Where it throws, nothing of the message is left,
    // or it has called `break_channels`.
    virtual std::shared_ptr<Transfer> begin(Message message, uint64_t first) = 0;
    // Ends the use of the group's channels on all ranks: a part of `message` was issued, and no later message can follow it.
    void break_channels(const Message& message, const std::string& why);
    int64_t pieces_of(const Message& message) const;

    const std::shared_ptr<Arena> arena_;
    const std::shared_ptr<ChannelBoard> board_;
    // The steps of a piece, of the source and of the destination.
    const std::shared_ptr<const Program> source_steps_, destination_steps_;
    std::mutex mutex_;
    bool closed_ = false;

  private:
    std::vector<uint64_t> next_[2];  // number of the next piece by peer: received, sent
};

}  // namespace ub_overlap
