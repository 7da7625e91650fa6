// Kernels of channels. Both are one warp with few registers, so they fit next to a matmul on every multiprocessor.
#include "cuda/channel_kernels.h"
#include "cuda/flag_wait.h"
#include "cuda/launch.h"

namespace ub_overlap::cuda {
namespace {

__device__ WaitWord word_of(const ChannelWait& w) {
    WaitWord word{};
    word.source = w.peer, word.index = w.peer,
    word.kind = w.kind;  // `index` is sent to the peers: the other end of the channel
    return word;
}

// Returns whether a stream of this rank waits for the message.
__device__ bool is_awaited(const ChannelWait& w) {
    const auto last = static_cast<uint32_t>(*static_cast<const volatile uint64_t*>(w.awaited));
    return static_cast<int32_t>(last - w.message) >= 0;
}

// Ends by arrival, by the abort of a peer, or by the deadline; never traps. Sets the bit of the peer in `early`, and in
// `waiting` once a stream waits for the message: a rank that has only issued a receive delays others itself.
__global__ void __launch_bounds__(32) channel_wait_kernel(Group g, ChannelWait w, uint64_t timeout_ns) {
    if (threadIdx.x != 0 || load_failed(g.local)) return;
    const auto arrived = [&w](uint64_t seen) { return seen != 0 && static_cast<int32_t>(epoch_half(seen) - w.number) >= 0; };
    const uint64_t expected = static_cast<uint64_t>(w.message) << 32 | w.hash;
    uint64_t seen = load_acquire(w.word);
    if (!arrived(seen)) {
        const uint64_t begin = now_ns();
        SharedState* own = g.shared[g.rank];
        auto* shown = reinterpret_cast<unsigned long long*>(&own->early);
        auto* waiting = reinterpret_cast<unsigned long long*>(&own->waiting);
        const unsigned long long bit = 1ull << w.peer;
        atomicOr(shown, bit);
        for (uint32_t spin = 1;; ++spin) {
            seen = load_acquire(w.word);
            if (arrived(seen)) break;
            // A read of host memory takes a microsecond, which must not delay the look at the word every time.
            if (spin % 512 == 0 && shown != waiting && is_awaited(w)) {
                atomicAnd(shown, ~bit);
                shown = waiting;
            }
            if (spin % 8 == 0) {
                // Another wait for the same rank may have cleared the bit.
                if ((*reinterpret_cast<const volatile unsigned long long*>(shown) & bit) == 0) atomicOr(shown, bit);
                const uint64_t abort = load_acquire(&own->abort), waited = now_ns() - begin;
                const bool failed = load_failed(g.local) != 0;
                if (abort != 0 || waited > timeout_ns || failed) {
                    // An arrived word still counts: a peer that failed later has sent all of this message.
                    seen = load_acquire(w.word);
                    if (arrived(seen)) break;
                    const WaitOutcome outcome = abort ? WaitOutcome::aborted : WaitOutcome::timeout;
                    if (!failed) fail(g, word_of(w), outcome, expected, seen, abort, waited);
                    return;  // the bit stays: it shows the others which rank this one waited for
                }
            }
            __nanosleep(spin < 64 ? 32 : 256);
        }
        atomicAnd(shown, ~bit);
    }
    const bool other = epoch_half(seen) != w.number || static_cast<uint32_t>(seen) != w.hash;
    if (w.hash != 0 && other) fail(g, word_of(w), WaitOutcome::mismatch, expected, seen, 0, 0);
}

__global__ void __launch_bounds__(32) channel_end_kernel(Group g, char* data, int64_t bytes, ChannelWait w) {
    // An aborting peer may have pushed before this rank had copied the slot out.
    bool failed = false;
    if (threadIdx.x == 0) {
        const uint64_t abort = load_acquire(&g.shared[g.rank]->abort);
        const uint64_t expected = static_cast<uint64_t>(w.message) << 32 | w.hash;
        if (abort != 0) fail(g, word_of(w), WaitOutcome::aborted, expected, 0, abort, 0);
        failed = abort != 0 || load_failed(g.local) != 0;
    }
    if (!__any_sync(0xffffffffu, failed)) return;
    for (int64_t i = threadIdx.x; i < bytes; i += 32) data[i] = static_cast<char>(0xff);
}

}  // namespace

void preload_channels() {
    load(&channel_wait_kernel, 32), load(&channel_end_kernel, 32);
}

void launch_channel_wait(const Group& group, const ChannelWait& wait, int64_t timeout_ns, cudaStream_t stream) {
    launch(&channel_wait_kernel, 1, 32, stream, "launch a wait for a message", group, wait, timeout_ns);
}

void launch_channel_end(const Group& group, char* data, int64_t bytes, const ChannelWait& wait, cudaStream_t stream) {
    launch(&channel_end_kernel, 1, 32, stream, "launch the end of a message", group, data, bytes, wait);
}

}  // namespace ub_overlap::cuda
