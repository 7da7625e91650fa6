// Threads of the CPU runtime. The kernel may refuse one: a limit of processes, of memory, or of a container.
#pragma once

#include <functional>
#include <string>
#include <thread>

namespace ub_overlap {

// Starts a thread that runs `body`. NamedError where the kernel refuses it. `purpose`: completes "a thread that ...".
// Call it before anything is queued for the thread: what is queued without one would never run, or run much later.
std::thread start_thread(const std::string& purpose, std::function<void()> body);

}  // namespace ub_overlap
