// ub_overlap._C: the control plane. Python drives sessions, settings and statistics through plain types; ops are in ops/.
// Here: the hooks, settings and statistics.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include "bindings/definitions.h"
#include "bindings/python.h"
#include "bindings/python_callback.h"
#include "core/dump_signal.h"
#include "core/registry.h"
#include "core/settings.h"

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

}  // namespace

PYBIND11_MODULE(_C, m) {
    m.doc() =
        "Runtime of ub_overlap: sessions, settings, statistics. Importing it registers the kernels of torch.ops.ub_overlap.";
    py::register_local_exception_translator([](std::exception_ptr error) {
        if (error && !set_python_error(error)) std::rethrow_exception(error);
    });

    define_arenas(m);
    define_sessions(m);

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
