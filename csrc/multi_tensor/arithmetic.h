// Bit views and the few operations that host and device spell differently. Contraction is off everywhere (--fmad=false,
// -ffp-contract=off), so plain operators round once per operation and fma() is the only fused one. On the device,
// square root and division are written without the range checks and slow paths that nvcc would put around each; the
// preconditions that make them correctly rounded (Markstein, "IA-64 and elementary functions", 2000) stand beside them,
// and tests compare all of their arguments with the IEEE operations.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "table.h"

namespace fused_optim {

FUSED_OPTIM_HD uint32_t float_bits(float x) {
#if defined(__CUDA_ARCH__)
    return __float_as_uint(x);
#else
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
#endif
}

FUSED_OPTIM_HD float bits_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
#endif
}

constexpr uint32_t kMagnitude = 0x7FFFFFFFu;
constexpr uint32_t kInfinity = 0x7F800000u;
constexpr uint32_t kQuietNaN = 0x7FC00000u;
constexpr float kSmallestNormal = 1.1754943508222875e-38f;  // 2^-126

FUSED_OPTIM_HD uint32_t magnitude_bits(float x) { return float_bits(x) & kMagnitude; }
FUSED_OPTIM_HD bool is_nan(float x) { return magnitude_bits(x) > kInfinity; }
FUSED_OPTIM_HD float larger(float a, float b) { return a > b ? a : b; }

// a * b + c, rounded once.
FUSED_OPTIM_HD float fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
    return __fmaf_rn(a, b, c);
#else
    return __builtin_fmaf(a, b, c);
#endif
}

// The same for results that are not negative, with those below 2^-126 replaced by 0.
FUSED_OPTIM_HD float fma_ftz(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
    float x;
    asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(x) : "f"(a), "f"(b), "f"(c));
    return x;
#else
    float x = fma(a, b, c);
    return x < kSmallestNormal ? 0.0f : x;
#endif
}

FUSED_OPTIM_HD float mul_ftz(float a, float b) {
#if defined(__CUDA_ARCH__)
    float x;
    asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
    return x;
#else
    float x = a * b;
    return x < kSmallestNormal ? 0.0f : x;
#endif
}

// min(x, top) in which NaN becomes top: the same on every backend, and one instruction on each.
FUSED_OPTIM_HD float clamp_top(float x, float top) {
#if defined(__CUDA_ARCH__)
    return fminf(x, top);
#else
    return x < top ? x : top;
#endif
}

// x brought into [0, 1]; NaN becomes 0. One modifier of the multiplication before it on the device.
FUSED_OPTIM_HD float clamp_one(float x) {
#if defined(__CUDA_ARCH__)
    return __saturatef(x);
#else
    return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f;
#endif
}

// A byte as a float. The device writes it into the mantissa of 2^23: conversions run at a quarter of the rate.
FUSED_OPTIM_HD float unsigned_byte(uint32_t byte) {
#if defined(__CUDA_ARCH__)
    return bits_float(0x4B000000u | (byte & 0xFFu)) - 8388608.0f;
#else
    return static_cast<float>(static_cast<int32_t>(byte));
#endif
}

FUSED_OPTIM_HD float signed_byte(uint32_t byte) {
#if defined(__CUDA_ARCH__)
    return bits_float(0x4B000000u | ((byte & 0xFFu) ^ 0x80u)) - 8388736.0f;
#else
    return static_cast<float>(static_cast<int8_t>(byte));
#endif
}

// The bits of a float with every NaN replaced by the quiet one. On the device, NaN results are 0x7FFFFFFF.
FUSED_OPTIM_HD uint32_t canonical_bits(float x) {
#if defined(__CUDA_ARCH__)
    return static_cast<uint32_t>(min(static_cast<int32_t>(float_bits(x)), static_cast<int32_t>(kQuietNaN)));
#else
    return is_nan(x) ? kQuietNaN : float_bits(x);
#endif
}

// The bits of x * factor * 2^-exponent, rounded once to nearest even, for 0 <= x * factor < 2^exponent. The host avoids
// denormals, which are slow on some processors.
template <int exponent>
FUSED_OPTIM_HD uint32_t scaled_bits(float x, float factor = 1.0f) {
#if defined(__CUDA_ARCH__)
    return float_bits(x * (factor * bits_float(static_cast<uint32_t>(127 - exponent) << 23)));
#else
    constexpr uint32_t smallest = static_cast<uint32_t>(exponent + 1) << 23;  // 2^(exponent - 126)
    uint32_t bits = float_bits(x * factor);
    float places = factor * bits_float(static_cast<uint32_t>(276 - exponent) << 23);
    float small = fma(bits < smallest ? x : 0.0f, places, 8388608.0f);
    return bits < smallest ? float_bits(small) - 0x4B000000u : bits - (smallest - (1u << 23));
#endif
}

// sqrt(x) for normal positive x. On the device 0 gives NaN, infinity and denormals NaN or a rough value.
FUSED_OPTIM_HD float positive_square_root(float x, float at_least) {
#if defined(__CUDA_ARCH__)
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(at_least));
    float s = x * r;
    return fma(fma(-s, s, x), 0.5f * r, s);
#else
    return sqrtf(x);
#endif
}
FUSED_OPTIM_HD float positive_square_root(float x) { return positive_square_root(x, x); }

// sqrt(x) for x = 0 as well.
FUSED_OPTIM_HD float square_root(float x) { return positive_square_root(x, fmaxf(x, kSmallestNormal)); }

// 1 / x for 2^-125 <= x <= 2^125.
FUSED_OPTIM_HD float reciprocal(float x) {
#if defined(__CUDA_ARCH__)
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return fma(fma(-x, r, 1.0f), r, r);
#else
    return 1.0f / x;
#endif
}

// x / divisor for a compile-time divisor of at most 448 and x >= 2^-100.
FUSED_OPTIM_HD float divide(float x, float divisor) {
#if defined(__CUDA_ARCH__)
    float r = 1.0f / divisor;
    float q = x * r;
    return fma(fma(-q, divisor, x), r, q);
#else
    return x / divisor;
#endif
}

// a / b within 2 units in the last place for b = 0 and normal b; exact on the host.
FUSED_OPTIM_HD float quotient(float a, float b) {
#if defined(__CUDA_ARCH__)
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
    return a * r;
#else
    return a / b;
#endif
}

}  // namespace fused_optim
