// Python's view of changed bits: where copies differ, which bits are set.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>
#include <string>
#include <vector>

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
// copy, values, bits, elements, bytes of one
using ComparisonRow = std::array<uint64_t, 5>;

void mark_differences(const std::vector<ComparisonRow>& rows, int device, uint64_t stream) {
    std::vector<Comparison> comparisons;
    for (const auto& [copy, values, bits, numel, bytes] : rows) {
        require(copy && values && bits && (bytes == 1 || bytes == 2 || bytes == 4), "elements of 1, 2 or 4 bytes");
        comparisons.push_back({copy, values, bits, numel, static_cast<uint32_t>(bytes)});
    }
    compare_cuda(comparisons, device, stream);
}
#endif

// bits, elements, values, index of the first element, bytes of one
using MarkedRow = std::array<uint64_t, 5>;

// Many calls take the same ones.
struct MarkedRows {
    std::vector<Marked> tensors;

    explicit MarkedRows(const std::vector<MarkedRow>& rows) {
        uint64_t units = 0;
        for (const auto& [bits, numel, values, first, bytes] : rows) {
            require((!numel || (bits && values)) && bits % 4 == 0, "addresses of all tensors, whole words of bits");
            require(bytes == 1 || bytes == 2 || bytes == 4, "elements of 1, 2 or 4 bytes");
            tensors.push_back({bits, numel, units, values, first, bytes, 0, 0});
            units += tensors.back().units();
        }
    }
};

std::vector<int64_t> count_changed(const MarkedRows& rows, uint64_t places, FUSED_OPTIM_WHERE) {
    require(places || rows.tensors.empty(), "an address of places");
    return FUSED_OPTIM_ON(count)(rows.tensors, reinterpret_cast<int64_t*>(places), FUSED_OPTIM_HERE);
}

// of indices, or 0 where all elements are wanted, and of values; both 0: nothing is
using TargetRow = std::array<uint64_t, 2>;

void collect_changed(const MarkedRows& rows, const std::vector<TargetRow>& targets, uint64_t places,
                     FUSED_OPTIM_WHERE) {
    require(targets.size() == rows.tensors.size(), "targets of all tensors");
    require(places || targets.empty(), "an address of places");
    std::vector<Marked> wanted;
    for (size_t i = 0; i < targets.size(); ++i) {
        if (!targets[i][1]) continue;
        wanted.push_back(rows.tensors[i]);
        wanted.back().indices_out = targets[i][0];
        wanted.back().values_out = targets[i][1];
    }
    FUSED_OPTIM_ON(collect)(wanted, reinterpret_cast<const int64_t*>(places), FUSED_OPTIM_HERE);
}

}  // namespace

inline void define_all(py::module_& m) {
#if defined(FUSED_OPTIM_ENGINE_CUDA)
    define(m, "mark_differences", &mark_differences, py::arg("rows"));
#endif
    m.attr("CHANGES_PER_UNIT") = kUnitBits;
    py::class_<MarkedRows>(m, "MarkedRows", py::module_local(), "Tensors and their bits, by address.")
        .def(py::init<const std::vector<MarkedRow>&>(), py::arg("rows"));
    define(m, "count_changed", &count_changed, py::arg("rows"), py::arg("places"));
    define(m, "collect_changed", &collect_changed, py::arg("rows"), py::arg("targets"), py::arg("places"));
}

}  // namespace fused_optim::changes
