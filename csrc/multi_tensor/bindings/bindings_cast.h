// Python's view of casts for products; the same interface for each engine but for where it runs.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/where.h"
#include "cast.h"

namespace py = pybind11;

namespace fused_optim::casts {
namespace {

void require(bool condition, const char* expected) {
    if (!condition) throw std::invalid_argument(std::string("fused_optim: casts: expected ") + expected);
}

CastFormat cast_format_of(uint32_t number) {
    require(number < kCount<CastFormat>, "a known format");
    return static_cast<CastFormat>(number);
}

// The last check before raw addresses are used.
Cast checked(const Cast& cast) {
    require(cast.columns == 0 || cast.rows < kMaxWeightNumel / cast.columns, "fewer than 2^43 elements");
    require(cast.rows % kCastMultiple == 0 && cast.columns % kCastMultiple == 0, "sizes that are multiples of 16");
    for (const uint64_t address : {cast.values, cast.codes, cast.transposed}) {
        require(address % kCastMultiple == 0, "addresses that are multiples of 16");
    }
    return cast;
}

void cast_tensor(uint64_t values, uint64_t codes, uint64_t transposed, uint64_t scale, uint64_t absmax, uint64_t rows,
                 uint64_t columns, bool half, uint32_t format, bool measured, FUSED_OPTIM_WHERE) {
    require(values && scale && absmax && (codes || transposed), "addresses of all tensors");
    Cast cast = checked({values, codes, transposed, scale, 0, absmax, rows, columns});
    cast.half = half;
    FUSED_OPTIM_ON(cast_tensor)(cast, cast_format_of(format), measured, FUSED_OPTIM_HERE);
}

void cast_delayed(uint64_t values, uint64_t codes, uint64_t transposed, uint64_t scale, uint64_t absmax,
                  uint64_t history, uint32_t remembered, uint64_t rows, uint64_t columns, bool half, uint32_t format,
                  FUSED_OPTIM_WHERE) {
    require(values && scale && absmax && history && remembered && (codes || transposed), "addresses of all tensors");
    Cast cast = checked({values, codes, transposed, scale, 0, absmax, rows, columns});
    cast.history = history;
    cast.remembered = remembered;
    cast.half = half;
    FUSED_OPTIM_ON(cast_delayed)(cast, cast_format_of(format), FUSED_OPTIM_HERE);
}

void cast_rows(uint64_t values, uint64_t codes, uint64_t scale, uint64_t transposed, uint64_t transposed_scale,
               uint64_t absmax, uint64_t rows, uint64_t columns, bool half, uint32_t format, FUSED_OPTIM_WHERE) {
    require(values && (codes || transposed) && !codes == !scale && !transposed == !transposed_scale &&
                !transposed == !absmax,
            "addresses of all tensors");
    Cast cast = checked({values, codes, transposed, scale, transposed_scale, absmax, rows, columns});
    cast.half = half;
    FUSED_OPTIM_ON(cast_rows)(cast, cast_format_of(format), FUSED_OPTIM_HERE);
}

void cast_blocks(uint64_t values, uint64_t codes, uint64_t scale, uint64_t transposed, uint64_t transposed_scale,
                 uint64_t rows, uint64_t columns, bool half, bool power_of_two, bool tiles, uint32_t format,
                 FUSED_OPTIM_WHERE) {
    require(values && (codes || transposed) && !codes == !scale && !transposed == !transposed_scale,
            "addresses of all tensors");
    require(!codes || columns % kCastBlock == 0, "columns in blocks of 128");
    require(!transposed || rows % kCastBlock == 0, "rows in blocks of 128");
    Cast cast = checked({values, codes, transposed, scale, transposed_scale, 0, rows, columns, power_of_two, tiles});
    cast.half = half;
    FUSED_OPTIM_ON(cast_blocks)(cast, cast_format_of(format), FUSED_OPTIM_HERE);
}

#if defined(FUSED_OPTIM_ENGINE_CUDA)
// Of each result: codes, transposed, scale, transposed_scale, history.
using ResultRow = std::array<uint64_t, 5>;

CastScaling scaling_of(uint32_t number) {
    require(number < kCount<CastScaling>, "a known scaling");
    return static_cast<CastScaling>(number);
}

// Of one or several results that are computed, what `shape` says of them but for their addresses. `shape.absmax`: where
// those of all of them begin.
Cast result_of(const ResultRow& row, size_t number, CastScaling scaling, Cast shape) {
    const bool parts = scaling == CastScaling::kRow || scaling == CastScaling::kBlock;
    require(scaling == CastScaling::kBlock || shape.absmax, "addresses of all tensors");
    require(scaling != CastScaling::kBlock || (shape.rows % kCastBlock == 0 && shape.columns % kCastBlock == 0),
            "blocks of 128");
    const auto& [codes, transposed, scale, transposed_scale, history] = row;
    require(codes && transposed && scale && (!parts || transposed_scale), "addresses of all tensors");
    require(scaling != CastScaling::kDelayed || (history && shape.remembered), "addresses of all tensors");
    const uint64_t words = scaling == CastScaling::kRow ? shape.rows + shape.columns : 2;
    shape.codes = codes;
    shape.transposed = transposed;
    shape.scale = scale;
    shape.transposed_scale = transposed_scale;
    shape.history = history;
    shape.absmax += number * words * sizeof(float);
    return checked(shape);
}

void swiglu(uint64_t gradient, uint64_t gate, uint64_t up, const std::vector<ResultRow>& results, uint64_t absmax,
            uint32_t remembered, uint64_t rows, uint64_t columns, uint32_t format, uint32_t scaling, bool power_of_two,
            bool tiles, int device, uint64_t stream) {
    require(gate && up, "addresses of all tensors");
    require(results.size() == (gradient ? 2 : 1), "a result, or one for each of the gradients");
    const CastScaling kind = scaling_of(scaling);
    const Cast shape{0, 0, 0, 0, 0, absmax, rows, columns, power_of_two, tiles, 0, remembered};
    SwiGLU work{{}, gradient, gate, up};
    for (size_t i = 0; i < results.size(); ++i) work.results[i] = result_of(results[i], i, kind, shape);
    for (const uint64_t address : {gradient, gate, up}) {
        require(address % kCastMultiple == 0, "addresses that are multiples of 16");
    }
    py::gil_scoped_release release;
    swiglu_cuda(work, cast_format_of(format), kind, device, stream);
}

void rms_norm(uint64_t x, uint64_t weight, uint64_t rstd, float eps, bool measured, const ResultRow& result,
              uint64_t absmax, uint32_t remembered, uint64_t rows, uint64_t columns, uint32_t format, uint32_t scaling,
              bool power_of_two, bool tiles, int device, uint64_t stream) {
    require(x && weight && rstd, "addresses of all tensors");
    require(weight % kCastMultiple == 0, "addresses that are multiples of 16");
    require(columns <= kNormColumns, "at most 16384 columns");
    const CastScaling kind = scaling_of(scaling);
    require(!measured || kind == CastScaling::kDelayed || kind == CastScaling::kBlock, "scales that are not measured");
    const Cast shape{x, 0, 0, 0, 0, absmax, rows, columns, power_of_two, tiles, 0, remembered};
    const RMSNorm work{result_of(result, 0, kind, shape), weight, rstd, eps, measured};
    py::gil_scoped_release release;
    rms_norm_cuda(work, cast_format_of(format), kind, device, stream);
}

void rms_norm_backward(const std::vector<uint64_t>& gradients, uint64_t addend, uint64_t x, uint64_t weight,
                       uint64_t rstd, uint64_t of_x, uint64_t of_weight, uint64_t parts, uint64_t rows,
                       uint64_t columns, int device, uint64_t stream) {
    require(!gradients.empty() && gradients.size() <= kNormGradients, "one to three gradients");
    require(x && weight && rstd && of_x && of_weight && parts, "addresses of all tensors");
    require(columns % kCastMultiple == 0 && columns <= kNormColumns, "at most 16384 columns, a multiple of 16");
    require(rows > 0 && columns > 0 && rows < kMaxWeightNumel / columns, "fewer than 2^43 elements");
    RMSNormGradient work{{}, addend, x, weight, rstd, of_x, of_weight, parts, rows, columns};
    for (const uint64_t address : {addend, x, weight, of_x, parts}) {
        require(address % kCastMultiple == 0, "addresses that are multiples of 16");
    }
    for (size_t i = 0; i < gradients.size(); ++i) {
        require(gradients[i] && gradients[i] % kCastMultiple == 0, "addresses that are multiples of 16");
        work.gradients[i] = gradients[i];
    }
    py::gil_scoped_release release;
    rms_norm_backward_cuda(work, device, stream);
}
#endif

void transpose(uint64_t codes, uint64_t transposed, uint64_t rows, uint64_t columns, FUSED_OPTIM_WHERE) {
    require(codes && transposed, "addresses of all tensors");
    FUSED_OPTIM_ON(transpose)(checked({0, codes, transposed, 0, 0, 0, rows, columns}), FUSED_OPTIM_HERE);
}

}  // namespace

inline void define_all(py::module_& m) {
    define(m, "cast_tensor", &cast_tensor, py::arg("values"), py::arg("codes"), py::arg("transposed"), py::arg("scale"),
           py::arg("absmax"), py::arg("rows"), py::arg("columns"), py::arg("half"), py::arg("format"),
           py::arg("measured"));
    define(m, "cast_delayed", &cast_delayed, py::arg("values"), py::arg("codes"), py::arg("transposed"),
           py::arg("scale"), py::arg("absmax"), py::arg("history"), py::arg("remembered"), py::arg("rows"),
           py::arg("columns"), py::arg("half"), py::arg("format"));
    define(m, "cast_rows", &cast_rows, py::arg("values"), py::arg("codes"), py::arg("scale"), py::arg("transposed"),
           py::arg("transposed_scale"), py::arg("absmax"), py::arg("rows"), py::arg("columns"), py::arg("half"),
           py::arg("format"));
    define(m, "cast_blocks", &cast_blocks, py::arg("values"), py::arg("codes"), py::arg("scale"), py::arg("transposed"),
           py::arg("transposed_scale"), py::arg("rows"), py::arg("columns"), py::arg("half"), py::arg("power_of_two"),
           py::arg("tiles"), py::arg("format"));
#if defined(FUSED_OPTIM_ENGINE_CUDA)
    m.def("swiglu", &swiglu, py::kw_only(), py::arg("gradient"), py::arg("gate"), py::arg("up"), py::arg("results"),
          py::arg("absmax"), py::arg("remembered"), py::arg("rows"), py::arg("columns"), py::arg("format"),
          py::arg("scaling"), py::arg("power_of_two"), py::arg("tiles"), py::arg("device"), py::arg("stream"));
    m.def("rms_norm", &rms_norm, py::kw_only(), py::arg("x"), py::arg("weight"), py::arg("rstd"), py::arg("eps"),
          py::arg("measured"), py::arg("result"), py::arg("absmax"), py::arg("remembered"), py::arg("rows"),
          py::arg("columns"), py::arg("format"), py::arg("scaling"), py::arg("power_of_two"), py::arg("tiles"),
          py::arg("device"), py::arg("stream"));
    m.def("rms_norm_backward", &rms_norm_backward, py::kw_only(), py::arg("gradients"), py::arg("addend"), py::arg("x"),
          py::arg("weight"), py::arg("rstd"), py::arg("of_x"), py::arg("of_weight"), py::arg("parts"), py::arg("rows"),
          py::arg("columns"), py::arg("device"), py::arg("stream"));
#endif
    define(m, "transpose", &transpose, py::arg("codes"), py::arg("transposed"), py::arg("rows"), py::arg("columns"));
}

}  // namespace fused_optim::casts
