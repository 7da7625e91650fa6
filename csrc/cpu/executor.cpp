// Signal protocol (words and who writes them: core/flags.h, core/arena.h):
//
//     push     copy into a peer's slot, then store READY or READY2 there with release; both on the copy engine's thread, or the
//              copy on one thread and the signal on another behind an event (release and acquire too)
//     store    a direct call's matmul writes peers' slots; READY follows on the same thread, with release
//     arrive   load the word with acquire until it holds this epoch, then read the slot
//     free     after the last read of its own slot a rank stores DONE at every peer; a push two epochs later waits for that
//
// Events are local to a call: stored with release by the thread that ran the step, loaded with acquire by the one that needs
// it.
#include "cpu/executor.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <iterator>
#include <memory>
#include <mutex>
#include <random>

#include "core/settings.h"
#include "core/wait_until.h"
#include "cpu/copy_engine.h"
#include "cpu/kernels.h"
#include "cpu/shm_arena.h"
#include "cpu/waiter.h"

namespace ub_overlap {
namespace {

// One call under way on its two threads.
class Run final : public OpenWork {
  public:
    Run(const Call& call, MatmulFn matmul)
        : call_(call),
          program_(*call.program),
          matmul_(matmul),
          injection_(Injections::current()),
          begun_(new std::atomic<uint8_t>[program_.steps.size()]()),
          events_(new std::atomic<uint8_t>[program_.events + 1]()),
          times_(program_.steps.size()) {
        find_latched_steps();
    }

    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;
    // The copy engine works on this object. Of a collective that is never finished, pushes may wait for a peer: no longer.
    ~Run() override {
        stop_.store(true, std::memory_order_release);
        join();
    }

    std::vector<StepTime> go() {
        start_copies(0, steps());
        return compute(0, steps());
    }
    void start() {
        start_copies(0, program_.finish_begin);
        queue(compute_queue, 0, program_.finish_begin);  // its only COMPUTE step is Return
    }
    std::vector<StepTime> finish() {
        start_copies(program_.finish_begin, program_.release_begin);
        std::vector<StepTime> times = compute(program_.finish_begin, program_.release_begin);
        put_in_order();
        return times;
    }
    std::vector<StepTime> release() { return compute(program_.release_begin, steps()); }

  private:
    int steps() const { return static_cast<int>(program_.steps.size()); }

    // Hands the COPY steps from `first` to `last` to the copy engine, behind those that it has.
    void start_copies(int first, int last) {
        const std::vector<int>& copies = program_.queues[copy_queue];
        if (std::none_of(copies.begin(), copies.end(), [=](int n) { return first <= n && n < last; })) return;
        const std::shared_ptr<const CopyEngine::Job> before = jobs_.empty() ? nullptr : jobs_.back();
        jobs_.emplace_back();  // its memory first: a job that runs must be in the list, which `join` waits for
        try {
            jobs_.back() = CopyEngine::get().submit([this, before, first, last] {
                if (before) CopyEngine::get().wait(*before);
                queue(copy_queue, first, last);
            });
        } catch (...) {
            jobs_.pop_back();
            throw;
        }
    }
    // Runs the COMPUTE steps from `first` to `last`, and waits until they and all copies have ended. Returns the times of
    // all steps that have run so far: not of the rounds that an all_to_all did not need.
    std::vector<StepTime> compute(int first, int last) {
        queue(compute_queue, first, last);
        join();
        if (error_) std::rethrow_exception(error_);
        std::vector<StepTime> times;
        std::copy_if(times_.begin(), times_.end(), std::back_inserter(times), [](const StepTime& t) { return t.end_ns != 0; });
        return times;
    }
    void join() {
        for (const auto& job : jobs_) CopyEngine::get().wait(*job);
        jobs_.clear();
    }

    // Runs the steps of a queue from `first` to `last`. Those of an all_to_all's second round are run for each further round.
    void queue(int which, int first, int last) noexcept {
        const int begin = program_.round_begin, end = program_.round_end;
        try {
            run_steps(which, first, std::min(last, begin), 0);
            const int64_t rounds = first <= begin && end <= last ? call_.rounds() : 0;
            for (int64_t round = 1; round < rounds; ++round) run_steps(which, begin, end, round);
            for (int number : program_.queues[which]) {
                if (rounds > 0 && begin <= number && number < end) record(program_.steps[number]);
            }
            run_steps(which, std::max(first, end), last, 0);
        } catch (const CallStopped&) {
        } catch (...) {
            {
                std::lock_guard<std::mutex> lock(error_mutex_);
                if (!error_) error_ = std::current_exception();
            }
            stop_.store(true, std::memory_order_release);
        }
    }

    void run_steps(int which, int first, int last, int64_t round) {
        for (int number : program_.queues[which]) {
            if (number < first || number >= last) continue;
            const Step& step = program_.steps[number];
            if (round > 0 && step.kind != StepKind::round && !call_.has_round(step, round)) continue;
            for (int event : step.after) wait_for_event(event);
            delay(number);
            for (const auto& latch : latches_) {
                if (latch.second == number) wait_until_begun(latch.first);
            }
            if (step.kind == StepKind::signal && step.flag.kind == FlagKind::done) put_in_order();
            const int64_t begin = now_ns();
            begun_[number].store(1, std::memory_order_release);
            const int64_t bytes = execute(step, round);
            for (const auto& latch : latches_) {
                if (latch.first == number) wait_until_begun(latch.second);
            }
            StepTime& time = times_[number];  // of all rounds together
            time = {
                number, which, static_cast<int>(step.kind), round > 1 ? time.begin_ns : begin, now_ns(), time.bytes + bytes};
            if (round == 0) record(step);
        }
    }

    void record(const Step& step) {
        if (step.record >= 0) events_[step.record].store(1, std::memory_order_release);
    }

    int64_t execute(const Step& step, int64_t round) {
        switch (step.kind) {
            case StepKind::copy: {
                int64_t bytes = 0;
                for (const Move& move : call_.moves(step, round)) {
                    copy_spans(move.src, move.dst);
                    bytes += move.src.blocks * move.src.bytes;
                }
                if (step.queue == copy_queue && step.writes[0].rank == call_.rank) return 0;  // no communication
                return bytes;
            }
            case StepKind::signal:
                call_.arena->flag(step.flag.rank, step.flag.kind, call_.slot(), step.flag.source, call_.word_index(step.flag))
                    .store(flag_value(call_.epoch, call_.word_tag(step.flag)), std::memory_order_release);
                return 0;
            case StepKind::wait:
                wait_for_flag(call_, step.waits[0], step.queue, stop_);
                return 0;
            case StepKind::compute:
                for (const FlagWait& gate : step.waits) wait_for_flag(call_, gate, step.queue, stop_);
                for (const MatmulTask& task : call_.matmuls(step)) matmul_(task, nullptr, nullptr);
                for (const Rounding& rounding : call_.roundings(step)) round_for_wire(rounding, call_.type);
                return call_.bytes_at_peers(step);
            case StepKind::reduce: {
                const float divisor = call_.average ? static_cast<float>(call_.ranks) : 1.0f;
                for (const Sum& sum : call_.sums(step)) reduce_spans(sum.sources, sum.to, sum.type, divisor);
                return 0;
            }
            case StepKind::finish: {
                const Matrix &sum = call_.accumulators[step.index], &result = call_.results[step.index];
                if (sum.data != result.data) round_from_f32(sum.data, result.data, sum.rows * sum.cols, result.type);
                return 0;
            }
            case StepKind::return_:
            case StepKind::release:
            case StepKind::round:
                return 0;
        }
        return 0;
    }

    // Puts the rows of an all_to_all into the order that its finish asks for: before peers hear that landing memory was read.
    void put_in_order() {
        if (!call_.order || in_order_) return;
        in_order_ = true;
        order_rows(call_.rows_in_order());
    }

    // What another thread of this call does; its own waits have deadlines, so this one needs none.
    void wait_for(const std::function<bool()>& condition) {
        wait_until(condition, INT64_MAX, [&] {
            if (call_.arena) call_.arena->control(call_.rank)->heartbeat_ns.store(now_ns(), std::memory_order_relaxed);
            if (stop_.load(std::memory_order_acquire)) throw CallStopped();
        });
    }
    void wait_for_event(int event) {
        wait_for([&] { return events_[event].load(std::memory_order_acquire) != 0; });
    }

    void delay(int number) {
        if (!injection_) return;
        int64_t us = 0;
        auto fixed = injection_->delays_us.find(number);
        if (fixed != injection_->delays_us.end() && (injection_->only_rank < 0 || injection_->only_rank == call_.rank)) {
            us += fixed->second;
        }
        if (injection_->max_delay_us > 0) {
            std::mt19937_64 random(injection_->seed + call_.epoch * 1000003 + static_cast<uint64_t>(number) * 7919 +
                                   call_.rank);
            us += static_cast<int64_t>(random() % static_cast<uint64_t>(injection_->max_delay_us + 1));
        }
        const int64_t end = now_ns() + us * 1000;
        if (us > 0) wait_until([&] { return now_ns() >= end; }, INT64_MAX, [] {});
    }

    // Latches count matmuls and copies; steps have numbers.
    void find_latched_steps() {
        if (!injection_) return;
        std::vector<int> matmuls, copies;
        for (int number : program_.queues[compute_queue]) {
            if (program_.steps[number].kind == StepKind::compute) matmuls.push_back(number);
        }
        for (int number : program_.queues[copy_queue]) {
            if (program_.steps[number].kind == StepKind::copy) copies.push_back(number);
        }
        for (const auto& [matmul, copy] : injection_->latches) {
            if (matmul < static_cast<int>(matmuls.size()) && copy < static_cast<int>(copies.size())) {
                latches_.emplace_back(matmuls[matmul], copies[copy]);
            }
        }
    }
    void wait_until_begun(int number) {
        wait_for([&, number] { return begun_[number].load(std::memory_order_acquire) != 0; });
    }

    const Call& call_;
    const Program& program_;
    MatmulFn matmul_;
    std::shared_ptr<const Injection> injection_;
    std::vector<std::shared_ptr<CopyEngine::Job>> jobs_;  // in order; the copy engine has all of them
    std::unique_ptr<std::atomic<uint8_t>[]> begun_, events_;
    std::vector<StepTime> times_;
    std::atomic<bool> stop_{false};
    bool in_order_ = false;  // the rows of an all_to_all with an order are in OUTPUT
    std::mutex error_mutex_;
    std::exception_ptr error_;
    std::vector<std::pair<int, int>> latches_;  // (step number of a matmul, step number of a copy)
};

}  // namespace

std::vector<StepTime> CpuExecutor::run(const Call& call) {
    return Run(call, matmul_).go();
}

std::unique_ptr<OpenWork> CpuExecutor::start(const Call& call) {
    auto run = std::make_unique<Run>(call, matmul_);
    run->start();
    return run;
}

std::vector<StepTime> CpuExecutor::finish(OpenWork& work) {
    return static_cast<Run&>(work).finish();
}

std::vector<StepTime> CpuExecutor::release(OpenWork& work) {
    return static_cast<Run&>(work).release();
}

}  // namespace ub_overlap
