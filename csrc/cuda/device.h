// The state of a device that all groups share: the streams and events of calls, and a test for idleness.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace ub_overlap::cuda {

// Events for one call at a time. An event may be recorded again once the wait for it has been issued, so the next call uses the
// events of this one.
class Events {
  public:
    Events() = default;
    Events(const Events&) = delete;
    Events& operator=(const Events&) = delete;
    ~Events();
    cudaEvent_t at(size_t number);

  private:
    std::vector<cudaEvent_t> events_;
};

// A copy stream, and the events of calls on it. Split collectives have events of their own, as other calls run meanwhile.
struct Lane {
    Lane();
    cudaStream_t copies = nullptr;
    Events events;
};

// Streams and events that take part in a capture of torch's belong to it until it ends. Another thread may make eager calls in
// the meantime, so captures have their own lanes. Never destroyed.
struct Device {
    std::mutex mutex;
    Lane eager;
    std::vector<std::unique_ptr<Lane>> captured;
    cudaStream_t recording = nullptr;

    // Returns the lane of this capture: the one that has joined it, else a free one.
    Lane& lane_of_capture(unsigned long long capture);
    // Returns the stream on which calls are captured. It never runs anything.
    cudaStream_t recording_stream();
};

Device& device_of(int index);

// Returns the id of the capture that a stream takes part in; 0 for none.
unsigned long long capture_of(cudaStream_t stream);

// Writes `value` to `word`, which may lie on a peer, when all earlier work of the stream has ended and is visible to all
// devices. cuStreamWriteValue64. May be captured.
void write_word(uint64_t* word, uint64_t value, cudaStream_t stream);

// Returns whether this process has a context on a device. True where that is unknown.
bool has_context(int index) noexcept;

// Makes a device current in a scope. `Restore::if_in_use`: the previous device is not made current again if this process has no
// context on it. Making it current would create one, about half a gigabyte on GPU 0 of each rank, since new threads begin
// there.
class DeviceScope {
  public:
    enum class Restore { always, if_in_use };
    explicit DeviceScope(int device, Restore restore = Restore::always);
    ~DeviceScope();
    DeviceScope(const DeviceScope&) = delete;
    DeviceScope& operator=(const DeviceScope&) = delete;

  private:
    const int device_;
    const Restore restore_;
    int before_ = 0;
};

// Throws ArenaError if the device cannot write 64-bit words from a stream.
void check_stream_writes(int index);

// Returns whether a device becomes idle on all streams within `timeout_ns`. The driver waits for that without a deadline, and
// another stream may wait for a peer that waits for us. So a separate thread asks it, and is abandoned after the timeout: it
// uses no Python, and nothing that ends with the process. Also false if CUDA refuses because a graph is being captured.
bool is_idle(int index, int64_t timeout_ns);

}  // namespace ub_overlap::cuda
