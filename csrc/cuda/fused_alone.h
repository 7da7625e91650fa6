// A fused collective on one GPU, for measurements: rank 0 of a group whose peers are all itself.
//
// What rank 0 pushes to rank p lands in its own memory, where it awaits what rank p pushes. So a call does all that a call of R
// ranks does but cross a link: the time is that of the kernel without the link, and the sum is R times the input.
#pragma once

#include <cuda_runtime.h>

#include "cuda/kernels.h"

namespace ub_overlap::cuda {

class FusedAlone {
  public:
    explicit FusedAlone(int ranks);
    ~FusedAlone();
    FusedAlone(const FusedAlone&) = delete;
    FusedAlone& operator=(const FusedAlone&) = delete;

    int ranks() const { return group_.ranks; }
    // Enqueues a one-shot all_reduce of bf16 rows, with residual and RMSNorm where `epilogue` has them.
    void run(const char* input, char* output, int64_t rows, int64_t row_bytes, const Epilogue& epilogue, cudaStream_t stream);
    // Whether a wait has failed.
    bool has_failed() const { return group_.failure->outcome != 0; }

  private:
    static constexpr int64_t region = 4 << 20, timeout_ns = 2'000'000'000;

    Group group_{};
    char *memory_ = nullptr, *shared_ = nullptr;
};

}  // namespace ub_overlap::cuda
