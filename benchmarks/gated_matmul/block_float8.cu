// Does cuBLASLt have an algorithm for float8 operands with these scales? Nothing is computed.
#include <cublasLt.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr cudaDataType types[] = {CUDA_R_8F_E4M3, CUDA_R_8F_E5M2, CUDA_R_16BF, CUDA_R_16F, CUDA_R_32F};
constexpr cublasLtMatmulMatrixScale_t modes[] = {
    CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F, CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F,
    CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F, CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F};

template <class T>
void set(cublasLtMatmulDesc_t to, cublasLtMatmulDescAttributes_t what, T value) {
    cublasLtMatmulDescSetAttribute(to, what, &value, sizeof value);
}

}  // namespace

// A query: out[m, n] = a[m, k] @ b[n, k]^T, row-major. `a_columns`: a is stored [k, m] instead, b_columns: b is [k, n].
struct Query {
    int32_t a_type, b_type, out_type, a_mode, b_mode, a_columns, b_columns, fast, bias;
    int64_t m, n, k;
    void* scales;  // aligned; not read
};

// Returns the number of algorithms, or the negative status.
extern "C" int algorithms(const Query* q) {
    cublasLtHandle_t handle{};
    static cublasLtHandle_t kept = (cublasLtCreate(&handle), handle);
    cublasLtMatmulDesc_t desc{};
    cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    // cuBLAS sees columns: its A is our b, its B our a.
    set(desc, CUBLASLT_MATMUL_DESC_TRANSA, q->b_columns ? CUBLAS_OP_N : CUBLAS_OP_T);
    set(desc, CUBLASLT_MATMUL_DESC_TRANSB, q->a_columns ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(desc, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, modes[q->b_mode]);
    set(desc, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, modes[q->a_mode]);
    set(desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, q->scales);
    set(desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, q->scales);
    set(desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t(q->fast));
    if (q->bias) {
        set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
        set(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, q->scales);
        set(desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, int32_t(CUDA_R_16BF));
    }
    const cudaDataType out = types[q->out_type];
    const bool small = q->out_type < 2;
    if (small) set(desc, CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, q->scales);
    cublasLtMatrixLayout_t a{}, b{}, c{}, d{};
    cublasLtMatrixLayoutCreate(&a, types[q->b_type], q->b_columns ? q->n : q->k, q->b_columns ? q->k : q->n,
                               q->b_columns ? q->n : q->k);
    cublasLtMatrixLayoutCreate(&b, types[q->a_type], q->a_columns ? q->m : q->k, q->a_columns ? q->k : q->m,
                               q->a_columns ? q->m : q->k);
    cublasLtMatrixLayoutCreate(&c, small ? CUDA_R_16BF : out, q->n, q->m, q->n);
    cublasLtMatrixLayoutCreate(&d, out, q->n, q->m, q->n);
    cublasLtMatmulPreference_t preference{};
    cublasLtMatmulPreferenceCreate(&preference);
    const size_t room = 32 << 20;
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room, sizeof room);
    cublasLtMatmulHeuristicResult_t found[8];
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(kept, desc, a, b, c, d, preference, 8, found, &count);
    cublasLtMatmulPreferenceDestroy(preference);
    for (auto layout : {a, b, c, d}) cublasLtMatrixLayoutDestroy(layout);
    cublasLtMatmulDescDestroy(desc);
    return status == CUBLAS_STATUS_SUCCESS ? count : -int(status);
}
