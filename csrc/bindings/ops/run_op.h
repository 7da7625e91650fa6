// Runs an op's kernel: sets up its guards, translates its errors, and hands the finished Call to the group's session.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>

#include <functional>

#include "bindings/builder.h"
#include "bindings/python.h"

namespace ub_overlap {

// Sets the device and the current stream of the builder's call.
void set_stream(Builder& b);

// Whether c10d carries out the builder's call. Ends the builder's description.
bool is_plain(Builder& b);

// Counts a plain call at its site.
void announce_plain(Builder& b);

// Runs the builder's call on our transport and returns true. Returns false, and runs nothing, where it is plain.
// `prepare` is called once the call's schedule is known.
bool run_on_transport(Builder& b, const std::function<void(Call&)>& prepare = [](Call&) {});

// The ops of a split collective that is not plain. `sent`: tensors that are kept until the finish. `token`: what the start
// returns. `prepare`: gives the call its output; without one the finish sets it to landing memory.
void start_on_transport(Builder& b, std::shared_ptr<void> sent, const Tensor& token);
void finish_on_transport(Builder& b, const std::function<void(Call&)>& prepare);
// Keeps the landing memory that a finish has returned as `results` until all of them are freed.
void watch_results(Builder& b, at::TensorList results);
void release_on_transport(Builder& b);
// Returns this rank's landing memory of a split call.
char* landing_on_transport(Builder& b);

// Returns a test whether the memory of a tensor was freed, that of views included.
std::function<bool()> is_freed(const Tensor& tensor);

// The call that this thread is about to carry out by plain collectives, for the flight recorder.
struct PlainCall {
    std::shared_ptr<Session> session;
    uint64_t number = 0;
};
PlainCall& plain_call();

// Runs the body of an op: its device is current, the GIL is released, autograd and autocast are off below it, and our
// exceptions become Python's.
template <typename Body>
auto run_op(at::Device device, Body body) {
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

// Throws unless `fits`: an argument that our own passes write is not as `where` needs it.
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
