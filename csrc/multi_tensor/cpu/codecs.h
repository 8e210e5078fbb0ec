// Codecs of whole blocks, for the CPU engine's update: loops over the functions of formats.h, and faster ones with the
// same results. Under the same rules as tile.h.
#pragma once

#include <type_traits>

#include "cpu/tile.h"
#include "formats.h"

namespace fused_optim {
namespace {

constexpr int kSmallestBlock = 32;

template <int size>
uint32_t absmax_of(const float* values) {
    uint32_t absmax = 0;
    for (int i = 0; i < size; ++i) {
        const uint32_t bits = magnitude_bits(values[i]);
        absmax = bits > absmax ? bits : absmax;
    }
    return absmax;
}

template <int block, class Codec>
void decode_block(Codec, float* values, const typename Codec::Bits* codes, float scale) {
    for (int i = 0; i < block; ++i) values[i] = Codec::decode(codes[i], scale);
}

#if defined(__F16C__)
template <int block>
void decode_halves(float* values, const uint16_t* codes, float scale) {
    const __m256 scales = _mm256_set1_ps(scale);
    for (int i = 0; i < block; i += 8) {
        const __m256 decoded = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)));
        _mm256_storeu_ps(values + i, _mm256_mul_ps(decoded, scales));
    }
}
template <int block>
void decode_block(SignedCodec<Format::kFloat16>, float* values, const uint16_t* codes, float scale) {
    decode_halves<block>(values, codes, scale);
}
template <int block>
void decode_block(SquareCodec<Format::kFloat16>, float* values, const uint16_t* codes, float scale) {
    decode_halves<block>(values, codes, scale);
}
template <int block>
void decode_block(Float16Master, float* values, const uint16_t* codes, float scale) {
    decode_halves<block>(values, codes, scale);
}
#endif

// `inverse` is not 0: the block's values are finite, and the scale is that of their largest. `root`: of squares. `u`:
// the fractions.
template <int block, class Codec>
void encode_block(Codec, typename Codec::Bits* codes, const float* values, const float* root, const uint32_t* u,
                  float inverse) {
    for (int i = 0; i < block; ++i) {
        codes[i] = static_cast<typename Codec::Bits>(encode_state<Codec>(values[i], root[i], inverse, u[i]));
    }
}

// Neither subnormal codes nor zeros, in most blocks.
template <int block>
void encode_block(SquareCodec<Format::kFloat8> codec, uint8_t* codes, const float* values, const float* root,
                  const uint32_t* u, float inverse) {
    int32_t smallest = 0x7FFFFFFF;
    for (int i = 0; i < block; ++i) {
        const float x = clamp_one(root[i] * inverse) * kFloat8Top;
        const int32_t placed = static_cast<int32_t>(float_bits(x) - (120u << 23) + (u[i] >> 12));
        smallest = placed < smallest ? placed : smallest;
        codes[i] = static_cast<uint8_t>(placed >> 20);
    }
    if (smallest >= 9 << 20) return;
    encode_block<block, SquareCodec<Format::kFloat8>>(codec, codes, values, root, u, inverse);
}

// As FP8's.
template <int block>
void encode_block(SquareCodec<Format::kFloat16> codec, uint16_t* codes, const float* values, const float* root,
                  const uint32_t* u, float inverse) {
    int32_t smallest = 0x7FFFFFFF;
    for (int i = 0; i < block; ++i) {
        const float x = clamp_top(values[i] * inverse, kFloat16Top);
        const int32_t placed = static_cast<int32_t>(float_bits(x) - (112u << 23) + (u[i] >> 19));
        smallest = placed < smallest ? placed : smallest;
        codes[i] = static_cast<uint16_t>(placed >> 13);
    }
    if (smallest >= 1025 << 13) return;
    encode_block<block, SquareCodec<Format::kFloat16>>(codec, codes, values, root, u, inverse);
}

// No zeros, in most blocks.
template <int block>
void encode_block(SquareCodec<Format::kInt8> codec, uint8_t* codes, const float* values, const float* root,
                  const uint32_t* u, float inverse) {
    uint32_t smallest = 0xFFFFFFFFu;
    for (int i = 0; i < block; ++i) {
        const uint32_t placed = codec.placed(values[i], root[i], inverse, u[i]);
        smallest = placed < smallest ? placed : smallest;
        codes[i] = static_cast<uint8_t>(placed >> codec.kPlace);
    }
    if (smallest >= 0x43800000u + (1u << codec.kPlace)) return;
    encode_block<block, SquareCodec<Format::kInt8>>(codec, codes, values, root, u, inverse);
}

}  // namespace
}  // namespace fused_optim
