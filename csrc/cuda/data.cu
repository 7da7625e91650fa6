// Kernels of the whole device, bound by memory bandwidth: local copies, and sums of what has arrived.
//
// A thread moves one vector of 16 bytes (of each source) and ends, so a grid has as many threads as the result has vectors. On
// an H200 such grids copy 128 MiB with 4.19 TB/s, as fast as the driver, and sum 2, 4 and 8 parts with 4.2 TB/s. Grids that
// loop over their work reach 3.6 to 3.9 TB/s, and more vectors per thread gain nothing (benchmarks/memory).
//
// Local copies stay kernels. The driver's copy of 128 MiB costs a matmul that runs at the same time as much as it takes itself
// (62 us of 66). On COMPUTE it would also need the copy engine's events.
#include <cstdint>
#include <type_traits>

#include "cuda/elements.h"

namespace ub_overlap::cuda {
namespace {

constexpr int threads = 256;

// Returns the blocks of a grid with a thread per item.
unsigned grid_of(int64_t items) {
    return static_cast<unsigned>((items + threads - 1) / threads);
}

template <typename Vec>
__global__ void __launch_bounds__(threads)
    copy_kernel(const char* src, int64_t src_stride, char* dst, int64_t dst_stride, BlockPositions positions) {
    const int64_t item = blockIdx.x * int64_t{threads} + threadIdx.x;
    if (item >= positions.total) return;
    const int64_t block = positions.block(item), at = positions.within(item);
    reinterpret_cast<Vec*>(dst + block * dst_stride)[at] = load_vector<Vec>(src + block * src_stride, at);
}

struct Pieces {
    int32_t count;
    int64_t first[max_ranks];
    const char* data[max_ranks];
};

// `positions`: of a block for each row of the result.
template <typename Vec>
__global__ void __launch_bounds__(threads) order_kernel(Pieces pieces, int64_t received, int64_t row_bytes,
                                                        const int64_t* order, char* dst, BlockPositions positions) {
    const int64_t item = blockIdx.x * int64_t{threads} + threadIdx.x;
    if (item >= positions.total) return;
    const int64_t block = positions.block(item);
    int64_t row = order[block];
    if (row < 0) row += received;
    // As torch's index does, which ends the process's use of the device.
    if (row < 0 || row >= received) __assert_fail("a received row has the number", __FILE__, __LINE__, "order_kernel");
    int32_t piece = 0;
    while (piece + 1 < pieces.count && row >= pieces.first[piece + 1]) ++piece;
    const char* data = pieces.data[piece] + (row - pieces.first[piece]) * row_bytes;
    reinterpret_cast<Vec*>(dst)[item] = load_vector<Vec>(data, positions.within(item));
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

// Sums of `count` sources.
template <typename S, typename D, int n, int count>
__global__ void __launch_bounds__(threads)
    reduce_kernel(Sources sources, char* dst, int64_t dst_stride, BlockPositions positions, float divisor) {
    const int64_t item = blockIdx.x * int64_t{threads} + threadIdx.x;
    if (item >= positions.total) return;
    const int64_t block = positions.block(item), at = positions.within(item);
    Loaded<S, n> loaded[count];
#pragma unroll
    for (int k = 0; k < count; ++k) {
        loaded[k] = load_vector<Loaded<S, n>>(sources.data[k] + block * sources.stride[k], at);
    }
    float sum[n];
    to_floats(loaded[0], sum, S{});
#pragma unroll
    for (int k = 1; k < count; ++k) {
        float value[n];
        to_floats(loaded[k], value, S{});
#pragma unroll
        for (int e = 0; e < n; ++e) sum[e] += value[e];
    }
    store_sum<D, n>(dst + block * dst_stride, at, sum, divisor);
}

// Sums of any number of sources. `width` loads are in flight.
template <typename S, typename D, int n, int width>
__global__ void __launch_bounds__(threads)
    reduce_many_kernel(Sources sources, char* dst, int64_t dst_stride, BlockPositions positions, float divisor) {
    const int64_t item = blockIdx.x * int64_t{threads} + threadIdx.x;
    if (item >= positions.total) return;
    const int64_t block = positions.block(item), at = positions.within(item);
    float sum[n];
    for (int base = 0; base < sources.count; base += width) {
        Loaded<S, n> loaded[width];
#pragma unroll
        for (int k = 0; k < width; ++k) {
            if (base + k >= sources.count) continue;
            loaded[k] = load_vector<Loaded<S, n>>(sources.data[base + k] + block * sources.stride[base + k], at);
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

using ReduceKernel = void (*)(Sources, char*, int64_t, BlockPositions, float);

template <typename S, typename D, int n>
ReduceKernel reduce_for(int sources) {
    switch (n == 1 ? 0 : sources) {
        case 1:
            return &reduce_kernel<S, D, n, 1>;
        case 2:
            return &reduce_kernel<S, D, n, 2>;
        case 4:
            return &reduce_kernel<S, D, n, 4>;
        case 8:
            return &reduce_kernel<S, D, n, 8>;
        default:
            return &reduce_many_kernel<S, D, n, 4>;
    }
}

// Returns the kernel with accesses of 16 bytes if the addresses allow it (`vectors`), else of single elements.
template <typename S, typename D>
ReduceKernel reduce_for(int sources, bool vectors) {
    return vectors ? reduce_for<S, D, 16 / static_cast<int>(sizeof(S))>(sources) : reduce_for<S, D, 1>(sources);
}

template <typename S, typename D>
void load_reduce() {
    for (const int sources : {1, 2, 3, 4, 8}) load(reduce_for<S, D>(sources, true), threads);
    load(reduce_for<S, D>(1, false), threads);
}

template <typename Vec>
void copy_vectors(const Span& src, const Span& dst, cudaStream_t stream) {
    const int64_t per_block = src.bytes / static_cast<int64_t>(sizeof(Vec));
    for_numbered_blocks(src.blocks, per_block, [&](int64_t first, int64_t blocks) {
        const BlockPositions positions(blocks, per_block);
        launch(&copy_kernel<Vec>, grid_of(positions.total), threads, stream, "launch a local copy",
               src.data + first * src.stride, src.stride, dst.data + first * dst.stride, dst.stride, positions);
    });
}

template <typename Vec>
void order_vectors(const OrderedRows& rows, const Pieces& pieces, cudaStream_t stream) {
    const int64_t per_row = rows.row_bytes / static_cast<int64_t>(sizeof(Vec));
    for_numbered_blocks(rows.rows, per_row, [&](int64_t first, int64_t blocks) {
        const BlockPositions positions(blocks, per_row);
        launch(&order_kernel<Vec>, grid_of(positions.total), threads, stream, "launch a copy of rows in an order", pieces,
               rows.received, rows.row_bytes, rows.order + first, rows.result + first * rows.row_bytes, positions);
    });
}

// Calls `body` with the widest vector whose size divides `bits`, the bits of addresses and sizes.
template <typename Body>
void with_vector(uint64_t bits, Body body) {
    if (bits % 16 == 0) {
        body(uint4{});
    } else if (bits % 8 == 0) {
        body(uint2{});
    } else if (bits % 4 == 0) {
        body(uint32_t{});
    } else if (bits % 2 == 0) {
        body(uint16_t{});
    } else {
        body(uint8_t{});
    }
}

template <typename Vec>
void load_copies() {
    load(&copy_kernel<Vec>, threads), load(&order_kernel<Vec>, threads);
}

}  // namespace

void preload_data() {
    load_copies<uint4>(), load_copies<uint2>(), load_copies<uint32_t>(), load_copies<uint16_t>(), load_copies<uint8_t>();
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
    with_vector(bits, [&](auto vector) { copy_vectors<decltype(vector)>(src, dst, stream); });
}

void launch_order(const OrderedRows& rows, cudaStream_t stream) {
    if (rows.rows == 0 || rows.row_bytes == 0) return;
    Pieces pieces{static_cast<int32_t>(rows.pieces.size()), {}, {}};
    uint64_t bits = reinterpret_cast<uint64_t>(rows.result) | static_cast<uint64_t>(rows.row_bytes);
    for (size_t i = 0; i < rows.pieces.size(); ++i) {
        pieces.first[i] = rows.pieces[i].first, pieces.data[i] = rows.pieces[i].data;
        bits |= reinterpret_cast<uint64_t>(rows.pieces[i].data);
    }
    with_vector(bits, [&](auto vector) { order_vectors<decltype(vector)>(rows, pieces, stream); });
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
    const int64_t per_block = vectors ? count / per_vector : count;
    with_type(source_type, [&](auto s) {
        with_type(dst_type, [&](auto d) {
            using S = decltype(s);
            using D = decltype(d);
            const ReduceKernel kernel = reduce_for<S, D>(list.count, vectors);
            for_numbered_blocks(dst.blocks, per_block, [&](int64_t first, int64_t blocks) {
                const BlockPositions positions(blocks, per_block);
                Sources part = list;
                for (int i = 0; i < list.count; ++i) part.data[i] += first * list.stride[i];
                launch(kernel, grid_of(positions.total), threads, stream, "launch a reduction", part,
                       dst.data + first * dst.stride, dst.stride, positions, divisor);
            });
        });
    });
}

}  // namespace ub_overlap::cuda
