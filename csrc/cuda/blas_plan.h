// Plans of matmuls by cuBLASLt: descriptions, which are made once, and an algorithm. For csrc/cuda/blas*.cpp.
#pragma once

#include <cublasLt.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/types.h"

namespace ub_overlap::cuda {

// One operand in the view of cuBLASLt: column-major, `rows` x `cols` in memory.
struct Operand {
    const char* data = nullptr;
    int64_t rows = 0, cols = 0, stride = 0, batch_step = 0;
    uint64_t addresses = 0;  // of a batch without equal steps: all of them, combined by OR
    bool row_major = false;
    DType type = DType::f32;

    // Describes `m`; false if it is neither row- nor column-major. A row-major matrix is the column-major matrix of its
    // transpose.
    bool set(const Matrix& m, int64_t step);
    // Returns the largest power of two that divides all addresses of the batch, up to 256.
    uint32_t alignment() const;
    // Returns the bytes from the first element to the end of the last.
    int64_t extent(int64_t batch) const;
};

// The scales of a float8 matmul; `scaled` is false for other matmuls.
struct Scaling {
    const float *a = nullptr, *b = nullptr;
    bool scaled = false, each = false, fast = false;

    Scaling() = default;
    explicit Scaling(const MatmulTask& t)
        : a(t.a_scale.data), b(t.b_scale.data), scaled(t.scaled()), each(t.a_scale.each), fast(t.fast_sums) {}
};

using PlanShape = std::array<int64_t, 30>;

// A matmul without its addresses' values. `c`: the addend, or `out` itself. `bias`: a vector that is added to each row, or
// null.
struct Problem {
    Operand a, b, c, out;
    const char* bias = nullptr;
    int64_t batch = 1;
    // The `data` of all operands are arrays of addresses in device memory, one address for each of the batch. Of a plan's
    // problem they are the first matrices.
    bool by_address = false;
    Scaling scaling;

    // Returns everything that a plan depends on.
    PlanShape shape() const;
    // A bias is loaded with the width with which the result is stored.
    uint32_t out_alignment() const;
};

struct Plan {
    cublasLtMatmulDesc_t desc = nullptr;
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr, d = nullptr;
    cublasLtMatmulAlgo_t algo{}, first_proposal{};
    bool usable = false;
    bool has_chosen = false;  // `algo` comes from MatmulAlgorithms
};

// A plan, and what a search for a better algorithm needs.
struct PlannedProblem {
    Problem problem;
    std::string key;  // the shape as text, also in files
    Plan plan;
    uint64_t generation = 0;  // of MatmulAlgorithms, when the algorithm was set
    int64_t uses = 0;
};

// Plans of one device; never freed.
class Planner {
  public:
    explicit Planner(int device);

    // Returns the plan of a problem with the algorithm that is in force now.
    Plan plan(const Problem& problem);
    // Returns all problems so far.
    std::vector<PlannedProblem> problems();
    // Returns the problem of a key. NamedError if there is none.
    PlannedProblem find(const std::string& key);
    // Returns up to `count` algorithms, in the order of the library's own estimate.
    std::vector<cublasLtMatmulAlgo_t> propose(const PlannedProblem& planned, int count);
    // Returns whether the library runs a plan by this algorithm, in our workspace.
    bool accepts(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm);
    // Enqueues a matmul: the addresses of `problem`, the descriptions and algorithm of `plan`. A chosen algorithm that the
    // library refuses is replaced by its first proposal. Returns false, and enqueues nothing, if it refuses that too.
    bool launch(const Problem& problem, const Plan& plan, float beta, void* workspace, cudaStream_t stream);

  private:
    PlannedProblem make(const Problem& problem);
    void set_algorithm(PlannedProblem& planned);

    const int device_;
    cublasLtHandle_t handle_ = nullptr;
    std::mutex mutex_;
    std::map<PlanShape, std::unique_ptr<PlannedProblem>> planned_;
    // A plan's description holds the addresses of biases and scales, so such a plan is launched by one thread at a time.
    std::mutex addresses_mutex_;
};

Planner& planner_of_current_device();

// The bytes of an algorithm, and back. False for bytes of another size.
std::string bytes_of(const cublasLtMatmulAlgo_t& algorithm);
bool algorithm_of(const std::string& bytes, cublasLtMatmulAlgo_t& algorithm);

}  // namespace ub_overlap::cuda
