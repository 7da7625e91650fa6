#include "cpu/shm_segment.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "core/failure.h"
#include "core/settings.h"
#include "core/wait_until.h"
#include "cpu/free_memory.h"
#include "cpu/shm_arena.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace ub_overlap {
namespace {

constexpr const char* prefix = "ub_overlap-";
constexpr int sealed = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr int64_t least_chunk = 64 << 10, first_chunk = 16 << 20, most_chunk = 64 << 20;
constexpr int64_t memory_to_leave = 64 << 20;

std::atomic<int64_t> interrupted_above{-1};

[[noreturn]] void fail(const std::string& what, int64_t bytes, const std::string& got, const std::string& fix) {
    throw NamedError("ArenaError",
                     {{"what", "cannot " + what}, {"got", got}, {"expected", std::to_string(bytes) + " bytes"}, {"fix", fix}});
}

[[noreturn]] void fail(const std::string& what, int64_t bytes, int code) {
    fail(what + " shared memory", bytes, std::strerror(code),
         code == EMFILE || code == ENFILE ? "raise the limit of open files (ulimit -n)"
                                          : "free memory on the host, or raise the memory limit of the container");
}

// Closes what is still open when a function gives up half way.
struct Fd {
    int fd;
    ~Fd() {
        if (fd >= 0) close(fd);
    }
    int release() {
        const int out = fd;
        fd = -1;
        return out;
    }
};

// "ub_overlap-<32 hex digits>", or "ub_overlap-<tag>-<32 hex digits>" with letters and digits of UB_OVERLAP_SHM_TAG, by which
// tests find the segments of one job in /proc.
std::string random_name() {
    unsigned char bytes[16];
    if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes) fail("name", 0, errno);
    std::string name = prefix;
    if (const char* tag = std::getenv("UB_OVERLAP_SHM_TAG")) {
        std::string text;
        for (; *tag != 0 && text.size() < 64; ++tag) {
            if (std::isalnum(static_cast<unsigned char>(*tag))) text += *tag;
        }
        if (!text.empty()) name += text + "-";
    }
    for (unsigned char byte : bytes) {
        name += "0123456789abcdef"[byte >> 4];
        name += "0123456789abcdef"[byte & 15];
    }
    return name;
}

int create_memfd(const std::string& name) {
    constexpr unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
    const int fd = memfd_create(name.c_str(), flags | MFD_NOEXEC_SEAL);
    if (fd >= 0 || errno != EINVAL) return fd;
    return memfd_create(name.c_str(), flags);  // before Linux 6.3
}

// Allocates the pages, in pieces: a signal interrupts fallocate and undoes its work, so that one call of many pages might never
// end under a timer.
void allocate(int fd, int64_t bytes) {
    const int64_t begin = now_ns(), timeout = settings().step_timeout_ns.load(std::memory_order_relaxed);
    int64_t chunk = first_chunk;
    for (int64_t at = 0; at < bytes;) {
        const int64_t size = std::min(chunk, bytes - at), free = free_memory_bytes();
        if (free - std::min(memory_to_leave, size) < (at == 0 ? bytes : size)) {
            fail("allocate shared memory", bytes,
                 std::to_string(free) + " bytes of memory are free after " + std::to_string(at),
                 "free memory on the host, raise the memory limit of the container, or use smaller batches");
        }
        const int64_t interrupted = interrupted_above.load(std::memory_order_relaxed);
        int code = interrupted >= 0 && size > interrupted ? EINTR : 0;
        if (code == 0 && fallocate(fd, 0, at, size) != 0) code = errno;
        if (code == 0) {
            at += size;
            chunk = std::min(2 * chunk, most_chunk);
        } else if (code == EINTR) {
            chunk = std::max(size / 2, least_chunk);
        } else {
            fail("allocate", bytes, code);
        }
        if (const auto check_signals = settings().check_signals.load()) check_signals();
        if (at < bytes && now_ns() - begin > timeout) {
            fail("allocate shared memory within " + std::to_string(timeout / 1'000'000'000) + " s", bytes,
                 std::to_string(at) + " bytes" + (code == EINTR ? ", and signals that interrupt each attempt" : ""),
                 "look for a timer signal of a profiler, or raise UB_OVERLAP_STEP_TIMEOUT_S");
        }
    }
}

char* map(int fd, int64_t bytes) {
    void* at = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) fail("map", bytes, errno);
    // A forked child has no use for it, and would keep the memory alive after its parent.
    madvise(at, static_cast<size_t>(bytes), MADV_DONTFORK);
    return static_cast<char*>(at);
}

std::string target_of(int fd) {
    char text[256];
    const ssize_t length = readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), text, sizeof text);
    return length < 0 ? "" : std::string(text, static_cast<size_t>(length));
}

}  // namespace

ShmSegment::ShmSegment(std::string address, int fd, char* data, int64_t bytes)
    : address_(std::move(address)), fd_(fd), data_(data), bytes_(bytes), pid_(getpid()) {}

std::unique_ptr<ShmSegment> ShmSegment::create(int64_t bytes) {
    const std::string name = random_name();
    Fd fd{create_memfd(name)};
    if (fd.fd < 0) fail("create", bytes, errno);
    if (fchmod(fd.fd, 0600) != 0 || ftruncate(fd.fd, bytes) != 0 || fcntl(fd.fd, F_ADD_SEALS, sealed) != 0) {
        fail("size", bytes, errno);
    }
    allocate(fd.fd, bytes);
    char* data = map(fd.fd, bytes);
    const std::string address = std::to_string(getpid()) + ":" + std::to_string(fd.fd) + ":" + name;
    return std::unique_ptr<ShmSegment>(new ShmSegment(address, fd.release(), data, bytes));
}

std::unique_ptr<ShmSegment> ShmSegment::attach(const std::string& address, int64_t bytes, std::string& reason) {
    const size_t first = address.find(':'), second = address.find(':', first + 1);
    const std::string pid = address.substr(0, first), number = address.substr(first + 1, second - first - 1);
    const std::string name = address.substr(second + 1);
    const auto digits = [](const std::string& text) {
        return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
    };
    if (second == std::string::npos || !digits(pid) || !digits(number) || name.rfind(prefix, 0) != 0) {
        fail("read the address of a peer's shared memory", bytes, "'" + address + "'", "report it as a bug");
    }
    const std::string path = "/proc/" + pid + "/fd/" + number;
    const Fd fd{open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY)};
    if (fd.fd < 0) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) fail("open a peer's", bytes, errno);
        reason = "cannot open " + path + ": " + std::strerror(errno);
        return nullptr;
    }
    struct stat info;
    const int seals = fcntl(fd.fd, F_GET_SEALS);
    if (fstat(fd.fd, &info) != 0 || target_of(fd.fd) != "/memfd:" + name + " (deleted)" || info.st_size != bytes ||
        info.st_uid != geteuid() || seals < 0 || (seals & sealed) != sealed) {
        reason = path + " is not the memory that the peer made";
        return nullptr;
    }
    return std::unique_ptr<ShmSegment>(new ShmSegment(address, -1, map(fd.fd, bytes), bytes));
}

ShmSegment::~ShmSegment() {
    stop_sharing();
    if (pid_ == getpid()) munmap(data_, static_cast<size_t>(bytes_));  // a forked child may have other memory there
}

void ShmSegment::stop_sharing() {
    if (fd_ >= 0 && pid_ == getpid()) close(fd_);
    fd_ = -1;
}

void set_interrupted_allocation(int64_t bytes) {
    interrupted_above.store(bytes);
}

}  // namespace ub_overlap
