// Python's view of quantized weights; the same interface for each engine but for where it runs.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>
#include <string>

#include "bindings/tensor_reader.h"
#include "bindings/where.h"
#include "quantize.h"

namespace py = pybind11;

namespace fused_optim::weights {
namespace {

// values, data, scales, tensor_scale, rows, columns
using WeightRow = std::array<uint64_t, 6>;
// address of the step's number, that number, offset, inner_local (0: round to nearest), inner_global, key
using RoundingRow = std::array<uint64_t, 6>;

void require(bool condition, const char* expected) {
    if (!condition) throw std::invalid_argument(std::string("fused_optim: quantized weights: expected ") + expected);
}

WeightFormat format_of(uint32_t number) {
    require(number < kCount<WeightFormat>, "a known format");
    return static_cast<WeightFormat>(number);
}

// The last check before raw addresses are used.
Weight weight_of(const WeightRow& row, const RoundingRow& rounding, WeightFormat format) {
    const auto [values, data, scales, tensor_scale, rows, columns] = row;
    require(columns == 0 || rows < kMaxWeightNumel / columns, "fewer than 2^43 elements");
    const WeightTraits traits = traits_of(format);
    const bool empty = rows == 0 || columns == 0;
    require(empty || (values && data && (scales || !traits.block_scales) && (tensor_scale || !traits.tensor_scale)),
            "addresses of all tensors");
    require(columns % traits.per_byte == 0, "an even number of columns");
    const auto [steps, step, offset, inner_local, inner_global, key] = rounding;
    return {values,
            data,
            scales,
            tensor_scale,
            rows,
            columns,
            steps,
            offset,
            {inner_local, inner_global},
            static_cast<uint32_t>(step),
            static_cast<uint32_t>(key)};
}

std::vector<Values> values_of(const std::vector<uint64_t>& addresses, const std::vector<uint64_t>& numels,
                              uint64_t absmax) {
    require(addresses.size() == numels.size(), "lists of one length");
    require(absmax || addresses.empty(), "the address of the results");
    std::vector<Values> values;
    values.reserve(numels.size());
    for (size_t i = 0; i < numels.size(); ++i) {
        require(numels[i] == 0 || addresses[i], "addresses of all tensors");
        require(numels[i] < kMaxWeightNumel, "fewer than 2^43 elements");
        values.push_back({addresses[i], numels[i]});
    }
    return values;
}

// One number per weight in each list; addresses are 0 where a format or a rule needs none.
using Column = std::vector<uint64_t>;

std::vector<Weight> weights_of(const std::array<const Column*, 6>& columns, const std::vector<RoundingRow>& roundings,
                               WeightFormat format) {
    const size_t count = columns[0]->size();
    for (const Column* column : columns) require(column->size() == count, "lists of one length");
    require(roundings.empty() || roundings.size() == count, "lists of one length");
    std::vector<Weight> weights;
    weights.reserve(count);
    for (size_t i = 0; i < count; ++i) {
        WeightRow row;
        for (size_t k = 0; k < row.size(); ++k) row[k] = (*columns[k])[i];
        weights.push_back(weight_of(row, roundings.empty() ? RoundingRow{} : roundings[i], format));
    }
    return weights;
}

std::vector<TensorScale> scales_of(const Column& scales, const Column& histories, const Column& absmaxes,
                                   const ScaleRule& rule) {
    require(histories.size() == scales.size() && absmaxes.size() == scales.size(), "lists of one length");
    std::vector<TensorScale> rows;
    rows.reserve(scales.size());
    for (size_t i = 0; i < scales.size(); ++i) {
        const bool measured = absmaxes[i] || rule.stage == ScaleStage::kBefore;
        require(scales[i] && measured && (histories[i] || !rule.history), "addresses of all tensors");
        rows.push_back({reinterpret_cast<float*>(scales[i]), reinterpret_cast<float*>(histories[i]),
                        reinterpret_cast<const float*>(absmaxes[i])});
    }
    return rows;
}

ScaleRule rule_of(float largest, float factor, uint32_t history, bool most_recent, uint32_t stage, uint64_t applies) {
    require(stage < kCount<ScaleStage>, "a known stage");
    return {
        largest, factor, history, most_recent, static_cast<ScaleStage>(stage), reinterpret_cast<const bool*>(applies)};
}

Element element_of(uint32_t number) {
    require(number < kCount<Element>, "a known element type");
    return static_cast<Element>(number);
}

void quantize_absmax(const std::vector<uint64_t>& addresses, const std::vector<uint64_t>& numels, uint64_t result,
                     FUSED_OPTIM_WHERE) {
    FUSED_OPTIM_ON(absmax)
    (values_of(addresses, numels, result), reinterpret_cast<float*>(result), FUSED_OPTIM_HERE);
}

void quantize_rescale(const Numbers& scales, const Numbers& histories, const Numbers& absmaxes, float largest,
                      float factor, uint32_t history, bool most_recent, uint32_t stage, uint64_t applies,
                      FUSED_OPTIM_WHERE) {
    const ScaleRule rule = rule_of(largest, factor, history, most_recent, stage, applies);
    FUSED_OPTIM_ON(rescale)
    (scales_of(scales.values, histories.values, absmaxes.values, rule), rule, FUSED_OPTIM_HERE);
}

void quantize_encode(const Numbers& values, const Numbers& data, const Numbers& scales, const Numbers& tensor_scales,
                     const Numbers& rows, const Numbers& columns, const std::vector<RoundingRow>& roundings,
                     uint32_t format, bool round_up, FUSED_OPTIM_WHERE) {
    const WeightKind kind{format_of(format), round_up};
    const std::array<const Column*, 6> table = {&values.values,        &data.values, &scales.values,
                                                &tensor_scales.values, &rows.values, &columns.values};
    FUSED_OPTIM_ON(encode)
    (weights_of(table, roundings, kind.format), kind, FUSED_OPTIM_HERE);
}

void quantize_decode(const WeightRow& weight, uint32_t format, uint32_t type, FUSED_OPTIM_WHERE) {
    FUSED_OPTIM_ON(decode)
    (weight_of(weight, {}, format_of(format)), format_of(format), element_of(type), FUSED_OPTIM_HERE);
}

}  // namespace

inline void define_all(py::module_& m) {
    define(m, "quantize_absmax", &quantize_absmax, py::arg("addresses"), py::arg("numels"), py::arg("result"));
    define(m, "quantize_rescale", &quantize_rescale, py::arg("scales"), py::arg("histories"), py::arg("absmaxes"),
           py::arg("largest"), py::arg("factor"), py::arg("history"), py::arg("most_recent"), py::arg("stage"),
           py::arg("applies"));
    define(m, "quantize_encode", &quantize_encode, py::arg("values"), py::arg("data"), py::arg("scales"),
           py::arg("tensor_scales"), py::arg("rows"), py::arg("columns"), py::arg("roundings"), py::arg("format"),
           py::arg("round_up"));
    define(m, "quantize_decode", &quantize_decode, py::arg("weight"), py::arg("format"), py::arg("type"));
}

}  // namespace fused_optim::weights
