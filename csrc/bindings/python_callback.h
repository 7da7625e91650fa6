// Python objects that C++ holds, and calls into Python from any thread.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
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

// Runs a callback into Python from any thread; a Python exception travels on as PythonRaised.
template <typename Body>
auto in_python(Body body) {
    WithGil gil;
    try {
        return body();
    } catch (pybind11::error_already_set& error) {
        const std::string text = pybind11::str(error.type().attr("__name__")).cast<std::string>() + ": " +
                                 pybind11::str(error.value()).cast<std::string>();
        throw PythonRaised(hold(error.value()), text);
    }
}

}  // namespace ub_overlap
