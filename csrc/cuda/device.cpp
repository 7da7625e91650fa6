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
    check(cudaStreamCreateWithPriority(&copies, cudaStreamNonBlocking, greatest), "create a copy stream");
}

cudaEvent_t Lane::event(size_t number) {
    while (events_.size() <= number) {
        cudaEvent_t event = nullptr;
        check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "create an event");
        events_.push_back(event);
    }
    return events_[number];
}

unsigned long long capture_of(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    check(cudaStreamGetCaptureInfo(stream, &status, &id), "query whether the stream is being captured");
    return status == cudaStreamCaptureStatusNone ? 0 : id;
}

Lane& Device::lane_of_capture(unsigned long long capture) {
    Lane* free = nullptr;
    for (const std::unique_ptr<Lane>& lane : captured) {
        cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
        unsigned long long id = 0;
        check(cudaStreamGetCaptureInfo(lane->copies, &status, &id), "query whether a copy stream is being captured");
        if (status == cudaStreamCaptureStatusNone) free = lane.get();
        if (status == cudaStreamCaptureStatusActive && id == capture) return *lane;
    }
    if (!free) free = captured.emplace_back(std::make_unique<Lane>()).get();
    return *free;
}

cudaStream_t Device::recording_stream() {
    if (!recording) check(cudaStreamCreateWithFlags(&recording, cudaStreamNonBlocking), "create a recording stream");
    return recording;
}

Device& device_of(int index) {
    static std::mutex mutex;
    static auto* all = new std::map<int, std::unique_ptr<Device>>;  // never destroyed: the driver may shut down first
    const std::lock_guard<std::mutex> lock(mutex);
    std::unique_ptr<Device>& device = (*all)[index];
    if (!device) device = std::make_unique<Device>();
    return *device;
}

bool is_idle(int index, int64_t timeout_ns) {
    struct Answer {
        std::mutex mutex;
        std::condition_variable ready;
        bool done = false, idle = false;
    };
    const auto answer = std::make_shared<Answer>();
    std::thread([answer, index] {
        auto mode = cudaStreamCaptureModeRelaxed;  // refused during a capture, without harm to it
        const bool idle = cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess && cudaSetDevice(index) == cudaSuccess &&
                          cudaDeviceSynchronize() == cudaSuccess;
        cudaGetLastError();
        const std::lock_guard<std::mutex> lock(answer->mutex);
        answer->done = true, answer->idle = idle;
        answer->ready.notify_all();
    }).detach();
    std::unique_lock<std::mutex> lock(answer->mutex);
    answer->ready.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [&] { return answer->done; });
    return answer->idle;
}

}  // namespace ub_overlap::cuda
