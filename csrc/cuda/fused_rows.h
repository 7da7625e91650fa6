// What follows the reduction, row by row: branch, residual, norm and cast (Epilogue in core/fused_collective.h).
#pragma once

#include "cuda/fused_reductions.h"

namespace ub_overlap::cuda {
namespace {

// Scales a vector of numbers, rounds it to float8 and stores it.
template <int n>
__device__ inline void store_float8(const Parameters& p, int64_t at, const float (&value)[n], float scale) {
    union {
        uint64_t bits;
        __nv_fp8x2_storage_t pair[4];
    } line{};
    const auto format = p.is_e5m2 ? __NV_E5M2 : __NV_E4M3;
    const float inverse = 1.0f / scale;
    const auto scaled = [&](float x) { return p.divide_by_scale ? x / scale : x * inverse; };
#pragma unroll
    for (int e = 0; e < n; e += 2) {
        const float2 two = make_float2(scaled(value[e]), scaled(value[e + 1]));
        line.pair[e / 2] = __nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, format);
    }
    if (n == 8) {
        reinterpret_cast<uint64_t*>(p.normed)[at] = line.bits;
    } else {
        reinterpret_cast<uint32_t*>(p.normed)[at] = static_cast<uint32_t>(line.bits);
    }
}

// A vector of all columns, of which a thread reads the same vectors for each row. `is_held`: it keeps them in registers.
template <typename T, int per_thread, bool is_held>
class Columns {
  public:
    __device__ explicit Columns(const uint4* source) : source_(source) {}
    __device__ explicit operator bool() const { return source_ != nullptr; }
    // Reads vector `v` of the thread ahead, which is number `at` of the columns.
    __device__ void prefetch(int v, int32_t at) {
        if (!source_) return;
        if constexpr (is_held) {
            held_[v].line = source_[at];
        } else {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(source_ + at));
        }
    }
    __device__ Vector<T> get(int v, int32_t at) const {
        if constexpr (is_held) return held_[v];
        Vector<T> loaded;
        loaded.line = source_[at];
        return loaded;
    }

  private:
    const uint4* source_;
    Vector<T> held_[is_held ? per_thread : 1];
};

// What follows the reduction, for the rows of one block. `per_thread`: vectors of a row that a thread has.
template <typename T, int per_thread, EpilogueKind kind>
class Rows {
  public:
    __device__ Rows(const Parameters& p, const Block& block)
        : p_(p),
          block_(block),
          linear_bias_(is_full ? segment_of(p.linear_bias) : nullptr),
          branch_weight_(is_full ? segment_of(p.branch_norm.weight) : nullptr),
          branch_bias_(is_full ? segment_of(p.branch_norm.bias) : nullptr),
          weight_(segment_of(p.norm.weight)),
          bias_(is_full ? segment_of(p.norm.bias) : nullptr) {}

    // Loads what does not depend on the peers. The block need not have begun.
    __device__ void load() {
        load_residual(0);
        for_own([&](int v, int32_t at) {
            weight_.prefetch(v, at);
            if constexpr (is_full) {
                linear_bias_.prefetch(v, at), branch_weight_.prefetch(v, at), branch_bias_.prefetch(v, at);
                bias_.prefetch(v, at);
                if (p_.addend) asm volatile("prefetch.global.L2 [%0];" ::"l"(p_.addend + block_.first + at));
            }
        });
        if (is_full && p_.scale) scale_ = *p_.scale;
    }

    // Calls `body(v, at)` for each vector `at` of a row that this thread has.
    template <typename Body>
    __device__ void for_own(Body body) const {
#pragma unroll
        for (int v = 0; v < per_thread; ++v) {
            const auto at = static_cast<int32_t>(threadIdx.x + v * blockDim.x);
            if (at < p_.row_vectors) body(v, at);
        }
    }

    // `reduced(v, row, at)`: the reduced vector row + at of the slice, which is vector v of this thread.
    template <typename Reduced>
    __device__ void run(Reduced reduced) {
        const bool round_sum = !is_full || p_.round_sum;
        for (int32_t row = 0; row < block_.size; row += p_.row_vectors) {
            Vector<T> own[per_thread];  // the sums, or the branch where the norm reads sums in fp32
            for_own([&](int v, int32_t at) {
                if (row + at < block_.size) own[v].line = reduced(v, row, at);  // the last row without a norm may be short
            });
            if (is_full && p_.has_branch) compute_branch(own, block_.first + row);
            for_own([&](int v, int32_t at) {
                if (row + at >= block_.size) return;
                Vector<T> summed = own[v];
                if (p_.residual) add(summed, residual_[v]);
                p_.output[block_.first + row + at] = summed.line;
                if (round_sum) own[v] = summed;
            });
            if (round_sum) load_residual(row + p_.row_vectors);
            if (p_.norm.exists()) compute_norm(own, block_.first + row);
            if (!round_sum) load_residual(row + p_.row_vectors);
        }
    }

  private:
    static constexpr bool is_full = kind == EpilogueKind::full;
    static constexpr int n = elements_of_vector<T>;
    // Registers for the branch too are left where a thread has few vectors of a row.
    using BranchColumns = Columns<T, per_thread, (per_thread <= 2)>;
    using NormColumns = Columns<T, per_thread, true>;

    __device__ const uint4* segment_of(const uint4* columns) const {
        const auto segment = static_cast<int32_t>(blockIdx.x) & (p_.cluster - 1);
        return columns ? columns + segment * p_.row_vectors : nullptr;
    }
    __device__ void load_residual(int32_t row) {
        if (!p_.residual) return;
        for_own([&](int v, int32_t at) {
            if (row + at < block_.size) residual_[v].line = p_.residual[block_.first + row + at];
        });
    }
    __device__ static void add(Vector<T>& to, const Vector<T>& other) {
#pragma unroll
        for (int e = 0; e < n; ++e) from_float(to_float(to.v[e]) + to_float(other.v[e]), to.v[e]);
    }
    // Reduces a value of each thread over the threads that share the row.
    template <typename Value, typename Op>
    __device__ Value reduce(Value value, Op op) {
        return reduce_over_row(p_, value, ++reductions_, op);
    }
    // Sums `term(v, e)` over the numbers of a row: element e of vector v of each thread.
    template <typename Term>
    __device__ float row_sum(Term term) {
        float sum = 0;
        for_own([&](int v, int32_t) {
#pragma unroll
            for (int e = 0; e < n; ++e) sum += term(v, e);
        });
        return reduce(sum, Add());
    }
    // Returns the scale of a row with these elements. NaN where one is NaN.
    __device__ float row_scale(const Vector<T> (&row)[per_thread]) {
        uint32_t amax = 0;
        for_own([&](int v, int32_t) {
#pragma unroll
            for (int e = 0; e < n; ++e) amax = Larger()(amax, __float_as_uint(fabsf(to_float(row[v].v[e]))));
        });
        const float scale = __uint_as_float(reduce(amax, Larger())) * p_.amax_factor;
        return scale < p_.least_scale ? p_.least_scale : scale;
    }
    // Writes the norm of the numbers x = number(v, e) to `row`.
    template <typename Weights, typename Number>
    __device__ void write_norm(Vector<T> (&row)[per_thread], const NormParameters& norm, const Weights& weight,
                               const Weights& bias, Number number) {
        float mean = 0;
        if (is_full && norm.kind == Norm::layer) mean = row_sum(number) * p_.inverse_cols;
        const float squares = row_sum([&](int v, int e) {
            const float x = number(v, e) - mean;
            return x * x;
        });
        const float factor = rsqrtf(squares * p_.inverse_cols + norm.epsilon);
        for_own([&](int v, int32_t at) {
            float x[n];
#pragma unroll
            for (int e = 0; e < n; ++e) x[e] = (number(v, e) - mean) * factor;
            if (norm.round_before_weight) {
#pragma unroll
                for (int e = 0; e < n; ++e) x[e] = to_float(rounded<T>(x[e]));
            }
            if (weight) {
                const Vector<T> weights = weight.get(v, at);
#pragma unroll
                for (int e = 0; e < n; ++e) {
                    const float w = to_float(weights.v[e]);
                    x[e] *= is_full ? norm.weight_offset + w : w;
                }
            }
            if (is_full && bias) {
                const Vector<T> biases = bias.get(v, at);
#pragma unroll
                for (int e = 0; e < n; ++e) x[e] += to_float(biases.v[e]);
            }
#pragma unroll
            for (int e = 0; e < n; ++e) from_float(x[e], row[v].v[e]);
        });
    }
    // Turns a reduced row into what is added to the residual. `first`: its place in the tensor.
    __device__ void compute_branch(Vector<T> (&row)[per_thread], int64_t first) {
        if (linear_bias_) for_own([&](int v, int32_t at) { add(row[v], linear_bias_.get(v, at)); });
        if (p_.branch_norm.exists()) {
            const auto number = [&](int v, int e) { return to_float(row[v].v[e]); };
            write_norm(row, p_.branch_norm, branch_weight_, branch_bias_, number);
        }
        if (p_.branch_factor != 1.0f) {
            for_own([&](int v, int32_t) {
#pragma unroll
                for (int e = 0; e < n; ++e) from_float(to_float(row[v].v[e]) * p_.branch_factor, row[v].v[e]);
            });
        }
        if (!p_.addend) return;
        for_own([&](int v, int32_t at) {
            Vector<T> addend;
            addend.line = p_.addend[first + at];
            add(row[v], addend);
        });
    }
    // Norms a row in its place and stores it, in T or as float8. `first`: its place in the tensor.
    __device__ void compute_norm(Vector<T> (&row)[per_thread], int64_t first) {
        write_norm(row, p_.norm, weight_, bias_, [&](int v, int e) {
            const float x = to_float(row[v].v[e]);
            return !is_full || p_.round_sum ? x : x + to_float(residual_[v].v[e]);
        });
        if (is_full && (p_.scale || p_.row_scales)) {
            cast_row(row, first);
        } else {
            for_own([&](int v, int32_t at) { reinterpret_cast<uint4*>(p_.normed)[first + at] = row[v].line; });
        }
    }
    __device__ void cast_row(const Vector<T> (&row)[per_thread], int64_t first) {
        if (p_.row_scales) {
            scale_ = row_scale(row);
            const bool is_first = threadIdx.x == 0 && (static_cast<int>(blockIdx.x) & (p_.cluster - 1)) == 0;
            if (is_first) p_.row_scales[first / (p_.row_vectors * p_.cluster)] = scale_;
        }
        for_own([&](int v, int32_t at) {
            float value[n];
#pragma unroll
            for (int e = 0; e < n; ++e) value[e] = to_float(row[v].v[e]);
            store_float8<n>(p_, first + at, value, scale_);
        });
    }

    const Parameters& p_;
    const Block& block_;
    Vector<T> residual_[per_thread];
    BranchColumns linear_bias_, branch_weight_, branch_bias_;
    NormColumns weight_, bias_;
    float scale_ = 1.0f;
    int reductions_ = 0;
};

}  // namespace
}  // namespace ub_overlap::cuda
