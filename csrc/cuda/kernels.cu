#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "core/failure.h"
#include "cuda/kernels.h"

namespace ub_overlap::cuda {
namespace {

// ---- words between ranks ----

__device__ inline uint64_t load_acquire(const uint64_t* at) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}
__device__ inline void store_release(uint64_t* at, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
__device__ inline uint64_t now_ns() {
    uint64_t value;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
    return value;
}
__device__ inline uint32_t load_failed(const LocalState* local) {
    return *reinterpret_cast<const volatile uint32_t*>(&local->failed);
}
__device__ inline uint64_t* flag_words(SharedState* shared) {
    return reinterpret_cast<uint64_t*>(shared + 1);
}
__device__ inline uint32_t epoch_half(uint64_t word) {
    return static_cast<uint32_t>(word >> 32);
}

// Whom to blame when `peer` is late: the end of the chain of ranks that wait for one another.
__device__ int culprit_behind(const Group& g, int peer) {
    int blamed = peer;
    for (int hops = 0; hops < g.ranks; ++hops) {
        const uint64_t next = load_acquire(&g.shared[blamed]->waiting);
        if (next == 0 || static_cast<int>(next) - 1 == g.rank) return blamed;
        blamed = static_cast<int>(next) - 1;
    }
    return peer;  // they wait in a circle
}

// The first failure is kept: written down for the host, and told to all ranks.
__device__ void fail(const Group& g, const WaitWord& w, WaitOutcome outcome, uint64_t wanted, uint64_t seen, uint64_t abort,
                     uint64_t waited_ns) {
    if (atomicCAS(&g.local->failed, 0u, 1u) != 0) return;
    const int culprit = outcome == WaitOutcome::timeout ? culprit_behind(g, w.source) : w.source;
    volatile WaitFailure* record = g.failure;
    record->kind = w.kind, record->source = w.source, record->index = w.index, record->culprit = culprit;
    record->wanted = wanted, record->seen = seen, record->abort = abort, record->waited_ns = waited_ns;
    __threadfence_system();
    record->outcome = static_cast<uint32_t>(outcome);
    __threadfence_system();
    if (outcome != WaitOutcome::aborted) {
        AbortWord a;
        a.code =
            static_cast<uint32_t>(outcome == WaitOutcome::timeout ? FailureCode::peer_timeout : FailureCode::site_mismatch);
        a.reporter = g.rank, a.culprit = culprit, a.kind = w.kind, a.index = w.index, a.epoch = epoch_half(wanted);
        abort = pack_abort(a);
        for (int r = 0; r < g.ranks; ++r) {
            if (load_acquire(&g.shared[r]->abort) == 0) store_release(&g.shared[r]->abort, abort);
        }
    }
}

// One lane a word. Ends by arrival, by a peer that gave up, or by the deadline; never traps.
__device__ void wait_for(const Group& g, int slot, const WaitWord& w, uint64_t timeout_ns) {
    if (load_failed(g.local)) return;
    const uint64_t word = g.local->word[slot];
    const uint32_t wanted = w.past ? g.local->before[slot] : epoch_half(word);
    if (w.past && wanted == 0) return;  // nobody has used the slot yet
    SharedState* mine = g.shared[g.rank];
    const uint64_t* flag = flag_words(mine) + w.place;
    const auto arrived = [wanted](uint64_t seen) { return seen != 0 && static_cast<int32_t>(epoch_half(seen) - wanted) >= 0; };
    uint64_t seen = load_acquire(flag);
    if (!arrived(seen)) {
        const uint64_t begin = now_ns();
        volatile uint64_t* waiting = &mine->waiting;
        *waiting = w.source + 1;
        for (uint32_t turn = 1;; ++turn) {
            seen = load_acquire(flag);
            if (arrived(seen)) break;
            if (turn % 8 == 0) {
                const uint64_t abort = load_acquire(&mine->abort), waited = now_ns() - begin;
                const bool late = waited > timeout_ns, failed = load_failed(g.local) != 0;
                if (abort != 0 || late || failed) {
                    // What has arrived still counts: a peer that failed later has sent all of this call.
                    seen = load_acquire(flag);
                    if (arrived(seen)) break;
                    const uint64_t full = static_cast<uint64_t>(wanted) << 32 | (w.past ? 0 : word & 0xffffffffu);
                    if (!failed) fail(g, w, abort ? WaitOutcome::aborted : WaitOutcome::timeout, full, seen, abort, waited);
                    return;  // `waiting` stays: it tells others whom we waited for
                }
            }
            __nanosleep(turn < 64 ? 32 : 256);
        }
        *waiting = 0;
    }
    if (!w.past && seen != word) fail(g, w, WaitOutcome::mismatch, word, seen, 0, 0);
}

__global__ void __launch_bounds__(32) begin_kernel(Group g, int slot, uint32_t tag, WaitList free, uint64_t timeout_ns) {
    if (threadIdx.x == 0) {
        LocalState* s = g.local;
        uint32_t epoch = s->epoch + 1;
        if (epoch == 0) epoch = 1;
        s->epoch = epoch;
        s->before[slot] = s->used[slot];
        s->used[slot] = epoch;
        s->word[slot] = static_cast<uint64_t>(epoch) << 32 | tag;
        __threadfence();
    }
    __syncwarp();
    for (int i = threadIdx.x; i < free.count; i += 32) wait_for(g, slot, free.words[i], timeout_ns);
}

__global__ void __launch_bounds__(32) wait_kernel(Group g, int slot, WaitList list, uint64_t timeout_ns) {
    for (int i = threadIdx.x; i < list.count; i += 32) wait_for(g, slot, list.words[i], timeout_ns);
}

__device__ void signal_all(const Group& g, int slot, const SignalList& list) {
    for (int i = threadIdx.x; i < list.count; i += blockDim.x) {
        const SignalWord& s = list.words[i];
        __threadfence_system();
        store_release(flag_words(g.shared[s.rank]) + s.place, g.local->word[slot]);
    }
}

__global__ void __launch_bounds__(32) signal_kernel(Group g, int slot, SignalList list) {
    signal_all(g, slot, list);
}

constexpr int end_blocks = 32, end_threads = 128;

__global__ void __launch_bounds__(end_threads) end_kernel(Group g, int slot, SignalList list, PoisonList outputs) {
    if (blockIdx.x == 0) signal_all(g, slot, list);
    // A peer that gave up may have pushed before we had left the slot: what this call read is not to be trusted either.
    bool broken = false;
    if (threadIdx.x == 0) {
        const uint64_t abort = load_acquire(&g.shared[g.rank]->abort);
        if (abort != 0) fail(g, WaitWord{}, WaitOutcome::aborted, g.local->word[slot], 0, abort, 0);
        broken = abort != 0 || load_failed(g.local) != 0;
    }
    if (!__syncthreads_or(broken)) return;
    for (int part = 0; part < outputs.count; ++part) {
        const int64_t halves = outputs.parts[part].bytes / 2;  // the smallest element is two bytes
        auto* data = reinterpret_cast<uint16_t*>(outputs.parts[part].data);
        for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < halves; i += gridDim.x * blockDim.x) {
            data[i] = 0xffff;
        }
    }
}

__global__ void __launch_bounds__(1) stamp_kernel(uint64_t* where) {
    *reinterpret_cast<volatile uint64_t*>(where) = now_ns();
}

// ---- data ----

template <typename Vec>
__global__ void copy_kernel(const char* src, int64_t src_stride, char* dst, int64_t dst_stride, int64_t per_block,
                            int64_t total) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < total; i += step) {
        const int64_t block = i / per_block, at = i - block * per_block;
        reinterpret_cast<Vec*>(dst + block * dst_stride)[at] = reinterpret_cast<const Vec*>(src + block * src_stride)[at];
    }
}

__device__ inline float to_float(float v) {
    return v;
}
__device__ inline float to_float(__nv_bfloat16 v) {
    return __bfloat162float(v);
}
__device__ inline float to_float(__half v) {
    return __half2float(v);
}
__device__ inline void from_float(float v, float& to) {
    to = v;
}
__device__ inline void from_float(float v, __nv_bfloat16& to) {
    to = __float2bfloat16_rn(v);
}
__device__ inline void from_float(float v, __half& to) {
    to = __float2half_rn(v);
}

constexpr int sources_at_once = 8;  // loads in flight a thread

struct Sources {
    int32_t count;
    const char* data[max_ranks];
    int64_t stride[max_ranks];
};

constexpr int vector_bytes(int bytes) {
    return bytes > 16 ? 16 : bytes;
}

template <typename T, int n>
struct alignas(vector_bytes(sizeof(T) * n)) Pack {
    T v[n];
};

template <typename S, typename D, int n>
__global__ void __launch_bounds__(256)
    reduce_kernel(Sources sources, char* dst, int64_t dst_stride, int64_t per_block, int64_t total, float divisor) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < total; i += step) {
        const int64_t block = i / per_block, at = i - block * per_block;
        float sum[n];
        for (int first = 0; first < sources.count; first += sources_at_once) {
            Pack<S, n> loaded[sources_at_once];
#pragma unroll
            for (int k = 0; k < sources_at_once; ++k) {
                if (first + k < sources.count) {
                    const char* from = sources.data[first + k] + block * sources.stride[first + k];
                    loaded[k] = reinterpret_cast<const Pack<S, n>*>(from)[at];
                }
            }
#pragma unroll
            for (int k = 0; k < sources_at_once; ++k) {
                if (first + k < sources.count) {
#pragma unroll
                    for (int e = 0; e < n; ++e) {
                        const float value = to_float(loaded[k].v[e]);
                        sum[e] = first + k == 0 ? value : sum[e] + value;
                    }
                }
            }
        }
        Pack<D, n> out;
#pragma unroll
        for (int e = 0; e < n; ++e) from_float(divisor == 1.0f ? sum[e] : sum[e] / divisor, out.v[e]);
        reinterpret_cast<Pack<D, n>*>(dst + block * dst_stride)[at] = out;
    }
}

// Calls `body` with a value of the C++ type that `type` stands for.
template <typename Body>
void with_type(DType type, Body body) {
    switch (type) {
        case DType::f32:
            return body(float{});
        case DType::bf16:
            return body(__nv_bfloat16{});
        case DType::f16:
            return body(__half{});
    }
}

unsigned blocks_for(int64_t items, int threads) {
    constexpr int64_t most = 132 * 8;
    return static_cast<unsigned>(std::min((items + threads - 1) / threads, most));
}

// Everything that must be a multiple of the vector's size, or-ed together.
uint64_t low_bits(const Span& span) {
    return reinterpret_cast<uint64_t>(span.data) | (span.blocks > 1 ? static_cast<uint64_t>(span.stride) : 0);
}

// One block of all, where the blocks lie one behind the other.
Span joined(Span span) {
    if (span.stride != span.bytes && span.blocks != 1) return span;
    span.bytes *= span.blocks;
    span.blocks = 1, span.stride = span.bytes;
    return span;
}

template <typename Vec>
void copy_as(const Span& src, const Span& dst, cudaStream_t stream) {
    const int64_t per_block = src.bytes / static_cast<int64_t>(sizeof(Vec)), total = per_block * src.blocks;
    copy_kernel<Vec><<<blocks_for(total, 256), 256, 0, stream>>>(src.data, src.stride, dst.data, dst.stride, per_block, total);
}

template <typename Kernel>
void load(Kernel* kernel) {
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), "load a kernel");
}

template <typename S, typename D>
void load_reduce() {
    load(&reduce_kernel<S, D, 16 / static_cast<int>(sizeof(S))>);
    load(&reduce_kernel<S, D, 1>);
}

}  // namespace

void check(cudaError_t code, const char* what) {
    if (code == cudaSuccess) return;
    cudaGetLastError();  // an error that is not sticky must not be found again by somebody else
    throw NamedError("UbOverlapError", {{"what", std::string("cannot ") + what + ": " + cudaGetErrorString(code)},
                                        {"got", cudaGetErrorName(code)}});
}

void preload() {
    load(&begin_kernel), load(&wait_kernel), load(&signal_kernel), load(&end_kernel), load(&stamp_kernel);
    load(&copy_kernel<uint4>), load(&copy_kernel<uint2>), load(&copy_kernel<uint32_t>), load(&copy_kernel<uint16_t>);
    for (DType from : {DType::f32, DType::bf16, DType::f16}) {
        for (DType to : {DType::f32, DType::bf16, DType::f16}) {
            with_type(from, [&](auto s) { with_type(to, [&](auto d) { load_reduce<decltype(s), decltype(d)>(); }); });
        }
    }
}

void launch_begin(const Group& group, int slot, uint32_t tag, const WaitList& free, int64_t timeout_ns, cudaStream_t stream) {
    begin_kernel<<<1, 32, 0, stream>>>(group, slot, tag, free, static_cast<uint64_t>(timeout_ns));
    check(cudaGetLastError(), "launch the first kernel of a call");
}

void launch_wait(const Group& group, int slot, const WaitList& list, int64_t timeout_ns, cudaStream_t stream) {
    if (list.count == 0) return;
    wait_kernel<<<1, 32, 0, stream>>>(group, slot, list, static_cast<uint64_t>(timeout_ns));
    check(cudaGetLastError(), "launch a wait");
}

void launch_signal(const Group& group, int slot, const SignalList& list, cudaStream_t stream) {
    if (list.count == 0) return;
    signal_kernel<<<1, 32, 0, stream>>>(group, slot, list);
    check(cudaGetLastError(), "launch a signal");
}

void launch_end(const Group& group, int slot, const SignalList& list, const PoisonList& outputs, cudaStream_t stream) {
    end_kernel<<<end_blocks, end_threads, 0, stream>>>(group, slot, list, outputs);
    check(cudaGetLastError(), "launch the last kernel of a call");
}

void launch_stamp(uint64_t* where, cudaStream_t stream) {
    stamp_kernel<<<1, 1, 0, stream>>>(where);
    check(cudaGetLastError(), "launch a time stamp");
}

void launch_copy(const Span& from, const Span& to, cudaStream_t stream) {
    Span src = from, dst = to;
    if (src.bytes == 0 || src.blocks == 0) return;
    if (joined(src).blocks == 1 && joined(dst).blocks == 1) src = joined(src), dst = joined(dst);
    const uint64_t bits = low_bits(src) | low_bits(dst) | static_cast<uint64_t>(src.bytes);
    if (bits % 16 == 0) {
        copy_as<uint4>(src, dst, stream);
    } else if (bits % 8 == 0) {
        copy_as<uint2>(src, dst, stream);
    } else if (bits % 4 == 0) {
        copy_as<uint32_t>(src, dst, stream);
    } else {
        copy_as<uint16_t>(src, dst, stream);
    }
    check(cudaGetLastError(), "launch a local copy");
}

void launch_reduce(const std::vector<Span>& sources, DType source_type, const Span& to, DType dst_type, float divisor,
                   cudaStream_t stream) {
    Span dst = to;
    if (dst.bytes == 0 || dst.blocks == 0 || sources.empty()) return;
    bool flat = joined(dst).blocks == 1;
    for (const Span& source : sources) flat = flat && joined(source).blocks == 1;
    if (flat) dst = joined(dst);
    Sources list{static_cast<int32_t>(sources.size()), {}, {}};
    uint64_t source_bits = 0;
    for (size_t i = 0; i < sources.size(); ++i) {
        const Span source = flat ? joined(sources[i]) : sources[i];
        list.data[i] = source.data, list.stride[i] = source.stride;
        source_bits |= low_bits(source);
    }
    const int64_t count = dst.bytes / size_of(dst_type), most = 16 / size_of(source_type);
    const uint64_t dst_vector = static_cast<uint64_t>(vector_bytes(static_cast<int>(most * size_of(dst_type))));
    const bool vectors = count % most == 0 && source_bits % 16 == 0 && low_bits(dst) % dst_vector == 0;
    with_type(source_type, [&](auto s) {
        with_type(dst_type, [&](auto d) {
            using S = decltype(s);
            using D = decltype(d);
            constexpr int wide = 16 / static_cast<int>(sizeof(S));
            const int64_t per_block = vectors ? count / wide : count, total = per_block * dst.blocks;
            const auto kernel = vectors ? &reduce_kernel<S, D, wide> : &reduce_kernel<S, D, 1>;
            kernel<<<blocks_for(total, 256), 256, 0, stream>>>(list, dst.data, dst.stride, per_block, total, divisor);
        });
    });
    check(cudaGetLastError(), "launch a reduction");
}

}  // namespace ub_overlap::cuda
