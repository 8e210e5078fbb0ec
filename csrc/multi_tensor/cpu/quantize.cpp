// The CPU engine's inner part for quantized weights: ranges of strips and tiles. Compiled once per instruction set, and
// under the same rules as apply.cpp.
#include "cpu/strip.h"

namespace fused_optim {
namespace {

void fill_fractions(uint32_t* u, const Weight& w, const Rounding& rounding, uint64_t element) {
    for (int i = 0; i < kStripSize; ++i) u[i] = w.fraction(rounding, element + i);
}

template <class Codec>
void load_codes(uint8_t* codes, const Weight& w, const Strip& strip) {
    if constexpr (Codec::kPerByte == 1) {
        copy_in<kStripSize>(codes, w.data, strip.element, static_cast<int>(strip.count));
    } else {
        uint8_t packed[kStripSize];
        copy_in<kStripSize>(packed, w.data, strip.element / 2, static_cast<int>(strip.count / 2));
        for (int i = 0; i < kStripSize / 2; ++i) {
            codes[2 * i] = packed[i] & 0xF;
            codes[2 * i + 1] = packed[i] >> 4;
        }
    }
}

template <class Codec>
void encode_strips(const Weight& w, bool round_up, uint64_t begin, uint64_t end) {
    const float whole = w.whole();
    const Rounding rounding = w.rounding();
    for (uint64_t i = begin; i < end; ++i) {
        alignas(64) float values[kStripSize];
        alignas(64) uint32_t u[kStripSize];
        const Strip strip = strip_at(w, i);
        copy_in<kStripSize>(values, w.values, strip.element, static_cast<int>(strip.count));
        if (w.rotates()) fill_fractions(u, w, rounding, strip.element);
        encode_strip<Codec>(w, round_up, whole, values, w.rotates() ? u : nullptr, strip);
    }
}

// Calls visit(strip) for each row of a tile.
template <class Visit>
void for_each_row(const Weight& w, uint64_t tile, const Visit& visit) {
    const uint64_t per_row = ceil_divide(w.columns, kStrip);
    const uint64_t first = tile / per_row * kStrip;
    const uint64_t last = first + kStrip < w.rows ? first + kStrip : w.rows;
    for (uint64_t row = first; row < last; ++row) visit(strip_at(w, row * per_row + tile % per_row));
}

template <class Codec>
void encode_tile(const Weight& w, bool round_up, uint64_t tile) {
    alignas(64) float values[kStripSize];
    alignas(64) uint32_t u[kStripSize];
    alignas(64) uint8_t codes[kStripSize];
    Magnitudes magnitudes;
    for_each_row(w, tile, [&](const Strip& strip) {
        copy_in<kStripSize>(values, w.values, strip.element, static_cast<int>(strip.count));
        add<kStripSize>(magnitudes, values);
    });
    const WeightBlock block = Codec::prepare(magnitudes, round_up, w.whole());
    store_scale<Codec>(w, tile, block.scale);
    const Rounding rounding = w.rounding();
    for_each_row(w, tile, [&](const Strip& strip) {
        copy_in<kStripSize>(values, w.values, strip.element, static_cast<int>(strip.count));
        if (w.rotates()) fill_fractions(u, w, rounding, strip.element);
        encode_block<Codec>(codes, values, w.rotates() ? u : nullptr, block.inverse);
        store_codes<Codec>(codes, w, strip);
    });
}

void store_values(const float* values, const Weight& w, Element type, const Strip& strip) {
    const int count = static_cast<int>(strip.count);
    dispatch_element(type, [&](auto output) {
        using Output = decltype(output);
        alignas(64) typename Output::Bits raw[kStripSize];
        for (int i = 0; i < kStripSize; ++i) raw[i] = Output::encode(values[i]);
        copy_out(raw, w.values, strip.element, count);
    });
}

template <class Codec>
void decode_strips(const Weight& w, Element type, uint64_t begin, uint64_t end) {
    const float whole = w.whole();
    for (uint64_t i = begin; i < end; ++i) {
        const Strip strip = strip_at(w, i);
        alignas(64) float values[kStripSize];
        alignas(64) uint8_t codes[kStripSize];
        load_codes<Codec>(codes, w, strip);
        const uint64_t first_scale = scale_index<Codec>(w, strip.row, strip.column);
        for (uint32_t first = 0; first < strip.count; first += Codec::kBlock) {
            const float step = Codec::step(load_scale<Codec>(w, first_scale + first / Codec::kBlock), whole);
            for (uint32_t k = first; k < first + Codec::kBlock; ++k) values[k] = Codec::decode(codes[k]) * step;
        }
        store_values(values, w, type, strip);
    }
}

}  // namespace

// The bits of the largest finite magnitude.
uint32_t FUSED_OPTIM_JOIN(absmax_range_, FUSED_OPTIM_ISA)(const float* values, uint64_t count) {
    Magnitudes magnitudes;
    uint64_t i = 0;
    for (; i + kStripSize <= count; i += kStripSize) add<kStripSize>(magnitudes, values + i);
    for (; i < count; ++i) magnitudes.add(values[i]);
    return magnitudes.finite;
}

// Tiles `begin` to `end` where the format has tiles, else strips.
void FUSED_OPTIM_JOIN(encode_range_, FUSED_OPTIM_ISA)(const Weight& w, const WeightKind& kind, uint64_t begin,
                                                      uint64_t end) {
    DenormalsOn guard;
    dispatch_weight(kind.format, [&](auto codec) {
        using Codec = decltype(codec);
        if constexpr (Codec::kTiled) {
            for (uint64_t tile = begin; tile < end; ++tile) encode_tile<Codec>(w, kind.round_up, tile);
        } else {
            encode_strips<Codec>(w, kind.round_up, begin, end);
        }
    });
}

// Strips `begin` to `end`.
void FUSED_OPTIM_JOIN(decode_range_, FUSED_OPTIM_ISA)(const Weight& w, WeightFormat format, Element type,
                                                      uint64_t begin, uint64_t end) {
    DenormalsOn guard;
    dispatch_weight(format, [&](auto codec) { decode_strips<decltype(codec)>(w, type, begin, end); });
}

}  // namespace fused_optim
