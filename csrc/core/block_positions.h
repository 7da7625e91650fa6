// Elements of several equal blocks under one number, for the threads of kernels: no division per element.
#pragma once

#include <cstdint>

#include "core/flags.h"

namespace ub_overlap {

// Divides numbers below 2^31 by a fixed divisor with a multiplication and a shift: x / d = x * ceil(2^p / d) >> p, where
// 2^(p - 31) is the smallest power of two that is not below d (Granlund and Montgomery, "Division by Invariant Integers").
class Divider {
  public:
    Divider() = default;  // the quotient is always 0
    // `divisor`: 1 to 2^31 - 1.
    explicit Divider(int64_t divisor) : shift_(31) {
        while ((int64_t{1} << (shift_ - 31)) < divisor) ++shift_;
        // p is at most 62, and the multiplier has 32 bits.
        multiplier_ = static_cast<uint32_t>(((uint64_t{1} << shift_) + static_cast<uint64_t>(divisor) - 1) /
                                            static_cast<uint64_t>(divisor));
    }
    UB_OVERLAP_HOST_DEVICE int64_t quotient(int64_t number) const {
        return static_cast<int64_t>((static_cast<uint64_t>(static_cast<uint32_t>(number)) * multiplier_) >> shift_);
    }

  private:
    uint32_t multiplier_ = 0, shift_ = 0;
};

// Numbers the elements of `blocks` blocks of `per_block` elements: number i is element i % per_block of block i / per_block.
struct BlockPositions {
    int64_t per_block = 0, total = 0;
    Divider divider;

    BlockPositions(int64_t blocks, int64_t each)
        : per_block(each), total(blocks * each), divider(blocks > 1 ? Divider(each) : Divider()) {}
    // Returns how many blocks can be numbered at a time: the divider takes numbers below 2^31. A single block needs no
    // division, so it may have any size.
    static int64_t blocks_at_once(int64_t each) { return each < 1 << 30 ? INT32_MAX / (each > 0 ? each : 1) : 1; }
    UB_OVERLAP_HOST_DEVICE int64_t block(int64_t number) const { return divider.quotient(number); }
    UB_OVERLAP_HOST_DEVICE int64_t within(int64_t number) const { return number - block(number) * per_block; }
};

}  // namespace ub_overlap
