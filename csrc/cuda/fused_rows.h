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
    __device__ void prefetch(int v, int64_t at) {
        if (!source_) return;
        if constexpr (is_held) {
            held_[v].line = source_[at];
        } else {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(source_ + at));
        }
    }
    __device__ Vector<T> get(int v, int64_t at) const {
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
template <typename T, int per_thread>
class Rows {
  public:
    // Loads what does not depend on the peers.
    __device__ Rows(const Parameters& p, const Block& block)
        : p_(p),
          block_(block),
          linear_bias_(segment_of(p.linear_bias)),
          branch_weight_(segment_of(p.branch_norm.weight)),
          branch_bias_(segment_of(p.branch_norm.bias)),
          weight_(segment_of(p.norm.weight)),
          bias_(segment_of(p.norm.bias)) {
        load_residual(0);
        for_own([&](int v, int64_t at) {
            linear_bias_.prefetch(v, at), branch_weight_.prefetch(v, at), branch_bias_.prefetch(v, at);
            weight_.prefetch(v, at), bias_.prefetch(v, at);
            if (p_.addend) asm volatile("prefetch.global.L2 [%0];" ::"l"(p_.addend + block_.first + at));
        });
        if (p.scale) scale_ = *p.scale;
    }

    // `reduced(i)`: the reduced vector i of the slice.
    template <typename Reduced>
    __device__ void run(Reduced reduced) {
        for (int64_t row = 0; row < block_.size; row += p_.row_vectors) {
            Vector<T> own[per_thread];  // the sums, or the branch where the norm reads sums in fp32
            for_own([&](int v, int64_t at) {
                if (row + at < block_.size) own[v].line = reduced(row + at);  // the last row without a norm may be short
            });
            if (p_.has_branch) compute_branch(own, block_.first + row);
            for_own([&](int v, int64_t at) {
                if (row + at >= block_.size) return;
                Vector<T> summed = own[v];
                if (p_.residual) add(summed, residual_[v]);
                p_.output[block_.first + row + at] = summed.line;
                if (p_.round_sum) own[v] = summed;
            });
            if (p_.round_sum) load_residual(row + p_.row_vectors);
            if (p_.norm.exists()) compute_norm(own, block_.first + row);
            if (!p_.round_sum) load_residual(row + p_.row_vectors);
        }
    }

  private:
    static constexpr int n = elements_of_vector<T>;
    // Registers for the branch too are left where a thread has few vectors of a row.
    using BranchColumns = Columns<T, per_thread, (per_thread <= 2)>;
    using NormColumns = Columns<T, per_thread, true>;

    __device__ const uint4* segment_of(const uint4* columns) const {
        return columns && p_.cluster > 1 ? columns + blockIdx.x % p_.cluster * p_.row_vectors : columns;
    }
    // Calls `body(v, at)` for each vector `at` of a row that this thread has.
    template <typename Body>
    __device__ void for_own(Body body) {
#pragma unroll
        for (int v = 0; v < per_thread; ++v) {
            const int64_t at = threadIdx.x + v * int64_t{blockDim.x};
            if (at < p_.row_vectors) body(v, at);
        }
    }
    __device__ void load_residual(int64_t row) {
        if (!p_.residual) return;
        for_own([&](int v, int64_t at) {
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
        ++reductions_;
        value = reduce_in_block(value, reductions_ % 2, op);
        return p_.cluster == 1 ? value : reduce_in_cluster(p_, value, reductions_, op);
    }
    // Sums `term(v, e)` over the numbers of a row: element e of vector v of each thread.
    template <typename Term>
    __device__ float row_sum(Term term) {
        float sum = 0;
        for_own([&](int v, int64_t) {
#pragma unroll
            for (int e = 0; e < n; ++e) sum += term(v, e);
        });
        return reduce(sum, Add());
    }
    // Returns the scale of a row with these elements. NaN where one is NaN.
    __device__ float row_scale(const Vector<T> (&row)[per_thread]) {
        uint32_t amax = 0;
        for_own([&](int v, int64_t) {
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
        if (norm.kind == Norm::layer) mean = row_sum(number) * p_.inverse_cols;
        const float squares = row_sum([&](int v, int e) {
            const float x = number(v, e) - mean;
            return x * x;
        });
        const float factor = rsqrtf(squares * p_.inverse_cols + norm.epsilon);
        for_own([&](int v, int64_t at) {
            const Vector<T> weights = weight ? weight.get(v, at) : Vector<T>{}, biases = bias ? bias.get(v, at) : Vector<T>{};
#pragma unroll
            for (int e = 0; e < n; ++e) {
                float x = (number(v, e) - mean) * factor;
                if (norm.round_before_weight) x = to_float(rounded<T>(x));
                if (weight) x *= norm.weight_offset + to_float(weights.v[e]);
                if (bias) x += to_float(biases.v[e]);
                from_float(x, row[v].v[e]);
            }
        });
    }
    // Turns a reduced row into what is added to the residual. `first`: its place in the tensor.
    __device__ void compute_branch(Vector<T> (&row)[per_thread], int64_t first) {
        if (linear_bias_) for_own([&](int v, int64_t at) { add(row[v], linear_bias_.get(v, at)); });
        if (p_.branch_norm.exists()) {
            const auto number = [&](int v, int e) { return to_float(row[v].v[e]); };
            write_norm(row, p_.branch_norm, branch_weight_, branch_bias_, number);
        }
        if (p_.branch_factor != 1.0f) {
            for_own([&](int v, int64_t) {
#pragma unroll
                for (int e = 0; e < n; ++e) from_float(to_float(row[v].v[e]) * p_.branch_factor, row[v].v[e]);
            });
        }
        if (!p_.addend) return;
        for_own([&](int v, int64_t at) {
            Vector<T> addend;
            addend.line = p_.addend[first + at];
            add(row[v], addend);
        });
    }
    // Norms a row in its place and stores it, in T or as float8. `first`: its place in the tensor.
    __device__ void compute_norm(Vector<T> (&row)[per_thread], int64_t first) {
        write_norm(row, p_.norm, weight_, bias_, [&](int v, int e) {
            const float x = to_float(row[v].v[e]);
            return p_.round_sum ? x : x + to_float(residual_[v].v[e]);
        });
        if (p_.row_scales) {
            scale_ = row_scale(row);
            const bool is_first = threadIdx.x == 0 && blockIdx.x % p_.cluster == 0;
            if (is_first) p_.row_scales[first / (p_.row_vectors * p_.cluster)] = scale_;
        }
        for_own([&](int v, int64_t at) {
            if (!p_.scale && !p_.row_scales) {
                reinterpret_cast<uint4*>(p_.normed)[first + at] = row[v].line;
                return;
            }
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
