// ub_overlap._C: memory that ranks share, and the failures that their processes report in it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/definitions.h"
#include "bindings/python.h"
#include "bindings/python_callback.h"
#include "core/published_calls.h"
#include "cpu/shm_arena.h"
#ifdef UB_OVERLAP_CUDA
#include "cuda/arena.h"
#endif

namespace py = pybind11;

namespace ub_overlap {
namespace {

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
        throw CallFailed(arena.in_origin(failure));
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

void fail_group(Arena& arena, py::handle error, const std::string& op, const std::string& site) {
    const std::optional<Failure> of_peer = peer_failure_of(error);
    Failure failure = of_peer.value_or(Failure{});
    failure.reporter = failure.culprit = arena.rank();
    failure = arena.in_origin(failure);
    if (of_peer) {
        failure.culprit = of_peer->culprit;
    } else {
        failure.code = FailureCode::peer_failed;
        set_text(failure.got, text_of(error));
    }
    set_text(failure.op, op);
    set_text(failure.site, site);
    const py::gil_scoped_release released;
    arena.abort(failure);
}

}  // namespace

std::optional<Failure> peer_failure_of(py::handle error) {
    py::object record;
    try {
        record = py::module_::import("ub_overlap.runtime.errors").attr("failure_record")(error);
    } catch (const py::error_already_set&) {  // the interpreter ends: the error itself matters more
    }
    if (!record || record.is_none()) return std::nullopt;
    const auto text = [&](const char* field) {
        return record.contains(field) ? record[field].cast<std::string>() : std::string();
    };
    Failure failure;
    const std::string code = text("code");
    failure.code = code == "peer_died"      ? FailureCode::peer_died
                   : code == "peer_timeout" ? FailureCode::peer_timeout
                                            : FailureCode::peer_failed;
    failure.culprit = record["culprit"].cast<int>();
    if (record.contains("waited_s")) failure.waited_s = record["waited_s"].cast<double>();
    set_text(failure.op, text("op"));
    set_text(failure.site, text("site"));
    set_text(failure.phase, text("phase"));
    set_text(failure.got, text("got"));
    return failure;
}

void define_arenas(py::module_& m) {
    py::class_<Arena, std::shared_ptr<Arena>>(m, "Arena")
        .def_property_readonly("slot_bytes", [](const Arena& arena) { return arena.slot_bytes(0); })
        .def("bytes_of_slot", &Arena::slot_bytes, py::arg("slot"), "0 for a split slot that no call has used.")
        .def("check", &abort_text, "Raises the failure that a peer reported.")
        .def("check_site", &check_site, py::arg("slot"), py::call_guard<py::gil_scoped_release>(),
             "Raises where a peer's call in this slot is at another site.")
        .def("watch", &Arena::watch, py::call_guard<py::gil_scoped_release>(),
             "Ends waits of a device for a rank that is gone or has failed. For a watchdog.")
        .def(
            "join_origin",
            [](const std::shared_ptr<Arena>& arena, const std::string& key, const std::string& name, std::vector<int> ranks) {
                Arena::join_origin(arena, key, name, std::move(ranks));
            },
            py::arg("key"), py::arg("name"), py::arg("ranks"),
            "Makes errors name ranks of the group `name`, of which the arena's group has `ranks`; all of them where empty.")
        .def("fail", &fail_group, py::arg("error"), py::arg("op"), py::arg("site"),
             "Tells all ranks of the exception of this one, and whose fault it is, unless they know of a failure.");

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
}

}  // namespace ub_overlap
