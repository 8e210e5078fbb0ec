// Eight elements of a quantized weight on one thread: the functions of quantize.h on packed words.
#pragma once

#include <type_traits>

#include "cuda/codecs.cuh"
#include "cuda/warp.cuh"
#include "quantize.h"

namespace fused_optim {
namespace {

template <int count>
__device__ __forceinline__ float thread_absmax(const float* values) {
    float absmax = fabsf(values[0]);
#pragma unroll
    for (int i = 1; i < count; ++i) absmax = max_or_nan(absmax, fabsf(values[i]));
    return absmax;
}

// Of values whose absmax is known; only where that is not finite each must be looked at.
template <int count>
__device__ __forceinline__ Magnitudes magnitudes_of(const float* values, float absmax) {
    const uint32_t bits = float_bits(absmax);
    Magnitudes found{bits, bits};
    if (bits >= kInfinity) {
        found = {};
#pragma unroll
        for (int i = 0; i < count; ++i) found.add(rare(values[i]));
    }
    return found;
}

template <class Codec>
constexpr int kGroup8Words = kVector / Codec::kPerByte / 4;

// E2M1 codes of eight numbers, none of them NaN: Float4Element::nearest() in nine instructions instead of sixteen. The
// sum's last place is the gap between levels, so that its last bits count gaps above the power of two `base`. Two codes
// come with each power of two, whose exponent is added to them. Six gaps more make up for the exponent's offset, modulo
// eight.
__device__ __forceinline__ uint32_t encode_float4_word(const float* values) {
    constexpr float kRounder = 4194304.0f + 6 * 0.5f;
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        const float value = fminf(fabsf(values[i]), 6.0f);
        const float base = bits_float(float_bits(fmaxf(value, 1.0f)) & kInfinity);
        const uint32_t sum = float_bits(__fmaf_rn(base, kRounder, value));
        const uint32_t magnitude = sum + (sum >> 22);
        word += ((magnitude & 7u) | (float_bits(values[i]) >> 28 & ~7u)) << (4 * i);
    }
    return word;
}

// Codes to nearest even of eight values, whose absmax is at most `absmax` or not finite.
template <class Codec>
__device__ __forceinline__ void encode_group8(uint32_t* words, const float* values, float inverse, float absmax) {
    constexpr int kBits = 8 / Codec::kPerByte;
    float scaled[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) scaled[i] = values[i] * inverse;
    const bool numbers = absmax * inverse < 3.0e38f;  // beyond, some may be NaN
    if (std::is_base_of_v<Float4Element, Codec> && numbers) {
        words[0] = encode_float4_word(scaled);
        return;
    }
#if __CUDA_ARCH__ >= 890
    if (std::is_base_of_v<Float8Element, Codec> && numbers) return encode_float8_words(words, scaled);
#endif
#pragma unroll
    for (int k = 0; k < kGroup8Words<Codec>; ++k) {
        words[k] = 0;
#pragma unroll
        for (int i = 0; i < 32 / kBits; ++i) {
            words[k] |= Codec::nearest(scaled[k * 32 / kBits + i]) << (kBits * i);
        }
    }
}

}  // namespace
}  // namespace fused_optim
