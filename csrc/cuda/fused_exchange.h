// How a block of a fused collective meets its like at the peers: its lock and epoch, pushes, flags, and sums over ranks.
//
// The order of memory: all threads push to a region, the block meets at a barrier, then one thread per peer releases the flag
// at system scope, which is cumulative over the barrier. The peer's thread acquires it at system scope, and its block meets at
// a barrier before it reads. Packets need no such order (fused_packets.h). Their READY is relaxed: reads of the epoch
// before have returned by then, as the block has released its lock since.
#pragma once

#include "cuda/fused_call.h"

namespace ub_overlap::cuda {
namespace {

// Takes the block's lock and counts its epoch. Returns the call's word, 0 where the group has failed. Run by one thread.
__device__ uint64_t begin(const Parameters& p) {
    const Group& g = p.group;
    uint64_t* state = &g.local->fused[blockIdx.x];
    const auto lock = [state] {
        uint64_t old;
        asm volatile("atom.acquire.gpu.global.or.b64 %0, [%1], %2;" : "=l"(old) : "l"(state), "l"(fused_lock) : "memory");
        return old;
    };
    // Issued together with the lock, which takes as long: the waits look for aborts and failures of this moment.
    uint64_t abort = load_relaxed(&g.shared[g.rank]->abort);
    uint32_t failed = load_failed(g.local);
    uint64_t old = lock();
    WaitWord own{};
    own.source = static_cast<uint16_t>(g.rank), own.index = static_cast<uint16_t>(blockIdx.x);
    if (old & fused_lock) {
        const uint64_t start = now_ns();
        while (((old = lock()) & fused_lock) && load_failed(g.local) == 0) {
            __nanosleep(256);
            const uint64_t waited = now_ns() - start;
            if (waited > p.timeout_ns) fail(g, own, WaitOutcome::group_lock, old << 32 | p.tag, 0, 0, waited);
        }
        abort = load_acquire(&g.shared[g.rank]->abort), failed = load_failed(g.local);
    }
    uint32_t epoch = static_cast<uint32_t>(old) + 1;
    if (epoch == 0) epoch = fused_slots;  // 0 is no epoch, and the slots go on in turn
    const uint64_t word = static_cast<uint64_t>(epoch) << 32 | p.tag;
    if (abort != 0) fail(g, own, WaitOutcome::aborted, word, 0, abort, 0);
    if (blockIdx.x == 0) *reinterpret_cast<volatile uint64_t*>(&g.local->word[fused_slot]) = word;
    return abort != 0 || failed != 0 ? 0 : word;
}

// Lets the next kernel use the block. Called by all threads. The lock of a failed block stays: its epoch has not ended at the
// peers, and a kernel that finds it taken sees the failure.
__device__ void end(const Parameters& p, uint32_t epoch, bool good) {
    __syncthreads();
    if (threadIdx.x != 0 || !good) return;
    uint64_t* state = &p.group.local->fused[blockIdx.x];
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(state), "l"(static_cast<uint64_t>(epoch)) : "memory");
}

// Calls `store(i, load(i))` for each vector i < size, `width` loads of a thread at a time.
template <int width = 4, typename Load, typename Store>
__device__ inline void for_vectors(int64_t size, Load load, Store store) {
    for (int64_t base = threadIdx.x; base < size; base += width * int64_t{blockDim.x}) {
        uint4 loaded[width];
#pragma unroll
        for (int k = 0; k < width; ++k) {
            if (base + k * int64_t{blockDim.x} < size) loaded[k] = load(base + k * int64_t{blockDim.x});
        }
#pragma unroll
        for (int k = 0; k < width; ++k) {
            if (base + k * int64_t{blockDim.x} < size) store(base + k * int64_t{blockDim.x}, loaded[k]);
        }
    }
}

// Calls `body` with each peer, the next rank first: no two ranks begin with the same one.
template <typename Body>
__device__ inline void for_peers(const Group& g, Body body) {
    for (int i = 1; i < g.ranks; ++i) body(g.rank + i < g.ranks ? g.rank + i : g.rank + i - g.ranks);
}

// Stores `value` at all peers, at `to(region)`.
template <typename To>
__device__ inline void store_at_peers(const Parameters& p, const Block& block, uint4 value, To to) {
    for_peers(p.group, [&](int peer) { *to(region_at(p, block, peer)) = value; });
}

// Sends this rank's word to a peer. `releases`: behind all pushes of the block.
template <bool releases = true>
__device__ inline void send_word(const Parameters& p, const Block& block, FlagKind kind, int peer) {
    const Group& g = p.group;
    uint64_t* at = flag_words(g.shared[peer]) + flag_place(kind, block.slot, g.rank, static_cast<int>(blockIdx.x), g.ranks);
    if (releases) {
        store_release(at, block.word);
    } else {
        store_relaxed(at, block.word);
    }
}

// Waits for the word of a peer. Returns whether it is that of this call; else the group has failed.
__device__ bool wait_for_word(const Parameters& p, const Block& block, FlagKind kind, int peer) {
    const Group& g = p.group;
    const WaitWord w = wait_word(p, block, kind, peer);
    const uint32_t expected = epoch_half(block.word);
    const auto arrived = [expected](uint64_t seen) {
        return seen != 0 && static_cast<int32_t>(epoch_half(seen) - expected) >= 0;
    };
    const uint64_t seen = spin_for_flag(g, w, block.word, p.timeout_ns, arrived, [](uint64_t word) { return word; });
    if (seen != 0 && seen != block.word) fail(g, w, WaitOutcome::mismatch, block.word, seen, 0, 0);
    return seen == block.word;
}

// Signals that all pushes of the block have landed, and waits for those of all peers. Called by all threads; they may read what
// the peers pushed if the result is true. Else the group has failed.
__device__ bool meet(const Parameters& p, const Block& block, FlagKind kind) {
    const Group& g = p.group;
    __syncthreads();
    bool failed = false;
    if (threadIdx.x < g.ranks && threadIdx.x != g.rank) {
        const int peer = static_cast<int>(threadIdx.x);
        send_word(p, block, kind, peer);
        failed = !wait_for_word(p, block, kind, peer);
    }
    return !__syncthreads_or(failed);
}

// Returns the sum over ranks, in their order, of one vector, rounded to T. `source(rank)` returns its vector.
template <typename T, typename Source>
__device__ inline uint4 sum_of(const Parameters& p, Source source) {
    constexpr int n = elements_of_vector<T>, width = 4;
    float sum[n];
    for (int base = 0; base < p.group.ranks; base += width) {
        Vector<T> loaded[width];
#pragma unroll
        for (int k = 0; k < width; ++k) {
            if (base + k < p.group.ranks) loaded[k].line = source(base + k);
        }
#pragma unroll
        for (int k = 0; k < width; ++k) {
            if (base + k >= p.group.ranks) continue;
#pragma unroll
            for (int e = 0; e < n; ++e) {
                const float value = to_float(loaded[k].v[e]);
                sum[e] = base + k == 0 ? value : sum[e] + value;
            }
        }
    }
    Vector<T> result;
#pragma unroll
    for (int e = 0; e < n; ++e) from_float(p.divisor == 1.0f ? sum[e] : sum[e] / p.divisor, result.v[e]);
    return result.line;
}

}  // namespace
}  // namespace ub_overlap::cuda
