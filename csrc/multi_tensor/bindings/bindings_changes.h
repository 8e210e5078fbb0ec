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

// bits, elements, first unit
using CountRow = std::array<uint64_t, 3>;

void count_changed(const std::vector<CountRow>& rows, uint64_t counts, FUSED_OPTIM_WHERE) {
    std::vector<Marked> tensors;
    for (const auto& [bits, numel, first_unit] : rows) {
        require(counts && (bits || !numel) && bits % 4 == 0, "whole words of bits");
        tensors.push_back({bits, numel, first_unit, 0, 0, 0, 0, 0, 0});
    }
    FUSED_OPTIM_ON(count)(tensors, reinterpret_cast<int64_t*>(counts), FUSED_OPTIM_HERE);
}

// The fields of Marked.
using MarkedRow = std::array<uint64_t, 9>;

void collect_changed(const std::vector<MarkedRow>& rows, uint64_t counts, uint64_t ends, FUSED_OPTIM_WHERE) {
    std::vector<Marked> tensors;
    for (const auto& [bits, numel, first_unit, values, indices_out, values_out, start, first, bytes] : rows) {
        require(counts && ends && bits % 4 == 0 && (!numel || (bits && values && indices_out && values_out)),
                "addresses of all tensors");
        require(bytes == 1 || bytes == 2 || bytes == 4, "elements of 1, 2 or 4 bytes");
        tensors.push_back({bits, numel, first_unit, values, indices_out, values_out, start, first, bytes});
    }
    FUSED_OPTIM_ON(collect)
    (tensors, reinterpret_cast<const int64_t*>(counts), reinterpret_cast<const int64_t*>(ends), FUSED_OPTIM_HERE);
}

}  // namespace

inline void define_all(py::module_& m) {
#if defined(FUSED_OPTIM_ENGINE_CUDA)
    define(m, "mark_differences", &mark_differences, py::arg("rows"));
#endif
    m.attr("CHANGES_PER_UNIT") = kUnitBits;
    define(m, "count_changed", &count_changed, py::arg("rows"), py::arg("counts"));
    define(m, "collect_changed", &collect_changed, py::arg("rows"), py::arg("counts"), py::arg("ends"));
    py::class_<Look>(m, "Look", py::module_local(), "What tells that others have written a parameter.")
        .def(py::init<py::str, std::vector<py::str>>(), py::arg("inner"), py::arg("names"))
        .def("forget", &Look::forget);
    py::class_<Looker>(m, "Looker", py::module_local(), "Looks at the parameters of one device.")
        .def(py::init<TensorReader, py::object>(), py::arg("reader"), py::arg("dtensor_type"))
        .def("find_written", &Looker::find_written, py::arg("cached"), py::arg("looks"))
        .def("remember", &Looker::remember, py::arg("cached"), py::arg("looks"));
}

}  // namespace fused_optim::changes
