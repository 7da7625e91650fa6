// Matmuls by cuBLASLt with plans cached by shape (cuda/blas_plan.h): a launch costs the host a few microseconds.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "core/types.h"

namespace ub_overlap::cuda {

constexpr size_t blas_workspace_bytes = 32u << 20;  // the default of cuBLAS on Hopper

// Allocates device memory outside of torch's allocators that is never freed; null if there is none left. Can be called while
// another stream is being captured.
void* allocate_permanently(size_t bytes);

// Enqueues a copy of `bytes` bytes and returns its address, `scratch`. May be captured.
const float* copy_to_scratch(const float* data, int64_t bytes, void* scratch, cudaStream_t stream);

// Enqueues `task` on `stream` and returns true. Does nothing and returns false if the task does not suit cuBLASLt: fp32
// operands (their precision depends on torch's settings), strides that are neither row- nor column-major, or a shape without an
// algorithm. float8 operands (not batched): the left row-major, the right column-major. Sums are formed in fp32, split sums
// too. `workspace`: `blas_workspace_bytes`, used by no other stream.
bool blas_matmul(const MatmulTask& task, void* workspace, cudaStream_t stream);

// The same for a batch with `addresses`: one launch for all, whose results may lie on several devices. Also returns false where
// cuBLAS is older than 13.1, for a row as addend, and where the addresses do not fit into `scratch`, device memory that belongs
// to the stream as the workspace does.
bool blas_matmul_by_address(const MatmulTask& task, void* workspace, void* scratch, int64_t scratch_bytes, cudaStream_t stream);

}  // namespace ub_overlap::cuda
