// Waits of kernels for the flags of peers: loads and stores of words, the deadline, and the failure record. For .cu files.
#pragma once

#include <cstdint>

#include "core/failure.h"
#include "cuda/state.h"

namespace ub_overlap::cuda {

__device__ inline uint64_t load_acquire(const uint64_t* at) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}
__device__ inline uint64_t load_relaxed(const uint64_t* at) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}
__device__ inline void store_relaxed(uint64_t* at, uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
__device__ inline void store_release(uint64_t* at, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
__device__ inline uint64_t now_ns() {
    uint64_t value;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
    return value;
}
__device__ inline uint32_t load_failed(const LocalState* local) {
    return *reinterpret_cast<const volatile uint32_t*>(&local->failed);
}
__device__ inline uint64_t* flag_words(SharedState* shared) {
    return reinterpret_cast<uint64_t*>(shared + 1);
}
__device__ inline uint32_t epoch_half(uint64_t word) {
    return static_cast<uint32_t>(word >> 32);
}
// Shows progress to the calls that wait for the group lock.
__device__ inline void update_heartbeat(const Group& g, uint64_t now) {
    *reinterpret_cast<volatile uint64_t*>(&g.local->heartbeat) = now;
}

// Returns the rank to blame when `peer` is late: one that waits for no rank, at the end of the waits that begin at `peer`.
__device__ inline int find_culprit(const Group& g, int peer) {
    uint64_t seen = 0, todo = 1ull << peer;
    while (todo != 0) {
        const int rank = __ffsll(static_cast<long long>(todo)) - 1;
        seen |= 1ull << rank;
        const uint64_t next = load_acquire(&g.shared[rank]->waiting);
        if (next == 0 && rank != g.rank) return rank;
        todo = (todo | next) & ~seen;
    }
    return peer;  // a cycle
}

__device__ inline FailureCode code_of(WaitOutcome outcome) {
    if (outcome == WaitOutcome::group_lock) return FailureCode::group_lock_timeout;
    return outcome == WaitOutcome::timeout ? FailureCode::peer_timeout : FailureCode::site_mismatch;
}

// Records the first failure for the host, and broadcasts it to all ranks. Later failures are ignored.
__device__ inline void fail(const Group& g, const WaitWord& w, WaitOutcome outcome, uint64_t expected, uint64_t seen,
                            uint64_t abort, uint64_t waited_ns) {
    if (atomicCAS(&g.local->failed, 0u, 1u) != 0) return;
    const int culprit = outcome == WaitOutcome::timeout ? find_culprit(g, w.source) : w.source;
    volatile WaitFailure* record = g.failure;
    record->kind = w.kind, record->source = w.source, record->index = w.index, record->culprit = culprit;
    record->expected = expected, record->seen = seen, record->abort = abort, record->waited_ns = waited_ns;
    __threadfence_system();
    record->outcome = static_cast<uint32_t>(outcome);
    __threadfence_system();
    if (outcome != WaitOutcome::aborted) {
        AbortWord a;
        a.code = static_cast<uint32_t>(code_of(outcome));
        a.reporter = g.rank, a.culprit = culprit, a.kind = w.kind, a.index = w.index, a.epoch = epoch_half(expected);
        abort = pack_abort(a);
        for (int r = 0; r < g.ranks; ++r) {
            if (load_acquire(&g.shared[r]->abort) == 0) store_release(&g.shared[r]->abort, abort);
        }
    }
}

// Spins on the flag `w` of this rank until `arrived(word)`, and returns the word, which is not 0. Returns 0 where the wait
// failed: by the abort of a peer, or by the deadline. Never traps. `expected`: the word of the call. `last_seen(word)`: the
// word of the peer that the failure record shows.
template <typename Arrived, typename LastSeen>
__device__ uint64_t spin_for_flag(const Group& g, const WaitWord& w, uint64_t expected, uint64_t timeout_ns, Arrived arrived,
                                  LastSeen last_seen) {
    SharedState* own = g.shared[g.rank];
    const uint64_t* flag = flag_words(own) + w.place;
    uint64_t seen = load_acquire(flag);
    if (arrived(seen)) return seen;
    if (load_failed(g.local)) return 0;
    const uint64_t begin = now_ns();
    auto* waiting = reinterpret_cast<unsigned long long*>(&own->waiting);
    const unsigned long long bit = 1ull << w.source;
    atomicOr(waiting, bit);
    for (uint32_t spin = 1;; ++spin) {
        seen = load_acquire(flag);
        if (arrived(seen)) break;
        if (spin % 8 == 0) {
            // Another thread that waited for the same rank may have cleared the bit.
            if ((*reinterpret_cast<const volatile unsigned long long*>(waiting) & bit) == 0) atomicOr(waiting, bit);
            const uint64_t abort = load_acquire(&own->abort), now = now_ns(), waited = now - begin;
            update_heartbeat(g, now);
            const bool late = waited > timeout_ns, failed = load_failed(g.local) != 0;
            if (abort != 0 || late || failed) {
                // An arrived flag still counts: a peer that failed later has sent all data of this call.
                seen = load_acquire(flag);
                if (arrived(seen)) break;
                if (!failed) {
                    fail(g, w, abort ? WaitOutcome::aborted : WaitOutcome::timeout, expected, last_seen(seen), abort, waited);
                }
                return 0;  // `waiting` stays: it shows the others which rank we waited for
            }
        }
        __nanosleep(spin < 64 ? 32 : 256);
    }
    atomicAnd(waiting, ~bit);
    return seen;
}

}  // namespace ub_overlap::cuda
