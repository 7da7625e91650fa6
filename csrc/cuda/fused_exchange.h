// How a block of a fused collective meets its like at the peers: its lock and epoch, pushes, flags, and sums over ranks.
//
// The order of memory: all threads push to a region, the block meets at a barrier, then one thread per peer releases the flag
// at system scope, which is cumulative over the barrier. The peer's thread acquires it at system scope, and its block meets at
// a barrier before it reads. Packets need no such order (fused_packets.h). Their READY is relaxed: reads of the epoch
// before have returned by then, as their values were used in front of the barrier before the unlock.
#pragma once

#include <type_traits>

#include "cuda/fused_call.h"

namespace ub_overlap::cuda {
namespace {

// Not 0: a thread of the block has given up packets of this call, and the others wait for theirs no longer.
__device__ inline volatile uint32_t& given_up() {
    __shared__ uint32_t flag;
    return *const_cast<volatile uint32_t*>(&flag);
}

// Takes the block's lock and counts its epoch. Returns the call's word, 0 where the group has failed. Run by one thread.
__device__ uint64_t begin(const Parameters& p) {
    const Group& g = p.group;
    uint64_t* state = &g.local->fused[blockIdx.x];
    // Relaxed: what depends on the lock also depends on the epoch, and loads on the way need not wait.
    const auto lock = [state] {
        uint64_t old;
        asm volatile("atom.relaxed.gpu.global.or.b64 %0, [%1], %2;" : "=l"(old) : "l"(state), "l"(fused_lock) : "memory");
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

// Lets the next kernel use the block. Run by one thread, behind a barrier. The lock of a failed block stays: its epoch has not
// ended at the peers, and a kernel that finds it taken sees the failure.
__device__ void end(const Parameters& p, uint64_t word) {
    uint64_t* state = &p.group.local->fused[blockIdx.x];
    const uint64_t epoch = epoch_half(word);
    if (p.in_packets) {
        // A release would wait until all stores are performed, also those at peers. The next kernel needs only that the
        // reads of packets have returned, and they have: the block has used the values in front of the barrier.
        asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(state), "l"(epoch) : "memory");
    } else {
        asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(state), "l"(epoch) : "memory");
    }
}

// Calls `store(i, load(i))` for each vector i < size, `width` loads of a thread at a time.
template <int width = 4, typename Load, typename Store>
__device__ inline void for_vectors(int32_t size, Load load, Store store) {
    const auto step = static_cast<int32_t>(blockDim.x);
    for (auto base = static_cast<int32_t>(threadIdx.x); base < size; base += width * step) {
        uint4 loaded[width];
#pragma unroll
        for (int k = 0; k < width; ++k) {
            if (base + k * step < size) loaded[k] = load(base + k * step);
        }
#pragma unroll
        for (int k = 0; k < width; ++k) {
            if (base + k * step < size) store(base + k * step, loaded[k]);
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
    uint64_t* at =
        flag_words(g.shared[peer]) + flag_place(kind, slot_of(block.word), g.rank, static_cast<int>(blockIdx.x), g.ranks);
    if (releases) {
        store_release(at, block.word);
    } else {
        store_relaxed(at, block.word);
    }
}

// Whether the word `seen` is of the call of `word`, or of a later one.
__device__ inline bool has_arrived(uint64_t seen, uint64_t word) {
    return seen != 0 && static_cast<int32_t>(epoch_half(seen) - epoch_half(word)) >= 0;
}

// Waits for the word of a peer. Returns whether it is that of this call; else the group has failed.
__device__ bool wait_for_word(const Parameters& p, const Block& block, FlagKind kind, int peer) {
    const Group& g = p.group;
    const WaitWord w = wait_word(p, block.word, kind, peer);
    const auto arrived = [word = block.word](uint64_t seen) { return has_arrived(seen, word); };
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

// Calls `body` with the number of peers whose vectors a thread loads at a time, as a constant.
template <int most, typename Body>
__device__ inline void with_width(const Group& g, Body body) {
    if (g.ranks == 2) {
        body(std::integral_constant<int, 1>());
    } else if (most <= 3 || g.ranks <= 4) {
        body(std::integral_constant<int, 3>());
    } else {
        body(std::integral_constant<int, most>());
    }
}

// The rank of peer number i < ranks - 1, in the order of ranks. The last one where i is larger.
__device__ inline int peer_rank(const Group& g, int i) {
    const int peer = i < g.ranks - 1 ? i : g.ranks - 2;
    return peer < g.rank ? peer : peer + 1;
}

// Returns the sum over ranks, in their order, of one vector, rounded to T. `own`: that of this rank. `load(first, vectors)`:
// loads those of the peers number first, first + 1, ...; beyond the last one any.
template <typename T, int most, EpilogueKind kind, typename Load>
__device__ inline uint4 sum_of(const Parameters& p, uint4 own, Load load) {
    constexpr int n = elements_of_vector<T>;
    const int peers = p.group.ranks - 1, rank = p.group.rank;
    Vector<T> mine;
    mine.line = own;
    float sum[n];
    const auto add = [&](const Vector<T>& vector, bool is_first) {
#pragma unroll
        for (int e = 0; e < n; ++e) {
            const float value = to_float(vector.v[e]);
            sum[e] = is_first ? value : sum[e] + value;
        }
    };
    with_width<most>(p.group, [&](auto number) {
        constexpr int width = decltype(number)::value;
        for (int first = 0; first < peers; first += width) {
            Vector<T> loaded[width];
            load(first, loaded);
#pragma unroll
            for (int k = 0; k < width; ++k) {
                if (first + k >= peers) break;
                if (first + k == rank) add(mine, rank == 0);
                add(loaded[k], first + k == 0 && rank != 0);
            }
        }
    });
    if (rank == peers) add(mine, false);
    if (kind == EpilogueKind::full && p.divisor != 1.0f) {
#pragma unroll
        for (int e = 0; e < n; ++e) sum[e] /= p.divisor;
    }
    Vector<T> result;
#pragma unroll
    for (int e = 0; e < n; ++e) from_float(sum[e], result.v[e]);
    return result.line;
}

// Loads what the peers number first, first + 1, ... have pushed. `at(rank)`: where that of a rank lies. `exact`: nothing twice
// where there are fewer; else the last one again, which takes no branch and fewer registers.
template <bool exact, int width, typename V, typename At>
__device__ inline void load_at_peers(const Parameters& p, int first, V (&loaded)[width], At at) {
#pragma unroll
    for (int k = 0; k < width; ++k) {
        if (!exact || first + k < p.group.ranks - 1) loaded[k].line = __ldcg(at(peer_rank(p.group, first + k)));
    }
}

// How many peers at most. Threads with several vectors have several loads under way as it is.
template <int per_thread>
constexpr int peers_at_once = per_thread == 1 ? 4 : 3;

}  // namespace
}  // namespace ub_overlap::cuda
