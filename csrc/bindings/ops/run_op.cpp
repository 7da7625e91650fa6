#include "bindings/ops/run_op.h"

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

}  // namespace

PlainCall& plain_call() {
    thread_local PlainCall current;
    return current;
}

bool run_on_transport(Builder& b, const std::function<void(Call&)>& prepare) {
    b.seal();
    std::shared_ptr<Session> session = b.session();
    const bool strategy_is_none = b.call.strategy == "none";
    if (strategy_is_none || session->transport() == "c10d") {
        plain_call() = {session, session->verify_only(b.call)};
        const std::string reason = strategy_is_none ? std::string("none") + dispatched_by() : session->reason();
        Stats::get().add(b.call.site, b.call.strategy, "c10d", reason, {}, false);
        return false;
    }
    const SiteRange range(b.call);
    session->run(b.call, executor_of(b.device(), b.call), prepare);
    return true;
}

}  // namespace ub_overlap
