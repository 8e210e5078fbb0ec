// Reads torch tensors: directly where their layout is known, else through DLPack.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "bindings/dlpack.h"
#include "bindings/tensor_layout.h"

namespace fused_optim {

// Addresses, and sizes that go with them: Python hands them from one function to another without looking at them.
struct Numbers {
    std::vector<uint64_t> values;
};

class TensorReader {
public:
    using Example = TensorLayout::Example;

    // `capsule`: torch.Tensor.__dlpack_c_exchange_api__; of anything else, or another major version, nothing is read.
    // `checks_ends`: a tensor that ends behind its storage has no memory. That takes longer.
    TensorReader(pybind11::object capsule, pybind11::object tensor_type, DispatchKeys keys,
                 const std::vector<Example>& examples, const std::vector<Example>& copied, bool checks_ends)
        : tensor_type_(tensor_type), keys_(keys), checks_ends_(checks_ends) {
        if (!keys.found()) return;
        constexpr const char* name = "dlpack_exchange_api";
        if (!PyCapsule_IsValid(capsule.ptr(), name)) return;
        auto* api = static_cast<DLPackExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), name));
        if (api->major != 1) return;
        to_tensor_ = api->to_tensor;
        layout_ = TensorLayout(examples, copied, to_tensor_);
    }

    // Whether tensors are read without asking DLPack.
    bool reads_directly() const { return layout_.found(); }

    // False for what is not a tensor whose values lie in memory of its own, such as sparse ones.
    bool read(PyObject* object, DLTensor& out) const {
        if (to_tensor_ == nullptr || !is_tensor(object) || !keys_.are_ordinary(body_of(object))) return false;
        const char* body = body_of(object);
        if (layout_.found() && layout_.read(body, out)) {
            if (checks_ends_ && !layout_.is_whole(body, out)) out.data = nullptr;
            return true;
        }
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

    // Of plain contiguous tensors, 0 for None; None where one of them is anything else.
    [[gnu::flatten]] pybind11::object addresses(const pybind11::list& tensors) const {
        Numbers found;
        found.values.reserve(tensors.size());
        for (size_t i = 0; i < tensors.size(); ++i) {
            PyObject* object = PyList_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i));
            DLTensor tensor{};
            const bool fits =
                object == Py_None || (is_plain_tensor(object) && read(object, tensor) && is_contiguous(tensor));
            if (!fits) return pybind11::none();
            found.values.push_back(address(tensor));
        }
        return pybind11::cast(std::move(found));
    }

    const pybind11::object& tensor_type() const { return tensor_type_; }

    // Subclasses hide their memory (DTensors, tensors of unfinished collectives).
    bool is_plain_tensor(PyObject* object) const {
        return reinterpret_cast<PyObject*>(Py_TYPE(object)) == tensor_type_.ptr();
    }

    bool is_tensor(PyObject* object) const {
        return is_plain_tensor(object) ||
               PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(tensor_type_.ptr()));
    }

private:
    pybind11::object tensor_type_;
    DispatchKeys keys_;
    TensorLayout layout_;
    bool checks_ends_;
    int (*to_tensor_)(void*, DLTensor*) = nullptr;
};

}  // namespace fused_optim
