// Products of FP16 matrices on GPUs, of which symmetric ones are computed by half: what Newton-Schulz steps consist of.
// The CPU engine has none.
#pragma once

#include <cstdint>
#include <vector>

#include "table.h"

namespace fused_optim {

constexpr uint32_t kProductMultiple = 8;  // of sizes: rows of 16 bytes, which addresses are multiples of, too

// `batch` times: result = alpha * left * right + beta * left + gamma * identity, summed up in FP32. FP16, row by row;
// matrices of a batch lie one behind the other. A result's bits depend on its own matrices alone.
//
// left: (rows, inner), or if `left_transposed` (inner, rows); right: (inner, columns), or if `right_transposed`
// (columns, inner). result: (rows, columns); `beta`: 0, or the right factor is square. `symmetric`: the result is, so
// what lies above its boxes of 64 x 64 on the diagonal is copied from below.
struct MatrixProduct {
    uint64_t left;
    uint64_t right;
    uint64_t result;
    uint32_t batch;
    uint32_t rows;
    uint32_t columns;
    uint32_t inner;
    float alpha;
    float beta;
    float gamma;
    bool left_transposed;
    bool right_transposed;
    bool symmetric;
    Element result_type;  // FP16 or BF16
};

constexpr uint32_t kNormSums = 128;  // that the squares of a matrix are added up in

// FP16 matrices = values * factor / max(Frobenius norm, least): what products begin with. Of one shape; results lie one
// behind the other. A result's bits depend on its own values and the shape alone.
struct Normalization {
    std::vector<uint64_t> values;  // of `type`
    uint64_t result;
    uint64_t sums;  // FP32: memory for kNormSums of each matrix
    uint64_t numel;
    float factor;
    float least;
    Element type;
};

// Whether products run on the device: on Hopper, if the code was compiled for it.
bool has_products_cuda(int device);

// Enqueued on `stream` of `device`. Throw std::runtime_error naming the kernel and the CUDA error. Of the transposed
// forms there are: none; left alone and right alone, with a beta of 0.
void matrix_product_cuda(const MatrixProduct& product, int device, uint64_t stream);
void normalize_cuda(const Normalization& normalization, int device, uint64_t stream);
void load_product_kernels(int device);
void load_normalize_kernels(int device);

}  // namespace fused_optim
