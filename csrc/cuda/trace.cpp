#include "cuda/trace.h"

#include <algorithm>

#include "cuda/arena.h"
#include "cuda/kernels.h"

namespace ub_overlap::cuda {

Trace::Trace(size_t steps) {
    const size_t bytes = (2 + 2 * steps) * sizeof(uint64_t);
    check(cudaGetDevice(&device_), "get the current device");
    const RelaxedCapture relaxed;
    check(cudaHostAlloc(reinterpret_cast<void**>(&stamps_), bytes, cudaHostAllocPortable | cudaHostAllocMapped),
          "allocate time stamps");
    std::fill_n(stamps_, 2 + 2 * steps, 0);
}

void Trace::stamp(size_t index, cudaStream_t stream) {
    launch_stamp(stamps_ + index, stream);
}

std::vector<StepTime> Trace::read(std::vector<StepTime> times) const {
    const DeviceScope scope(device_);
    check(cudaDeviceSynchronize(), "wait for the traced steps");
    const auto at = [this](size_t index) {
        return static_cast<int64_t>(static_cast<const volatile uint64_t*>(stamps_)[index]);
    };
    for (StepTime& time : times) {
        const size_t first = 2 + 2 * static_cast<size_t>(time.step);
        const bool stamped = at(first) != 0;
        time.begin_ns = at(stamped ? first : 0), time.end_ns = at(stamped ? first + 1 : 1);
    }
    return times;
}

}  // namespace ub_overlap::cuda
