// Kernels of the float8 wire, bound by memory bandwidth: rounding what is sent, and summing what has arrived.
//
// A row has a multiple of 128 elements. Each segment of 128 has an fp32 scale, its amax over 448. A thread takes 16 elements:
// eight neighboring lanes are a segment, and each lane accesses its float8 numbers as 16 bytes.
#include <cuda_fp8.h>

#include <cfloat>

#include "cuda/elements.h"

namespace ub_overlap::cuda {
namespace {

constexpr int threads = 256;
constexpr int lanes_per_segment = scale_block / per_thread;
static_assert(wire_float8 == DType::e4m3 && 32 % lanes_per_segment == 0);

template <typename T>
__device__ inline void store_elements(char* base, int64_t at, const Elements<T>& elements) {
#pragma unroll
    for (int i = 0; i < Elements<T>::lines; ++i) {
        reinterpret_cast<uint4*>(base)[at * Elements<T>::lines + i] = elements.line[i];
    }
}

// All threads of a block stay together: lanes without an element join the shuffles with zeros.
template <typename S>
__global__ void __launch_bounds__(threads) round_kernel(const char* from, int64_t from_stride, char* to, int64_t to_stride,
                                                        char* scales, int64_t scales_stride, BlockPositions positions) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t first = blockIdx.x * static_cast<int64_t>(blockDim.x); first < positions.total; first += step) {
        const int64_t item = first + threadIdx.x;
        const bool live = item < positions.total;
        const int64_t block = positions.block(item), at = positions.within(item);
        float value[per_thread];
        float amax = 0.0f;
        if (live) {
            const Elements<S> loaded = load_elements<S>(from + block * from_stride, at);
#pragma unroll
            for (int e = 0; e < per_thread; ++e) {
                value[e] = to_float(loaded.v[e]);
                const float size = fabsf(value[e]);
                amax = size <= FLT_MAX ? fmaxf(amax, size) : amax;
            }
        }
#pragma unroll
        for (int lane = 1; lane < lanes_per_segment; lane *= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, lane));
        if (!live) continue;
        // At least the smallest normal number, so that its inverse is finite.
        const float scale = fmaxf(amax / e4m3_max, FLT_MIN), inverse = 1.0f / scale;
        // Not finite: NaN, as e4m3 has no infinity.
        reinterpret_cast<uint4*>(to + block * to_stride)[at] = float8_line<__NV_E4M3>(
            [&](int e) { return fabsf(value[e]) <= FLT_MAX ? value[e] * inverse : __int_as_float(0x7fffffff); });
        if (at % lanes_per_segment == 0) {
            reinterpret_cast<float*>(scales + block * scales_stride)[at / lanes_per_segment] = scale;
        }
    }
}

// Sources in their order. All are float8 with scales except `plain`, this rank's own, in its original type (-1: none).
struct ScaledSources {
    int32_t count, plain;
    const char* data[max_ranks];
    const char* scales[max_ranks];
    int64_t stride[max_ranks], scales_stride[max_ranks];
};

__device__ inline void unpack(const uint4& line, float scale, float (&value)[per_thread]) {
    const uint32_t words[4] = {line.x, line.y, line.z, line.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto pair = static_cast<__nv_fp8x2_storage_t>(words[w] >> (16 * half));
            const float2 two = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
            value[4 * w + 2 * half] = two.x * scale, value[4 * w + 2 * half + 1] = two.y * scale;
        }
    }
}

// A thread has the loads of `width` sources in flight at a time.
template <typename S, typename D, int width>
__global__ void __launch_bounds__(threads)
    reduce_scaled_kernel(ScaledSources sources, char* dst, int64_t dst_stride, BlockPositions positions, float divisor) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t item = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; item < positions.total; item += step) {
        const int64_t block = positions.block(item), at = positions.within(item);
        Elements<S> own{};
        if (sources.plain >= 0) {
            own = load_elements<S>(sources.data[sources.plain] + block * sources.stride[sources.plain], at);
        }
        float sum[per_thread] = {};
        for (int base = 0; base < sources.count; base += width) {
            uint4 line[width];
            float scale[width];
#pragma unroll
            for (int k = 0; k < width; ++k) {
                const int source = base + k;
                if (source >= sources.count || source == sources.plain) continue;
                line[k] = __ldcs(reinterpret_cast<const uint4*>(sources.data[source] + block * sources.stride[source]) + at);
                const char* scales = sources.scales[source] + block * sources.scales_stride[source];
                scale[k] = reinterpret_cast<const float*>(scales)[at / lanes_per_segment];
            }
#pragma unroll
            for (int k = 0; k < width; ++k) {
                const int source = base + k;
                if (source >= sources.count) continue;
                float value[per_thread];
                if (source == sources.plain) {
#pragma unroll
                    for (int e = 0; e < per_thread; ++e) value[e] = to_float(own.v[e]);
                } else {
                    unpack(line[k], scale[k], value);
                }
#pragma unroll
                for (int e = 0; e < per_thread; ++e) sum[e] = source == 0 ? value[e] : sum[e] + value[e];
            }
        }
        Elements<D> out;
#pragma unroll
        for (int e = 0; e < per_thread; ++e) from_float(divisor == 1.0f ? sum[e] : sum[e] / divisor, out.v[e]);
        store_elements<D>(dst + block * dst_stride, at, out);
    }
}

template <typename S, typename D>
auto reduce_scaled_for(int sources) {
    return sources <= 2   ? &reduce_scaled_kernel<S, D, 2>
           : sources <= 4 ? &reduce_scaled_kernel<S, D, 4>
                          : &reduce_scaled_kernel<S, D, 8>;
}

// Returns the groups of `per_thread` elements per block of a span. The ops ensure that blocks are whole segments.
int64_t groups_per_block(const Span& rounded) {
    if (rounded.bytes % scale_block != 0 || low_bits(rounded) % 16 != 0) {
        throw NamedError("UbOverlapError", {{"what", "a block of float8 numbers on the wire is not a multiple of a segment"},
                                            {"got", std::to_string(rounded.bytes) + " bytes"},
                                            {"fix", "report this as a bug"}});
    }
    return rounded.bytes / per_thread;
}

}  // namespace

void preload_fp8_wire() {
    for (DType from : {DType::f32, DType::bf16, DType::f16}) {
        with_type(from, [&](auto s) { load(&round_kernel<decltype(s)>, threads); });
        for (DType to : {DType::f32, DType::bf16, DType::f16}) {
            for (const int sources : {2, 4, 8}) {
                with_type(from, [&](auto s) {
                    with_type(to, [&](auto d) { load(reduce_scaled_for<decltype(s), decltype(d)>(sources), threads); });
                });
            }
        }
    }
}

void launch_round_for_wire(const Rounding& r, DType type, cudaStream_t stream) {
    if (r.from.bytes == 0 || r.from.blocks == 0) return;
    const int64_t per_block = groups_per_block(r.to);
    with_type(type, [&](auto s) {
        for_numbered_blocks(r.from.blocks, per_block, [&](int64_t first, int64_t blocks) {
            const BlockPositions positions(blocks, per_block);
            const auto kernel = &round_kernel<decltype(s)>;
            launch(kernel, blocks_for(kernel, positions.total, threads), threads, stream, "launch a rounding to float8",
                   r.from.data + first * r.from.stride, r.from.stride, r.to.data + first * r.to.stride, r.to.stride,
                   r.scales.data + first * r.scales.stride, r.scales.stride, positions);
        });
    });
}

void launch_reduce_scaled(const std::vector<Source>& sources, const Span& dst, DType dst_type, float divisor,
                          cudaStream_t stream) {
    ScaledSources list{static_cast<int32_t>(sources.size()), -1, {}, {}, {}, {}};
    DType plain_type = DType::f32;
    int64_t per_block = 0;
    for (size_t i = 0; i < sources.size(); ++i) {
        const Source& source = sources[i];
        list.data[i] = source.data.data, list.stride[i] = source.data.stride;
        list.scales[i] = source.scales.data, list.scales_stride[i] = source.scales.stride;
        if (source.scales.data) {
            per_block = groups_per_block(source.data);
        } else {
            list.plain = static_cast<int32_t>(i), plain_type = source.type;
        }
    }
    with_type(plain_type, [&](auto s) {
        with_type(dst_type, [&](auto d) {
            const auto kernel = reduce_scaled_for<decltype(s), decltype(d)>(list.count);
            for_numbered_blocks(dst.blocks, per_block, [&](int64_t first, int64_t blocks) {
                const BlockPositions positions(blocks, per_block);
                ScaledSources part = list;
                for (int i = 0; i < list.count; ++i) {
                    part.data[i] += first * list.stride[i];
                    if (part.scales[i]) part.scales[i] += first * list.scales_stride[i];
                }
                launch(kernel, blocks_for(kernel, positions.total, threads), threads, stream, "launch a reduction", part,
                       dst.data + first * dst.stride, dst.stride, positions, divisor);
            });
        });
    });
}

}  // namespace ub_overlap::cuda
