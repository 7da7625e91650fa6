// Launches of the executor's own kernels. All are asynchronous and throw NamedError when a launch is refused.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "core/call.h"
#include "cuda/state.h"

namespace ub_overlap::cuda {

// A cast to float8 of `count` elements at `x` by the scale that *known gives, if it is above 0, or else their own magnitude;
// what they are is noted. `first`: one float of scratch. All on the device.
struct Fp8Cast {
    const char* x;
    int64_t count;
    DType format;
    const float* known;
    float headroom;
    float* first;
    char* q;
    float* scale;
    float* noted;
};

// A weight [rows, cols], rows and cols multiples of 16, in e4m3 with scales: one (axis 0), of rows (-1) or of columns (-2).
// `kept`: one word of 64 bits, 0 at first. `scratch`: weight_scratch_words(scales) of them, 0 before the first call and after
// each. All on the device.
struct WeightCast {
    const char* x;
    int64_t rows;
    int64_t cols;
    int axis;
    char* q;
    float* scale;
    int64_t* kept;
    int64_t* scratch;
};

// Load the kernels of waits.cu, data.cu, wire.cu, quantise.cu and weights.cu onto the current device: loading one later could
// wait for a kernel that spins.
void preload_waits();
void preload_data();
void preload_wire();
void preload_quantise();
void preload_weights();

// First kernel of a call: takes the group's turn, counts the epoch, stores the slot's word, and waits until the peers have left
// the slot. `timeout_ns`: of each wait, and of the turn since the call that has it last went on.
void launch_begin(const Group& group, int slot, uint32_t tag, const WaitList& free, int64_t timeout_ns, cudaStream_t stream);
void launch_wait(const Group& group, int slot, const WaitList& list, int64_t timeout_ns, cudaStream_t stream);
void launch_signal(const Group& group, int slot, const SignalList& list, cudaStream_t stream);
// End of a call: the signals that are left, and NaN everywhere in `outputs` if a wait of this group has failed. The last one
// gives the turn away.
void launch_end(const Group& group, int slot, const SignalList& list, const PoisonList& outputs, bool last,
                cudaStream_t stream);

// Writes the device's clock (globaltimer, ns) to `where`, in pinned or device memory.
void launch_stamp(uint64_t* where, cudaStream_t stream);

// By the compute units, 16 bytes a thread where the addresses allow it.
void launch_copy(const Span& src, const Span& dst, cudaStream_t stream);
// dst = (sum of sources in their order, in fp32) / divisor, rounded once.
void launch_reduce(const std::vector<Source>& sources, const Span& dst, DType dst_type, float divisor, cudaStream_t stream);
// The same where some sources are float8 with scales.
void launch_reduce_scaled(const std::vector<Source>& sources, const Span& dst, DType dst_type, float divisor,
                          cudaStream_t stream);
// Numbers of `type` to float8 and scales, as the CPU's round_for_wire does.
void launch_round_for_wire(const Rounding& rounding, DType type, cudaStream_t stream);

// Elements of `type` to float8 (quantise.cu).
void launch_fp8_cast(const Fp8Cast& cast, DType type, cudaStream_t stream);
// A weight to float8, if it is not what it was at the last call (weights.cu). `through`: bf16 or f16, what elements of `type`,
// the same or f32, are rounded to first.
void launch_weight_cast(const WeightCast& cast, DType type, DType through, cudaStream_t stream);
int64_t weight_scratch_words(int64_t scales);

// Throws NamedError("UbOverlapError") saying what could not be done.
void check(cudaError_t code, const char* what);

// For a scope: this thread may allocate, which touches no stream, while a stream is being captured.
class RelaxedCapture {
  public:
    RelaxedCapture() { check(cudaThreadExchangeStreamCaptureMode(&mode_), "relax the capture"); }
    ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    RelaxedCapture(const RelaxedCapture&) = delete;
    RelaxedCapture& operator=(const RelaxedCapture&) = delete;

  private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

template <typename Kernel>
void load(Kernel* kernel) {
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), "load a kernel");
}

}  // namespace ub_overlap::cuda
