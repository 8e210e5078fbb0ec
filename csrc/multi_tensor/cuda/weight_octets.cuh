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
constexpr int kOctetWords = kVector / Codec::kPerByte / 4;

// Codes to nearest even of eight values, whose absmax is at most `absmax` or not finite.
template <class Codec>
__device__ __forceinline__ void encode_octet(uint32_t* words, const float* values, float inverse, float absmax) {
    constexpr int kBits = 8 / Codec::kPerByte;
    float scaled[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) scaled[i] = values[i] * inverse;
#if __CUDA_ARCH__ >= 890
    // Beyond 3e38 some may be NaN.
    if (std::is_base_of_v<Float8Element, Codec> && absmax * inverse < 3.0e38f) {
        return encode_float8_words(words, scaled);
    }
#endif
#pragma unroll
    for (int k = 0; k < kOctetWords<Codec>; ++k) {
        words[k] = 0;
#pragma unroll
        for (int i = 0; i < 32 / kBits; ++i) {
            words[k] |= Codec::nearest(scaled[k * 32 / kBits + i]) << (kBits * i);
        }
    }
}

}  // namespace
}  // namespace fused_optim
