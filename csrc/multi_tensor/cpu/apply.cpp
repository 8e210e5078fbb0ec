// The CPU engine's inner part: updates elements [begin, end) of one shard. Compiled once per instruction set; the loops
// have constant trip counts over small arrays, which the compiler vectorises. Nothing of the standard library's
// templates may be used here: an inline function compiled for AVX-512 could replace the baseline's copy at link time.
#include "cpu/codecs.h"
#include "cpu/streams.h"
#include "cpu/strip.h"
#include "dispatch.h"
#include "rules.h"

namespace fused_optim {
namespace {

void load(float* tile, Element type, uint64_t address, uint64_t element, int count) {
    if (type == Element::kFloat32) return copy_in(tile, address, element, count);
    alignas(64) uint16_t raw[kTile];
    copy_in(raw, address, element, count);
    if (type == Element::kBFloat16) {
        for (int i = 0; i < kTile; ++i) tile[i] = bfloat16_decode(raw[i]);
    } else {
        for (int i = 0; i < kTile; ++i) tile[i] = float16_decode(raw[i]);
    }
}

bool is_moderate(const float* tile) { return is_moderate_magnitude(absmax_of<kTile>(tile)); }

void encode_bfloat16(uint16_t* raw, const float* tile, const uint32_t* bits) {
    const bool moderate = is_moderate(tile);
    if (moderate && bits) {
        for (int i = 0; i < kTile; ++i) raw[i] = encode_moderate_bfloat16<true>(tile[i], bits[i]);
    } else if (moderate) {
        for (int i = 0; i < kTile; ++i) raw[i] = encode_moderate_bfloat16<false>(tile[i], 0);
    } else if (bits) {
        for (int i = 0; i < kTile; ++i) raw[i] = bfloat16_rotating(tile[i], bits[i]);
    } else {
        for (int i = 0; i < kTile; ++i) raw[i] = bfloat16_nearest_even(tile[i]);
    }
}

// Without rounding bits: to nearest even.
void store(const float* tile, const uint32_t* bits, Element type, uint64_t address, uint64_t element, int count) {
    if (type == Element::kFloat32) return copy_out(tile, address, element, count);
    alignas(64) uint16_t raw[kTile];
    if (type == Element::kBFloat16) {
        encode_bfloat16(raw, tile, bits);
    } else if (bits) {
        for (int i = 0; i < kTile; ++i) raw[i] = float16_rotating(tile[i], bits[i]);
    } else {
        for (int i = 0; i < kTile; ++i) raw[i] = float16_nearest_even(tile[i]);
    }
    copy_out(raw, address, element, count);
}

constexpr int kPart = 128;  // elements of a tile whose rounding bits are found together

// The usual case is that a part's elements are aligned groups of 8 consecutive ones, whose numbers do not wrap 32 bits.
void fill_rounding_part(uint32_t* bits, const Shard& shard, const Rounding& rounding, uint64_t element) {
    const bool consecutive = shard.is_consecutive();
    const uint64_t row = shard.geometry.inner_local;
    const uint64_t first = global_index(element, shard.offset, shard.geometry, consecutive);
    const bool in_one_row = consecutive || element % row + kPart <= row;
    if (!in_one_row || first % 8 != 0 || first >> 35 != (first + kPart) >> 35) {
        for (int i = 0; i < kPart; ++i) {
            uint64_t global = global_index(element + i, shard.offset, shard.geometry, consecutive);
            bits[i] = rounding.bits(rounding.group8(shard.key, global), static_cast<uint32_t>(global));
        }
        return;
    }
    const uint32_t start = static_cast<uint32_t>(first >> 3) + static_cast<uint32_t>(first >> 35) * kGoldenRatio;
    alignas(64) uint32_t groups8[kPart / 8];
    for (uint32_t i = 0; i < kPart / 8; ++i) {
        groups8[i] = (finalize((start + i) ^ shard.key) & rounding.mask) + rounding.offset;
    }
    asm volatile("" : : "r"(groups8) : "memory");  // broadcast from memory, which is cheaper than permuting
    typedef uint32_t Group8 __attribute__((vector_size(32)));
    const Group8 lanes = Group8{0, 1, 2, 3, 4, 5, 6, 7} * rounding.bits(0, 1);
    for (int i = 0; i < kPart / 8; ++i) {
        const Group8 values = lanes + groups8[i];
        std::memcpy(bits + 8 * i, &values, sizeof values);
    }
}

void fill_rounding(uint32_t* bits, const Shard& shard, const Rounding& rounding, uint64_t element) {
    for (int part = 0; part < kTile; part += kPart) fill_rounding_part(bits + part, shard, rounding, element + part);
}

// The scales of one state, from those of the tile's first element on, and the size of their blocks.
struct Scales {
    float* values;
    int block;
};

// Calls visit(an integral_constant of the block's size).
template <class Visit>
void dispatch_block(int block, const Visit& visit) {
    if (block == 128) return visit(std::integral_constant<int, 128>{});
    if (block == 64) return visit(std::integral_constant<int, 64>{});
    visit(std::integral_constant<int, kSmallestBlock>{});
}

struct LoadState {
    float* tile;
    Format format;
    uint64_t address;
    uint64_t element;
    int count;
    Scales scales;

    void operator()(Unscaled) const { load(tile, unscaled_type(format), address, element, count); }
    template <class Codec>
    void operator()(Codec codec) const {
        alignas(64) typename Codec::Bits raw[kTile];
        copy_in(raw, address, element, count);
        dispatch_block(scales.block, [&](auto size) {
            constexpr int block = decltype(size)::value;
            for (int first = 0; first < kTile; first += block) {
                decode_block<block>(codec, tile + first, raw + first,
                                    first < count ? scales.values[first / block] : 0.0f);
            }
        });
    }
};

template <int block>
uint32_t largest_rounded(const float* values, const uint32_t* bits) {
    uint32_t largest = 0;
    for (int i = 0; i < block; ++i) {
        const uint32_t rounded = float16_rounded(values[i], bits[i]);
        largest = rounded > largest ? rounded : largest;
    }
    return largest;
}

// The scales of a tile's blocks, all computed together: a division waits for long.
template <int block>
struct TileScales {
    static constexpr int kCount = kTile / block;
    float scale[kCount];
    float inverse[kCount];

    template <class Codec>
    TileScales(Codec, const float* tile, const uint32_t* bits) {
        uint32_t absmax[kCount];
        for (int i = 0; i < kCount; ++i) {
            const float* const values = tile + i * block;
            absmax[i] = absmax_of<block>(values);
            if constexpr (kFollowsRounding<Codec>) {
                if (is_above_power(absmax[i])) {
                    absmax[i] = float16_largest(absmax[i], largest_rounded<block>(values, bits + i * block));
                }
            }
        }
        for (int i = 0; i < kCount; ++i) {
            const BlockScale found = Codec::scale(absmax[i]);
            scale[i] = found.scale;
            inverse[i] = found.inverse;
        }
    }
};

// `encode(size, codes, first, inverse)` encodes the block that begins with element `first`; `bits` are what it rounds
// by.
template <class Codec, class Encode>
void store_scaled(const float* tile, const uint32_t* bits, uint64_t address, uint64_t element, int count,
                  const Scales& scales, const Encode& encode) {
    alignas(64) typename Codec::Bits raw[kTile];
    dispatch_block(scales.block, [&](auto size) {
        constexpr int block = decltype(size)::value;
        const TileScales<block> found(Codec{}, tile, bits);
        for (int i = 0, first = 0; first < count; ++i, first += block) {
            scales.values[i] = found.scale[i];
            if (found.inverse[i] != 0.0f) {
                encode(size, raw + first, first, found.inverse[i]);
            } else {
                std::memset(raw + first, 0, sizeof(typename Codec::Bits) * block);
            }
        }
    });
    copy_out(raw, address, element, count);
}

// `root`: of a square.
struct StoreState {
    const float* tile;
    const float* root;
    const uint32_t* bits;
    Format format;
    uint64_t address;
    uint64_t element;
    int count;
    Scales scales;

    void operator()(Unscaled) const { store(tile, bits, unscaled_type(format), address, element, count); }
    template <class Codec>
    void operator()(Codec codec) const {
        store_scaled<Codec>(tile, bits, address, element, count, scales,
                            [&](auto size, typename Codec::Bits* codes, int first, float inverse) {
                                constexpr int block = decltype(size)::value;
                                encode_block<block>(codec, codes, tile + first, root + first, bits + first, inverse);
                            });
    }
};

void load_float16_master(float* tile, const Shard& shard, uint64_t element, int count, const Scales& scales) {
    LoadState{tile, Format::kFloat16, shard.master, element, count, scales}(Float16Master{});
}

template <class Low>
void load_split(float* tile, const Shard& shard, uint64_t element, int count) {
    alignas(64) uint16_t high[kTile];
    alignas(64) Low low[kTile];
    copy_in(high, shard.param, element, count);
    copy_in(low, shard.master, element, count);
    for (int i = 0; i < kTile; ++i) tile[i] = join_split(high[i], low[i]);
    if (absmax_of<kTile>(tile) <= kInfinity) return;
    for (int i = 0; i < kTile; ++i) tile[i] = checked_join(tile[i]);
}

void load_master(float* tile, const Shard& shard, uint64_t element, int count, const Scales& scales) {
    if (shard.master_kind == Master::kParameter) return load(tile, shard.param_type, shard.param, element, count);
    if (shard.master_kind == Master::kFloat32) return copy_in(tile, shard.master, element, count);
    if (shard.master_kind == Master::kFloat16) return load_float16_master(tile, shard, element, count, scales);
    if (shard.master_kind == Master::kRemainder16) return load_split<uint16_t>(tile, shard, element, count);
    load_split<uint8_t>(tile, shard, element, count);
}

template <class Low>
Split split_master(float master, uint32_t u) {
    return sizeof(Low) == 2 ? split_remainder16(master) : split_remainder8(master, u);
}

template <class Low>
void store_split(const float* tile, const uint32_t* bits, const Shard& shard, uint64_t element, int count) {
    alignas(64) uint16_t high[kTile];
    alignas(64) Low low[kTile];
    if (is_moderate(tile)) {
        for (int i = 0; i < kTile; ++i) high[i] = split_moderate<Low>(tile[i], bits[i]).high;
        for (int i = 0; i < kTile; ++i) low[i] = split_moderate<Low>(tile[i], bits[i]).low;
    } else {
        for (int i = 0; i < kTile; ++i) high[i] = split_master<Low>(tile[i], bits[i]).high;
        for (int i = 0; i < kTile; ++i) low[i] = static_cast<Low>(split_master<Low>(tile[i], bits[i]).low);
    }
    copy_out(high, shard.param, element, count);
    copy_out(low, shard.master, element, count);
}

// The bits of the largest finite magnitude.
uint32_t finite_absmax(const float* values, int count) {
    Magnitudes magnitudes;
    if (count == kTile) {
        add<kTile>(magnitudes, values);
    } else {
        for (int i = 0; i < count; ++i) magnitudes.add(values[i]);
    }
    return magnitudes.finite;
}

void store_weight(const float* values, const Shard& shard, uint64_t element, int count) {
    Weight weight{};
    weight.data = shard.param;
    weight.scales = weight.tensor_scale = shard.weight_scales;
    weight.rows = 1;
    weight.columns = shard.numel;
    dispatch_weight(shard.weight_format, [&](auto codec) {
        using Codec = decltype(codec);
        if constexpr (kWrittenByUpdate<Codec>) {
            const float whole = Codec::kTensorScale ? weight.whole() : 0.0f;
            for (int first = 0; first < count; first += kStripSize) {
                const int rest = count - first < kStripSize ? count - first : kStripSize;
                const Strip strip{0, element + first, element + first, static_cast<uint32_t>(rest)};
                encode_strip<Codec>(weight, shard.round_up, whole, values + first, nullptr, strip);
            }
        }
    });
}

// An FP16 master is left in `tile` as it is kept: the parameter is its rounded value.
void store_master(float* tile, const uint32_t* bits, const Shard& shard, uint64_t element, int count,
                  const Scales& scales) {
    switch (shard.master_kind) {
        case Master::kParameter: return store(tile, bits, shard.param_type, shard.param, element, count);
        case Master::kFloat32:
            copy_out(tile, shard.master, element, count);
            if (!shard.quantized) store(tile, nullptr, shard.param_type, shard.param, element, count);
            return;
        case Master::kRemainder16: return store_split<int16_t>(tile, bits, shard, element, count);
        case Master::kRemainder8: return store_split<int8_t>(tile, bits, shard, element, count);
        case Master::kFloat16:
            StoreState{tile, tile, bits, Format::kFloat16, shard.master, element, count, scales}(Float16Master{});
            load_float16_master(tile, shard, element, count, scales);
            if (!shard.quantized) store(tile, nullptr, shard.param_type, shard.param, element, count);
            return;
    }
}

// Where a stage finds its values and leaves them: in memory itself if that holds a whole tile of FP32, else in `tile`.
float* in_place(float* tile, bool is_float32, uint64_t address, uint64_t element, int count) {
    return is_float32 && count == kTile ? pointer<float>(address, element) : tile;
}

template <Rule rule>
void scale_gradient(float* grad, const float* param, const Scalars<rule> s) {
    for (int i = 0; i < kTile; ++i) grad[i] = scaled_gradient(grad[i], s);
    if (s.l2_penalty != 0.0f) {
        for (int i = 0; i < kTile; ++i) grad[i] = penalized_gradient(grad[i], param[i], s);
    }
}

template <Rule rule>
void store_unscaled(const Shard& shard, const Scalars<rule>& scalars, const float* grad, uint64_t element, int count) {
    alignas(64) float tile[kTile];
    for (int i = 0; i < kTile; ++i) tile[i] = unscaled_gradient(grad[i], scalars);
    store(tile, nullptr, shard.grad_type, shard.grad, element, count);
}

// Which of a tile's BF16 streams the update reads and writes itself; the others pass through tiles of FP32 values.
// Parameters only with BF16 gradients, as they usually come: any other pair would be another loop to compile.
struct Direct {
    bool grad, param, states;

    template <Rule rule>
    Direct(const Shard& shard, const Scalars<rule>& scalars, int count) {
        const bool whole = count == kTile && scalars.unchanged_gradient && !scalars.writes_gradient;
        grad = whole && shard.grad_type == Element::kBFloat16;
        param = grad && shard.param_type == Element::kBFloat16 && !shard.quantized && !is_scaled(shard.master_kind);
        states = whole;
        for (int i = 0; i < state_count(rule); ++i) states = states && shard.states[i].format == Format::kBFloat16;
    }
};

// The values of a tile's streams, and where they are in memory.
template <Rule rule>
struct Tile {
    const Shard& shard;
    uint64_t element;
    float *grad, *param, *states[state_places(rule)], *root;
    const uint32_t* bits;

    uint16_t* codes(uint64_t address) const { return pointer<uint16_t>(address, element); }
    template <class Low>
    SplitStream<Low> split(uint16_t* high, uint64_t low) const {
        return {high, pointer<Low>(low, element), param};
    }
    template <int i>
    auto direct_state() const {
        return BFloat16Stream<true>{codes(shard.states[i].address), states[i]};
    }
};

template <Rule rule, class Grad, class Param, int... i>
uint32_t update_states(const Tile<rule>& tile, const Scalars<rule>& scalars, const Direct& direct, const Grad grad,
                       const Param param, std::integer_sequence<int, i...>) {
    constexpr int square = square_state(rule);
    if (direct.states) {
        return update_streams<rule, false>(grad, param, nullptr, tile.bits, scalars,
                                           tile.template direct_state<i>()...);
    }
    if constexpr (square >= 0) {
        if (is_scaled(tile.shard.states[square].format)) {
            return update_streams<rule, true>(grad, param, tile.root, tile.bits, scalars,
                                              Float32Stream{tile.states[i]}...);
        }
    }
    return update_streams<rule, false>(grad, param, nullptr, tile.bits, scalars, Float32Stream{tile.states[i]}...);
}

// The bits of the largest magnitude that was rounded to BF16.
template <Rule rule>
uint32_t update_values(const Tile<rule>& tile, const Scalars<rule>& scalars, const Direct& direct) {
    const auto update = [&](auto grad, auto param) {
        return update_states(tile, scalars, direct, grad, param, std::make_integer_sequence<int, state_count(rule)>{});
    };
    const Float32Stream values{tile.param};
    if (!direct.grad) return update(Float32Stream{tile.grad}, values);
    const BFloat16Stream<false> grad{tile.codes(tile.shard.grad), tile.grad};
    uint16_t* const codes = tile.codes(tile.shard.param);
    if (!direct.param) return update(grad, values);
    const uint64_t master = tile.shard.master;
    switch (tile.shard.master_kind) {
        case Master::kFloat32: return update(grad, MasterStream{codes, tile.param});
        case Master::kRemainder16: return update(grad, tile.template split<uint16_t>(codes, master));
        case Master::kRemainder8: return update(grad, tile.template split<uint8_t>(codes, master));
        default: return update(grad, BFloat16Stream<true>{codes, tile.param});
    }
}

// Formats are looked at once per tile and stage: no need for an instance per combination of formats. Returns the bits
// of the largest finite magnitude of a quantized weight.
template <Rule rule>
uint32_t update_tile(const Shard& shard, const Scalars<rule>& scalars, uint64_t element, int count) {
    constexpr int states = state_count(rule);
    alignas(64) float grad_tile[kTile], param_tile[kTile], state_tiles[state_places(rule)][kTile], root[kTile],
        before[kTile];
    alignas(64) uint32_t bits[kTile];

    const bool own_master = shard.master_kind == Master::kParameter, scaled_master = is_scaled(shard.master_kind);
    const uint64_t master = own_master ? shard.param : shard.master;
    const bool float32_master =
        own_master ? shard.param_type == Element::kFloat32 : shard.master_kind == Master::kFloat32;
    float* const param = in_place(param_tile, float32_master, master, element, count);
    const bool float32_grad = shard.grad_type == Element::kFloat32 && scalars.unchanged_gradient;
    float* const grad = in_place(grad_tile, float32_grad, shard.grad, element, count);  // updates do not write there
    const Direct direct(shard, scalars, count);
    Tile<rule> tile{shard, element, grad, param, {}, root, bits};
    Scales scales[states + 1];  // the last: the master's
    scales[0] = {pointer<float>(shard.scales, element >> shard.block_log2), 1 << shard.block_log2};
    for (int i = 0; i < states; ++i) {
        const auto& [address, format] = shard.states[i];
        tile.states[i] = in_place(state_tiles[i], format == Format::kFloat32, address, element, count);
        scales[i + 1] = {scales[i].values + (is_scaled(format) ? block_count(shard) : 0), scales[0].block};
    }
    const Scales& master_scales = scales[states];

    if (grad == grad_tile && !direct.grad) load(grad, shard.grad_type, shard.grad, element, count);
    if (param == param_tile && !direct.param) load_master(param, shard, element, count, master_scales);
    each_state<rule>([&](auto state) {
        constexpr int i = decltype(state)::value;
        const auto& [address, format] = shard.states[i];
        if (tile.states[i] != state_tiles[i] || direct.states) return;
        dispatch_codec<state_kind(rule, i)>(format,
                                            LoadState{tile.states[i], format, address, element, count, scales[i]});
    });
    if (scalars.writes_gradient) store_unscaled(shard, scalars, grad, element, count);
    for (int i = 0; scaled_master && i < kTile; ++i) before[i] = param[i];
    bool rotates = master_rotates(shard.master_kind, shard.param_type);
    for (int i = 0; i < states; ++i) rotates = rotates || shard.states[i].format != Format::kFloat32;
    if (rotates) fill_rounding(bits, shard, scalars.rounding, element);
    if (!scalars.unchanged_gradient) scale_gradient(grad, param, scalars);
    const uint32_t largest = update_values(tile, scalars, direct);
    // Else what the update has written itself is written again.
    const bool rounded = is_moderate_magnitude(largest);
    for (int i = count; i < kTile; ++i) {  // a short last block's scales must not see them
        for (int k = 0; k < states; ++k) tile.states[k][i] = 0.0f;
        root[i] = param[i] = 0.0f;
    }

    each_state<rule>([&](auto state) {
        constexpr int i = decltype(state)::value;
        const auto& [address, format] = shard.states[i];
        if (tile.states[i] != state_tiles[i] || (direct.states && rounded)) return;
        dispatch_codec<state_kind(rule, i)>(
            format, StoreState{tile.states[i], root, bits, format, address, element, count, scales[i]});
    });
    if (scaled_master) {  // last, since it changes `bits`
        for (int i = 0; i < kTile; ++i) bits[i] = master_rounding(before[i], param[i], bits[i]);
    }
    if (direct.param && rounded) return shard.absmax ? finite_absmax(param, count) : 0;
    if (param == param_tile) {
        store_master(param, bits, shard, element, count, master_scales);
    } else if (!own_master && !shard.quantized) {
        store(param, nullptr, shard.param_type, shard.param, element, count);
    }
    if (shard.quantized && shard.param) store_weight(param, shard, element, count);
    return shard.absmax ? finite_absmax(param, count) : 0;
}

template <Rule rule>
uint32_t update_range(const Shard& shard, const Scalars<rule>& scalars, uint64_t begin, uint64_t end) {
    uint32_t largest = 0;
    for (uint64_t element = begin; element < end; element += kTile) {
        const int count = static_cast<int>(end - element < kTile ? end - element : kTile);
        const uint32_t found = update_tile(shard, scalars, element, count);
        largest = found > largest ? found : largest;
    }
    return largest;
}

}  // namespace

// `scalars`: Scalars<rule>. `begin` is a multiple of kTile, `end` too unless it is the shard's end. Returns the bits of
// the largest finite magnitude of a quantized weight.
uint32_t FUSED_OPTIM_JOIN(update_range_, FUSED_OPTIM_ISA)(Rule rule, const Shard& shard, const void* scalars,
                                                          uint64_t begin, uint64_t end) {
    DenormalsOn guard;
    return dispatch_rule(rule, [&](auto known) {
        constexpr Rule kRule = decltype(known)::value;
        return update_range(shard, *static_cast<const Scalars<kRule>*>(scalars), begin, end);
    });
}

}  // namespace fused_optim
