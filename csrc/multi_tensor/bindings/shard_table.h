// The shards of one device from step to step: their addresses are taken anew before each step, and whatever is not
// as it was when Python checked it is reported, so that Python checks it again.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings/cached_shard.h"
#include "bindings/matrix_pass.h"
#include "bindings/shard_reader.h"
#include "bindings/shard_work.h"
#include "launch.h"

namespace fused_optim {

inline PyObject* item(PyObject* list, size_t i) { return PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i)); }

class ShardTable {
public:
    // `groups`: the param group of each shard, ascending. No Python object but types and names is kept: Python keeps
    // what is cached, where the garbage collector sees it.
    ShardTable(Rule rule, const std::vector<uint32_t>& groups, size_t group_count, ShardWorkReader works,
               ShardReader reader)
        : works_(std::move(works)), reader_(std::move(reader)), rows_(groups.size()) {
        if (!std::is_sorted(groups.begin(), groups.end()) || (!groups.empty() && groups.back() >= group_count)) {
            throw std::invalid_argument("fused_optim: shards are ordered by param group");
        }
        for (size_t i = 0; i < groups.size(); ++i) rows_[i].shard.group = groups[i];
        step_.rule = rule;
        step_.groups.resize(group_count);
    }

    // Takes the gradients, `param.<name>`, and the addresses of all shards that have one. Returns the numbers of those
    // that are not as they were at `cache`, which Python has to set again.
    std::vector<size_t> refresh(py::list cached, py::str name) {
        if (cached.size() != rows_.size()) throw std::invalid_argument("fused_optim: one cached tuple per shard");
        std::vector<size_t> changed;
        written_.clear();
        for (size_t i = 0; i < rows_.size(); ++i) {
            CachedShard& row = rows_[i];
            PyObject* tuple = item(cached.ptr(), i);
            const py::object param = parameter(tuple);
            const py::object grad = param ? attribute(param.ptr(), name.ptr()) : py::object();
            row.has_gradient = grad && !grad.is_none();
            if (!row.has_gradient) continue;
            if (!row.is_cached || !reader_.refresh(row, tuple, param.ptr(), grad.ptr())) {
                changed.push_back(i);
            } else if (row.has_own_master(tuple) && is_written(row, reader_.read_versions(row, tuple, param.ptr()))) {
                written_.push_back(i);
            }
        }
        return changed;
    }

    // Of those that `refresh` found as they were: where someone has written a parameter that has a master of its own.
    const std::vector<size_t>& written() const { return written_; }

    // The same of all shards that are cached, with a gradient or without. A write is named once.
    std::vector<size_t> find_written(py::list cached) {
        std::vector<size_t> found;
        for (size_t i = 0; i < rows_.size(); ++i) {
            PyObject* tuple = item(cached.ptr(), i);
            CachedShard& row = rows_[i];
            if (!row.is_cached || !row.has_own_master(tuple)) continue;
            const py::object param = parameter(tuple);
            if (param && is_written(row, reader_.find_versions(row, tuple, param.ptr()))) found.push_back(i);
        }
        return found;
    }

    // Remembers what shard `i` is like now. False if it cannot be cached.
    bool cache(size_t i, py::tuple cached) {
        if (cached.size() != kCount<Cached>) throw std::invalid_argument("fused_optim: expected a CachedShard");
        CachedShard& row = rows_.at(i);
        row.is_cached = false;
        return row.is_cached = reader_.cache(row, cached.ptr());
    }

    // `work`: a ShardWork. It has a gradient, and has changed in every later step that gives it one, until `cache`.
    void set_shard(size_t i, const py::object& work) {
        CachedShard& row = rows_.at(i);
        Shard shard = works_.read(work, step_.rule, i);
        shard.group = row.shard.group;
        row.shard = shard;
        row.writes_weight = shard.quantized && shard.param;
        row.has_gradient = true;
        row.is_cached = false;
    }

    Hyper& group(size_t i) { return step_.groups.at(i); }

    // The first of Muon's passes over these shards, or else the second; `values`: see matrix_pass.h.
    Step matrix_pass(bool first, const std::vector<size_t>& numbers, const std::vector<uint64_t>& values,
                     const std::vector<Element>& types) const {
        if (step_.rule != Rule::kMuon || values.size() != numbers.size() || types.size() != numbers.size()) {
            throw std::invalid_argument(
                "fused_optim: expected shards of Muon, and for each the values of its matrices");
        }
        Step step{first ? Rule::kMuon : Rule::kDescent, {}, step_.groups};
        for (size_t k = 0; k < numbers.size(); ++k) {
            const CachedShard& row = rows_.at(numbers[k]);
            if (!row.has_gradient || (row.shard.numel && !values[k])) {
                throw std::invalid_argument("fused_optim: expected shards with gradients, and addresses of values");
            }
            if (!row.shard.numel) continue;
            step.shards.push_back((first ? before_matrices : after_matrices)(row.shard, values[k], types[k]));
        }
        return step;
    }

    // The numbers of the shards that have a gradient.
    std::vector<size_t> with_gradients() const {
        std::vector<size_t> found;
        for (size_t i = 0; i < rows_.size(); ++i) {
            if (rows_[i].has_gradient) found.push_back(i);
        }
        return found;
    }

    // The parameters that have a gradient.
    py::list updated(py::list cached) const {
        const std::vector<size_t> numbers = with_gradients();
        py::list params(numbers.size());
        for (size_t k = 0; k < numbers.size(); ++k) {
            py::object param = parameter(item(cached.ptr(), numbers[k]));
            if (!param) throw std::logic_error("fused_optim: a parameter is gone in the middle of a step");
            PyList_SET_ITEM(params.ptr(), static_cast<Py_ssize_t>(k), param.release().ptr());
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
    void mark(py::list cached) {
        for (size_t i = 0; i < rows_.size(); ++i) {
            PyObject* tuple = item(cached.ptr(), i);
            CachedShard& row = rows_[i];
            if (!row.has_gradient || !row.is_cached || !row.has_own_master(tuple)) continue;
            if (const py::object param = parameter(tuple)) {
                row.versions = reader_.read_versions(row, tuple, param.ptr());
            }
        }
    }

    // The param groups of these, ascending.
    std::vector<uint32_t> groups_with_gradients() const {
        std::vector<uint32_t> groups;
        for (const CachedShard& row : rows_) {
            if (row.has_gradient && (groups.empty() || groups.back() != row.shard.group)) {
                groups.push_back(row.shard.group);
            }
        }
        return groups;
    }

    // The shards that have something to do.
    const Step& step() {
        step_.shards.clear();
        for (const CachedShard& row : rows_) {
            if (row.has_gradient && row.shard.numel) step_.shards.push_back(row.shard);
        }
        return step_;
    }

private:
    // Whether these versions are others than those known, and not any more. Also true where a step was begun and not
    // made.
    static bool is_written(CachedShard& row, const Versions& now) { return std::exchange(row.versions, now) != now; }

    ShardWorkReader works_;
    ShardReader reader_;
    std::vector<CachedShard> rows_;
    std::vector<size_t> written_;
    Step step_;
};

}  // namespace fused_optim
