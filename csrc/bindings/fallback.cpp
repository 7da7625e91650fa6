#include "bindings/fallback.h"

#include <Python.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <utility>

#include "bindings/ops/run_op.h"
#include "bindings/python.h"

namespace ub_overlap {
namespace {

PyObject* checked(PyObject* object) {
    if (!object) {
        python_error error;
        error.persist();
        throw error;
    }
    return object;
}

void flatten(PyObject* object, std::vector<at::Tensor>& to) {
    if (THPVariable_Check(object)) {
        to.push_back(THPVariable_Unpack(object));
        return;
    }
    for (Py_ssize_t i = 0; i < PySequence_Size(object); ++i) {
        PyObject* item = checked(PySequence_GetItem(object, i));
        flatten(item, to);
        Py_DECREF(item);
    }
}

// New references to what stands for a value in Python.
PyObject* wrapped(const at::Tensor& value) {
    if (value.defined()) return checked(THPVariable_Wrap(value));
    Py_INCREF(Py_None);
    return Py_None;
}

PyObject* named(at::ScalarType value) {
    auto* object = reinterpret_cast<PyObject*>(torch::getTHPDtype(value));
    Py_INCREF(object);
    return object;
}

template <typename List, typename Make>
PyObject* listed(const List& values, Make make) {
    PyObject* list = checked(PyList_New(0));
    for (const auto& value : values) {
        PyObject* item = make(value);
        PyList_Append(list, item);
        Py_DECREF(item);
    }
    return list;
}

}  // namespace

FallbackCall::FallbackCall(const std::string& op) : list_(checked(PyList_New(0))) {
    text(op);
}
FallbackCall::~FallbackCall() {
    Py_DECREF(static_cast<PyObject*>(list_));
}

void FallbackCall::add(void* object) {
    auto* item = checked(static_cast<PyObject*>(object));
    PyList_Append(static_cast<PyObject*>(list_), item);
    Py_DECREF(item);
}

FallbackCall& FallbackCall::tensor(const at::Tensor& value) {
    add(wrapped(value));
    return *this;
}

FallbackCall& FallbackCall::tensors(at::TensorList value) {
    add(listed(value, &wrapped));
    return *this;
}

FallbackCall& FallbackCall::flags(const c10::List<bool>& value) {
    add(listed(value.vec(), [](bool flag) { return checked(PyBool_FromLong(flag)); }));
    return *this;
}

FallbackCall& FallbackCall::dtypes(const std::vector<at::ScalarType>& value) {
    add(listed(value, &named));
    return *this;
}

FallbackCall& FallbackCall::integer(int64_t value) {
    add(PyLong_FromLongLong(value));
    return *this;
}

FallbackCall& FallbackCall::real(double value) {
    add(PyFloat_FromDouble(value));
    return *this;
}

FallbackCall& FallbackCall::flag(bool value) {
    add(PyBool_FromLong(value));
    return *this;
}

FallbackCall& FallbackCall::text(const std::string& value) {
    add(PyUnicode_FromStringAndSize(value.data(), static_cast<Py_ssize_t>(value.size())));
    return *this;
}

FallbackCall& FallbackCall::dtype(at::ScalarType value) {
    add(named(value));
    return *this;
}

std::vector<at::Tensor> FallbackCall::run(const Site& site) {
    text(site.strategy).text(site.group).text(site.id);
    PyObject* args = checked(PyList_AsTuple(static_cast<PyObject*>(list_)));
    PyObject* returned = PyObject_CallObject(static_cast<PyObject*>(python_hooks().fallback.get()), args);
    Py_DECREF(args);
    const PlainCall plain = std::exchange(plain_call(), {});
    if (plain.session) plain.session->end_plain(plain.number, !returned);
    checked(returned);
    std::vector<at::Tensor> results;
    flatten(returned, results);
    Py_DECREF(returned);
    return results;
}

}  // namespace ub_overlap
