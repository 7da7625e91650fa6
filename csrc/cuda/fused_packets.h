// Packets: how a small slice travels to a peer. Each 8 bytes hold 4 of data and the epoch, and are stored as one word. So a
// receiver that sees the epoch has the data, and no push is followed by a fence and a flag, which take a round trip over the
// link. NCCL calls such a protocol LL. Twice the bytes are sent, so larger slices go to regions.
//
//     memory of a rank       [2 slots][fused_blocks][R sources][2 halves][packet_vectors] of 16 bytes
//
// A packet is 32 bytes: the threads of a warp write and read whole lines of first halves, then of second ones.
//
// It is zero at first, and holds nothing but packets: other data could look like an epoch. Epochs of a block differ for 2^32
// calls. The word READY is sent along, as it has the site tag that a packet lacks.
#pragma once

#include "cuda/fused_exchange.h"

namespace ub_overlap::cuda {
namespace {

constexpr uint32_t polls_at_once = 64;  // before a thread looks for failures and the time

constexpr int32_t packet_half = packet_size / 2;
constexpr int32_t packets_of_source = packet_vectors * packet_size;  // bytes

__device__ inline void store_half(char* to, uint32_t first, uint32_t second, uint64_t flag) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(flag | first), "l"(flag | second) : "memory");
}
__device__ inline void store_packet(char* to, uint4 value, uint32_t epoch) {
    const uint64_t flag = static_cast<uint64_t>(epoch) << 32;
    store_half(to, value.x, value.y, flag);
    store_half(to + packet_vectors * packet_half, value.z, value.w, flag);
}
// Returns whether the packet of `epoch` has landed, and its data.
__device__ inline bool load_packet(const char* from, uint32_t epoch, uint4& value) {
    uint64_t words[4];
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(words[0]), "=l"(words[1]) : "l"(from) : "memory");
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(words[2]), "=l"(words[3])
                 : "l"(from + packet_vectors * packet_half)
                 : "memory");
    value = make_uint4(static_cast<uint32_t>(words[0]), static_cast<uint32_t>(words[1]), static_cast<uint32_t>(words[2]),
                       static_cast<uint32_t>(words[3]));
    bool landed = true;
#pragma unroll
    for (const uint64_t word : words) landed = landed && epoch_half(word) == epoch;
    return landed;
}

// The packets of one call, as a thread of the block sees them.
class Packets {
  public:
    __device__ Packets(const Parameters& p, const Block& block)
        : p_(p),
          block_(block),
          epoch_(epoch_half(block.word)),
          begin_(int64_t{packets_of_source} * (block.place * static_cast<uint32_t>(p.group.ranks))) {}

    // Sends vector `i` of this rank's slice to `peer`, or to all peers.
    __device__ void store(int peer, int32_t i, uint4 value) const {
        store_packet(p_.memory[peer] + begin_ + p_.group.rank * packets_of_source + i * packet_half, value, epoch_);
    }
    __device__ void store_at_peers(int32_t i, uint4 value) const {
        for_peers(p_.group, [&](int peer) { store(peer, i, value); });
    }
    // Tells the peers which call this is. Called by all threads.
    __device__ void send_words() const {
        if (has_peer()) send_word<false>(p_, block_, FlagKind::ready, static_cast<int>(threadIdx.x));
    }
    // Loads vector `i` of the peers number first, first + 1, ... NaN where the group has failed.
    template <int width, typename V>
    __device__ void load(int first, int32_t i, V (&loaded)[width]) {
        const Group& g = p_.group;
        uint64_t begin = 0;
        for (uint32_t poll = 1;; ++poll) {
            int late = -1;
#pragma unroll
            for (int k = 0; k < width; ++k) {
                if (!load_packet(packet_of(peer_rank(g, first + k), i), epoch_, loaded[k].line)) late = k;
            }
            if (late < 0 || late_source_ >= 0) break;
            if (poll % polls_at_once == 0 && gives_up(peer_rank(g, first + late), begin)) {
                // Once more: a peer that failed later has sent all packets of this call.
                if (!load_packet(packet_of(peer_rank(g, first + late), i), epoch_, loaded[0].line)) {
                    late_source_ = peer_rank(g, first + late), late_since_ = begin;
                    given_up() = 1;
                }
            }
        }
        if (late_source_ >= 0) {
#pragma unroll
            for (int k = 0; k < width; ++k) loaded[k].line = make_uint4(~0u, ~0u, ~0u, ~0u);
        } else if (begin != 0) {
            unsigned long long awaited = 0;
            for (int k = 0; k < width; ++k) awaited |= 1ull << peer_rank(g, first + k);
            atomicAnd(waiting(), ~awaited);
        }
        // The word has left together with the packets. Its value is used when the rows are done.
        if (seen_ == 0 && has_peer())
            seen_ = load_relaxed(flag_words(g.shared[g.rank]) + word_of(static_cast<int>(threadIdx.x)).place);
    }
    // Waits until all words are there, and returns whether this thread has found nothing wrong; else the group has failed.
    // Called by all threads, behind all loads.
    __device__ bool have_met() const {
        if (late_source_ >= 0) {
            report();
            return false;
        }
        return !has_peer() || seen_ == block_.word || wait_for_word(p_, block_, FlagKind::ready, static_cast<int>(threadIdx.x));
    }

  private:
    __device__ const char* packet_of(int source, int32_t i) const {
        return p_.memory[p_.group.rank] + begin_ + source * packets_of_source + i * packet_half;
    }
    // Whether this thread exchanges words, with the peer of its number.
    __device__ bool has_peer() const {
        return static_cast<int>(threadIdx.x) < p_.group.ranks && static_cast<int>(threadIdx.x) != p_.group.rank;
    }
    __device__ WaitWord word_of(int source) const { return wait_word(p_, block_.word, FlagKind::ready, source); }
    __device__ unsigned long long* waiting() const {
        return reinterpret_cast<unsigned long long*>(&p_.group.shared[p_.group.rank]->waiting);
    }
    // What a thread does now and then while it waits for a packet of `source`, as spin_for_flag does for a flag. Returns
    // whether to wait no longer. `begin`: when the wait began; 0: now.
    __device__ bool gives_up(int source, uint64_t& begin) const {
        const Group& g = p_.group;
        SharedState* own = g.shared[g.rank];
        const uint64_t now = now_ns();
        if (begin == 0) begin = now;
        // Another thread that waited for the same rank may have cleared the bit.
        if ((*reinterpret_cast<const volatile unsigned long long*>(waiting()) >> source & 1) == 0) {
            atomicOr(waiting(), 1ull << source);
        }
        update_heartbeat(g, now);
        // Packets have no tag. So the word tells whether the peer is at another call, whose packets may have other places.
        const uint64_t seen = load_acquire(flag_words(own) + word_of(source).place);
        const bool differs = has_arrived(seen, block_.word) && seen != block_.word;
        if (now - begin > p_.timeout_ns || differs || load_acquire(&own->abort) != 0 || load_failed(g.local) != 0 ||
            given_up() != 0) {
            return true;
        }
        __nanosleep(64);
        return false;
    }
    // Records why the wait for `late_source_` has failed. Its bit in `waiting` stays.
    __device__ void report() const {
        const Group& g = p_.group;
        if (load_failed(g.local) != 0) return;
        SharedState* own = g.shared[g.rank];
        const WaitWord w = word_of(late_source_);
        const uint64_t seen = load_acquire(flag_words(own) + w.place), abort = load_acquire(&own->abort);
        const bool differs = has_arrived(seen, block_.word) && seen != block_.word;
        const WaitOutcome outcome = abort != 0 ? WaitOutcome::aborted : differs ? WaitOutcome::mismatch : WaitOutcome::timeout;
        const uint64_t waited = now_ns() - late_since_;
        if (outcome == WaitOutcome::timeout && waited <= p_.timeout_ns) return;  // the thread that gave up first reports
        fail(g, w, outcome, block_.word, seen, abort, waited);
    }

    const Parameters& p_;
    const Block& block_;
    uint32_t epoch_;
    int late_source_ = -1;  // whose packets this thread has given up
    int64_t begin_;         // of the packets for this block, in the memory of each rank
    uint64_t late_since_ = 0;
    uint64_t seen_ = 0;
};

}  // namespace
}  // namespace ub_overlap::cuda
