#include "cuda/arena.h"

#include <cstdio>

#include "core/settings.h"
#include "cpu/waiter.h"
#include "cuda/device.h"
#include "cuda/kernels.h"

namespace ub_overlap::cuda {
namespace {

std::vector<char*> pointers(const std::vector<uint64_t>& numbers, int ranks) {
    if (static_cast<int>(numbers.size()) != ranks) {
        throw NamedError("ArenaError", {{"what", "an arena needs one pointer a rank"},
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

OnDevice::OnDevice(int device) {
    check(cudaGetDevice(&before_), "find the current device");
    if (before_ != device) check(cudaSetDevice(device), "change the device");
}
OnDevice::~OnDevice() {
    cudaSetDevice(before_);
}

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
    const OnDevice here(device_);
    group_.rank = rank(), group_.ranks = ranks();
    const std::vector<char*> shared = pointers(words, ranks());
    for (int r = 0; r < ranks(); ++r) group_.shared[r] = reinterpret_cast<SharedState*>(shared[r]);
    check(cudaMalloc(reinterpret_cast<void**>(&group_.local), sizeof(LocalState)), "allocate the epochs");
    const auto pinned = cudaHostAllocPortable | cudaHostAllocMapped;
    void* record = nullptr;
    check(cudaHostAlloc(&record, sizeof(WaitFailure), pinned), "allocate the failure record");
    group_.failure = new (record) WaitFailure{};
    check(cudaHostAlloc(reinterpret_cast<void**>(&abort_source_), sizeof(uint64_t), pinned), "allocate the abort word");
    check(cudaStreamCreateWithFlags(&abort_stream_, cudaStreamNonBlocking), "make a stream");
    check(cudaEventCreateWithFlags(&last_call, cudaEventDisableTiming), "make an event");
    preload_waits();
    preload_data();
    preload_wire();
    preload_quantise();
    preload_weights();
    // On a stream of its own: the caller's may stand behind a peer that waits for this rank to bind.
    check(cudaMemsetAsync(group_.local, 0, sizeof(LocalState), abort_stream_), "clear the epochs");
    const int64_t deadline = now_ns() + settings().step_timeout_ns.load(std::memory_order_relaxed);
    cudaError_t found = cudaErrorNotReady;
    wait_until([&] { return (found = cudaStreamQuery(abort_stream_)) != cudaErrorNotReady; }, deadline, [] {});
    check(found, "set up the arena: the device has not come to it within the deadline of a step");
}

// What a graph of torch's or a call that still runs may name stays.
CudaArena::~CudaArena() {
    try {
        const OnDevice here(device_);
        if (captured_ || !free_to_go()) return;
        replays_.clear();
        cudaFree(group_.local);
        cudaFreeHost(group_.failure);
        cudaFreeHost(abort_source_);
        cudaStreamDestroy(abort_stream_);
        cudaEventDestroy(last_call);
    } catch (...) {  // the driver is shutting down, or there is no thread to be had: what the device may use stays
    }
}

uint64_t* CudaArena::flag_word(int rank, uint32_t place) const {
    return reinterpret_cast<uint64_t*>(group_.shared[rank] + 1) + place;
}

void CudaArena::replace(const std::vector<uint64_t>& data, int64_t slot_bytes) {
    data_ = pointers(data, ranks());
    slot_bytes_ = slot_bytes;
    replays_.clear();
}

void CudaArena::note(const Call& call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto found = names_.find(call.tag);
    if (found == names_.end()) {
        if (names_.size() > 4096) names_.clear();  // dynamic shapes: tags without end
        found = names_.emplace(call.tag, Name{call.op_name, call.site, call.shape_text}).first;
    }
    last_ = found->second;
}

bool CudaArena::ended() const {
    const OnDevice here(device_);
    const RelaxedCapture relaxed;  // another thread may be capturing
    const cudaError_t found = called ? cudaEventQuery(last_call) : cudaSuccess;
    if (found != cudaSuccess) cudaGetLastError();
    return found != cudaErrorNotReady;  // a device that has failed runs nothing any more
}

bool CudaArena::free_to_go() const {
    constexpr int64_t patience_ns = 1'000'000'000;
    return ended() && rests(device_, patience_ns);
}

void CudaArena::quiesce() {
    const int64_t deadline = now_ns() + settings().step_timeout_ns.load(std::memory_order_relaxed);
    wait_until([this] { return ended(); }, deadline, [] {});
}

void CudaArena::hold_turn() {
    const OnDevice here(device_);
    static_assert(busy == 1ull << 32, "the lowest bit of the fifth byte");
    check(cudaMemsetAsync(reinterpret_cast<char*>(&group_.local->begun) + 4, 1, 1, abort_stream_), "hold the turn");
    check(cudaStreamSynchronize(abort_stream_), "hold the turn");
}

// That this rank's own device does not go on is why its peers wait for it: it counts more than what they have told.
const Failure* CudaArena::aborted() {
    if (met_.load(std::memory_order_acquire) && own_.code == FailureCode::turn_timeout) return &own_;
    return Arena::aborted();
}

void CudaArena::abort(const Failure& failure) {
    Arena::abort(failure);
    // Kernels that wait for us, here and on our peers, need not come to their deadlines.
    const std::lock_guard<std::mutex> lock(mutex_);
    if (reported_) return;  // the kernel that failed has told them, or we did
    reported_ = true;
    AbortWord word;
    word.code = static_cast<uint32_t>(failure.code);
    word.reporter = failure.reporter < 0 ? rank() : failure.reporter;
    word.culprit = failure.culprit < 0 ? rank() : failure.culprit;
    word.epoch = failure.expected;
    int before = 0;
    if (cudaGetDevice(&before) != cudaSuccess) return;
    cudaSetDevice(device_);
    *abort_source_ = pack_abort(word);
    for (int r = 0; r < ranks(); ++r) {
        cudaMemcpyAsync(&group_.shared[r]->abort, abort_source_, sizeof(uint64_t), cudaMemcpyDefault, abort_stream_);
    }
    cudaGetLastError();  // best effort: their deadlines remain
    cudaSetDevice(before);
}

void CudaArena::poll() {
    const auto* record = static_cast<const volatile WaitFailure*>(group_.failure);
    if (record->outcome == 0 || met_.load(std::memory_order_acquire)) return;
    std::atomic_thread_fence(std::memory_order_acquire);
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (met_.load(std::memory_order_relaxed)) return;
        own_ = failure_from(*group_.failure);
        reported_ = true;
        met_.store(true, std::memory_order_release);
    }
    abort(own_);
}

// A rank whose process has ended, or -1.
int CudaArena::gone_rank() {
    for (int r = 0; r < ranks(); ++r) {
        const ControlBlock* block = control(r);
        if (r != rank() && block && start_time_of(block->pid) != block->start_time) return r;
    }
    return -1;
}

Failure CudaArena::failure_from(const WaitFailure& seen) {
    Failure failure;
    failure.reporter = rank();
    failure.culprit = static_cast<int32_t>(seen.culprit);
    failure.chunk = static_cast<int32_t>(seen.index);
    failure.expected = epoch_of(seen.wanted);
    failure.observed = epoch_of(seen.seen);
    failure.waited_s = static_cast<double>(seen.waited_ns) * 1e-9;
    set_text(failure.phase, name_of(static_cast<FlagKind>(seen.kind)));
    const auto found = names_.find(tag_of(seen.wanted));
    const Name& own = found == names_.end() ? last_ : found->second;
    set_text(failure.op, own.op);
    set_text(failure.site, own.site);
    uint32_t own_tag = tag_of(seen.wanted);
    auto outcome = static_cast<WaitOutcome>(seen.outcome);
    if (outcome == WaitOutcome::aborted) {
        const AbortWord word = unpack_abort(seen.abort);
        failure.code = static_cast<FailureCode>(word.code);
        failure.reporter = static_cast<int32_t>(word.reporter);
        failure.culprit = static_cast<int32_t>(word.culprit);
        failure.chunk = static_cast<int32_t>(word.index);
        if (failure.code == FailureCode::peer_timeout || failure.code == FailureCode::peer_died) outcome = WaitOutcome::timeout;
        // What its culprit is to the reporter, the reporter is to the culprit.
        if (failure.code == FailureCode::site_mismatch || failure.code == FailureCode::shape_mismatch) {
            const int other = failure.culprit == rank() ? failure.reporter : failure.culprit;
            describe_mismatch(failure, other, 0, own_tag);
        }
        if (failure.code == FailureCode::turn_timeout) set_text(failure.phase, "TURN");
        if (failure.code == FailureCode::peer_failed)
            set_text(failure.got, "rank " + std::to_string(word.reporter) + " gave up");
    }
    if (outcome == WaitOutcome::timeout) {
        failure.code = FailureCode::peer_timeout;
        if (const int gone = gone_rank(); gone >= 0) failure.code = FailureCode::peer_died, failure.culprit = gone;
    } else if (outcome == WaitOutcome::turn) {
        failure.code = FailureCode::turn_timeout;
        set_text(failure.phase, "TURN");
    } else if (outcome == WaitOutcome::mismatch) {
        describe_mismatch(failure, failure.culprit, tag_of(seen.seen), own_tag);
    }
    return failure;
}

// What `source` brought instead. Its host tells by tags what its last calls were; `seen_tag` 0: it is not known, take the last.
void CudaArena::describe_mismatch(Failure& failure, int source, uint32_t seen_tag, uint32_t own_tag) {
    failure.code = FailureCode::site_mismatch;
    failure.culprit = source;
    failure.reporter = rank();
    const auto found = names_.find(own_tag);
    const Name& own = found == names_.end() ? last_ : found->second;
    const CallDescriptor* theirs = nullptr;
    for (const CallDescriptor& call : control(source)->calls) {
        const uint64_t stamp = call.stamp.load(std::memory_order_acquire);
        if (stamp == 0 || (seen_tag != 0 && tag_of(stamp) != seen_tag)) continue;
        if (!theirs || stamp > theirs->stamp.load(std::memory_order_relaxed)) theirs = &call;
    }
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
