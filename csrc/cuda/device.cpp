#include "cuda/device.h"

#include <cuda.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <system_error>
#include <thread>

#include "cuda/kernels.h"

namespace ub_overlap::cuda {

DeviceScope::DeviceScope(int device, Restore restore) : device_(device), restore_(restore) {
    check(cudaGetDevice(&before_), "get the current device");
    if (before_ != device) check(cudaSetDevice(device), "set the current device");
}
DeviceScope::~DeviceScope() {
    if (before_ != device_ && (restore_ == Restore::always || has_context(before_))) cudaSetDevice(before_);
}

Lane::Lane() {
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "read the stream priorities");
    check(cudaStreamCreateWithPriority(&copies, cudaStreamNonBlocking, greatest), "create a copy stream");
}

Events::~Events() {
    for (const cudaEvent_t event : events_) cudaEventDestroy(event);  // one that is pending is freed when it has ended
}

cudaEvent_t Events::at(size_t number) {
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

namespace {

// The driver's function, looked up at run time: the extension also loads where no driver is installed.
template <typename Function>
Function driver_function(const char* name) {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    constexpr unsigned int version = 12000;  // of the function's signature
    check(cudaGetDriverEntryPointByVersion(name, &entry, version, cudaEnableDefault, &result), "look up a driver function");
#else
    check(cudaGetDriverEntryPoint(name, &entry, cudaEnableDefault, &result), "look up a driver function");
#endif
    if (result != cudaDriverEntryPointSuccess || !entry) {
        throw NamedError("UbOverlapError", {{"what", std::string("the CUDA driver has no function ") + name},
                                            {"fix", "install a driver for CUDA 12 or later"}});
    }
    return reinterpret_cast<Function>(entry);
}

}  // namespace

void write_word(uint64_t* word, uint64_t value, cudaStream_t stream) {
    using Write = CUresult (*)(CUstream, CUdeviceptr, cuuint64_t, unsigned int);
    static const auto write = driver_function<Write>("cuStreamWriteValue64");
    const CUresult code = write(stream, reinterpret_cast<CUdeviceptr>(word), value, CU_STREAM_WRITE_VALUE_DEFAULT);
    if (code != CUDA_SUCCESS) {
        throw NamedError("UbOverlapError", {{"what", "cannot signal a peer: cuStreamWriteValue64 failed"},
                                            {"got", "CUresult " + std::to_string(static_cast<int>(code))}});
    }
}

bool has_context(int index) noexcept {
    try {
        using GetState = CUresult (*)(CUdevice, unsigned int*, int*);
        static const auto get = driver_function<GetState>("cuDevicePrimaryCtxGetState");
        unsigned int flags = 0;
        int active = 0;  // CUDA numbers the devices of the driver and of the runtime alike
        return get(index, &flags, &active) != CUDA_SUCCESS || active;
    } catch (const std::exception&) {
        return true;
    }
}

void check_stream_writes(int index) {
    using GetAttribute = CUresult (*)(int*, CUdevice_attribute, CUdevice);
    static const auto get = driver_function<GetAttribute>("cuDeviceGetAttribute");
    int can_write = 0;  // CUDA numbers the devices of the driver and of the runtime alike
    if (get(&can_write, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, index) == CUDA_SUCCESS && can_write) return;
    throw NamedError("ArenaError", {{"what", "the device cannot write 64-bit words from a stream"},
                                    {"where", "cuda:" + std::to_string(index)},
                                    {"expected", "CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS"},
                                    {"fix", "set UB_OVERLAP_DISABLE=* to run plain collectives"}});
}

bool is_idle(int index, int64_t timeout_ns) {
    struct Answer {
        std::mutex mutex;
        std::condition_variable ready;
        bool done = false, idle = false;
    };
    const auto answer = std::make_shared<Answer>();
    const auto ask = [answer, index] {
        auto mode = cudaStreamCaptureModeRelaxed;  // refused during a capture, without harm to it
        const bool idle = cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess && cudaSetDevice(index) == cudaSuccess &&
                          cudaDeviceSynchronize() == cudaSuccess;
        cudaGetLastError();
        const std::lock_guard<std::mutex> lock(answer->mutex);
        answer->done = true, answer->idle = idle;
        answer->ready.notify_all();
    };
    try {
        std::thread(ask).detach();
    } catch (const std::system_error&) {  // no room for a thread: nothing is known of the device
        return false;
    }
    std::unique_lock<std::mutex> lock(answer->mutex);
    answer->ready.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [&] { return answer->done; });
    return answer->idle;
}

}  // namespace ub_overlap::cuda
