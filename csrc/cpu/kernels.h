// The loops of the CPU executor that touch data: strided copies, the fixed-order reduction, and rounding to float8.
#pragma once

#include <vector>

#include "core/call.h"

namespace ub_overlap {

void copy_spans(const Span& src, const Span& dst);

// Copies rows that have arrived to their places in the result. Every number is that of a row.
void order_rows(const OrderedRows& rows);

// dst = sources[0] + sources[1] + ..., in that order, in fp32, divided by `divisor`, rounded once.
void reduce_spans(const std::vector<Source>& sources, const Span& dst, DType dst_type, float divisor);

// Rounds to wire_float8, a scale for each scale_block elements: the largest finite one becomes the largest float8 number.
// What is not finite becomes NaN.
void round_for_wire(const Rounding& rounding, DType type);

// dst[i] = round(src[i])
void round_from_f32(const char* src, char* dst, int64_t count, DType type);

}  // namespace ub_overlap
