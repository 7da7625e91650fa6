// Multiprocessors that matmuls leave to NCCL between start and finish of a collective that it runs.
//
// On Hopper GPUs a large matmul is a persistent kernel: one block for each multiprocessor, which stays until the matmul ends.
// NCCL's kernel then starts when the matmul ends, and where NCCL is there first, some blocks of the matmul run after the
// others. So kernels that are launched meanwhile get fewer blocks, if they read torch's carve-out. torch has one number for
// this in a process. A number that the program has set stays.
#pragma once

#include <mutex>

namespace ub_overlap {

// What matmuls leave for one collective, from `begin` until `end` or its destructor. Thread-safe.
class SparedMultiprocessors {
  public:
    SparedMultiprocessors() = default;
    ~SparedMultiprocessors() { end(); }
    SparedMultiprocessors(const SparedMultiprocessors&) = delete;
    SparedMultiprocessors& operator=(const SparedMultiprocessors&) = delete;

    // Lets matmuls leave `count` multiprocessors from now on, once; 0: none.
    void begin(int count);
    void end();

  private:
    enum class State { idle, open, ended };
    std::mutex mutex_;
    State state_ = State::idle;
};

}  // namespace ub_overlap
