// Python's view of the gradient norm and scaling; the same interface for each engine but for where it runs.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "norm.h"

namespace py = pybind11;

namespace fused_optim::gradients {
namespace {

void require(bool condition, size_t index, const char* expected) {
    if (condition) return;
    throw std::invalid_argument("fused_optim: gradient " + std::to_string(index) + ": expected " + expected);
}

struct Gradients {
    std::vector<Gradient> entries;  // ordered by group

    Gradients(const std::vector<uint64_t>& addresses, const std::vector<uint64_t>& numels,
              const std::vector<uint32_t>& types, const std::vector<uint32_t>& groups) {
        const size_t count = addresses.size();
        if (numels.size() != count || types.size() != count || groups.size() != count) {
            throw std::invalid_argument("fused_optim: expected lists of one length");
        }
        entries.reserve(count);
        for (size_t i = 0; i < count; ++i) {
            require(types[i] < kCount<Element>, i, "a known element type");
            const Element type = static_cast<Element>(types[i]);
            require(numels[i] < kMaxGradientNumel, i, "fewer than 2^48 elements");
            require(groups[i] < kMaxNormGroups, i, "a group below 16");
            require(numels[i] == 0 || addresses[i] != 0, i, "an address");
            require(addresses[i] % element_bytes(type) == 0, i, "an address that is a multiple of the element's size");
            entries.push_back(Gradient::make(addresses[i], numels[i], groups[i], type));
        }
        std::stable_sort(entries.begin(), entries.end(),
                         [](const Gradient& a, const Gradient& b) { return a.group() < b.group(); });
    }

    NormRequest request(bool infinity, uint32_t group_count, float max_norm, uint64_t sums, uint64_t result) const {
        if (group_count == 0 || group_count > kMaxNormGroups ||
            (!entries.empty() && entries.back().group() >= group_count)) {
            throw std::invalid_argument("fused_optim: expected 1 to 16 groups, at least as many as the gradients have");
        }
        if (!sums || !result) throw std::invalid_argument("fused_optim: expected addresses of the results");
        return {infinity ? Norm::kInfinity : Norm::kTwo, group_count, max_norm, reinterpret_cast<double*>(sums),
                reinterpret_cast<float*>(result)};
    }
};

const float* factor_pointer(uint64_t factor) {
    if (!factor) throw std::invalid_argument("fused_optim: expected the address of the factor");
    return reinterpret_cast<const float*>(factor);
}

#if defined(FUSED_OPTIM_ENGINE_CUDA)
void norm(const Gradients& gradients, bool infinity, uint32_t group_count, float max_norm, uint64_t sums,
          uint64_t result, int device, uint64_t stream, uint64_t workspace) {
    if (!workspace) throw std::invalid_argument("fused_optim: expected the address of the workspace");
    norm_cuda(gradients.entries, gradients.request(infinity, group_count, max_norm, sums, result), device, stream,
              workspace);
}

void scale(const Gradients& gradients, uint64_t factor, int device, uint64_t stream) {
    scale_cuda(gradients.entries, factor_pointer(factor), device, stream);
}
#else
void norm(const Gradients& gradients, bool infinity, uint32_t group_count, float max_norm, uint64_t sums,
          uint64_t result, int threads) {
    norm_cpu(gradients.entries, gradients.request(infinity, group_count, max_norm, sums, result), threads);
}

void scale(const Gradients& gradients, uint64_t factor, int threads) {
    scale_cpu(gradients.entries, factor_pointer(factor), threads);
}
#endif

}  // namespace

inline void define_all(py::module_& m) {
    using Lists = const std::vector<uint32_t>&;
    using LongLists = const std::vector<uint64_t>&;
    using NoGil = py::call_guard<py::gil_scoped_release>;
    py::class_<Gradients>(m, "Gradients", py::module_local(), "Local gradients of one device, each in a group.")
        .def(py::init<LongLists, LongLists, Lists, Lists>(), py::arg("addresses"), py::arg("numels"), py::arg("types"),
             py::arg("groups"))
#if defined(FUSED_OPTIM_ENGINE_CUDA)
        .def("norm", &norm, py::arg("infinity"), py::arg("group_count"), py::arg("max_norm"), py::arg("sums"),
             py::arg("result"), py::arg("device"), py::arg("stream"), py::arg("workspace"), NoGil())
        .def("scale", &scale, py::arg("factor"), py::arg("device"), py::arg("stream"), NoGil());
    m.def("norm_workspace_bytes", &norm_workspace_bytes, py::arg("device"));
#else
        .def("norm", &norm, py::arg("infinity"), py::arg("group_count"), py::arg("max_norm"), py::arg("sums"),
             py::arg("result"), py::arg("threads"), NoGil())
        .def("scale", &scale, py::arg("factor"), py::arg("threads"), NoGil());
#endif
}

}  // namespace fused_optim::gradients
