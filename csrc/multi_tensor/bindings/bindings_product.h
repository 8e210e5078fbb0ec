// Python's view of products of FP16 matrices, which the CUDA engine alone has.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "product.h"

namespace py = pybind11;

namespace fused_optim::products {
namespace {

void require(bool condition, const char* expected) {
    if (!condition) throw std::invalid_argument(std::string("fused_optim: products: expected ") + expected);
}

// As Python describes a product: the members of MatrixProduct in their order.
using Row = std::tuple<uint64_t, uint64_t, uint64_t, uint32_t, uint32_t, uint32_t, uint32_t, float, float, float, bool,
                       bool, bool, uint32_t>;

// The last check before raw addresses are used.
MatrixProduct checked(const Row& row) {
    const auto [left, right, result, batch, rows, columns, inner, alpha, beta, gamma, left_transposed, right_transposed,
                symmetric, result_type] = row;
    require(left && right && result, "addresses of all matrices");
    for (const uint64_t address : {left, right, result})
        require(address % 16 == 0, "addresses that are multiples of 16");
    for (const uint32_t size : {rows, columns, inner})
        require(size > 0 && size <= 1u << 24 && size % kProductMultiple == 0, "sizes that are multiples of 8");
    require(batch > 0 && batch <= 1u << 16, "1 to 65536 matrices");
    require(!symmetric || rows == columns, "as many rows as columns of a symmetric result");
    require(beta == 0.0f || inner == columns, "a square right factor if the left one is added");
    const auto type = static_cast<Element>(result_type);
    require(type == Element::kFloat16 || type == Element::kBFloat16, "a result in FP16 or BF16");
    return {left,  right,           result,           batch,     rows, columns, inner, alpha, beta,
            gamma, left_transposed, right_transposed, symmetric, type};
}

// One after the other: the interpreter is asked once for all.
void matrix_products(const std::vector<Row>& rows, int device, uint64_t stream) {
    std::vector<MatrixProduct> products;
    products.reserve(rows.size());
    for (const Row& row : rows) products.push_back(checked(row));
    for (const MatrixProduct& product : products) matrix_product_cuda(product, device, stream);
}

void normalize(const std::vector<uint64_t>& values, uint64_t result, uint64_t sums, uint64_t numel, float factor,
               float least, uint32_t type, int device, uint64_t stream) {
    require(result && result % 16 == 0 && sums && sums % 4 == 0, "addresses of results and sums");
    for (const uint64_t address : values) require(address && address % 16 == 0, "addresses that are multiples of 16");
    require(numel > 0 && numel % kProductMultiple == 0, "a multiple of 8 elements");
    const auto element = static_cast<Element>(type);
    require(element == Element::kFloat32 || element == Element::kBFloat16, "values in FP32 or BF16");
    normalize_cuda({values, result, sums, numel, factor, least, element}, device, stream);
}

}  // namespace

inline void define_all(py::module_& m) {
    using NoGil = py::call_guard<py::gil_scoped_release>;
    m.def("has_products", &has_products_cuda, py::arg("device"));
    m.def("matrix_products", &matrix_products, py::arg("products"), py::arg("device"), py::arg("stream"), NoGil());
    m.attr("NORM_SUMS") = kNormSums;
    m.def("normalize", &normalize, py::kw_only(), py::arg("values"), py::arg("result"), py::arg("sums"),
          py::arg("numel"), py::arg("factor"), py::arg("least"), py::arg("type"), py::arg("device"), py::arg("stream"),
          NoGil());
}

}  // namespace fused_optim::products
