#include "core/registry.h"

#include <unistd.h>

#include <algorithm>

namespace ub_overlap {
namespace {

NamedError fork_error(const std::string& group) {
    return NamedError("ForkError",
                      {{"what", "this process was forked from the one that created group '" + group + "'"},
                       {"got", "pid " + std::to_string(getpid()) + ", with the connections of its parent"},
                       {"expected", "a group that this process created"},
                       {"fix",
                        "start workers with the spawn method; or destroy the group in the child and create one of its "
                        "own over another Store"}});
}

}  // namespace

Registry& Registry::get() {
    static Registry* one = new Registry;  // never destroyed: sessions hold Python objects, and close by atexit
    return *one;
}

std::shared_ptr<Session> Registry::find(const std::string& group, const std::string& device, const void* owner) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = entries_.find({group, device});
    if (found == entries_.end() || found->second.owner != owner) return nullptr;
    if (found->second.pid != getpid()) throw fork_error(group);
    return found->second.session;
}

void Registry::put(std::shared_ptr<Session> session, const void* owner, std::function<bool()> alive) {
    std::vector<Entry> old;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        const std::pair<std::string, std::string> name{session->group(), session->device()};
        for (auto at = entries_.begin(); at != entries_.end();) {
            const bool ends = at->first == name || !at->second.alive();
            if (ends) old.push_back(std::move(at->second));
            at = ends ? entries_.erase(at) : std::next(at);
        }
        entries_[name] = Entry{std::move(session), owner, std::move(alive), getpid()};
        ++generation_;
    }
    close(std::move(old));
}

// Without the lock: closing waits for the session's call to end, and lets go of Python objects.
void Registry::close(std::vector<Entry> entries) {
    for (Entry& entry : entries) {
        // A forked child has none of the threads that may hold the parent's session: it leaves that alone.
        if (entry.pid == getpid()) entry.session->close();
    }
}

void Registry::drop(const std::string& group, const std::string& device) {
    std::vector<Entry> old;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        auto found = entries_.find({group, device});
        if (found == entries_.end()) return;
        old.push_back(std::move(found->second));
        entries_.erase(found);
    }
    close(std::move(old));
}

std::vector<std::shared_ptr<Session>> Registry::all() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<Session>> list;
    for (auto& entry : entries_) {
        if (entry.second.pid == getpid()) list.push_back(entry.second.session);
    }
    return list;
}

void Registry::clear() {
    std::vector<Entry> old;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        for (auto& entry : entries_) old.push_back(std::move(entry.second));
        entries_.clear();
    }
    close(std::move(old));
}

bool Registry::has_destroyed() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::any_of(entries_.begin(), entries_.end(),
                       [](const auto& at) { return at.second.pid == getpid() && !at.second.alive(); });
}

void Registry::close_destroyed() {
    std::vector<Entry> old;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        for (auto at = entries_.begin(); at != entries_.end();) {
            const bool ends = at->second.pid == getpid() && !at->second.alive();
            if (ends) old.push_back(std::move(at->second));
            at = ends ? entries_.erase(at) : std::next(at);
        }
    }
    close(std::move(old));
}

void Registry::set_inherited(std::vector<const void*> owners) {
    if (const auto* before = inherited_.load()) owners.insert(owners.end(), before->begin(), before->end());
    inherited_.store(new std::vector<const void*>(std::move(owners)));
}

void Registry::refuse_inherited(const std::string& group, const void* owner) const {
    const auto* inherited = inherited_.load(std::memory_order_acquire);
    if (inherited && std::find(inherited->begin(), inherited->end(), owner) != inherited->end()) throw fork_error(group);
}

int64_t Registry::generation() {
    std::lock_guard<std::mutex> lock(mutex_);
    return generation_;
}

}  // namespace ub_overlap
