// Casting to float8 by a scale that is known before: one pass over the elements casts them and measures them.
//
//   fp8_first   only where no history is (most[at] is 0): the largest finite magnitude -> first
//   fp8_cast    scale = max((most[at] * headroom, or else first) / F, 2^-120); x / scale, clamped to F, rounded; what is not
//               finite becomes NaN; noted = max(noted, the largest finite magnitude)
//
// Both are grids of 256 threads with a stride; 16 elements a thread at a time, and what is left of them one by one. Magnitudes
// are not negative, so their bits compare like integers: atomicMax. The host learns nothing, so calls may be captured.
#include <cfloat>

#include "cuda/elements.h"

namespace ub_overlap::cuda {
namespace {

constexpr int threads = 256;
constexpr float least_scale = 7.52316384526264e-37f;  // 2^-120

template <typename T>
__device__ inline void load_floats(const T* x, int64_t at, float (&value)[per_thread]) {
    const Elements<T> found = load_elements<T>(reinterpret_cast<const char*>(x), at);
#pragma unroll
    for (int e = 0; e < per_thread; ++e) value[e] = to_float(found.v[e]);
}

__device__ inline float finite_size(float value) {
    const float size = fabsf(value);
    return size <= FLT_MAX ? size : 0.0f;
}

// The largest of a block's `most` goes to `to`. All threads take part.
__device__ inline void note(float most, float* to) {
    __shared__ float of_warp[threads / 32];
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, lane));
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = most;
    __syncthreads();
    if (threadIdx.x != 0) return;
#pragma unroll
    for (int warp = 1; warp < threads / 32; ++warp) most = fmaxf(most, of_warp[warp]);
    if (most > 0.0f) atomicMax(reinterpret_cast<int*>(to), __float_as_int(most));
}

template <typename T>
__global__ void __launch_bounds__(threads)
    first_kernel(const T* x, int64_t lines, int64_t count, const float* known, float* first) {
    if (*known > 0.0f) return;
    const int64_t begin = blockIdx.x * static_cast<int64_t>(threads) + threadIdx.x, step = gridDim.x * int64_t{threads};
    float most = 0.0f, value[per_thread];
    for (int64_t at = begin; at < lines; at += step) {
        load_floats(x, at, value);
#pragma unroll
        for (int e = 0; e < per_thread; ++e) most = fmaxf(most, finite_size(value[e]));
    }
    for (int64_t at = lines * per_thread + begin; at < count; at += step) most = fmaxf(most, finite_size(to_float(x[at])));
    note(most, first);
}

template <__nv_fp8_interpretation_t format>
__device__ inline float within(float value, float inverse) {
    constexpr float largest = format == __NV_E4M3 ? 448.0f : 57344.0f;
    // Not finite: NaN, for e4m3 has no infinity.
    return fabsf(value) <= FLT_MAX ? fminf(fmaxf(value * inverse, -largest), largest) : __int_as_float(0x7fffffff);
}

template <typename T, __nv_fp8_interpretation_t format>
__global__ void __launch_bounds__(threads)
    cast_kernel(const T* x, int64_t lines, int64_t count, const float* known, const float* first, float headroom, float share,
                char* q, float* scale, float* noted) {
    const float past = *known;
    const float unit = fmaxf((past > 0.0f ? past * headroom : *first) * share, least_scale), inverse = 1.0f / unit;
    const int64_t begin = blockIdx.x * static_cast<int64_t>(threads) + threadIdx.x, step = gridDim.x * int64_t{threads};
    if (begin == 0) *scale = unit;
    float most = 0.0f, value[per_thread];
    for (int64_t at = begin; at < lines; at += step) {
        load_floats(x, at, value);
#pragma unroll
        for (int e = 0; e < per_thread; ++e) most = fmaxf(most, finite_size(value[e]));
        reinterpret_cast<uint4*>(q)[at] = float8_line<format>([&](int e) { return within<format>(value[e], inverse); });
    }
    for (int64_t at = lines * per_thread + begin; at < count; at += step) {
        const float one = to_float(x[at]);
        most = fmaxf(most, finite_size(one));
        q[at] = static_cast<char>(__nv_cvt_float_to_fp8(within<format>(one, inverse), __NV_SATFINITE, format));
    }
    note(most, noted);
}

template <typename T>
void launch(const Fp8Cast& c, cudaStream_t stream) {
    const T* x = reinterpret_cast<const T*>(c.x);
    const bool aligned = (reinterpret_cast<uint64_t>(c.x) | reinterpret_cast<uint64_t>(c.q)) % 16 == 0;
    const int64_t lines = aligned ? c.count / per_thread : 0;
    const unsigned blocks = std::max(1u, blocks_for(std::max(lines, c.count - lines * per_thread), threads));
    const auto kernel = c.format == DType::e4m3 ? &cast_kernel<T, __NV_E4M3> : &cast_kernel<T, __NV_E5M2>;
    const float share = static_cast<float>(1.0 / (c.format == DType::e4m3 ? 448.0 : 57344.0));
    check(cudaMemsetAsync(c.first, 0, sizeof(float), stream), "clear a magnitude");
    first_kernel<T><<<blocks, threads, 0, stream>>>(x, lines, c.count, c.known, c.first);
    kernel<<<blocks, threads, 0, stream>>>(x, lines, c.count, c.known, c.first, c.headroom, share, c.q, c.scale, c.noted);
    check(cudaGetLastError(), "launch a cast to float8");
}

}  // namespace

void preload_quantise() {
    for (DType type : {DType::f32, DType::bf16, DType::f16}) {
        with_type(type, [&](auto t) {
            using T = decltype(t);
            load(&first_kernel<T>), load(&cast_kernel<T, __NV_E4M3>), load(&cast_kernel<T, __NV_E5M2>);
        });
    }
}

void launch_fp8_cast(const Fp8Cast& cast, DType type, cudaStream_t stream) {
    with_type(type, [&](auto t) { launch<decltype(t)>(cast, stream); });
}

}  // namespace ub_overlap::cuda
