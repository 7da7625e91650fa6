#include "cuda/arena.h"

#include <algorithm>
#include <cstdio>

#include "core/settings.h"
#include "core/wait_until.h"
#include "cuda/device.h"
#include "cuda/kernels.h"

namespace ub_overlap::cuda {
namespace {

std::vector<char*> pointers(const std::vector<uint64_t>& numbers, int ranks) {
    if (static_cast<int>(numbers.size()) != ranks) {
        throw NamedError("ArenaError", {{"what", "an arena needs one pointer per rank"},
                                        {"got", std::to_string(numbers.size())},
                                        {"expected", std::to_string(ranks)}});
    }
    std::vector<char*> list;
    for (const uint64_t number : numbers) list.push_back(reinterpret_cast<char*>(number));
    return list;
}

std::string hex(uint32_t tag) {
    char text[16];
    std::snprintf(text, sizeof text, "%08x", tag);
    return text;
}

}  // namespace

int64_t words_bytes(int ranks) {
    return static_cast<int64_t>(sizeof(SharedState) + flag_count(ranks) * sizeof(uint64_t));
}

CudaArena::CudaArena(int device, std::shared_ptr<ShmArena> host, const std::vector<uint64_t>& words,
                     const std::vector<uint64_t>& data, int64_t slot_bytes)
    : device_(device), host_(std::move(host)), data_(pointers(data, host_->ranks())), slot_bytes_(slot_bytes) {
    if (ranks() > max_ranks) {
        throw NamedError("ArenaError", {{"what", "too many ranks for one arena"},
                                        {"got", std::to_string(ranks())},
                                        {"expected", "at most " + std::to_string(max_ranks)}});
    }
    const DeviceScope scope(device_);
    check_stream_writes(device_);
    group_.rank = rank(), group_.ranks = ranks();
    const std::vector<char*> shared = pointers(words, ranks());
    for (int r = 0; r < ranks(); ++r) group_.shared[r] = reinterpret_cast<SharedState*>(shared[r]);
    check(cudaMalloc(reinterpret_cast<void**>(&group_.local), sizeof(LocalState)), "allocate the epochs");
    const auto pinned = cudaHostAllocPortable | cudaHostAllocMapped;
    void* record = nullptr;
    check(cudaHostAlloc(&record, sizeof(WaitFailure), pinned), "allocate the failure record");
    group_.failure = new (record) WaitFailure{};
    check(cudaHostAlloc(reinterpret_cast<void**>(&abort_source_), 2 * sizeof(uint64_t), pinned), "allocate the abort words");
    const size_t awaited_bytes = 2 * static_cast<size_t>(ranks()) * sizeof(uint64_t);
    check(cudaHostAlloc(reinterpret_cast<void**>(&awaited_), awaited_bytes, pinned),
          "allocate the numbers of awaited messages");
    std::fill_n(awaited_, 2 * ranks(), 0);
    check(cudaHostAlloc(&record, sizeof(Progress), pinned), "allocate the progress record");
    progress_ = new (record) Progress{};
    check(cudaStreamCreateWithFlags(&abort_stream_, cudaStreamNonBlocking), "create a stream");
    check(cudaEventCreateWithFlags(&progress_end_, cudaEventDisableTiming), "create an event");
    check(cudaEventCreateWithFlags(&last_call_end, cudaEventDisableTiming), "create an event");
    preload_waits();
    preload_data();
    preload_fp8_wire();
    preload_amax_history();
    preload_cached_weight();
    preload_transpose();
    preload_words();
    preload_fused_collectives();
    // On its own stream: the caller's stream may be waiting for a peer that waits for this rank to bind.
    check(cudaMemsetAsync(group_.local, 0, sizeof(LocalState), abort_stream_), "clear the epochs");
    const int64_t deadline = now_ns() + settings().step_timeout_ns.load(std::memory_order_relaxed);
    cudaError_t status = cudaErrorNotReady;
    wait_until([&] { return (status = cudaStreamQuery(abort_stream_)) != cudaErrorNotReady; }, deadline, [] {});
    check(status, "set up the arena: the device did not reach it within the deadline of a step");
}

// Memory that a graph of torch's or a running call may use is not freed.
CudaArena::~CudaArena() {
    try {
        const DeviceScope scope(device_, DeviceScope::Restore::if_in_use);
        if (captured_ || !can_free()) return;
        recorded_calls_.clear();
        cudaFree(group_.local);
        cudaFreeHost(group_.failure);
        cudaFreeHost(abort_source_);
        cudaFreeHost(awaited_);
        cudaFreeHost(progress_);
        cudaEventDestroy(progress_end_);
        cudaStreamDestroy(abort_stream_);
        cudaEventDestroy(last_call_end);
    } catch (...) {  // the driver is shutting down, or no thread can start: memory that the device may use is not freed
    }
}

uint64_t* CudaArena::flag_word(int rank, uint32_t place) const {
    return reinterpret_cast<uint64_t*>(group_.shared[rank] + 1) + place;
}

void CudaArena::replace(const std::vector<uint64_t>& data, int64_t slot_bytes, int slot) {
    if (slot >= slots) {  // split collectives are not recorded
        FurtherMemory& memory = further_[further_memory(slot)];
        memory.data = pointers(data, ranks()), memory.bytes = slot_bytes;
        return;
    }
    data_ = pointers(data, ranks());
    slot_bytes_ = slot_bytes;
    recorded_calls_.clear();
}

void CudaArena::record(const Call& call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto entry = names_.find(call.tag);
    if (entry == names_.end()) {
        if (names_.size() > 4096) names_.clear();  // dynamic shapes give new tags without end
        entry = names_.emplace(call.tag, CallName{call.op_name, call.site, call.shape_text}).first;
    } else if (call.is_all_to_all()) {
        entry->second.shape = call.shape_text;  // calls of one tag have different splits
    }
    last_ = entry->second;
}

bool CudaArena::has_ended() const {
    const DeviceScope scope(device_, DeviceScope::Restore::if_in_use);
    const RelaxedCapture relaxed;  // another thread may be capturing
    const cudaError_t status = has_called ? cudaEventQuery(last_call_end) : cudaSuccess;
    if (status != cudaSuccess) cudaGetLastError();
    return status != cudaErrorNotReady;  // a failed device runs nothing any more
}

bool CudaArena::can_free() const {
    constexpr int64_t timeout_ns = 1'000'000'000;
    return has_ended() && is_idle(device_, timeout_ns);
}

void CudaArena::quiesce() {
    const int64_t deadline = now_ns() + settings().step_timeout_ns.load(std::memory_order_relaxed);
    wait_until([this] { return has_ended(); }, deadline, [] {});
}

void CudaArena::hold_group_lock() {
    const DeviceScope scope(device_);
    static_assert(group_lock == 1ull << 32, "the lowest bit of the fifth byte");
    check(cudaMemsetAsync(reinterpret_cast<char*>(&group_.local->epoch_and_lock) + 4, 1, 1, abort_stream_),
          "hold the group lock");
    check(cudaStreamSynchronize(abort_stream_), "hold the group lock");
}

// Failures of peers, unless this rank's own device makes no progress: that is why the peers wait for it.
const Failure* CudaArena::aborted() {
    if (has_failed_.load(std::memory_order_acquire) && own_failure_.code == FailureCode::group_lock_timeout)
        return &own_failure_;
    return Arena::aborted();
}

void CudaArena::abort_alone(const Failure& failure) {
    Arena::abort_alone(failure);
    // Kernels that wait for us, here and on our peers, need not reach their deadlines.
    const std::lock_guard<std::mutex> lock(mutex_);
    if (reported_) return;  // the failed kernel has sent it, or we have
    reported_ = true;
    AbortWord word;
    // Words hold ranks of this group. A failure of another group of the origin group is read from the host's record.
    const int reporter = rank_of_origin(failure.reporter), culprit = rank_of_origin(failure.culprit);
    word.reporter = failure.reporter < 0 ? rank() : reporter < 0 ? no_member : reporter;
    word.culprit = failure.culprit < 0 ? rank() : culprit < 0 ? no_member : culprit;
    word.epoch = failure.expected;
    try {
        const DeviceScope scope(device_, DeviceScope::Restore::if_in_use);
        for (int r = 0; r < ranks(); ++r) {
            uint64_t* source = abort_source_ + (r != rank());
            word.code = static_cast<uint32_t>(code_at(r, failure));
            *source = pack_abort(word);
            cudaMemcpyAsync(&group_.shared[r]->abort, source, sizeof(uint64_t), cudaMemcpyDefault, abort_stream_);
        }
    } catch (const std::exception&) {
    }
    cudaGetLastError();  // best effort: their deadlines remain
}

void CudaArena::poll() {
    const auto* record = static_cast<const volatile WaitFailure*>(group_.failure);
    if (record->outcome == 0 || has_failed_.load(std::memory_order_acquire)) return;
    std::atomic_thread_fence(std::memory_order_acquire);
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (has_failed_.load(std::memory_order_relaxed)) return;
        own_failure_ = failure_from(*group_.failure);
        reported_ = true;
        has_failed_.store(true, std::memory_order_release);
    }
    abort(own_failure_);
}

// Returns a rank of the bit mask `among` whose process has ended, or -1.
int CudaArena::find_dead_rank(uint64_t among) {
    for (int r = 0; r < ranks(); ++r) {
        const ControlBlock* block = control(r);
        if (r != rank() && (among >> r & 1) && block && gone(block)) return r;
    }
    return -1;
}

// Copies on the stream of aborts, which waits for no kernel. A copy that is late, as with one hardware queue for all streams,
// is left to the next call.
CudaArena::Progress CudaArena::read_progress(int64_t timeout_ns) {
    const std::lock_guard<std::mutex> lock(progress_mutex_);
    const DeviceScope scope(device_, DeviceScope::Restore::if_in_use);
    const RelaxedCapture relaxed;  // another thread may be capturing
    if (!copying_progress_) {
        const auto copy = [&](void* to, const void* from, size_t bytes) {
            check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, abort_stream_), "read a group's progress");
        };
        copy(&progress_->shared, group_.shared[rank()], sizeof(SharedState));
        copy(&progress_->local, group_.local, sizeof(LocalState));
        check(cudaEventRecord(progress_end_, abort_stream_), "record an event");
        copying_progress_ = true;
    }
    cudaError_t status = cudaErrorNotReady;
    wait_until([&] { return (status = cudaEventQuery(progress_end_)) != cudaErrorNotReady; }, now_ns() + timeout_ns, [] {});
    if (status == cudaErrorNotReady) {
        cudaGetLastError();
        return Progress{};
    }
    copying_progress_ = false;
    check(status, "read a group's progress");
    Progress progress = *progress_;
    progress.known = true;
    return progress;
}

// The call that holds the group lock; without one the open split collectives, since one of them waits; else the last call.
CudaArena::CallName CudaArena::waiting_call(const LocalState& local) const {
    const auto name_in = [&](int slot) {
        const auto entry = names_.find(tag_of(local.word[slot]));
        return entry == names_.end() ? last_ : entry->second;
    };
    const bool runs_fused =
        std::any_of(std::begin(local.fused), std::end(local.fused), [](uint64_t block) { return (block & fused_lock) != 0; });
    if (runs_fused) return name_in(fused_slot);  // its waits are the only ones then
    const CallName running = name_in(static_cast<int>(static_cast<uint32_t>(local.epoch_and_lock) % slots));
    if (local.epoch_and_lock & group_lock) return running;
    CallName open;
    for (int split = 0; split < split_slots; ++split) {
        if (!local.is_open[split]) continue;
        const CallName name = name_in(slots + split);
        open.site = open.op.empty() ? name.site : open.site + "' or '" + name.site;
        open.op = name.op;
    }
    return open.op.empty() ? running : open;
}

// A rank may end correctly while this rank's last call still runs: it has sent all data then. Its death is a failure where the
// device waits for it, and still does in the same call at the next look.
void CudaArena::watch() {
    if (const Failure* failure = Arena::aborted()) {  // a peer's host may not have reached the devices
        abort(*failure);
        return;
    }
    if (find_dead_rank() < 0) return;
    const Progress progress = read_progress(10'000'000);
    if (!progress.known) return;
    const auto epoch = static_cast<uint32_t>(progress.local.epoch_and_lock);
    const int dead = find_dead_rank(progress.shared.waiting | progress.shared.early);  // others may have ended correctly
    if (dead < 0) {
        suspect_ = -1;
        return;
    }
    if (suspect_ != dead || suspect_epoch_ != epoch) {
        suspect_ = dead, suspect_epoch_ = epoch;
        return;
    }
    Failure failure;
    failure.code = FailureCode::peer_died;
    failure.reporter = rank();
    failure.culprit = dead;
    failure.expected = epoch;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        const CallName own = waiting_call(progress.local);
        set_text(failure.op, own.op);
        set_text(failure.site, own.site);
    }
    abort(in_origin(failure));
}

std::vector<int> CudaArena::waiting_for() {
    std::vector<int> list;
    try {
        const Progress progress = read_progress(100'000'000);
        for (int r = 0; progress.known && r < ranks(); ++r) {
            if (progress.shared.waiting >> r & 1) list.push_back(r);
        }
    } catch (const std::exception&) {  // a failed device
    }
    return list;
}

// Calls of a group run in issue order. Epochs are counted on the device, so they tell exactly which call runs, unless graphs of
// torch's were replayed: then the running call is the first with its tag.
void CudaArena::refine(std::vector<FlightEntry>& entries) {
    Progress progress;
    bool ended = false;
    try {
        ended = has_ended();
        if (!ended) progress = read_progress(100'000'000);
    } catch (const std::exception&) {  // a failed device
        return;
    }
    if (!ended && !progress.known) return;
    const auto epoch = static_cast<uint32_t>(progress.local.epoch_and_lock);
    const bool runs = (progress.local.epoch_and_lock & group_lock) != 0;
    const auto issued = [](const FlightEntry& entry) { return entry.state == CallState::issued; };
    auto current = entries.end();
    if (!ended && !captured_) {
        current = std::find_if(entries.begin(), entries.end(), [&](const FlightEntry& e) {
            return issued(e) && reached(static_cast<uint32_t>(e.epoch), epoch);
        });
        if (current != entries.end() && !runs && static_cast<uint32_t>(current->epoch) == epoch) ++current;
    } else if (!ended) {
        uint32_t tag = 0;
        for (int slot = 0; slot < slots; ++slot) {  // the epochs of split slots and of fused collectives are their own
            const uint64_t word = progress.local.word[slot];
            if (epoch_of(word) == epoch) tag = tag_of(word);
        }
        current = std::find_if(entries.begin(), entries.end(), [&](const FlightEntry& e) { return issued(e) && e.tag == tag; });
    }
    for (auto entry = entries.begin(); entry != current; ++entry) {
        if (issued(*entry)) entry->state = CallState::finished;
    }
    if (current == entries.end() || !issued(*current) || !runs) return;
    current->state = progress.local.failed ? CallState::failed : CallState::started;
}

void CudaArena::set_channels(std::shared_ptr<ChannelBoard> board) {
    const std::lock_guard<std::mutex> lock(mutex_);
    channels_ = std::move(board);
}

void CudaArena::await_message(bool sends, int peer, uint64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    volatile uint64_t& last = awaited_[2 * peer + sends];
    if (number > last) last = number;
}

// `failure` has its code, its reporter and, as the epoch, the message's first piece. Sets what is known of the message.
void CudaArena::describe_message(Failure& failure, FlagKind kind, int peer) const {
    Message message;
    message.sends = kind == FlagKind::channel_done, message.peer = peer;
    if (failure.code == FailureCode::site_mismatch) failure.code = FailureCode::shape_mismatch;
    set_text(failure.op, message.op());
    set_text(failure.site, message.site(failure.reporter));
    set_text(failure.phase, name_of(kind));
    if (channels_) channels_->describe(failure, message.sends, peer);
}

Failure CudaArena::failure_from(const WaitFailure& seen) {
    Failure failure;
    failure.reporter = rank();
    failure.culprit = static_cast<int32_t>(seen.culprit);
    failure.chunk = static_cast<int32_t>(seen.index);
    failure.expected = epoch_of(seen.expected);
    failure.observed = epoch_of(seen.seen);
    failure.waited_s = static_cast<double>(seen.waited_ns) * 1e-9;
    set_text(failure.phase, name_of(static_cast<FlagKind>(seen.kind)));
    const auto entry = names_.find(tag_of(seen.expected));
    const CallName& own = entry == names_.end() ? last_ : entry->second;
    set_text(failure.op, own.op);
    set_text(failure.site, own.site);
    uint32_t own_tag = tag_of(seen.expected);
    auto outcome = static_cast<WaitOutcome>(seen.outcome);
    // The wait that the failure is about: this rank's, or that of a peer which aborted.
    const bool aborted = outcome == WaitOutcome::aborted;
    const auto kind = static_cast<FlagKind>(aborted ? unpack_abort(seen.abort).kind : seen.kind);
    const bool is_message = kind == FlagKind::channel_ready || kind == FlagKind::channel_done;
    const int peer = static_cast<int>(aborted ? unpack_abort(seen.abort).index : seen.source);  // of a message
    if (outcome == WaitOutcome::aborted) {
        const AbortWord word = unpack_abort(seen.abort);
        const Failure* told = word.reporter == no_member || word.culprit == no_member ? Arena::aborted() : nullptr;
        if (told) return *told;  // hosts write it before the word
        failure.code = static_cast<FailureCode>(word.code);
        failure.reporter = static_cast<int32_t>(word.reporter);
        failure.culprit = static_cast<int32_t>(word.culprit);
        failure.chunk = static_cast<int32_t>(word.index);
        if (failure.code == FailureCode::peer_timeout || failure.code == FailureCode::peer_died) outcome = WaitOutcome::timeout;
        // The culprit differs from the reporter as the reporter does from the culprit.
        const bool is_mismatch = failure.code == FailureCode::site_mismatch || failure.code == FailureCode::shape_mismatch;
        if (is_message) failure.expected = word.epoch;
        if (is_mismatch && !is_message) {
            const int other = failure.culprit == rank() ? failure.reporter : failure.culprit;
            describe_mismatch(failure, other, 0, own_tag);
        }
        if (failure.code == FailureCode::group_lock_timeout) set_text(failure.phase, "GROUP_LOCK");
        if (failure.code == FailureCode::peer_failed)
            set_text(failure.got, "rank " + std::to_string(origin_rank(static_cast<int>(word.reporter))) + " aborted");
    }
    if (outcome == WaitOutcome::timeout) {
        failure.code = FailureCode::peer_timeout;
        const uint64_t named = failure.culprit < 0 ? 0 : 1ull << failure.culprit;
        int dead = find_dead_rank(named);
        if (dead < 0) dead = find_dead_rank();
        if (dead >= 0) failure.code = FailureCode::peer_died, failure.culprit = dead;
    } else if (outcome == WaitOutcome::group_lock) {
        failure.code = FailureCode::group_lock_timeout;
        set_text(failure.phase, "GROUP_LOCK");
    } else if (outcome == WaitOutcome::mismatch) {
        failure.code = FailureCode::site_mismatch;
        if (!is_message) describe_mismatch(failure, failure.culprit, tag_of(seen.seen), own_tag);
    }
    if (is_message) failure.chunk = -1, describe_message(failure, kind, peer);
    return in_origin(failure);
}

// Describes the call of rank `source` instead of ours. Its host publishes its last calls by tag. `seen_tag` 0: unknown, use the
// last one.
void CudaArena::describe_mismatch(Failure& failure, int source, uint32_t seen_tag, uint32_t own_tag) {
    failure.code = FailureCode::site_mismatch;
    failure.culprit = source;
    failure.reporter = rank();
    const auto entry = names_.find(own_tag);
    const CallName& own = entry == names_.end() ? last_ : entry->second;
    const auto find_last = [&](uint32_t tag) {
        const CallDescriptor* last = nullptr;
        for (const CallDescriptor& call : control(source)->calls) {
            const uint64_t stamp = call.stamp.load(std::memory_order_acquire);
            if (stamp == 0 || (tag != 0 && tag_of(stamp) != tag)) continue;
            if (!last || stamp > last->stamp.load(std::memory_order_relaxed)) last = &call;
        }
        return last;
    };
    const CallDescriptor* theirs = find_last(seen_tag);
    if (!theirs) theirs = find_last(own_tag);  // the same call of an all_to_all, and a piece of another size
    if (theirs && own.site == theirs->site && own.op == theirs->op) {
        failure.code = FailureCode::shape_mismatch;
        set_text(failure.got, theirs->shape);
        set_text(failure.wanted, own.shape);
        return;
    }
    set_text(failure.got,
             theirs ? std::string(theirs->op) + " at site '" + theirs->site + "'" : "a call with tag " + hex(seen_tag));
    set_text(failure.wanted, own.op + " at site '" + own.site + "'");
}

}  // namespace ub_overlap::cuda
