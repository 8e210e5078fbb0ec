// Reads a torch tensor's address, type, device and shape through DLPack's C exchange API (DLPack 1.x,
// https://dmlc.github.io/dlpack), in one call and without a torch header. The structs repeat DLPack's stable ABI.
#pragma once

#include <pybind11/pybind11.h>
#include <structmember.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace fused_optim {

struct DLDevice {
    int32_t type;
    int32_t index;
};

struct DLDataType {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
};

struct DLTensor {
    void* data;
    DLDevice device;
    int32_t dims;
    DLDataType type;
    int64_t* shape;
    int64_t* strides;  // in elements
    uint64_t byte_offset;
};

struct DLPackExchangeApi {
    uint32_t major;
    uint32_t minor;
    void* previous;
    void* allocate;
    void* to_managed;
    void* from_managed;
    int (*to_tensor)(void* object, DLTensor* out);  // borrows; -1 with a Python error set
    void* current_stream;
};

inline bool operator==(DLDevice a, DLDevice b) { return a.type == b.type && a.index == b.index; }
inline bool operator==(DLDataType a, DLDataType b) {
    return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

// As torch defines it: dimensions of size 1 may have any stride, and empty tensors are contiguous.
inline bool is_contiguous(const DLTensor& tensor) {
    int64_t expected = 1;
    bool contiguous = true;
    for (int d = tensor.dims - 1; d >= 0; --d) {
        if (tensor.shape[d] == 0) return true;
        contiguous &= tensor.shape[d] == 1 || tensor.strides[d] == expected;
        expected *= tensor.shape[d];
    }
    return contiguous;
}

inline uint64_t address(const DLTensor& tensor) { return reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset; }

// What DLPack does not tell: whether a tensor's bytes are its values. torch negates lazily, makes zeros without memory,
// and wraps tensors for its transforms. All of it is in the tensor's dispatch keys, a word of torch's own tensor, to
// which the first field of the Python object points. Where the word lies is found out by looking for known keys.
class DispatchKeys {
public:
    // `examples`: (tensor, its keys), the first one an ordinary tensor.
    explicit DispatchKeys(const std::vector<std::pair<pybind11::object, uint64_t>>& examples) {
        constexpr size_t kBodySize = 192;  // not more than torch's own tensor has
        for (size_t offset = 0; offset < kBodySize && !examples.empty(); offset += sizeof(uint64_t)) {
            offset_ = offset;
            ordinary_ = examples.front().second;
            found_ = std::all_of(examples.begin(), examples.end(),
                                 [&](const auto& example) { return of(example.first.ptr()) == example.second; });
            if (found_) return;
        }
    }

    bool found() const { return found_; }
    bool are_ordinary(PyObject* tensor) const { return of(tensor) == ordinary_; }

private:
    uint64_t of(PyObject* tensor) const {
        const char* body =
            *reinterpret_cast<const char* const*>(reinterpret_cast<const char*>(tensor) + sizeof(PyObject));
        uint64_t keys;
        std::memcpy(&keys, body + offset_, sizeof(keys));
        return keys;
    }

    size_t offset_ = 0;
    uint64_t ordinary_ = 0;
    bool found_ = false;
};

class TensorReader {
public:
    // `capsule`: torch.Tensor.__dlpack_c_exchange_api__; of anything else, or another major version, nothing is read.
    TensorReader(pybind11::object capsule, pybind11::object tensor_type, DispatchKeys keys)
        : tensor_type_(tensor_type), keys_(keys) {
        if (!keys.found()) return;
        constexpr const char* name = "dlpack_exchange_api";
        if (!PyCapsule_IsValid(capsule.ptr(), name)) return;
        auto* api = static_cast<DLPackExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), name));
        if (api->major == 1) to_tensor_ = api->to_tensor;
    }

    // False for what is not a tensor whose values lie in memory of its own, such as sparse ones.
    bool read(PyObject* object, DLTensor& out) const {
        if (to_tensor_ == nullptr || !is_tensor(object) || !keys_.are_ordinary(object)) return false;
        if (to_tensor_(object, &out) == 0) return true;
        PyErr_Clear();
        return false;
    }

    // The numbers of those that are not contiguous tensors whose values lie in memory of their own.
    std::vector<size_t> unusual(const std::vector<pybind11::handle>& tensors) const {
        std::vector<size_t> found;
        for (size_t i = 0; i < tensors.size(); ++i) {
            DLTensor tensor;
            if (!read(tensors[i].ptr(), tensor) || !is_contiguous(tensor)) found.push_back(i);
        }
        return found;
    }

    const pybind11::object& tensor_type() const { return tensor_type_; }

    // Subclasses hide their memory (DTensors, tensors of unfinished collectives).
    bool is_plain_tensor(PyObject* object) const {
        return reinterpret_cast<PyObject*>(Py_TYPE(object)) == tensor_type_.ptr();
    }

private:
    bool is_tensor(PyObject* object) const {
        return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(tensor_type_.ptr()));
    }

    pybind11::object tensor_type_;
    DispatchKeys keys_;
    int (*to_tensor_)(void*, DLTensor*) = nullptr;
};

// Reads an attribute, such as DTensor._local_tensor; where it lies in the object itself (Python's __slots__), without
// the way through the interpreter.
class AttributeReader {
public:
    AttributeReader(const pybind11::object& type, const char* name)
        : type_(type), name_(pybind11::reinterpret_steal<pybind11::object>(PyUnicode_InternFromString(name))) {
        pybind11::object member = pybind11::getattr(type, name, pybind11::none());
        if (!PyObject_TypeCheck(member.ptr(), &PyMemberDescr_Type)) return;
        offset_ = reinterpret_cast<PyMemberDescrObject*>(member.ptr())->d_member->offset;
    }

    // Null if there is none. `object` is exactly of the type.
    pybind11::object get(PyObject* object) const {
        if (offset_ > 0) return pybind11::reinterpret_borrow<pybind11::object>(peek(object));
        auto value = pybind11::reinterpret_steal<pybind11::object>(PyObject_GetAttr(object, name_.ptr()));
        if (!value) PyErr_Clear();
        return value;
    }

    // Null where it cannot be had at once, and for other types.
    PyObject* peek(PyObject* object) const {
        if (offset_ == 0 || !object || reinterpret_cast<PyObject*>(Py_TYPE(object)) != type_.ptr()) return nullptr;
        return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset_);
    }

private:
    pybind11::object type_, name_;
    Py_ssize_t offset_ = 0;
};

// Reads how often a tensor was written: Tensor._version, by the C function of torch that the interpreter would look up.
class VersionReader {
public:
    explicit VersionReader(const pybind11::object& tensor_type)
        : descriptor_(pybind11::getattr(tensor_type, "_version", pybind11::none())) {
        if (!PyObject_TypeCheck(descriptor_.ptr(), &PyGetSetDescr_Type)) return;
        def_ = reinterpret_cast<PyGetSetDescrObject*>(descriptor_.ptr())->d_getset;
    }

    // Of a tensor; 0 where torch does not tell, as for inference tensors.
    int64_t operator()(PyObject* tensor) const {
        if (!tensor) return 0;
        PyObject* found = def_ ? def_->get(tensor, def_->closure) : PyObject_GetAttrString(tensor, "_version");
        const auto version = pybind11::reinterpret_steal<pybind11::object>(found);
        if (!version) return PyErr_Clear(), 0;
        return PyLong_AsLongLong(version.ptr());
    }

private:
    pybind11::object descriptor_;
    const PyGetSetDef* def_ = nullptr;
};

}  // namespace fused_optim
