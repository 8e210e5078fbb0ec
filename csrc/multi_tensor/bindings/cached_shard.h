// What is kept of a shard from step to step: what Python has checked in full, to be compared, and where it was then.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "bindings/dlpack.h"
#include "table.h"

namespace fused_optim {

// What Python keeps, one tuple per shard: the fields of fused_optim/backends's CachedShard. Parameter, states and
// master are tensors of one form. Parameter and local tensor are weak references, others let go of them at any time; of
// what torch may swap they are tuples that keep it.
#define FUSED_OPTIM_CACHED(ROW)         \
    ROW(kParamRef, "param_ref")         \
    ROW(kStateTensors, "state_tensors") \
    ROW(kMaster, "master")              \
    ROW(kSpec, "spec")                  \
    ROW(kStates, "states")              \
    ROW(kLocalRef, "local_ref")         \
    ROW(kComponents, "components")      \
    ROW(kNames, "names")                \
    ROW(kParts, "parts")                \
    ROW(kMasterLocal, "master_local")
FUSED_OPTIM_ENUM(Cached, FUSED_OPTIM_CACHED);

inline PyObject* field(PyObject* cached, Cached which) {
    return PyTuple_GET_ITEM(cached, static_cast<Py_ssize_t>(which));
}

// The tensors of a shard that have the parameter's form, by place.
constexpr size_t kParamPlace = 0, kMasterPlace = 1, kFirstStatePlace = 2;
constexpr size_t kPlaces = kFirstStatePlace + kMaxStates;

// The tensor beside the parameter at a place; None where there is none.
inline PyObject* tensor_at(PyObject* cached, size_t place) {
    if (place == kMasterPlace) return field(cached, Cached::kMaster);
    PyObject* states = field(cached, Cached::kStateTensors);
    const auto state = static_cast<Py_ssize_t>(place - kFirstStatePlace);
    return state < PyTuple_GET_SIZE(states) ? PyTuple_GET_ITEM(states, state) : Py_None;
}

// What a reference refers to; null where that is gone.
inline pybind11::object referent(PyObject* reference) {
    if (PyTuple_Check(reference)) {
        return pybind11::reinterpret_borrow<pybind11::object>(PyTuple_GET_ITEM(reference, 0));
    }
#if PY_VERSION_HEX >= 0x030D0000
    PyObject* object = nullptr;
    if (PyWeakref_GetRef(reference, &object) < 0) PyErr_Clear();
    return pybind11::reinterpret_steal<pybind11::object>(object);
#else
    PyObject* object = PyWeakref_GET_OBJECT(reference);
    return pybind11::reinterpret_borrow<pybind11::object>(object == Py_None ? nullptr : object);
#endif
}

// The same without holding it: it may be gone at any time.
inline PyObject* peek_at_referent(PyObject* reference) {
    if (PyTuple_Check(reference)) return PyTuple_GET_ITEM(reference, 0);
    return reinterpret_cast<PyWeakReference*>(reference)->wr_object;
}

// Whether it refers to this, which is alive.
inline bool refers_to(PyObject* reference, const PyObject* object) { return peek_at_referent(reference) == object; }

inline pybind11::object parameter(PyObject* cached) { return referent(field(cached, Cached::kParamRef)); }

inline bool is_sharded(PyObject* cached) { return field(cached, Cached::kSpec) != Py_None; }
inline bool is_quantized(PyObject* cached) { return field(cached, Cached::kLocalRef) != Py_None; }

// What changes when someone writes a parameter: the version counters of it and of its local tensor, or its memory.
struct Versions {
    int64_t param = 0, local = 0;
    uint64_t address = 0;
};

inline bool operator!=(const Versions& a, const Versions& b) {
    return a.param != b.param || a.local != b.local || a.address != b.address;
}

struct CachedShard {
    Shard shard{};
    Versions versions;
    bool has_gradient = false;
    bool is_cached = false;
    bool writes_weight = false;  // the codes of a quantized one

    // What parameter, states and gradient must be like to take the places of those that were checked.
    struct Kind {
        DLDevice device{};
        DLDataType type{};
    };
    DLDevice device{};  // the gradient's
    std::array<Kind, kPlaces> kinds{};
    std::vector<int64_t> shape;
    std::vector<int64_t> weight_sizes;  // bytes of a quantized weight's codes and scales, where the pass writes them

    bool has_form_of(const DLTensor& t) const {
        if (static_cast<size_t>(t.dims) != shape.size()) return false;
        for (size_t d = 0; d < shape.size(); ++d) {
            if (shape[d] != t.shape[d]) return false;
        }
        return (t.data || !shard.numel) && is_contiguous(t);
    }

    bool has_kind_of(size_t place, const DLTensor& t) const {
        return t.device == kinds[place].device && t.type == kinds[place].type;
    }

    // A float tensor beside the parameter; remainders complete whatever the parameter is.
    bool has_own_master(PyObject* cached) const {
        return field(cached, Cached::kMaster) != Py_None && kinds[kMasterPlace].type.code == kDLFloat;
    }
};

}  // namespace fused_optim
