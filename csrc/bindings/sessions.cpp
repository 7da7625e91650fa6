// ub_overlap._C: sessions, and the methods of their Python objects that C++ calls.
#include <ATen/ATen.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>

#include "bindings/definitions.h"
#include "bindings/python.h"
#include "bindings/python_callback.h"
#include "core/flight.h"
#include "core/forward_uses.h"
#include "core/registry.h"
#include "core/session.h"

namespace py = pybind11;

namespace ub_overlap {
namespace {

// Returns memory on the device of a call, of torch's allocator and its current stream.
std::shared_ptr<char> allocate(const Call& call, int64_t bytes) {
    const at::Device device(call.device < 0 ? at::kCPU : at::kCUDA, static_cast<at::DeviceIndex>(call.device));
    const auto tensor = std::make_shared<at::Tensor>(at::empty({bytes}, at::TensorOptions(device).dtype(at::kByte)));
    return {tensor, static_cast<char*>(tensor->data_ptr())};
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

}  // namespace

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
            hooks.tell_plain_groups = [owner](const Failure& failure) {
                try {
                    in_python([&] {
                        const auto error =
                            py::reinterpret_steal<py::object>(static_cast<PyObject*>(make_python_error(failure)));
                        if (!error) throw py::error_already_set();
                        handle_of(owner).attr("tell_plain_groups")(error);
                    });
                } catch (const std::exception&) {  // the failure itself matters more
                }
            };
            hooks.allocate = &allocate;
            session->set_hooks(std::move(hooks));
            return session;
        });
    };
}

void define_sessions(py::module_& m) {
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
        "show_wait", [](const std::string& key) { OriginGroup::get(key)->show_wait(nullptr); }, py::arg("key"),
        py::call_guard<py::gil_scoped_release>(),
        "Shows peers in the arenas of an origin group that this rank waits for a collective of c10d.");
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
}

}  // namespace ub_overlap
