// Launches of the executor's own kernels. All are asynchronous and throw NamedError when a launch is refused.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "core/call.h"
#include "cuda/state.h"

namespace ub_overlap::cuda {

// The amax histories of `count` tensors, on the device: distinct columns `slots` of `current` [capacity] and `past`
// [history_length, capacity].
struct AmaxHistories {
    const int64_t* slots;
    int64_t count;
    int64_t capacity;
    float* current;
    float* past;
    int64_t history_length;
};

// A tensor of float8, `size` bytes from an address divisible by 16, and its scale. All on the device.
struct Quantized {
    const uint8_t* q;
    int64_t size;
    bool is_e5m2;  // else e4m3
    const float* scale;
};

// A cast to e4m3 of a weight [rows, cols], both multiples of 16. One scale (axis 0), a scale per row (-1) or per column (-2).
// `checksum`: two words of 64 bits, 0 at first, the second for `transposed`. `scratch`: cached_weight_scratch_words(scales)
// words, 0 before the first call and after each. All on the device.
struct WeightCast {
    const char* x;
    int64_t rows;
    int64_t cols;
    int axis;
    char* q;
    char* transposed;  // a copy [cols, rows] of q, or null
    float* scale;
    int64_t* checksum;
    int64_t* scratch;
};

// Load the kernels of waits.cu, data.cu, fp8_wire.cu, fp8_amax_history.cu, fp8_cached_weight.cu, transpose.cu, words.cu and
// fused_variants_*.cu onto the current device. Loading one later could wait for a kernel that spins.
void preload_waits();
void preload_data();
void preload_fp8_wire();
void preload_amax_history();
void preload_cached_weight();
void preload_transpose();
void preload_words();
void preload_fused_collectives();

// First kernel of a call. Takes the group lock, counts the epoch, stores the slot's word, and waits until the peers have left
// the slot. In a split slot it takes the slot's own lock instead, which the end of the finish releases. `timeout_ns`: deadline
// of each wait, and of the group lock since the call that has it last made progress.
void launch_begin(const Group& group, int slot, uint32_t tag, const WaitList& free, int64_t timeout_ns, cudaStream_t stream);
void launch_wait(const Group& group, int slot, const WaitList& list, int64_t timeout_ns, cudaStream_t stream);
void launch_signal(const Group& group, int slot, const SignalList& list, cudaStream_t stream);
// End of a call: sends the remaining signals, and fills `outputs` with NaN if a wait of this group has failed. Several may
// end a call; the `final` one releases the lock.
void launch_end(const Group& group, int slot, const SignalList& list, const PoisonList& outputs, bool final,
                cudaStream_t stream);

// Writes words to device memory. They travel as parameters of kernels, so that a captured launch holds them.
void launch_store_words(const std::vector<uint64_t>& words, uint64_t* to, cudaStream_t stream);

// Writes the device's clock (globaltimer, ns) to `where`, in pinned or device memory.
void launch_stamp(uint64_t* where, cudaStream_t stream);

// Copies by kernels, 16 bytes per thread if the addresses allow it.
void launch_copy(const Span& src, const Span& dst, cudaStream_t stream);
// Copies rows that have arrived to their places in the result. The order is read on the device; a number that no row has
// is an error of the device, as of torch's index.
void launch_order(const OrderedRows& rows, cudaStream_t stream);
// dst = (sum of sources in their order, in fp32) / divisor, rounded once.
void launch_reduce(const std::vector<Source>& sources, const Span& dst, DType dst_type, float divisor, cudaStream_t stream);
// The same sum if some sources are float8 with scales.
void launch_reduce_scaled(const std::vector<Source>& sources, const Span& dst, DType dst_type, float divisor,
                          cudaStream_t stream);
// Rounds numbers of `type` to float8 and scales, like the CPU's round_for_wire.
void launch_round_for_wire(const Rounding& rounding, DType type, cudaStream_t stream);

// Stores the maxima of histories in `amax` [count] and their slots in `slots` [count]. `is_step`: pushes `current` before,
// where it is above 0, and clears it.
void launch_advance_histories(const AmaxHistories& histories, bool is_step, float* amax, int64_t* slots, cudaStream_t stream);
// Raises current[slots[index]] to *sample and to the amax of `cast`, and stores *scale in `scale_copy`.
// `past` is not used.
void launch_raise_amax(const AmaxHistories& histories, int64_t index, const Quantized& cast, const float* sample,
                       float* scale_copy, cudaStream_t stream);
// Casts a weight to float8 if its bits have changed since the last call (fp8_cached_weight.cu). Elements of `type`, f32 or
// `round_to`, are first rounded to `round_to`, bf16 or f16.
void launch_weight_cast(const WeightCast& cast, DType type, DType round_to, cudaStream_t stream);
int64_t cached_weight_scratch_words(int64_t scales);

// Transposes bytes [rows, cols], both multiples of 16, at addresses that are multiples of 16.
void launch_transpose(const char* from, int64_t rows, int64_t cols, char* to, cudaStream_t stream);

// A fused collective (core/fused_collective.h). `memory`: of each rank, in symmetric memory; `region`: bytes of a block's
// region in a slot. `call` has the buffers. Waits end at `timeout_ns`; the block's results are NaN then.
void launch_fused_collective(const Group& group, const Call& call, const std::vector<char*>& memory, int64_t region,
                             int64_t timeout_ns, cudaStream_t stream);
// What a launch of a fused collective on the current device has that peers must have as well: the blocks that share a row, and
// whether slices travel as packets.
struct FusedForm {
    int cluster;
    bool in_packets;
};
FusedForm form_of(const Call& call);
// Bytes from what one source of a one-shot call pushes to a block to what the next one does.
int64_t bytes_of_source(const Call& call);

// Throws NamedError("UbOverlapError") for a CUDA error. `what`: the action that failed, "launch a wait".
void check(cudaError_t code, const char* what);

// Lets this thread allocate memory while a stream is being captured. An allocation touches no stream.
class RelaxedCapture {
  public:
    RelaxedCapture() { check(cudaThreadExchangeStreamCaptureMode(&mode_), "relax the capture"); }
    ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    RelaxedCapture(const RelaxedCapture&) = delete;
    RelaxedCapture& operator=(const RelaxedCapture&) = delete;

  private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace ub_overlap::cuda
