// What a device has once, for all groups: the streams and events that calls are issued to, and a way to see it at rest.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace ub_overlap::cuda {

// A copy stream and events, for one call at a time. An event may be recorded again as soon as the wait for it has been issued,
// so the events of one call serve the next.
class Lane {
  public:
    Lane();
    cudaEvent_t event(size_t number);

    cudaStream_t copies = nullptr;

  private:
    std::vector<cudaEvent_t> events_;
};

// What takes part in a capture of torch's belongs to it until that ends, which may be while another thread makes plain calls:
// captures have lanes of their own. Never destroyed.
struct Device {
    std::mutex mutex;
    Lane plain;
    std::vector<std::unique_ptr<Lane>> captured;
    cudaStream_t records = nullptr;

    // The lane of the capture that is going on under this id: the one that has joined it, else one that is free.
    Lane& of_capture(unsigned long long capture);
    // Never runs anything: calls are captured on it.
    cudaStream_t recorder();
};

Device& device_of(int index);

// Names the capture that a stream takes part in; 0 for none.
unsigned long long capture_of(cudaStream_t stream);

// Whether a device has nothing left to do within `timeout_ns`, whatever streams it is on. The driver waits for that without a
// deadline (another stream may wait for a peer that waits for us), so a thread of its own asks it, and is left behind if need
// be: it knows no Python, and nothing that ends with the process. False too where CUDA refuses: a graph is being captured.
bool rests(int index, int64_t timeout_ns);

}  // namespace ub_overlap::cuda
