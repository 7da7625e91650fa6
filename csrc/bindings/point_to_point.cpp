// ub_overlap._C: channels and their messages.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/c10d_backend.h"
#include "bindings/definitions.h"
#include "bindings/messages.h"
#include "bindings/python_callback.h"
#include "core/session.h"
#include "cpu/point_to_point.h"
#ifdef UB_OVERLAP_CUDA
#include "cuda/point_to_point.h"
#endif

namespace py = pybind11;

namespace ub_overlap {
namespace {

// A message that Python holds. `device`: of its tensor.
struct HeldTransfer {
    std::shared_ptr<Transfer> transfer;
    at::Device device;
};

ChannelSizes sizes_of(int ranks, int slots, int64_t near_bytes, int64_t far_bytes) {
    return {ranks, slots, near_bytes, far_bytes};
}

}  // namespace

void define_point_to_point(py::module_& m) {
    py::class_<ChannelSegment, std::shared_ptr<ChannelSegment>>(m, "ChannelSegment")
        .def(py::init([](int rank, int ranks, int slots, int64_t near_bytes, int64_t far_bytes, bool has_slots) {
                 return std::make_shared<ChannelSegment>(rank, sizes_of(ranks, slots, near_bytes, far_bytes), has_slots);
             }),
             py::arg("rank"), py::arg("ranks"), py::arg("slots"), py::arg("near_bytes"), py::arg("far_bytes"),
             py::arg("has_slots"), py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("address", &ChannelSegment::address)
        .def_property_readonly(
            "slot_bytes", [](const ChannelSegment& s) { return s.sizes().total_bytes(); }, "Bytes of all slots of a rank.")
        .def("attach", &ChannelSegment::attach, py::arg("rank"), py::arg("address"), py::call_guard<py::gil_scoped_release>(),
             "Returns why this process cannot reach the peer's memory, '' where it can.")
        .def("stop_sharing", &ChannelSegment::stop_sharing);

    py::class_<HeldTransfer>(m, "Transfer")
        .def(
            "is_completed",
            [](HeldTransfer& held) {
                const py::gil_scoped_release released;
                return held.transfer->is_completed();
            },
            "Whether the tensor was sent or received.")
        .def(
            "wait",
            [](HeldTransfer& held) {
                const py::gil_scoped_release released;
                held.transfer->wait(current_stream(held.device));
            },
            "CPU: waits for the message. CUDA: makes the current stream wait for it.");

    py::class_<PointToPoint, std::shared_ptr<PointToPoint>>(m, "PointToPoint")
        .def(
            "issue",
            [](PointToPoint& channels, const at::Tensor& tensor, bool sends, int peer, int64_t tag) {
                const py::gil_scoped_release released;
                return HeldTransfer{channels.issue(message_of(tensor, sends, peer, tag)), tensor.device()};
            },
            py::arg("tensor"), py::arg("sends"), py::arg("peer"), py::arg("tag") = 0)
        .def("slot_bytes", &PointToPoint::slot_bytes, py::arg("peer"), "Bytes of one slot for messages with that rank.");
    py::class_<CpuPointToPoint, PointToPoint, std::shared_ptr<CpuPointToPoint>>(m, "CpuPointToPoint")
        .def(py::init<std::shared_ptr<Arena>, std::shared_ptr<ChannelSegment>>(), py::arg("arena"), py::arg("segment"));
#ifdef UB_OVERLAP_CUDA
    py::class_<cuda::CudaPointToPoint, PointToPoint, std::shared_ptr<cuda::CudaPointToPoint>>(m, "CudaPointToPoint")
        .def(py::init<std::shared_ptr<cuda::CudaArena>, std::shared_ptr<ChannelSegment>, const std::vector<uint64_t>&>(),
             py::arg("arena"), py::arg("segment"), py::arg("memory"));
    m.def(
        "channel_bytes", [](const ChannelSegment& segment) { return cuda::channel_bytes(segment.sizes()); }, py::arg("segment"),
        "Bytes of symmetric memory that the channels of a rank need.");
    m.def(
        "channel_words_bytes", [](const ChannelSegment& segment) { return cuda::channel_words_bytes(segment.sizes()); },
        py::arg("segment"), "How many of them, from the first on, must be zero before any rank uses them.");
#endif
    m.def("find_channels", &find_channels, py::arg("group"), py::arg("device"),
          "The channels of a group, None before they are set up.");
    m.def(
        "set_connect",
        [](py::object connect) {
            auto held = hold(std::move(connect));
            python_hooks().connect = [held](const std::string& group, const std::string& device, int64_t bytes) {
                return in_python([&] { return handle_of(held)(group, device, bytes).cast<std::shared_ptr<PointToPoint>>(); });
            };
        },
        py::arg("connect"), "Sets the callable (group, device, bytes) that makes channels, or returns None.");
    m.def("use_channels", &use_channels, py::arg("group"),
          "Replaces the backends of a c10d group by ones that send and receive through channels.");
}

}  // namespace ub_overlap
