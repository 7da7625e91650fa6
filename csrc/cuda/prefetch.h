// Reads memory into the L2 cache, where the matmul that reads it next finds it. Its data is not waited for. For .cu files.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/prefetch.h"

namespace ub_overlap::cuda {

constexpr int lines_of_thread = 4;  // where enough blocks can run

// `blocks` runs of `bytes` bytes, which begin `stride` bytes apart and touch `lines` cache lines.
struct CachedSpan {
    const char* data;
    int64_t stride, bytes;
    uint32_t blocks, lines;
};

struct CachedSpans {
    CachedSpan spans[most_prefetched];
    int count;
};

// Of the first most_prefetched spans.
inline CachedSpans cached_spans(const std::vector<Span>& spans) {
    CachedSpans found{};
    found.count = static_cast<int>(std::min<size_t>(spans.size(), most_prefetched));
    for (int i = 0; i < found.count; ++i) {
        const Span& s = spans[static_cast<size_t>(i)];
        found.spans[i] = {s.data, s.stride, s.bytes, static_cast<uint32_t>(s.blocks), static_cast<uint32_t>(lines_of_run(s))};
    }
    return found;
}

// The lines of all spans.
inline int64_t lines_of(const CachedSpans& spans) {
    int64_t lines = 0;
    for (int i = 0; i < spans.count; ++i) lines += int64_t{spans.spans[i].blocks} * spans.spans[i].lines;
    return lines;
}

// The share of thread `number` of `threads`. Neighboring threads have neighboring lines.
__device__ inline void prefetch(const CachedSpans& spans, uint32_t number, uint32_t threads) {
    for (int k = 0; k < spans.count; ++k) {
        const CachedSpan& s = spans.spans[k];
        const uint32_t lines = s.blocks * s.lines;
        for (uint32_t i = number; i < lines; i += threads) {
            const int64_t offset = int64_t{i % s.lines} * cache_line, last = s.bytes - 1;
            const char* at = s.data + i / s.lines * s.stride + (offset < last ? offset : last);
            asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
        }
    }
}

}  // namespace ub_overlap::cuda
