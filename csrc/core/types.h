// Plain data that crosses every layer: element types, 2D views and one matmul. No torch, so that kernels need none either.
#pragma once

#include <cstdint>

namespace ub_overlap {

enum class DType : int32_t { f32 = 0, bf16 = 1, f16 = 2 };

inline int64_t size_of(DType type) {
    return type == DType::f32 ? 4 : 2;
}

inline const char* name_of(DType type) {
    return type == DType::f32 ? "float32" : type == DType::bf16 ? "bfloat16" : "float16";
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

// out = a @ b (+ addend, or + out where `accumulate`), `batch` times, each operand moved on by its step (in elements).
// out is fp32 where the product is accumulated over a contraction: then a @ b is to be formed in fp32 too.
struct MatmulTask {
    Matrix out, a, b, addend;
    int64_t batch = 1;
    int64_t out_step = 0, a_step = 0, b_step = 0, addend_step = 0;
    bool accumulate = false;
};

// Injected by the bindings, so that executors need no torch headers. CPU: runs on the caller's thread, `stream` and `owner` are
// null. CUDA: enqueued on `stream`; `owner` is the stream whose order keeps scratch memory safe. Returns false where that took
// ATen, which knows no stream but its current one: such a call cannot be captured on another.
using MatmulFn = bool (*)(const MatmulTask&, void* stream, void* owner);

}  // namespace ub_overlap
