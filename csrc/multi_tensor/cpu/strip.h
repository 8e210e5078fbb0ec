// Strips of quantized weights, for the CPU engine's inner parts; under the same rules as tile.h.
#pragma once

#include "cpu/tile.h"
#include "quantize.h"

namespace fused_optim {
namespace {

static_assert(kStrip == kStripSize);

// As Magnitudes::add. One place of the exponent added makes what is not finite negative: the compiler vectorises this.
template <int count>
void add(Magnitudes& block, const float* values) {
    constexpr uint32_t place = 1u << 23;
    int32_t finite = place;
    uint32_t largest = 0;
    for (int i = 0; i < count; ++i) {
        const uint32_t bits = magnitude_bits(values[i]);
        const int32_t shifted = static_cast<int32_t>(bits + place);
        finite = shifted > finite ? shifted : finite;
        largest = bits > largest ? bits : largest;
    }
    block.merge({static_cast<uint32_t>(finite) - place, largest});
}

template <class Codec>
void store_codes(const uint8_t* codes, const Weight& w, const Strip& strip) {
    const uint64_t first = strip.element / Codec::kPerByte;
    const int count = static_cast<int>(strip.count / Codec::kPerByte);
    uint8_t packed[kStripSize];
    if constexpr (Codec::kPerByte == 2) {
        for (int i = 0; i < kStripSize / 2; ++i) packed[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
        codes = packed;
    }
    copy_out(codes, w.data, first, count);
}

template <class Codec>
void encode_block(uint8_t* codes, const float* values, const uint32_t* u, float inverse) {
    constexpr int size = static_cast<int>(Codec::kBlock);
    if (u) {
        for (int i = 0; i < size; ++i) codes[i] = static_cast<uint8_t>(Codec::rotating(values[i] * inverse, u[i]));
    } else {
        for (int i = 0; i < size; ++i) codes[i] = static_cast<uint8_t>(Codec::nearest(values[i] * inverse));
    }
}

// Codes and scales of blocks that lie in one row. `values` and the fractions `u` (null: round to nearest even) fill a
// tile; `whole` is the scale of the whole weight.
template <class Codec>
void encode_strip(const Weight& w, bool round_up, float whole, const float* values, const uint32_t* u,
                  const Strip& strip) {
    alignas(64) uint8_t codes[kStripSize];
    const uint64_t first_scale = scale_index<Codec>(w, strip.row, strip.column);
    for (uint32_t first = 0; first < strip.count; first += Codec::kBlock) {
        Magnitudes magnitudes;
        if (!std::is_void_v<typename Codec::Scale>) add<Codec::kBlock>(magnitudes, values + first);
        const WeightBlock block = Codec::prepare(magnitudes, round_up, whole);
        store_scale<Codec>(w, first_scale + first / Codec::kBlock, block.scale);
        encode_block<Codec>(codes + first, values + first, u ? u + first : nullptr, block.inverse);
    }
    store_codes<Codec>(codes, w, strip);
}

}  // namespace
}  // namespace fused_optim
