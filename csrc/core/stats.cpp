#include "core/stats.h"

#include <algorithm>

#include "core/schedule.h"

namespace ub_overlap {

Overlap overlap_of(const std::vector<StepTime>& times, int64_t finish_ns) {
    Overlap sum;
    for (const StepTime& copy : times) {
        if (copy.kind == static_cast<int>(StepKind::compute)) {  // a matmul that stores at peers
            sum.copied += copy.bytes;
            sum.overlapped += static_cast<double>(copy.bytes);
        }
        if (copy.queue != copy_queue || copy.kind != static_cast<int>(StepKind::copy)) continue;
        sum.copied += copy.bytes;
        int64_t overlapped = 0;  // matmuls of a call run one after the other, so their times do not overlap
        for (const StepTime& matmul : times) {
            if (matmul.kind != static_cast<int>(StepKind::compute)) continue;
            overlapped += std::max<int64_t>(0, std::min(copy.end_ns, matmul.end_ns) - std::max(copy.begin_ns, matmul.begin_ns));
        }
        if (finish_ns) overlapped = std::max<int64_t>(0, std::min(copy.end_ns, finish_ns) - copy.begin_ns);
        const int64_t lasted = copy.end_ns - copy.begin_ns;
        if (lasted > 0)
            sum.overlapped += static_cast<double>(copy.bytes) * static_cast<double>(overlapped) / static_cast<double>(lasted);
    }
    return sum;
}

Stats& Stats::get() {
    static Stats* one = new Stats;  // never destroyed: a thread may be in a call while the process exits
    return *one;
}

void Stats::add(const std::string& site, const std::string& strategy, const std::string& transport, const std::string& reason,
                const std::vector<StepTime>& times, bool keep_trace, int64_t finish_ns) {
    const Overlap overlap = overlap_of(times, finish_ns);
    std::lock_guard<std::mutex> lock(mutex_);
    SiteStats& stats = sites_[site];
    stats.calls += 1;
    stats.bytes_copied += overlap.copied;
    stats.bytes_overlapped += overlap.overlapped;
    stats.strategy = strategy;
    stats.strategies[strategy] += 1;
    stats.transport = transport;
    stats.reason = reason;
    if (keep_trace) traces_[site] = times;
}

void Stats::keep_trace(const std::string& site, const std::vector<StepTime>& times) {
    const std::lock_guard<std::mutex> lock(mutex_);
    traces_[site] = times;
}

void Stats::defer(const std::string& site, std::function<std::vector<StepTime>()> read) {
    std::lock_guard<std::mutex> lock(mutex_);
    deferred_[site] = std::move(read);
}

std::map<std::string, SiteStats> Stats::sites() {
    std::map<std::string, SiteStats> found;
    std::map<std::string, std::function<std::vector<StepTime>()>> deferred;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        found = sites_, deferred = deferred_;
    }
    for (const auto& [site, read] : deferred) {  // without the lock: it waits for a device
        const Overlap last = overlap_of(read());
        SiteStats& stats = found[site];
        if (last.copied) stats.bytes_overlapped = static_cast<double>(stats.bytes_copied) * last.overlapped / last.copied;
    }
    return found;
}

std::vector<StepTime> Stats::trace(const std::string& site) {
    std::function<std::vector<StepTime>()> read;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (const auto found = deferred_.find(site); found != deferred_.end()) read = found->second;
        const auto found = traces_.find(site);
        if (!read) return found == traces_.end() ? std::vector<StepTime>() : found->second;
    }
    return read();
}

void Stats::clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    sites_.clear();
    traces_.clear();
    deferred_.clear();
}

}  // namespace ub_overlap
