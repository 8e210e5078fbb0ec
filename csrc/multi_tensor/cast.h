// Matrices of BF16 or FP16 values in FP8, for products: the math of their scales and codes, and what both engines
// offer. The PyTorch reference (fused_optim/quantized/fp8/casts.py) defines the bits, but for the sign of NaN. What
// is not finite counts for scales, so all that shares one with it becomes NaN.
#pragma once

#include <cstdint>

#include "quantize.h"

namespace fused_optim {

// Formats of codes: the largest.
#define FUSED_OPTIM_CAST_FORMATS(ROW) \
    ROW(kE4M3, "E4M3", 448.0f)        \
    ROW(kE5M2, "E5M2", 57344.0f)
FUSED_OPTIM_ENUM(CastFormat, FUSED_OPTIM_CAST_FORMATS);

constexpr uint32_t kCastBlock = 128;    // elements that share a scale of blocks
constexpr uint32_t kCastMultiple = 16;  // of rows and columns

// A matrix, row by row. `transposed` has the codes of its transpose; either may be 0.
struct Cast {
    uint64_t values;  // BF16, or FP16 with `half`
    uint64_t codes;
    uint64_t transposed;
    uint64_t scale;             // FP32: see the launchers
    uint64_t transposed_scale;  // of rows and of blocks
    uint64_t absmax;            // where largest magnitudes lie, FP32: see the launchers
    uint64_t rows;
    uint64_t columns;
    bool power_of_two = false;  // scales of blocks become powers of two, rounded up
    bool tiles = false;         // of blocks: the transpose has scales of 128 x 128
    uint64_t history = 0;       // of delayed scales: the scale, then the largest magnitudes of the last casts
    uint32_t remembered = 0;    // how many
    bool half = false;          // see `values`
    bool backwards = false;     // the CUDA engine goes from the end to the start
};

// E5M2: five bits of exponent, two of the mantissa. For magnitudes below 61440, which the largest code's are rounded
// to.
FUSED_OPTIM_HD uint32_t e5m2_nearest_even(float x) {
    const uint32_t b = magnitude_bits(x);
    const uint32_t normal = ((b + 0xFFFFFu + (b >> 21 & 1u)) >> 21) - 448u;       // (127 - 15) << 2 moves the bias
    const uint32_t subnormal = float_bits(bits_float(b) + 128.0f) - 0x43000000u;  // 128's last place is 2^-16
    return (b < 0x38800000u ? subnormal : normal) | (float_bits(x) >> 24 & 0x80u);
}

template <CastFormat format>
struct CastCodec;
template <>
struct CastCodec<CastFormat::kE4M3> {
    static constexpr float kLargest = kFloat8Top;
    FUSED_OPTIM_HD static uint32_t encode(float x) { return is_nan(x) ? 0x7Fu : float8_nearest_even(x); }
};
template <>
struct CastCodec<CastFormat::kE5M2> {
    static constexpr float kLargest = 57344.0f;
    FUSED_OPTIM_HD static uint32_t encode(float x) { return is_nan(x) ? 0x7Fu : e5m2_nearest_even(x); }
};

// `absmax`: the bits of the largest magnitude.
template <class Codec>
FUSED_OPTIM_HD float cast_scale(uint32_t absmax, bool power_of_two = false) {
    if (absmax >= kInfinity) return bits_float(absmax);
    const float scale = scale_for(bits_float(absmax), Codec::kLargest);
    return power_of_two ? next_power_of_two(scale) : scale;
}

// The scale that a history begins with; 1 where there is none yet.
FUSED_OPTIM_HD float delayed_scale(const float* history) { return history[0] > 0.0f ? history[0] : 1.0f; }

// Adds the largest magnitude of a cast, whose bits are `absmax`, to the magnitudes that follow the scale, and sets the
// next scale. What is not finite is not remembered. Returns the scale of this cast, NaN where something is not finite.
template <class Codec>
FUSED_OPTIM_HD float remember(float* history, uint32_t remembered, uint32_t absmax) {
    const float scale = absmax < kInfinity ? delayed_scale(history) : bits_float(0x7FC00000u);
    const float latest = absmax < kInfinity ? bits_float(absmax) : history[1];
    float largest = latest;
    for (uint32_t i = remembered; i > 1; --i) {
        history[i] = history[i - 1];
        largest = history[i] > largest ? history[i] : largest;
    }
    history[1] = latest;
    history[0] = largest > 0.0f ? scale_for(largest, Codec::kLargest) : 1.0f;
    return scale;
}

// ---------------------------------------------------------------------------------------------------------------
// What an engine offers. Rows and columns are multiples of kCastMultiple, addresses of kCastMultiple bytes.

// One scale. `measured`: the largest magnitude is there already; else it is found, and written there.
void cast_tensor_cpu(const Cast& cast, CastFormat format, bool measured, int threads);
// One scale, of earlier casts: larger magnitudes saturate. It is NaN where something is not finite. `absmax` has room
// for two words.
void cast_delayed_cpu(const Cast& cast, CastFormat format, int threads);
// scale[row], and transposed_scale[column] unless `transposed` is 0; then `absmax` has room for rows + columns.
void cast_rows_cpu(const Cast& cast, CastFormat format, int threads);
// scale[block of the row][row], where columns are multiples of 128 unless `codes` is 0; and likewise of the transpose,
// transposed_scale[block of the column][column], or with `tiles` transposed_scale[column / 128][row / 128], where rows
// are unless `transposed` is 0.
void cast_blocks_cpu(const Cast& cast, CastFormat format, int threads);
// The bytes `codes` into `transposed`.
void transpose_cpu(const Cast& cast, int threads);

// As above, enqueued on `stream` of `device`. Throw std::runtime_error naming the kernel and the CUDA error.
void cast_tensor_cuda(const Cast& cast, CastFormat format, bool measured, int device, uint64_t stream);
void cast_delayed_cuda(const Cast& cast, CastFormat format, int device, uint64_t stream);
void cast_rows_cuda(const Cast& cast, CastFormat format, int device, uint64_t stream);
void cast_blocks_cuda(const Cast& cast, CastFormat format, int device, uint64_t stream);
void transpose_cuda(const Cast& cast, int device, uint64_t stream);
void load_cast_kernels(int device);

}  // namespace fused_optim
