// Python objects that C++ holds, and calls into Python from any thread.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>

#include "bindings/python.h"

namespace ub_overlap {

// A Python object that C++ may release on any thread.
inline std::shared_ptr<void> hold(pybind11::object object) {
    return {object.release().ptr(), [](void* pointer) {
                if (!Py_IsInitialized()) return;
                WithGil gil;
                Py_DECREF(static_cast<PyObject*>(pointer));
            }};
}

inline pybind11::handle handle_of(const std::shared_ptr<void>& held) {
    return {static_cast<PyObject*>(held.get())};
}

// The text of a Python exception, with its class.
inline std::string text_of(pybind11::handle error) {
    return pybind11::str(pybind11::type::of(error).attr("__name__")).cast<std::string>() + ": " +
           pybind11::str(error).cast<std::string>();
}

// The failure of a peer that a Python exception is about (failure_record in runtime/errors.py). Needs the GIL.
std::optional<Failure> peer_failure_of(pybind11::handle error);

// Runs a callback into Python from any thread; a Python exception travels on as PythonRaised.
template <typename Body>
auto in_python(Body body) {
    WithGil gil;
    try {
        return body();
    } catch (pybind11::error_already_set& error) {
        PythonRaised raised(hold(error.value()), text_of(error.value()));
        raised.failure = peer_failure_of(error.value());
        throw raised;
    }
}

}  // namespace ub_overlap
