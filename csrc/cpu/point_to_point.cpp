#include "cpu/point_to_point.h"

#include <pthread.h>

#include <chrono>
#include <cstring>
#include <exception>

#include "core/settings.h"
#include "core/wait_until.h"
#include "cpu/shm_arena.h"
#include "cpu/start_thread.h"
#include "cpu/waiter.h"

namespace ub_overlap {
namespace {

constexpr int64_t fresh_ns = 1'000'000'000;        // a rank that blocks shows a sign of life at least this often
constexpr int64_t look_for_dead_ns = 100'000'000;  // reading /proc is slow
constexpr auto look_for_signals = std::chrono::milliseconds(100);

}  // namespace

class CpuPointToPoint::CpuTransfer final : public Transfer {
  public:
    CpuTransfer(Message message, uint64_t first, std::shared_ptr<Completion> completion)
        : message(std::move(message)), first(first), completion_(std::move(completion)) {}

    bool is_completed() override {
        const std::lock_guard<std::mutex> lock(completion_->mutex);
        return ended_;
    }
    void wait(void*) override {
        std::unique_lock<std::mutex> lock(completion_->mutex);
        if (!ended_) {
            std::atomic<int32_t>& blocked = completion_->segment->blocked(completion_->rank, message.peer);
            blocked.fetch_add(1, std::memory_order_relaxed);
            // A wait that fails stays counted: it shows the others, which may fail at the same time, whom this rank waited for.
            while (!completion_->changed.wait_for(lock, look_for_signals, [this] { return ended_; })) {
                lock.unlock();
                if (const auto check_signals = settings().check_signals.load()) check_signals();
                lock.lock();
            }
            if (!error_) blocked.fetch_sub(1, std::memory_order_relaxed);
        }
        if (error_) std::rethrow_exception(error_);
    }
    void end(std::exception_ptr error) {
        std::shared_ptr<void> tensor;  // released without the lock: that may take the GIL
        const std::lock_guard<std::mutex> lock(completion_->mutex);
        ended_ = true;
        error_ = std::move(error);
        tensor = std::move(message.tensor);
        completion_->changed.notify_all();
    }

    Message message;
    const uint64_t first;

  private:
    const std::shared_ptr<Completion> completion_;
    bool ended_ = false;
    std::exception_ptr error_;
};

CpuPointToPoint::CpuPointToPoint(std::shared_ptr<Arena> arena, std::shared_ptr<ChannelSegment> segment)
    : PointToPoint(std::move(arena), segment), segment_(segment), completion_(std::make_shared<Completion>()) {
    completion_->segment = segment_;
    completion_->rank = arena_->rank();
}

CpuPointToPoint::~CpuPointToPoint() {
    close();
}

std::shared_ptr<Transfer> CpuPointToPoint::begin(Message message, uint64_t first) {
    Worker& worker = workers_[{message.sends, message.peer}];
    auto transfer = std::make_shared<CpuTransfer>(std::move(message), first, completion_);
    if (!worker.thread.joinable()) worker.thread = start_thread("sends or receives", [this, &worker] { work(worker); });
    worker.jobs.push_back(transfer);
    worker.wake.notify_one();
    return transfer;
}

void CpuPointToPoint::close() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        closed_ = true;
        stop_.store(true, std::memory_order_release);
        for (auto& [key, worker] : workers_) worker.wake.notify_one();
    }
    for (auto& [key, worker] : workers_) {
        if (worker.thread.joinable()) worker.thread.join();
    }
}

void CpuPointToPoint::work(Worker& worker) {
    pthread_setname_np(pthread_self(), "ub_overlap-p2p");
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        worker.wake.wait(lock, [&] { return !worker.jobs.empty() || stop_.load(std::memory_order_acquire); });
        if (worker.jobs.empty()) return;
        const std::shared_ptr<CpuTransfer> transfer = std::move(worker.jobs.front());
        worker.jobs.pop_front();
        lock.unlock();
        std::exception_ptr error;
        try {
            run(*transfer);
        } catch (const CallFailed& failed) {
            arena_->abort(failed.failure);  // the first failure of a group stays
            error = std::current_exception();
        } catch (const CallStopped&) {
            error = std::make_exception_ptr(
                NamedError("SessionPoisonedError",
                           {{"what", "the group was closed before the message was completed"},
                            {"where", std::string(transfer->message.op()) + " at " + transfer->message.site(arena_->rank())},
                            {"got", transfer->message.text},
                            {"fix", "wait for all messages before the process group is destroyed"}}));
        } catch (const std::exception& failed) {
            break_channels(transfer->message, failed.what());
            error = std::current_exception();
        }
        transfer->end(error);
        lock.lock();
    }
}

// Runs the steps of the transfer's end of the channel for each piece.
void CpuPointToPoint::run(CpuTransfer& transfer) {
    const Message& m = transfer.message;
    const ChannelSizes& sizes = segment_->sizes();
    const int source = m.sends ? arena_->rank() : m.peer, destination = m.sends ? m.peer : arena_->rank();
    const int64_t slot_bytes = sizes.slot_bytes(source, destination), pieces = pieces_of(m);
    for (int64_t piece = 0; piece < pieces; ++piece) {
        const uint64_t number = transfer.first + static_cast<uint64_t>(piece);
        const int place = static_cast<int>(number % static_cast<uint64_t>(sizes.slots));
        char* slot = segment_->slot(source, destination, place);
        char* data = m.data + piece * slot_bytes;
        const auto bytes = static_cast<size_t>(std::min(slot_bytes, m.bytes - piece * slot_bytes));
        FlagWord& ready = segment_->ready(source, destination, place);
        for (const Step& step : (m.sends ? source_steps_ : destination_steps_)->steps) {
            if (step.kind == StepKind::copy) {
                if (bytes) m.sends ? std::memcpy(slot, data, bytes) : std::memcpy(data, slot, bytes);
            } else if (step.kind == StepKind::signal) {
                if (m.sends) {
                    ready.store(flag_value(number, m.hash), std::memory_order_release);
                } else {
                    segment_->done(source, destination).store(flag_value(number, 1), std::memory_order_release);
                }
            } else if (const FlagWait& wait = step.waits[0]; number > static_cast<uint64_t>(wait.back)) {
                const FlagWord& word = wait.flag.kind == FlagKind::done ? segment_->done(source, destination) : ready;
                wait_for_word(transfer, word, wait.flag.kind, static_cast<uint32_t>(number - wait.back));
            }
        }
    }
}

void CpuPointToPoint::wait_for_word(const CpuTransfer& transfer, const FlagWord& word, FlagKind kind, uint32_t number) {
    const Message& m = transfer.message;
    uint64_t seen = 0;
    const auto arrived = [&] {
        seen = word.load(std::memory_order_acquire);
        return seen != 0 && reached(epoch_of(seen), number);
    };
    const int64_t begin = now_ns();
    const auto failure_of = [&](FailureCode code, int culprit) {
        Failure failure;
        failure.code = code;
        failure.reporter = arena_->rank();
        failure.culprit = culprit;
        failure.expected = static_cast<uint32_t>(transfer.first);
        failure.observed = epoch_of(seen);
        failure.waited_s = static_cast<double>(now_ns() - begin) * 1e-9;
        failure.silent_s =
            static_cast<double>(now_ns() - arena_->control(culprit)->heartbeat_ns.load(std::memory_order_relaxed)) * 1e-9;
        set_text(failure.op, m.op());
        set_text(failure.site, m.site(arena_->rank()));
        set_text(failure.phase, name_of(kind));
        segment_->describe(failure, m.sends, m.peer);
        return arena_->in_origin(failure);
    };
    if (!arrived()) {
        int64_t looked_for_dead = begin;
        const auto look = [&] {
            if (stop_.load(std::memory_order_acquire)) throw CallStopped();
            const int64_t now = now_ns();
            arena_->control(arena_->rank())->heartbeat_ns.store(now, std::memory_order_relaxed);
            // A peer that failed later has sent all of this message: what has arrived still counts.
            const Failure* failure = arena_->aborted();
            if (failure && !arrived()) throw CallFailed(*failure);
            if (now - looked_for_dead > look_for_dead_ns) {
                looked_for_dead = now;
                if (gone(arena_->control(m.peer)) && !arrived()) {
                    throw CallFailed(failure_of(FailureCode::peer_died, m.peer));
                }
            }
        };
        const int64_t deadline = begin + settings().step_timeout_ns.load(std::memory_order_relaxed);
        if (!wait_until(arrived, deadline, look)) {
            throw CallFailed(failure_of(FailureCode::peer_timeout, find_culprit(m.peer, now_ns() - begin)));
        }
    }
    if (kind == FlagKind::ready && seen != flag_value(number, m.hash)) {
        throw CallFailed(failure_of(FailureCode::shape_mismatch, m.peer));
    }
}

// The rank that delays the messages of `peer`: one that the ranks blocked from there on lead to, and that is gone, does not
// run, or is not blocked. Of several, the one silent for longest.
int CpuPointToPoint::find_culprit(int peer, int64_t waited_ns) {
    std::vector<int> todo{peer};
    std::vector<bool> seen(static_cast<size_t>(arena_->ranks()));
    int culprit = peer;
    int64_t longest = -1;
    while (!todo.empty()) {
        const int rank = todo.back();
        todo.pop_back();
        if (seen[rank]) continue;
        seen[rank] = true;
        bool blocked = false;
        for (int next = 0; next < arena_->ranks(); ++next) {
            if (segment_->blocked(rank, next).load(std::memory_order_relaxed) > 0) todo.push_back(next), blocked = true;
        }
        if (rank == arena_->rank()) continue;
        const ControlBlock* block = arena_->control(rank);
        if (gone(block)) return rank;
        const int64_t silent = now_ns() - block->heartbeat_ns.load(std::memory_order_relaxed);
        const bool stopped = silent > std::max(fresh_ns, waited_ns / 4);
        if ((!blocked || stopped) && silent > longest) culprit = rank, longest = silent;
    }
    return culprit;
}

}  // namespace ub_overlap
