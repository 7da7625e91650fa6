#include "cpu/shm_arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#include <sstream>

namespace ub_overlap {
namespace {

constexpr const char* prefix = "/ub_overlap-";

int64_t control_bytes(int ranks) {
    return static_cast<int64_t>((sizeof(ControlBlock) + 63) / 64 * 64 + flag_count(ranks) * sizeof(FlagWord));
}

[[noreturn]] void fail(const std::string& what, const std::string& name, int64_t bytes, int code) {
    throw NamedError("ArenaError",
                     {{"what", "cannot " + what + " shared memory: " + std::strerror(code)},
                      {"where", "/dev/shm" + name},
                      {"expected", std::to_string(bytes) + " bytes"},
                      {"fix", code == ENOSPC || code == ENOMEM
                                  ? "make /dev/shm larger (docker run --shm-size=..., or mount -o remount,size=...)"
                                  : "check that all ranks share /dev/shm and run as the same user"}});
}

// "/ub_overlap-<32 hex digits>", or "/ub_overlap-<tag>-<32 hex digits>" with letters and digits of UB_OVERLAP_SHM_TAG, so that
// the segments of one job are distinguishable from those of other jobs on the machine.
std::string random_name() {
    unsigned char bytes[16];
    if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes) fail("name", "", 0, errno);
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

// Closes what is still open when a constructor gives up half way.
struct Fd {
    int fd;
    ~Fd() {
        if (fd >= 0) close(fd);
    }
};

char* map(int fd, int64_t bytes, const std::string& name) {
    void* at = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) fail("map", name, bytes, errno);
    return static_cast<char*>(at);
}

}  // namespace

ShmSegment::ShmSegment(std::string name, char* data, int64_t bytes, bool made)
    : name_(std::move(name)), data_(data), bytes_(bytes), linked_(made), pid_(getpid()) {}

std::unique_ptr<ShmSegment> ShmSegment::create(int64_t bytes) {
    const std::string name = random_name();
    Fd fd{shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600)};
    if (fd.fd < 0) fail("create", name, bytes, errno);
    try {
        if (ftruncate(fd.fd, bytes) != 0) fail("size", name, bytes, errno);
        int code = EINTR;  // a signal (a profiler's, say) may come in between
        while (code == EINTR) code = posix_fallocate(fd.fd, 0, bytes);
        if (code != 0) fail("allocate", name, bytes, code);
        return std::unique_ptr<ShmSegment>(new ShmSegment(name, map(fd.fd, bytes, name), bytes, true));
    } catch (...) {
        shm_unlink(name.c_str());
        throw;
    }
}

std::unique_ptr<ShmSegment> ShmSegment::attach(const std::string& name, int64_t bytes) {
    Fd fd{name.rfind(prefix, 0) == 0 ? shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0) : (errno = EINVAL, -1)};
    if (fd.fd < 0) fail("open a peer's", name, bytes, errno);
    struct stat info;
    if (fstat(fd.fd, &info) != 0) fail("examine", name, bytes, errno);
    if (info.st_size != bytes || info.st_uid != geteuid()) fail("trust a peer's", name, bytes, EINVAL);
    return std::unique_ptr<ShmSegment>(new ShmSegment(name, map(fd.fd, bytes, name), bytes, false));
}

ShmSegment::~ShmSegment() {
    if (pid_ == getpid()) unlink();  // a forked child only lets go of its own mapping
    munmap(data_, static_cast<size_t>(bytes_));
}

void ShmSegment::unlink() {
    if (linked_) shm_unlink(name_.c_str());
    linked_ = false;
}

ShmArena::ShmArena(int rank, int ranks, int64_t slot_bytes)
    : rank_(rank), ranks_(ranks), slot_bytes_(slot_bytes), control_(ranks), data_(ranks), next_(ranks) {
    control_[rank] = ShmSegment::create(control_bytes(ranks));
    data_[rank] = ShmSegment::create(slots * slot_bytes);
    // Pages of a new segment are zero: no flag is set, epoch 0 has no call.
    ControlBlock* block = new (control_[rank]->data()) ControlBlock{};
    block->magic = arena_magic;
    block->version = arena_version;
    block->rank = rank;
    block->ranks = ranks;
    block->pid = getpid();
    block->start_time = start_time_of(block->pid);
    block->heartbeat_ns.store(now_ns());
}

ControlBlock* ShmArena::control(int rank) {
    return control_[rank] ? reinterpret_cast<ControlBlock*>(control_[rank]->data()) : nullptr;
}

FlagWord* ShmArena::flags(int rank) {
    return reinterpret_cast<FlagWord*>(control_[rank]->data() + (sizeof(ControlBlock) + 63) / 64 * 64);
}

void ShmArena::attach(int rank, const std::string& control_name, const std::string& data_name) {
    control_[rank] = ShmSegment::attach(control_name, control_bytes(ranks_));
    const ControlBlock* block = control(rank);
    if (block->magic != arena_magic || block->version != arena_version || block->rank != rank || block->ranks != ranks_) {
        fail("trust a peer's", control_name, control_bytes(ranks_), EINVAL);
    }
    data_[rank] = ShmSegment::attach(data_name, slots * slot_bytes_);
}

void ShmArena::grow_begin(int64_t slot_bytes) {
    next_slot_bytes_ = slot_bytes;
    next_[rank_] = ShmSegment::create(slots * slot_bytes);
}

void ShmArena::grow_attach(int rank, const std::string& data_name) {
    next_[rank] = ShmSegment::attach(data_name, slots * next_slot_bytes_);
}

void ShmArena::grow_commit() {
    data_.swap(next_);
    slot_bytes_ = next_slot_bytes_;
    for (auto& segment : next_) segment.reset();
}

void ShmArena::unlink() {
    for (auto* list : {&control_, &data_, &next_}) {
        if ((*list)[rank_]) (*list)[rank_]->unlink();
    }
}

void unlink_name(const std::string& name) {
    if (name.rfind(prefix, 0) == 0) shm_unlink(name.c_str());
}

uint64_t start_time_of(int pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    std::string text;
    if (!std::getline(file, text)) return 0;
    const size_t close = text.rfind(')');  // the command name may hold spaces
    if (close == std::string::npos) return 0;
    std::istringstream fields(text.substr(close + 1));
    std::string state, field;
    fields >> state;
    if (state == "Z" || state == "X") return 0;
    for (int i = 4; i <= 22 && fields >> field; ++i) {
    }
    return field.empty() ? 0 : std::stoull(field);
}

bool gone(const ControlBlock* block) {
    return start_time_of(block->pid) != block->start_time;
}

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

}  // namespace ub_overlap
