// Sessions by (group name, device type).
//
// A name is not an identity: a process group can be destroyed and made again under the same name, and a forked child inherits
// this table. An entry therefore remembers the group object it was made for (held weakly, so that its address cannot be given
// to another one) and the process it was made in. Groups that a child inherited without a session are listed there too.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/session.h"

namespace ub_overlap {

class Registry {
  public:
    static Registry& get();

    // The session made for `owner`, or null. Throws NamedError("ForkError") in a child of the process that made it.
    std::shared_ptr<Session> find(const std::string& group, const std::string& device, const void* owner);
    // `alive` says whether `owner` can still be used, and keeps its address from being used again. The session that was there
    // before is closed, and so are those whose owners were destroyed.
    void put(std::shared_ptr<Session> session, const void* owner, std::function<bool()> alive);
    void drop(const std::string& group, const std::string& device);
    std::vector<std::shared_ptr<Session>> all();
    void clear();
    int64_t generation();
    // Whether a session's group was destroyed, and a call that closes such sessions. It waits for their running calls.
    bool has_destroyed();
    void close_destroyed();

    // In a forked child: the groups of its parent. They must never be freed, so that no other group gets their addresses.
    void set_inherited(std::vector<const void*> owners);
    // Throws NamedError("ForkError") for such a group. Takes no lock.
    void refuse_inherited(const std::string& group, const void* owner) const;

  private:
    struct Entry {
        std::shared_ptr<Session> session;
        const void* owner;
        std::function<bool()> alive;
        int pid;
    };
    static void close(std::vector<Entry> entries);

    std::mutex mutex_;
    std::map<std::pair<std::string, std::string>, Entry> entries_;
    int64_t generation_ = 0;                                           // sessions made so far
    std::atomic<const std::vector<const void*>*> inherited_{nullptr};  // replaced, never freed
};

}  // namespace ub_overlap
