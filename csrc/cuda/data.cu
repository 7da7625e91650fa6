// Kernels of the whole device, bound by memory bandwidth: local copies, and sums of what has arrived.
#include <algorithm>
#include <cstdint>

#include "cuda/elements.h"

namespace ub_overlap::cuda {
namespace {

template <typename Vec>
__global__ void copy_kernel(const char* src, int64_t src_stride, char* dst, int64_t dst_stride, int64_t per_block,
                            int64_t total) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < total; i += step) {
        const int64_t block = i / per_block, at = i - block * per_block;
        reinterpret_cast<Vec*>(dst + block * dst_stride)[at] = reinterpret_cast<const Vec*>(src + block * src_stride)[at];
    }
}

template <typename Vec>
__global__ void __launch_bounds__(256) flat_copy_kernel(const char* src, char* dst, int64_t total) {
    constexpr int unroll = 4;
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t first = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; first < total; first += step * unroll) {
        Vec loaded[unroll];
#pragma unroll
        for (int u = 0; u < unroll; ++u) {
            if (first + u * step < total) loaded[u] = load_streaming<Vec>(src, first + u * step);
        }
#pragma unroll
        for (int u = 0; u < unroll; ++u) {
            if (first + u * step < total) reinterpret_cast<Vec*>(dst)[first + u * step] = loaded[u];
        }
    }
}

struct Sources {
    int32_t count;
    const char* data[max_ranks];
    int64_t stride[max_ranks];
};

// A thread has the loads of `width` sources of `unroll` elements in flight at a time, enough to saturate the memory. If all
// blocks are contiguous (`flat`) there is one block, and no division.
template <typename S, typename D, int n, int width, int unroll, bool flat>
__global__ void __launch_bounds__(256)
    reduce_kernel(Sources sources, char* dst, int64_t dst_stride, int64_t per_block, int64_t total, float divisor) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t first = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; first < total; first += step * unroll) {
        float sum[unroll][n];
        int64_t block[unroll], at[unroll];
#pragma unroll
        for (int u = 0; u < unroll; ++u) {
            const int64_t item = first + u * step;
            block[u] = flat ? 0 : item / per_block, at[u] = item - block[u] * per_block;
        }
        for (int base = 0; base < sources.count; base += width) {
            Pack<S, n> loaded[unroll][width];
#pragma unroll
            for (int u = 0; u < unroll; ++u) {
#pragma unroll
                for (int k = 0; k < width; ++k) {
                    if (base + k >= sources.count || first + u * step >= total) continue;
                    const char* from = sources.data[base + k] + (flat ? 0 : block[u] * sources.stride[base + k]);
                    loaded[u][k] = load_streaming<Pack<S, n>>(from, at[u]);
                }
            }
#pragma unroll
            for (int u = 0; u < unroll; ++u) {
#pragma unroll
                for (int k = 0; k < width; ++k) {
                    if (base + k >= sources.count) continue;
#pragma unroll
                    for (int e = 0; e < n; ++e) {
                        const float value = to_float(loaded[u][k].v[e]);
                        sum[u][e] = base + k == 0 ? value : sum[u][e] + value;
                    }
                }
            }
        }
#pragma unroll
        for (int u = 0; u < unroll; ++u) {
            if (first + u * step >= total) continue;
            Pack<D, n> out;
#pragma unroll
            for (int e = 0; e < n; ++e) from_float(divisor == 1.0f ? sum[u][e] : sum[u][e] / divisor, out.v[e]);
            reinterpret_cast<Pack<D, n>*>(dst + (flat ? 0 : block[u] * dst_stride))[at[u]] = out;
        }
    }
}

template <typename Vec>
void copy_as(const Span& src, const Span& dst, cudaStream_t stream) {
    const int64_t per_block = src.bytes / static_cast<int64_t>(sizeof(Vec)), total = per_block * src.blocks;
    if (src.blocks == 1) {
        flat_copy_kernel<Vec><<<blocks_for(total, 256), 256, 0, stream>>>(src.data, dst.data, total);
        return;
    }
    copy_kernel<Vec><<<blocks_for(total, 256), 256, 0, stream>>>(src.data, src.stride, dst.data, dst.stride, per_block, total);
}

using ReduceKernel = void (*)(Sources, char*, int64_t, int64_t, int64_t, float);

// Returns the kernel with accesses of 16 bytes if the addresses allow it (`vectors`), and for this number of sources.
template <typename S, typename D>
ReduceKernel reduce_for(bool vectors, bool flat, int sources) {
    constexpr int wide = 16 / static_cast<int>(sizeof(S));
    if (!vectors) return flat ? &reduce_kernel<S, D, 1, 4, 1, true> : &reduce_kernel<S, D, 1, 4, 1, false>;
    if (!flat) return &reduce_kernel<S, D, wide, 4, 1, false>;
    if (sources <= 2) return &reduce_kernel<S, D, wide, 2, 4, true>;
    return sources <= 4 ? &reduce_kernel<S, D, wide, 4, 2, true> : &reduce_kernel<S, D, wide, 8, 1, true>;
}

template <typename Vec>
void load_copy() {
    load(&copy_kernel<Vec>), load(&flat_copy_kernel<Vec>);
}

template <typename S, typename D>
void load_reduce() {
    for (const bool flat : {false, true}) {
        load(reduce_for<S, D>(false, flat, 1));
        for (const int sources : {2, 4, 8}) load(reduce_for<S, D>(true, flat, sources));
    }
}

}  // namespace

void preload_data() {
    load_copy<uint4>(), load_copy<uint2>(), load_copy<uint32_t>(), load_copy<uint16_t>(), load_copy<uint8_t>();
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
    if (bits % 16 == 0) {
        copy_as<uint4>(src, dst, stream);
    } else if (bits % 8 == 0) {
        copy_as<uint2>(src, dst, stream);
    } else if (bits % 4 == 0) {
        copy_as<uint32_t>(src, dst, stream);
    } else if (bits % 2 == 0) {
        copy_as<uint16_t>(src, dst, stream);
    } else {
        copy_as<uint8_t>(src, dst, stream);
    }
    check(cudaGetLastError(), "launch a local copy");
}

void launch_reduce(const std::vector<Source>& sources, const Span& to, DType dst_type, float divisor, cudaStream_t stream) {
    Span dst = to;
    if (dst.bytes == 0 || dst.blocks == 0 || sources.empty()) return;
    for (const Source& source : sources) {
        if (source.scales.data) return launch_reduce_scaled(sources, to, dst_type, divisor, stream);
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
    with_type(source_type, [&](auto s) {
        with_type(dst_type, [&](auto d) {
            using S = decltype(s);
            using D = decltype(d);
            constexpr int wide = 16 / static_cast<int>(sizeof(S));
            const int64_t per_block = vectors ? count / wide : count, total = per_block * dst.blocks;
            const ReduceKernel kernel = reduce_for<S, D>(vectors, dst.blocks == 1, list.count);
            kernel<<<blocks_for(total, 256), 256, 0, stream>>>(list, dst.data, dst.stride, per_block, total, divisor);
        });
    });
    check(cudaGetLastError(), "launch a reduction");
}

}  // namespace ub_overlap::cuda
