// Codecs of eight elements: the functions of formats.h on packed words.
#pragma once

#include <type_traits>

#include "cuda/packets.cuh"
#include "formats.h"

namespace fused_optim {
namespace {

// Streams whose type is known only at run time: 2 or 4 bytes.
__device__ __forceinline__ void load(Packet<4>& packet, Element type, uint64_t address, uint32_t element) {
    if (type == Element::kFloat32) {
        load<4>(packet.words, address, element);
    } else {
        load<2>(packet.words, address, element);
    }
}

// The type is the same for a whole chunk: branches around the loops, not selects inside.
template <class Packet4>
__device__ __forceinline__ void decode(float* values, Packet4& packet, Element type) {
    if (type == Element::kFloat32) {
        if constexpr (Packet4::kExchanged) exchange(packet.words);
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] = bits_float(packet.words[i]);
    } else if (type == Element::kBFloat16) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] = bfloat16_decode(get<2>(packet.words, i));
    } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] = float16_decode(get<2>(packet.words, i));
    }
}

template <bool rotating>
__device__ __forceinline__ uint16_t encode_bfloat16(float value, uint32_t bits) {
    return rotating ? bfloat16_rotating(value, bits) : bfloat16_nearest_even(value);
}

template <bool rotating>
__device__ __forceinline__ uint16_t encode_float16(float value, uint32_t bits) {
    return rotating ? float16_rotating(value, bits) : float16_nearest_even(value);
}

// The value itself, in a way that keeps the compiler from computing it on paths where it is not wanted.
__device__ __forceinline__ float rare(float x) {
    asm volatile("" : "+f"(x));
    return x;
}

// Whether all magnitudes lie safely below BF16's largest, where encoders need no special cases.
__device__ __forceinline__ bool all_moderate(const float* values) {
    float sum = fabsf(values[0]);
#pragma unroll
    for (int i = 1; i < kVector; ++i) sum += fabsf(values[i]);
    return sum < 3.0e38f;
}

template <bool rotating>
__device__ __forceinline__ void encode_bfloat16_words(uint32_t* words, const float* values, uint32_t group8,
                                                      const Rounding& rounding) {
    uint32_t codes[kVector];
    if (all_moderate(values)) {
        if constexpr (rotating) {
#pragma unroll
            for (int i = 0; i < kVector; ++i) codes[i] = float_bits(values[i]) + (rounding.bits(group8, i) >> 16);
#pragma unroll
            for (int k = 0; k < 4; ++k) words[k] = pack_high(codes[2 * k], codes[2 * k + 1]);
        } else {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[k]) : "f"(values[2 * k + 1]), "f"(values[2 * k]));
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            codes[i] = encode_bfloat16<rotating>(values[i], rounding.bits(group8, i));
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) words[k] = pack_low(codes[2 * k], codes[2 * k + 1]);
    }
}

// `group8`: rounding bits of the first element, see Rounding.
template <bool rotating>
__device__ __forceinline__ void store(const float* values, uint32_t group8, const Rounding& rounding, Element type,
                                      uint64_t address, uint32_t element) {
    uint32_t words[kVector];
    if (type == Element::kFloat32) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) words[i] = float_bits(values[i]);
        exchange(words);
        return store<4>(words, address, element);
    }
    if (type == Element::kBFloat16) {
        encode_bfloat16_words<rotating>(words, values, group8, rounding);
    } else {
        uint32_t codes[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            codes[i] = encode_float16<rotating>(values[i], rounding.bits(group8, i));
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) words[k] = pack_low(codes[2 * k], codes[2 * k + 1]);
    }
    store<2>(words, address, element);
}

// ---------------------------------------------------------------------------------------------------------------
// Split masters and block-scaled states

template <int kBytes>
__device__ __forceinline__ void pack_codes(uint32_t* words, const uint32_t* codes) {
    if constexpr (kBytes == 1) {
#pragma unroll
        for (int k = 0; k < 2; ++k) words[k] = pack_bytes<0>(codes + 4 * k);
    } else {
#pragma unroll
        for (int k = 0; k < 4; ++k) words[k] = pack_low(codes[2 * k], codes[2 * k + 1]);
    }
}

// Four codes of eight bits from kPlace on.
template <int kPlace>
__device__ __forceinline__ uint32_t pack_placed(const uint32_t* codes) {
    if constexpr (kPlace % 8 == 0) {
        return pack_bytes<kPlace / 8>(codes);
    } else {  // two share a shift
        static_assert(kPlace / 8 == 1, "the two bytes in the middle");
        const uint32_t first = __byte_perm(codes[0], codes[1], 0x6521) >> kPlace % 8;
        const uint32_t second = __byte_perm(codes[2], codes[3], 0x6521) >> kPlace % 8;
        return __byte_perm(first, second, 0x6420);
    }
}

// The sign bits of two numbers, eight times each, twice. (The selectors of __byte_perm have no such bit.)
__device__ __forceinline__ uint32_t signs_of(float a, float b) {
    uint32_t signs;
    asm("prmt.b32 %0, %1, %2, 0xFBFB;" : "=r"(signs) : "r"(float_bits(a)), "r"(float_bits(b)));
    return signs;
}

// Four magnitudes below 128, as two's complement with the signs of `values`. 128 minus a magnitude borrows nothing.
__device__ __forceinline__ uint32_t with_signs(uint32_t magnitudes, const float* values) {
    const uint32_t negative = __byte_perm(signs_of(values[0], values[1]), signs_of(values[2], values[3]), 0x5410);
    return (((0x80808080u - magnitudes) ^ 0x80808080u) & negative) | (magnitudes & ~negative);
}

__device__ __forceinline__ bool has_zero_byte(uint32_t word) {
    return ((word - 0x01010101u) & ~word & 0x80808080u) != 0;
}

// BF16 parameters and remainders. Both directions rest on: joined = (parameter:remainder ^ 0x8000) - 0x8000.
template <int low_bytes>
__device__ __forceinline__ void join_words(float* values, const uint32_t* high, const uint32_t* low) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        uint32_t word;
        if constexpr (low_bytes == 2) {
            word = __byte_perm(low[i / 2] ^ 0x80008000u, high[i / 2], i % 2 ? 0x7632 : 0x5410);
        } else {
            uint32_t others = i % 2 ? 0xFF00FF00u : 0x00FF00FFu;  // a zero byte beside the remainder goes below it
            constexpr uint32_t selectors[4] = {0x5401, 0x7610, 0x5423, 0x7632};
            word = __byte_perm((low[i / 4] ^ 0x80808080u) & others, high[i / 2], selectors[i % 4]);
        }
        values[i] = bits_float(word - 0x8000u);
    }
    float sum = values[0];
#pragma unroll
    for (int i = 1; i < kVector; ++i) sum += values[i];
    if (is_nan(sum)) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] = checked_join(rare(values[i]));
    }
}

template <int low_bytes>
__device__ __forceinline__ void split_words(float* values, uint32_t* high, uint32_t* low, uint32_t group8,
                                            const Rounding& rounding) {
    if (!all_moderate(values)) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] = is_nan(rare(values[i])) ? bits_float(kQuietNaN) : values[i];
    }
    uint32_t carried[kVector];  // into the parameter's half
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        const uint32_t carry = low_bytes == 2 ? 0u : remainder8_carry(rounding.bits(group8, i));
        carried[i] = float_bits(values[i]) + 0x8000u + carry;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) high[k] = pack_high(carried[2 * k], carried[2 * k + 1]);
    if constexpr (low_bytes == 2) {
#pragma unroll
        for (int k = 0; k < 4; ++k) low[k] = pack_low(carried[2 * k], carried[2 * k + 1]) ^ 0x80008000u;
    } else {
#pragma unroll
        for (int k = 0; k < 2; ++k) low[k] = pack_bytes<1>(carried + 4 * k) ^ 0x80808080u;
    }
}

template <class Codec>
__device__ __forceinline__ void decode_words(float* values, const uint32_t* words, float scale) {
    constexpr int bytes = sizeof(typename Codec::Bits);
    if constexpr (Codec::format == Format::kInt8) {
        // A code in the last places of 2^23; signed ones are offset by 128.
        constexpr bool is_signed = static_cast<typename Codec::Bits>(-1) < 0;
        constexpr float zero = (is_signed ? -8388736.0f : -8388608.0f) * Codec::kUnit;
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            uint32_t word = is_signed ? words[i / 4] ^ 0x80808080u : words[i / 4];
            float code = bits_float(__byte_perm(word, 0x4B000000u, 0x7650u + i % 4));
            values[i] = Codec::expand(fourfold_bits(fma(code, Codec::kUnit, zero)) * scale);
        }
#if __CUDA_ARCH__ >= 890
    } else if constexpr (Codec::format == Format::kFloat8) {
#pragma unroll
        for (int i = 0; i < kVector; i += 2) {
            uint16_t pair = static_cast<uint16_t>(words[i / 4] >> 8 * (i % 4));
            uint32_t halves;
            asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
            values[i] = Codec::expand(float16_decode(static_cast<uint16_t>(halves)) * scale);
            values[i + 1] = Codec::expand(float16_decode(static_cast<uint16_t>(halves >> 16)) * scale);
        }
#endif
    } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] = Codec::decode(get<bytes>(words, i), scale);
    }
}

#if __CUDA_ARCH__ >= 890
// To nearest even; what lies beyond the largest saturates.
__device__ __forceinline__ void encode_float8_words(uint32_t* words, const float* values) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        const float* x = values + 4 * k;
        uint16_t low, high;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x[1]), "f"(x[0]));
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x[3]), "f"(x[2]));
        words[k] = pack_low(low, high);
    }
}
#endif

// `root`: of squares.
template <class Codec, class R>
__device__ __forceinline__ void encode_words(uint32_t* words, const float* values, const float* root, float inverse,
                                             uint32_t group8, const R& rounding) {
    uint32_t codes[kVector];
    if constexpr (!kIsPlaced<Codec>) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            codes[i] = Codec::encode(values[i], root[i], inverse, rounding.bits(group8, i));
        }
        pack_codes<sizeof(typename Codec::Bits)>(words, codes);
    } else {
        static_assert(sizeof(typename Codec::Bits) == 1, "codes of a byte");
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            codes[i] = Codec::placed(values[i], root[i], inverse, rounding.bits(group8, i));
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            words[k] = pack_placed<Codec::kPlace>(codes + 4 * k);
            if constexpr (kPlacesMagnitude<Codec>) words[k] = with_signs(words[k], values + 4 * k);
        }
        if (kIsSquare<Codec> && (has_zero_byte(words[0]) || has_zero_byte(words[1]))) {
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                uint32_t one = 1u << 8 * (i % 4);
                words[i / 4] |= (words[i / 4] & 0xFFu * one) == 0 && root[i] > 0.0f ? one : 0u;
            }
        }
    }
}

}  // namespace
}  // namespace fused_optim
