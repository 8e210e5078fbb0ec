// Reads attributes of Python objects, and what dicts hold.
#pragma once

#include <pybind11/pybind11.h>
#include <structmember.h>

#include <cstddef>

namespace fused_optim {

inline pybind11::str interned(const char* name) {
    return pybind11::reinterpret_steal<pybind11::str>(PyUnicode_InternFromString(name));
}

// Null if there is none, or reading it raises.
inline pybind11::object attribute(PyObject* object, PyObject* name) {
    auto value = pybind11::reinterpret_steal<pybind11::object>(PyObject_GetAttr(object, name));
    if (!value) PyErr_Clear();
    return value;
}

// Whether both have equal attributes of this name.
inline bool have_equal(PyObject* a, PyObject* b, const pybind11::str& name) {
    if (!a || !b) return false;
    pybind11::object left = attribute(a, name.ptr()), right = attribute(b, name.ptr());
    int same = left && right ? PyObject_RichCompareBool(left.ptr(), right.ptr(), Py_EQ) : 0;
    if (same < 0) PyErr_Clear();
    return same == 1;
}

// Whether a dict has values[k] at names[k], k < count. It is gone through in its order, which is mostly theirs: looking
// all of them up takes twice as long.
inline bool holds(PyObject* dict, PyObject* const* names, PyObject* const* values, size_t count) {
    size_t found = 0;
    PyObject *name, *value;
    for (Py_ssize_t position = 0; found < count && PyDict_Next(dict, &position, &name, &value);) {
        if (name == names[found] && value == values[found]) ++found;
    }
    for (; found < count; ++found) {
        if (PyDict_GetItemWithError(dict, names[found]) != values[found]) return PyErr_Clear(), false;
    }
    return true;
}

// Reads an attribute, such as DTensor._local_tensor; where it lies in the object itself (Python's __slots__), without
// the way through the interpreter.
class AttributeReader {
public:
    AttributeReader(const pybind11::object& type, const char* name) : type_(type), name_(interned(name)) {
        pybind11::object member = pybind11::getattr(type, name, pybind11::none());
        if (!PyObject_TypeCheck(member.ptr(), &PyMemberDescr_Type)) return;
        offset_ = reinterpret_cast<PyMemberDescrObject*>(member.ptr())->d_member->offset;
    }

    // Null if there is none. `object` is exactly of the type.
    pybind11::object get(PyObject* object) const {
        if (offset_ > 0) return pybind11::reinterpret_borrow<pybind11::object>(peek(object));
        return attribute(object, name_.ptr());
    }

    // Null where it cannot be had at once, and for other types.
    PyObject* peek(PyObject* object) const {
        if (offset_ == 0 || !object || reinterpret_cast<PyObject*>(Py_TYPE(object)) != type_.ptr()) return nullptr;
        return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset_);
    }

private:
    pybind11::object type_;
    pybind11::str name_;
    Py_ssize_t offset_ = 0;
};

}  // namespace fused_optim
