#pragma once

#include "core/types.h"

namespace ub_overlap {

// The executors' matmul: ATen's, on views of raw memory. On CUDA it is enqueued on the current stream of the current device.
void aten_matmul(const MatmulTask& task);
void aten_matmul_cuda(const MatmulTask& task);

}  // namespace ub_overlap
