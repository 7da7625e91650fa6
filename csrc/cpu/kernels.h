// The two loops of the CPU executor that touch data: strided copies and the fixed-order reduction.
#pragma once

#include <vector>

#include "core/call.h"

namespace ub_overlap {

void copy_spans(const Span& src, const Span& dst);

// dst = sources[0] + sources[1] + ..., in that order, in fp32, divided by `divisor`, rounded once.
void reduce_spans(const std::vector<Span>& sources, DType source_type, const Span& dst, DType dst_type, float divisor);

// dst[i] = round(src[i])
void round_from_f32(const char* src, char* dst, int64_t count, DType type);

}  // namespace ub_overlap
