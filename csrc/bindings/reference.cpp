#include "bindings/reference.h"

#include <Python.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

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

ReferenceCall::ReferenceCall(const std::string& op) : list_(checked(PyList_New(0))) {
    text(op);
}
ReferenceCall::~ReferenceCall() {
    Py_DECREF(static_cast<PyObject*>(list_));
}

void ReferenceCall::add(void* object) {
    auto* item = checked(static_cast<PyObject*>(object));
    PyList_Append(static_cast<PyObject*>(list_), item);
    Py_DECREF(item);
}

ReferenceCall& ReferenceCall::tensor(const at::Tensor& value) {
    add(wrapped(value));
    return *this;
}

ReferenceCall& ReferenceCall::tensors(at::TensorList value) {
    add(listed(value, &wrapped));
    return *this;
}

ReferenceCall& ReferenceCall::integers(at::IntArrayRef value) {
    add(listed(value, [](int64_t number) { return checked(PyLong_FromLongLong(number)); }));
    return *this;
}

ReferenceCall& ReferenceCall::dtypes(const std::vector<at::ScalarType>& value) {
    add(listed(value, &named));
    return *this;
}

ReferenceCall& ReferenceCall::integer(int64_t value) {
    add(PyLong_FromLongLong(value));
    return *this;
}

ReferenceCall& ReferenceCall::flag(bool value) {
    add(PyBool_FromLong(value));
    return *this;
}

ReferenceCall& ReferenceCall::text(const std::string& value) {
    add(PyUnicode_FromStringAndSize(value.data(), static_cast<Py_ssize_t>(value.size())));
    return *this;
}

ReferenceCall& ReferenceCall::dtype(at::ScalarType value) {
    add(named(value));
    return *this;
}

std::vector<at::Tensor> ReferenceCall::run() {
    PyObject* args = checked(PyList_AsTuple(static_cast<PyObject*>(list_)));
    PyObject* answer = PyObject_CallObject(static_cast<PyObject*>(python_hooks().reference.get()), args);
    Py_DECREF(args);
    checked(answer);
    std::vector<at::Tensor> results;
    flatten(answer, results);
    Py_DECREF(answer);
    return results;
}

}  // namespace ub_overlap
