// Reads memory into the L2 cache, where the matmul that reads it next finds it. Nothing waits for that. For .cu files.
#pragma once

#include <cstdint>
#include <vector>

#include "core/call.h"

namespace ub_overlap::cuda {

constexpr int cache_line = 128;
constexpr int lines_of_thread = 4;  // where enough blocks can run

// `blocks` runs of `lines` cache lines, `stride` bytes apart.
struct CachedSpan {
    const char* data;
    int64_t stride;
    uint32_t blocks, lines;
};

struct CachedSpans {
    CachedSpan spans[most_prefetched];
    int count;
};

inline CachedSpans cached_spans(const std::vector<Span>& spans) {
    CachedSpans found{};
    for (const Span& s : spans) {
        const auto lines = static_cast<uint32_t>((s.bytes + cache_line - 1) / cache_line);
        found.spans[found.count++] = {s.data, s.stride, static_cast<uint32_t>(s.blocks), lines};
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
            const char* at = s.data + i / s.lines * s.stride + i % s.lines * cache_line;
            asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
        }
    }
}

}  // namespace ub_overlap::cuda
