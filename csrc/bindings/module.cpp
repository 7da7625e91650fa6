// ub_overlap._C: the control plane. Python drives sessions, settings and statistics through plain types; ops are in ops/.
#include <ATen/ATen.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>

#include "bindings/counted_ranges.h"
#include "bindings/definitions.h"
#include "bindings/python.h"
#include "bindings/python_callback.h"
#include "core/dump_signal.h"
#include "core/flight.h"
#include "core/float8.h"
#include "core/forward_uses.h"
#include "core/published_calls.h"
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

void set_provider(py::object provide) {
    auto held = hold(std::move(provide));
    ProgramCache::set_provider([held](const Key& key, int rank) {
        return in_python([&] {
            py::tuple contracts(key.contracts.size());
            for (size_t i = 0; i < key.contracts.size(); ++i) contracts[i] = py::bool_(key.contracts[i]);
            const py::tuple tuple =
                py::make_tuple(key.kind, key.ranks, key.chunks, contracts, key.terms, key.independent, key.shard_dim_is_last,
                               key.keep, key.striped, key.direct, key.zero_copy, key.engine_copies);
            return handle_of(held)(tuple, rank).cast<EncodedSchedule>();
        });
    });
    ProgramCache::clear();
}

// Returns memory on the device of a call, of torch's allocator and its current stream.
std::shared_ptr<char> allocate(const Call& call, int64_t bytes) {
    const at::Device device(call.device < 0 ? at::kCPU : at::kCUDA, static_cast<at::DeviceIndex>(call.device));
    const auto tensor = std::make_shared<at::Tensor>(at::empty({bytes}, at::TensorOptions(device).dtype(at::kByte)));
    return {tensor, static_cast<char*>(tensor->data_ptr())};
}

// `bind(group, device, slot_bytes, op, site)` makes a runtime.session.Session; C++ keeps it and calls its methods.
void set_bind(py::object bind) {
    auto held = hold(std::move(bind));
    python_hooks().bind = [held](const std::string& group, const std::string& device, const Call& call) {
        return in_python([&] {
            const int64_t slot_bytes = call.split_slot < 0 && !call.is_fused ? call.slot_bytes() : 0;
            py::object made = handle_of(held)(group, device, slot_bytes, call.op_name, call.site);
            auto session = made.attr("core").cast<std::shared_ptr<Session>>();
            auto owner = hold(std::move(made));
            SessionHooks hooks;
            hooks.verify = [owner](const std::string& digest, const Call& call) {
                in_python([&] { handle_of(owner).attr("verify")(digest, call.op_name, call.site); });
            };
            hooks.grow = [owner](const Call& call, bool to_largest) {
                in_python([&] {
                    const char* method = to_largest ? "grow_to_largest" : "grow";
                    handle_of(owner).attr(method)(call.slot_bytes(), call.op_name, call.site,
                                                  std::min(call.slot(), fused_slot));
                });
            };
            hooks.tune = [owner](const Tuning& tuning) {
                return in_python([&] {
                    const py::cpp_function run([&tuning](int number) {
                        const py::gil_scoped_release released;
                        return tuning.run(number);
                    });
                    return handle_of(owner)
                        .attr("tune")(tuning.op, tuning.site, tuning.bucket, tuning.work, tuning.strategies, run)
                        .cast<int>();
                });
            };
            hooks.agree_on_abandoned = [owner](const Call& call) {
                in_python([&] { handle_of(owner).attr("agree_on_abandoned")(call.op_name, call.site, call.split_slot); });
            };
            hooks.collect_garbage = [] { in_python([] { py::module_::import("gc").attr("collect")(); }); };
            hooks.most_spared = [owner] {
                return in_python([&] { return handle_of(owner).attr("most_spared_multiprocessors")().cast<int>(); });
            };
            hooks.allocate = &allocate;
            session->set_hooks(std::move(hooks));
            return session;
        });
    };
}

py::dict site_stats() {
    py::dict all;
    std::map<std::string, SiteStats> sites;
    {
        const py::gil_scoped_release released;  // it may wait for a device
        sites = Stats::get().sites();
    }
    for (const auto& [site, stats] : sites) {
        py::dict one;
        one["calls"] = stats.calls;
        one["strategy"] = stats.strategy;
        one["transport"] = stats.transport;
        one["reason"] = stats.reason;
        one["strategies"] = stats.strategies;
        one["bytes_copied"] = stats.bytes_copied;
        one["bytes_overlapped"] = static_cast<int64_t>(stats.bytes_overlapped);
        all[py::str(site)] = one;
    }
    return all;
}

py::list last_trace(const std::string& site) {
    static const char* kinds[] = {"copy", "signal", "wait", "matmul", "reduce", "finish", "return", "release", "round"};
    py::list steps;
    std::vector<StepTime> times;
    {
        const py::gil_scoped_release released;  // it may wait for a device
        times = Stats::get().trace(site);
    }
    for (const StepTime& time : times) {
        steps.append(py::make_tuple(time.step, time.queue == copy_queue ? "COPY" : "COMPUTE", kinds[time.kind], time.begin_ns,
                                    time.end_ns, time.bytes));
    }
    return steps;
}

// (number, epoch, state, op, site, strategy, shapes, enqueued, started, ended) of each call that is kept; times in ns.
py::list flight(Session& session) {
    std::vector<FlightEntry> entries;
    {
        const py::gil_scoped_release released;  // it may wait for a device
        entries = session.flight();
    }
    py::list list;
    for (const FlightEntry& e : entries) {
        list.append(py::make_tuple(e.number, e.epoch, name_of(e.state), e.text.op, e.text.site, e.text.strategy, e.text.shape,
                                   e.enqueued_ns, e.started_ns, e.ended_ns));
    }
    return list;
}

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

// Python runs signal handlers on its main thread alone; on others there is nothing to do, and no need for the GIL.
void check_signals() {
    if (gettid() != getpid() || !Py_IsInitialized()) return;
    in_python([] {
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    });
}

py::dict build_info() {
    py::dict info;
    info["version"] = UB_OVERLAP_VERSION;
    info["torch"] = UB_OVERLAP_TORCH_VERSION;
#ifdef UB_OVERLAP_CUDA
    info["cuda"] = true;
#else
    info["cuda"] = false;
#endif
    info["compiler"] = __VERSION__;
    return info;
}

// Returns the rank of a peer whose process is gone, -1 without one.
int find_gone(ShmArena& arena) {
    for (int rank = 0; rank < arena.ranks(); ++rank) {
        if (arena.control(rank) && gone(arena.control(rank))) return rank;  // null: not attached yet
    }
    return -1;
}

// Throws the failure that a peer reported, or that a peer is gone. For waits outside the executor.
void check_peers(ShmArena& arena, const std::string& op, const std::string& site) {
    if (const Failure* failure = arena.aborted()) {
        Failure seen = *failure;
        if (seen.code == FailureCode::group_aborted) set_text(seen.op, op), set_text(seen.site, site);
        throw CallFailed(seen);
    }
    if (const int rank = find_gone(arena); rank >= 0) {
        Failure failure;
        failure.code = FailureCode::peer_died;
        failure.reporter = arena.rank();
        failure.culprit = rank;
        set_text(failure.op, op);
        set_text(failure.site, site);
        set_text(failure.phase, "STORE");
        throw CallFailed(failure);
    }
}

// Raises the group's failure; returns None while there is none.
py::object abort_text(Arena& arena) {
    arena.poll();
    const Failure* failure = arena.aborted();
    if (!failure) return py::none();
    set_python_error(std::make_exception_ptr(CallFailed(*failure)));
    throw py::error_already_set();
}

void fail_group(Arena& arena, const std::string& text, const std::string& op, const std::string& site) {
    Failure failure;
    failure.code = FailureCode::peer_failed;
    failure.reporter = failure.culprit = arena.rank();
    set_text(failure.op, op);
    set_text(failure.site, site);
    set_text(failure.got, text);
    arena.abort(failure);
}

void define_testing(py::module_ m) {
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

}  // namespace

PYBIND11_MODULE(_C, m) {
    m.doc() =
        "Runtime of ub_overlap: sessions, settings, statistics. Importing it registers the kernels of torch.ops.ub_overlap.";
    py::register_local_exception_translator([](std::exception_ptr error) {
        if (error && !set_python_error(error)) std::rethrow_exception(error);
    });

    py::class_<Arena, std::shared_ptr<Arena>>(m, "Arena")
        .def_property_readonly("slot_bytes", [](const Arena& arena) { return arena.slot_bytes(0); })
        .def("bytes_of_slot", &Arena::slot_bytes, py::arg("slot"), "0 for a split slot that no call has used.")
        .def("check", &abort_text, "Raises the failure that a peer reported.")
        .def("check_site", &check_site, py::arg("slot"), py::call_guard<py::gil_scoped_release>(),
             "Raises where a peer's call in this slot is at another site.")
        .def("watch", &Arena::watch, py::call_guard<py::gil_scoped_release>(),
             "Ends waits of a device for a rank that is gone or has failed. For a watchdog.")
        .def("fail", &fail_group, py::arg("text"), py::arg("op"), py::arg("site"), py::call_guard<py::gil_scoped_release>(),
             "Tells all ranks that this one failed, unless they know of a failure.");

    py::class_<ShmArena, Arena, std::shared_ptr<ShmArena>>(m, "ShmArena")
        .def(py::init<int, int, int64_t>(), py::arg("rank"), py::arg("ranks"), py::arg("slot_bytes"),
             py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("control_address", &ShmArena::control_address)
        .def_property_readonly("data_address", &ShmArena::data_address)
        .def("attach", &ShmArena::attach, py::arg("rank"), py::arg("control_address"), py::arg("data_address"),
             py::arg("made_as") = -1, "Returns why this process cannot reach the peer's memory, '' where it can.")
        .def("grow_begin", &ShmArena::grow_begin, py::arg("slot_bytes"), py::arg("slot"),
             py::call_guard<py::gil_scoped_release>())
        .def("grow_attach", &ShmArena::grow_attach, py::arg("rank"), py::arg("data_address"))
        .def("grow_commit", &ShmArena::grow_commit)
        .def("grow_abort", &ShmArena::grow_abort)
        .def("stop_sharing", &ShmArena::stop_sharing)
        .def("check", &check_peers, py::arg("op"), py::arg("site"), "Raises where a peer has failed or its process is gone.")
        .def(
            "has_lost_peer", [](ShmArena& arena) { return arena.aborted() || find_gone(arena) >= 0; },
            "Whether `check` would raise. An error also writes the flight record.");

#ifdef UB_OVERLAP_CUDA
    py::class_<cuda::CudaArena, Arena, std::shared_ptr<cuda::CudaArena>>(m, "CudaArena")
        .def(py::init<int, std::shared_ptr<ShmArena>, const std::vector<uint64_t>&, const std::vector<uint64_t>&, int64_t>(),
             py::arg("device"), py::arg("host"), py::arg("words"), py::arg("data"), py::arg("slot_bytes"))
        .def_property_readonly("is_captured", &cuda::CudaArena::is_captured, "Whether a graph holds the slots' addresses.")
        .def("has_ended", &cuda::CudaArena::has_ended, "Whether every plain call of the group has ended on the device.")
        .def("can_free", &cuda::CudaArena::can_free, py::call_guard<py::gil_scoped_release>(),
             "Whether memory of the arena can be freed now; takes a second at most.")
        .def("replace", &cuda::CudaArena::replace, py::arg("data"), py::arg("slot_bytes"), py::arg("slot"));
    m.def("words_bytes", &cuda::words_bytes, py::arg("ranks"),
          "Bytes of symmetric memory that a rank needs besides its slots.");
#endif

    py::class_<ForwardUses>(m, "ForwardUses", "Whether backward may reuse the cached cast of a weight.")
        .def(py::init<>())
        .def("can_reuse", &ForwardUses::can_reuse, py::arg("reuse_forward"), py::arg("in_capture") = 0)
        .def("record", &ForwardUses::record, py::arg("reuse_forward"), py::arg("in_capture") = 0)
        .def_readonly("count", &ForwardUses::count);

    py::class_<Session, std::shared_ptr<Session>>(m, "Session")
        .def(py::init([](std::string group, std::string device, int rank, int ranks, std::shared_ptr<Arena> arena,
                         std::string transport, std::string reason) {
                 return std::make_shared<Session>(group, device, rank, ranks, arena, transport, reason);
             }),
             py::arg("group"), py::arg("device"), py::arg("rank"), py::arg("ranks"), py::arg("arena"), py::arg("transport"),
             py::arg("reason"))
        .def_property_readonly("group", &Session::group)
        .def_property_readonly("device", &Session::device)
        .def_property_readonly("rank", &Session::rank)
        .def_property_readonly("ranks", &Session::ranks)
        .def_property_readonly("transport", &Session::transport)
        .def_property_readonly("reason", &Session::reason)
        .def_property_readonly("epoch", &Session::epoch)
        .def_property_readonly("failure_text", &Session::failure_text)
        .def("check", &Session::check, py::call_guard<py::gil_scoped_release>(), "Raises the first error so far.")
        .def("open_plain", &Session::open_plain, py::call_guard<py::gil_scoped_release>(),
             "The split slots whose collective c10d runs now.")
        .def("set_channels", &Session::set_channels, py::arg("channels"))
        .def_property_readonly("calls", &Session::calls)
        .def("flight", &flight, "The calls that the flight recorder keeps, oldest first.")
        .def("waiting_for", &Session::waiting_for, py::call_guard<py::gil_scoped_release>(),
             "The ranks that this rank waits for now.")
        .def("abort", &Session::abort, py::arg("reason"), py::call_guard<py::gil_scoped_release>(),
             "Ends the session's waits here and on its peers. Idempotent, from any thread.")
        .def("close", &Session::close, py::call_guard<py::gil_scoped_release>());

    m.def(
        "install",
        [](py::object provide, py::object bind, py::object fallback, py::object make_error, py::object on_error,
           py::object warn) {
            set_provider(std::move(provide));
            set_bind(std::move(bind));
            python_hooks().fallback = hold(std::move(fallback));
            python_hooks().make_error = hold(std::move(make_error));
            python_hooks().on_error = hold(std::move(on_error));
            python_hooks().warn = hold(std::move(warn));
            settings().check_signals.store(&check_signals);
        },
        py::arg("provide"), py::arg("bind"), py::arg("fallback"), py::arg("make_error"), py::arg("on_error"), py::arg("warn"));
    m.def("set_provider", &set_provider, py::arg("provide"), "Replaces the schedule provider and forgets its schedules.");
    m.def("set_step_timeout", [](double seconds) { settings().step_timeout_ns.store(static_cast<int64_t>(seconds * 1e9)); });
    m.def(
        "set_replay", [](bool on) { settings().replay.store(on); }, "Whether repeated calls are recorded and replayed (CUDA).");
    m.def(
        "set_flight_calls", [](int64_t calls) { settings().flight_calls.store(calls); },
        "Calls that the flight recorder keeps of each group bound from now on; 0: none.");
    m.def("catch_dump_signal", &DumpSignal::install, "Takes SIGUSR1 unless the process handles it. Whether it is taken.");
    m.def("release_dump_signal", &DumpSignal::uninstall);
    m.def("take_dump_signal", &DumpSignal::take, "Whether the signal came since the last call.");
    m.def("set_trace", [](bool on) { settings().trace.store(on); }, "Keep the step times of the last call of every site.");
    m.def(
        "set_nccl_multiprocessors", [](int count) { settings().nccl_multiprocessors.store(count); },
        "Multiprocessors that matmuls leave to a split collective of NCCL.");
    m.def("set_nvtx", [](bool on) { settings().nvtx.store(on); }, "NVTX ranges around calls, where torch has NVTX.");
    m.def("site_stats", &site_stats);
    m.def("clear_stats", [] { Stats::get().clear(); });
    m.def("last_trace", &last_trace, py::arg("site"), "(step, queue, kind, begin_ns, end_ns, bytes) for each step.");
    m.def("sessions", [] { return Registry::get().all(); });
    m.def(
        "set_inherited_groups",
        [](const std::vector<std::string>& names) {
            std::vector<const void*> owners;
            for (const std::string& name : names) owners.push_back(c10d::resolve_process_group(name).release());
            Registry::get().set_inherited(std::move(owners));
        },
        py::arg("names"), "In a forked child: refuse these groups, which are its parent's.");
    m.def("generation", [] { return Registry::get().generation(); });
    m.def(
        "close", [](const std::string& group, const std::string& device) { Registry::get().drop(group, device); },
        py::call_guard<py::gil_scoped_release>());
    m.def(
        "has_destroyed_groups", [] { return Registry::get().has_destroyed(); }, py::call_guard<py::gil_scoped_release>(),
        "Whether a session's group was destroyed.");
    m.def(
        "close_destroyed_groups", [] { Registry::get().close_destroyed(); }, py::call_guard<py::gil_scoped_release>(),
        "Closes the sessions of destroyed groups; waits for their running calls.");
    m.def("close_all", [] { Registry::get().clear(); }, py::call_guard<py::gil_scoped_release>());
    m.attr("slots") = slots;              // runtime/schedule/steps.py has the same number
    m.attr("split_slots") = split_slots;  // likewise
    m.attr("fused_slots") = fused_slots;  // likewise
    m.def("build_info", &build_info);
    define_matmul_algorithms(m);
    define_plain_hooks(m);
    define_point_to_point(m);
    py::module_ testing = m.def_submodule("testing", "Hooks for tests.");
    define_testing(testing), define_kernel_tests(testing);
}

}  // namespace ub_overlap
