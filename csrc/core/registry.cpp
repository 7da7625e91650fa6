#include "core/registry.h"

#include <unistd.h>

namespace ub_overlap {

Registry& Registry::get() {
    static Registry* one = new Registry;  // never destroyed: sessions hold Python objects, and close by atexit
    return *one;
}

std::shared_ptr<Session> Registry::find(const std::string& group, const std::string& device, const void* owner) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = entries_.find({group, device});
    if (found == entries_.end() || found->second.owner != owner) return nullptr;
    if (found->second.pid != getpid()) {
        throw NamedError(
            "ForkError",
            {{"what", "this process was forked from the one that uses group '" + group + "'"},
             {"got", "pid " + std::to_string(getpid())},
             {"expected", "pid " + std::to_string(found->second.pid) + ", which owns the session and its copy thread"},
             {"fix", "start workers with the spawn method, or make a process group of their own in the child"}});
    }
    return found->second.session;
}

void Registry::put(std::shared_ptr<Session> session, const void* owner, std::shared_ptr<void> keep) {
    Entry old;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        Entry& entry = entries_[{session->group(), session->device()}];
        old = std::move(entry);
        entry = Entry{std::move(session), owner, std::move(keep), getpid()};
        ++generation_;
    }
    if (old.session) old.session->close();
}

void Registry::drop(const std::string& group, const std::string& device) {
    Entry old;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        auto found = entries_.find({group, device});
        if (found == entries_.end()) return;
        old = std::move(found->second);
        entries_.erase(found);
    }
    old.session->close();
}

std::vector<std::shared_ptr<Session>> Registry::all() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<Session>> list;
    for (auto& entry : entries_) list.push_back(entry.second.session);
    return list;
}

void Registry::clear() {
    std::map<std::pair<std::string, std::string>, Entry> old;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        old.swap(entries_);
    }
    for (auto& entry : old) entry.second.session->close();
}

int64_t Registry::generation() {
    std::lock_guard<std::mutex> lock(mutex_);
    return generation_;
}

}  // namespace ub_overlap
