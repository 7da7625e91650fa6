// Amax histories of delayed scaling: advance them by a step (a thread per tensor), and record the amax of a cast. One launch
// each.
//
// `slots` are distinct columns of `current` [capacity] and `past` [history_length, capacity], newest row first. Amax values are
// finite and not negative, so their bits compare like integers. The host reads nothing back, so calls can be captured.
#include "cuda/elements.h"

namespace ub_overlap::cuda {
namespace {

constexpr int threads = 128;       // of a kernel with a thread per tensor
constexpr int cast_threads = 512;  // of a kernel that reads a tensor

constexpr int rows_at_once = 8;  // of a history, in flight for a thread

// amax[i] = the maximum of the history in slots[i], slots_copy[i] = slots[i]. In a step, current is pushed before, if it is
// above 0, and cleared.
__global__ void __launch_bounds__(threads)
    advance_kernel(const AmaxHistories h, bool is_step, float* amax, int64_t* slots_copy) {
    const int64_t step = gridDim.x * int64_t{threads};
    for (int64_t i = blockIdx.x * int64_t{threads} + threadIdx.x; i < h.count; i += step) {
        const int64_t slot = h.slots[i];
        const float newest = is_step ? h.current[slot] : 0.0f;
        const bool pushes = newest > 0.0f;
        float incoming = newest, most = 0.0f;
        for (int64_t first = 0; first < h.history_length; first += rows_at_once) {
            float before[rows_at_once];  // loaded before any is stored: no load waits for another
#pragma unroll
            for (int r = 0; r < rows_at_once; ++r) {
                before[r] = first + r < h.history_length ? h.past[(first + r) * h.capacity + slot] : 0.0f;
            }
#pragma unroll
            for (int r = 0; r < rows_at_once; ++r) {
                if (first + r >= h.history_length) break;
                const float after = pushes ? incoming : before[r];
                if (pushes) h.past[(first + r) * h.capacity + slot] = after;
                incoming = before[r];
                most = fmaxf(most, after);
            }
        }
        if (is_step) h.current[slot] = 0.0f;
        amax[i] = most;
        slots_copy[i] = slot;
    }
}

__device__ inline void raise(const AmaxHistories& h, int64_t index, float amax) {
    if (amax > 0.0f) atomicMax(reinterpret_cast<int*>(h.current + h.slots[index]), __float_as_int(amax));
}

template <__nv_fp8_interpretation_t format>
__device__ inline float value_of(unsigned code) {
    return to_float(__half(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(code), format)));
}

// The codes without a sign of infinity and NaN are the largest. Plus this number they have bit 7, which is cut off; then they
// are smaller than all finite codes plus this number.
template <__nv_fp8_interpretation_t format>
constexpr unsigned not_finite = format == __NV_E4M3 ? 1 : 4;

// The maximum of shifted codes: two of 16 bits.
template <__nv_fp8_interpretation_t format>
__device__ inline unsigned larger(unsigned most, uint32_t word) {
    const unsigned shifted = ((word & 0x7f7f7f7fu) + 0x01010101u * not_finite<format>)&0x7f7f7f7fu;
    return __vmaxu2(__vmaxu2(most, shifted & 0x00ff00ffu), shifted >> 8 & 0x00ff00ffu);
}

// Raises current[slots[index]] to *sample and to the largest finite |q| * *scale, and stores *scale_copy = *scale.
// It reads q from its end: what the cast wrote last may still be in the L2 cache.
template <__nv_fp8_interpretation_t format>
__global__ void __launch_bounds__(cast_threads)
    raise_kernel(const AmaxHistories h, int64_t index, const uint8_t* q, int64_t size, const float* scale, const float* sample,
                 float* scale_copy) {
    __shared__ unsigned warp_most[cast_threads / 32];
    const int64_t begin = blockIdx.x * int64_t{cast_threads} + threadIdx.x, step = gridDim.x * int64_t{cast_threads};
    const int64_t lines = size / 16;
    unsigned most = 0;
    for (int64_t at = begin; at < lines; at += 4 * step) {
        uint4 line[4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int64_t from_end = at + i * step;
            if (from_end < lines) line[i] = load_vector<uint4>(reinterpret_cast<const char*>(q), lines - 1 - from_end);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            most = larger<format>(larger<format>(most, line[i].x), line[i].y);
            most = larger<format>(larger<format>(most, line[i].z), line[i].w);
        }
    }
    if (begin < size % 16) most = larger<format>(most, q[16 * lines + begin]);
    most = max(most & 0xffffu, most >> 16);
    most = __reduce_max_sync(0xffffffffu, most);
    if (threadIdx.x % 32 == 0) warp_most[threadIdx.x / 32] = most;
    __syncthreads();
    if (threadIdx.x != 0) return;
#pragma unroll
    for (int i = 1; i < cast_threads / 32; ++i) most = max(most, warp_most[i]);
    if (most > not_finite<format>) raise(h, index, value_of<format>(most - not_finite<format>) * *scale);
    if (blockIdx.x == 0) raise(h, index, *sample), *scale_copy = *scale;
}

template <__nv_fp8_interpretation_t format>
void launch_raise(const AmaxHistories& histories, int64_t index, const Quantized& cast, const float* sample, float* scale_copy,
                  cudaStream_t stream) {
    const unsigned blocks = blocks_for(&raise_kernel<format>, cast.size / 64, cast_threads);
    launch(&raise_kernel<format>, blocks, cast_threads, stream, "launch a record of an amax", histories, index, cast.q,
           cast.size, cast.scale, sample, scale_copy);
}

}  // namespace

void preload_amax_history() {
    load(&advance_kernel, threads);
    load(&raise_kernel<__NV_E4M3>, cast_threads), load(&raise_kernel<__NV_E5M2>, cast_threads);
}

void launch_advance_histories(const AmaxHistories& histories, bool is_step, float* amax, int64_t* slots, cudaStream_t stream) {
    launch(&advance_kernel, blocks_for(&advance_kernel, histories.count, threads), threads, stream,
           "launch an update of amax histories", histories, is_step, amax, slots);
}

void launch_raise_amax(const AmaxHistories& histories, int64_t index, const Quantized& cast, const float* sample,
                       float* scale_copy, cudaStream_t stream) {
    if (cast.is_e5m2) return launch_raise<__NV_E5M2>(histories, index, cast, sample, scale_copy, stream);
    launch_raise<__NV_E4M3>(histories, index, cast, sample, scale_copy, stream);
}

}  // namespace ub_overlap::cuda
