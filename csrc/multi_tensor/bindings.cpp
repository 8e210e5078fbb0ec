// Python's view of an engine. Compiled twice: as _engine_cpu and as _engine_cuda, with the same interface.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>

#include "launch.h"

namespace py = pybind11;
using namespace fused_optim;

namespace fused_optim {
void register_gradients(py::module_& m);  // bindings_norm.cpp
}

namespace {

void require(bool condition, size_t index, const char* expected) {
    if (condition) return;
    throw std::invalid_argument("fused_optim: shard " + std::to_string(index) + ": expected " + expected);
}

// The last check before raw addresses are used; Python has validated tensors by name already.
void check(const Shard& s, size_t i) {
    require(s.numel == 0 || (s.grad && s.param && s.exp_avg && s.exp_avg_sq), i, "addresses of all tensors");
    require(s.master_kind == Master::kParameter || s.numel == 0 || s.master, i, "the address of the master");
    require(s.block_log2 >= 5 && s.block_log2 <= 7, i, "blocks of 32, 64 or 128");
    require(s.inner_local > 0, i, "inner_local > 0");
    require(s.grad_type <= Element::kFloat16 && s.param_type <= Element::kFloat16, i, "a known element type");
    require(s.exp_avg_format <= Format::kInt8 && s.exp_avg_sq_format <= Format::kInt8, i, "a known state format");
    require(s.master_kind <= Master::kRemainder8, i, "a known master");
    require(s.master_kind < Master::kRemainder16 || s.param_type == Element::kBFloat16, i, "a BF16 parameter");
    require(s.numel == 0 || s.scales || !(is_scaled(s.exp_avg_format) || is_scaled(s.exp_avg_sq_format)), i,
            "the address of the scales");
}

template <class T>
const T* pointer(uint64_t address) {
    return reinterpret_cast<const T*>(address);
}

void add_group(Step& step, double lr, double beta1, double beta2, double eps, double weight_decay, int64_t number,
               bool adam_w, bool bias_correction, bool maximize, bool stochastic_rounding, uint64_t lr_pointer,
               uint64_t grad_scale, uint64_t grad_factor, uint64_t found_inf, uint64_t step_pointer) {
    Hyper hyper{};
    hyper.lr = lr;
    hyper.beta1 = beta1;
    hyper.beta2 = beta2;
    hyper.eps = eps;
    hyper.weight_decay = weight_decay;
    hyper.step = number;
    hyper.lr_pointer = pointer<float>(lr_pointer);
    hyper.grad_scale = pointer<float>(grad_scale);
    hyper.grad_factor = pointer<float>(grad_factor);
    hyper.found_inf = pointer<float>(found_inf);
    hyper.step_pointer = reinterpret_cast<int64_t*>(step_pointer);
    hyper.adam_w = adam_w;
    hyper.bias_correction = bias_correction;
    hyper.maximize = maximize;
    hyper.stochastic_rounding = stochastic_rounding;
    step.groups.push_back(hyper);
}

// Belongs to the group added last.
void add_shard(Step& step, uint64_t grad, uint64_t param, uint64_t master, uint64_t exp_avg, uint64_t exp_avg_sq,
               uint64_t scales, uint64_t numel, uint64_t offset, uint64_t inner_local, uint64_t inner_global,
               uint32_t key, int grad_type, int param_type, int master_kind, int exp_avg_format, int exp_avg_sq_format,
               int block_log2) {
    if (step.groups.empty()) throw std::invalid_argument("fused_optim: add_group comes before add_shard");
    Shard s{};
    s.grad = grad;
    s.param = param;
    s.master = master;
    s.exp_avg = exp_avg;
    s.exp_avg_sq = exp_avg_sq;
    s.scales = scales;
    s.numel = numel;
    s.offset = offset;
    s.inner_local = inner_local;
    s.inner_global = inner_global;
    s.key = key;
    s.group = static_cast<uint32_t>(step.groups.size() - 1);
    s.grad_type = static_cast<Element>(grad_type);
    s.param_type = static_cast<Element>(param_type);
    s.master_kind = static_cast<Master>(master_kind);
    s.exp_avg_format = static_cast<Format>(exp_avg_format);
    s.exp_avg_sq_format = static_cast<Format>(exp_avg_sq_format);
    s.block_log2 = static_cast<uint8_t>(block_log2);
    check(s, step.shards.size());
    step.shards.push_back(s);
}

}  // namespace

PYBIND11_MODULE(FUSED_OPTIM_MODULE, m) {
    register_gradients(m);
    py::class_<Step>(m, "Step", py::module_local(), "One step over the shards of one device: groups and their shards.")
        .def(py::init<>())
        .def("add_group", &add_group, py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"),
             py::arg("weight_decay"), py::arg("step"), py::arg("adam_w"), py::arg("bias_correction"),
             py::arg("maximize"), py::arg("stochastic_rounding"), py::arg("lr_pointer") = 0, py::arg("grad_scale") = 0,
             py::arg("grad_factor") = 0, py::arg("found_inf") = 0, py::arg("step_pointer") = 0)
        .def("add_shard", &add_shard, py::arg("grad"), py::arg("param"), py::arg("master"), py::arg("exp_avg"),
             py::arg("exp_avg_sq"), py::arg("scales"), py::arg("numel"), py::arg("offset"), py::arg("inner_local"),
             py::arg("inner_global"), py::arg("key"), py::arg("grad_type"), py::arg("param_type"),
             py::arg("master_kind"), py::arg("exp_avg_format"), py::arg("exp_avg_sq_format"), py::arg("block_log2"))
#if defined(FUSED_OPTIM_ENGINE_CUDA)
        .def("launch", &launch_cuda, py::arg("device"), py::arg("stream"), py::arg("workspace") = 0,
             py::call_guard<py::gil_scoped_release>())
#else
        .def("launch", &launch_cpu, py::arg("threads"), py::call_guard<py::gil_scoped_release>())
#endif
        ;
}
