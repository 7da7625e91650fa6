// Flag words: how ranks tell each other that data has landed or has been read.
//
// A word is 64 bits in the memory of the rank that waits: epoch in the high half, site tag in the low half. One rank alone
// writes it, with release, after the data it stands for; its owner reads it with acquire, before it touches that data.
// Epochs count up and are compared modularly; words are never reset, but READY and READY2 of an all_to_all, by their waits.
// READY words of the CUDA executor differ: see cuda/state.h.
#pragma once

#include <atomic>
#include <cstdint>

#ifdef __CUDACC__
#define UB_OVERLAP_HOST_DEVICE __host__ __device__
#else
#define UB_OVERLAP_HOST_DEVICE
#endif

namespace ub_overlap {

using FlagWord = std::atomic<uint64_t>;
static_assert(FlagWord::is_always_lock_free, "flag words live in memory that processes share");

// In an all_to_all READY2 tells a source that the round before was copied out (runtime/schedule/builders/all_to_all.py).
// The last two are words of channels (core/point_to_point.h), which lie elsewhere.
enum class FlagKind : int32_t { ready = 0, done = 1, ready2 = 2, channel_ready = 3, channel_done = 4 };
constexpr int flag_kinds = 3;

// Arena slots, used in rotation: slot = epoch modulo slots.
constexpr int slots = 2;

// Slots behind those, one for each split collective that may be open at once: of compiled plans, then of eager handles. Each
// has memory, words and epochs of its own.
constexpr int split_slots = 12;

// Slots behind those, used in rotation by fused collectives (core/fused_collective.h). They share one memory.
constexpr int fused_slot = slots + split_slots;
constexpr int fused_slots = 2;
constexpr int all_slots = slots + split_slots + fused_slots;

// The memories of the slots behind the first ones: of each split slot, and of the fused slots together, which have half of it
// each.
constexpr int further_memories = split_slots + 1;
inline int further_memory(int slot) {
    return (slot < fused_slot ? slot : fused_slot) - slots;
}
inline int64_t fused_offset(int slot, int64_t memory_bytes) {
    return slot > fused_slot ? memory_bytes / fused_slots / 256 * 256 : 0;
}

// Pieces of a shard that can be signalled one by one: as many as options may ask for, even of a group of one rank. Proofs of
// more would take long (the square of the pieces of all ranks).
constexpr int max_pieces = 64;

inline const char* name_of(FlagKind kind) {
    constexpr const char* names[] = {"READY", "DONE", "READY2", "READY", "DONE"};
    return names[static_cast<int32_t>(kind)];
}

inline uint64_t flag_value(uint64_t epoch, uint32_t tag) {
    return (epoch << 32) | tag;
}
inline uint32_t epoch_of(uint64_t value) {
    return static_cast<uint32_t>(value >> 32);
}
inline uint32_t tag_of(uint64_t value) {
    return static_cast<uint32_t>(value);
}

// Whether epoch `seen` is `expected` or later. Correct while ranks are fewer than 2^31 calls apart.
inline bool reached(uint32_t seen, uint32_t expected) {
    return static_cast<int32_t>(seen - expected) >= 0;
}

// Place of a word among the flags of one rank: [kind][slot][source][index]. Words of one source lie together: one writer a
// line.
UB_OVERLAP_HOST_DEVICE inline int64_t flag_place(FlagKind kind, int slot, int source, int index, int ranks) {
    return ((static_cast<int64_t>(kind) * all_slots + slot) * ranks + source) * max_pieces + index;
}
inline int64_t flag_count(int ranks) {
    return static_cast<int64_t>(flag_kinds) * all_slots * ranks * max_pieces;
}

}  // namespace ub_overlap
