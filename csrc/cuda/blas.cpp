#include "cuda/blas.h"

#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>

#include "core/failure.h"
#include "cuda/kernels.h"

namespace ub_overlap::cuda {
namespace {

uint32_t lowest_bit(uint64_t bits) {
    return static_cast<uint32_t>(bits & (~bits + 1));
}

// One operand in the view of cuBLASLt: column-major, `rows` x `cols` in memory.
struct Operand {
    const char* data = nullptr;
    int64_t rows = 0, cols = 0, stride = 0, batch_step = 0;
    bool row_major = false;
    DType type = DType::f32;

    // Describes `m`; false if it is neither row- nor column-major. A row-major matrix is the column-major matrix of its
    // transpose.
    bool set(const Matrix& m, int64_t step) {
        data = m.data, batch_step = step, type = m.type;
        if (m.col_stride == 1 && m.row_stride >= std::max<int64_t>(m.cols, 1)) {
            row_major = true, rows = m.cols, cols = m.rows, stride = m.row_stride;
            return true;
        }
        row_major = false, rows = m.rows, cols = m.cols, stride = m.col_stride;
        return m.row_stride == 1 && m.col_stride >= std::max<int64_t>(m.rows, 1);
    }
    // Returns the largest power of two that divides the address and the batch step, in bytes, up to 256.
    uint32_t alignment() const {
        const auto size = static_cast<uint64_t>(size_of(type));
        return lowest_bit(reinterpret_cast<uint64_t>(data) | (static_cast<uint64_t>(batch_step) * size) | 256);
    }
};

using Shape = std::array<int64_t, 29>;

// The scales of a float8 matmul; `scaled` is false for other matmuls.
struct Scaling {
    const float *a = nullptr, *b = nullptr;
    bool scaled = false, each = false, fast = false;

    explicit Scaling(const MatmulTask& t)
        : a(t.a_scale.data), b(t.b_scale.data), scaled(t.scaled()), each(t.a_scale.each), fast(t.fast_sums) {}
    // A piece may begin anywhere in the scales of its rows, where wide loads would not be aligned.
    uint32_t alignment(const float* of) const { return lowest_bit(reinterpret_cast<uint64_t>(of) | 256); }
};

struct Plan {
    cublasLtMatmulDesc_t desc = nullptr;
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr, d = nullptr;
    cublasLtMatmulAlgo_t algo{};
    bool usable = false;
};

void need(cublasStatus_t status, const char* what) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    throw NamedError("UbOverlapError", {{"what", std::string("cannot ") + what}, {"got", cublasLtGetStatusName(status)}});
}

cudaDataType_t data_type(DType type) {
    constexpr cudaDataType_t types[] = {CUDA_R_32F, CUDA_R_16BF, CUDA_R_16F, CUDA_R_8F_E4M3, CUDA_R_8F_E5M2};
    return types[static_cast<int32_t>(type)];
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

// Plans of one device; never freed.
class Planner {
  public:
    Planner() { need(cublasLtCreate(&handle), "create a cuBLASLt handle"); }

    // Returns the cached plan. `c`: the addend, or `out` itself. `bias`: a vector that is added to each row, or null.
    const Plan& plan(const Operand& a, const Operand& b, const Operand& c, const Operand& out, const char* bias, int64_t batch,
                     const Scaling& scaling) {
        // A bias is loaded with the width with which the result is stored.
        const uint32_t aligned = std::min(out.alignment(), lowest_bit(reinterpret_cast<uint64_t>(bias) | 256));
        const Shape shape{a.rows,
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
                          aligned,
                          static_cast<int64_t>(out.type),
                          bias != nullptr,
                          batch,
                          static_cast<int64_t>(b.type),
                          scaling.scaled,
                          scaling.each,
                          scaling.fast,
                          scaling.alignment(scaling.a),
                          scaling.alignment(scaling.b)};
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto entry = plans_.find(shape);
        if (entry != plans_.end()) return *entry->second;
        return *plans_.emplace(shape, std::make_unique<Plan>(make(a, b, c, out, bias != nullptr, aligned, batch, scaling)))
                    .first->second;
    }

    // The plan's description holds the addresses of biases and scales, so such a plan is launched by one thread at a time.
    std::mutex addresses_mutex;
    cublasLtHandle_t handle = nullptr;

  private:
    Plan make(const Operand& a, const Operand& b, const Operand& c, const Operand& out, bool bias, uint32_t aligned,
              int64_t batch, const Scaling& scaling) {
        Plan plan;
        if (scaling.each && !has_row_scales) return plan;
        need(cublasLtMatmulDescCreate(&plan.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describe a matmul to cuBLASLt");
        // In column-major terms out^T = b^T a^T: the right operand comes first.
        const cublasOperation_t first = b.row_major ? CUBLAS_OP_N : CUBLAS_OP_T,
                                second = a.row_major ? CUBLAS_OP_N : CUBLAS_OP_T;
        need(cublasLtMatmulDescSetAttribute(plan.desc, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first), "set an operation");
        need(cublasLtMatmulDescSetAttribute(plan.desc, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second),
             "set an operation");
        plan.a = make_layout(b, batch), plan.b = make_layout(a, batch), plan.c = make_layout(c, batch);
        plan.d = make_layout(out, batch);
        const cublasLtEpilogue_t epilogue = bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
        need(cublasLtMatmulDescSetAttribute(plan.desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue),
             "set an epilogue");
        if (scaling.scaled) set_scaling(plan.desc, scaling, bias, out.type);

        cublasLtMatmulPreference_t preference = nullptr;
        need(cublasLtMatmulPreferenceCreate(&preference), "set a preference");
        const auto set = [&](cublasLtMatmulPreferenceAttributes_t which, auto value) {
            need(cublasLtMatmulPreferenceSetAttribute(preference, which, &value, sizeof value), "set a preference");
        };
        set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<size_t>(blas_workspace_bytes));
        set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
        set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b.alignment());
        set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a.alignment());
        set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c.alignment());
        set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, aligned);
        cublasLtMatmulHeuristicResult_t best{};
        int count = 0;
        const cublasStatus_t status =
            cublasLtMatmulAlgoGetHeuristic(handle, plan.desc, plan.a, plan.b, plan.c, plan.d, preference, 1, &best, &count);
        cublasLtMatmulPreferenceDestroy(preference);
        plan.usable = status == CUBLAS_STATUS_SUCCESS && count == 1 && best.state == CUBLAS_STATUS_SUCCESS;
        plan.algo = best.algo;
        return plan;
    }

#if CUBLAS_VER_MAJOR > 12 || (CUBLAS_VER_MAJOR == 12 && CUBLAS_VER_MINOR >= 9)
    static constexpr bool has_row_scales = true;
    static void set_row_scale_mode(cublasLtMatmulDesc_t desc) {
        for (const auto which : {CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_DESC_B_SCALE_MODE}) {
            set_attribute(desc, which, static_cast<int32_t>(CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F), "set a scale mode");
        }
    }
#else
    static constexpr bool has_row_scales = false;
    static void set_row_scale_mode(cublasLtMatmulDesc_t) {}
#endif

    static void set_scaling(cublasLtMatmulDesc_t desc, const Scaling& scaling, bool bias, DType out) {
        if (scaling.each) set_row_scale_mode(desc);
        set_scales(desc, scaling);
        set_attribute(desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(scaling.fast), "set fast accumulation");
        if (bias) set_attribute(desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int32_t>(data_type(out)), "set a bias");
    }

    std::mutex mutex_;
    std::map<Shape, std::unique_ptr<Plan>> plans_;
};

Planner& planner_of_current_device() {
    static std::mutex mutex;
    static auto* all = new std::map<int, std::unique_ptr<Planner>>;  // never destroyed: the driver may shut down first
    int device = 0;
    check(cudaGetDevice(&device), "get the current device");
    const std::lock_guard<std::mutex> lock(mutex);
    std::unique_ptr<Planner>& planner = (*all)[device];
    if (!planner) planner = std::make_unique<Planner>();
    return *planner;
}

}  // namespace

void* allocate_permanently(size_t bytes) {
    void* memory = nullptr;
    const RelaxedCapture relaxed;
    if (cudaMalloc(&memory, bytes) == cudaSuccess) return memory;
    cudaGetLastError();
    return nullptr;
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
    Operand a, b, c, out;
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
    const Plan& plan = planner.plan(a, b, c, out, bias ? t.addend.data : nullptr, t.batch, scaling);
    if (!plan.usable) return false;
    const float one = 1.0f, beta = t.accumulate || (adds && !bias) ? 1.0f : 0.0f;
    std::unique_lock<std::mutex> lock(planner.addresses_mutex, std::defer_lock);
    if (bias || scaling.scaled) lock.lock();
    if (bias) set_attribute(plan.desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, t.addend.data, "set a bias");
    if (scaling.scaled) set_scales(plan.desc, scaling);
    need(cublasLtMatmul(planner.handle, plan.desc, &one, b.data, plan.a, a.data, plan.b, &beta, c.data, plan.c,
                        const_cast<char*>(out.data), plan.d, &plan.algo, workspace, blas_workspace_bytes, stream),
         "launch a matmul");
    return true;
}

}  // namespace ub_overlap::cuda
