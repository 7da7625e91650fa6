// Packets: how a small slice travels to a peer. Each 8 bytes hold 4 of data and the epoch, and are stored as one word. So a
// receiver that sees the epoch has the data, and no push is followed by a fence and a flag, which take a round trip over the
// link. NCCL calls such a protocol LL. Twice the bytes are sent, so larger slices go to regions.
//
//     memory of a rank       [2 slots][fused_blocks][R sources][packet_vectors] packets of two 16-byte halves
//
// It is zero at first, and holds nothing but packets: other data could look like an epoch. Epochs of a block differ for 2^32
// calls. The word READY is sent along, as it has the site tag that a packet lacks.
#pragma once

#include "cuda/fused_exchange.h"

namespace ub_overlap::cuda {
namespace {

constexpr uint32_t polls_at_once = 64;  // before a thread looks for failures and the time

// `per_thread`: of the kernel. A slice for packets has rows of one vector for each thread (make_fused_grid).
template <int per_thread>
__device__ inline bool uses_packets(const Parameters& p) {
    static_assert(packet_vectors <= fused_threads);
    return per_thread == 1 && p.block_vectors <= packet_vectors && p.vectors * (p.group.ranks - 1) <= packet_sent_vectors;
}

// The packets that `source` sends to this block at `rank`.
__device__ inline char* packets_at(const Parameters& p, const Block& block, int rank, int source) {
    const int64_t number = static_cast<int64_t>(block.slot - fused_slot) * fused_blocks + blockIdx.x;
    return p.packets[rank] + (number * p.group.ranks + source) * packet_vectors * packet_size;
}

__device__ inline void store_half(char* to, uint32_t first, uint32_t second, uint64_t flag) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(flag | first), "l"(flag | second) : "memory");
}
__device__ inline void store_packet(char* to, uint4 value, uint32_t epoch) {
    const uint64_t flag = static_cast<uint64_t>(epoch) << 32;
    store_half(to, value.x, value.y, flag);
    store_half(to + packet_size / 2, value.z, value.w, flag);
}
// Returns whether the packet of `epoch` has landed, and its data.
__device__ inline bool load_packet(const char* from, uint32_t epoch, uint4& value) {
    uint64_t words[4];
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(words[0]), "=l"(words[1]) : "l"(from) : "memory");
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(words[2]), "=l"(words[3])
                 : "l"(from + packet_size / 2)
                 : "memory");
    value = make_uint4(static_cast<uint32_t>(words[0]), static_cast<uint32_t>(words[1]), static_cast<uint32_t>(words[2]),
                       static_cast<uint32_t>(words[3]));
    bool landed = true;
#pragma unroll
    for (const uint64_t word : words) landed = landed && epoch_half(word) == epoch;
    return landed;
}

// What a thread does now and then while it waits for the packet at `from`, of `source`: as spin_for_flag does for a flag.
// Returns the time at which its wait began, `begin` or now, and 0 where the group has failed.
__device__ __noinline__ uint64_t check_wait(const Parameters& p, const Block& block, int source, const char* from,
                                            uint64_t begin) {
    const Group& g = p.group;
    SharedState* own = g.shared[g.rank];
    const uint64_t now = now_ns();
    if (begin == 0) begin = now;
    auto* waiting = reinterpret_cast<unsigned long long*>(&own->waiting);
    if ((*reinterpret_cast<const volatile unsigned long long*>(waiting) >> source & 1) == 0) atomicOr(waiting, 1ull << source);
    update_heartbeat(g, now);
    const uint64_t abort = load_acquire(&own->abort), waited = now - begin;
    const bool late = waited > p.timeout_ns, failed = load_failed(g.local) != 0;
    if (abort == 0 && !late && !failed) {
        __nanosleep(64);
        return begin;
    }
    uint4 value;
    if (load_packet(from, epoch_half(block.word), value)) return begin;  // its peer failed later
    if (!failed) {
        const WaitWord w = wait_word(p, block, FlagKind::ready, source);
        const uint64_t seen = load_acquire(flag_words(own) + w.place);
        fail(g, w, abort ? WaitOutcome::aborted : WaitOutcome::timeout, block.word, seen, abort, waited);
    }
    return 0;  // `waiting` stays
}

// The packets of one call, as a thread of the block sees them.
class Packets {
  public:
    __device__ Packets(const Parameters& p, const Block& block) : p_(p), block_(block), epoch_(epoch_half(block.word)) {}

    // Sends vector `i` of this rank's slice to `peer`, or to all peers.
    __device__ void store(int peer, int64_t i, uint4 value) const {
        store_packet(packets_at(p_, block_, peer, p_.group.rank) + i * packet_size, value, epoch_);
    }
    __device__ void store_at_peers(int64_t i, uint4 value) const {
        for_peers(p_.group, [&](int peer) { store(peer, i, value); });
    }
    // Tells the peers which call this is, and waits until they have. Called by all threads; the block does not meet.
    __device__ void exchange_words() {
        const Group& g = p_.group;
        const int peer = static_cast<int>(threadIdx.x);
        if (peer >= g.ranks || peer == g.rank) return;
        send_word<false>(p_, block_, FlagKind::ready, peer);
        failed_ = !wait_for_word(p_, block_, FlagKind::ready, peer);
    }
    // Returns vector `i` of `source`. NaN where the group has failed.
    __device__ uint4 load(int source, int64_t i) {
        const char* from = packets_at(p_, block_, p_.group.rank, source) + i * packet_size;
        uint4 value;
        uint64_t begin = 0;
        for (uint32_t poll = 1; !failed_ && !load_packet(from, epoch_, value); ++poll) {
            if (poll % polls_at_once != 0) continue;
            begin = check_wait(p_, block_, source, from, begin);
            failed_ = begin == 0;
        }
        if (failed_) return make_uint4(~0u, ~0u, ~0u, ~0u);
        if (begin != 0) {
            atomicAnd(reinterpret_cast<unsigned long long*>(&p_.group.shared[p_.group.rank]->waiting), ~(1ull << source));
        }
        return value;
    }
    // Returns whether a wait of any thread has failed. Called by all threads.
    __device__ bool have_failed() const { return __syncthreads_or(failed_); }

  private:
    const Parameters& p_;
    const Block& block_;
    uint32_t epoch_;
    bool failed_ = false;
};

}  // namespace
}  // namespace ub_overlap::cuda
