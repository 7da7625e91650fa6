#include "cuda/device.h"

#include <chrono>
#include <condition_variable>
#include <map>
#include <thread>

#include "cuda/kernels.h"

namespace ub_overlap::cuda {

Lane::Lane() {
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "read the stream priorities");
    check(cudaStreamCreateWithPriority(&copies, cudaStreamNonBlocking, greatest), "make a copy stream");
}

cudaEvent_t Lane::event(size_t number) {
    while (events_.size() <= number) {
        cudaEvent_t made = nullptr;
        check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "make an event");
        events_.push_back(made);
    }
    return events_[number];
}

unsigned long long capture_of(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    check(cudaStreamGetCaptureInfo(stream, &status, &id), "ask whether the stream is being captured");
    return status == cudaStreamCaptureStatusNone ? 0 : id;
}

Lane& Device::of_capture(unsigned long long capture) {
    Lane* free = nullptr;
    for (const std::unique_ptr<Lane>& lane : captured) {
        cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
        unsigned long long id = 0;
        check(cudaStreamGetCaptureInfo(lane->copies, &status, &id), "ask whether a copy stream is being captured");
        if (status == cudaStreamCaptureStatusNone) free = lane.get();
        if (status == cudaStreamCaptureStatusActive && id == capture) return *lane;
    }
    if (!free) free = captured.emplace_back(std::make_unique<Lane>()).get();
    return *free;
}

cudaStream_t Device::recorder() {
    if (!records) check(cudaStreamCreateWithFlags(&records, cudaStreamNonBlocking), "make a stream to record on");
    return records;
}

Device& device_of(int index) {
    static std::mutex mutex;
    static auto* all = new std::map<int, std::unique_ptr<Device>>;  // never destroyed: the driver may go first
    const std::lock_guard<std::mutex> lock(mutex);
    std::unique_ptr<Device>& one = (*all)[index];
    if (!one) one = std::make_unique<Device>();
    return *one;
}

bool rests(int index, int64_t timeout_ns) {
    struct Asked {
        std::mutex mutex;
        std::condition_variable answered;
        bool done = false, rests = false;
    };
    const auto asked = std::make_shared<Asked>();
    std::thread([asked, index] {
        auto mode = cudaStreamCaptureModeRelaxed;  // refused while somebody captures, and no harm to the capture
        const bool found = cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess && cudaSetDevice(index) == cudaSuccess &&
                           cudaDeviceSynchronize() == cudaSuccess;
        cudaGetLastError();
        const std::lock_guard<std::mutex> lock(asked->mutex);
        asked->done = true, asked->rests = found;
        asked->answered.notify_all();
    }).detach();
    std::unique_lock<std::mutex> lock(asked->mutex);
    asked->answered.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [&] { return asked->done; });
    return asked->rests;
}

}  // namespace ub_overlap::cuda
