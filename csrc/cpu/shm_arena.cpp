#include "cpu/shm_arena.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <new>
#include <sstream>
#include <utility>

#include "core/wait_until.h"

namespace ub_overlap {
namespace {

int64_t control_bytes(int ranks) {
    return static_cast<int64_t>((sizeof(ControlBlock) + 63) / 64 * 64 + flag_count(ranks) * sizeof(FlagWord));
}

}  // namespace

ShmArena::ShmArena(int rank, int ranks, int64_t slot_bytes) : rank_(rank), ranks_(ranks), control_(ranks) {
    for (Memory& memory : memories_) memory.segments.resize(ranks);
    next_.segments.resize(ranks);
    control_[rank] = ShmSegment::create(control_bytes(ranks));
    memories_[0].slot_bytes = slot_bytes;
    memories_[0].segments[rank] = ShmSegment::create(memories_[0].bytes(0));
    // Pages of a new segment are zero: no flag is set, epoch 0 has no call.
    ControlBlock* block = new (control_[rank]->data()) ControlBlock{};
    block->magic = arena_magic;
    block->version = arena_version;
    block->rank = rank;
    block->ranks = ranks;
    block->pid = getpid();
    const std::optional<uint64_t> start = start_time_of(block->pid);
    if (!start) {  // peers would take this process for one that has ended
        throw NamedError("ArenaError", {{"what", "cannot look up when this process began"},
                                        {"got", std::strerror(errno)},
                                        {"fix", "raise the limit of open files (ulimit -n)"}});
    }
    block->start_time = *start;
    block->heartbeat_ns.store(now_ns());
}

ControlBlock* ShmArena::control(int rank) {
    return control_[rank] ? reinterpret_cast<ControlBlock*>(control_[rank]->data()) : nullptr;
}

FlagWord* ShmArena::flags(int rank) {
    return reinterpret_cast<FlagWord*>(control_[rank]->data() + (sizeof(ControlBlock) + 63) / 64 * 64);
}

std::string ShmArena::attach(int rank, const std::string& control_address, const std::string& data_address, int made_as) {
    std::string reason;
    auto control = ShmSegment::attach(control_address, control_bytes(ranks_), reason);
    if (!control) return reason;
    const auto* block = reinterpret_cast<const ControlBlock*>(control->data());
    const int expected = made_as < 0 ? rank : made_as;
    if (block->magic != arena_magic || block->version != arena_version || block->rank != expected || block->ranks != ranks_) {
        return "the memory of rank " + std::to_string(rank) + " has another layout";
    }
    Memory& memory = memories_[0];
    memory.segments[rank] = ShmSegment::attach(data_address, memory.bytes(0), reason);
    if (memory.segments[rank]) control_[rank] = std::move(control);
    return reason;
}

void ShmArena::grow_begin(int64_t slot_bytes, int slot) {
    growing_ = memory_of(slot);
    next_.slot_bytes = slot_bytes;
    next_.segments[rank_] = ShmSegment::create(next_.bytes(growing_));
}

void ShmArena::grow_attach(int rank, const std::string& data_address) {
    std::string reason;
    next_.segments[rank] = ShmSegment::attach(data_address, next_.bytes(growing_), reason);
    if (next_.segments[rank]) return;
    throw NamedError("ArenaError",
                     {{"what", "cannot attach the grown memory of rank " + std::to_string(origin_rank(rank))},
                      {"got", reason},
                      {"expected", "the memory that it made for this call"},
                      {"fix", "look at the log of rank " + std::to_string(origin_rank(rank)) + ": it may have ended"}});
}

void ShmArena::grow_commit() {
    std::swap(memories_[growing_], next_);
    grow_abort();
}

void ShmArena::grow_abort() {
    for (auto& segment : next_.segments) segment.reset();
}

void ShmArena::stop_sharing() {
    const auto stop = [this](auto& segments) {
        if (segments[rank_]) segments[rank_]->stop_sharing();
    };
    stop(control_), stop(next_.segments);
    for (Memory& memory : memories_) stop(memory.segments);
}

std::optional<uint64_t> start_time_of(int pid) {
    errno = 0;
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    if (!file.is_open() && errno != ENOENT && errno != ESRCH) return std::nullopt;
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
    const std::optional<uint64_t> start = start_time_of(block->pid);
    return start && *start != block->start_time;
}

}  // namespace ub_overlap
