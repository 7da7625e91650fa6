// Kernels of few threads, for synchronization between ranks: waits, signals, aborts.
#include <cstdint>

#include "cuda/flag_wait.h"
#include "cuda/launch.h"

namespace ub_overlap::cuda {
namespace {

// Returns the DONE word of the last call that `source` has ended, 0 for none; of a split slot, its last call.
__device__ uint64_t load_last_done(const Group& g, int own_slot, int source) {
    uint64_t last = 0;
    const int first = own_slot < slots ? 0 : own_slot, end = own_slot < slots ? slots : own_slot + 1;
    for (int slot = first; slot < end; ++slot) {
        const uint64_t word = load_acquire(flag_words(g.shared[g.rank]) + flag_place(FlagKind::done, slot, source, 0, g.ranks));
        if (last == 0 || (word != 0 && static_cast<int32_t>(epoch_half(word) - epoch_half(last)) > 0)) last = word;
    }
    return last;
}

// Waits for a flag, one lane per word. Ends by arrival, by the abort of a peer, or by the deadline; never traps. `word`: epoch
// and tag of the call. `previous`: epoch of the call that used the slot before, 0 for none; for waits for past calls only.
__device__ void wait_for(const Group& g, int slot, const WaitWord& w, uint64_t word, uint32_t previous, uint64_t timeout_ns) {
    const uint32_t expected = w.past ? previous : epoch_half(word);
    if (w.past && expected == 0) return;  // no call has used the slot yet
    const auto arrived = [expected, past = w.past](uint64_t seen) {
        return seen != 0 && (!past || static_cast<int32_t>(epoch_half(seen) - expected) >= 0);
    };
    const auto last_seen = [&](uint64_t seen) { return w.past ? seen : load_last_done(g, slot, w.source); };
    const uint64_t full = static_cast<uint64_t>(expected) << 32 | (word & 0xffffffffu);
    const uint64_t seen = spin_for_flag(g, w, full, timeout_ns, arrived, last_seen);
    if (seen == 0) return;
    const uint32_t tag = static_cast<uint32_t>(seen), own_tag = static_cast<uint32_t>(word);
    if (w.clears) *reinterpret_cast<volatile uint64_t*>(flag_words(g.shared[g.rank]) + w.place) = 0;
    if (!w.past && tag != (own_tag ^ w.salt))
        fail(g, w, WaitOutcome::mismatch, word, static_cast<uint64_t>(expected) << 32 | tag, 0, 0);
}

// Takes the group lock and returns the epoch of the call that held it before. The host orders eager calls of several streams
// by events, but it does not know when a graph is replayed: such calls contend here. A holder that makes progress may take any
// time, as each of its waits has its own deadline. A holder without a heartbeat for `timeout_ns` was not issued to its end, or
// its kernels cannot start. With one hardware queue for all streams (CUDA_DEVICE_MAX_CONNECTIONS=1) they may be queued after
// this very kernel.
__device__ uint32_t take_group_lock(const Group& g, uint64_t timeout_ns) {
    auto* lock = reinterpret_cast<unsigned long long*>(&g.local->epoch_and_lock);
    unsigned long long old = atomicOr(lock, group_lock);
    if ((old & group_lock) == 0) return static_cast<uint32_t>(old);
    const uint64_t begin = now_ns();
    while (load_failed(g.local) == 0) {
        __nanosleep(256);
        old = atomicOr(lock, group_lock);
        if ((old & group_lock) == 0) break;
        const uint64_t now = now_ns(), heartbeat = *reinterpret_cast<const volatile uint64_t*>(&g.local->heartbeat);
        if (const uint64_t abort = load_acquire(&g.shared[g.rank]->abort); abort != 0) {
            WaitWord none{};
            none.source = static_cast<uint16_t>(g.rank);
            fail(g, none, WaitOutcome::aborted, (old & 0xffffffffu) << 32, 0, abort, now - begin);
            break;
        }
        const uint64_t since = heartbeat > begin ? heartbeat : begin;
        if (now <= since || now - since <= timeout_ns) continue;
        WaitWord own{};
        own.source = static_cast<uint16_t>(g.rank);
        fail(g, own, WaitOutcome::group_lock, (old & 0xffffffffu) << 32, 0, 0, now - begin);
    }
    return static_cast<uint32_t>(old);
}

// Takes the lock of a split slot. The host refuses a start in an open slot, but does not know of replays: one that contends
// here waits for the finish.
__device__ void open_split_slot(const Group& g, int slot, uint32_t tag, uint64_t timeout_ns) {
    uint32_t* is_open = &g.local->is_open[slot - slots];
    const uint64_t begin = now_ns();
    while (atomicCAS(is_open, 0u, 1u) != 0 && load_failed(g.local) == 0) {
        __nanosleep(256);
        const uint64_t waited = now_ns() - begin, abort = load_acquire(&g.shared[g.rank]->abort);
        if (abort == 0 && waited <= timeout_ns) continue;
        WaitWord own{};
        own.source = static_cast<uint16_t>(g.rank);
        fail(g, own, abort ? WaitOutcome::aborted : WaitOutcome::group_lock, tag, 0, abort, waited);
    }
    __threadfence();  // sees what the slot's last finish has written, maybe on another stream
}

__global__ void __launch_bounds__(32) begin_kernel(Group g, int slot, uint32_t tag, WaitList free, uint64_t timeout_ns) {
    uint32_t epoch = 0, previous = 0;
    if (threadIdx.x == 0) {
        LocalState* s = g.local;
        const bool is_split = slot >= slots;
        if (is_split) open_split_slot(g, slot, tag, timeout_ns);
        const uint32_t last_of_group = is_split ? 0 : take_group_lock(g, timeout_ns);
        __threadfence();  // sees what the previous call has written, maybe on another stream
        previous = *reinterpret_cast<const volatile uint32_t*>(&s->last_epoch[slot]);
        epoch = (is_split ? previous : last_of_group) + 1;
        if (epoch == 0) epoch = 1;
        if (!is_split) *reinterpret_cast<volatile uint64_t*>(&s->epoch_and_lock) = group_lock | epoch;
        s->last_epoch[slot] = epoch;
        s->word[slot] = static_cast<uint64_t>(epoch) << 32 | tag;
        update_heartbeat(g, now_ns());
    }
    // The lanes get the epochs by shuffles: a fence and loads would take longer than the rest of the kernel.
    epoch = __shfl_sync(0xffffffffu, epoch, 0), previous = __shfl_sync(0xffffffffu, previous, 0);
    const uint64_t word = static_cast<uint64_t>(epoch) << 32 | tag;
    for (int i = threadIdx.x; i < free.count; i += 32) wait_for(g, slot, free.words[i], word, previous, timeout_ns);
}

__global__ void __launch_bounds__(32) wait_kernel(Group g, int slot, WaitList list, uint64_t timeout_ns) {
    if (threadIdx.x == 0) update_heartbeat(g, now_ns());
    const uint64_t word = g.local->word[slot];
    for (int i = threadIdx.x; i < list.count; i += 32) wait_for(g, slot, list.words[i], word, 0, timeout_ns);
}

// Called by all threads of one block, at least as many as the list has words. A release is cumulative: a peer that acquires a
// DONE word also sees the words that other threads of the block have cleared before the barrier.
__device__ void signal_all(const Group& g, int slot, const SignalList& list) {
    const uint64_t word = g.local->word[slot];
    for (int i = 0; i < list.count; ++i) {
        if (!list.words[i].done) continue;
        for (const FlagKind kind : {FlagKind::ready, FlagKind::ready2}) {
            uint64_t* words = flag_words(g.shared[g.rank]) + flag_place(kind, slot, list.words[i].rank, 0, g.ranks);
            for (int index = threadIdx.x; index < max_pieces; index += blockDim.x) words[index] = 0;
        }
    }
    __syncthreads();
    if (const int i = static_cast<int>(threadIdx.x); i < list.count) {
        const SignalWord& s = list.words[i];
        store_release(flag_words(g.shared[s.rank]) + s.place, s.done ? word : ready_word(static_cast<uint32_t>(word)));
    }
}

__global__ void __launch_bounds__(32) signal_kernel(Group g, int slot, SignalList list) {
    signal_all(g, slot, list);
}

// One block: a call that succeeds writes no output here.
constexpr int end_threads = 256;

__global__ void __launch_bounds__(end_threads) end_kernel(Group g, int slot, SignalList list, PoisonList outputs, bool final) {
    // An aborting peer may have pushed before we had released the slot, so the data that this call read may be wrong too. The
    // last thread looks while the others signal.
    bool failed = false;
    if (threadIdx.x == end_threads - 1) {
        const uint64_t abort = load_acquire(&g.shared[g.rank]->abort);
        if (abort != 0) fail(g, WaitWord{}, WaitOutcome::aborted, g.local->word[slot], 0, abort, 0);
        failed = abort != 0 || load_failed(g.local) != 0;
    }
    signal_all(g, slot, list);
    failed = __syncthreads_or(failed);
    if (final && threadIdx.x == 0) {
        // Releases the lock: from here on `word`, `last_epoch` and a failure may be the next call's.
        __threadfence();
        if (slot >= slots) {
            atomicExch(&g.local->is_open[slot - slots], 0u);
        } else {
            atomicAnd(reinterpret_cast<unsigned long long*>(&g.local->epoch_and_lock),
                      ~static_cast<unsigned long long>(group_lock));
        }
    }
    if (!failed) return;
    for (int part = 0; part < outputs.count; ++part) {
        const int64_t bytes = outputs.parts[part].bytes, halves = bytes / 2;
        auto* data = reinterpret_cast<uint16_t*>(outputs.parts[part].data);
        if (bytes % 2 && threadIdx.x == 0) outputs.parts[part].data[bytes - 1] = static_cast<char>(0xff);
        for (int64_t i = threadIdx.x; i < halves; i += end_threads) data[i] = 0xffff;
    }
}

__global__ void __launch_bounds__(1) stamp_kernel(uint64_t* where) {
    *reinterpret_cast<volatile uint64_t*>(where) = now_ns();
}

}  // namespace

void check(cudaError_t code, const char* what) {
    if (code == cudaSuccess) return;
    cudaGetLastError();  // clears an error that is not sticky, so that no later check reports it
    throw NamedError("UbOverlapError", {{"what", std::string("cannot ") + what + ": " + cudaGetErrorString(code)},
                                        {"got", cudaGetErrorName(code)}});
}

void preload_waits() {
    load(&begin_kernel, 32), load(&wait_kernel, 32), load(&signal_kernel, 32), load(&end_kernel, end_threads);
    load(&stamp_kernel, 1);
}

void launch_begin(const Group& group, int slot, uint32_t tag, const WaitList& free, int64_t timeout_ns, cudaStream_t stream) {
    begin_kernel<<<1, 32, 0, stream>>>(group, slot, tag, free, static_cast<uint64_t>(timeout_ns));
    check(cudaGetLastError(), "launch the first kernel of a call");
}

void launch_wait(const Group& group, int slot, const WaitList& list, int64_t timeout_ns, cudaStream_t stream) {
    if (list.count == 0) return;
    launch(&wait_kernel, 1, 32, stream, "launch a wait", group, slot, list, timeout_ns);
}

void launch_signal(const Group& group, int slot, const SignalList& list, cudaStream_t stream) {
    if (list.count == 0) return;
    signal_kernel<<<1, 32, 0, stream>>>(group, slot, list);
    check(cudaGetLastError(), "launch a signal");
}

void launch_end(const Group& group, int slot, const SignalList& list, const PoisonList& outputs, bool final,
                cudaStream_t stream) {
    launch(&end_kernel, 1, end_threads, stream, "launch the last kernel of a call", group, slot, list, outputs, final);
}

void launch_stamp(uint64_t* where, cudaStream_t stream) {
    stamp_kernel<<<1, 1, 0, stream>>>(where);
    check(cudaGetLastError(), "launch a time stamp");
}

}  // namespace ub_overlap::cuda
