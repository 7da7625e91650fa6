// Delayed cast to float8: one pass over the elements casts them by a known amax and measures their own.
//
//   amax_kernel   only if the history is empty (*past_amax is 0): current_amax = the largest finite absolute value
//   cast_kernel   scale = max((*past_amax * headroom, or current_amax) / F, 2^-120); q = x / scale, clamped to F, rounded.
//                 Elements that are not finite become NaN. amax_out = max(amax_out, the largest finite absolute value)
//
// Both are grid-stride loops in blocks of 256 threads. A thread takes 16 elements at a time, and the remainder one by one.
// Absolute values are not negative, so their bits compare like integers, by atomicMax. The host reads nothing back, so calls
// can be captured.
#include <cfloat>

#include "cuda/elements.h"

namespace ub_overlap::cuda {
namespace {

constexpr int threads = 256;

template <typename T>
__device__ inline void load_floats(const T* x, int64_t at, float (&value)[per_thread]) {
    const Elements<T> loaded = load_elements<T>(reinterpret_cast<const char*>(x), at);
#pragma unroll
    for (int e = 0; e < per_thread; ++e) value[e] = to_float(loaded.v[e]);
}

__device__ inline float finite_size(float value) {
    const float size = fabsf(value);
    return size <= FLT_MAX ? size : 0.0f;
}

// Reduces `amax` over the block and stores the maximum of it and `*out`. All threads take part.
__device__ inline void reduce_amax(float amax, float* out) {
    __shared__ float warp_amax[threads / 32];
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, lane));
    if (threadIdx.x % 32 == 0) warp_amax[threadIdx.x / 32] = amax;
    __syncthreads();
    if (threadIdx.x != 0) return;
#pragma unroll
    for (int warp = 1; warp < threads / 32; ++warp) amax = fmaxf(amax, warp_amax[warp]);
    if (amax > 0.0f) atomicMax(reinterpret_cast<int*>(out), __float_as_int(amax));
}

template <typename T>
__global__ void __launch_bounds__(threads)
    amax_kernel(const T* x, int64_t lines, int64_t count, const float* past_amax, float* current_amax) {
    if (*past_amax > 0.0f) return;
    const int64_t begin = blockIdx.x * static_cast<int64_t>(threads) + threadIdx.x, step = gridDim.x * int64_t{threads};
    float amax = 0.0f, value[per_thread];
    for (int64_t at = begin; at < lines; at += step) {
        load_floats(x, at, value);
#pragma unroll
        for (int e = 0; e < per_thread; ++e) amax = fmaxf(amax, finite_size(value[e]));
    }
    for (int64_t at = lines * per_thread + begin; at < count; at += step) amax = fmaxf(amax, finite_size(to_float(x[at])));
    reduce_amax(amax, current_amax);
}

template <__nv_fp8_interpretation_t format>
__device__ inline float scaled_and_clamped(float value, float inverse) {
    constexpr float format_max = format == __NV_E4M3 ? e4m3_max : e5m2_max;
    // Not finite: NaN, as e4m3 has no infinity.
    return fabsf(value) <= FLT_MAX ? fminf(fmaxf(value * inverse, -format_max), format_max) : __int_as_float(0x7fffffff);
}

template <typename T, __nv_fp8_interpretation_t format>
__global__ void __launch_bounds__(threads)
    cast_kernel(const T* x, int64_t lines, int64_t count, const float* past_amax, const float* current_amax, float headroom,
                float inverse_max, char* q, float* scale, float* amax_out) {
    const float past = *past_amax;
    const float unit = fmaxf((past > 0.0f ? past * headroom : *current_amax) * inverse_max, least_scale), inverse = 1.0f / unit;
    const int64_t begin = blockIdx.x * static_cast<int64_t>(threads) + threadIdx.x, step = gridDim.x * int64_t{threads};
    if (begin == 0) *scale = unit;
    float amax = 0.0f, value[per_thread];
    for (int64_t at = begin; at < lines; at += step) {
        load_floats(x, at, value);
#pragma unroll
        for (int e = 0; e < per_thread; ++e) amax = fmaxf(amax, finite_size(value[e]));
        reinterpret_cast<uint4*>(q)[at] =
            float8_line<format>([&](int e) { return scaled_and_clamped<format>(value[e], inverse); });
    }
    for (int64_t at = lines * per_thread + begin; at < count; at += step) {
        const float element = to_float(x[at]);
        amax = fmaxf(amax, finite_size(element));
        q[at] = static_cast<char>(__nv_cvt_float_to_fp8(scaled_and_clamped<format>(element, inverse), __NV_SATFINITE, format));
    }
    reduce_amax(amax, amax_out);
}

template <typename T>
void cast(const DelayedCast& c, cudaStream_t stream) {
    const T* x = reinterpret_cast<const T*>(c.x);
    const bool aligned = (reinterpret_cast<uint64_t>(c.x) | reinterpret_cast<uint64_t>(c.q)) % 16 == 0;
    const int64_t lines = aligned ? c.count / per_thread : 0;
    const int64_t items = std::max(lines, c.count - lines * per_thread);
    const auto kernel = c.format == DType::e4m3 ? &cast_kernel<T, __NV_E4M3> : &cast_kernel<T, __NV_E5M2>;
    const double format_max = c.format == DType::e4m3 ? e4m3_max : e5m2_max;
    const float inverse_max = static_cast<float>(1.0 / format_max);
    check(cudaMemsetAsync(c.current_amax, 0, sizeof(float), stream), "clear an amax");
    const char* what = "launch a cast to float8";
    launch(&amax_kernel<T>, blocks_for(&amax_kernel<T>, items, threads), threads, false, stream, what, x, lines, c.count,
           c.past_amax, c.current_amax);
    launch(kernel, blocks_for(kernel, items, threads), threads, false, stream, what, x, lines, c.count, c.past_amax,
           c.current_amax, c.headroom, inverse_max, c.q, c.scale, c.amax_out);
}

}  // namespace

void preload_delayed_cast() {
    for (DType type : {DType::f32, DType::bf16, DType::f16}) {
        with_type(type, [&](auto t) {
            using T = decltype(t);
            load(&amax_kernel<T>, threads), load(&cast_kernel<T, __NV_E4M3>, threads),
                load(&cast_kernel<T, __NV_E5M2>, threads);
        });
    }
}

void launch_delayed_cast(const DelayedCast& cast, DType type, cudaStream_t stream) {
    with_type(type, [&](auto t) { cuda::cast<decltype(t)>(cast, stream); });
}

}  // namespace ub_overlap::cuda
