// Float8 numbers that kernels share. runtime/fp8/numerics.py has the same ones; a test holds them equal.
#pragma once

namespace ub_overlap {

// Smallest scale: the scale of a tensor or row of zeros. Its reciprocal is finite.
constexpr float least_scale = 0x1p-120f;
// Largest finite values of the formats.
constexpr float e4m3_max = 448.0f;
constexpr float e5m2_max = 57344.0f;

}  // namespace ub_overlap
