// Python's view of an engine. Compiled twice: as _engine_cpu and as _engine_cuda, with the same interface.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "bindings/bindings_cast.h"
#include "bindings/bindings_changes.h"
#include "bindings/bindings_decode.h"
#include "bindings/bindings_norm.h"
#if defined(FUSED_OPTIM_ENGINE_CUDA)
#include <cuda_runtime.h>

#include "bindings/bindings_product.h"
#endif
#include "bindings/bindings_quantize.h"
#include "bindings/shard_table.h"
#include "bindings/shard_work.h"
#include "bindings/tensor_reader.h"
#include "cast.h"
#include "launch.h"
#include "norm.h"
#include "quantize.h"
#include "rules.h"

namespace py = pybind11;
using namespace fused_optim;

namespace {

Rule rule_of(int number) {
    if (number >= 0 && number < kCount<Rule>) return static_cast<Rule>(number);
    throw std::invalid_argument("fused_optim: expected a known update rule");
}

template <class T>
const T* pointer(uint64_t address) {
    return reinterpret_cast<const T*>(address);
}

// `values`: the rule's own hyperparameters, in the order of rules.toml.
void set_group(ShardTable& table, size_t i, double lr, double weight_decay, const std::vector<double>& values,
               int64_t number, bool decoupled, bool maximize, bool stochastic_rounding, uint64_t lr_pointer,
               uint64_t grad_scale, uint64_t grad_factor, uint64_t found_inf, uint64_t step_pointer) {
    Hyper hyper{};
    if (values.size() > std::size(hyper.values)) throw std::invalid_argument("fused_optim: too many hyperparameters");
    hyper.lr = lr;
    hyper.weight_decay = weight_decay;
    std::copy(values.begin(), values.end(), hyper.values);
    hyper.step = number;
    hyper.lr_pointer = pointer<float>(lr_pointer);
    hyper.grad_scale = pointer<float>(grad_scale);
    hyper.grad_factor = pointer<float>(grad_factor);
    hyper.found_inf = pointer<float>(found_inf);
    hyper.step_pointer = reinterpret_cast<int64_t*>(step_pointer);
    hyper.decoupled = decoupled;
    hyper.maximize = maximize;
    hyper.stochastic_rounding = stochastic_rounding;
    table.group(i) = hyper;
}

// Whether quantized weights whose states have these formats can be written by the update.
bool writes_weights(int rule, const std::vector<int>& state_formats) {
    State states[kMaxStates]{};
    set_formats(states, rule_of(rule), state_formats, 0);
#if defined(FUSED_OPTIM_ENGINE_CUDA)
    return writes_weights_cuda(rule_of(rule), states);
#else
    return true;
#endif
}

std::vector<Element> elements_of(const std::vector<int>& types) {
    std::vector<Element> found;
    for (size_t i = 0; i < types.size(); ++i)
        found.push_back(enumerator<Element>(types[i], i, "values of a known element type"));
    return found;
}

#if defined(FUSED_OPTIM_ENGINE_CUDA)
void load_kernels(int rule, int device) {
    load_update_kernels(rule_of(rule), device);
    load_norm_kernels(device);
    load_quantize_kernels(device);
    load_cast_kernels(device);
    load_product_kernels(device);
    load_normalize_kernels(device);
}

// Releases of CUDA, such as 13000: of the runtime that is linked into this engine, and the newest that the driver runs.
// The latter is 0 where there is no driver. No GPU is touched.
std::pair<int, int> cuda_versions() {
    int driver = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
    return {CUDART_VERSION, driver};
}

void launch_step(const Step& step, int device, uint64_t stream, uint64_t workspace, uint64_t workspace_size) {
    py::gil_scoped_release release;
    if (workspace_size < workspace_bytes(step)) workspace = 0;
    launch_cuda(step, device, stream, workspace);
}

void launch(ShardTable& table, int device, uint64_t stream, uint64_t workspace, uint64_t workspace_size) {
    launch_step(table.step(), device, stream, workspace, workspace_size);
}

void launch_matrix_pass(ShardTable& table, bool first, const std::vector<size_t>& shards,
                        const std::vector<uint64_t>& values, const std::vector<int>& types, int device, uint64_t stream,
                        uint64_t workspace, uint64_t workspace_size) {
    launch_step(table.matrix_pass(first, shards, values, elements_of(types)), device, stream, workspace,
                workspace_size);
}
#else
void launch_step(const Step& step, int threads) {
    py::gil_scoped_release release;
    launch_cpu(step, threads);
}

void launch(ShardTable& table, int threads) { launch_step(table.step(), threads); }

void launch_matrix_pass(ShardTable& table, bool first, const std::vector<size_t>& shards,
                        const std::vector<uint64_t>& values, const std::vector<int>& types, int threads) {
    launch_step(table.matrix_pass(first, shards, values, elements_of(types)), threads);
}
#endif

// tensor, address and bytes of its storage, offset there in elements
using ExampleRows = std::vector<std::tuple<py::object, uint64_t, uint64_t, int64_t>>;

std::vector<TensorReader::Example> examples_of(const ExampleRows& rows) {
    std::vector<TensorReader::Example> examples;
    for (const auto& [tensor, storage, bytes, offset] : rows) examples.push_back({tensor, storage, bytes, offset});
    return examples;
}

// Whether two lists hold the same objects: `is`, item by item.
bool same_objects(const py::list& left, const py::list& right) {
    const Py_ssize_t count = PyList_GET_SIZE(left.ptr());
    if (count != PyList_GET_SIZE(right.ptr())) return false;
    for (Py_ssize_t i = 0; i < count; ++i) {
        if (PyList_GET_ITEM(left.ptr(), i) != PyList_GET_ITEM(right.ptr(), i)) return false;
    }
    return true;
}

uint64_t id_of(const PyObject* object) { return reinterpret_cast<uint64_t>(object); }

// The same of objects that are not kept, by their `id()`.
bool are_objects(const py::list& list, const Numbers& ids) {
    if (static_cast<size_t>(PyList_GET_SIZE(list.ptr())) != ids.values.size()) return false;
    for (size_t i = 0; i < ids.values.size(); ++i) {
        if (id_of(PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i))) != ids.values[i]) return false;
    }
    return true;
}

// Of a dict's keys and values, in its order.
bool are_items(const py::dict& dict, const Numbers& keys, const Numbers& values) {
    const auto count = static_cast<size_t>(PyDict_Size(dict.ptr()));
    if (count != keys.values.size() || count != values.values.size()) return false;
    PyObject *key, *value;
    size_t i = 0;
    for (Py_ssize_t position = 0; PyDict_Next(dict.ptr(), &position, &key, &value); ++i) {
        if (id_of(key) != keys.values[i] || id_of(value) != values.values[i]) return false;
    }
    return true;
}

template <class... Kinds>
py::tuple names_of(Kinds... kinds) {
    return py::make_tuple(EnumNames<StateKind>::all[static_cast<int>(kinds)]...);
}

// The tables as Python spells them in backends/tables.py: rows without their enumerators.
py::dict tables() {
#define FUSED_OPTIM_TUPLE(enumerator, ...) py::make_tuple(__VA_ARGS__),
#define FUSED_OPTIM_RULE_ROW(enumerator, name, kinds, hyperparameters, reads) \
    py::make_tuple(name, names_of kinds, py::make_tuple hyperparameters),
    using Rows = std::vector<py::tuple>;
    const std::pair<const char*, Rows> all[] = {
        {"Element", {FUSED_OPTIM_ELEMENTS(FUSED_OPTIM_TUPLE)}},
        {"Master", {FUSED_OPTIM_MASTERS(FUSED_OPTIM_TUPLE)}},
        {"Format", {FUSED_OPTIM_FORMATS(FUSED_OPTIM_TUPLE)}},
        {"Rule", {FUSED_OPTIM_RULES(FUSED_OPTIM_RULE_ROW)}},
        {"CachedShard", {FUSED_OPTIM_CACHED(FUSED_OPTIM_TUPLE)}},
        {"WeightFormat", {FUSED_OPTIM_WEIGHT_FORMATS(FUSED_OPTIM_TUPLE)}},
        {"ScaleStage", {FUSED_OPTIM_SCALE_STAGES(FUSED_OPTIM_TUPLE)}},
        {"CastFormat", {FUSED_OPTIM_CAST_FORMATS(FUSED_OPTIM_TUPLE)}},
    };
    py::dict found;
    for (const auto& [name, rows] : all) found[name] = py::tuple(py::cast(rows));
    return found;
}

// How many elements of a row share a scale, of the formats of weights that the update can write; 1: any number does.
py::dict written_blocks() {
    py::dict blocks;
    for (int i = 0; i < kCount<WeightFormat>; ++i) {
        const WeightTraits traits = traits_of(static_cast<WeightFormat>(i));
        if (!traits.written_by_update) continue;
        blocks[EnumNames<WeightFormat>::all[i]] = traits.block_scales ? traits.block : 1;
    }
    return blocks;
}

}  // namespace

PYBIND11_MODULE(FUSED_OPTIM_MODULE, m) {
    m.attr("TABLES") = tables();
    m.attr("WRITTEN_BLOCKS") = written_blocks();
    m.def("writes_weights", &writes_weights, py::arg("rule"), py::arg("state_formats"));
#if defined(FUSED_OPTIM_ENGINE_CUDA)
    m.def("load_kernels", &load_kernels, py::arg("rule"), py::arg("device"));
    m.def("cuda_versions", &cuda_versions);
#endif
    py::class_<Numbers>(m, "Numbers", py::module_local(), "A list of addresses or sizes, kept in C++.")
        .def(py::init<std::vector<uint64_t>>(), py::arg("values"))
        .def("tolist", [](const Numbers& numbers) { return numbers.values; });
    py::implicitly_convertible<py::list, Numbers>();
    py::class_<TensorReader>(m, "TensorReader", py::module_local(), "Reads torch's tensors of one device.")
        .def(py::init([](py::object exchange_api, py::object tensor_type,
                         const std::vector<std::pair<py::object, uint64_t>>& keys, const ExampleRows& examples,
                         const ExampleRows& copied, bool checks_ends) {
                 return TensorReader(exchange_api, tensor_type, DispatchKeys(keys), examples_of(examples),
                                     examples_of(copied), checks_ends);
             }),
             py::arg("exchange_api"), py::arg("tensor_type"), py::arg("keys"), py::arg("examples"), py::arg("copied"),
             py::arg("checks_ends") = false)
        .def_property_readonly("reads_directly", &TensorReader::reads_directly)
        .def("unusual", &TensorReader::unusual, py::arg("tensors"))
        .def("addresses", &TensorReader::addresses, py::arg("tensors"));
    gradients::define_all(m);
    weights::define_all(m);
    casts::define_all(m);
    changes::define_all(m);
#if defined(FUSED_OPTIM_ENGINE_CUDA)
    products::define_all(m);
#else
    decoding::define_all(m);
#endif
    m.def("same_objects", &same_objects, py::arg("left"), py::arg("right"));
    m.def("are_objects", &are_objects, py::arg("list"), py::arg("ids"));
    m.def("are_items", &are_items, py::arg("dict"), py::arg("keys"), py::arg("values"));
    py::class_<ShardTable>(m, "ShardTable", py::module_local(),
                           "The shards of one device and their param groups, step by step.")
        .def(py::init([](int rule, const std::vector<py::str>& state_names, const std::vector<uint32_t>& groups,
                         size_t group_count, TensorReader reader, TensorReader state_reader, py::dict element_types,
                         py::object dtensor_type) {
                 if (state_names.size() != static_cast<size_t>(state_count(rule_of(rule)))) {
                     throw std::invalid_argument("fused_optim: expected a name of each state");
                 }
                 return ShardTable(rule_of(rule), groups, group_count, ShardWorkReader(element_types),
                                   ShardReader(state_names, reader, state_reader, dtensor_type));
             }),
             py::arg("rule"), py::arg("state_names"), py::arg("groups"), py::arg("group_count"), py::arg("reader"),
             py::arg("state_reader"), py::arg("element_types"), py::arg("dtensor_type"))
        .def("set_shard", &ShardTable::set_shard, py::arg("shard"), py::arg("work"))
        .def("cache", &ShardTable::cache, py::arg("shard"), py::arg("cached"))
        .def("refresh", &ShardTable::refresh, py::arg("cached"), py::arg("attribute"))
        .def("sharing", &ShardTable::sharing)
        .def("written", &ShardTable::written)
        .def("find_written", &ShardTable::find_written, py::arg("cached"))
        .def("with_gradients", &ShardTable::with_gradients)
        .def("updated", &ShardTable::updated, py::arg("cached"))
        .def("mark", &ShardTable::mark, py::arg("cached"))
        .def("groups_with_gradients", &ShardTable::groups_with_gradients)
        .def("set_group", &set_group, py::arg("group"), py::arg("lr"), py::arg("weight_decay"), py::arg("values"),
             py::arg("step"), py::arg("decoupled"), py::arg("maximize"), py::arg("stochastic_rounding"),
             py::arg("lr_pointer") = 0, py::arg("grad_scale") = 0, py::arg("grad_factor") = 0, py::arg("found_inf") = 0,
             py::arg("step_pointer") = 0)
#if defined(FUSED_OPTIM_ENGINE_CUDA)
        .def("launch", &launch, py::arg("device"), py::arg("stream"), py::arg("workspace") = 0,
             py::arg("workspace_size") = 0)
        .def("launch_matrix_pass", &launch_matrix_pass, py::arg("first"), py::arg("shards"), py::arg("values"),
             py::arg("types"), py::arg("device"), py::arg("stream"), py::arg("workspace") = 0,
             py::arg("workspace_size") = 0)
#else
        .def("launch", &launch, py::arg("threads"))
        .def("launch_matrix_pass", &launch_matrix_pass, py::arg("first"), py::arg("shards"), py::arg("values"),
             py::arg("types"), py::arg("threads"))
#endif
        ;
}
