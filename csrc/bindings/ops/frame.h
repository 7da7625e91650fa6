// What every op stands in: its device, its errors, and the way of a finished Call to the group's session.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>

#include <functional>

#include "bindings/builder.h"
#include "bindings/python.h"

namespace ub_overlap {

// Runs the builder's call on our transport and returns true, or returns false where the group has none or the plain way is
// asked for. `prepare` is called once it is known what the schedule will need.
bool run(Builder& b, const std::function<void(Call&)>& prepare = [](Call&) {});

// Every op's frame: its device is current, no GIL while it blocks, no autograd below it, and our exceptions as Python's.
template <typename Body>
auto framed(at::Device device, Body body) {
    WithoutGil without_gil;
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    c10::OptionalDeviceGuard guard;
    if (!device.is_cpu()) guard.reset_device(device);
    try {
        return body();
    } catch (...) {
        throw_as_python();
    }
}

// What `where` takes for granted of its arguments, as our own passes write them.
inline void expect(const char* where, bool fits, const char* what, const std::string& got, const char* expected) {
    if (!fits) {
        throw NamedError(
            "UbOverlapError",
            {{"what", what}, {"where", where}, {"got", got}, {"expected", expected}, {"fix", "report this as a bug"}});
    }
}

inline char* data_of(const Tensor& t) {
    return t.defined() ? static_cast<char*>(t.data_ptr()) : nullptr;
}

inline at::Device device_of(at::TensorList list) {
    return list.empty() ? at::Device(at::kCPU) : list[0].device();
}

}  // namespace ub_overlap
