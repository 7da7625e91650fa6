// Shared memory without a name: a memfd that peers open through /proc/<pid>/fd/<number>.
//
// It exists as long as a process has it open or mapped, so nothing is left behind whatever kills its processes, and no /dev/shm
// limits it. Its size is sealed and its pages are allocated at once: too little memory is an error here, not a SIGBUS in a
// copy. Opening it needs a shared pid namespace and the same user (PTRACE_MODE_READ; Yama does not restrict that).
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace ub_overlap {

// One mapped segment. A forked child does not inherit the mapping.
class ShmSegment {
  public:
    // Blocks for at most the step deadline. Throws NamedError("ArenaError").
    static std::unique_ptr<ShmSegment> create(int64_t bytes);
    // Maps a peer's segment. Null, with the reason, where this process cannot reach it; NamedError where its own limits forbid.
    static std::unique_ptr<ShmSegment> attach(const std::string& address, int64_t bytes, std::string& reason);
    ~ShmSegment();
    ShmSegment(const ShmSegment&) = delete;
    ShmSegment& operator=(const ShmSegment&) = delete;

    // "<pid>:<descriptor>:<name>", what peers need to attach. The name is random, so that a reused pid is no other segment.
    const std::string& address() const { return address_; }
    // Closes the descriptor: no peer can attach any longer.
    void stop_sharing();
    char* data() const { return data_; }
    int64_t bytes() const { return bytes_; }

  private:
    ShmSegment(std::string address, int fd, char* data, int64_t bytes);
    std::string address_;
    int fd_;  // -1 once it is closed, and for a peer's segment
    char* data_;
    int64_t bytes_;
    int pid_;
};

// For tests: fallocate of more bytes than this fails with EINTR, as under a timer before Linux 6.11. -1: none.
void set_interrupted_allocation(int64_t bytes);

}  // namespace ub_overlap
