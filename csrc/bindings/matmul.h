#pragma once

#include "core/types.h"

namespace ub_overlap {

// The CPU executor's matmul: ATen's, on views of raw memory.
void aten_matmul(const MatmulTask& task);

}  // namespace ub_overlap
