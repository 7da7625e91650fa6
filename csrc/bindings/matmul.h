#pragma once

#include "core/types.h"

namespace ub_overlap {

// The executors' matmul. CPU: ATen's, on views of raw memory. CUDA: cuBLASLt's with kept plans, else ATen's, enqueued on the
// current stream of the current device.
void aten_matmul(const MatmulTask& task);
void matmul_cuda(const MatmulTask& task);

}  // namespace ub_overlap
