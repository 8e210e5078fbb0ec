// Python's view of changed bits: who has written parameters, where copies differ, which bits are set.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/look.h"
#include "bindings/where.h"
#include "collect.h"
#include "compare.h"

namespace py = pybind11;

namespace fused_optim::changes {
namespace {

void require(bool condition, const char* expected) {
    if (!condition) throw std::invalid_argument(std::string("fused_optim: changes: expected ") + expected);
}

#if defined(FUSED_OPTIM_ENGINE_CUDA)
// before, after, bits, elements, bytes of one
using ComparisonRow = std::array<uint64_t, 5>;

void mark_differences(const std::vector<ComparisonRow>& rows, int device, uint64_t stream) {
    std::vector<Comparison> comparisons;
    for (const auto& [before, after, bits, numel, bytes] : rows) {
        require(before && after && bits && (bytes == 1 || bytes == 2 || bytes == 4), "elements of 1, 2 or 4 bytes");
        comparisons.push_back({before, after, bits, numel, static_cast<uint32_t>(bytes)});
    }
    compare_cuda(comparisons, device, stream);
}
#endif

// bits, elements, values, index of the first element, bytes of one
using MarkedRow = std::array<uint64_t, 5>;

std::vector<Marked> marked(const std::vector<MarkedRow>& rows, uint64_t places) {
    std::vector<Marked> tensors;
    uint64_t units = 0;
    for (const auto& [bits, numel, values, first, bytes] : rows) {
        require(places && (!numel || (bits && values)) && bits % 4 == 0,
                "addresses of all tensors, whole words of bits");
        require(bytes == 1 || bytes == 2 || bytes == 4, "elements of 1, 2 or 4 bytes");
        tensors.push_back({bits, numel, units, values, first, bytes, 0, 0});
        units += tensors.back().units();
    }
    return tensors;
}

std::vector<int64_t> count_changed(const std::vector<MarkedRow>& rows, uint64_t places, FUSED_OPTIM_WHERE) {
    return FUSED_OPTIM_ON(count)(marked(rows, places), reinterpret_cast<int64_t*>(places), FUSED_OPTIM_HERE);
}

// of indices, or 0 where all elements are wanted, and of values; both 0: nothing is
using TargetRow = std::array<uint64_t, 2>;

void collect_changed(const std::vector<MarkedRow>& rows, const std::vector<TargetRow>& targets, uint64_t places,
                     FUSED_OPTIM_WHERE) {
    require(targets.size() == rows.size(), "targets of all tensors");
    std::vector<Marked> wanted;
    std::vector<Marked> tensors = marked(rows, places);
    for (size_t i = 0; i < rows.size(); ++i) {
        tensors[i].indices_out = targets[i][0];
        tensors[i].values_out = targets[i][1];
        if (tensors[i].values_out) wanted.push_back(tensors[i]);
    }
    FUSED_OPTIM_ON(collect)(wanted, reinterpret_cast<const int64_t*>(places), FUSED_OPTIM_HERE);
}

}  // namespace

inline void define_all(py::module_& m) {
#if defined(FUSED_OPTIM_ENGINE_CUDA)
    define(m, "mark_differences", &mark_differences, py::arg("rows"));
#endif
    m.attr("CHANGES_PER_UNIT") = kUnitBits;
    define(m, "count_changed", &count_changed, py::arg("rows"), py::arg("places"));
    define(m, "collect_changed", &collect_changed, py::arg("rows"), py::arg("targets"), py::arg("places"));
    py::class_<Look>(m, "Look", py::module_local(), "What tells that others have written a parameter.")
        .def(py::init<py::str, std::vector<py::str>>(), py::arg("inner"), py::arg("names"))
        .def("forget", &Look::forget);
    py::class_<Looker>(m, "Looker", py::module_local(), "Looks at the parameters of one device.")
        .def(py::init<TensorReader, py::object>(), py::arg("reader"), py::arg("dtensor_type"))
        .def("find_written", &Looker::find_written, py::arg("cached"), py::arg("looks"))
        .def("remember", &Looker::remember, py::arg("cached"), py::arg("looks"));
}

}  // namespace fused_optim::changes
