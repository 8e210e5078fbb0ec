// A shard as Python describes it, fused_optim/backends's ShardWork, as the engines have it: `Shard` in table.h.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "quantize.h"
#include "table.h"

namespace fused_optim {

namespace py = pybind11;

inline void require(bool condition, size_t index, const char* expected) {
    if (condition) return;
    throw std::invalid_argument("fused_optim: shard " + std::to_string(index) + ": expected " + expected);
}

// Checked before the cast, which would keep only the low 8 bits.
template <class Enum>
Enum enumerator(int number, size_t index, const char* expected) {
    require(number >= 0 && number < kCount<Enum>, index, expected);
    return static_cast<Enum>(number);
}

// The last check before raw addresses are used; Python has validated tensors by name already.
inline void check(Rule rule, const Shard& s, size_t i) {
    const auto states = s.states, end = states + state_count(rule);
    const bool complete = s.grad && std::all_of(states, end, [](const State& state) { return state.address != 0; });
    require(s.numel == 0 || complete, i, "addresses of all tensors");
    require(s.numel == 0 || s.param || s.quantized, i, "the address of the parameter");
    require(s.master_kind == Master::kParameter || s.numel == 0 || s.master, i, "the address of the master");
    require(s.numel == 0 || !s.quantized || !s.param || s.weight_scales, i, "the scales of a quantized parameter");
    require(s.geometry.inner_local > 0, i, "inner_local > 0");
    const bool whole_master = s.master_kind == Master::kFloat32 || s.master_kind == Master::kFloat16;
    require(!s.quantized || whole_master, i, "an FP32 or FP16 master of a quantized parameter");
    require(!s.quantized || !s.param || traits_of(s.weight_format).written_by_update, i,
            "a format of weights that the update can write");
    require(!is_remainder(s.master_kind) || s.param_type == Element::kBFloat16, i, "a BF16 parameter");
    const bool scaled = is_scaled(s.master_kind) ||
                        std::any_of(states, end, [](const State& state) { return is_scaled(state.format); });
    require(s.numel == 0 || s.scales || !scaled, i, "the address of the scales");
}

// Formats of a rule's states, into the first places of `states`.
inline void set_formats(State* states, Rule rule, const std::vector<int>& formats, size_t i) {
    require(formats.size() == static_cast<size_t>(state_count(rule)), i, "as many states as the rule has");
    for (size_t k = 0; k < formats.size(); ++k) {
        states[k].format = enumerator<Format>(formats[k], i, "a known state format");
    }
}

class ShardWorkReader {
public:
    // `element_types`: torch's dtypes -> numbers of `Element`.
    explicit ShardWorkReader(py::dict element_types) : element_types_(element_types) {}

    // `i`: the shard's number, for errors.
    Shard read(const py::object& work, Rule rule, size_t i) const {
        const py::object param = work.attr("param"), grad = work.attr("grad");
        Shard s{};
        s.grad = address_of(grad);
        s.param = address_of(param);
        s.master = address_of(work.attr("master"));
        s.key = work.attr("key").cast<uint32_t>();
        s.grad_type = element_type(grad, i);
        s.param_type = element_type(param, i);
        read_layout(s, work.attr("layout"), rule, i);
        read_states(s, work.attr("states"), rule, i);
        const py::object target = work.attr("target");
        if (!target.is_none()) read_target(s, target, work.attr("absmax"), i);
        check(rule, s, i);
        return s;
    }

private:
    static uint64_t address_of(const py::object& tensor) {
        return tensor.is_none() ? 0 : tensor.attr("data_ptr")().cast<uint64_t>();
    }

    Element element_type(const py::object& tensor, size_t i) const {
        const py::object dtype = tensor.attr("dtype");
        const int number = element_types_.contains(dtype) ? element_types_[dtype].cast<int>() : -1;
        return enumerator<Element>(number, i, "a known element type");
    }

    static void read_layout(Shard& s, const py::object& layout, Rule rule, size_t i) {
        const py::object geometry = layout.attr("geometry");
        s.scales = address_of(layout.attr("scales"));
        s.numel = geometry.attr("numel").cast<uint64_t>();
        s.offset = geometry.attr("offset").cast<uint64_t>();
        s.geometry = {geometry.attr("inner_local").cast<uint64_t>(), geometry.attr("inner_global").cast<uint64_t>()};
        s.master_kind = enumerator<Master>(layout.attr("master").cast<int>(), i, "a known master");
        s.block_log2 = block_log2(geometry.attr("block").cast<int>(), i);
        std::vector<int> formats;
        for (py::handle format : layout.attr("formats")) formats.push_back(format.attr("code").cast<int>());
        set_formats(s.states, rule, formats, i);
    }

    // Of a block's size; 0: there are no scales, and any will do.
    static uint8_t block_log2(int block, size_t i) {
        for (const uint8_t log2 : {5, 6, 7}) {
            if (block == 1 << log2) return log2;
        }
        require(block == 0, i, "blocks of 32, 64 or 128");
        return 7;
    }

    static void read_states(Shard& s, const py::tuple& states, Rule rule, size_t i) {
        require(states.size() == static_cast<size_t>(state_count(rule)), i, "as many states as the rule has");
        for (size_t k = 0; k < states.size(); ++k) s.states[k].address = address_of(states[k]);
    }

    static void read_target(Shard& s, const py::object& target, const py::object& absmax, size_t i) {
        s.quantized = true;
        s.param = address_of(target.attr("data"));
        s.weight_format = enumerator<WeightFormat>(target.attr("format").cast<int>(), i, "a known format of weights");
        s.round_up = target.attr("round_up").cast<bool>();
        s.weight_scales = address_of(target.attr("scale"));
        s.absmax = address_of(absmax);
    }

    py::dict element_types_;
};

}  // namespace fused_optim
