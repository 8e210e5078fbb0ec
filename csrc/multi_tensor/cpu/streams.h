// The update of a tile's elements in one loop: what decodes and encodes BF16 works while divisions and roots wait.
// Under the same rules as tile.h.
#pragma once

#include "adam.h"
#include "cpu/codecs.h"

namespace fused_optim {
namespace {

// Streams: what the loop reads a tile's elements of, and leaves them in. write() returns the magnitude's bits if it has
// rounded to BF16, as it may for magnitudes that is_moderate_magnitude() knows; `values` has what was to be rounded.

struct Float32Stream {
    float* values;

    float read(int i) const { return values[i]; }
    uint32_t write(int i, float x, uint32_t) const {
        values[i] = x;
        return 0;
    }
};

// Whether no magnitude rounds beyond BF16's largest: most tiles, for which the encoders need no special cases.
bool is_moderate_magnitude(uint32_t largest) { return largest < 0x7F7F0000u; }

template <bool rotates>
uint16_t encode_moderate_bfloat16(float x, uint32_t bits) {
    const uint32_t b = float_bits(x);
    return static_cast<uint16_t>((b + (rotates ? bits >> 16 : 0x7FFFu + ((b >> 16) & 1u))) >> 16);
}

// As join_remainder16() and join_remainder8(), unchecked: the parameter's bits before the remainder's, which have a
// sign.
template <class Low>
float join_split(uint16_t high, Low low) {
    constexpr int shift = 16 - 8 * sizeof(Low);
    const uint32_t bits = static_cast<uint32_t>(high) << 16 | static_cast<uint32_t>(low) << shift;
    return bits_float((bits ^ 0x8000u) - 0x8000u);
}

template <class Low>
struct Halves {
    uint16_t high;
    Low low;
};

// As split_remainder16() and split_remainder8(), without NaN.
template <class Low>
Halves<Low> split_moderate(float x) {
    const uint32_t rounded = float_bits(x) + (sizeof(Low) == 2 ? 0u : 0x80u);
    return {static_cast<uint16_t>((rounded + 0x8000u) >> 16), static_cast<Low>(rounded >> (16 - 8 * sizeof(Low)))};
}

// `rotates`: rounds by the rounding bits, else to nearest even.
template <bool rotates>
struct BFloat16Stream {
    uint16_t* codes;
    float* values;

    float read(int i) const { return bfloat16_decode(codes[i]); }
    uint32_t write(int i, float x, uint32_t bits) const {
        values[i] = x;
        codes[i] = encode_moderate_bfloat16<rotates>(x, bits);
        return magnitude_bits(x);
    }
};

// An FP32 master and the BF16 parameter that is its rounded value.
struct MasterStream {
    uint16_t* codes;
    float* values;

    float read(int i) const { return values[i]; }
    uint32_t write(int i, float x, uint32_t) const {
        values[i] = x;
        codes[i] = encode_moderate_bfloat16<false>(x, 0);
        return magnitude_bits(x);
    }
};

// A BF16 parameter and the bits that a master has beyond it, as load_split() and store_split() have them.
template <class Low>
struct SplitStream {
    uint16_t* high;
    Low* low;
    float* values;

    float read(int i) const { return checked_join(join_split(high[i], low[i])); }
    uint32_t write(int i, float x, uint32_t) const {
        values[i] = x;
        const Halves<Low> split = split_moderate<Low>(x);
        high[i] = split.high;
        low[i] = split.low;
        return magnitude_bits(x);
    }
};

// The twin of the CUDA engine's update. Gradients are as they should be. Returns the largest magnitude's bits of what
// was rounded to BF16. `bits`: what streams round by; `root`: gets the roots of the new exp_avg_sq if it is kept.
template <bool keeps_root, class Grad, class Param, class ExpAvgStream, class ExpAvgSqStream>
uint32_t update_streams(const Grad grad, const Param param, const ExpAvgStream m, const ExpAvgSqStream v, float* root,
                        const uint32_t* bits, const Scalars s) {
    uint32_t largest = 0;
#pragma GCC ivdep
    for (int i = 0; i < kTile; ++i) {
        const Moments moments = next_moments(grad.read(i), m.read(i), v.read(i), s);
        const float found = root_of(moments.exp_avg_sq);
        if (keeps_root) root[i] = found;
        const float next = next_param(param.read(i), moments.exp_avg, found, s);
        const uint32_t of_m = m.write(i, moments.exp_avg, bits[i]);
        const uint32_t of_v = v.write(i, moments.exp_avg_sq, bits[i]);
        const uint32_t of_param = param.write(i, next, bits[i]);
        const uint32_t of_moments = of_m > of_v ? of_m : of_v;
        const uint32_t of_all = of_moments > of_param ? of_moments : of_param;
        largest = largest > of_all ? largest : of_all;
    }
    return largest;
}

}  // namespace
}  // namespace fused_optim
