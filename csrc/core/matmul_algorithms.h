// The cuBLASLt algorithms that a search has chosen, in this process or in an earlier one. A matmul without one uses the
// library's first proposal.
//
// An algorithm is named by device and by the key of its matmul, a text of everything that the library's choice depends on:
// sizes, layouts, types, alignments, batch, epilogue. Its value is the library's own structure, as bytes. It is valid for one
// version of the library, and checked before it is used.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace ub_overlap {

class MatmulAlgorithms {
  public:
    static MatmulAlgorithms& get() {
        static auto* one = new MatmulAlgorithms;  // never destroyed: threads may launch until the process ends
        return *one;
    }

    void add(int device, const std::map<std::string, std::string>& chosen) {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const auto& [key, algorithm] : chosen) chosen_[{device, key}] = algorithm;
        ++generation_;
    }
    void clear() {
        const std::lock_guard<std::mutex> lock(mutex_);
        chosen_.clear();
        ++generation_;
    }
    std::optional<std::string> find(int device, const std::string& key) const {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto entry = chosen_.find({device, key});
        return entry == chosen_.end() ? std::nullopt : std::optional(entry->second);
    }
    std::map<std::string, std::string> of_device(int device) const {
        std::map<std::string, std::string> all;
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const auto& [name, algorithm] : chosen_) {
            if (name.first == device) all[name.second] = algorithm;
        }
        return all;
    }
    // Changes with every change. Plans and recorded calls made before hold other algorithms.
    uint64_t generation() const { return generation_.load(std::memory_order_relaxed); }

  private:
    mutable std::mutex mutex_;
    std::map<std::pair<int, std::string>, std::string> chosen_;
    std::atomic<uint64_t> generation_{0};
};

}  // namespace ub_overlap
