// Looks at one shard: whether all of it is as it was when Python checked it, and where it is now.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <vector>

#include "bindings/attributes.h"
#include "bindings/cached_shard.h"
#include "bindings/tensor_reader.h"

namespace fused_optim {

namespace py = pybind11;

class ShardReader {
public:
    // `state_names`: the keys of the rule's states. `state_reader`: of the device on which the states are.
    ShardReader(const std::vector<py::str>& state_names, TensorReader reader, TensorReader state_reader,
                py::object dtensor_type)
        : state_names_(state_names),
          reader_(reader),
          state_reader_(state_reader),
          dtensor_type_(dtensor_type),
          local_(dtensor_type, "_local_tensor"),
          spec_(dtensor_type, "_spec") {}

    // Remembers what a shard is like now. False if that cannot be compared.
    bool cache(CachedShard& row, PyObject* cached) const {
        const py::object param = parameter(cached);
        if (!param) return false;
        const size_t first = is_quantized(cached) ? kMasterPlace : kParamPlace;  // gives the form
        for (size_t place = first; place < kPlaces; ++place) {
            DLTensor tensor;
            PyObject* object = place == kParamPlace ? param.ptr() : tensor_at(cached, place);
            if (object == Py_None) continue;
            if (!read_local(reader_at(place), object, is_sharded(cached), tensor)) return false;
            if (place == first) {
                row.device = tensor.device;
                row.shape.assign(tensor.shape, tensor.shape + tensor.dims);
            }
            if (!row.has_form_of(tensor)) return false;
            row.kinds[place] = {tensor.device, tensor.type};
        }
        if (is_quantized(cached) && !cache_weight(row, field(cached, Cached::kParts))) return false;
        if (row.has_own_master(cached)) row.versions = find_versions(row, cached, param.ptr());
        return true;
    }

    // Takes the addresses. False if something is not as it was. Inlined as a whole: calls would take a sixth of its
    // time.
    [[gnu::flatten]] bool refresh(CachedShard& row, PyObject* cached, PyObject* param, PyObject* grad) const {
        const bool sharded = is_sharded(cached);
        PyObject* spec = field(cached, Cached::kSpec);
        if (sharded && spec_.get(param).ptr() != spec) return false;
        const bool found = is_quantized(cached) ? refresh_weight(row, cached, param, sharded)
                                                : refresh_tensor(row, kParamPlace, param, sharded, row.shard.param);
        if (!found || !has_states(cached)) return false;
        for (size_t i = 0; i < state_names_.size(); ++i) {
            if (!refresh_state(row, kFirstStatePlace + i, cached, sharded, row.shard.states[i].address)) return false;
        }
        return refresh_state(row, kMasterPlace, cached, sharded, row.shard.master) && refresh_gradient(row, spec, grad);
    }

    // Of a shard whose addresses were just taken.
    Versions read_versions(const CachedShard& row, PyObject* cached, PyObject* param) const {
        Versions found;
        found.param = version_of(param);
        if (is_sharded(cached)) found.local = version_of(local_.get(param).ptr());
        if (!is_quantized(cached)) found.address = row.shard.param;
        return found;
    }

    // Of any.
    Versions find_versions(const CachedShard& row, PyObject* cached, PyObject* param) const {
        Versions found = read_versions(row, cached, param);
        DLTensor tensor;
        if (!is_quantized(cached) && read_local(reader_, param, is_sharded(cached), tensor)) {
            found.address = address(tensor);
        }
        return found;
    }

private:
    static constexpr Py_ssize_t kWritten = 2;  // the first components: codes and scales

    const TensorReader& reader_at(size_t place) const { return place == kParamPlace ? reader_ : state_reader_; }

    bool read_local(const TensorReader& reader, PyObject* object, bool sharded, DLTensor& out) const {
        if (!sharded) return reader.read(object, out);
        if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != dtensor_type_.ptr()) return false;
        py::object found;
        PyObject* local = local_.peek(object);
        if (!local) local = (found = local_.get(object)).ptr();
        return local && reader.is_plain_tensor(local) && reader.read(local, out);
    }

    // How often torch has seen a tensor written; 0 where it does not tell, as for inference tensors.
    int64_t version_of(PyObject* tensor) const {
        const py::object version = tensor ? attribute(tensor, version_.ptr()) : py::object();
        return version ? PyLong_AsLongLong(version.ptr()) : 0;
    }

    bool cache_weight(CachedShard& row, PyObject* parts) const {
        row.weight_sizes.clear();
        if (!row.writes_weight) return true;
        for (Py_ssize_t k = 0; k < std::min<Py_ssize_t>(PyTuple_GET_SIZE(parts), kWritten); ++k) {
            PyObject* part = PyTuple_GET_ITEM(parts, k);
            DLTensor tensor;
            if (!reader_.is_plain_tensor(part) || !reader_.read(part, tensor)) return false;
            row.weight_sizes.push_back(bytes_of(tensor));
        }
        return true;
    }

    static int64_t bytes_of(const DLTensor& t) {
        int64_t bytes = t.type.bits / 8;
        for (int i = 0; i < t.dims; ++i) bytes *= t.shape[i];
        return bytes;
    }

    // The address of a tensor that has the form, device and type it had.
    bool refresh_tensor(const CachedShard& row, size_t place, PyObject* object, bool sharded, uint64_t& target) const {
        DLTensor tensor;
        if (!read_local(reader_at(place), object, sharded, tensor)) return false;
        if (!row.has_form_of(tensor) || !row.has_kind_of(place, tensor)) return false;
        target = address(tensor);
        return true;
    }

    bool refresh_state(const CachedShard& row, size_t place, PyObject* cached, bool sharded, uint64_t& target) const {
        PyObject* state = tensor_at(cached, place);
        return state == Py_None || refresh_tensor(row, place, state, sharded, target);
    }

    // A quantized weight: the same local tensors and components. Of those that the pass writes the sizes are the same,
    // and their addresses are taken, wherever their memory is by now.
    bool refresh_weight(CachedShard& row, PyObject* cached, PyObject* param, bool sharded) const {
        const auto local = sharded ? local_.get(param) : py::reinterpret_borrow<py::object>(param);
        if (!local || !refers_to(field(cached, Cached::kLocalRef), local.ptr())) return false;
        PyObject* master = field(cached, Cached::kMaster);
        if ((sharded ? local_.get(master).ptr() : master) != field(cached, Cached::kMasterLocal)) return false;
        PyObject* components = field(cached, Cached::kComponents);
        if (attribute(local.ptr(), components_.ptr()).ptr() != components) return false;
        PyObject *names = field(cached, Cached::kNames), *parts = field(cached, Cached::kParts);
        if (!holds(components, items_of(names), items_of(parts), static_cast<size_t>(PyTuple_GET_SIZE(names))))
            return false;
        const std::array<uint64_t*, kWritten> targets = {&row.shard.param, &row.shard.weight_scales};
        for (size_t k = 0; k < row.weight_sizes.size(); ++k) {
            PyObject* part = items_of(parts)[k];
            DLTensor tensor;
            if (!reader_.is_plain_tensor(part) || !reader_.read(part, tensor) || !is_contiguous(tensor)) return false;
            if (bytes_of(tensor) != row.weight_sizes[k] || !(tensor.device == row.device)) return false;
            if (!tensor.data && row.shard.numel) return false;
            *targets[k] = address(tensor);
        }
        return true;
    }

    static PyObject* const* items_of(PyObject* tuple) { return reinterpret_cast<PyTupleObject*>(tuple)->ob_item; }

    // Whether the states are those of the parameter.
    bool has_states(PyObject* cached) const {
        std::array<PyObject*, kMaxStates + 1> names, tensors;
        size_t count = 0;
        const auto add = [&](const py::str& name, PyObject* tensor) {
            if (tensor == Py_None) return;
            names[count] = name.ptr();
            tensors[count++] = tensor;
        };
        for (size_t i = 0; i < state_names_.size(); ++i) {
            add(state_names_[i], tensor_at(cached, kFirstStatePlace + i));
        }
        add(master_, field(cached, Cached::kMaster));
        return holds(field(cached, Cached::kStates), names.data(), tensors.data(), count);
    }

    bool refresh_gradient(CachedShard& row, PyObject* spec, PyObject* grad) const {
        DLTensor tensor;
        if (!read_gradient(spec, grad, tensor)) return false;
        if (!row.has_form_of(tensor) || !(tensor.device == row.device)) return false;
        row.shard.grad = address(tensor);
        return element_type(tensor.type, row.shard.grad_type);
    }

    bool read_gradient(PyObject* spec, PyObject* grad, DLTensor& tensor) const {
        if (spec == Py_None) return reader_.is_plain_tensor(grad) && reader_.read(grad, tensor);
        return read_local(reader_, grad, true, tensor) && is_placed_as(spec, spec_.get(grad));
    }

    static bool element_type(DLDataType type, Element& out) {
        if (type == DLDataType{kDLFloat, 32, 1}) return out = Element::kFloat32, true;
        if (type == DLDataType{kDLBfloat, 16, 1}) return out = Element::kBFloat16, true;
        if (type == DLDataType{kDLFloat, 16, 1}) return out = Element::kFloat16, true;
        return false;
    }

    // Same mesh, placements and global shape. FSDP2 gives gradients their parameter's own DTensorSpec.
    bool is_placed_as(PyObject* spec, const py::object& other) const {
        if (other.ptr() == spec) return true;
        if (!other) return false;
        return have_equal(spec, other.ptr(), mesh_) && have_equal(spec, other.ptr(), placements_) &&
               have_equal(attribute(spec, meta_.ptr()).ptr(), attribute(other.ptr(), meta_.ptr()).ptr(), shape_);
    }

    py::str master_ = interned("master_param"), components_ = interned("components"), version_ = interned("_version"),
            mesh_ = interned("mesh"), placements_ = interned("placements"), meta_ = interned("tensor_meta"),
            shape_ = interned("shape");
    std::vector<py::str> state_names_;
    TensorReader reader_, state_reader_;
    py::object dtensor_type_;
    AttributeReader local_, spec_;
};

}  // namespace fused_optim
