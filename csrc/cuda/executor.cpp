// Runs, records and replays calls on CUDA, and orders those of a group. run.h issues the steps of one call.
#include "cuda/executor.h"

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>

#include "core/settings.h"
#include "cuda/arena.h"
#include "cuda/device.h"
#include "cuda/fused_executor.h"
#include "cuda/replay.h"
#include "cuda/run.h"

namespace ub_overlap {
namespace {

using namespace cuda;

// Records the launches of a call as a graph. On any failure sets `unrecordable`; nothing has run then.
void record(RecordedCall& recorded, const Call& call, MatmulFn matmul, Device& device, int64_t timeout_ns) {
    cudaGraph_t graph = nullptr;
    if (cudaStreamBeginCapture(device.recording_stream(), cudaStreamCaptureModeThreadLocal) != cudaSuccess) {
        cudaGetLastError();
        recorded.unrecordable = true;
        return;
    }
    try {
        Run run(call, matmul, device.eager.events, device.eager.copies, device.recording_stream(), timeout_ns);
        recorded.steps = run.issue_all();
        recorded.unrecordable = !run.is_recordable();
    } catch (const std::exception&) {
        recorded.unrecordable = true;
    }
    const cudaError_t ended = cudaStreamEndCapture(device.recording_stream(), &graph);
    recorded.unrecordable =
        recorded.unrecordable || ended != cudaSuccess || cudaGraphInstantiate(&recorded.graph, graph, 0) != cudaSuccess;
    if (graph) cudaGraphDestroy(graph);
    if (!recorded.unrecordable) return;
    recorded.graph = nullptr;
    cudaGetLastError();
}

// Issues a call outside of torch's graphs. From the third call of the same fingerprint on, when its plans and modules are
// loaded, it is launched as a graph of ours, unless its steps are traced.
std::vector<StepTime> issue(const Call& call, MatmulFn matmul, Device& device, CudaArena* arena, int64_t timeout_ns) {
    constexpr int record_at_call = 3;
    const auto stream = static_cast<cudaStream_t>(call.stream);
    const bool unrecorded =
        !arena || !settings().replay.load(std::memory_order_relaxed) || settings().trace.load(std::memory_order_relaxed);
    RecordedCall* recorded = unrecorded ? nullptr : &arena->recorded_calls().count(make_fingerprint(call, timeout_ns));
    if (recorded && !recorded->unrecordable && !recorded->graph && recorded->calls >= record_at_call) {
        record(*recorded, call, matmul, device, timeout_ns);
    }
    if (recorded && recorded->graph) {
        check(cudaGraphLaunch(recorded->graph, stream), "launch a recorded call");
        return recorded->steps;
    }
    Run run(call, matmul, device.eager.events, device.eager.copies, stream, timeout_ns);
    std::vector<StepTime> steps = run.issue_all();
    if (recorded) recorded->unrecordable = recorded->unrecordable || !run.is_recordable();
    return steps;
}

// The place of a call while its launches are issued: its device is current, and no other thread issues to it.
struct CallScope {
    explicit CallScope(const Call& call)
        : scope(call.device),
          arena(static_cast<CudaArena*>(call.arena)),
          device(device_of(call.device)),
          lock(device.mutex),
          stream(static_cast<cudaStream_t>(call.stream)),
          capture(capture_of(stream)),
          timeout_ns(settings().step_timeout_ns.load(std::memory_order_relaxed)) {}

    // Begins a call: checks its device, and notes it in the arena.
    void begin(const Call& call) {
        if (!arena) return;
        if (arena->device() != call.device) {
            throw NamedError("OptionError", {{"what", "the tensors are on another device than the group's arena"},
                                             {"where", call.op_name + " at site '" + call.site + "'"},
                                             {"got", "cuda:" + std::to_string(call.device)},
                                             {"expected", "cuda:" + std::to_string(arena->device())},
                                             {"fix", "call torch.cuda.set_device before the first op, and use one device"}});
        }
        arena->record(call);
        if (capture != 0) arena->set_captured();
    }
    Lane& lane() { return capture != 0 ? device.lane_of_capture(capture) : device.eager; }

    const DeviceScope scope;
    CudaArena* const arena;
    Device& device;
    const std::lock_guard<std::mutex> lock;
    const cudaStream_t stream;
    const unsigned long long capture;  // the capture of the caller's stream; 0: none
    const int64_t timeout_ns;
};

// Issues eager work of a group behind its last one, which may be on another stream.
template <typename Body>
auto issue_in_order(CudaArena* arena, cudaStream_t stream, Body body) {
    if (arena && arena->has_called && arena->last_stream != stream) {
        check(cudaStreamWaitEvent(stream, arena->last_call_end, 0), "order two calls of a group");
    }
    auto result = body();
    if (arena) {
        check(cudaEventRecord(arena->last_call_end, stream), "record an event");
        arena->last_stream = stream;
        arena->has_called = true;
    }
    return result;
}

// A split collective between its ops.
struct SplitWork final : OpenWork {
    SplitWork() = default;
    SplitWork(const SplitWork&) = delete;
    SplitWork& operator=(const SplitWork&) = delete;
    // Captured pushes do not run here, and their streams may be part of another capture by now.
    ~SplitWork() override {
        if (run && started != 0) run->leave_pushes();
    }
    uint64_t capture() const override { return started; }
    unsigned long long started = 0;  // the capture that the start is part of; 0: none
    std::unique_ptr<Run> run;
    const Call* call = nullptr;
};

// Issues the finish or the release of a split collective, on the stream that its call has now.
std::vector<StepTime> issue_part(SplitWork& work, std::vector<StepTime> (Run::*part)(cudaStream_t)) {
    const Call& call = *work.call;
    const CallScope at(call);
    if (at.capture != work.started) {
        const auto name = [](unsigned long long id) { return id == 0 ? "eagerly" : "in graph " + std::to_string(id); };
        throw NamedError("OptionError",
                         {{"what", "the ops of a split collective are in different CUDA graphs"},
                          {"where", call.op_name + " at site '" + call.site + "'"},
                          {"got", std::string("started ") + name(work.started) + ", continued " + name(at.capture)},
                          {"expected", "all in one capture, or all eagerly"},
                          {"fix", "capture start_collective, finish_collective and the release together"}});
    }
    if (work.started != 0) return (work.run.get()->*part)(at.stream);
    return issue_in_order(at.arena, at.stream, [&] { return (work.run.get()->*part)(at.stream); });
}

}  // namespace

std::vector<StepTime> CudaExecutor::run(const Call& call) {
    CallScope at(call);
    at.begin(call);
    if (call.is_fused) {
        const auto issue_fused = [&] {
            issue_fused_collective(call, *at.arena, at.timeout_ns);
            return std::vector<StepTime>();
        };
        return at.capture != 0 ? issue_fused() : issue_in_order(at.arena, at.stream, issue_fused);
    }
    if (at.capture != 0) {
        Lane& lane = at.lane();
        return Run(call, matmul_, lane.events, lane.copies, at.stream, at.timeout_ns).issue_all();
    }
    return issue_in_order(at.arena, at.stream, [&] { return issue(call, matmul_, at.device, at.arena, at.timeout_ns); });
}

std::unique_ptr<OpenWork> CudaExecutor::start(const Call& call) {
    CallScope at(call);
    at.begin(call);
    auto work = std::make_unique<SplitWork>();
    work->call = &call;
    work->started = at.capture;
    Lane& lane = at.lane();
    Events& events = at.arena ? at.arena->split_events(call.split_slot) : lane.events;
    work->run = std::make_unique<Run>(call, matmul_, events, lane.copies, at.stream, at.timeout_ns);
    if (work->started != 0) {
        work->run->start();
    } else {
        issue_in_order(at.arena, at.stream, [&] { return work->run->start(), true; });
    }
    return work;
}

std::vector<StepTime> CudaExecutor::finish(OpenWork& work) {
    return issue_part(static_cast<SplitWork&>(work), &Run::finish);
}

std::vector<StepTime> CudaExecutor::release(OpenWork& work) {
    return issue_part(static_cast<SplitWork&>(work), &Run::release);
}

uint64_t CudaExecutor::capture_of(const Call& call) const {
    const DeviceScope scope(call.device);
    return cuda::capture_of(static_cast<cudaStream_t>(call.stream));
}

}  // namespace ub_overlap
