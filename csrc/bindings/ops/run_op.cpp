#include "bindings/ops/run_op.h"

#include <algorithm>
#include <vector>

#include "bindings/matmul.h"
#include "bindings/range.h"
#include "core/dispatch_table.h"
#include "cpu/executor.h"
#ifdef UB_OVERLAP_CUDA
#include <c10/cuda/CUDAStream.h>

#include "cuda/executor.h"
#endif

namespace ub_overlap {
namespace {

// Returns the executor of a call's device, and sets the call's stream.
Executor& executor_of(at::Device device, Call& call) {
#ifdef UB_OVERLAP_CUDA
    if (device.is_cuda()) {
        static CudaExecutor cuda(&matmul_cuda);
        call.device = device.index();
        call.stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
        return cuda;
    }
#endif
    (void)device, (void)call;
    static CpuExecutor cpu(&matmul_cpu);
    return cpu;
}

bool is_plain(const Session& session, const Call& call) {
    return call.strategy == "none" || session.transport() == "c10d";
}

// Returns a test whether the memory of a tensor was freed, that of views included.
std::function<bool()> is_freed(const Tensor& tensor) {
    return [storage = tensor.storage().getWeakStorageImpl()] { return storage.expired(); };
}

// Announces a call that a plain collective carries out. `number`: its number in the flight recorder.
void announce_plain(const std::shared_ptr<Session>& session, const Call& call, uint64_t number) {
    plain_call() = {session, number};
    const std::string reason = call.strategy == "none" ? std::string("none") + dispatched_by() : session->reason();
    Stats::get().add(call.site, call.strategy, "c10d", reason, {}, false);
}

}  // namespace

PlainCall& plain_call() {
    thread_local PlainCall current;
    return current;
}

bool run_on_transport(Builder& b, const std::function<void(Call&)>& prepare) {
    b.seal();
    std::shared_ptr<Session> session = b.session();
    if (is_plain(*session, b.call)) {
        announce_plain(session, b.call, session->verify_only(b.call));
        return false;
    }
    const SiteRange range(b.call);
    session->run(b.call, executor_of(b.device(), b.call), prepare);
    return true;
}

bool start_on_transport(Builder& b, std::shared_ptr<void> sent, const Tensor& token) {
    b.seal();
    std::shared_ptr<Session> session = b.session();
    if (is_plain(*session, b.call)) {
        plain_call() = {session, session->verify_only(b.call), false};
        session->exchange_plain(b.call.split_slot, plain_call().number);
        return false;
    }
    const SiteRange range(b.call);
    Executor& executor = executor_of(b.device(), b.call);
    session->start(b.call, {std::move(sent), is_freed(token)}, executor);
    return true;
}

bool finish_on_transport(Builder& b, const std::function<void(Call&)>& prepare) {
    b.seal();
    std::shared_ptr<Session> session = b.session();
    if (is_plain(*session, b.call)) {
        announce_plain(session, b.call, session->exchange_plain(b.call.split_slot, 0));
        return false;
    }
    const SiteRange range(b.call);
    prepare(b.call);
    session->finish(b.call, executor_of(b.device(), b.call));
    return true;
}

void watch_results(Builder& b, at::TensorList results) {
    std::vector<std::function<bool()>> freed;
    for (const Tensor& result : results) freed.push_back(is_freed(result));
    b.session()->watch_result(b.call.split_slot, [freed] {
        return std::all_of(freed.begin(), freed.end(), [](const std::function<bool()>& is_freed) { return is_freed(); });
    });
}

char* landing_on_transport(Builder& b) {
    b.seal();
    std::shared_ptr<Session> session = b.session();
    if (is_plain(*session, b.call)) return nullptr;
    Executor& executor = executor_of(b.device(), b.call);
    return session->landing_memory(b.call, executor);
}

void release_on_transport(Builder& b) {
    b.seal();
    std::shared_ptr<Session> session = b.session();
    if (is_plain(*session, b.call)) return;
    const SiteRange range(b.call);
    session->release(b.call, executor_of(b.device(), b.call));
}

}  // namespace ub_overlap
