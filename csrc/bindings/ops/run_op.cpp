#include "bindings/ops/run_op.h"

#include <algorithm>
#include <vector>

#include "bindings/matmul.h"
#include "bindings/messages.h"
#include "bindings/range.h"
#include "core/dispatch_table.h"
#include "cpu/executor.h"
#ifdef UB_OVERLAP_CUDA
#include "cuda/executor.h"
#endif

namespace ub_overlap {
namespace {

// Returns the executor of a call, and sets the call's stream.
Executor& executor_of(Builder& b) {
    set_stream(b);
#ifdef UB_OVERLAP_CUDA
    if (b.device().is_cuda()) {
        static CudaExecutor cuda(&matmul_cuda);
        return cuda;
    }
#endif
    static CpuExecutor cpu(&matmul_cpu);
    return cpu;
}

}  // namespace

PlainCall& plain_call() {
    thread_local PlainCall current;
    return current;
}

void set_stream(Builder& b) {
    if (b.device().is_cuda()) b.call.device = b.device().index();
    b.call.stream = current_stream(b.device());
}

std::function<bool()> is_freed(const Tensor& tensor) {
    return [storage = tensor.storage().getWeakStorageImpl()] { return storage.expired(); };
}

bool is_plain(Builder& b) {
    b.seal();
    return b.call.strategy == "none" || b.session()->transport() == "c10d";
}

void announce_plain(Builder& b) {
    const Call& call = b.call;
    const std::string reason = call.strategy == "none" ? std::string("none") + dispatched_by() : b.session()->reason();
    Stats::get().add(call.own_site, call.strategy, "c10d", reason, {}, false);
}

bool run_on_transport(Builder& b, const std::function<void(Call&)>& prepare) {
    const bool plain = is_plain(b);
    std::shared_ptr<Session> session = b.session();
    if (plain) {
        plain_call() = {session, session->verify_only(b.call)};
        announce_plain(b);
        return false;
    }
    const SiteRange range(b.call);
    Executor& executor = executor_of(b);
    session->run(b.call, executor, prepare);
    return true;
}

void start_on_transport(Builder& b, std::shared_ptr<void> sent, const Tensor& token) {
    const SiteRange range(b.call);
    Executor& executor = executor_of(b);
    b.session()->start(b.call, {std::move(sent), is_freed(token)}, executor);
}

void finish_on_transport(Builder& b, const std::function<void(Call&)>& prepare) {
    const SiteRange range(b.call);
    prepare(b.call);
    set_stream(b);
    b.session()->finish(b.call);
}

void watch_results(Builder& b, at::TensorList results) {
    std::vector<std::function<bool()>> freed;
    for (const Tensor& result : results) freed.push_back(is_freed(result));
    b.session()->watch_result(b.call.split_slot, [freed] {
        return std::all_of(freed.begin(), freed.end(), [](const std::function<bool()>& is_freed) { return is_freed(); });
    });
}

char* landing_on_transport(Builder& b) {
    set_stream(b);
    return b.session()->landing_memory(b.call);
}

void release_on_transport(Builder& b) {
    const SiteRange range(b.call);
    set_stream(b);
    b.session()->release(b.call);
}

}  // namespace ub_overlap
