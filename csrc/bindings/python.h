// Crossing between C++ and Python without pybind11 or torch types in the interface, so that either side sees one of them.
#pragma once

#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "core/failure.h"
#include "core/session.h"

namespace ub_overlap {

// A Python exception caught in a callback, on its way through code that knows no Python. `value` is the exception object.
struct PythonRaised : CallbackFailed {
    PythonRaised(std::shared_ptr<void> value, std::string text) : value(std::move(value)), text(std::move(text)) {}
    const char* what() const noexcept override { return text.c_str(); }
    std::shared_ptr<void> value;
    std::string text;
};

// A collective of c10d on the CPU, as Python waits for it.
struct HostWork {
    std::function<void(int64_t ms)> wait;  // throws after that time; below 0: without a limit
    std::function<bool()> is_completed;
};

// The callables that Python installs. make_error: (class name, fields) -> exception. on_error: (exception), before it is
// raised. fallback: (op name, *arguments of the op) -> results. warn: (text), logs a warning.
struct PythonHooks {
    std::function<std::shared_ptr<Session>(const std::string& group, const std::string& device, const Call& call)> bind;
    // Makes the channels of a group, sized for a message of `bytes` bytes. Null where the group has no transport.
    std::function<std::shared_ptr<PointToPoint>(const std::string& group, const std::string& device, int64_t bytes)> connect;
    // Waits for a split collective that c10d runs on the CPU. Throws where it fails.
    std::function<void(const std::shared_ptr<HostWork>&, const std::string& op, const std::string& site,
                       const std::string& group)>
        wait_on_host;
    // Throws the error of one that c10d failed to launch, or to end on a GPU. `text`: c10d's.
    std::function<void(const std::string& op, const std::string& site, const std::string& group, const std::string& device,
                       const std::string& text)>
        fail_plain;
    std::shared_ptr<void> make_error, fallback, on_error, warn;
};
PythonHooks& python_hooks();

// Returns a new reference to the exception that `failure` stands for; null with the error indicator set. Needs the GIL.
void* make_python_error(const Failure& failure);

// Sets Python's error indicator for one of our C++ exceptions. Needs the GIL. False where it is not one of ours.
bool set_python_error(const std::exception_ptr& error);

// Throws the exception being handled again, one of ours as the Python exception it stands for, in the form that torch passes on
// unchanged from eager calls as well as from autograd's threads.
[[noreturn]] void throw_as_python();

// Logs a warning. Takes the GIL.
void warn(const std::string& text);

struct WithGil {
    WithGil();
    ~WithGil();
    WithGil(const WithGil&) = delete;
    WithGil& operator=(const WithGil&) = delete;
    int state;
};

// For code that blocks. Does nothing on a thread that does not hold the GIL.
struct WithoutGil {
    WithoutGil();
    ~WithoutGil();
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;
    void* state;
};

}  // namespace ub_overlap
