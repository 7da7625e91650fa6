// Profiler range of a call, named after op and site. Costs nothing without a profiler.
#pragma once

#include <ATen/record_function.h>
#include <torch/csrc/profiler/stubs/base.h>

#include <string>

#include "core/call.h"
#include "core/settings.h"

namespace ub_overlap {

// "ub_overlap::all_gather_matmul[forward.0]": a user's range for torch's profiler (kernels that it launches are put under it),
// and an NVTX range where settings ask for it and torch has NVTX.
class SiteRange {
  public:
    explicit SiteRange(const Call& call) {
        const auto* nvtx = torch::profiler::impl::cudaStubs();
        const bool push = settings().nvtx.load(std::memory_order_relaxed) && nvtx->enabled();
        if (!recorded_.isActive() && !push) return;
        const std::string name = "ub_overlap::" + call.op_name + "[" + call.site.substr(call.site.rfind('/') + 1) + "]";
        if (recorded_.isActive()) recorded_.before(name);
        if (!push) return;
        nvtx->rangePush(name.c_str());
        pushed_ = nvtx;
    }
    ~SiteRange() {
        if (pushed_) pushed_->rangePop();
    }
    SiteRange(const SiteRange&) = delete;
    SiteRange& operator=(const SiteRange&) = delete;

  private:
    at::RecordFunction recorded_{at::RecordScope::USER_SCOPE};
    const torch::profiler::impl::ProfilerStubs* pushed_ = nullptr;
};

}  // namespace ub_overlap
