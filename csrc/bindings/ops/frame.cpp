#include "bindings/ops/frame.h"

#include "bindings/matmul.h"
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
    if (session->transport() == "c10d") {
        session->verify_only(b.call);
        Stats::get().add(b.call.site, b.call.strategy, session->transport(), session->reason(), {}, false);
        return false;
    }
    session->run(b.call, executor_of(b.device(), b.call), prepare);
    return true;
}

}  // namespace ub_overlap
