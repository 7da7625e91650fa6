// Amax histories of delayed scaling: advance them by a step, and record amax values. One launch each, a thread per tensor.
//
// `slots` are distinct columns of `current` [capacity] and `past` [history_length, capacity], newest row first. Amax values are
// finite and not negative, so their bits compare like integers. The host reads nothing back, so calls can be captured.
#include "cuda/launch.h"

namespace ub_overlap::cuda {
namespace {

constexpr int threads = 128;

// amax[i] = the maximum of the history in slots[i]. In a step, current is pushed before, if it is above 0, and cleared.
__global__ void __launch_bounds__(threads) advance_kernel(const AmaxHistories h, bool is_step, float* amax) {
    const int64_t step = gridDim.x * int64_t{threads};
    for (int64_t i = blockIdx.x * int64_t{threads} + threadIdx.x; i < h.count; i += step) {
        const int64_t slot = h.slots[i];
        const float newest = is_step ? h.current[slot] : 0.0f;
        const bool pushes = newest > 0.0f;
        float incoming = newest, most = 0.0f;
        for (int64_t row = 0; row < h.history_length; ++row) {
            float* at = h.past + row * h.capacity + slot;
            const float before = *at, after = pushes ? incoming : before;
            if (pushes) *at = after;
            incoming = before;
            most = fmaxf(most, after);
        }
        if (is_step) h.current[slot] = 0.0f;
        amax[i] = most;
    }
}

// current[slots[i]] = max(current[slots[i]], amax[i]), and *scale_copy = *scale.
__global__ void __launch_bounds__(threads)
    raise_kernel(const AmaxHistories h, const float* amax, const float* scale, float* scale_copy) {
    const int64_t begin = blockIdx.x * int64_t{threads} + threadIdx.x, step = gridDim.x * int64_t{threads};
    if (begin == 0) *scale_copy = *scale;
    for (int64_t i = begin; i < h.count; i += step) {
        atomicMax(reinterpret_cast<int*>(h.current + h.slots[i]), __float_as_int(amax[i]));
    }
}

}  // namespace

void preload_amax_history() {
    load(&advance_kernel, threads), load(&raise_kernel, threads);
}

void launch_advance_histories(const AmaxHistories& histories, bool is_step, float* amax, cudaStream_t stream) {
    launch(&advance_kernel, blocks_for(&advance_kernel, histories.count, threads), threads, stream,
           "launch an update of amax histories", histories, is_step, amax);
}

void launch_raise_amax(const AmaxHistories& histories, const float* amax, const float* scale, float* scale_copy,
                       cudaStream_t stream) {
    launch(&raise_kernel, blocks_for(&raise_kernel, histories.count, threads), threads, stream,
           "launch a record of amax values", histories, amax, scale, scale_copy);
}

}  // namespace ub_overlap::cuda
