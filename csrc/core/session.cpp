#include "core/session.h"

#include <algorithm>
#include <vector>

#include "core/settings.h"
#include "core/site_id.h"

namespace ub_overlap {

namespace {

// The failure of a peer that an error is about; null where this rank has failed by itself.
const Failure* peer_failure_in(const std::exception& error) {
    const auto* failed = dynamic_cast<const CallbackFailed*>(&error);
    return failed && failed->failure ? &*failed->failure : nullptr;
}

}  // namespace

Session::Session(std::string group, std::string device, int rank, int ranks, std::shared_ptr<Arena> arena,
                 std::string transport, std::string reason)
    : group_(std::move(group)),
      device_(std::move(device)),
      transport_(std::move(transport)),
      reason_(std::move(reason)),
      rank_(rank),
      ranks_(ranks),
      arena_(std::move(arena)),
      flight_(settings().flight_calls.load(std::memory_order_relaxed)) {}

void Session::set_hooks(SessionHooks hooks) {
    hooks_ = std::move(hooks);
}

void Session::set_channels(std::shared_ptr<PointToPoint> channels) {
    const std::lock_guard<std::mutex> lock(abort_mutex_);
    channels_ = std::move(channels);
}

std::shared_ptr<PointToPoint> Session::channels() {
    const std::lock_guard<std::mutex> lock(abort_mutex_);
    return channels_;
}

void Session::throw_aborted(const Call* call) {
    Failure failure;
    failure.code = FailureCode::group_aborted;
    failure.reporter = failure.culprit = rank_;
    if (call) set_text(failure.op, call->op_name), set_text(failure.site, call->site);
    const std::lock_guard<std::mutex> lock(abort_mutex_);
    set_text(failure.got, abort_reason_);
    throw CallFailed(failure);
}

void Session::refuse_if_unusable(const Call* call) {
    if (aborted_.load(std::memory_order_acquire)) throw_aborted(call);
    if (closed_) {
        throw NamedError("SessionPoisonedError",
                         {{"what", "the session of group '" + group_ + "' is closed"},
                          {"fix", "make a new process group, or do not close the session before its last call"}});
    }
    if (!failure_text_.empty()) {
        throw NamedError(
            "SessionPoisonedError",
            {{"what", "an earlier error broke group '" + group_ + "', its ranks are no longer in step"},
             {"got", failure_text_},
             {"fix", "handle the first error; to go on, destroy the process group on all ranks and make it again"}});
    }
    if (arena_) arena_->poll();
    // A peer may have given up between two calls of ours. The data it left would still fit, but it will not come again.
    if (const Failure* failure = arena_ ? arena_->aborted() : nullptr) {
        failure_text_ = "a peer gave up before this call";
        throw CallFailed(*failure);
    }
}

void Session::mark_failed(const Call& call, const std::string& text, const Failure* failure) {
    if (failure_text_.empty()) failure_text_ = text;
    if (!arena_) return;
    Failure record;
    if (failure) {
        record = *failure;
        if (record.reporter < 0) record.reporter = arena_->origin_rank(rank_);
        if (!record.op[0]) set_text(record.op, call.op_name), set_text(record.site, call.site);
    } else {
        record.code = FailureCode::peer_failed;
        record.reporter = record.culprit = rank_;
        record = arena_->in_origin(record);
        set_text(record.op, call.op_name);
        set_text(record.site, call.site);
        set_text(record.got, text);
    }
    arena_->abort(record);
    if (hooks_.tell_plain_groups) hooks_.tell_plain_groups(record);
}

// Publishes this rank's call before it waits for peers. Peers can then distinguish a rank at another site, or with other
// sizes, from a late one.
void Session::publish(const Call& call) {
    CallDescriptor& descriptor = arena_->control(rank_)->calls[call.slot()];
    set_text(descriptor.op, call.op_name);
    set_text(descriptor.site, call.site);
    set_text(descriptor.shape, call.shape_text);
    descriptor.stamp.store(flag_value(call.epoch, call.tag), std::memory_order_release);
}

void Session::verify(const Call& call) {
    const std::string digest = shared_digest(call.site);
    if (ranks_ == 1 || digest.empty() || verified_.count(digest)) return;
    if (hooks_.verify) hooks_.verify(digest, call);
    verified_.insert(digest);
}

uint64_t Session::verify_only(const Call& call) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    refuse_if_unusable(&call);
    const uint64_t number = flight_.begin(0, call.tag, {call.op_name, call.site, call.strategy, call.shape_text});
    try {
        verify(call);
    } catch (const std::exception& error) {
        flight_.set_state(number, CallState::failed);
        mark_failed(call, error.what(), peer_failure_in(error));
        throw;
    }
    flight_.set_state(number, CallState::started);
    return number;
}

void Session::end_plain(uint64_t number, bool failed) {
    if (failed || device_ == "cpu") flight_.set_state(number, failed ? CallState::failed : CallState::finished);
}

std::shared_ptr<Arena> Session::living_arena() {
    const std::lock_guard<std::mutex> lock(abort_mutex_);
    return arena_;
}

std::vector<FlightEntry> Session::flight() {
    std::vector<FlightEntry> entries = flight_.entries();
    if (const std::shared_ptr<Arena> arena = living_arena()) arena->refine(entries);
    return entries;
}

std::vector<int> Session::waiting_for() {
    const std::shared_ptr<Arena> arena = living_arena();
    std::vector<int> ranks = arena ? arena->waiting_for() : std::vector<int>();
    for (int& rank : ranks) rank = arena->origin_rank(rank);
    return ranks;
}

int Session::picked(const std::string& site, int bucket) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    const auto found = picks_.find({site, bucket});
    return found == picks_.end() ? -1 : found->second;
}

void Session::tune(const Tuning& tuning) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    refuse_if_unusable(nullptr);
    if (!hooks_.tune) return;
    try {
        const int pick = hooks_.tune(tuning);
        if (pick >= 0) picks_[{tuning.site, tuning.bucket}] = pick;
    } catch (const std::exception& error) {
        Call call;
        call.op_name = tuning.op;
        call.site = tuning.site;
        mark_failed(call, error.what(), peer_failure_in(error));
        throw;
    }
}

void Session::check() {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    refuse_if_unusable(nullptr);
}

// The record of an abort names the call that it interrupts. The text may change meanwhile: a stamp that is equal before and
// after shows that it did not.
void Session::abort(const std::string& reason) {
    std::shared_ptr<Arena> arena;
    {
        const std::lock_guard<std::mutex> lock(abort_mutex_);
        if (aborted_.load(std::memory_order_relaxed)) return;
        abort_reason_ = reason;
        aborted_.store(true, std::memory_order_release);
        arena = arena_;
    }
    if (!arena) return;
    Failure failure;
    failure.code = FailureCode::group_aborted;
    failure.reporter = failure.culprit = rank_;
    failure = arena->in_origin(failure);
    set_text(failure.got, reason);
    const CallDescriptor* last = nullptr;
    uint64_t last_stamp = 0;
    const auto look_at = [&](int slot) {
        const CallDescriptor& call = arena->control(rank_)->calls[slot];
        const uint64_t stamp = call.stamp.load(std::memory_order_acquire);
        if (stamp != 0 && (!last || reached(epoch_of(stamp), epoch_of(last_stamp)))) last = &call, last_stamp = stamp;
    };
    const int own_slot = slot_with_own_epochs_.load(std::memory_order_acquire);
    if (own_slot >= 0) {
        look_at(own_slot);
    } else {
        for (int slot = 0; slot < slots; ++slot) look_at(slot);
    }
    if (last) {
        failure.expected = epoch_of(last_stamp);
        set_text(failure.op, last->op), set_text(failure.site, last->site);
        std::atomic_thread_fence(std::memory_order_acquire);
        if (last->stamp.load(std::memory_order_relaxed) != last_stamp) failure.op[0] = failure.site[0] = 0;
    }
    arena->abort(failure);
}

void Session::run_op_of(const Call& call, uint64_t number, const std::function<void()>& body) {
    try {
        body();
    } catch (const CallFailed& failed) {
        flight_.set_state(number, CallState::failed);
        mark_failed(call, "epoch " + std::to_string(call.epoch) + " at site '" + call.site + "'", &failed.failure);
        if (failed.failure.code == FailureCode::group_aborted) throw_aborted(&call);
        throw;
    } catch (const std::exception& error) {
        flight_.set_state(number, CallState::failed);
        mark_failed(call, error.what(), peer_failure_in(error));
        throw;
    } catch (...) {
        flight_.set_state(number, CallState::failed);
        mark_failed(call, "unknown error", nullptr);
        throw;
    }
}

void Session::set_up(Call& call, const std::function<void(Call&)>& prepare) {
    call.program = ProgramCache::get(call.key, rank_);
    prepare(call);
    if (arena_) publish(call);
    verify(call);
    if (arena_ && call.is_all_to_all()) {
        grow_areas(call);
    } else if (arena_ && arena_->slot_bytes(call.slot()) < call.slot_bytes()) {
        hooks_.grow(call, false);
    }
    call.set_arena(arena_.get());
}

void Session::grow_areas(Call& call) {
    const AreaGrowth::Need need = areas_[call.split_slot].count(call, *arena_);
    if (need.is_first) {
        call.area_bytes = need.bytes / call.areas();
        hooks_.grow(call, true);
    } else if (need.bytes > arena_->slot_bytes(call.slot())) {
        call.area_bytes = std::min(need.bytes + need.bytes / 4, max_areas_bytes) / call.areas();
        hooks_.grow(call, true);
    }
    call.area_bytes = arena_->slot_bytes(call.slot()) / call.areas() / slot_line * slot_line;
}

void Session::run(Call& call, Executor& executor, const std::function<void(Call&)>& prepare) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    refuse_if_unusable(&call);
    call.epoch = call.is_fused ? ++fused_epoch_ : ++epoch_;
    slot_with_own_epochs_.store(call.is_fused ? call.slot() : -1, std::memory_order_release);
    // The flight recorder knows the epochs of the group, which fused collectives do not count.
    const uint64_t number =
        flight_.begin(call.is_fused ? 0 : call.epoch, call.tag, {call.op_name, call.site, call.strategy, call.shape_text});
    run_op_of(call, number, [&] {
        set_up(call, prepare);
        const bool trace = settings().trace.load(std::memory_order_relaxed), ends = device_ == "cpu";
        if (ends) flight_.set_state(number, CallState::started);
        const std::vector<StepTime> times = executor.run(call);
        flight_.set_state(number, ends ? CallState::finished : CallState::issued);
        Stats::get().add(call.own_site, call.strategy, transport_, reason_, times, trace);
    });
}

void Session::close() {
    std::vector<std::unique_ptr<OpenCollective>> plain;  // freed last, without the lock: c10d may wait
    if (const std::shared_ptr<PointToPoint> channels = this->channels()) channels->close();
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    closed_ = true;
    set_channels(nullptr);
    if (arena_) arena_->quiesce();
    for (auto& open : open_) {
        if (open && open->call.plain) plain.push_back(std::move(open));
        open.reset();
    }
    hooks_ = {};
    std::shared_ptr<Arena> arena;  // released without the lock: that may take a second
    const std::lock_guard<std::mutex> abort_lock(abort_mutex_);
    arena.swap(arena_);
}

}  // namespace ub_overlap
