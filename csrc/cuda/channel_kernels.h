// Launches of the kernels of channels (point_to_point_kernels.cu).
#pragma once

#include "cuda/kernels.h"

namespace ub_overlap::cuda {

// A wait for a word of a channel, in this rank's memory.
struct ChannelWait {
    const uint64_t* word;
    const uint64_t* awaited;  // pinned: number of the channel's last message that the host has let a stream wait for
    uint32_t number;          // of the piece that the word must have reached
    uint32_t message;         // number of the message's first piece, for errors
    uint32_t hash;            // of the message, which a READY word must hold; 0: not compared
    uint16_t peer;
    uint8_t kind;  // channel_ready or channel_done
};

void preload_channels();
void launch_channel_wait(const Group& group, const ChannelWait& wait, int64_t timeout_ns, cudaStream_t stream);
// Fills a received tensor with NaN if a wait of the group has failed.
void launch_channel_end(const Group& group, char* data, int64_t bytes, const ChannelWait& wait, cudaStream_t stream);

}  // namespace ub_overlap::cuda
