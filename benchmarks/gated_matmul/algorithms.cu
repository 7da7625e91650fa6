// The algorithms that cuBLASLt proposes for out[m, n] = a[m, k] @ b[n, k]^T, row-major bf16.
#include <cublasLt.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

struct Plan {
    cublasLtMatmulDesc_t desc{};
    cublasLtMatrixLayout_t a{}, b{}, d{};
    cublasLtMatmulHeuristicResult_t found[16];
    int count = 0;
};

cublasLtHandle_t handle() {
    static cublasLtHandle_t one = [] {
        cublasLtHandle_t made{};
        cublasLtCreate(&made);
        return made;
    }();
    return one;
}

}  // namespace

extern "C" void* plan(int64_t m, int64_t n, int64_t k, size_t workspace_bytes) {
    auto* p = new Plan;
    cublasLtMatmulDescCreate(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    const cublasOperation_t turned = CUBLAS_OP_T;
    cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &turned, sizeof turned);
    cublasLtMatrixLayoutCreate(&p->a, CUDA_R_16BF, k, n, k);
    cublasLtMatrixLayoutCreate(&p->b, CUDA_R_16BF, k, m, k);
    cublasLtMatrixLayoutCreate(&p->d, CUDA_R_16BF, n, m, n);
    cublasLtMatmulPreference_t preference{};
    cublasLtMatmulPreferenceCreate(&preference);
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes,
                                         sizeof workspace_bytes);
    if (cublasLtMatmulAlgoGetHeuristic(handle(), p->desc, p->a, p->b, p->d, p->d, preference, 16, p->found, &p->count))
        p->count = 0;
    cublasLtMatmulPreferenceDestroy(preference);
    return p;
}

extern "C" int plan_count(const void* made) {
    return static_cast<const Plan*>(made)->count;
}

extern "C" int plan_run(const void* made, int algorithm, const void* a, const void* b, void* out, void* workspace, size_t bytes,
                        cudaStream_t stream) {
    const auto* p = static_cast<const Plan*>(made);
    const float one = 1, zero = 0;
    return cublasLtMatmul(handle(), p->desc, &one, b, p->a, a, p->b, &zero, out, p->d, out, p->d, &p->found[algorithm].algo,
                          workspace, bytes, stream);
}
