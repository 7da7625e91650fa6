// Matmuls by cuBLASLt with plans that are made once a shape: a launch costs the host a few microseconds.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "core/types.h"

namespace ub_overlap::cuda {

constexpr size_t blas_workspace_bytes = 32u << 20;  // what cuBLAS itself takes on Hopper

// Device memory that no allocator of torch's knows of and that is never freed; null where there is none left. May be called
// while another stream is captured.
void* allocate_for_good(size_t bytes);

// Enqueues `task` on `stream` and returns true; returns false, having done nothing, where the task is not for cuBLASLt: fp32
// operands (whose precision torch's settings choose), strides that are neither row- nor column-major, or a shape that it has no
// algorithm for. float8 operands (not batched): the left row-major, the right column-major. Sums are formed in fp32, split ones
// too. `workspace`: `blas_workspace_bytes`, used by no other stream.
bool blas_matmul(const MatmulTask& task, void* workspace, cudaStream_t stream);

}  // namespace ub_overlap::cuda
