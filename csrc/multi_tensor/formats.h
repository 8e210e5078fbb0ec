// Codecs: how parameters, masters and states are encoded. Every function here is exact IEEE arithmetic without
// contraction, so that CPU, CUDA and the PyTorch reference (fused_optim/formats/) produce the same bits.
#pragma once

#include <cstdint>
#include <type_traits>

#include "arithmetic.h"

#if defined(__CUDA_ARCH__)
#include <cuda_fp16.h>
#endif

namespace fused_optim {

// ---------------------------------------------------------------------------------------------------------------
// Rotating rounding: the threshold of an element moves by the golden ratio each step (a Weyl sequence).
// code = floor(x + u), u = frac(hash(seed, parameter, element) + step * golden ratio), kept as a 32-bit fraction.

constexpr uint32_t kGoldenRatio = 0x9E3779B9u;      // 2^32 * 0.6180339887
constexpr uint32_t kSquareRootOfTwo = 0x6A09E667u;  // 2^32 * 0.4142135623
constexpr uint32_t kNearest = 0x80000000u;          // u = 1/2: round to nearest, ties up

FUSED_OPTIM_HD uint32_t finalize(uint32_t h) {  // of MurmurHash3, 32 bits
    h ^= h >> 16;
    h *= 0x85EBCA6Bu;
    h ^= h >> 13;
    h *= 0xC2B2AE35u;
    return h ^ (h >> 16);
}

// One hash serves an aligned group of 8 elements; within it the thresholds are a Weyl sequence as well.
FUSED_OPTIM_HD uint32_t group8_hash(uint32_t key, uint64_t element) {
    uint64_t group8 = element >> 3;
    return finalize((static_cast<uint32_t>(group8) + static_cast<uint32_t>(group8 >> 32) * kGoldenRatio) ^ key);
}

struct Rounding {
    uint32_t offset;  // step * golden ratio, or 1/2 for round to nearest
    uint32_t mask;    // 0 switches everything else off

    FUSED_OPTIM_HD uint32_t group8(uint32_t key, uint64_t element) const {
        return (group8_hash(key, element) & mask) + offset;
    }
    // `group8`: that of the element's group of 8. Of the element only the position within it matters.
    FUSED_OPTIM_HD uint32_t bits(uint32_t group8, uint32_t element) const {
        return group8 + (element & 7u) * (kSquareRootOfTwo & mask);
    }
};

// ---------------------------------------------------------------------------------------------------------------
// Element types: gradients, parameters, masters

FUSED_OPTIM_HD float bfloat16_decode(uint16_t bits) { return bits_float(static_cast<uint32_t>(bits) << 16); }

FUSED_OPTIM_HD uint16_t bfloat16_nearest_even(float x) {
    uint32_t b = float_bits(x);
    uint32_t rounded = (b + 0x7FFFu + ((b >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>(is_nan(x) ? kQuietNaN >> 16 : rounded);
}

// Adds a fraction of the last kept place and truncates; a finite value stays finite.
FUSED_OPTIM_HD uint16_t bfloat16_rotating(float x, uint32_t u) {
    uint32_t b = float_bits(x);
    uint32_t magnitude = b & kMagnitude;
    uint32_t rounded = (magnitude + (u >> 16)) >> 16;
    rounded = (rounded > 0x7F7Fu && magnitude < kInfinity) ? 0x7F7Fu : rounded;
    rounded |= (b >> 16) & 0x8000u;
    return static_cast<uint16_t>(magnitude > kInfinity ? kQuietNaN >> 16 : rounded);
}

FUSED_OPTIM_HD float float16_decode(uint16_t bits) {
#if defined(__CUDA_ARCH__)
    return __half2float(__ushort_as_half(bits));
#else
    uint32_t magnitude = bits & 0x7FFFu;
    uint32_t finite = float_bits(bits_float(magnitude << 13) * 5.192296858534828e33f);  // 2^112 moves the exponent bias
    uint32_t special = (magnitude << 13) | kInfinity;
    uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    return bits_float((magnitude >= 0x7C00u ? special : finite) | sign);
#endif
}

// Magnitudes below 65536; the caller handles sign, infinities and NaN.
FUSED_OPTIM_HD uint32_t float16_magnitude_nearest_even(uint32_t b) {
    uint32_t normal = ((b + 0xFFFu + ((b >> 13) & 1u)) >> 13) - (112u << 10);
    uint32_t subnormal = float_bits(bits_float(b) + 0.5f) - 0x3F000000u;  // 0.5's last place is 2^-24
    return b < 0x38800000u ? subnormal : normal;
}

FUSED_OPTIM_HD uint32_t float16_magnitude_rotating(float x, uint32_t u) {
    return (scaled_bits<112>(x) + (u >> 19)) >> 13;
}

FUSED_OPTIM_HD uint16_t float16_finish(uint32_t b, uint32_t finite) {
    uint32_t magnitude = b & kMagnitude;
    uint32_t code = magnitude >= 0x47800000u ? 0x7C00u : finite;  // 65536 and above
    code = magnitude > kInfinity ? 0x7E00u : code;
    return static_cast<uint16_t>(code | ((b >> 16) & 0x8000u));
}

FUSED_OPTIM_HD uint16_t float16_nearest_even(float x) {
    uint32_t b = float_bits(x);
    return float16_finish(b, float16_magnitude_nearest_even(b & kMagnitude));
}

FUSED_OPTIM_HD uint16_t float16_rotating(float x, uint32_t u) {
    uint32_t b = float_bits(x);
    return float16_finish(b, float16_magnitude_rotating(fabsf(clamp_top(x, 65536.0f)), u));
}

// ---------------------------------------------------------------------------------------------------------------
// Split masters: a BF16 parameter and the bits that it lacks

struct Split {
    uint16_t high;  // the BF16 parameter
    int16_t low;    // the remainder; only the low byte for 24-bit masters
};

// Beside a parameter that was written from outside, a remainder may lead below zero or beyond infinity: to NaN, as the
// bits are ordered. The master is the parameter itself then, so it is finite wherever the parameter is.
FUSED_OPTIM_HD float checked_join(float joined) {
    uint32_t parameter = (float_bits(joined) + 0x8000u) & 0xFFFF0000u;
    return is_nan(joined) ? bits_float(parameter) : joined;
}

FUSED_OPTIM_HD float join_remainder16(uint16_t high, int16_t low) {
    uint32_t upper = static_cast<uint32_t>(high) - (low < 0 ? 1u : 0u);
    return checked_join(bits_float((upper << 16) | static_cast<uint16_t>(low)));
}

// A NaN keeps a NaN parameter: carrying into the high half could turn other payloads into a number.
FUSED_OPTIM_HD Split split_remainder16(float master) {
    uint32_t b = canonical_bits(master);
    return {static_cast<uint16_t>((b + 0x8000u) >> 16), static_cast<int16_t>(b & 0xFFFFu)};
}

FUSED_OPTIM_HD float join_remainder8(uint16_t high, int8_t low) {
    return join_remainder16(high, static_cast<int16_t>(static_cast<uint16_t>(static_cast<uint8_t>(low)) << 8));
}

// What rotating rounding adds to a master's bits before it drops 8 of them.
FUSED_OPTIM_HD uint32_t remainder8_carry(uint32_t u) { return u >> 24; }

// Rounds to a 24-bit value in the rotating way; the largest finite ones may become infinite.
FUSED_OPTIM_HD Split split_remainder8(float master, uint32_t u) {
    uint32_t b = canonical_bits(master);
    b += remainder8_carry(u);
    return {static_cast<uint16_t>((b + 0x8000u) >> 16), static_cast<int16_t>(static_cast<int8_t>((b >> 8) & 0xFFu))};
}

// ---------------------------------------------------------------------------------------------------------------
// Block-scaled states. A codec has: Bits, decode(bits, scale), scale(absmax bits) and encode(x, root, inverse, u).
// Which one depends on what the state holds (StateKind). All round magnitudes in the rotating way, by the fraction u:
// rounded to nearest, a value whose steps are below half a code would keep its code for ever. SquareCodec, of averages
// of squares, uses the square root, which the update has computed anyway, and gives no positive value the code 0;
// SignedCodec takes no notice of `root`. A block that holds a NaN or an infinity gets a NaN scale and decodes to NaN.
// Blocks whose `inverse` is 0 have zero codes, whatever encode() would give. States without block scales are stored as
// elements, which rotate, too.
//
// Codecs of one byte have placed() in the place of encode(): the code, before a square's is made at least 1, stands in
// the eight bits from kPlace on. The CUDA engine packs such codes four at a time. encode_state() takes both kinds.

struct BlockScale {
    float scale;    // stored
    float inverse;  // what encode multiplies by
};

constexpr float kSmallestSigned = 7.888609052210118e-31f;  // 2^-100: blocks below encode as zeros
constexpr float kSmallestSquare = 7.52316384526264e-37f;   // 2^-120
constexpr float kTopNudge = 1.00000095367431640625f;       // 1 + 2^-20: the block's maximum gets the top code

// Selects instead of branches: a warp's blocks differ.
FUSED_OPTIM_HD BlockScale block_scale(uint32_t absmax, float smallest, float scale, float inverse) {
    bool poisoned = absmax >= kInfinity;
    bool empty = bits_float(absmax) < smallest;
    return {poisoned ? bits_float(kQuietNaN) : empty ? 0.0f : scale, poisoned || empty ? 0.0f : inverse};
}

FUSED_OPTIM_HD uint32_t at_least_one(uint32_t code, float positive) { return code == 0 && positive > 0.0f ? 1u : code; }

template <Format format>
struct SignedCodec;

template <Format format>
struct SquareCodec;

// float16: value / a power of two that puts the block's largest, as it is rounded, into (2^14, 2^15]. So the exponents
// below serve the small elements, and what was decoded has the same scale again. From 2^127 on, 2^15 would decode to
// infinity: there the largest lies in (2^15, 2^16) and values saturate. The floor of 2^-102 keeps the smallest code's
// value a normal number.
constexpr float kFloat16Top = 65504.0f;
constexpr uint32_t kMantissa = 0x7FFFFFu;

// `exponent`: of the power of two that is not below the block's largest.
FUSED_OPTIM_HD BlockScale float16_scale(uint32_t absmax, uint32_t exponent, float smallest) {
    exponent = (exponent < 40u ? 40u : exponent > 254u ? 254u : exponent) - 15u;
    return block_scale(absmax, smallest, bits_float(exponent << 23), bits_float((254u - exponent) << 23));
}

// What rotating rounding adds to a float's bits before it drops 13 of them.
FUSED_OPTIM_HD uint32_t float16_rounded(float x, uint32_t u) { return magnitude_bits(x) + (u >> 19); }

// Whether the largest of a block may be rounded down to a power of two.
FUSED_OPTIM_HD bool is_above_power(uint32_t absmax) { return (absmax & kMantissa) - 1u < 0x1FFFu; }

// That power, if all of the block are: `rounded` is the largest float16_rounded() of its elements.
FUSED_OPTIM_HD uint32_t float16_largest(uint32_t absmax, uint32_t rounded) {
    uint32_t power = absmax & kInfinity;
    return is_above_power(absmax) && rounded < power + 0x2000u ? power : absmax;
}

FUSED_OPTIM_HD uint32_t float16_signed(float x, float inverse, uint32_t u) {
    uint32_t magnitude = float16_magnitude_rotating(clamp_top(fabsf(x) * inverse, kFloat16Top), u);
    return magnitude | ((float_bits(x) >> 16) & 0x8000u);
}

template <>
struct SignedCodec<Format::kFloat16> {
    static constexpr Format format = Format::kFloat16;
    using Bits = uint16_t;
    FUSED_OPTIM_HD static float decode(uint32_t bits, float scale) {
        return float16_decode(static_cast<Bits>(bits)) * scale;
    }
    FUSED_OPTIM_HD static BlockScale scale(uint32_t absmax) {
        return float16_scale(absmax, (absmax + kMantissa) >> 23, kSmallestSigned);
    }
    FUSED_OPTIM_HD static uint32_t encode(float x, float, float inverse, uint32_t u) {
        return float16_signed(x, inverse, u);
    }
};

template <>
struct SquareCodec<Format::kFloat16> {
    static constexpr Format format = Format::kFloat16;
    using Bits = uint16_t;
    FUSED_OPTIM_HD static float decode(uint32_t bits, float scale) {
        return float16_decode(static_cast<Bits>(bits)) * scale;
    }
    FUSED_OPTIM_HD static BlockScale scale(uint32_t absmax) {
        return float16_scale(absmax, (absmax + kMantissa) >> 23, kSmallestSquare);
    }
    FUSED_OPTIM_HD static uint32_t encode(float x, float, float inverse, uint32_t u) {
        return at_least_one(float16_magnitude_rotating(clamp_top(x * inverse, kFloat16Top), u), x);
    }
};

// How an FP16 master rounds. The threshold rotates for the sake of updates below the last place, which would be lost
// otherwise. From two units of the last place on none is lost, and rounding to nearest errs half as much.
FUSED_OPTIM_HD uint32_t master_rounding(float before, float after, uint32_t bits) {
    return fabsf(after - before) >= fabsf(after) * 0.001953125f ? kNearest : bits;  // 2^-9
}

// A master in FP16 is stored as a signed state, but only blocks of denormals encode as zeros.
struct Float16Master : SignedCodec<Format::kFloat16> {
    FUSED_OPTIM_HD static BlockScale scale(uint32_t absmax) {
        return float16_scale(absmax, (absmax + kMantissa) >> 23, kSmallestNormal);
    }
};

// Codecs whose scale() takes what float16_largest() gives.
template <class Codec>
inline constexpr bool kFollowsRounding = false;
template <>
inline constexpr bool kFollowsRounding<SignedCodec<Format::kFloat16>> = true;
template <>
inline constexpr bool kFollowsRounding<SquareCodec<Format::kFloat16>> = true;
template <>
inline constexpr bool kFollowsRounding<Float16Master> = true;

// float8_e4m3fn. Seven magnitude bits placed at the top of a float's mantissa, times 2^120, give their value.
FUSED_OPTIM_HD float float8_decode(uint32_t bits) {
    return bits_float((bits & 0x7Fu) << 20 | (bits & 0x80u) << 24) * 1.329227995784916e36f;
}

constexpr float kFloat8Top = 448.0f;

// For magnitudes below 464, which the top code's are rounded to.
FUSED_OPTIM_HD uint32_t float8_nearest_even(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
    return pair;
#else
    uint32_t b = magnitude_bits(x);
    uint32_t normal = ((b + 0x7FFFFu + ((b >> 20) & 1u)) >> 20) - 960u;       // (127 - 7) << 3 moves the exponent bias
    uint32_t subnormal = float_bits(bits_float(b) + 16384.0f) - 0x46800000u;  // 16384's last place is 2^-9
    return (b < 0x3C800000u ? subnormal : normal) | ((float_bits(x) >> 24) & 0x80u);
#endif
}

// The code of what is not negative, in units of the block's largest; `inverse` maps that to 1. The code begins at bit
// 20 of the scaled bits. Of the fraction, 20 bits count: the four below are beyond the last place.
FUSED_OPTIM_HD uint32_t float8_placed(float x, uint32_t u) {
    return (scaled_bits<120>(clamp_one(x), kFloat8Top) << 4) + (u >> 8);
}

template <>
struct SignedCodec<Format::kFloat8> {
    static constexpr Format format = Format::kFloat8;
    using Bits = uint8_t;
    FUSED_OPTIM_HD static float expand(float x) { return x; }
    FUSED_OPTIM_HD static float decode(uint32_t bits, float scale) { return expand(float8_decode(bits) * scale); }
    FUSED_OPTIM_HD static BlockScale scale(uint32_t absmax) {
        float scale = divide(bits_float(absmax), kFloat8Top);
        return block_scale(absmax, kSmallestSigned, scale, reciprocal(scale) * (kTopNudge / kFloat8Top));
    }
    static constexpr int kPlace = 24;
    FUSED_OPTIM_HD static uint32_t placed(float x, float, float inverse, uint32_t u) {
        return float8_placed(fabsf(x) * inverse, u) | (float_bits(x) & ~kMagnitude);
    }
};

// The square root is what is stored.
template <>
struct SquareCodec<Format::kFloat8> {
    static constexpr Format format = Format::kFloat8;
    using Bits = uint8_t;
    FUSED_OPTIM_HD static float expand(float root) { return root * root; }
    FUSED_OPTIM_HD static float decode(uint32_t bits, float scale) { return expand(float8_decode(bits) * scale); }
    // The floor of 2^-54 keeps the smallest code's value a normal number.
    FUSED_OPTIM_HD static BlockScale scale(uint32_t absmax) {
        float scale = larger(divide(square_root(bits_float(absmax)), kFloat8Top), 5.551115123125783e-17f);
        return block_scale(absmax, kSmallestSquare, scale, reciprocal(scale) * (kTopNudge / kFloat8Top));
    }
    static constexpr int kPlace = 24;
    FUSED_OPTIM_HD static uint32_t placed(float, float root, float inverse, uint32_t u) {
        return float8_placed(root * inverse, u);
    }
};

// int8: levels whose precision tapers off, in units of the scale; of squares, of their roots. The four highest powers
// of two have 16 levels each (roots of squares 32), the four below them 8, and so on: a float of which a quarter of the
// bits is kept. It is a fourth root with straight lines in the place of its curves, without a root to compute. Both
// moments have as many levels for each power of ten of the gradients.

FUSED_OPTIM_HD float quarter_of_bits(float x) { return bits_float(float_bits(x) >> 2); }  // x >= 0

// Its inverse, for quarters below 2^-63. The sign stays.
FUSED_OPTIM_HD float fourfold_bits(float quarter) {
    return bits_float(float_bits(quarter) << 2 | (float_bits(quarter) & ~kMagnitude));
}

// A code beside 256, whose last place is 2^-15, from x in units of 1 / codes.
FUSED_OPTIM_HD uint32_t int8_placed(float x, float codes, uint32_t u) {
    return float_bits(fma(x, codes, bits_float(0x43800000u + (u >> 17))));
}

// An odd scale is found again from its top level.
FUSED_OPTIM_HD float odd(float x) { return bits_float(float_bits(x) | 1u); }

template <>
struct SignedCodec<Format::kInt8> {
    static constexpr Format format = Format::kInt8;
    using Bits = int8_t;
    static constexpr float kUnit = 3.944304526105059e-31f;  // 2^-101: quarters of levels are codes in units of it
    static constexpr float kTop = 31.0f;                    // the level of code 127; that of code 1 is 2^-23
    FUSED_OPTIM_HD static float expand(float x) { return x; }
    FUSED_OPTIM_HD static float decode(uint32_t bits, float scale) {
        return expand(fourfold_bits(signed_byte(bits) * kUnit) * scale);
    }
    // The floor of 2^-103 keeps the smallest code's value a normal number.
    FUSED_OPTIM_HD static BlockScale scale(uint32_t absmax) {
        float scale = odd(larger(divide(bits_float(absmax), kTop), 9.860761315262648e-32f));
        return block_scale(absmax, kSmallestSigned, scale, reciprocal(scale) * kTopNudge);
    }
    // The code of the magnitude. Below code 1 it is the value that rotates, not its quarter: a value that has all but
    // faded would else be drawn up to code 1 so often that it never fades.
    static constexpr int kPlace = 15;
    FUSED_OPTIM_HD static uint32_t placed(float x, float, float inverse, uint32_t u) {
        float level = clamp_top(fabsf(x) * inverse, kTop);
        return int8_placed(clamp_top(quarter_of_bits(level), level * (8388608.0f * kUnit)), 1.0f / kUnit, u);
    }
};

template <>
struct SquareCodec<Format::kInt8> {
    static constexpr Format format = Format::kInt8;
    using Bits = uint8_t;
    static constexpr float kUnit = 1.9721522630525295e-31f;  // 2^-102
    static constexpr float kTop = 31.5f;                     // the level of code 255
    FUSED_OPTIM_HD static float expand(float root) { return root * root; }
    FUSED_OPTIM_HD static float decode(uint32_t bits, float scale) {
        return expand(fourfold_bits(unsigned_byte(bits) * kUnit) * scale);
    }
    FUSED_OPTIM_HD static BlockScale scale(uint32_t absmax) {
        float scale = odd(divide(square_root(bits_float(absmax)), kTop));
        return block_scale(absmax, kSmallestSquare, scale, reciprocal(scale) * kTopNudge);
    }
    static constexpr int kPlace = 15;
    FUSED_OPTIM_HD static uint32_t placed(float, float root, float inverse, uint32_t u) {
        return int8_placed(quarter_of_bits(clamp_top(root * inverse, kTop)), 1.0f / kUnit, u);
    }
};

template <class Codec>
inline constexpr bool kIsSquare = false;
template <Format format>
inline constexpr bool kIsSquare<SquareCodec<format>> = true;

// Codecs whose placed() gives magnitudes, of numbers in two's complement.
template <class Codec>
inline constexpr bool kPlacesMagnitude = false;
template <>
inline constexpr bool kPlacesMagnitude<SignedCodec<Format::kInt8>> = true;

template <class Codec, class = void>
inline constexpr bool kIsPlaced = false;
template <class Codec>
inline constexpr bool kIsPlaced<Codec, std::void_t<decltype(Codec::kPlace)>> = true;

// The code of a value. `root`: of a square.
template <class Codec>
FUSED_OPTIM_HD uint32_t encode_state(float x, float root, float inverse, uint32_t u) {
    if constexpr (kIsPlaced<Codec>) {
        uint32_t code = Codec::placed(x, root, inverse, u) >> Codec::kPlace & 0xFFu;
        if constexpr (kPlacesMagnitude<Codec>) return (x < 0.0f ? 0u - code : code) & 0xFFu;
        return kIsSquare<Codec> ? at_least_one(code, root) : code;
    } else {
        return Codec::encode(x, root, inverse, u);
    }
}

}  // namespace fused_optim
