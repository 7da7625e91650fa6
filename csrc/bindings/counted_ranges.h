// For tests: records NVTX pushes and pops instead of torch's own ranges, which only CUDA builds have.
#pragma once

#include <torch/csrc/profiler/stubs/base.h>

#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace ub_overlap {

class CountedRanges final : public torch::profiler::impl::ProfilerStubs {
  public:
    static CountedRanges& get() {
        static auto* ranges = new CountedRanges;
        return *ranges;
    }
    // On: in torch's place, with nothing counted yet. Off: torch's are back.
    void listen(bool on) {
        namespace impl = torch::profiler::impl;
        if (on && impl::cudaStubs() != this) {
            before_ = const_cast<impl::ProfilerStubs*>(impl::cudaStubs());
            impl::registerCUDAMethods(this);
        } else if (!on && before_) {
            impl::registerCUDAMethods(std::exchange(before_, nullptr));
        }
        const std::lock_guard<std::mutex> lock(mutex_);
        if (on) seen_.clear();
    }
    // The name of each push, "" for each pop, in their order.
    std::vector<std::string> seen() const {
        const std::lock_guard<std::mutex> lock(mutex_);
        return seen_;
    }

    bool enabled() const override { return true; }
    void rangePush(const char* name) const override { add(name); }
    void rangePop() const override { add(""); }
    void mark(const char*) const override {}
    void record(c10::DeviceIndex*, torch::profiler::impl::ProfilerVoidEventStub*, int64_t*) const override {}
    float elapsed(const torch::profiler::impl::ProfilerVoidEventStub*,
                  const torch::profiler::impl::ProfilerVoidEventStub*) const override {
        return 0.0f;
    }
    void onEachDevice(std::function<void(int)>) const override {}
    void synchronize() const override {}

  private:
    void add(const char* name) const {
        const std::lock_guard<std::mutex> lock(mutex_);
        seen_.emplace_back(name);
    }

    torch::profiler::impl::ProfilerStubs* before_ = nullptr;
    mutable std::mutex mutex_;
    mutable std::vector<std::string> seen_;
};

}  // namespace ub_overlap
