// The weight cache on CUDA: float8 casts of weights that outlive calls. runtime/fp8/weight_cache/ allocates their memory,
// evicts them, and has the whole cache for other devices. Here is the path of every call: find the cast, and let the device
// check whether it is up to date.
#ifdef UB_OVERLAP_CUDA
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <mutex>
#include <unordered_map>

#include "bindings/ops/ops.h"
#include "bindings/ops/run_op.h"
#include "core/forward_uses.h"
#include "cuda/device.h"
#include "cuda/kernels.h"

namespace ub_overlap {
namespace {

using OptionalAxis = std::optional<int64_t>;

// The cast of one weight; the Python class of this name has the same fields (runtime/fp8/weight_cache/weight_cast.py).
struct CachedWeight {
    int64_t offset, rows, cols;
    at::ScalarType dtype, round_to;
    OptionalAxis axis;
    at::Tensor q, scale, checksum, scratch;
    c10::cuda::CUDAStream stream;  // of the last call
    at::Tensor transposed{};       // a copy [C, R] of q, once one was asked for
    ForwardUses forward_uses{};
    bool captured = false;           // graphs hold its addresses
    bool replays_skip_copy = false;  // graphs were captured before there was a transposed copy: they cast without it

    bool is_cast_of(const at::Tensor& weight, at::ScalarType rounded, OptionalAxis along) const {
        return offset == weight.storage_offset() && rows == weight.size(0) && cols == weight.size(1) &&
               dtype == weight.scalar_type() && round_to == rounded && axis == along;
    }
};

// Cached weights by their storage, which outlives them: Python evicts them with it. The mutex is held until the kernels of a
// call are launched. Without it, calls of two threads would share scratch, and the cast of one could run after the checksum of
// the other.
struct WeightCache {
    std::mutex mutex;
    std::unordered_map<const void*, std::vector<CachedWeight>> by_storage;
    std::vector<CachedWeight> held_by_graphs;  // of freed weights: a graph may be replayed on other memory at their address

    CachedWeight* find(const at::Tensor& weight, at::ScalarType round_to, OptionalAxis axis) {
        const auto entry = by_storage.find(weight.storage().unsafeGetStorageImpl());
        if (entry == by_storage.end()) return nullptr;
        for (CachedWeight& cached : entry->second) {
            if (cached.is_cast_of(weight, round_to, axis)) return &cached;
        }
        return nullptr;
    }
};

WeightCache& cache() {
    static WeightCache* instance = new WeightCache;  // never freed: CUDA may shut down before the process ends
    return *instance;
}

bool fits(const at::Tensor& t, const at::Tensor& weight, at::ScalarType dtype, int64_t count) {
    return t.scalar_type() == dtype && t.is_contiguous() && t.device() == weight.device() && t.numel() == count;
}

void check(const at::Tensor& weight, at::ScalarType round_to, OptionalAxis axis, const at::Tensor& q, const at::Tensor& scale,
           const at::Tensor& checksum, const at::Tensor& scratch) {
    const char* where = "fp8_cached_weight";
    const at::ScalarType dtype = weight.scalar_type();
    expect(where, round_to == at::kBFloat16 || round_to == at::kHalf, "unsupported round_to", c10::toString(round_to),
           "bfloat16 or float16");
    expect(where, dtype == round_to || dtype == at::kFloat, "unsupported dtype of the weight", c10::toString(dtype),
           "`round_to` or float32");
    const std::string shape = c10::str(weight.sizes(), " of strides ", weight.strides());
    expect(where, weight.dim() == 2 && weight.is_contiguous() && weight.size(0) % 16 == 0 && weight.size(1) % 16 == 0,
           "unsupported shape of the weight", shape, "contiguous [R, C] divisible by 16");
    expect(where, !axis || *axis == -1 || *axis == -2, "unsupported axis", std::to_string(axis.value_or(0)), "none, -1 or -2");
    const int64_t scales = !axis ? 1 : *axis == -1 ? weight.size(0) : weight.size(1);
    expect(where,
           fits(q, weight, at::kFloat8_e4m3fn, weight.numel()) && fits(scale, weight, at::kFloat, scales) &&
               fits(checksum, weight, at::kLong, 2) &&
               fits(scratch, weight, at::kLong, cuda::cached_weight_scratch_words(scales)),
           "the memory of the cast does not fit", shape, "q, scale, checksum and scratch of the weight's sizes, on its device");
}

void launch(const at::Tensor& weight, at::ScalarType round_to, OptionalAxis axis, const at::Tensor& q, const at::Tensor& scale,
            const at::Tensor& checksum, const at::Tensor& scratch, const at::Tensor& transposed, cudaStream_t stream) {
    if (weight.numel() == 0) return;
    const bool aligned = reinterpret_cast<uint64_t>(weight.const_data_ptr()) % 16 == 0;
    const at::Tensor dense = aligned ? weight : weight.clone();
    const cuda::WeightCast cast{static_cast<const char*>(dense.const_data_ptr()),
                                weight.size(0),
                                weight.size(1),
                                static_cast<int>(axis.value_or(0)),
                                static_cast<char*>(q.mutable_data_ptr()),
                                transposed.defined() ? static_cast<char*>(transposed.mutable_data_ptr()) : nullptr,
                                scale.mutable_data_ptr<float>(),
                                checksum.mutable_data_ptr<int64_t>(),
                                scratch.mutable_data_ptr<int64_t>()};
    const DType rounded = round_to == at::kBFloat16 ? DType::bf16 : DType::f16;
    cuda::launch_weight_cast(cast, weight.scalar_type() == at::kFloat ? DType::f32 : rounded, rounded, stream);
}

// Makes `stream` wait for the stream that used the cast last.
void order_after_last_use(CachedWeight& cached, const c10::cuda::CUDAStream& stream) {
    if (cached.stream == stream) return;
    if (cuda::capture_of(cached.stream.stream()) == 0) {  // else the program orders them, like all captured work
        cudaEvent_t event = nullptr;
        cuda::check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "create an event");
        const cudaError_t recorded = cudaEventRecord(event, cached.stream.stream());
        const cudaError_t waits = recorded == cudaSuccess ? cudaStreamWaitEvent(stream.stream(), event, 0) : recorded;
        cudaEventDestroy(event);
        cuda::check(waits, "wait for the stream that used a weight before");
    }
    cached.stream = stream;
}

}  // namespace

TwoTensors fp8_cached_weight(const at::Tensor& weight, at::ScalarType round_to, OptionalAxis axis,
                             const std::optional<at::Tensor>& after, bool reuse_forward, at::TensorList siblings) {
    (void)after;  // an edge of the graph
    return run_op(weight.device(), [&]() -> TwoTensors {
        const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(weight.device().index());
        const uint64_t capture = cuda::capture_of(stream.stream());
        {
            const std::lock_guard<std::mutex> lock(cache().mutex);
            if (CachedWeight* cached = cache().find(weight, round_to, axis)) {
                at::Tensor scratch = cached->scratch;
                if (capture == 0) {
                    order_after_last_use(*cached, stream);
                } else {
                    cached->captured = true;
                    scratch = at::zeros_like(scratch);  // owned by the graph: replays and eager calls may overlap
                }
                // The host does not see replays. One may have been the last forward, and have left an old copy.
                const bool may_be_stale = capture == 0 && cached->replays_skip_copy;
                if (may_be_stale || !cached->forward_uses.can_reuse(reuse_forward, capture)) {
                    launch(weight, round_to, axis, cached->q, cached->scale, cached->checksum, scratch, cached->transposed,
                           stream.stream());
                }
                cached->forward_uses.record(reuse_forward, capture);
                return {cached->q, cached->scale};
            }
        }
        static const auto miss =
            c10::Dispatcher::singleton()
                .findSchemaOrThrow("ub_overlap::fp8_cached_weight_miss", "")
                .typed<TwoTensors(const at::Tensor&, at::ScalarType, OptionalAxis, bool, at::TensorList)>();
        return miss.call(weight, round_to, axis, reuse_forward, siblings);
    });
}

void fp8_cached_weight_insert(const at::Tensor& weight, at::ScalarType round_to, OptionalAxis axis, const at::Tensor& q,
                              const at::Tensor& scale, const at::Tensor& checksum, const at::Tensor& scratch) {
    run_op(weight.device(), [&]() {
        check(weight, round_to, axis, q, scale, checksum, scratch);
        const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(weight.device().index());
        const std::lock_guard<std::mutex> lock(cache().mutex);
        if (cache().find(weight, round_to, axis) != nullptr) return;  // another thread was first
        cache().by_storage[weight.storage().unsafeGetStorageImpl()].push_back({weight.storage_offset(), weight.size(0),
                                                                               weight.size(1), weight.scalar_type(), round_to,
                                                                               axis, q, scale, checksum, scratch, stream});
    });
}

at::Tensor fp8_cached_weight_transposed(const at::Tensor& weight, at::ScalarType round_to, OptionalAxis axis,
                                        const at::Tensor& q) {
    return run_op(weight.device(), [&]() -> at::Tensor {
        const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(weight.device().index());
        {
            const std::lock_guard<std::mutex> lock(cache().mutex);
            const CachedWeight* cached = cache().find(weight, round_to, axis);
            const bool is_own = cached != nullptr && cached->q.const_data_ptr() == q.const_data_ptr();
            if (is_own && cached->transposed.defined()) return cached->transposed;
            if (!is_own || cuda::capture_of(stream.stream()) != 0) {
                return q.view(at::kByte).t().clone(at::MemoryFormat::Contiguous).view(q.scalar_type());
            }
        }
        static const auto miss = c10::Dispatcher::singleton()
                                     .findSchemaOrThrow("ub_overlap::fp8_cached_weight_transposed_miss", "")
                                     .typed<at::Tensor(const at::Tensor&, at::ScalarType, OptionalAxis, const at::Tensor&)>();
        return miss.call(weight, round_to, axis, q);
    });
}

void fp8_cached_weight_insert_transposed(const at::Tensor& weight, at::ScalarType round_to, OptionalAxis axis,
                                         const at::Tensor& transposed) {
    run_op(weight.device(), [&]() {
        expect("fp8_cached_weight_insert_transposed", fits(transposed, weight, at::kFloat8_e4m3fn, weight.numel()),
               "the memory of the copy does not fit", c10::str(transposed.toString(), " ", transposed.sizes()),
               "contiguous float8_e4m3fn of the weight's size, on its device");
        const std::lock_guard<std::mutex> lock(cache().mutex);
        CachedWeight* cached = cache().find(weight, round_to, axis);
        if (cached == nullptr || cached->transposed.defined()) return;  // evicted, or another thread was first
        transposed.view(at::kByte).copy_(cached->q.view(at::kByte).t());
        cached->checksum[1].copy_(cached->checksum[0]);
        cached->transposed = transposed;
        cached->replays_skip_copy = cached->captured;
    });
}

void fp8_cached_weight_evict(int64_t storage) {
    std::vector<CachedWeight> evicted;  // freed without the lock
    const std::lock_guard<std::mutex> lock(cache().mutex);
    const auto entry = cache().by_storage.find(reinterpret_cast<const void*>(storage));
    if (entry == cache().by_storage.end()) return;
    for (CachedWeight& cached : entry->second) {
        if (cached.captured) {
            cache().held_by_graphs.push_back(std::move(cached));
            continue;
        }
        for (const at::Tensor* t : {&cached.q, &cached.scale, &cached.checksum, &cached.scratch, &cached.transposed}) {
            if (!t->defined()) continue;
            c10::cuda::CUDACachingAllocator::recordStream(t->storage().data_ptr(), cached.stream);
        }
        evicted.push_back(std::move(cached));
    }
    cache().by_storage.erase(entry);
}

void fp8_cached_weight_refresh(const at::Tensor& weight, at::ScalarType round_to, OptionalAxis axis, at::Tensor& q,
                               at::Tensor& scale, at::Tensor& checksum, at::Tensor& scratch) {
    run_op(weight.device(), [&]() {
        check(weight, round_to, axis, q, scale, checksum, scratch);
        launch(weight, round_to, axis, q, scale, checksum, scratch, {},
               c10::cuda::getCurrentCUDAStream(weight.device().index()).stream());
    });
}

}  // namespace ub_overlap
#endif
