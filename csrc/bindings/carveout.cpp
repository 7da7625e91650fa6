#include "bindings/carveout.h"

#include <ATen/Context.h>

#include <optional>

namespace ub_overlap {
namespace {

// torch's carve-out while collectives are open.
struct Carveout {
    std::mutex mutex;
    int open = 0;
    std::optional<int32_t> set;  // what was set here
};

Carveout& carveout() {
    static Carveout one;
    return one;
}

}  // namespace

void SparedMultiprocessors::begin(int count) {
    const std::lock_guard<std::mutex> own(mutex_);
    if (count == 0 || state_ != State::idle) return;
    state_ = State::open;
    Carveout& all = carveout();
    const std::lock_guard<std::mutex> lock(all.mutex);
    ++all.open;
    if (!all.set && !at::globalContext()._SMCarveout_EXPERIMENTAL()) {
        at::globalContext()._setSMCarveout_EXPERIMENTAL(count);
        all.set = count;
    }
}

void SparedMultiprocessors::end() {
    const std::lock_guard<std::mutex> own(mutex_);
    const bool was_open = state_ == State::open;
    state_ = State::ended;
    if (!was_open) return;
    Carveout& all = carveout();
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (--all.open > 0 || !all.set) return;
    if (at::globalContext()._SMCarveout_EXPERIMENTAL() == all.set) at::globalContext()._setSMCarveout_EXPERIMENTAL({});
    all.set.reset();
}

}  // namespace ub_overlap
