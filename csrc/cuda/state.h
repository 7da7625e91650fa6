// What kernels and host share: the words in device memory by which ranks meet, and the arguments of the kernels that use them.
//
//     SharedState   symmetric memory, one a rank, followed by the rank's flag words (core/flags.h); peers write it
//     LocalState    this rank's own device memory: epochs, counted by the op's first kernel, so that a replayed graph counts
//     too WaitFailure   pinned host memory: what the first wait that failed saw
//
// A call's slot is fixed when it is issued (host) and its epoch when it runs (device), so eager calls and replays may mix: a
// push waits for DONE of the call that used the slot before, whichever that was. Signals copy `word[slot]`, which no other call
// changes before this one has ended.
#pragma once

#include <cstdint>

#include "core/flags.h"

namespace ub_overlap::cuda {

constexpr int max_ranks = 32;
constexpr int max_words = 32;  // flags that one launch waits for or writes: a warp

struct SharedState {
    uint64_t abort;    // 0, or packed by `pack_abort`: a rank has given up
    uint64_t waiting;  // 1 + the rank that this rank waits for, 0 while it waits for none
    uint64_t unused[30];
};

// Set in LocalState::begun while a call runs: calls of a group on several streams, replayed graphs among them, take turns.
constexpr uint64_t busy = 1ull << 32;

struct LocalState {
    uint64_t begun;          // low half: epoch of the last call begun
    uint64_t alive;          // globaltimer when a kernel of the call that has the turn was last seen at work
    uint32_t used[slots];    // epoch of the last call that used the slot
    uint32_t before[slots];  // epoch of the call that used it before that one, 0: none
    uint32_t failed;         // never cleared: a failed group is done with
    uint32_t leaving;        // blocks of the call's last kernel that have read all that they need
    uint64_t word[slots];    // flag value of the slot's call: the source of its signals
};

// turn: no peer was late, but the call that has the turn on this device does not go on.
enum class WaitOutcome : uint32_t { none = 0, timeout = 1, mismatch = 2, aborted = 3, turn = 4 };

struct WaitFailure {
    uint32_t outcome;  // stored last, with release
    uint32_t kind, source, index, culprit;
    uint64_t wanted, seen, abort, waited_ns;
};

// Everything of a group that a kernel needs; passed by value.
struct Group {
    int32_t rank, ranks;
    LocalState* local;
    WaitFailure* failure;
    SharedState* shared[max_ranks];
};

struct WaitWord {
    uint32_t place;  // among the flag words of this rank
    uint16_t source, index;
    uint8_t kind, past;  // past: wait for the call that used the slot before, not for this one
};

struct SignalWord {
    uint32_t place;  // among the flag words of `rank`
    int32_t rank;
};

template <typename Word>
struct WordList {
    int32_t count = 0;
    Word words[max_words];
};
using WaitList = WordList<WaitWord>;
using SignalList = WordList<SignalWord>;

// Outputs that a failed call fills with NaN: a byte of ones repeated is one in every type we have.
struct PoisonList {
    int32_t count = 0;
    struct {
        char* data;
        int64_t bytes;
    } parts[16];
};

struct AbortWord {
    uint32_t code = 0, reporter = 0, culprit = 0, kind = 0, index = 0, epoch = 0;
};

#ifdef __CUDACC__
#define UB_OVERLAP_HOST_DEVICE __host__ __device__
#else
#define UB_OVERLAP_HOST_DEVICE
#endif

UB_OVERLAP_HOST_DEVICE inline uint64_t pack_abort(const AbortWord& a) {
    return static_cast<uint64_t>(a.code & 15) | static_cast<uint64_t>(a.reporter & 255) << 4 |
           static_cast<uint64_t>(a.culprit & 255) << 12 | static_cast<uint64_t>(a.kind & 15) << 20 |
           static_cast<uint64_t>(a.index & 255) << 24 | static_cast<uint64_t>(a.epoch) << 32;
}
inline AbortWord unpack_abort(uint64_t w) {
    AbortWord a;
    a.code = w & 15, a.reporter = w >> 4 & 255, a.culprit = w >> 12 & 255, a.kind = w >> 20 & 15, a.index = w >> 24 & 255;
    a.epoch = static_cast<uint32_t>(w >> 32);
    return a;
}

}  // namespace ub_overlap::cuda
