// How kernels cut a span of equal blocks into tiles, each for one block of threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/flags.h"

namespace ub_overlap {

// The tiles of `blocks` blocks of `per_block` vectors of 16 bytes. A tile lies within one block.
struct Tiles {
    int64_t per_block, vectors, tiles_per_block, total;  // vectors: of a tile

    // Makes tiles as large as `max_unroll` loads of a thread allow, but smaller ones where the device would not be filled.
    Tiles(int64_t blocks, int64_t block_vectors, int64_t threads, int64_t max_unroll, int64_t resident_blocks)
        : per_block(block_vectors) {
        const int64_t share = (blocks * per_block + resident_blocks * threads - 1) / (resident_blocks * threads);
        vectors = threads * std::clamp<int64_t>(share, 1, max_unroll);
        tiles_per_block = (per_block + vectors - 1) / vectors, total = blocks * tiles_per_block;
    }
    // Returns whether most threads have work in most tiles.
    bool are_full() const { return total == tiles_per_block || per_block >= 4 * vectors; }
};

// A thread's part of a tile: vectors `at`, `at + threads`, ... below `end` of a block.
struct TilePart {
    int64_t block, at, end;

    UB_OVERLAP_HOST_DEVICE TilePart(const Tiles& tiles, int64_t tile, int64_t thread) {
        block = tiles.total == tiles.tiles_per_block ? 0 : tile / tiles.tiles_per_block;
        const int64_t first = (tile - block * tiles.tiles_per_block) * tiles.vectors, last = first + tiles.vectors;
        at = first + thread, end = last < tiles.per_block ? last : tiles.per_block;
    }
};

}  // namespace ub_overlap
