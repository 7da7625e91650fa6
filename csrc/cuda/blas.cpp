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

namespace {

// Describes a task to cuBLASLt. False if the task does not suit it.
bool set_problem(Problem& problem, const MatmulTask& t) {
    const Scaling scaling(t);
    const bool supported_types =
        scaling.scaled ? t.batch == 1
                       : t.a.type != DType::f32 && t.b.type == t.a.type && (t.out.type == t.a.type || t.out.type == DType::f32);
    const bool adds = t.addend.data != nullptr, bias = adds && t.addend.row_stride == 0 && t.addend.col_stride == 1;
    if (!supported_types || t.a.cols == 0 || t.batch > INT32_MAX || (adds && (t.accumulate || t.addend.type != t.out.type)))
        return false;
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
    return !adds || bias || (c.set(t.addend, t.addend_step) && c.row_major);
}

float beta_of(const MatmulTask& t, const Problem& problem) {
    return t.accumulate || (t.addend.data && !problem.bias) ? 1.0f : 0.0f;
}

bool is_empty(const MatmulTask& t) {
    return t.batch == 0 || t.out.rows == 0 || t.out.cols == 0;
}

}  // namespace

bool blas_matmul(const MatmulTask& t, void* workspace, cudaStream_t stream) {
    Problem problem;
    if (!set_problem(problem, t)) return false;
    if (is_empty(t)) return true;
    Planner& planner = planner_of_current_device();
    const Plan plan = planner.plan(problem);
    if (!plan.usable) return false;
    return planner.launch(problem, plan, beta_of(t, problem), workspace, stream);
}

bool blas_matmul_by_address(const MatmulTask& t, void* workspace, void* scratch, int64_t scratch_bytes, cudaStream_t stream) {
    Problem problem;
    const size_t batch = t.addresses.size();
    // Column-major results would swap the operands: those of a direct call are row-major.
    if (batch < 2 || t.out.col_stride != 1 || !set_problem(problem, t) || problem.bias) return false;
    if (is_empty(t)) return true;
    std::vector<uint64_t> words(4 * batch);  // the addresses of a, b, c and out
    if (static_cast<int64_t>(words.size() * sizeof(uint64_t)) > scratch_bytes) return false;
    Operand* const operands[] = {&problem.a, &problem.b, &problem.c, &problem.out};
    const auto address = [](const char* data) { return reinterpret_cast<uint64_t>(data); };
    for (size_t i = 0; i < batch; ++i) {
        const BatchAddresses& at = t.addresses[i];
        words[i] = address(at.a), words[batch + i] = address(t.b.data), words[3 * batch + i] = address(at.out);
        words[2 * batch + i] = address(t.addend.data ? at.addend : at.out);
    }
    for (size_t k = 0; k < 4; ++k) {
        for (size_t i = 0; i < batch; ++i) operands[k]->addresses |= words[k * batch + i];
        // A search runs the batch on matrices that lie one behind the other.
        operands[k]->batch_step = operands[k] == &problem.b ? 0 : operands[k]->cols * operands[k]->stride;
    }
    problem.by_address = true;
    Planner& planner = planner_of_current_device();
    const Plan plan = planner.plan(problem);
    if (!plan.usable) return false;
    // In stream order: behind the matmuls that read the scratch before, ahead of the one that reads it now.
    launch_store_words(words, static_cast<uint64_t*>(scratch), stream);
    auto* const arrays = static_cast<const char*>(scratch);
    for (size_t k = 0; k < 4; ++k) operands[k]->data = arrays + k * batch * sizeof(uint64_t);
    return planner.launch(problem, plan, beta_of(t, problem), workspace, stream);
}

}  // namespace ub_overlap::cuda
