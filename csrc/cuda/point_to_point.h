// Channels over symmetric memory. The source pushes by the copy engine, and raises READY by a stream write; the destination
// waits by a kernel with a deadline, copies the piece out and returns DONE by a stream write. A stream for each channel and
// direction.
//
//     symmetric memory of a rank   READY words [source][slot], DONE words [destination], then the slots (core/point_to_point.h)
//
// Words hold numbers of pieces, which the host counts. So messages cannot be captured.
#pragma once

#include <deque>
#include <map>
#include <vector>

#include "cpu/channel_segment.h"
#include "cuda/arena.h"

namespace ub_overlap::cuda {

// Returns the bytes of symmetric memory of one rank. The words must be zero before any rank uses them.
int64_t channel_bytes(const ChannelSizes& sizes);
// Returns how many of them, from the first on, are words.
int64_t channel_words_bytes(const ChannelSizes& sizes);

class CudaPointToPoint final : public PointToPoint {
  public:
    // `memory`: one pointer per rank, as mapped in this process.
    CudaPointToPoint(std::shared_ptr<CudaArena> arena, std::shared_ptr<ChannelSegment> segment,
                     const std::vector<uint64_t>& memory);
    ~CudaPointToPoint() override;
    void close() override;

  protected:
    std::shared_ptr<Transfer> begin(Message message, uint64_t first) override;

  private:
    class CudaTransfer;
    struct Lane {
        cudaStream_t stream = nullptr;
        cudaEvent_t issued = nullptr;  // the caller's stream, at its last message
    };
    Lane& lane_of(bool sends, int peer);
    // Sets `has_begun` once work of the message is on the stream: where it throws after that, the work cannot be taken back.
    void issue_pieces(const Message& message, uint64_t first, cudaStream_t stream, bool& has_begun);
    void release_completed();
    uint64_t* ready_word(int source, int destination, int slot) const;
    uint64_t* done_word(int source, int destination) const;

    const std::shared_ptr<CudaArena> device_arena_;
    const std::shared_ptr<ChannelSegment> segment_;
    std::vector<char*> memory_;
    std::map<std::pair<bool, int>, Lane> lanes_;            // by direction (sends) and peer
    std::deque<std::shared_ptr<CudaTransfer>> unfinished_;  // keeps their tensors
};

}  // namespace ub_overlap::cuda
