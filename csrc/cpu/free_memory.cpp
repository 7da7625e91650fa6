#include "cpu/free_memory.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

namespace ub_overlap {
namespace {

constexpr int64_t unlimited = INT64_MAX;

// Files of one version of cgroups. `mount` of version 1 is that of its memory controller.
struct CgroupFiles {
    const char *mount, *limit, *usage, *reclaimable;
};
constexpr CgroupFiles version_2{"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"};
constexpr CgroupFiles version_1{"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                "total_inactive_file"};

// The number in a file, -1 where there is none ("max", or no such file).
int64_t read_number(const std::string& path) {
    std::ifstream file(path);
    int64_t number = -1;
    return file >> number ? number : -1;
}

// The number after `name` on its line, 0 where there is no such line.
int64_t read_field(const std::string& path, const std::string& name) {
    std::ifstream file(path);
    std::string line, label;
    while (std::getline(file, line)) {
        std::istringstream fields(line);
        int64_t number = 0;
        if (fields >> label >> number && label == name) return number;
    }
    return 0;
}

// Bytes that a cgroup and those around it allow. `path`: below the mount; in a container it may be the host's.
int64_t allowed_by(const CgroupFiles& files, std::string path) {
    int64_t least = unlimited;
    for (;;) {
        const std::string folder = files.mount + path + "/";
        const int64_t limit = read_number(folder + files.limit), usage = read_number(folder + files.usage);
        if (limit >= 0 && usage >= 0) {
            const int64_t reclaimable = read_field(folder + "memory.stat", files.reclaimable);
            least = std::min(least, std::max<int64_t>(0, limit - usage + reclaimable));
        }
        if (path.empty()) return least;
        path.resize(path.find_last_of('/'));
    }
}

int64_t allowed_by_cgroups() {
    std::ifstream file("/proc/self/cgroup");
    int64_t least = unlimited;
    std::string line;
    while (std::getline(file, line)) {  // "<number>:<controllers>:<path>"
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
        std::string path = line.substr(second + 1);
        if (path.empty() || path[0] != '/' || path == "/") path.clear();
        if (controllers == ",,") least = std::min(least, allowed_by(version_2, path));
        if (controllers.find(",memory,") != std::string::npos) least = std::min(least, allowed_by(version_1, path));
    }
    return least;
}

int64_t free_on_host() {
    const int64_t available = read_field("/proc/meminfo", "MemAvailable:");
    return available ? 1024 * (available + read_field("/proc/meminfo", "SwapFree:")) : unlimited;
}

}  // namespace

int64_t free_memory_bytes() {
    return std::min(free_on_host(), allowed_by_cgroups());
}

}  // namespace ub_overlap
