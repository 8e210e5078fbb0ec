// The shards of one device from step to step: their addresses are taken anew before each step, and whatever is not
// as it was when Python checked it is reported, so that Python checks it again.
#pragma once

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/exchange.h"
#include "launch.h"

namespace fused_optim {

namespace py = pybind11;

// What Python keeps to be compared, one tuple per shard: the fields of fused_optim/backends's Watched. Those up to the
// master are tensors of one form.
#define FUSED_OPTIM_WATCHED(ROW)   \
    ROW(kParam, "param")           \
    ROW(kState0, "state0")         \
    ROW(kState1, "state1")         \
    ROW(kMaster, "master")         \
    ROW(kSpec, "spec")             \
    ROW(kStates, "states")         \
    ROW(kLocal, "local")           \
    ROW(kComponents, "components") \
    ROW(kNames, "names")           \
    ROW(kParts, "parts")           \
    ROW(kMasterLocal, "master_local")
FUSED_OPTIM_ENUM(Watched, FUSED_OPTIM_WATCHED);

inline PyObject* field(PyObject* watched, Watched which) {
    return PyTuple_GET_ITEM(watched, static_cast<Py_ssize_t>(which));
}

inline Watched watched_state(int state) {
    static_assert(static_cast<int>(Watched::kMaster) - static_cast<int>(Watched::kState0) == kMaxStates);
    return static_cast<Watched>(static_cast<int>(Watched::kState0) + state);
}

struct Names {
    py::str master = intern("master_param"), mesh = intern("mesh"), placements = intern("placements"),
            meta = intern("tensor_meta"), shape = intern("shape"), components = intern("components");

    static py::str intern(const char* name) { return py::reinterpret_steal<py::str>(PyUnicode_InternFromString(name)); }
};

inline py::object attribute(PyObject* object, PyObject* name) {
    py::object value = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, name));
    if (!value) PyErr_Clear();
    return value;
}

class Plan {
public:
    // `state_names`: the keys of the rule's states. `groups`: the param group of each shard, ascending. `state_reader`:
    // of the device on which the states are. No Python object but types and names is kept: Python keeps what is
    // watched, where the garbage collector sees it.
    Plan(Rule rule, const std::vector<py::str>& state_names, const std::vector<uint32_t>& groups, size_t group_count,
         TensorReader reader, TensorReader state_reader, VersionCounters versions, GradientLayout gradient_layout,
         py::object dtensor_type)
        : state_names_(state_names),
          reader_(reader),
          state_reader_(state_reader),
          gradient_layout_(gradient_layout),
          dtensor_type_(dtensor_type),
          local_(dtensor_type, "_local_tensor"),
          spec_(dtensor_type, "_spec"),
          version_of_(versions),
          rows_(groups.size()) {
        if (static_cast<int>(state_names.size()) != state_count(rule)) {
            throw std::invalid_argument("fused_optim: expected a name of each state");
        }
        if (!std::is_sorted(groups.begin(), groups.end()) || (!groups.empty() && groups.back() >= group_count)) {
            throw std::invalid_argument("fused_optim: shards are ordered by param group");
        }
        for (size_t i = 0; i < groups.size(); ++i) rows_[i].shard.group = groups[i];
        step_.rule = rule;
        step_.groups.resize(group_count);
    }

    Rule rule() const { return step_.rule; }

    // Takes the gradients, `param.<name>`, and the addresses of all shards that have one. Returns the numbers of those
    // that are not as they were at `watch`, which Python has to set again.
    std::vector<size_t> refresh(py::list watched, py::str name) {
        if (watched.size() != rows_.size()) throw std::invalid_argument("fused_optim: one watched tuple per shard");
        std::vector<Gradient> grads = gradients(watched.ptr(), name.ptr());
        std::vector<size_t> stale;
        written_.clear();
        Fetched fetched;
        for (size_t ahead = 0; ahead < rows_.size() + kAhead; ++ahead) {
            prefetch(watched.ptr(), grads, ahead, fetched);
            if (ahead < kAhead) continue;
            const size_t i = ahead - kAhead;
            rows_[i].has_gradient = grads[i].exists();
            if (!rows_[i].has_gradient) continue;
            PyObject* tuple = item(watched.ptr(), i);
            if (!refresh(rows_[i], tuple, grads[i], name.ptr())) {
                stale.push_back(i);
            } else if (has_own_master(rows_[i], tuple) && differs(rows_[i], read_versions(rows_[i], tuple))) {
                written_.push_back(i);
            }
        }
        return stale;
    }

    // Of those that `refresh` found as they were: where someone has written a parameter that has a master of its own.
    const std::vector<size_t>& written() const { return written_; }

    // The same of all shards that are watched, with a gradient or without. A write is named once.
    std::vector<size_t> find_written(py::list watched) {
        std::vector<size_t> found;
        for (size_t i = 0; i < rows_.size(); ++i) {
            PyObject* tuple = item(watched.ptr(), i);
            Row& row = rows_[i];
            if (row.watched && has_own_master(row, tuple) && differs(row, find_versions(row, tuple))) {
                found.push_back(i);
            }
        }
        return found;
    }

    // Remembers what shard `i` is like now. False if it cannot be watched.
    bool watch(size_t i, py::tuple tuple) {
        PyObject* const watched = tuple.ptr();
        if (tuple.size() != kCount<Watched>) throw std::invalid_argument("fused_optim: expected a Watched");
        Row& row = rows_.at(i);
        const bool sharded = field(watched, Watched::kSpec) != Py_None;
        const Watched first = is_quantized(watched) ? Watched::kMaster : Watched::kParam;  // gives the form
        row.watched = false;
        for (Watched which : {first, Watched::kState0, Watched::kState1, Watched::kMaster}) {
            DLTensor tensor;
            if (field(watched, which) == Py_None) continue;
            if (!read_local(reader_of(which), field(watched, which), sharded, tensor)) return false;
            if (which == first) {
                row.device = tensor.device;
                row.shape.assign(tensor.shape, tensor.shape + tensor.dims);
            }
            if (!row.has_form_of(tensor)) return false;
            row.kind(which) = {tensor.device, tensor.type};
        }
        if (is_quantized(watched) && !watch_weight(row, field(watched, Watched::kParts))) return false;
        if (has_own_master(row, watched)) row.versions = find_versions(row, watched);
        return row.watched = true;
    }

    // It has a gradient, and is stale in every later step that gives it one, until `watch`.
    void set_shard(size_t i, Shard shard) {
        Row& row = rows_.at(i);
        shard.group = row.shard.group;
        row.shard = shard;
        row.writes_weight = shard.quantized && shard.param;
        row.has_gradient = true;
        row.watched = false;
    }

    Hyper& group(size_t i) { return step_.groups.at(i); }

    // The numbers of the shards that have a gradient.
    std::vector<size_t> with_gradients() const {
        std::vector<size_t> found;
        for (size_t i = 0; i < rows_.size(); ++i) {
            if (rows_[i].has_gradient) found.push_back(i);
        }
        return found;
    }

    // The parameters that have a gradient.
    py::list updated(py::list watched) const {
        const auto count = std::count_if(rows_.begin(), rows_.end(), [](const Row& row) { return row.has_gradient; });
        py::list params(static_cast<size_t>(count));
        for (size_t i = 0, next = 0; i < rows_.size(); ++i) {
            if (!rows_[i].has_gradient) continue;
            PyObject* param = field(item(watched.ptr(), i), Watched::kParam);
            PyList_SET_ITEM(params.ptr(), static_cast<Py_ssize_t>(next++), py::handle(param).inc_ref().ptr());
        }
        return params;
    }

    // The numbers of the shards whose gradients have memory in common with another's.
    std::vector<size_t> sharing() const {
        struct Extent {
            uint64_t begin, end;
            size_t shard;
        };
        std::vector<Extent> extents;
        for (size_t i = 0; i < rows_.size(); ++i) {
            const Shard& s = rows_[i].shard;
            if (!rows_[i].has_gradient || !s.numel) continue;
            extents.push_back({s.grad, s.grad + s.numel * element_bytes(s.grad_type), i});
        }
        std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
        std::vector<size_t> found;
        const Extent* last = nullptr;  // of those before, the one that ends last
        for (const Extent& extent : extents) {
            if (last && extent.begin < last->end) found.insert(found.end(), {last->shard, extent.shard});
            if (!last || extent.end > last->end) last = &extent;
        }
        std::sort(found.begin(), found.end());
        found.erase(std::unique(found.begin(), found.end()), found.end());
        return found;
    }

    // After a step: the versions of these are those that belong to their masters. Read, not counted: slices of one
    // tensor share their counter.
    void mark(py::list watched) {
        for (size_t i = 0; i < rows_.size(); ++i) {
            PyObject* tuple = item(watched.ptr(), i);
            if (rows_[i].has_gradient && rows_[i].watched && has_own_master(rows_[i], tuple)) {
                rows_[i].versions = read_versions(rows_[i], tuple);
            }
        }
    }

    // Counts a write of each of these. False, and nothing is counted, where that is left to torch.
    bool count_writes(py::list watched) const {
        std::vector<py::handle> params;
        params.reserve(rows_.size());
        for (size_t i = 0; i < rows_.size(); ++i) {
            if (rows_[i].has_gradient) params.push_back(field(item(watched.ptr(), i), Watched::kParam));
        }
        return version_of_.increment(params);
    }

    // The param groups of these, ascending.
    std::vector<uint32_t> groups_with_gradients() const {
        std::vector<uint32_t> groups;
        for (const Row& row : rows_) {
            if (row.has_gradient && (groups.empty() || groups.back() != row.shard.group)) {
                groups.push_back(row.shard.group);
            }
        }
        return groups;
    }

    // The shards that have something to do.
    const Step& step() {
        step_.shards.clear();
        for (const Row& row : rows_) {
            if (row.has_gradient && row.shard.numel) step_.shards.push_back(row.shard);
        }
        return step_;
    }

private:
    static constexpr int kTensors = static_cast<int>(Watched::kMaster) + 1;
    static constexpr Py_ssize_t kWritten = 2;          // the first components: codes and scales
    static constexpr uint8_t kFloat = 2, kBfloat = 4;  // DLPack's

    // What changes when someone writes a parameter: the version counters of it and of its local tensor, or its memory.
    struct Versions {
        int64_t param = 0, local = 0;
        uint64_t address = 0;
    };

    struct Kind {
        DLDevice device{};
        DLDataType type{};
    };

    struct Row {
        Shard shard{};
        Versions versions;
        bool has_gradient = false;
        bool watched = false;
        bool writes_weight = false;  // the codes of a quantized one
        // What parameter, states and gradient must be like to take the places of those that were checked.
        DLDevice device{};  // the gradient's
        std::array<Kind, kTensors> kinds{};
        std::vector<int64_t> shape;
        std::vector<int64_t>
            weight_sizes;  // bytes of a quantized weight's codes and scales, where the pass writes them

        Kind& kind(Watched which) { return kinds[static_cast<size_t>(which)]; }
        bool has_form_of(const DLTensor& t) const {
            if (static_cast<size_t>(t.dims) != shape.size()) return false;
            for (size_t d = 0; d < shape.size(); ++d) {
                if (shape[d] != t.shape[d]) return false;
            }
            return (t.data || !shard.numel) && is_contiguous(t);
        }
    };

    static PyObject* item(PyObject* list, size_t i) { return PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i)); }

    // torch's own tensor, which the parameter keeps alive, where that is enough; else Python's object.
    struct Gradient {
        const char* body = nullptr;
        py::object object;

        bool exists() const { return body || (object && !object.is_none()); }
    };

    std::vector<Gradient> gradients(PyObject* watched, PyObject* name) const {
        std::vector<Gradient> grads(rows_.size());
        const PropertyReader gradient(reader_.tensor_type(), name);
        const bool direct = gradient_layout_.found() && PyUnicode_CompareWithASCIIString(name, "grad") == 0;
        for (size_t ahead = 0; ahead < rows_.size() + kGradientAhead; ++ahead) {
            prefetch_gradient(watched, ahead);
            if (ahead < kGradientAhead) continue;
            const size_t i = ahead - kGradientAhead;
            PyObject* param = field(item(watched, i), Watched::kParam);
            if (direct && gradient.is_torchs(param) && !is_dtensor(param)) {
                grads[i].body = gradient_layout_.gradient(record_of(param));
            } else {
                grads[i].object = gradient(param);
            }
        }
        return grads;
    }

    static constexpr size_t kGradientAhead = 16;  // rows, in four stages

    // Fetched ahead, as below: the tuple, the parameter's object, its body, what torch keeps there.
    void prefetch_gradient(PyObject* watched, size_t ahead) const {
        constexpr size_t kStep = kGradientAhead / 4;
        const auto param = [&](size_t stage) -> PyObject* {
            const size_t row = ahead - stage * kStep;  // beyond all rows where there is none yet
            return row < rows_.size() ? field(item(watched, row), Watched::kParam) : nullptr;
        };
        if (ahead < rows_.size()) __builtin_prefetch(item(watched, ahead));
        if (PyObject* object = param(1)) __builtin_prefetch(object);
        if (PyObject* object = param(2)) gradient_layout_.prefetch_record(body_of(object));
        if (PyObject* object = param(3)) gradient_layout_.prefetch_gradient(record_of(object));
    }

    const char* record_of(PyObject* param) const {
        const char* body = body_of(param);
        return body ? gradient_layout_.record(body) : nullptr;
    }
    bool is_dtensor(PyObject* object) const {
        return reinterpret_cast<PyObject*>(Py_TYPE(object)) == dtensor_type_.ptr();
    }

    static constexpr size_t kAhead = 10;  // rows, of the first stage
    static constexpr size_t kStages = 5;  // equally far apart

    // The tensors that are read of a row, as far as it has been fetched: objects, local tensors' objects, torch's own
    // tensors. And those of the rows that are being fetched.
    using Tensors = std::array<const void*, 6>;
    using Fetched = std::array<Tensors, 16>;
    static_assert(std::tuple_size_v<Fetched> > kAhead);

    // Thousands of parameters' objects lie all over memory: waiting for one after the other would take most of the
    // time. So rows are fetched ahead, each in stages: its tuple, the tensors, DTensors' local tensors, their bodies
    // and their storages.
    void prefetch(PyObject* watched, const std::vector<Gradient>& grads, size_t ahead, Fetched& fetched) const {
        constexpr size_t kStep = kAhead / kStages;
        const auto at_stage = [&](size_t stage, auto fetch) {
            const size_t row = ahead - stage * kStep;  // beyond all rows where there is none yet
            if (row < rows_.size()) fetch(row, fetched[row % fetched.size()]);
        };
        at_stage(0, [&](size_t row, Tensors&) { __builtin_prefetch(item(watched, row)); });
        at_stage(1, [&](size_t row, Tensors& tensors) {
            tensors = tensors_of(rows_[row], item(watched, row), grads[row].object.ptr());
            __builtin_prefetch(field(item(watched, row), Watched::kStates));
            __builtin_prefetch(field(item(watched, row), Watched::kComponents));
            for (const void* tensor : tensors) __builtin_prefetch(tensor);
        });
        at_stage(2, [&](size_t, Tensors& tensors) {
            for (const void*& tensor : tensors) {
                if (PyObject* local = local_.peek(object_at(tensor))) __builtin_prefetch(tensor = local);
            }
        });
        at_stage(3, [&](size_t row, Tensors& tensors) {
            if (grads[row].body) TensorLayout::prefetch_body(grads[row].body);
            for (const void*& tensor : tensors) {
                PyObject* object = object_at(tensor);
                tensor = object && reader_.is_tensor(object) ? body_of(object) : nullptr;
                if (tensor) TensorLayout::prefetch_body(body_at(tensor));
            }
        });
        at_stage(4, [&](size_t row, Tensors& tensors) {
            if (grads[row].body) reader_.layout().prefetch_storage(grads[row].body);
            for (const void* tensor : tensors) {
                if (tensor) reader_.layout().prefetch_storage(body_at(tensor));
            }
        });
    }

    static PyObject* object_at(const void* tensor) { return static_cast<PyObject*>(const_cast<void*>(tensor)); }
    static const char* body_at(const void* tensor) { return static_cast<const char*>(tensor); }

    static Tensors tensors_of(const Row& row, PyObject* tuple, PyObject* grad) {
        PyObject* parts = field(tuple, Watched::kParts);
        const auto read = std::min<size_t>(row.weight_sizes.size(), PyTuple_GET_SIZE(parts));
        return {read > 0 ? PyTuple_GET_ITEM(parts, 0) : field(tuple, Watched::kParam),
                read > 1 ? PyTuple_GET_ITEM(parts, 1) : nullptr,
                field(tuple, Watched::kState0),
                field(tuple, Watched::kState1),
                field(tuple, Watched::kMaster),
                grad};
    }

    const TensorReader& reader_of(Watched which) const { return which == Watched::kParam ? reader_ : state_reader_; }

    static bool is_of(const Kind& kind, const DLTensor& t) { return t.device == kind.device && t.type == kind.type; }

    bool read_local(const TensorReader& reader, PyObject* object, bool sharded, DLTensor& out) const {
        if (!sharded) return reader.read(object, out);
        if (!is_dtensor(object)) return false;
        py::object found;
        PyObject* local = local_.peek(object);
        if (!local) local = (found = local_.get(object)).ptr();
        return local && reader.is_plain_tensor(local) && reader.read(local, out);
    }

    // Inlined as a whole: calls would take a sixth of its time.
    [[gnu::flatten]] bool refresh(Row& row, PyObject* watched, Gradient& grad, PyObject* name) const {
        if (!row.watched) return false;
        PyObject* spec = field(watched, Watched::kSpec);
        const bool sharded = spec != Py_None;
        if (sharded && spec_.get(field(watched, Watched::kParam)).ptr() != spec) return false;
        const bool found = is_quantized(watched)
                               ? refresh_weight(row, watched, sharded)
                               : read_as_watched(row, Watched::kParam, watched, sharded, row.shard.param);
        return found && has_states(watched) &&
               refresh_state(row, Watched::kState0, watched, sharded, row.shard.states[0].address) &&
               refresh_state(row, Watched::kState1, watched, sharded, row.shard.states[1].address) &&
               refresh_state(row, Watched::kMaster, watched, sharded, row.shard.master) &&
               refresh_gradient(row, watched, grad, name);
    }

    // A float tensor beside the parameter; remainders complete whatever the parameter is.
    static bool has_own_master(Row& row, PyObject* watched) {
        return field(watched, Watched::kMaster) != Py_None && row.kind(Watched::kMaster).type.code == kFloat;
    }

    // Of a shard whose addresses were just taken.
    Versions read_versions(const Row& row, PyObject* watched) const {
        PyObject* param = field(watched, Watched::kParam);
        Versions found;
        found.param = version_of_(param);
        if (field(watched, Watched::kSpec) != Py_None) found.local = version_of_(local_.get(param).ptr());
        if (!is_quantized(watched)) found.address = row.shard.param;
        return found;
    }

    // Of any.
    Versions find_versions(const Row& row, PyObject* watched) const {
        Versions found = read_versions(row, watched);
        const bool sharded = field(watched, Watched::kSpec) != Py_None;
        DLTensor tensor;
        if (!is_quantized(watched) && read_local(reader_, field(watched, Watched::kParam), sharded, tensor)) {
            found.address = address(tensor);
        }
        return found;
    }

    // Whether these versions are others than those known, and not any more. Also true where a step was begun and not
    // made.
    static bool differs(Row& row, const Versions& now) {
        const Versions before = std::exchange(row.versions, now);
        return now.param != before.param || now.local != before.local || now.address != before.address;
    }

    bool watch_weight(Row& row, PyObject* parts) const {
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
    bool read_as_watched(Row& row, Watched which, PyObject* watched, bool sharded, uint64_t& target) const {
        DLTensor tensor;
        if (!read_local(reader_of(which), field(watched, which), sharded, tensor)) return false;
        if (!row.has_form_of(tensor) || !is_of(row.kind(which), tensor)) return false;
        target = address(tensor);
        return true;
    }

    // A quantized weight: the same local tensors and components. Of those that the pass writes the sizes are the same,
    // and their addresses are taken, wherever their memory is by now.
    bool refresh_weight(Row& row, PyObject* watched, bool sharded) const {
        PyObject* local = field(watched, Watched::kLocal);
        PyObject* param = field(watched, Watched::kParam);
        if ((sharded ? local_.get(param).ptr() : param) != local) return false;
        PyObject* master = field(watched, Watched::kMaster);
        if ((sharded ? local_.get(master).ptr() : master) != field(watched, Watched::kMasterLocal)) return false;
        PyObject* components = field(watched, Watched::kComponents);
        if (attribute(local, names_.components.ptr()).ptr() != components) return false;
        PyObject *names = field(watched, Watched::kNames), *parts = field(watched, Watched::kParts);
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

    static bool is_quantized(PyObject* watched) { return field(watched, Watched::kLocal) != Py_None; }

    bool refresh_state(Row& row, Watched which, PyObject* watched, bool sharded, uint64_t& target) const {
        return field(watched, which) == Py_None || read_as_watched(row, which, watched, sharded, target);
    }

    // Whether the states are those of the parameter.
    bool has_states(PyObject* watched) const {
        std::array<PyObject*, kMaxStates + 1> names, tensors;
        size_t count = 0;
        const auto add = [&](const py::str& name, PyObject* tensor) {
            if (tensor == Py_None) return;
            names[count] = name.ptr();
            tensors[count++] = tensor;
        };
        for (size_t i = 0; i < state_names_.size(); ++i) {
            add(state_names_[i], field(watched, watched_state(static_cast<int>(i))));
        }
        add(names_.master, field(watched, Watched::kMaster));
        return holds(field(watched, Watched::kStates), names.data(), tensors.data(), count);
    }

    // Whether a dict has values[k] at names[k], k < count. It is walked, since its order is mostly theirs: looking all
    // of them up takes twice as long.
    static bool holds(PyObject* dict, PyObject* const* names, PyObject* const* values, size_t count) {
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

    bool refresh_gradient(Row& row, PyObject* watched, Gradient& grad, PyObject* name) const {
        DLTensor tensor;
        const bool found = grad.body && reader_.read_body(grad.body, tensor);
        if (grad.body && !found) grad.object = attribute(field(watched, Watched::kParam), name);
        if (!found && !read_gradient(field(watched, Watched::kSpec), grad.object.ptr(), tensor)) return false;
        if (!row.has_form_of(tensor) || !(tensor.device == row.device)) return false;
        row.shard.grad = address(tensor);
        return element_type(tensor.type, row.shard.grad_type);
    }

    bool read_gradient(PyObject* spec, PyObject* grad, DLTensor& tensor) const {
        if (!grad) return false;
        if (spec == Py_None) return reader_.is_plain_tensor(grad) && reader_.read(grad, tensor);
        return read_local(reader_, grad, true, tensor) && is_placed_as(spec, spec_.get(grad));
    }

    static bool element_type(DLDataType type, Element& out) {
        if (type == DLDataType{kFloat, 32, 1}) return out = Element::kFloat32, true;
        if (type == DLDataType{kBfloat, 16, 1}) return out = Element::kBFloat16, true;
        if (type == DLDataType{kFloat, 16, 1}) return out = Element::kFloat16, true;
        return false;
    }

    // Same mesh, placements and global shape. FSDP2 gives gradients their parameter's own DTensorSpec.
    bool is_placed_as(PyObject* spec, const py::object& other) const {
        if (other.ptr() == spec) return true;
        if (!other) return false;
        return equal(spec, other.ptr(), names_.mesh) && equal(spec, other.ptr(), names_.placements) &&
               equal(attribute(spec, names_.meta.ptr()).ptr(), attribute(other.ptr(), names_.meta.ptr()).ptr(),
                     names_.shape);
    }

    static bool equal(PyObject* a, PyObject* b, const py::str& name) {
        if (!a || !b) return false;
        py::object left = attribute(a, name.ptr()), right = attribute(b, name.ptr());
        int same = left && right ? PyObject_RichCompareBool(left.ptr(), right.ptr(), Py_EQ) : 0;
        if (same < 0) PyErr_Clear();
        return same == 1;
    }

    Names names_;
    std::vector<py::str> state_names_;
    TensorReader reader_, state_reader_;
    GradientLayout gradient_layout_;
    py::object dtensor_type_;
    AttributeReader local_, spec_;
    VersionCounters version_of_;
    std::vector<Row> rows_;
    std::vector<size_t> written_;
    Step step_;
};

}  // namespace fused_optim
