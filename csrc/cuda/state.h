// Data that kernels and host share: the synchronization words in device memory, and the arguments of kernels that use them.
//
//     SharedState   symmetric memory, one per rank, followed by the rank's flag words (core/flags.h); peers write it
//     LocalState    this rank's own device memory: epochs. A call's first kernel counts them, so replayed graphs count too
//                   (blocks of fused collectives have epochs of their own)
//     WaitFailure   pinned host memory: the first wait that failed
//
// A call's slot is fixed when it is issued (host), its epoch when it runs (device). So eager calls and replays may mix: a push
// waits for DONE of the call that used the slot before, whichever that was.
//
// A split collective has a slot, an epoch and a lock of its own. Its start takes the lock and its finish releases it, and
// neither takes the group lock.
//
// DONE words hold (epoch, site tag), as on the CPU. READY words are written by cuStreamWriteValue64, the documented way to
// raise a flag behind a copy engine's data: it has a system-wide barrier and writes the word whole. Its value is fixed when
// the call is issued or captured, before the epoch is known. So a READY word is 0 or `ready_word(tag)`, and its owner clears
// it before it signals DONE to the word's writer. The checker's released rule proves that this is safe.
#pragma once

#include <cstdint>

#include "core/flags.h"
#include "core/fused_collective.h"

namespace ub_overlap::cuda {

constexpr int max_ranks = 32;
constexpr int max_words = 32;  // flags that one launch waits for or writes: one per lane of a warp

struct SharedState {
    uint64_t abort;    // 0, or packed by `pack_abort`: a rank has aborted
    uint64_t waiting;  // bits of the ranks that this rank waits for
    uint64_t early;    // bits of the ranks whose messages are waited for ahead of time: no work of this rank needs them yet
    uint64_t unused[29];
};

// The value of a raised READY or READY2 word. Not 0 for any tag.
UB_OVERLAP_HOST_DEVICE constexpr uint64_t ready_word(uint32_t tag) {
    return 1ull << 32 | tag;
}

// The group lock: this bit of LocalState::epoch_and_lock is set while a call of the group runs. It serializes calls on several
// streams, replayed graphs among them.
constexpr uint64_t group_lock = 1ull << 32;

// The lock of a block of fused collectives, in LocalState::fused: set while a kernel uses the block. As the group lock, it
// serializes calls on several streams.
constexpr uint64_t fused_lock = 1ull << 32;

struct LocalState {
    uint64_t epoch_and_lock;         // low half: epoch of the last call that began; `group_lock`
    uint64_t heartbeat;              // globaltimer of the last progress of the call that holds the group lock
    uint32_t last_epoch[all_slots];  // epoch of the last call that used the slot
    uint32_t is_open[split_slots];   // 1: a split collective is between start and finish
    uint32_t failed;                 // never cleared: a failed group is not used again
    uint64_t word[all_slots];        // epoch and site tag of the slot's call: the value of its DONE signals
    uint64_t fused[fused_blocks];    // low half: epoch of a block's last fused collective; `fused_lock`
};

// group_lock: no peer was late, but the call that holds the group lock on this device makes no progress.
enum class WaitOutcome : uint32_t { none = 0, timeout = 1, mismatch = 2, aborted = 3, group_lock = 4 };

struct WaitFailure {
    uint32_t outcome;  // stored last, with release
    uint32_t kind, source, index, culprit;
    uint64_t expected, seen, abort, waited_ns;
};

// The state of a group that kernels use; passed by value.
struct Group {
    int32_t rank, ranks;
    LocalState* local;
    WaitFailure* failure;
    SharedState* shared[max_ranks];
};

// The state of a peer whose words begin further behind, by those of `source` ranks. Words of one source lie together
// (flag_place): those that rank 0 writes there are those that the peer reads of `source`.
inline SharedState* words_of_source(SharedState* shared, int source) {
    return reinterpret_cast<SharedState*>(reinterpret_cast<uint64_t*>(shared) + int64_t{max_pieces} * source);
}

struct WaitWord {
    uint32_t place;  // index into the flag words of this rank
    uint16_t source, index;
    uint8_t kind, past;  // past: wait for the previous call on the slot, not for this call
    uint8_t clears;      // 1: the word is cleared once it has arrived, for the next round of an all_to_all
    uint32_t salt;       // the tag that arrives is the call's, with these bits changed
};

struct SignalWord {
    uint32_t place;  // index into the flag words of `rank`
    uint16_t rank;
    uint16_t done;  // 1: DONE, which also clears this rank's READY words of `rank`; 0: READY or READY2
};

template <typename Word>
struct WordList {
    int32_t count = 0;
    Word words[max_words];
};
using WaitList = WordList<WaitWord>;
using SignalList = WordList<SignalWord>;

// Outputs that a failed call fills with NaN. Bytes of ones are NaN in every type that we have.
struct PoisonList {
    int32_t count = 0;
    struct {
        char* data;
        int64_t bytes;
    } parts[16];
};

// A rank that is not of this group, in an AbortWord.
constexpr uint32_t no_member = 255;

struct AbortWord {
    uint32_t code = 0, reporter = 0, culprit = 0, kind = 0, index = 0, epoch = 0;
};

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
