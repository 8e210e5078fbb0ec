// Whether others have written parameters: their version counters and addresses, and what these were at the last look.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings/attributes.h"
#include "bindings/cached_shard.h"
#include "bindings/prefetch.h"
#include "bindings/tensor_reader.h"

namespace fused_optim {

namespace py = pybind11;

// Of one parameter and its master. `inner`: where the parameter's local tensor holds what it only marks, or an empty
// string. `names`: the components of a quantized weight that count, else none.
class Look {
public:
    struct Numbers {
        std::vector<int64_t> versions;
        std::vector<uint64_t> addresses;

        bool operator!=(const Numbers& other) const {
            return versions != other.versions || addresses != other.addresses;
        }
        void clear() {
            versions.clear();
            addresses.clear();
        }
    };

    Look(py::str held_in, std::vector<py::str> components) : inner(held_in), names(std::move(components)) {}

    // Whatever is at these addresses by now, it is something else.
    void forget() { param.clear(); }

    py::str inner;
    std::vector<py::str> names;
    Numbers param, master;
};

class Looker {
public:
    Looker(TensorReader reader, py::object dtensor_type)
        : reader_(std::move(reader)), dtensor_type_(dtensor_type), local_(dtensor_type, "_local_tensor") {}

    // The numbers of the parameters that others have written since they were last looked at, and of those whose masters
    // they have. `cached`: a tuple of each, as cached_shard.h has it.
    std::pair<std::vector<size_t>, std::vector<size_t>> find_written(const py::list& cached,
                                                                     const std::vector<Look*>& looks) const {
        std::pair<std::vector<size_t>, std::vector<size_t>> found;
        each(cached, looks, [&](size_t i, const Look::Numbers& param, const Look::Numbers& master) {
            if (param != looks[i]->param) found.first.push_back(i);
            if (master != looks[i]->master) found.second.push_back(i);
        });
        return found;
    }

    // Looks at all of them. The numbers of those that are elsewhere than they were.
    std::vector<size_t> remember(const py::list& cached, const std::vector<Look*>& looks) const {
        std::vector<size_t> moved;
        each(cached, looks, [&](size_t i, const Look::Numbers& param, const Look::Numbers& master) {
            if (param.addresses != looks[i]->param.addresses) moved.push_back(i);
            looks[i]->param = param;
            looks[i]->master = master;
        });
        return moved;
    }

private:
    // Calls visit(i, numbers of the parameter, those of its master) for each that is not gone.
    template <class Visit>
    void each(const py::list& cached, const std::vector<Look*>& looks, const Visit& visit) const {
        if (cached.size() != looks.size()) throw std::invalid_argument("fused_optim: one look per parameter");
        Look::Numbers param_now, master_now;
        for (size_t i = 0; i < looks.size(); ++i) {
            PyObject* tuple = item(cached.ptr(), i);
            const py::object param = parameter(tuple);
            if (!param) continue;
            param_now.clear();
            master_now.clear();
            add_parameter(param_now, *looks[i], param.ptr());
            PyObject* master = field(tuple, Cached::kMaster);
            if (master != Py_None) add(master_now, local_of(master).ptr());
            visit(i, param_now, master_now);
        }
    }

    void add_parameter(Look::Numbers& numbers, const Look& look, PyObject* param) const {
        py::object local = local_of(param);
        if (PyUnicode_GET_LENGTH(look.inner.ptr())) local = attribute(local.ptr(), look.inner.ptr());
        if (!local) return;
        if (local.ptr() != param) numbers.versions.push_back(version_of(param));
        if (look.names.empty()) return add(numbers, local.ptr());
        numbers.versions.push_back(version_of(local.ptr()));
        const py::object components = attribute(local.ptr(), components_.ptr());
        for (const py::str& name : look.names) {
            PyObject* part = components ? PyDict_GetItemWithError(components.ptr(), name.ptr()) : nullptr;
            if (part) add(numbers, part);
        }
    }

    void add(Look::Numbers& numbers, PyObject* tensor) const {
        numbers.versions.push_back(version_of(tensor));
        numbers.addresses.push_back(address_of(tensor));
    }

    py::object local_of(PyObject* tensor) const {
        if (!PyObject_TypeCheck(tensor, reinterpret_cast<PyTypeObject*>(dtensor_type_.ptr()))) {
            return py::reinterpret_borrow<py::object>(tensor);
        }
        PyObject* local = local_.peek(tensor);
        return local ? py::reinterpret_borrow<py::object>(local) : py::getattr(tensor, "_local_tensor");
    }

    // 0 where torch does not count, as for inference tensors.
    int64_t version_of(PyObject* tensor) const {
        const py::object version = attribute(tensor, version_.ptr());
        return version ? PyLong_AsLongLong(version.ptr()) : 0;
    }

    uint64_t address_of(PyObject* tensor) const {
        DLTensor read{};
        return reader_.read(tensor, read) ? address(read) : 0;
    }

    TensorReader reader_;
    py::object dtensor_type_;
    AttributeReader local_;
    py::str version_ = interned("_version"), components_ = interned("components");
};

}  // namespace fused_optim
