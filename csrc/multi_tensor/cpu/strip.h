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

// Sets bits from `first` on, which other threads may be setting neighbours of.
inline void set_bits(uint64_t bits, uint64_t first, uint32_t changed) {
    uint8_t* const target = reinterpret_cast<uint8_t*>(bits) + first / 8;
    changed <<= first % 8;
    for (int i = 0; changed; ++i, changed >>= 8) {
        if (changed & 0xFFu) __atomic_fetch_or(target + i, static_cast<uint8_t>(changed), __ATOMIC_RELAXED);
    }
}

// Marks where bytes differ from what is stored from byte `first` on.
inline void mark_bytes(uint64_t bits, uint64_t address, uint64_t first, const uint8_t* bytes, int count) {
    const uint8_t* const stored = reinterpret_cast<const uint8_t*>(address) + first;
    for (int begin = 0; begin < count; begin += 8) {
        uint32_t changed = 0;
        for (int i = begin; i < begin + 8 && i < count; ++i) {
            changed |= static_cast<uint32_t>(stored[i] != bytes[i]) << (i - begin);
        }
        set_bits(bits, first + begin, changed);
    }
}

// `marks`: addresses of bits, or 0.
template <class Codec>
void store_codes(const uint8_t* codes, const Weight& w, const WeightMarks& marks, const Strip& strip) {
    const uint64_t first = strip.element / Codec::kPerByte;
    const int count = static_cast<int>(strip.count / Codec::kPerByte);
    uint8_t packed[kStripSize];
    if constexpr (Codec::kPerByte == 2) {
        for (int i = 0; i < kStripSize / 2; ++i) packed[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
        codes = packed;
    }
    if (marks.codes) mark_bytes(marks.codes, w.data, first, codes, count);
    copy_out(codes, w.data, first, count);
}

template <class Codec>
void store_scale_and_mark(const Weight& w, const WeightMarks& marks, uint64_t index, uint32_t scale) {
    if (marks.scales && load_scale<Codec>(w, index) != scale) set_bits(marks.scales, index, 1);
    store_scale<Codec>(w, index, scale);
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
void encode_strip(const Weight& w, const WeightMarks& marks, bool round_up, float whole, const float* values,
                  const uint32_t* u, const Strip& strip) {
    alignas(64) uint8_t codes[kStripSize];
    const uint64_t first_scale = scale_index<Codec>(w, strip.row, strip.column);
    for (uint32_t first = 0; first < strip.count; first += Codec::kBlock) {
        Magnitudes magnitudes;
        if (!std::is_void_v<typename Codec::Scale>) add<Codec::kBlock>(magnitudes, values + first);
        const WeightBlock block = Codec::prepare(magnitudes, round_up, whole);
        store_scale_and_mark<Codec>(w, marks, first_scale + first / Codec::kBlock, block.scale);
        encode_block<Codec>(codes + first, values + first, u ? u + first : nullptr, block.inverse);
    }
    store_codes<Codec>(codes, w, marks, strip);
}

}  // namespace
}  // namespace fused_optim
