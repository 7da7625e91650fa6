// Statistics by site: calls, transport, bytes copied, and bytes copied while a matmul of the same call ran.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace ub_overlap {

// When a step ran, in nanoseconds: of CLOCK_MONOTONIC, or of the GPU's clock.
struct StepTime {
    int step = 0, queue = 0, kind = 0;
    int64_t begin_ns = 0, end_ns = 0, bytes = 0;
};

struct SiteStats {
    int64_t calls = 0, bytes_copied = 0;
    double bytes_overlapped = 0;
    std::string strategy, transport, reason;    // of the last call
    std::map<std::string, int64_t> strategies;  // calls by strategy
};

// Bytes of the copies on the COPY queue, and those weighted by the share of each copy's time in which some matmul ran. Bytes
// that a matmul stores at peers count as copied while it ran. A split collective has no matmul: what was copied before its
// finish began, `finish_ns`, was copied while the graph went on.
struct Overlap {
    int64_t copied = 0;
    double overlapped = 0;
};
Overlap overlap_of(const std::vector<StepTime>& times, int64_t finish_ns = 0);

class Stats {
  public:
    static Stats& get();
    void add(const std::string& site, const std::string& strategy, const std::string& transport, const std::string& reason,
             const std::vector<StepTime>& times, bool keep_trace, int64_t finish_ns = 0);
    // Replaces the step times of the site's last traced call.
    void keep_trace(const std::string& site, const std::vector<StepTime>& times);
    // Registers a reader of step times that only the device knows: of the site's last traced call, or of the last replay of
    // its graph. It is called when statistics are read.
    void defer(const std::string& site, std::function<std::vector<StepTime>()> read);
    // Where times are deferred, the share of bytes that moved during a matmul is that of the last traced call.
    std::map<std::string, SiteStats> sites();
    std::vector<StepTime> trace(const std::string& site);
    void clear();

  private:
    std::mutex mutex_;
    std::map<std::string, SiteStats> sites_;
    std::map<std::string, std::vector<StepTime>> traces_;
    std::map<std::string, std::function<std::vector<StepTime>()>> deferred_;
};

}  // namespace ub_overlap
