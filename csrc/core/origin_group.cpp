#include "core/origin_group.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/arena.h"
#include "core/wait_until.h"

namespace ub_overlap {

std::shared_ptr<OriginGroup> OriginGroup::get(const std::string& key) {
    static std::mutex mutex;
    static auto* groups = new std::map<std::string, std::weak_ptr<OriginGroup>>;  // never destroyed
    const std::lock_guard<std::mutex> lock(mutex);
    for (auto at = groups->begin(); at != groups->end();) at = at->second.expired() ? groups->erase(at) : std::next(at);
    std::weak_ptr<OriginGroup>& known = (*groups)[key];
    std::shared_ptr<OriginGroup> origin = known.lock();
    if (!origin) known = origin = std::make_shared<OriginGroup>();
    return origin;
}

void OriginGroup::add(const std::shared_ptr<Arena>& arena) {
    const std::lock_guard<std::mutex> lock(mutex_);
    arenas_.erase(std::remove_if(arenas_.begin(), arenas_.end(), [](const auto& one) { return one.expired(); }), arenas_.end());
    arenas_.push_back(arena);
}

// A copy: an arena may be released, or fail and come back here, while the caller works on the list.
std::vector<std::shared_ptr<Arena>> OriginGroup::living(const Arena* except) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<Arena>> list;
    for (const auto& one : arenas_) {
        if (auto arena = one.lock(); arena && arena.get() != except) list.push_back(std::move(arena));
    }
    return list;
}

void OriginGroup::fail(const Failure& failure, const Arena* except) {
    for (const auto& arena : living(except)) arena->abort_alone(failure);
}

void OriginGroup::show_wait(const Arena* except) {
    for (const auto& arena : living(except)) {
        arena->control(arena->rank())->elsewhere_ns.store(now_ns(), std::memory_order_relaxed);
    }
}

}  // namespace ub_overlap
