#include "cuda/blas.h"

#include "cuda/blas_plan.h"
#include "cuda/kernels.h"

namespace ub_overlap::cuda {

void* allocate_permanently(size_t bytes) {
    void* memory = nullptr;
    const RelaxedCapture relaxed;
    if (cudaMalloc(&memory, bytes) == cudaSuccess) return memory;
    cudaGetLastError();
    return nullptr;
}

const float* copy_to_scratch(const float* data, int64_t bytes, void* scratch, cudaStream_t stream) {
    check(cudaMemcpyAsync(scratch, data, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream), "copy scales");
    return static_cast<const float*>(scratch);
}

bool blas_matmul(const MatmulTask& t, void* workspace, cudaStream_t stream) {
    const Scaling scaling(t);
    const bool supported_types =
        scaling.scaled ? t.batch == 1
                       : t.a.type != DType::f32 && t.b.type == t.a.type && (t.out.type == t.a.type || t.out.type == DType::f32);
    const bool adds = t.addend.data != nullptr, bias = adds && t.addend.row_stride == 0 && t.addend.col_stride == 1;
    if (!supported_types || t.a.cols == 0 || t.batch > INT32_MAX || (adds && (t.accumulate || t.addend.type != t.out.type)))
        return false;
    if (t.batch == 0 || t.out.rows == 0 || t.out.cols == 0) return true;
    Problem problem;
    problem.batch = t.batch, problem.scaling = scaling, problem.bias = bias ? t.addend.data : nullptr;
    Operand &a = problem.a, &b = problem.b, &c = problem.c, &out = problem.out;
    // A column-major result is the row-major result of the transposed problem.
    const bool transposed = t.out.col_stride != 1;
    const bool has_layout = transposed ? out.set(t.out.transposed(), t.out_step) && a.set(t.b.transposed(), t.b_step) &&
                                             b.set(t.a.transposed(), t.a_step)
                                       : out.set(t.out, t.out_step) && a.set(t.a, t.a_step) && b.set(t.b, t.b_step);
    if (!has_layout || !out.row_major || (transposed && (adds || scaling.scaled)) || (bias && t.batch > 1)) return false;
    // Hopper supports no other order of float8 matrices, and no bias of more than 16 bits.
    if (scaling.scaled && (!a.row_major || b.row_major || (bias && t.out.type == DType::f32))) return false;
    c = out;
    if (adds && !bias && (!c.set(t.addend, t.addend_step) || !c.row_major)) return false;
    Planner& planner = planner_of_current_device();
    const Plan plan = planner.plan(problem);
    if (!plan.usable) return false;
    planner.launch(problem, plan, t.accumulate || (adds && !bias) ? 1.0f : 0.0f, workspace, stream);
    return true;
}

}  // namespace ub_overlap::cuda
