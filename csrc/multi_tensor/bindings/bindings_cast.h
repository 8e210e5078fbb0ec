// Python's view of casts for products; the same interface for each engine but for where it runs.
#pragma once

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

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
    define(m, "transpose", &transpose, py::arg("codes"), py::arg("transposed"), py::arg("rows"), py::arg("columns"));
}

}  // namespace fused_optim::casts
