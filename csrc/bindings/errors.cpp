#include <Python.h>
// After Python.h: torch's header for the exception type that its bindings and its autograd engine hand on unchanged.
#include <torch/csrc/Exceptions.h>

#include <sstream>

#include "bindings/python.h"

namespace ub_overlap {
namespace {

using Fields = std::map<std::string, std::string>;

std::string seconds(double value) {
    std::ostringstream text;
    text.precision(3);
    text << value;
    return text.str();
}

const char* class_of(FailureCode code) {
    switch (code) {
        case FailureCode::shape_mismatch:
            return "ShapeMismatchError";
        case FailureCode::site_mismatch:
            return "SiteMismatchError";
        case FailureCode::peer_failed:
            return "PeerFailedError";
        case FailureCode::group_lock_timeout:
            return "DeviceTimeoutError";
        case FailureCode::group_aborted:
            return "GroupAbortedError";
        default:
            return "PeerTimeoutError";
    }
}

Fields fields_of(const Failure& f) {
    return {{"op", f.op},
            {"site", f.site},
            {"group", f.group},
            {"reporter", std::to_string(f.reporter)},
            {"ranks", std::to_string(f.culprit)},
            {"phase", f.phase},
            {"chunk", std::to_string(f.chunk)},
            {"expected_epoch", std::to_string(f.expected)},
            {"observed_epoch", std::to_string(f.observed)},
            {"waited_s", seconds(f.waited_s)},
            {"silent_s", seconds(f.silent_s)},
            {"dead", f.code == FailureCode::peer_died ? "1" : "0"},
            {"got", f.got},
            {"expected", f.wanted}};
}

void raise_object(PyObject* error) {
    if (auto* hook = static_cast<PyObject*>(python_hooks().on_error.get())) {
        PyObject* none = PyObject_CallOneArg(hook, error);
        if (!none) PyErr_Clear();  // the error itself matters more
        Py_XDECREF(none);
    }
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
}

// Returns the exception object, or null with the error of its factory set.
PyObject* make_named(const std::string& name, const Fields& fields) {
    auto* factory = static_cast<PyObject*>(python_hooks().make_error.get());
    if (!factory) {
        const auto what = fields.find("what");
        const std::string text = name + ": " + (what == fields.end() ? "" : what->second);
        return PyObject_CallFunction(PyExc_RuntimeError, "s", text.c_str());
    }
    PyObject* dict = PyDict_New();
    for (const auto& [key, value] : fields) {
        PyObject* text = PyUnicode_DecodeUTF8(value.c_str(), static_cast<Py_ssize_t>(value.size()), "replace");
        PyDict_SetItemString(dict, key.c_str(), text);
        Py_DECREF(text);
    }
    PyObject* error = PyObject_CallFunction(factory, "sO", name.c_str(), dict);
    Py_DECREF(dict);
    return error;
}

void set_named(const std::string& name, const Fields& fields) {
    PyObject* error = make_named(name, fields);
    if (!error) return;
    raise_object(error);
    Py_DECREF(error);
}

}  // namespace

PythonHooks& python_hooks() {
    static auto* one = new PythonHooks;  // never destroyed: holds Python objects
    return *one;
}

void* make_python_error(const Failure& failure) {
    return make_named(class_of(failure.code), fields_of(failure));
}

bool set_python_error(const std::exception_ptr& error) {
    try {
        std::rethrow_exception(error);
    } catch (const PythonRaised& raised) {
        raise_object(static_cast<PyObject*>(raised.value.get()));
    } catch (const CallFailed& failed) {
        set_named(class_of(failed.failure.code), fields_of(failed.failure));
    } catch (const NamedError& named) {
        set_named(named.name, named.fields);
    } catch (...) {
        return false;
    }
    return true;
}

void throw_as_python() {
    const std::exception_ptr current = std::current_exception();
    {
        WithGil gil;
        if (set_python_error(current)) {
            python_error error;
            error.persist();
            throw error;
        }
    }
    std::rethrow_exception(current);
}

void warn(const std::string& text) {
    const WithGil gil;
    auto* hook = static_cast<PyObject*>(python_hooks().warn.get());
    PyObject* none = hook ? PyObject_CallFunction(hook, "s", text.c_str()) : nullptr;
    if (!none) PyErr_Clear();  // the op goes on
    Py_XDECREF(none);
}

WithGil::WithGil() : state(static_cast<int>(PyGILState_Ensure())) {}
WithGil::~WithGil() {
    PyGILState_Release(static_cast<PyGILState_STATE>(state));
}

WithoutGil::WithoutGil() : state(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
WithoutGil::~WithoutGil() {
    if (state) PyEval_RestoreThread(static_cast<PyThreadState*>(state));
}

}  // namespace ub_overlap
