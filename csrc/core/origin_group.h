// A group that the user named, and the groups that hierarchical collectives make of its ranks (runtime/session/host_groups.py).
//
// The user knows the first one alone. So failures hold ranks of that group, and the groups fail together: a rank that waits in
// one of them learns which rank has failed in another one. Else it would blame the rank that it waits for.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/failure.h"

namespace ub_overlap {

class Arena;

// The arenas of this process that belong to one origin group on one device type.
class OriginGroup {
  public:
    // Returns the same object for a key while an arena has it. A name is no key: a group may be destroyed and made again.
    static std::shared_ptr<OriginGroup> get(const std::string& key);
    void add(const std::shared_ptr<Arena>& arena);
    // Records `failure` in all arenas but `except`.
    void fail(const Failure& failure, const Arena* except);
    // Shows the peers of all arenas but `except` that this rank waits in another group.
    void show_wait(const Arena* except);

  private:
    std::vector<std::shared_ptr<Arena>> living(const Arena* except);

    std::mutex mutex_;
    std::vector<std::weak_ptr<Arena>> arenas_;
};

}  // namespace ub_overlap
