#include "cuda/blas_plan.h"

#include <algorithm>
#include <cstring>

#include "core/failure.h"
#include "core/matmul_algorithms.h"
#include "cuda/blas.h"
#include "cuda/kernels.h"

namespace ub_overlap::cuda {
namespace {

uint32_t lowest_bit(uint64_t bits) {
    return static_cast<uint32_t>(bits & (~bits + 1));
}

void need(cublasStatus_t status, const char* what) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    throw NamedError("UbOverlapError", {{"what", std::string("cannot ") + what}, {"got", cublasLtGetStatusName(status)}});
}

cudaDataType_t data_type(DType type) {
    constexpr cudaDataType_t types[] = {CUDA_R_32F, CUDA_R_16BF, CUDA_R_16F, CUDA_R_8F_E4M3, CUDA_R_8F_E5M2};
    return types[static_cast<int32_t>(type)];
}

// A batch by addresses is a mode of cuBLAS 13.1. A program may load an older one than it was compiled for.
bool set_addressed(cublasLtMatrixLayout_t layout) {
#if CUBLAS_VER_MAJOR > 13 || (CUBLAS_VER_MAJOR == 13 && CUBLAS_VER_MINOR >= 1)
    const uint32_t mode = CUBLASLT_BATCH_MODE_POINTER_ARRAY;
    return cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_MODE, &mode, sizeof mode) ==
           CUBLAS_STATUS_SUCCESS;
#else
    (void)layout;
    return false;
#endif
}

cublasLtMatrixLayout_t make_layout(const Operand& x, int64_t batch) {
    cublasLtMatrixLayout_t layout = nullptr;
    need(cublasLtMatrixLayoutCreate(&layout, data_type(x.type), static_cast<uint64_t>(x.rows), static_cast<uint64_t>(x.cols),
                                    x.stride),
         "describe a matrix to cuBLASLt");
    if (batch > 1) {
        const auto count = static_cast<int32_t>(batch);
        need(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count), "set a batch");
        need(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &x.batch_step,
                                              sizeof x.batch_step),
             "set a batch's stride");
    }
    return layout;
}

template <typename Value>
void set_attribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t which, Value value, const char* what) {
    need(cublasLtMatmulDescSetAttribute(desc, which, &value, sizeof value), what);
}

// Sets the scales' addresses. cuBLASLt's first operand is our right one.
void set_scales(cublasLtMatmulDesc_t desc, const Scaling& scaling) {
    set_attribute(desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, static_cast<const void*>(scaling.b), "set a scale");
    set_attribute(desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const void*>(scaling.a), "set a scale");
}

// A piece may begin anywhere in the scales of its rows, where wide loads would not be aligned.
uint32_t scale_alignment(const float* scale) {
    return lowest_bit(reinterpret_cast<uint64_t>(scale) | 256);
}

#if CUBLAS_VER_MAJOR > 12 || (CUBLAS_VER_MAJOR == 12 && CUBLAS_VER_MINOR >= 9)
constexpr bool has_row_scales = true;
void set_row_scale_mode(cublasLtMatmulDesc_t desc) {
    for (const auto which : {CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_DESC_B_SCALE_MODE}) {
        set_attribute(desc, which, static_cast<int32_t>(CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F), "set a scale mode");
    }
}
#else
constexpr bool has_row_scales = false;
void set_row_scale_mode(cublasLtMatmulDesc_t) {}
#endif

void set_scaling(cublasLtMatmulDesc_t desc, const Scaling& scaling, bool bias, DType out) {
    if (scaling.each) set_row_scale_mode(desc);
    set_scales(desc, scaling);
    set_attribute(desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(scaling.fast), "set fast accumulation");
    if (bias) set_attribute(desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int32_t>(data_type(out)), "set a bias");
}

std::string text_of(const PlanShape& shape) {
    std::string text;
    for (const int64_t number : shape) text += (text.empty() ? "" : ",") + std::to_string(number);
    return text;
}

}  // namespace

bool Operand::set(const Matrix& m, int64_t step) {
    data = m.data, batch_step = step, type = m.type;
    if (m.col_stride == 1 && m.row_stride >= std::max<int64_t>(m.cols, 1)) {
        row_major = true, rows = m.cols, cols = m.rows, stride = m.row_stride;
        return true;
    }
    row_major = false, rows = m.rows, cols = m.cols, stride = m.col_stride;
    return m.row_stride == 1 && m.col_stride >= std::max<int64_t>(m.rows, 1);
}

uint32_t Operand::alignment() const {
    const auto size = static_cast<uint64_t>(size_of(type));
    return lowest_bit(reinterpret_cast<uint64_t>(data) | (static_cast<uint64_t>(batch_step) * size) | addresses | 256);
}

int64_t Operand::extent(int64_t batch) const {
    return ((cols - 1) * stride + rows + (batch - 1) * batch_step) * size_of(type);
}

uint32_t Problem::out_alignment() const {
    return std::min(out.alignment(), lowest_bit(reinterpret_cast<uint64_t>(bias) | 256));
}

PlanShape Problem::shape() const {
    return {a.rows,
            a.cols,
            a.stride,
            a.batch_step,
            a.row_major,
            static_cast<int64_t>(a.type),
            a.alignment(),
            b.rows,
            b.cols,
            b.stride,
            b.batch_step,
            b.row_major,
            b.alignment(),
            c.stride,
            c.batch_step,
            c.alignment(),
            out.rows,
            out.stride,
            out.batch_step,
            out_alignment(),
            static_cast<int64_t>(out.type),
            bias != nullptr,
            batch,
            by_address,
            static_cast<int64_t>(b.type),
            scaling.scaled,
            scaling.each,
            scaling.fast,
            scale_alignment(scaling.a),
            scale_alignment(scaling.b)};
}

Planner::Planner(int device) : device_(device) {
    need(cublasLtCreate(&handle_), "create a cuBLASLt handle");
}

Plan Planner::plan(const Problem& problem) {
    const auto shape = problem.shape();
    const std::lock_guard<std::mutex> lock(mutex_);
    auto entry = planned_.find(shape);
    if (entry == planned_.end()) {
        entry = planned_.emplace(shape, std::make_unique<PlannedProblem>(make(problem))).first;
        set_algorithm(*entry->second);
    } else if (entry->second->generation != MatmulAlgorithms::get().generation()) {
        set_algorithm(*entry->second);
    }
    ++entry->second->uses;
    return entry->second->plan;
}

std::vector<PlannedProblem> Planner::problems() {
    std::vector<PlannedProblem> all;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [shape, planned] : planned_) all.push_back(*planned);
    return all;
}

PlannedProblem Planner::find(const std::string& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [shape, planned] : planned_) {
        if (planned->key == key) return *planned;
    }
    throw NamedError("OptionError", {{"what", "no matmul of this key has run on the device"}, {"got", key}});
}

PlannedProblem Planner::make(const Problem& problem) {
    PlannedProblem planned;
    planned.problem = problem;
    planned.key = text_of(problem.shape());
    const Scaling& scaling = problem.scaling;
    const Operand &a = problem.a, &b = problem.b;
    Plan& plan = planned.plan;
    if (scaling.each && !has_row_scales) return planned;
    need(cublasLtMatmulDescCreate(&plan.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describe a matmul to cuBLASLt");
    // In column-major terms out^T = b^T a^T: the right operand comes first.
    const cublasOperation_t first = b.row_major ? CUBLAS_OP_N : CUBLAS_OP_T, second = a.row_major ? CUBLAS_OP_N : CUBLAS_OP_T;
    set_attribute(plan.desc, CUBLASLT_MATMUL_DESC_TRANSA, first, "set an operation");
    set_attribute(plan.desc, CUBLASLT_MATMUL_DESC_TRANSB, second, "set an operation");
    plan.a = make_layout(b, problem.batch), plan.b = make_layout(a, problem.batch);
    plan.c = make_layout(problem.c, problem.batch), plan.d = make_layout(problem.out, problem.batch);
    set_attribute(plan.desc, CUBLASLT_MATMUL_DESC_EPILOGUE, problem.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT,
                  "set an epilogue");
    if (scaling.scaled) set_scaling(plan.desc, scaling, problem.bias != nullptr, problem.out.type);
    for (const cublasLtMatrixLayout_t layout : {plan.a, plan.b, plan.c, plan.d}) {
        if (problem.by_address && !set_addressed(layout)) return planned;
    }
    const std::vector<cublasLtMatmulAlgo_t> proposals = propose(planned, 1);
    plan.usable = !proposals.empty();
    if (plan.usable) plan.first_proposal = proposals[0];
    return planned;
}

void Planner::set_algorithm(PlannedProblem& planned) {
    MatmulAlgorithms& algorithms = MatmulAlgorithms::get();
    planned.generation = algorithms.generation();  // before `find`: a later change is seen at the next use
    planned.plan.algo = planned.plan.first_proposal, planned.plan.has_chosen = false;
    if (!planned.plan.usable) return;
    const std::optional<std::string> bytes = algorithms.find(device_, planned.key);
    cublasLtMatmulAlgo_t chosen{};
    if (!bytes || !algorithm_of(*bytes, chosen) || !accepts(planned.plan, chosen)) return;
    planned.plan.algo = chosen, planned.plan.has_chosen = true;
}

std::vector<cublasLtMatmulAlgo_t> Planner::propose(const PlannedProblem& planned, int count) {
    const Problem& problem = planned.problem;
    const Plan& plan = planned.plan;
    cublasLtMatmulPreference_t preference = nullptr;
    need(cublasLtMatmulPreferenceCreate(&preference), "set a preference");
    const auto set = [&](cublasLtMatmulPreferenceAttributes_t which, auto value) {
        need(cublasLtMatmulPreferenceSetAttribute(preference, which, &value, sizeof value), "set a preference");
    };
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<size_t>(blas_workspace_bytes));
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, problem.b.alignment());
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, problem.a.alignment());
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, problem.c.alignment());
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, problem.out_alignment());
    std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<size_t>(count));
    int found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle_, plan.desc, plan.a, plan.b, plan.c, plan.d, preference,
                                                                 count, results.data(), &found);
    cublasLtMatmulPreferenceDestroy(preference);
    std::vector<cublasLtMatmulAlgo_t> proposals;
    for (int i = 0; status == CUBLAS_STATUS_SUCCESS && i < found; ++i) {
        const cublasLtMatmulHeuristicResult_t& result = results[static_cast<size_t>(i)];
        if (result.state == CUBLAS_STATUS_SUCCESS) proposals.push_back(result.algo);
    }
    return proposals;
}

bool Planner::accepts(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm) {
    cublasLtMatmulHeuristicResult_t result{};
    return cublasLtMatmulAlgoCheck(handle_, plan.desc, plan.a, plan.b, plan.c, plan.d, &algorithm, &result) ==
               CUBLAS_STATUS_SUCCESS &&
           result.state == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= blas_workspace_bytes;
}

bool Planner::launch(const Problem& problem, const Plan& plan, float beta, void* workspace, cudaStream_t stream) {
    const float one = 1.0f;
    std::unique_lock<std::mutex> lock(addresses_mutex_, std::defer_lock);
    if (problem.bias || problem.scaling.scaled) lock.lock();
    if (problem.bias) set_attribute(plan.desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, problem.bias, "set a bias");
    if (problem.scaling.scaled) set_scales(plan.desc, problem.scaling);
    const auto enqueue = [&](const cublasLtMatmulAlgo_t& algorithm) {
        return cublasLtMatmul(handle_, plan.desc, &one, problem.b.data, plan.a, problem.a.data, plan.b, &beta, problem.c.data,
                              plan.c, const_cast<char*>(problem.out.data), plan.d, &algorithm, workspace, blas_workspace_bytes,
                              stream);
    };
    // These mean that nothing has been enqueued. Neither a proposal nor the check of an algorithm promises that it runs.
    const auto is_refused = [](cublasStatus_t status) {
        return status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE;
    };
    cublasStatus_t status = enqueue(plan.algo);
    if (is_refused(status) && plan.has_chosen) status = enqueue(plan.first_proposal);
    if (is_refused(status)) return false;
    need(status, "launch a matmul");
    return true;
}

Planner& planner_of_current_device() {
    static std::mutex mutex;
    static auto* all = new std::map<int, std::unique_ptr<Planner>>;  // never destroyed: the driver may shut down first
    int device = 0;
    check(cudaGetDevice(&device), "get the current device");
    const std::lock_guard<std::mutex> lock(mutex);
    std::unique_ptr<Planner>& planner = (*all)[device];
    if (!planner) planner = std::make_unique<Planner>(device);
    return *planner;
}

std::string bytes_of(const cublasLtMatmulAlgo_t& algorithm) {
    return {reinterpret_cast<const char*>(&algorithm), sizeof algorithm};
}

bool algorithm_of(const std::string& bytes, cublasLtMatmulAlgo_t& algorithm) {
    if (bytes.size() != sizeof algorithm) return false;
    std::memcpy(&algorithm, bytes.data(), sizeof algorithm);
    return true;
}

}  // namespace ub_overlap::cuda
