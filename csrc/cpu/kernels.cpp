#include "cpu/kernels.h"

#include <algorithm>
#include <cstring>

namespace ub_overlap {
namespace {

// Conversions without branches, so that the loops below become vector code. No torch headers here, hence written out.
inline uint32_t bits_of(float f) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    return u;
}
inline float float_of(uint32_t u) {
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}

struct F32 {
    using Raw = float;
    static float load(float v) { return v; }
    static float store(float v) { return v; }
};

struct BF16 {
    using Raw = uint16_t;
    static float load(uint16_t v) { return float_of(static_cast<uint32_t>(v) << 16); }
    static uint16_t store(float v) {  // to nearest, ties to even; NaN stays NaN
        const uint32_t u = bits_of(v), rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
        return static_cast<uint16_t>(v != v ? 0x7fc0 : rounded);
    }
};

struct F16 {
    using Raw = uint16_t;
    static float load(uint16_t v) {
        const uint32_t w = static_cast<uint32_t>(v) << 16, sign = w & 0x80000000u, twice = w + w;
        // Normal numbers: shift the exponent into place and rebias by a product. Subnormal: subtract the hidden one.
        const float normal = float_of((twice >> 4) + (0xe0u << 23)) * float_of(0x07800000u);
        const float subnormal = float_of((twice >> 17) | (126u << 23)) - 0.5f;
        return float_of(sign | bits_of(twice < (1u << 27) ? subnormal : normal));
    }
    static uint16_t store(float v) {
        const uint32_t w = bits_of(v), sign = w & 0x80000000u, twice = w + w;
        // Scaling up to infinity and back makes what is too large infinite; adding a power of two makes the FPU round.
        float base = (float_of(w & 0x7fffffffu) * float_of(0x77800000u)) * float_of(0x08800000u);
        uint32_t bias = twice & 0xff000000u;
        bias = bias < 0x71000000u ? 0x71000000u : bias;
        base = float_of((bias >> 1) + 0x07800000u) + base;
        const uint32_t u = bits_of(base), number = ((u >> 13) & 0x7c00u) + (u & 0x0fffu);
        return static_cast<uint16_t>((sign >> 16) | (twice > 0xff000000u ? 0x7e00u : number));
    }
};

constexpr int64_t tile = 1024;  // of fp32 sums: stays in L1

template <typename From>
void accumulate(const char* src, float* sum, int64_t count, bool first) {
    const auto* from = reinterpret_cast<const typename From::Raw*>(src);
    if (first) {
        for (int64_t i = 0; i < count; ++i) sum[i] = From::load(from[i]);
    } else {
        for (int64_t i = 0; i < count; ++i) sum[i] += From::load(from[i]);
    }
}

template <typename To>
void store(const float* sum, char* dst, int64_t count, float divisor) {
    auto* to = reinterpret_cast<typename To::Raw*>(dst);
    if (divisor == 1.0f) {
        for (int64_t i = 0; i < count; ++i) to[i] = To::store(sum[i]);
    } else {
        for (int64_t i = 0; i < count; ++i) to[i] = To::store(sum[i] / divisor);
    }
}

void accumulate(DType type, const char* src, float* sum, int64_t count, bool first) {
    switch (type) {
        case DType::f32:
            return accumulate<F32>(src, sum, count, first);
        case DType::bf16:
            return accumulate<BF16>(src, sum, count, first);
        case DType::f16:
            return accumulate<F16>(src, sum, count, first);
    }
}

void store(DType type, const float* sum, char* dst, int64_t count, float divisor) {
    switch (type) {
        case DType::f32:
            return store<F32>(sum, dst, count, divisor);
        case DType::bf16:
            return store<BF16>(sum, dst, count, divisor);
        case DType::f16:
            return store<F16>(sum, dst, count, divisor);
    }
}

}  // namespace

void copy_spans(const Span& src, const Span& dst) {
    if (src.bytes == 0) return;
    if (src.stride == src.bytes && dst.stride == dst.bytes) {
        std::memcpy(dst.data, src.data, static_cast<size_t>(src.bytes * src.blocks));
        return;
    }
    for (int64_t block = 0; block < src.blocks; ++block) {
        std::memcpy(dst.data + block * dst.stride, src.data + block * src.stride, static_cast<size_t>(src.bytes));
    }
}

void reduce_spans(const std::vector<Span>& sources, DType source_type, const Span& dst, DType dst_type, float divisor) {
    float sum[tile];
    const int64_t count = dst.bytes / size_of(dst_type);
    for (int64_t block = 0; block < dst.blocks; ++block) {
        for (int64_t at = 0; at < count; at += tile) {
            const int64_t some = std::min(tile, count - at);
            bool first = true;
            for (const Span& src : sources) {
                accumulate(source_type, src.data + block * src.stride + at * size_of(source_type), sum, some, first);
                first = false;
            }
            store(dst_type, sum, dst.data + block * dst.stride + at * size_of(dst_type), some, divisor);
        }
    }
}

void round_from_f32(const char* src, char* dst, int64_t count, DType type) {
    store(type, reinterpret_cast<const float*>(src), dst, count, 1.0f);
}

}  // namespace ub_overlap
