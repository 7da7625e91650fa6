// Shared by the kernels that stream through memory: element types, wide loads, and spans. For .cu files.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cstdint>

#include "core/block_positions.h"
#include "core/float8.h"
#include "cuda/launch.h"

namespace ub_overlap::cuda {

// Loads number `at` of the vectors behind `base`. Plain, although the data is read once: with loads that the cache evicts
// first, copies are 3% slower on an H200 and sums 5%.
template <typename T>
__device__ inline T load_vector(const char* base, int64_t at) {
    return reinterpret_cast<const T*>(base)[at];
}

__device__ inline float to_float(float v) {
    return v;
}
__device__ inline float to_float(__nv_bfloat16 v) {
    return __bfloat162float(v);
}
__device__ inline float to_float(__half v) {
    return __half2float(v);
}
__device__ inline void from_float(float v, float& to) {
    to = v;
}
__device__ inline void from_float(float v, __nv_bfloat16& to) {
    to = __float2bfloat16_rn(v);
}
__device__ inline void from_float(float v, __half& to) {
    to = __float2half_rn(v);
}

// Elements that a thread casts to float8 at a time: they fill a line of 16 bytes.
constexpr int per_thread = 16;

// `per_thread` elements as whole lines of 16 bytes.
template <typename T>
union Elements {
    static constexpr int lines = per_thread * static_cast<int>(sizeof(T)) / 16;
    uint4 line[lines];
    T v[per_thread];
};

template <typename T>
__device__ inline Elements<T> load_elements(const char* base, int64_t at) {
    Elements<T> loaded;
#pragma unroll
    for (int i = 0; i < Elements<T>::lines; ++i) {
        loaded.line[i] = __ldcs(reinterpret_cast<const uint4*>(base) + at * Elements<T>::lines + i);
    }
    return loaded;
}

// Rounds `per_thread` numbers to a line of 16 bytes. `value(e)`: number e, divided by its scale.
template <__nv_fp8_interpretation_t format, typename Value>
__device__ inline uint4 float8_line(Value value) {
    union {
        uint4 line;
        __nv_fp8x2_storage_t pair[per_thread / 2];
    } rounded;
#pragma unroll
    for (int e = 0; e < per_thread; e += 2) {
        rounded.pair[e / 2] = __nv_cvt_float2_to_fp8x2(make_float2(value(e), value(e + 1)), __NV_SATFINITE, format);
    }
    return rounded.line;
}

constexpr int vector_bytes(int bytes) {
    return bytes > 16 ? 16 : bytes;
}

template <typename T, int n>
struct alignas(vector_bytes(sizeof(T) * n)) Pack {
    T v[n];
};

// Calls `body` with a value of the C++ type of `type`.
template <typename Body>
void with_type(DType type, Body body) {
    switch (type) {
        case DType::f32:
            return body(float{});
        case DType::bf16:
            return body(__nv_bfloat16{});
        case DType::f16:
            return body(__half{});
        case DType::e4m3:
        case DType::e5m2:
            break;  // fp8_wire.cu has these, with their scales
    }
}

// Calls `body(first block, blocks)` for as many blocks at a time as BlockPositions can number.
template <typename Body>
void for_numbered_blocks(int64_t blocks, int64_t per_block, Body body) {
    const int64_t at_once = BlockPositions::blocks_at_once(per_block);
    for (int64_t first = 0; first < blocks; first += at_once) body(first, std::min(at_once, blocks - first));
}

// ORs the addresses and strides that must be multiples of the vector's size.
inline uint64_t low_bits(const Span& span) {
    return reinterpret_cast<uint64_t>(span.data) | (span.blocks > 1 ? static_cast<uint64_t>(span.stride) : 0);
}

// Returns contiguous blocks as one block; other spans unchanged.
inline Span merge_blocks(Span span) {
    if (span.stride != span.bytes && span.blocks != 1) return span;
    span.bytes *= span.blocks;
    span.blocks = 1, span.stride = span.bytes;
    return span;
}

}  // namespace ub_overlap::cuda
