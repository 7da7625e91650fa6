// Maps a schedule to two streams:
//
//     begin    first kernel on COMPUTE: takes the group lock, counts the epoch, and waits for all slots that the call needs
//              (DONE of earlier calls). So COPY has no kernel: a push never waits for a multiprocessor that a matmul holds.
//              Waiting here is safe: these waits belong to past calls, whose steps have all been issued on all ranks.
//     push     peer copy on COPY, then a stream write to the peer's flag, which has a system-wide barrier in front
//     store    a direct call's matmul writes the peers' slots itself. Its stores are performed when it ends. The signal kernel
//              behind it has a fence and a release, both system-wide, so a peer that acquires READY sees them
//     wait     a kernel of one warp on COMPUTE, for all adjacent waits at once
//     end      last kernel on COMPUTE: sends DONE, fills the outputs with NaN if a wait failed, releases the group lock
//
// A split collective is `begin` and its pushes, then, in another op, the rest. Between them COMPUTE does not wait for COPY. It
// has the lock of its slot instead of the group's, so other calls of the group run meanwhile. A zero-copy gather has its `end`
// in a third op, release. Its finish ends with the same kernel, which then only fills the result with NaN if a wait failed.
//
// Events join the streams. COMPUTE ends after COPY, so the caller's stream alone tells when inputs may be freed.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "core/executor.h"
#include "core/settings.h"
#include "cuda/arena.h"
#include "cuda/device.h"
#include "cuda/kernels.h"
#include "cuda/trace.h"

namespace ub_overlap::cuda {

// One call whose steps are being issued.
class Run final : public OpenWork {
  public:
    // `compute`: the stream of COMPUTE steps. While the call is being recorded it is not the caller's stream.
    Run(const Call& call, MatmulFn matmul, Events& events, cudaStream_t copies, cudaStream_t compute, int64_t timeout_ns)
        : call_(call),
          program_(*call.program),
          matmul_(matmul),
          events_(events),
          arena_(static_cast<CudaArena*>(call.arena)),
          compute_(compute),
          copies_(copies),
          timeout_ns_(timeout_ns),
          start_(static_cast<size_t>(program_.events)) {}

    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;
    // Of a collective that is never finished: its pushes may still read the input, which is freed next.
    ~Run() override {
        if (unfinished_) join_copies(), cudaGetLastError();
    }

    std::vector<StepTime> issue_all() {
        issue_first(steps());
        return issue_last(steps(), steps());
    }
    // The ops of a split collective.
    void start() {
        issue_first(program_.finish_begin);
        unfinished_ = true;
    }
    // Lets the destructor leave the copy stream alone.
    void leave_pushes() { unfinished_ = false; }
    std::vector<StepTime> finish(cudaStream_t compute) {
        compute_ = compute;
        unfinished_ = false;
        return issue_last(program_.finish_begin, program_.release_begin);
    }
    std::vector<StepTime> release(cudaStream_t compute) {
        compute_ = compute;
        return issue_last(program_.release_begin, steps());
    }

    // Returns whether all steps can be captured on another stream than the current one.
    bool is_recordable() const { return recordable_; }

  private:
    int steps() const { return static_cast<int>(program_.steps.size()); }

    // Issues the call's first kernel and its steps before `end`.
    void issue_first(int end) {
        if (settings().trace.load(std::memory_order_relaxed)) trace_ = std::make_shared<Trace>(program_.steps.size());
        try {
            if (trace_) trace_->first_kernel_begins(compute_);
            if (arena_) begin();
            if (trace_) trace_->first_kernel_ends(compute_);
            issue_steps(0, end);
        } catch (...) {
            clean_up();
            throw;
        }
    }
    // Issues the steps from `first` to `end` and the last kernel of the op. Returns the times of the steps so far.
    std::vector<StepTime> issue_last(int first, int end) {
        const bool final = end == steps();
        try {
            issue_steps(first, end);
            flush_copies();
            put_in_order();
            if (arena_) this->end(final);
            if (trace_ && final) {
                Stats::get().defer(call_.own_site, [trace = trace_, times = times_] { return trace->read(times); });
            }
        } catch (...) {
            clean_up();
            throw;
        }
        return times_;
    }

    void begin() {
        WaitList free;
        for (const Step& step : program_.steps) {
            for (const FlagWait& wait : step.waits) {
                if (wait.back == 0) continue;
                if (free.count == max_words) throw too_many("peers");
                free.words[free.count++] = word_of(wait);
            }
        }
        launch_begin(arena_->group(), call_.slot(), call_.tag, free, timeout_ns_, compute_);
        begun_ = true;
    }

    // Ends a call that could not be issued completely. COMPUTE still ends after COPY, as the caller frees its tensors in the
    // order of its own stream, and the group lock is released. The call's own error is being thrown, so errors here are
    // ignored. Both parts are tried.
    void clean_up() noexcept {
        join_copies();
        try {
            if (begun_) launch_end(arena_->group(), call_.slot(), SignalList{}, PoisonList{}, true, compute_);
        } catch (const std::exception&) {
        }
        cudaGetLastError();  // clears an error that is not sticky, so that no later check reports it
    }

    void join_copies() noexcept {
        if (copying_ && cudaEventRecord(copied_, copies_) == cudaSuccess) cudaStreamWaitEvent(compute_, copied_, 0);
    }

    // Makes COPY begin after the call's first kernel, which waits until the peers have left the slot.
    void begin_copies() {
        if (copying_) return;
        copied_ = events_.at(start_ + 1);  // created before any copy is issued: clean_up needs no new event
        const cudaEvent_t begun = events_.at(start_);
        check(cudaEventRecord(begun, compute_), "record an event");
        check(cudaStreamWaitEvent(copies_, begun, 0), "wait for an event");
        copying_ = true;
    }

    // Issues the steps from `first` to `end`. Those of an all_to_all's second round are issued for each further round.
    void issue_steps(int first, int end) {
        const int begin = program_.round_begin, behind = program_.round_end;
        for (int number = first; number < std::min(end, begin); ++number) issue(number, 0);
        const int64_t rounds = first <= begin && behind <= end ? call_.rounds() : 0;
        for (int64_t round = 1; round < rounds; ++round) {
            for (int number = begin; number < behind; ++number) {
                const Step& step = program_.steps[number];
                if (step.kind == StepKind::round || call_.has_round(step, round)) issue(number, round);
            }
        }
        for (int number = begin; rounds > 0 && number < behind; ++number) record(program_.steps[number]);
        for (int number = std::max(first, behind); number < end; ++number) issue(number, 0);
    }

    void issue(int number, int64_t round) {
        const Step& step = program_.steps[number];
        const bool copies = step.queue == copy_queue;
        const cudaStream_t stream = copies ? copies_ : compute_;
        const bool waits = step.kind == StepKind::wait, signals = step.kind == StepKind::signal;
        if (signals && step.flag.kind == FlagKind::done) put_in_order();
        if (!copies && !(waits && step.after.empty())) flush_waits();
        if (!copies && !signals) flush_signals();
        if (!copies && !(step.kind == StepKind::copy && step.after.empty())) flush_copies();
        if (copies) begin_copies();
        for (int event : step.after) {
            check(cudaStreamWaitEvent(stream, events_.at(static_cast<size_t>(event)), 0), "wait for an event");
        }
        const bool in_first_kernel = waits && step.waits[0].back != 0;  // done by the call's first kernel
        if (trace_ && !in_first_kernel) trace_->step_begins(number, stream);
        const int64_t bytes = in_first_kernel ? 0 : execute(step, stream, round);
        times_.push_back(StepTime{number, step.queue, static_cast<int>(step.kind), 0, 0, bytes});
        if (!copies && (trace_ || step.record >= 0)) flush_waits(), flush_signals(), flush_copies();
        if (trace_ && !in_first_kernel) trace_->step_ends(number, stream);
        if (round == 0) record(step);
    }

    void record(const Step& step) {
        if (step.record < 0) return;
        const cudaStream_t stream = step.queue == copy_queue ? copies_ : compute_;
        check(cudaEventRecord(events_.at(static_cast<size_t>(step.record)), stream), "record an event");
    }

    int64_t execute(const Step& step, cudaStream_t stream, int64_t round) {
        switch (step.kind) {
            case StepKind::copy:
                return copy(step, stream, round);
            case StepKind::signal: {
                const bool done = step.flag.kind == FlagKind::done;
                const SignalWord word{place_of(step.flag), static_cast<uint16_t>(step.flag.rank), static_cast<uint16_t>(done)};
                if (step.queue == copy_queue) {
                    if (done) throw done_on_copy_queue();
                    write_word(arena_->flag_word(word.rank, word.place), ready_word(call_.word_tag(step.flag)), stream);
                } else {
                    if (signals_.count == max_words) flush_signals();
                    signals_.words[signals_.count++] = word;
                }
                return 0;
            }
            case StepKind::wait: {
                if (step.queue == copy_queue) {
                    flush_signals();  // the peer may wait for them before it signals this flag
                    WaitList single;
                    single.words[single.count++] = word_of(step.waits[0]);
                    launch_wait(arena_->group(), call_.slot(), single, timeout_ns_, stream);
                } else {
                    if (waits_.count == max_words) flush_waits();
                    waits_.words[waits_.count++] = word_of(step.waits[0]);
                }
                return 0;
            }
            case StepKind::compute:
                for (const FlagWait& gate : step.waits) {
                    if (gate.back != 0) continue;
                    if (waits_.count == max_words) flush_waits();
                    waits_.words[waits_.count++] = word_of(gate);
                }
                flush_waits();
                for (const MatmulTask& task : call_.matmuls(step)) {
                    recordable_ = matmul_(task, compute_, call_.stream) && recordable_;
                }
                for (const Rounding& rounding : call_.roundings(step)) {
                    launch_round_for_wire(rounding, call_.type, compute_);
                }
                return call_.bytes_at_peers(step);
            case StepKind::reduce: {
                if (step.reads.size() > max_ranks) throw too_many("sources");
                const float divisor = call_.average ? static_cast<float>(call_.ranks) : 1.0f;
                for (const Sum& sum : call_.sums(step)) launch_reduce(sum.sources, sum.to, sum.type, divisor, stream);
                return 0;
            }
            case StepKind::finish: {
                const Matrix &sum = call_.accumulators[step.index], &result = call_.results[step.index];
                if (sum.data == result.data) return 0;
                const int64_t count = sum.rows * sum.cols;
                const Span from{sum.data, 1, count * size_of(sum.type), count * size_of(sum.type)};
                const Span to{result.data, 1, count * size_of(result.type), count * size_of(result.type)};
                launch_reduce({Source{from, {}, sum.type}}, to, result.type, 1.0f, stream);
                return 0;
            }
            case StepKind::return_:
            case StepKind::release:
            case StepKind::round:
                return 0;
        }
        return 0;
    }

    int64_t copy(const Step& step, cudaStream_t stream, int64_t round) {
        int64_t bytes = 0;
        size_t part = 0;
        const std::vector<Move> moves = call_.moves(step, round);
        if (moves_.size() < moves.size()) moves_.resize(moves.size());
        for (const Move& move : moves) {
            if (step.queue == compute_queue) {
                defer_copy(moves_[part++], move);
            } else {
                bytes += push(move.src, move.dst, stream);
            }
        }
        if (step.writes[0].rank == call_.rank) return 0;  // a local copy by the driver is no communication
        return bytes;
    }

    int64_t push(const Span& src, const Span& dst, cudaStream_t stream) {
        const int64_t bytes = src.blocks * src.bytes;
        if (bytes == 0 || src.data == dst.data) return 0;  // the input of a gather at its place in landing memory
        const auto kind = cudaMemcpyDeviceToDevice;
        const int64_t max_stride = INT32_MAX;
        if (src.blocks == 1 || (src.stride == src.bytes && dst.stride == dst.bytes)) {
            check(cudaMemcpyAsync(dst.data, src.data, static_cast<size_t>(bytes), kind, stream), "push to a peer");
        } else if (src.stride < max_stride && dst.stride < max_stride) {
            check(cudaMemcpy2DAsync(dst.data, static_cast<size_t>(dst.stride), src.data, static_cast<size_t>(src.stride),
                                    static_cast<size_t>(src.bytes), static_cast<size_t>(src.blocks), kind, stream),
                  "push to a peer");
        } else {
            for (int64_t block = 0; block < src.blocks; ++block) {
                check(cudaMemcpyAsync(dst.data + block * dst.stride, src.data + block * src.stride,
                                      static_cast<size_t>(src.bytes), kind, stream),
                      "push to a peer");
            }
        }
        return bytes;
    }

    // Launches the last kernel of an op. Only the `final` one ends the call. The outputs of a zero-copy gather were returned
    // before that, so their readers may have run.
    void end(bool final) {
        flush_waits();
        PoisonList outputs;
        const auto add = [&](char* data, int64_t bytes) {
            if (!data || bytes == 0) return;
            if (outputs.count == 16) {
                launch_end(arena_->group(), call_.slot(), SignalList{}, outputs, false, compute_);
                outputs.count = 0;
            }
            outputs.parts[outputs.count].data = data;
            outputs.parts[outputs.count++].bytes = bytes;
        };
        const bool was_returned = final && call_.key.zero_copy;
        if (!was_returned) {
            add(call_.output, call_.output_bytes());
            for (const Call& tensor : call_.coalesced) add(tensor.output, tensor.output_bytes());
        }
        if (call_.output_scales) {
            const int64_t rows = call_.collective == Collective::scatter ? call_.rows(call_.rank) : call_.total_rows();
            add(call_.output_scales, call_.outer * rows * call_.scales_a_row * static_cast<int64_t>(sizeof(float)));
        }
        for (const Matrix& result : call_.results) add(result.data, result.rows * result.cols * size_of(result.type));
        launch_end(arena_->group(), call_.slot(), signals_, outputs, final, compute_);
        if (final) begun_ = false;  // from here on another call may hold the lock
        signals_.count = 0;
    }

    // Merges local copies of adjacent pieces into one launch.
    void defer_copy(Move& pending, const Move& next) {
        const Span &src = next.src, &dst = next.dst;
        if (src.blocks * src.bytes == 0 || src.data == dst.data) return;  // an input at its place in the output
        const bool runs = src.blocks == 1 && dst.blocks == 1 && pending.src.data;
        if (runs && pending.src.data + pending.src.bytes == src.data && pending.dst.data + pending.dst.bytes == dst.data) {
            pending.src.bytes = pending.dst.bytes = pending.src.bytes + src.bytes;
            return;
        }
        flush_copy(pending);
        pending = next;
        if (src.blocks != 1 || dst.blocks != 1) flush_copy(pending);
    }
    void flush_copy(Move& pending) {
        if (pending.src.data) launch_copy(pending.src, pending.dst, compute_);
        pending = Move{};
    }
    void flush_copies() {
        for (Move& pending : moves_) flush_copy(pending);
    }
    // Puts the rows of an all_to_all into the order that its finish asks for: before peers hear that landing memory was read.
    void put_in_order() {
        if (!call_.order || in_order_) return;
        in_order_ = true;
        flush_waits(), flush_copies();
        launch_order(call_.rows_in_order(), compute_);
    }
    void flush_waits() {
        if (waits_.count) launch_wait(arena_->group(), call_.slot(), waits_, timeout_ns_, compute_);
        waits_.count = 0;
    }
    void flush_signals() {
        if (signals_.count) launch_signal(arena_->group(), call_.slot(), signals_, compute_);
        signals_.count = 0;
    }

    uint32_t place_of(const FlagId& flag) const {
        return static_cast<uint32_t>(flag_place(flag.kind, call_.slot(), flag.source, call_.word_index(flag), call_.ranks));
    }
    WaitWord word_of(const FlagWait& wait) const {
        // DONE of the call that used the slot before lies in the slot's own words.
        return {place_of(wait.flag),
                static_cast<uint16_t>(wait.flag.source),
                static_cast<uint16_t>(wait.flag.index),
                static_cast<uint8_t>(wait.flag.kind),
                static_cast<uint8_t>(wait.back != 0),
                static_cast<uint8_t>(wait.back == 0 && call_.is_all_to_all()),
                call_.word_tag(wait.flag) ^ call_.tag};
    }
    // A DONE word holds the epoch, which a stream write cannot know.
    NamedError done_on_copy_queue() const {
        return NamedError("UbOverlapError", {{"what", "a schedule signals DONE on the copy queue"},
                                             {"where", call_.op_name + " at site '" + call_.site + "'"},
                                             {"expected", "DONE on the compute queue"}});
    }
    NamedError too_many(const char* what) const {
        return NamedError("UbOverlapError", {{"what", std::string("too many ") + what + " for one call"},
                                             {"where", call_.op_name + " at site '" + call_.site + "'"},
                                             {"expected", "at most " + std::to_string(max_words)}});
    }

    const Call& call_;
    const Program& program_;
    MatmulFn matmul_;
    Events& events_;
    CudaArena* arena_;
    cudaStream_t compute_;
    const cudaStream_t copies_;
    const int64_t timeout_ns_;
    const size_t start_;  // number of the first event beyond the schedule's
    std::vector<StepTime> times_;
    WaitList waits_;      // on COMPUTE, not launched yet
    SignalList signals_;  // on COMPUTE, not launched yet
    // Local copies that are not launched yet, of rows, of scales, and of further coalesced tensors; null data: none.
    std::vector<Move> moves_;
    std::shared_ptr<Trace> trace_;
    cudaEvent_t copied_ = nullptr;
    bool begun_ = false, copying_ = false, recordable_ = true, unfinished_ = false;
    bool in_order_ = false;  // the rows of an all_to_all with an order are in OUTPUT
};

}  // namespace ub_overlap::cuda
