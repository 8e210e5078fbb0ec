// Thousands of parameters' objects lie all over memory: waiting for one after the other would take most of the time of
// looking at them. So they are fetched ahead, each in stages.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

#include "bindings/cached_shard.h"
#include "bindings/shard_reader.h"

namespace fused_optim {

inline PyObject* item(PyObject* list, size_t i) { return PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i)); }

// As long as they are looked at: a parameter, null where it is gone, and its gradient.
struct ParamAndGrad {
    py::object param, grad;
};

// What is read of parameters to get their gradients: the tuple, the reference, the parameter's object, its body.
class GradientPrefetcher {
public:
    static constexpr size_t kAhead = 12;  // rows, of the first stage

    explicit GradientPrefetcher(PyObject* cached) : cached_(cached), count_(PyList_GET_SIZE(cached)) {}

    // `ahead`: the number of a row, or beyond all of them.
    void fetch(size_t ahead) const {
        if (ahead < count_) __builtin_prefetch(item(cached_, ahead));
        if (PyObject* object = reference(ahead - kAhead / 4)) __builtin_prefetch(object);
        if (PyObject* object = param(ahead - kAhead / 2)) __builtin_prefetch(object);
        if (PyObject* object = param(ahead - 3 * kAhead / 4)) TensorLayout::prefetch_body(body_of(object));
    }

private:
    PyObject* reference(size_t row) const {  // beyond all rows where there is none yet
        return row < count_ ? field(item(cached_, row), Cached::kParamRef) : nullptr;
    }
    PyObject* param(size_t row) const {
        PyObject* found = reference(row);
        return found ? peek_at_referent(found) : nullptr;
    }

    PyObject* cached_;
    size_t count_;
};

// What is read of a row: its tuple, the tensors, DTensors' local tensors, their bodies and their storages.
class RowPrefetcher {
public:
    static constexpr size_t kAhead = 10;  // rows, of the first stage

    RowPrefetcher(const std::vector<CachedShard>& rows, PyObject* cached, const std::vector<ParamAndGrad>& tensors,
                  const ShardReader& reader)
        : rows_(rows), cached_(cached), tensors_(tensors), reader_(reader) {}

    // `ahead`: the number of a row, or beyond all of them.
    void fetch(size_t ahead) {
        at_stage(ahead, 0, [&](size_t row, Tensors&) { __builtin_prefetch(item(cached_, row)); });
        at_stage(ahead, 1, [&](size_t row, Tensors& tensors) {
            tensors = tensors_of(row);
            __builtin_prefetch(field(item(cached_, row), Cached::kStates));
            __builtin_prefetch(field(item(cached_, row), Cached::kComponents));
            for (const void* tensor : tensors) __builtin_prefetch(tensor);
        });
        at_stage(ahead, 2, [&](size_t, Tensors& tensors) {
            for (const void*& tensor : tensors) {
                if (PyObject* local = reader_.local().peek(object_at(tensor))) __builtin_prefetch(tensor = local);
            }
        });
        at_stage(ahead, 3, [&](size_t, Tensors& tensors) {
            for (const void*& tensor : tensors) {
                PyObject* object = object_at(tensor);
                tensor = object && reader_.tensors().is_tensor(object) ? body_of(object) : nullptr;
                if (tensor) TensorLayout::prefetch_body(body_at(tensor));
            }
        });
        at_stage(ahead, 4, [&](size_t, Tensors& tensors) {
            for (const void* tensor : tensors) {
                if (tensor) reader_.tensors().layout().prefetch_storage(body_at(tensor));
            }
        });
    }

private:
    static constexpr size_t kStages = 5;  // equally far apart

    // The tensors of a row, as far as it has been fetched: objects, local tensors' objects, torch's own tensors.
    using Tensors = std::array<const void*, kPlaces + 2>;

    template <class Fetch>
    void at_stage(size_t ahead, size_t stage, Fetch fetch) {
        const size_t row = ahead - stage * (kAhead / kStages);  // beyond all rows where there is none yet
        if (row < rows_.size()) fetch(row, fetched_[row % fetched_.size()]);
    }

    Tensors tensors_of(size_t row) const {
        PyObject* tuple = item(cached_, row);
        PyObject* parts = field(tuple, Cached::kParts);
        const auto read = std::min<size_t>(rows_[row].weight_sizes.size(), PyTuple_GET_SIZE(parts));
        Tensors tensors{read > 0 ? PyTuple_GET_ITEM(parts, 0) : tensors_[row].param.ptr(),
                        read > 1 ? PyTuple_GET_ITEM(parts, 1) : nullptr, tensors_[row].grad.ptr()};
        for (size_t place = kMasterPlace; place < kPlaces; ++place) tensors[place + 2] = tensor_at(tuple, place);
        return tensors;
    }

    static PyObject* object_at(const void* tensor) { return static_cast<PyObject*>(const_cast<void*>(tensor)); }
    static const char* body_at(const void* tensor) { return static_cast<const char*>(tensor); }

    const std::vector<CachedShard>& rows_;
    PyObject* cached_;
    const std::vector<ParamAndGrad>& tensors_;
    const ShardReader& reader_;
    std::array<Tensors, 16> fetched_{};  // of the rows that are being fetched
    static_assert(std::tuple_size_v<decltype(fetched_)> > kAhead);
};

}  // namespace fused_optim
