// Plain data that crosses every layer: element types, 2D views and one matmul. No torch, so that kernels need none either.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ub_overlap {

// e4m3 is torch's float8_e4m3fn: largest number 448, no infinity.
enum class DType : int32_t { f32 = 0, bf16 = 1, f16 = 2, e4m3 = 3, e5m2 = 4 };

inline bool is_float8(DType type) {
    return type == DType::e4m3 || type == DType::e5m2;
}

inline int64_t size_of(DType type) {
    return type == DType::f32 ? 4 : is_float8(type) ? 1 : 2;
}

inline const char* name_of(DType type) {
    constexpr const char* names[] = {"float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"};
    return names[static_cast<int32_t>(type)];
}

// A 2D view with strides in elements. `data` null: no matrix (an absent addend).
struct Matrix {
    char* data = nullptr;
    int64_t rows = 0, cols = 0, row_stride = 0, col_stride = 0;
    DType type = DType::f32;

    Matrix part(int64_t row, int64_t row_count, int64_t col, int64_t col_count) const {
        return {data ? data + (row * row_stride + col * col_stride) * size_of(type) : nullptr,
                row_count,
                col_count,
                row_stride,
                col_stride,
                type};
    }
    Matrix row_block(int64_t row, int64_t count) const { return part(row, count, 0, cols); }
    Matrix col_block(int64_t col, int64_t count) const { return part(0, rows, col, count); }
    Matrix transposed() const { return {data, cols, rows, col_stride, row_stride, type}; }
};

// What float8 numbers are to be multiplied with: one factor for all of a matrix, or `each` line (rows of a left operand,
// columns of a right one) its own, one behind the other. No data: not a float8 matrix.
struct Scale {
    const float* data = nullptr;
    bool each = false;

    Scale from(int64_t line) const { return {each && data ? data + line : data, each}; }
};

// Where one matmul of a batch reads and writes.
struct BatchAddresses {
    char *out = nullptr, *a = nullptr, *addend = nullptr;
};

// out = a @ b (+ addend, or + out where `accumulate`), `batch` times, each operand moved on by its step (in elements).
// out is fp32 where the product is accumulated over a contraction: then a @ b is to be formed in fp32 too.
// float8 operands: a @ b is formed in fp32, multiplied by both scales, and rounded once, to out's type.
struct MatmulTask {
    Matrix out, a, b, addend;
    int64_t batch = 1;
    int64_t out_step = 0, a_step = 0, b_step = 0, addend_step = 0;
    // A batch without equal steps: the addresses of each. `out`, `a` and `addend` are those of the first, and `b` is shared.
    std::vector<BatchAddresses> addresses;
    bool accumulate = false;
    Scale a_scale, b_scale;  // a batch's scales of a: a_scale_step lines further on
    int64_t a_scale_step = 0;
    bool fast_sums = false;  // float8: as few bits in the sums as the device's fastest way has

    bool scaled() const { return a_scale.data != nullptr; }
    // One of the batch, alone.
    MatmulTask one(int64_t block) const {
        const auto moved = [block](Matrix m, int64_t step) {
            if (m.data) m.data += block * step * size_of(m.type);
            return m;
        };
        MatmulTask task = *this;
        task.batch = 1;
        if (!addresses.empty()) {
            const BatchAddresses& at = addresses[static_cast<size_t>(block)];
            task.out.data = at.out, task.a.data = at.a, task.addend.data = at.addend;
            task.addresses.clear();
            return task;
        }
        task.out = moved(out, out_step), task.a = moved(a, a_step), task.b = moved(b, b_step);
        task.addend = moved(addend, addend_step), task.a_scale = a_scale.from(block * a_scale_step);
        return task;
    }
};

// Injected by the bindings, so that executors need no torch headers. CPU: runs on the caller's thread, `stream` and `owner` are
// null. CUDA: enqueued on `stream`; `owner` is the stream whose order keeps scratch memory safe. Returns false where that took
// ATen, which knows no stream but its current one: such a call cannot be captured on another.
using MatmulFn = bool (*)(const MatmulTask&, void* stream, void* owner);

}  // namespace ub_overlap
