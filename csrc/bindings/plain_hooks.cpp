// What Python does for split collectives that c10d runs: waits on the CPU, and names failures
// (runtime/ops/plain_collective.py).
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <optional>

#include "bindings/carveout.h"
#include "bindings/definitions.h"
#include "bindings/python.h"
#include "bindings/python_callback.h"

namespace py = pybind11;

namespace ub_overlap {
namespace {

void install_plain(py::object wait_on_host, py::object fail_plain) {
    auto wait = hold(std::move(wait_on_host)), fail = hold(std::move(fail_plain));
    python_hooks().wait_on_host = [wait](const std::shared_ptr<HostWork>& work, const std::string& op, const std::string& site,
                                         const std::string& group) {
        in_python([&] { handle_of(wait)(work, op, site, group); });
    };
    python_hooks().fail_plain = [fail](const std::string& op, const std::string& site, const std::string& group,
                                       const std::string& device, const std::string& text) {
        in_python([&] { handle_of(fail)(op, site, group, device, text); });
    };
}

}  // namespace

void define_plain_hooks(py::module_& m) {
    py::class_<HostWork, std::shared_ptr<HostWork>>(m, "HostWork", "A plain collective on the CPU between start and finish.")
        .def(
            "wait",
            [](HostWork& work, std::optional<std::chrono::milliseconds> timeout) {
                const py::gil_scoped_release released;
                work.wait(timeout ? timeout->count() : -1);
            },
            py::arg("timeout") = py::none(), "Waits for its end. RuntimeError after the timeout, or where it failed.")
        .def(
            "is_completed",
            [](HostWork& work) {
                const py::gil_scoped_release released;
                return work.is_completed();
            },
            "Whether it has ended.");
    py::class_<SparedMultiprocessors>(m, "SparedMultiprocessors", "Multiprocessors that matmuls leave to one collective.")
        .def(py::init<>())
        .def("begin", &SparedMultiprocessors::begin, py::arg("count"))
        .def("end", &SparedMultiprocessors::end);
    m.def("install_plain", &install_plain, py::arg("wait_on_host"), py::arg("fail_plain"));
}

}  // namespace ub_overlap
