// The ops of split collectives: start, finish and release, those that c10d runs, and the end of abandoned ones.
#include <algorithm>
#include <chrono>

#include "core/session.h"
#include "core/settings.h"

namespace ub_overlap {

void Session::run_split_op_of(const Call& call, uint64_t number, const std::function<void()>& body) {
    slot_with_own_epochs_.store(call.slot(), std::memory_order_release);
    run_op_of(call, number, body);  // an error leaves the slot named: the session runs no further call
    slot_with_own_epochs_.store(-1, std::memory_order_release);
}

void Session::refuse_start(const Call& call, const OpenCollective& open) const {
    const std::string state = open.is_finished ? "finished and not released" : "started and not finished";
    const char* next = open.is_finished ? "release_collective" : "finish_collective";
    throw NamedError("OptionError",
                     {{"what", "split slot " + std::to_string(call.split_slot) + " is in use by an open collective"},
                      {"where", call.op_name + " at site '" + call.site + "', group '" + group_ + "'"},
                      {"got", open.call.op_name + " at site '" + open.call.site + "' was " + state},
                      {"expected", std::string(next) + " before the next start_collective of a slot"},
                      {"fix", "call it first, or use another of the " + std::to_string(split_slots) +
                                  " split slots. After an exception between them, drop the exception: its traceback holds the "
                                  "collective's tensors"}});
}

bool Session::can_continue(const OpenCollective& open, const Call& next) const {
    const uint64_t started = open.work->capture(), capture = open.executor->capture_of(next);
    if (started == 0 && capture != 0) {
        throw NamedError(
            "OptionError",
            {{"what", "a split slot has an abandoned collective, which cannot be finished in a CUDA graph"},
             {"where", next.op_name + " at site '" + next.site + "', split slot " + std::to_string(next.split_slot)},
             {"got", "an eager start without a finish, as after an exception between them"},
             {"expected", "a free slot before the capture"},
             {"fix", "call the captured function once eagerly before the capture, on all ranks"}});
    }
    return started == capture;
}

void Session::free_slot(const Call& next) {
    std::unique_ptr<OpenCollective>& slot = open_[next.split_slot];
    const auto is_abandoned = [&] { return slot && slot->tensors.is_abandoned && slot->tensors.is_abandoned(); };
    if (slot && !is_abandoned() && hooks_.collect_garbage) hooks_.collect_garbage();  // a traceback in a cycle holds tokens
    if (!slot) return;
    if (!is_abandoned()) refuse_start(next, *slot);
    const bool has_steps = can_continue(*slot, next);
    const std::unique_ptr<OpenCollective> open = std::move(slot);
    open->call.stream = next.stream;
    if (!has_steps) return;
    if (open->call.plain) {
        if (ranks_ > 1) run_op_of(open->call, open->number, [&] { hooks_.agree_on_abandoned(open->call); });
        finish_plain(*open);
    } else if (ranks_ > 1) {
        run_split_op_of(open->call, open->number, [&] { end_abandoned(*open); });
    }
}

// The peers may have finished the collective, and wait for this rank's part of it. So its steps run to their end; the results
// go to memory that no program reads.
void Session::end_abandoned(OpenCollective& open) {
    Call& call = open.call;
    Executor& executor = *open.executor;
    hooks_.agree_on_abandoned(call);
    std::vector<std::shared_ptr<char>> results;
    const auto allocate_output = [&](Call& of) {
        results.push_back(hooks_.allocate(call, of.output_bytes()));
        of.output = results.back().get();
    };
    if (!open.is_finished) {
        if (call.key.zero_copy) {
            call.put_output_in_landing();
        } else {
            allocate_output(call);
            for (Call& tensor : call.coalesced) allocate_output(tensor);
        }
        executor.finish(*open.work);
    }
    if (call.key.zero_copy) executor.release(*open.work);
    flight_.set_state(open.number, device_ == "cpu" ? CallState::finished : CallState::issued);
}

char* Session::landing_memory(Call& call) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    refuse_if_unusable(&call);
    free_slot(call);
    if (arena_->slot_bytes(call.slot()) < call.slot_bytes()) {
        const uint64_t number = flight_.begin(0, call.tag, {call.op_name, call.site, call.strategy, call.shape_text});
        run_op_of(call, number, [&] { hooks_.grow(call, false); });
        flight_.set_state(number, CallState::finished);
    }
    return arena_->slot(rank_, call.slot());
}

void Session::start(Call call, HeldTensors tensors, Executor& executor) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    refuse_if_unusable(&call);
    free_slot(call);
    std::unique_ptr<OpenCollective>& open = open_[call.split_slot];
    auto next = std::make_unique<OpenCollective>();
    next->call = std::move(call);
    next->tensors = std::move(tensors);
    next->executor = &executor;
    Call& own = next->call;
    if (own.plain) {
        start_plain(*next);
        open = std::move(next);
        return;
    }
    own.epoch = ++split_epochs_[own.split_slot];
    next->number = flight_.begin(0, own.tag, {own.op_name, own.site, own.strategy, own.shape_text});
    run_split_op_of(own, next->number, [&] {
        set_up(own, [](Call&) {});
        flight_.set_state(next->number, CallState::started);
        next->work = executor.start(own);
    });
    open = std::move(next);
}

void Session::finish(Call& call) {
    std::unique_lock<std::recursive_mutex> lock(mutex_);
    const OpenCollective* begun = open_[call.split_slot].get();
    const bool fits = begun && !begun->is_finished && begun->call.tag == call.tag && begun->call.shape_text == call.shape_text;
    // Also where the session is unusable: nothing else would end a collective that c10d runs.
    std::unique_ptr<OpenCollective> open = fits && begun->call.plain ? std::move(open_[call.split_slot]) : nullptr;
    refuse_if_unusable(&call);
    if (open) {
        lock.unlock();  // other threads may run calls that the peers need before they finish this one
        open->call.stream = call.stream;
        call.plain = open->call.plain;
        finish_plain(*open);
        return;
    }
    if (!fits) refuse_finish(call, begun);
    open = std::move(open_[call.split_slot]);
    Call& own = open->call;
    if (own.key.zero_copy) {
        own.put_output_in_landing();
        call.set_outputs(own);
    } else {
        own.set_outputs(call);
    }
    own.stream = call.stream;
    open->finish_ns = std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
    run_split_op_of(own, open->number, [&] {
        const bool trace = settings().trace.load(std::memory_order_relaxed);
        const std::vector<StepTime> times = open->executor->finish(*open->work);
        flight_.set_state(open->number, device_ == "cpu" ? CallState::finished : CallState::issued);
        Stats::get().add(own.own_site, own.strategy, transport_, reason_, times, trace, open->finish_ns);
    });
    if (!own.key.zero_copy) return;
    open->is_finished = true;
    open->tensors = {};  // its pushes have ended
    open_[call.split_slot] = std::move(open);
}

// A failure of c10d leaves the session as it was: ranks are in step, and c10d decides what its next collective does.
void Session::start_plain(OpenCollective& next) {
    next.number = verify_only(next.call);
    try {
        next.work = next.executor->start(next.call);
    } catch (...) {
        end_plain(next.number, true);
        throw;
    }
}

void Session::finish_plain(OpenCollective& open) {
    try {
        open.executor->finish(*open.work);
    } catch (...) {
        end_plain(open.number, true);
        throw;
    }
    end_plain(open.number, false);
}

int64_t Session::received_rounds(int split_slot) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    const OpenCollective* open = open_[split_slot].get();
    return open ? open->call.received_rounds() : 1;
}

void Session::watch_result(int split_slot, std::function<bool()> is_abandoned) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (open_[split_slot]) open_[split_slot]->tensors.is_abandoned = std::move(is_abandoned);
}

void Session::refuse_finish(const Call& call, const OpenCollective* open) const {
    const std::string slot = "split slot " + std::to_string(call.split_slot);
    const auto name = [](const Call& c) { return c.op_name + " at site '" + c.site + "' (" + c.shape_text + ")"; };
    const bool other = open && !open->is_finished;
    throw NamedError(
        "OptionError",
        {{"what", slot + (other ? " holds another collective than the one to finish" : " has no open collective")},
         {"where", "finish_collective at site '" + call.site + "', group '" + group_ + "'"},
         {"got", open ? name(open->call) + (other ? "" : " is finished already") : "no start_collective since the last finish"},
         {"expected", name(call)},
         {"fix", "pass the arguments of start_collective, and finish every collective once"}});
}

void Session::release(const Call& call) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    refuse_if_unusable(&call);
    std::unique_ptr<OpenCollective>& open = open_[call.split_slot];
    if (!open || !open->is_finished || open->call.site != call.site) {
        throw NamedError(
            "OptionError",
            {{"what", "split slot " + std::to_string(call.split_slot) + " has no result to release"},
             {"where", "release_collective at site '" + call.site + "', group '" + group_ + "'"},
             {"got", !open               ? std::string("no open collective")
                     : open->is_finished ? "the result of " + open->call.op_name + " at site '" + open->call.site + "'"
                                         : open->call.op_name + " at site '" + open->call.site + "', which is not finished"},
             {"expected", "a zero-copy gather of this site, finished and not released"},
             {"fix", "release the result of every zero-copy gather once, after its last reader"}});
    }
    const std::unique_ptr<OpenCollective> last = std::move(open);
    Call& own = last->call;
    own.stream = call.stream;
    run_split_op_of(own, last->number, [&] {
        const std::vector<StepTime> times = last->executor->release(*last->work);
        if (settings().trace.load(std::memory_order_relaxed)) Stats::get().keep_trace(own.own_site, times);
    });
}

int Session::spared_multiprocessors() {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (most_spared_ < 0) most_spared_ = hooks_.most_spared ? hooks_.most_spared() : 0;
    return std::min(most_spared_, settings().nccl_multiprocessors.load(std::memory_order_relaxed));
}

std::vector<int> Session::open_plain() {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    std::vector<int> slots;
    for (int slot = 0; slot < split_slots; ++slot) {
        if (open_[slot] && open_[slot]->call.plain) slots.push_back(slot);
    }
    return slots;
}

}  // namespace ub_overlap
