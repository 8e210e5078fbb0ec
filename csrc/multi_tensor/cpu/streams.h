// The update of a tile's elements in one loop: what decodes and encodes BF16 works while divisions and roots wait.
// Under the same rules as tile.h.
#pragma once

#include "cpu/codecs.h"
#include "update.h"

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
Halves<Low> split_moderate(float x, uint32_t u) {
    const uint32_t rounded = float_bits(x) + (sizeof(Low) == 2 ? 0u : remainder8_carry(u));
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
    uint32_t write(int i, float x, uint32_t bits) const {
        values[i] = x;
        const Halves<Low> split = split_moderate<Low>(x, bits);
        high[i] = split.high;
        low[i] = split.low;
        return magnitude_bits(x);
    }
};

// The twin of the CUDA engine's update. Gradients are as they should be. Returns the largest magnitude's bits of what
// was rounded to BF16. `bits`: what streams round by; `root`: gets the roots of the new squares if they are kept.
template <Rule rule, bool keeps_root, class Grad, class Param, class... States>
uint32_t update_streams(const Grad grad, const Param param, float* root, const uint32_t* bits, const Scalars<rule> s,
                        const States... states) {
    constexpr int square = square_state(rule);
    uint32_t largest = 0;
#pragma GCC ivdep
    for (int i = 0; i < kTile; ++i) {
        float values[state_places(rule)] = {states.read(i)...};
        const float direction = Update<rule>::advance(grad.read(i), values, s);
        float found = 0.0f;
        if constexpr (square >= 0) found = root_of(values[square]);
        if (keeps_root) root[i] = found;
        const float next = Update<rule>::next_param(param.read(i), direction, found, s);
        [[maybe_unused]] const float* value = values;
        const auto keep = [&](uint32_t rounded) { largest = largest > rounded ? largest : rounded; };
        (keep(states.write(i, *value++, bits[i])), ...);
        keep(param.write(i, next, bits[i]));
    }
    return largest;
}

}  // namespace
}  // namespace fused_optim
