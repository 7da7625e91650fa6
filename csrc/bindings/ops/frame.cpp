#include "bindings/ops/frame.h"

#include "bindings/matmul.h"
#include "bindings/range.h"
#include "core/choice.h"
#include "cpu/executor.h"
#ifdef UB_OVERLAP_CUDA
#include <c10/cuda/CUDAStream.h>

#include "cuda/executor.h"
#endif

namespace ub_overlap {
namespace {

// The executor of a call's device; tells the call its stream.
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

bool run(Builder& b, const std::function<void(Call&)>& prepare) {
    b.seal();
    std::shared_ptr<Session> session = b.session();
    const bool plain = b.call.strategy == "none";
    if (plain || session->transport() == "c10d") {
        session->verify_only(b.call);
        const std::string reason = plain ? std::string("none") + picked_by() : session->reason();
        Stats::get().add(b.call.site, b.call.strategy, "c10d", reason, {}, false);
        return false;
    }
    const SiteRange range(b.call);
    session->run(b.call, executor_of(b.device(), b.call), prepare);
    return true;
}

}  // namespace ub_overlap
