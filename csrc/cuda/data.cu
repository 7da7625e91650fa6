// Kernels of the whole device, bound by memory bandwidth: local copies, and sums of what has arrived.
//
// A span is cut into tiles of neighboring vectors of 16 bytes of one of its blocks, one block of threads each. A thread first
// issues the loads of its part of a tile, up to 8. With 4 blocks of 256 threads on a multiprocessor that is 128 KiB in flight;
// memory of 4.8 TB/s with a latency of 0.8 us needs 29 KiB on each of 132 multiprocessors. The rest covers the phases that
// convert and store. Spans of blocks that are narrower than a few tiles are handled vector by vector.
//
// Local copies stay kernels. The driver's copy of 128 MiB reaches 4.1 TB/s alone on an H200, but it costs a matmul that runs
// at the same time as much as it takes itself (62 us of 66). On COMPUTE it would also need the copy engine's events.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/tiles.h"
#include "cuda/elements.h"

namespace ub_overlap::cuda {
namespace {

constexpr int threads = 256;
constexpr int resident = 4;  // blocks on a multiprocessor
constexpr int copy_unroll = 8;
constexpr int reduce_unroll = 4;  // of at most two sources
template <int sources>
constexpr int unroll_of = sources <= 2 ? reduce_unroll : 8 / sources;

__global__ void __launch_bounds__(threads, resident)
    copy_kernel(const char* src, int64_t src_stride, char* dst, int64_t dst_stride, Tiles tiles) {
    for (int64_t tile = blockIdx.x; tile < tiles.total; tile += gridDim.x) {
        const TilePart part(tiles, tile, threadIdx.x);
        const char* from = src + part.block * src_stride;
        uint4 loaded[copy_unroll];
#pragma unroll
        for (int u = 0; u < copy_unroll; ++u) {
            if (part.at + u * threads < part.end) loaded[u] = load_streaming<uint4>(from, part.at + u * threads);
        }
        uint4* to = reinterpret_cast<uint4*>(dst + part.block * dst_stride);
#pragma unroll
        for (int u = 0; u < copy_unroll; ++u) {
            if (part.at + u * threads < part.end) to[part.at + u * threads] = loaded[u];
        }
    }
}

template <typename Vec>
__global__ void __launch_bounds__(threads, resident)
    narrow_copy_kernel(const char* src, int64_t src_stride, char* dst, int64_t dst_stride, BlockPositions positions) {
    constexpr int unroll = 4;
    const int64_t step = static_cast<int64_t>(gridDim.x) * threads;
    for (int64_t first = blockIdx.x * int64_t{threads} + threadIdx.x; first < positions.total; first += step * unroll) {
        Vec loaded[unroll];
#pragma unroll
        for (int u = 0; u < unroll; ++u) {
            const int64_t item = first + u * step;
            if (item >= positions.total) continue;
            loaded[u] = load_streaming<Vec>(src + positions.block(item) * src_stride, positions.within(item));
        }
#pragma unroll
        for (int u = 0; u < unroll; ++u) {
            const int64_t item = first + u * step;
            if (item >= positions.total) continue;
            reinterpret_cast<Vec*>(dst + positions.block(item) * dst_stride)[positions.within(item)] = loaded[u];
        }
    }
}

struct Sources {
    int32_t count;
    const char* data[max_ranks];
    int64_t stride[max_ranks];
};

// Elements of 16 bytes, or a single one. Loaded bits stay whole until they are added: converted ones need twice the registers.
template <typename S, int n>
using Loaded = std::conditional_t<n == 1, S, uint4>;

__device__ inline void to_floats(const uint4& bits, float (&value)[4], float) {
    value[0] = __uint_as_float(bits.x), value[1] = __uint_as_float(bits.y);
    value[2] = __uint_as_float(bits.z), value[3] = __uint_as_float(bits.w);
}
__device__ inline void to_floats(const uint4& bits, float (&value)[8], __nv_bfloat16) {
    const uint32_t pair[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        value[2 * i] = __uint_as_float(pair[i] << 16), value[2 * i + 1] = __uint_as_float(pair[i] & 0xffff0000u);
    }
}
__device__ inline void to_floats(const uint4& bits, float (&value)[8], __half) {
    const uint32_t pair[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&pair[i]));
        value[2 * i] = two.x, value[2 * i + 1] = two.y;
    }
}
template <typename S>
__device__ inline void to_floats(S single, float (&value)[1], S) {
    value[0] = to_float(single);
}

template <typename D, int n>
__device__ inline void store_sum(char* dst, int64_t at, const float (&sum)[n], float divisor) {
    Pack<D, n> out;
#pragma unroll
    for (int e = 0; e < n; ++e) from_float(divisor == 1.0f ? sum[e] : sum[e] / divisor, out.v[e]);
    reinterpret_cast<Pack<D, n>*>(dst)[at] = out;
}

// Sums of `count` sources, added up vector by vector, so that few registers hold sums.
template <typename S, typename D, int count>
__global__ void __launch_bounds__(threads, resident)
    reduce_kernel(Sources sources, char* dst, int64_t dst_stride, Tiles tiles, float divisor) {
    constexpr int n = 16 / static_cast<int>(sizeof(S)), unroll = unroll_of<count>;
    wait_for_predecessor();
    for (int64_t tile = blockIdx.x; tile < tiles.total; tile += gridDim.x) {
        const TilePart part(tiles, tile, threadIdx.x);
        uint4 loaded[count][unroll];
#pragma unroll
        for (int k = 0; k < count; ++k) {
            const char* from = sources.data[k] + part.block * sources.stride[k];
#pragma unroll
            for (int u = 0; u < unroll; ++u) {
                if (part.at + u * threads < part.end) loaded[k][u] = load_streaming<uint4>(from, part.at + u * threads);
            }
        }
        char* to = dst + part.block * dst_stride;
#pragma unroll
        for (int u = 0; u < unroll; ++u) {
            if (part.at + u * threads >= part.end) continue;
            float sum[n];
            to_floats(loaded[0][u], sum, S{});
#pragma unroll
            for (int k = 1; k < count; ++k) {
                float value[n];
                to_floats(loaded[k][u], value, S{});
#pragma unroll
                for (int e = 0; e < n; ++e) sum[e] += value[e];
            }
            store_sum<D, n>(to, part.at + u * threads, sum, divisor);
        }
    }
}

// Sums of any number of sources, and of narrow blocks. `width` loads are in flight.
template <typename S, typename D, int n, int width>
__global__ void __launch_bounds__(threads, resident)
    reduce_many_kernel(Sources sources, char* dst, int64_t dst_stride, BlockPositions positions, float divisor) {
    wait_for_predecessor();
    const int64_t step = static_cast<int64_t>(gridDim.x) * threads;
    for (int64_t item = blockIdx.x * int64_t{threads} + threadIdx.x; item < positions.total; item += step) {
        const int64_t block = positions.block(item), at = positions.within(item);
        float sum[n];
        for (int base = 0; base < sources.count; base += width) {
            Loaded<S, n> loaded[width];
#pragma unroll
            for (int k = 0; k < width; ++k) {
                if (base + k >= sources.count) continue;
                loaded[k] = load_streaming<Loaded<S, n>>(sources.data[base + k] + block * sources.stride[base + k], at);
            }
#pragma unroll
            for (int k = 0; k < width; ++k) {
                if (base + k >= sources.count) continue;
                float value[n];
                to_floats(loaded[k], value, S{});
#pragma unroll
                for (int e = 0; e < n; ++e) sum[e] = base + k == 0 ? value[e] : sum[e] + value[e];
            }
        }
        store_sum<D, n>(dst + block * dst_stride, at, sum, divisor);
    }
}

struct ReduceKernel {
    void (*kernel)(Sources, char*, int64_t, Tiles, float) = nullptr;
    int unroll = 1;
};
using NarrowReduceKernel = void (*)(Sources, char*, int64_t, BlockPositions, float);

// Returns the kernel of this number of sources, if there is one.
template <typename S, typename D>
ReduceKernel reduce_for(int sources) {
    switch (sources) {
        case 1:
            return {&reduce_kernel<S, D, 1>, unroll_of<1>};
        case 2:
            return {&reduce_kernel<S, D, 2>, unroll_of<2>};
        case 4:
            return {&reduce_kernel<S, D, 4>, unroll_of<4>};
        case 8:
            return {&reduce_kernel<S, D, 8>, unroll_of<8>};
        default:
            return {};
    }
}

// Returns the kernel with accesses of 16 bytes if the addresses allow it (`vectors`), else of single elements.
template <typename S, typename D>
NarrowReduceKernel narrow_reduce_for(bool vectors) {
    return vectors ? &reduce_many_kernel<S, D, 16 / static_cast<int>(sizeof(S)), 4> : &reduce_many_kernel<S, D, 1, 4>;
}

template <typename S, typename D>
void load_reduce() {
    for (const int sources : {1, 2, 4, 8}) load(reduce_for<S, D>(sources).kernel, threads);
    for (const bool vectors : {false, true}) load(narrow_reduce_for<S, D>(vectors), threads);
}

template <typename Vec>
void narrow_copy(const Span& src, const Span& dst, cudaStream_t stream) {
    const int64_t per_block = src.bytes / static_cast<int64_t>(sizeof(Vec));
    for_numbered_blocks(src.blocks, per_block, [&](int64_t first, int64_t blocks) {
        const BlockPositions positions(blocks, per_block);
        const auto kernel = &narrow_copy_kernel<Vec>;
        launch(kernel, blocks_for(kernel, positions.total, threads), threads, false, stream, "launch a local copy",
               src.data + first * src.stride, src.stride, dst.data + first * dst.stride, dst.stride, positions);
    });
}

}  // namespace

void preload_data() {
    load(&copy_kernel, threads);
    load(&narrow_copy_kernel<uint4>, threads), load(&narrow_copy_kernel<uint2>, threads);
    load(&narrow_copy_kernel<uint32_t>, threads), load(&narrow_copy_kernel<uint16_t>, threads);
    load(&narrow_copy_kernel<uint8_t>, threads);
    for (DType from : {DType::f32, DType::bf16, DType::f16}) {
        for (DType to : {DType::f32, DType::bf16, DType::f16}) {
            with_type(from, [&](auto s) { with_type(to, [&](auto d) { load_reduce<decltype(s), decltype(d)>(); }); });
        }
    }
}

void launch_copy(const Span& from, const Span& to, cudaStream_t stream) {
    Span src = from, dst = to;
    if (src.bytes == 0 || src.blocks == 0) return;
    if (merge_blocks(src).blocks == 1 && merge_blocks(dst).blocks == 1) src = merge_blocks(src), dst = merge_blocks(dst);
    const uint64_t bits = low_bits(src) | low_bits(dst) | static_cast<uint64_t>(src.bytes);
    const Tiles tiles(src.blocks, src.bytes / 16, threads, copy_unroll, resident_blocks(&copy_kernel, threads));
    if (bits % 16 == 0 && tiles.are_full()) {
        launch(&copy_kernel, blocks_for(&copy_kernel, tiles.total * threads, threads), threads, false, stream,
               "launch a local copy", src.data, src.stride, dst.data, dst.stride, tiles);
    } else if (bits % 16 == 0) {
        narrow_copy<uint4>(src, dst, stream);
    } else if (bits % 8 == 0) {
        narrow_copy<uint2>(src, dst, stream);
    } else if (bits % 4 == 0) {
        narrow_copy<uint32_t>(src, dst, stream);
    } else if (bits % 2 == 0) {
        narrow_copy<uint16_t>(src, dst, stream);
    } else {
        narrow_copy<uint8_t>(src, dst, stream);
    }
}

void launch_reduce(const std::vector<Source>& sources, const Span& to, DType dst_type, float divisor, bool early,
                   cudaStream_t stream) {
    Span dst = to;
    if (dst.bytes == 0 || dst.blocks == 0 || sources.empty()) return;
    for (const Source& source : sources) {
        if (source.scales.data) return launch_reduce_scaled(sources, to, dst_type, divisor, early, stream);
    }
    const DType source_type = sources[0].type;
    bool flat = merge_blocks(dst).blocks == 1;
    for (const Source& source : sources) flat = flat && merge_blocks(source.data).blocks == 1;
    if (flat) dst = merge_blocks(dst);
    Sources list{static_cast<int32_t>(sources.size()), {}, {}};
    uint64_t source_bits = 0;
    for (size_t i = 0; i < sources.size(); ++i) {
        const Span source = flat ? merge_blocks(sources[i].data) : sources[i].data;
        list.data[i] = source.data, list.stride[i] = source.stride;
        source_bits |= low_bits(source);
    }
    const int64_t count = dst.bytes / size_of(dst_type), per_vector = 16 / size_of(source_type);
    const uint64_t dst_vector = static_cast<uint64_t>(vector_bytes(static_cast<int>(per_vector * size_of(dst_type))));
    const bool vectors = count % per_vector == 0 && source_bits % 16 == 0 && low_bits(dst) % dst_vector == 0;
    const int64_t per_block = vectors ? count / per_vector : count;
    with_type(source_type, [&](auto s) {
        with_type(dst_type, [&](auto d) {
            using S = decltype(s);
            using D = decltype(d);
            if (const ReduceKernel reduce = reduce_for<S, D>(list.count); vectors && reduce.kernel) {
                const Tiles tiles(dst.blocks, per_block, threads, reduce.unroll, resident_blocks(reduce.kernel, threads));
                if (tiles.are_full()) {
                    launch(reduce.kernel, blocks_for(reduce.kernel, tiles.total * threads, threads), threads, early, stream,
                           "launch a reduction", list, dst.data, dst.stride, tiles, divisor);
                    return;
                }
            }
            const NarrowReduceKernel narrow = narrow_reduce_for<S, D>(vectors);
            for_numbered_blocks(dst.blocks, per_block, [&](int64_t first, int64_t blocks) {
                const BlockPositions positions(blocks, per_block);
                Sources part = list;
                for (int i = 0; i < list.count; ++i) part.data[i] += first * list.stride[i];
                launch(narrow, blocks_for(narrow, positions.total, threads), threads, early, stream, "launch a reduction", part,
                       dst.data + first * dst.stride, dst.stride, positions, divisor);
            });
        });
    });
}

}  // namespace ub_overlap::cuda
