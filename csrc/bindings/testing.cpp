// ub_overlap._C.testing: delays, pretended hosts, counts and times. For tests and benchmarks.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "bindings/counted_ranges.h"
#include "bindings/definitions.h"
#include "bindings/python.h"
#include "core/flight.h"
#include "core/float8.h"
#include "core/registry.h"
#include "core/settings.h"
#include "core/wait_until.h"
#include "cpu/shm_arena.h"
#ifdef UB_OVERLAP_CUDA
#include "cuda/arena.h"
#endif

namespace py = pybind11;

namespace ub_overlap {
namespace {

// Host time of recording one call, in ns: the least of several batches.
double time_flight_recorder(int64_t calls, int64_t sites) {
    FlightRecorder recorder(256);
    std::vector<CallText> texts;
    for (int64_t i = 0; i < sites; ++i) {
        texts.push_back({"all_gather_matmul", "9f2c4b7a11223344/forward." + std::to_string(i), "pipelined:chunks=4",
                         "shard[2048, 8192] bfloat16; rhs[8192, 3584] bfloat16; outer=1; " + std::to_string(i)});
    }
    double least = 1e18;
    for (int batch = 0; batch < 10; ++batch) {
        const int64_t begin = now_ns();
        for (int64_t i = 0; i < calls; ++i) {
            const auto which = static_cast<size_t>(i % sites);
            const CallText& text = texts[which];
            const uint64_t number = recorder.begin(static_cast<uint64_t>(i), static_cast<uint32_t>(which * 2654435761u + 1),
                                                   {text.op, text.site, text.strategy, text.shape});
            recorder.set_state(number, CallState::started);
            recorder.set_state(number, CallState::finished);
        }
        least = std::min(least, static_cast<double>(now_ns() - begin) / static_cast<double>(calls));
    }
    return least;
}

}  // namespace

void define_testing(py::module_& m) {
    struct State {  // only touched with the GIL held
        Injection injection;
        std::string host_id;
    };
    static auto* state = new State;
    static const auto publish = [] {
        const Injection& i = state->injection;
        const bool any = !i.latches.empty() || i.max_delay_us > 0 || !i.delays_us.empty();
        Injections::set(any ? std::make_shared<const Injection>(i) : nullptr);
    };
    m.def(
        "set_latches",
        [](std::vector<std::pair<int, int>> latches) {
            state->injection.latches = std::move(latches);
            publish();
        },
        py::arg("latches"), "(i, j): matmul i of a call and its copy j must run at the same time.");
    m.def(
        "set_random_delay",
        [](int64_t max_us, uint64_t seed) {
            state->injection.max_delay_us = max_us;
            state->injection.seed = seed;
            publish();
        },
        py::arg("max_us"), py::arg("seed") = 0, "Delay every step by up to max_us microseconds; 0 turns it off.");
    m.def(
        "set_step_delays",
        [](std::map<int, int64_t> delays_us, int only_rank) {
            state->injection.delays_us = std::move(delays_us);
            state->injection.only_rank = only_rank;
            publish();
        },
        py::arg("delays_us"), py::arg("only_rank") = -1, "Delay step n of every schedule by so many microseconds.");
    m.def(
        "set_host_id", [](std::string id) { state->host_id = std::move(id); },
        "Pretend to be on this host; empty: the true one.");
    m.def("host_id", [] { return state->host_id; });
    m.def("set_interrupted_allocation", &set_interrupted_allocation, py::arg("bytes"),
          "Allocations of more bytes fail as if a signal came, as under a timer before Linux 6.11; -1: none.");
    m.def(
        "count_ranges", [](bool on) { CountedRanges::get().listen(on); }, py::arg("on"),
        "Count NVTX ranges in the place of torch's, which only CUDA builds have.");
    m.def("ranges", [] { return CountedRanges::get().seen(); }, "The name of each push since then, '' for each pop.");
    m.def("reset", [] {
        state->injection = {};
        state->host_id.clear();
        set_interrupted_allocation(-1);
        CountedRanges::get().listen(false);
        publish();
    });
#ifdef UB_OVERLAP_CUDA
    m.def(
        "hold_group_lock", [](cuda::CudaArena& arena) { arena.hold_group_lock(); },
        "Take the group's lock on the device, as a call that never ends.");
#endif
    m.attr("float8_numbers") = py::make_tuple(least_scale, e4m3_max, e5m2_max);
    m.def("time_flight_recorder", &time_flight_recorder, py::arg("calls"), py::arg("sites"),
          "Nanoseconds of host time to record one call.");
    m.def("provider_calls", &ProgramCache::provider_calls, "How often the schedule provider has been asked.");
    m.def("clear_programs", &ProgramCache::clear);
    m.def("set_mirrored", &ProgramCache::set_mirrored, py::arg("on"),
          "Accept schedules that signal in the name of other ranks (benchmarks/mirror), and forget all schedules.");
}

}  // namespace ub_overlap
