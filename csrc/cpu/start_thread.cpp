#include "cpu/start_thread.h"

#include <unistd.h>

#include <system_error>

#include "core/failure.h"

namespace ub_overlap {

std::thread start_thread(const std::string& purpose, std::function<void()> body) {
    try {
        return std::thread(std::move(body));
    } catch (const std::system_error& refused) {
        throw NamedError(
            "UbOverlapError",
            {{"what", "a thread that " + purpose + " cannot be started"},
             {"where", "process " + std::to_string(getpid())},
             {"got", refused.code().message()},
             {"expected", "room for one more thread and its stack"},
             {"fix", "raise the limit of processes (ulimit -u, pids.max of the container) or of memory (ulimit -v)"}});
    }
}

}  // namespace ub_overlap
