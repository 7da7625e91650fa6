// Kept float8 casts of weights on CUDA. runtime/fp8/weight_cache/ makes their memory and lets it go, and has all of it for
// other devices; here is what every call takes: find the cast, and let the device see whether it is up to date.
#ifdef UB_OVERLAP_CUDA
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <mutex>
#include <unordered_map>

#include "bindings/ops/ops.h"
#include "bindings/ops/run_op.h"
#include "cuda/device.h"
#include "cuda/kernels.h"

namespace ub_overlap {
namespace {

using OptionalAxis = std::optional<int64_t>;

// `context`: the capture that it was last used in, 0 for none. `looks`: of forwards there since backward used it.
struct Cast {
    int64_t offset, rows, cols;
    at::ScalarType type, through;
    OptionalAxis axis;
    at::Tensor q, scale, kept, scratch;
    c10::cuda::CUDAStream stream;
    unsigned long long context = 0;
    int64_t looks = 0;
    bool captured = false;  // graphs have its addresses

    bool is_of(const at::Tensor& weight, at::ScalarType rounded, OptionalAxis along) const {
        return offset == weight.storage_offset() && rows == weight.size(0) && cols == weight.size(1) &&
               type == weight.scalar_type() && through == rounded && axis == along;
    }
};

// By the weight's storage, which outlives its casts: Python forgets them with it. The mutex is held until a call's kernels are
// launched: two threads' calls would share scratch, and one's cast could come to stand behind the other's look.
struct Casts {
    std::mutex mutex;
    std::unordered_map<const void*, std::vector<Cast>> by_storage;
    std::vector<Cast> of_graphs;  // of weights that are gone: a graph may be replayed on other memory at their address

    Cast* find(const at::Tensor& weight, at::ScalarType through, OptionalAxis axis) {
        const auto found = by_storage.find(weight.storage().unsafeGetStorageImpl());
        if (found == by_storage.end()) return nullptr;
        for (Cast& cast : found->second) {
            if (cast.is_of(weight, through, axis)) return &cast;
        }
        return nullptr;
    }
};

Casts& casts() {
    static Casts* all = new Casts;  // never freed: when the process ends, CUDA may be gone before it
    return *all;
}

bool on(const at::Tensor& t, const at::Tensor& beside, at::ScalarType type, int64_t count) {
    return t.scalar_type() == type && t.is_contiguous() && t.device() == beside.device() && t.numel() == count;
}

void check(const at::Tensor& weight, at::ScalarType through, OptionalAxis axis, const at::Tensor& q, const at::Tensor& scale,
           const at::Tensor& kept, const at::Tensor& scratch) {
    const at::ScalarType wide = weight.scalar_type();
    expect("fp8_weight", through == at::kBFloat16 || through == at::kHalf, "not a type to round to", c10::toString(through),
           "bfloat16 or float16");
    expect("fp8_weight", wide == through || wide == at::kFloat, "not a type that is cast", c10::toString(wide),
           "`through` or float32");
    const std::string shape = c10::str(weight.sizes(), " of strides ", weight.strides());
    expect("fp8_weight", weight.dim() == 2 && weight.is_contiguous() && weight.size(0) % 16 == 0 && weight.size(1) % 16 == 0,
           "weight", shape, "contiguous [R, C] that divide by 16");
    expect("fp8_weight", !axis || *axis == -1 || *axis == -2, "axis", std::to_string(axis.value_or(0)), "none, -1 or -2");
    const int64_t scales = !axis ? 1 : *axis == -1 ? weight.size(0) : weight.size(1);
    expect("fp8_weight",
           on(q, weight, at::kFloat8_e4m3fn, weight.numel()) && on(scale, weight, at::kFloat, scales) &&
               on(kept, weight, at::kLong, 1) && on(scratch, weight, at::kLong, cuda::weight_scratch_words(scales)),
           "memory", shape, "q, scale, kept and scratch of the weight's sizes on its device");
}

void refresh(const at::Tensor& weight, at::ScalarType through, OptionalAxis axis, const at::Tensor& q, const at::Tensor& scale,
             const at::Tensor& kept, const at::Tensor& scratch, cudaStream_t stream) {
    if (weight.numel() == 0) return;
    const bool aligned = reinterpret_cast<uint64_t>(weight.const_data_ptr()) % 16 == 0;
    const at::Tensor dense = aligned ? weight : weight.clone();
    const cuda::WeightCast cast{static_cast<const char*>(dense.const_data_ptr()),
                                weight.size(0),
                                weight.size(1),
                                static_cast<int>(axis.value_or(0)),
                                static_cast<char*>(q.mutable_data_ptr()),
                                scale.mutable_data_ptr<float>(),
                                kept.mutable_data_ptr<int64_t>(),
                                scratch.mutable_data_ptr<int64_t>()};
    const DType rounded = through == at::kBFloat16 ? DType::bf16 : DType::f16;
    cuda::launch_weight_cast(cast, weight.scalar_type() == at::kFloat ? DType::f32 : rounded, rounded, stream);
}

// Lets `stream` wait for the one that used the cast last.
void follow(Cast& cast, const c10::cuda::CUDAStream& stream) {
    if (cast.stream == stream) return;
    if (cuda::capture_of(cast.stream.stream()) == 0) {  // else the program orders them, as for all that is captured
        cudaEvent_t event = nullptr;
        cuda::check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "make an event");
        const cudaError_t recorded = cudaEventRecord(event, cast.stream.stream());
        const cudaError_t waits = recorded == cudaSuccess ? cudaStreamWaitEvent(stream.stream(), event, 0) : recorded;
        cudaEventDestroy(event);
        cuda::check(waits, "wait for the stream that used a weight before");
    }
    cast.stream = stream;
}

// May backward take what is there for what its forward saw? Only if nothing else has looked since: between the two somebody may
// have swapped the weight's elements for a while, which autograd's versions need not show.
bool trusted(Cast& cast, bool known, unsigned long long context) {
    const bool alone = known && cast.context == context && cast.looks == 1;
    if (cast.context != context) cast.looks = 0, cast.context = context;
    cast.looks = known ? 0 : cast.looks + 1;
    return alone;
}

}  // namespace

TwoTensors fp8_weight(const at::Tensor& weight, at::ScalarType through, OptionalAxis axis,
                      const std::optional<at::Tensor>& after, bool known) {
    (void)after;  // an edge of the graph
    return run_op(weight.device(), [&]() -> TwoTensors {
        const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(weight.device().index());
        const unsigned long long context = cuda::capture_of(stream.stream());
        {
            const std::lock_guard<std::mutex> lock(casts().mutex);
            if (Cast* cast = casts().find(weight, through, axis)) {
                at::Tensor scratch = cast->scratch;
                if (context == 0) {
                    follow(*cast, stream);
                } else {
                    cast->captured = true;
                    scratch = at::zeros_like(scratch);  // of the graph: replays and plain calls may overlap
                }
                if (!trusted(*cast, known, context)) {
                    refresh(weight, through, axis, cast->q, cast->scale, cast->kept, scratch, stream.stream());
                }
                return {cast->q, cast->scale};
            }
        }
        static const auto other = c10::Dispatcher::singleton()
                                      .findSchemaOrThrow("ub_overlap::fp8_weight_other", "")
                                      .typed<TwoTensors(const at::Tensor&, at::ScalarType, OptionalAxis, bool)>();
        return other.call(weight, through, axis, known);
    });
}

void fp8_weight_keep(const at::Tensor& weight, at::ScalarType through, OptionalAxis axis, const at::Tensor& q,
                     const at::Tensor& scale, const at::Tensor& kept, const at::Tensor& scratch) {
    run_op(weight.device(), [&]() {
        check(weight, through, axis, q, scale, kept, scratch);
        const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(weight.device().index());
        const std::lock_guard<std::mutex> lock(casts().mutex);
        if (casts().find(weight, through, axis) != nullptr) return;  // another thread was first
        casts().by_storage[weight.storage().unsafeGetStorageImpl()].push_back({weight.storage_offset(), weight.size(0),
                                                                               weight.size(1), weight.scalar_type(), through,
                                                                               axis, q, scale, kept, scratch, stream});
    });
}

void fp8_weight_forget(int64_t storage) {
    std::vector<Cast> gone;  // freed without the lock
    const std::lock_guard<std::mutex> lock(casts().mutex);
    const auto found = casts().by_storage.find(reinterpret_cast<const void*>(storage));
    if (found == casts().by_storage.end()) return;
    for (Cast& cast : found->second) {
        if (cast.captured) {
            casts().of_graphs.push_back(std::move(cast));
            continue;
        }
        for (const at::Tensor* t : {&cast.q, &cast.scale, &cast.kept, &cast.scratch}) {
            c10::cuda::CUDACachingAllocator::recordStream(t->storage().data_ptr(), cast.stream);
        }
        gone.push_back(std::move(cast));
    }
    casts().by_storage.erase(found);
}

void fp8_weight_refresh(const at::Tensor& weight, at::ScalarType through, OptionalAxis axis, at::Tensor& q, at::Tensor& scale,
                        at::Tensor& kept, at::Tensor& scratch) {
    run_op(weight.device(), [&]() {
        check(weight, through, axis, q, scale, kept, scratch);
        refresh(weight, through, axis, q, scale, kept, scratch,
                c10::cuda::getCurrentCUDAStream(weight.device().index()).stream());
    });
}

}  // namespace ub_overlap
#endif
