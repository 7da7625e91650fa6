#include "cpu/kernels.h"

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "core/float8.h"

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

// What each of the 256 numbers of a float8 type is.
std::array<float, 256> float8_numbers(int mantissa_bits, int bias, bool has_infinity) {
    std::array<float, 256> all{};
    const int scale = 1 << mantissa_bits, exponents = 128 / scale;
    for (int code = 0; code < 256; ++code) {
        const int exponent = (code & 127) / scale, mantissa = code & (scale - 1);
        float number = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits)
                                     : std::ldexp(static_cast<float>(scale + mantissa), exponent - bias - mantissa_bits);
        if (has_infinity && exponent == exponents - 1) number = mantissa ? NAN : INFINITY;
        if (!has_infinity && (code & 127) == 127) number = NAN;
        all[code] = code & 128 ? -number : number;
    }
    return all;
}

struct E4M3 {
    using Raw = uint8_t;
    static constexpr float most = e4m3_max;
    static float load(uint8_t v) {
        static const std::array<float, 256> numbers = float8_numbers(3, 7, false);
        return numbers[v];
    }
    static uint8_t store(float v) {  // to nearest, ties to even; too large: the largest; not finite: NaN
        const uint32_t u = bits_of(v), sign = u >> 24 & 0x80u, size = u & 0x7fffffffu;
        if (size >= 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
        const float positive = float_of(size);
        if (positive < 0.015625f) {  // subnormal: steps of 2^-9; eight of them are the smallest normal number
            return static_cast<uint8_t>(sign | static_cast<uint32_t>(std::nearbyint(positive * 512.0f)));
        }
        const uint32_t rounded = (size + 0x7ffffu + (size >> 20 & 1u)) >> 20;  // exponent and three bits
        return static_cast<uint8_t>(sign | std::min(rounded - (120u << 3), 0x7eu));
    }
};

struct E5M2 {
    using Raw = uint8_t;
    static float load(uint8_t v) {
        static const std::array<float, 256> numbers = float8_numbers(2, 15, true);
        return numbers[v];
    }
};

constexpr int64_t tile = 1024;  // of fp32 sums: stays in L1
static_assert(tile % scale_block == 0);

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

// Numbers with a scale for each scale_block of them.
void accumulate_scaled(const char* src, const float* scales, float* sum, int64_t count, bool first) {
    const auto* from = reinterpret_cast<const uint8_t*>(src);
    for (int64_t i = 0; i < count; ++i) {
        const float value = E4M3::load(from[i]) * scales[i / scale_block];
        sum[i] = first ? value : sum[i] + value;
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
        case DType::e4m3:
            return accumulate<E4M3>(src, sum, count, first);
        case DType::e5m2:
            return accumulate<E5M2>(src, sum, count, first);
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
        case DType::e4m3:
        case DType::e5m2:
            break;  // nothing is summed into float8
    }
}

}  // namespace

void copy_spans(const Span& src, const Span& dst) {
    if (src.bytes == 0 || src.data == dst.data) return;  // the input of an all_gather may be its place in the output
    if (src.stride == src.bytes && dst.stride == dst.bytes) {
        std::memcpy(dst.data, src.data, static_cast<size_t>(src.bytes * src.blocks));
        return;
    }
    for (int64_t block = 0; block < src.blocks; ++block) {
        std::memcpy(dst.data + block * dst.stride, src.data + block * src.stride, static_cast<size_t>(src.bytes));
    }
}

void order_rows(const OrderedRows& rows) {
    for (int64_t i = 0; i < rows.rows; ++i) {
        const int64_t row = rows.order[i] < 0 ? rows.order[i] + rows.received : rows.order[i];
        const auto behind =
            std::upper_bound(rows.pieces.begin(), rows.pieces.end(), row,
                             [](int64_t number, const OrderedRows::Piece& piece) { return number < piece.first; });
        const OrderedRows::Piece& piece = *(behind - 1);
        std::memcpy(rows.result + i * rows.row_bytes, piece.data + (row - piece.first) * rows.row_bytes,
                    static_cast<size_t>(rows.row_bytes));
    }
}

void reduce_spans(const std::vector<Source>& sources, const Span& dst, DType dst_type, float divisor) {
    float sum[tile];
    const int64_t count = dst.bytes / size_of(dst_type);
    for (int64_t block = 0; block < dst.blocks; ++block) {
        for (int64_t at = 0; at < count; at += tile) {
            const int64_t some = std::min(tile, count - at);
            bool first = true;
            for (const Source& src : sources) {
                const char* from = src.data.data + block * src.data.stride + at * size_of(src.type);
                if (src.scales.data) {
                    const char* scales = src.scales.data + block * src.scales.stride;
                    accumulate_scaled(from, reinterpret_cast<const float*>(scales) + at / scale_block, sum, some, first);
                } else {
                    accumulate(src.type, from, sum, some, first);
                }
                first = false;
            }
            store(dst_type, sum, dst.data + block * dst.stride + at * size_of(dst_type), some, divisor);
        }
    }
}

void round_for_wire(const Rounding& r, DType type) {
    const int64_t step = scale_block * size_of(type), segments = r.from.bytes / step;
    for (int64_t block = 0; block < r.from.blocks; ++block) {
        const char* from = r.from.data + block * r.from.stride;
        auto* to = reinterpret_cast<uint8_t*>(r.to.data + block * r.to.stride);
        auto* scales = reinterpret_cast<float*>(r.scales.data + block * r.scales.stride);
        for (int64_t segment = 0; segment < segments; ++segment) {
            float values[scale_block], most = 0.0f;
            accumulate(type, from + segment * step, values, scale_block, true);
            for (const float value : values) {
                const float size = std::fabs(value);
                most = size <= FLT_MAX ? std::max(most, size) : most;
            }
            // Not below the normal numbers, so that its inverse is finite.
            const float scale = std::max(most / E4M3::most, FLT_MIN), inverse = 1.0f / scale;
            scales[segment] = scale;
            for (int64_t i = 0; i < scale_block; ++i) to[segment * scale_block + i] = E4M3::store(values[i] * inverse);
        }
    }
}

void round_from_f32(const char* src, char* dst, int64_t count, DType type) {
    store(type, reinterpret_cast<const float*>(src), dst, count, 1.0f);
}

}  // namespace ub_overlap
