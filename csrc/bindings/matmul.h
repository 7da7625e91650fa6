#pragma once

#include "core/types.h"

namespace ub_overlap {

// The executors' matmuls (core/types.h, MatmulFn). CPU: ATen's, on views of raw memory. CUDA: cuBLASLt's with kept plans, else
// ATen's on the current stream of the current device.
bool matmul_cpu(const MatmulTask& task, void* stream, void* owner);
bool matmul_cuda(const MatmulTask& task, void* stream, void* owner);

}  // namespace ub_overlap
