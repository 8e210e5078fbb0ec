// The CPU engine's inner part: updates elements [begin, end) of one shard. Compiled once per instruction set; the loops
// have constant trip counts over small arrays, which the compiler vectorises. Nothing of the standard library's
// templates may be used here: an inline function compiled for AVX-512 could replace the baseline's copy at link time.
#include <cstring>
#include <type_traits>

#include "adam.h"
#include "dispatch.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if !defined(FUSED_OPTIM_ISA)
#define FUSED_OPTIM_ISA baseline
#endif
#define FUSED_OPTIM_JOIN_(a, b) a##b
#define FUSED_OPTIM_JOIN(a, b) FUSED_OPTIM_JOIN_(a, b)

namespace fused_optim {
namespace {

constexpr int kTile = 128;  // the largest block; tiles start at multiples of it

// Denormals count (they are codes of small values), whatever torch.set_flush_denormal says on this thread.
class DenormalsOn {
#if defined(__x86_64__)
public:
    DenormalsOn() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~0x8040u); }
    ~DenormalsOn() { _mm_setcsr(saved_); }

private:
    unsigned saved_;
#else
public:
    ~DenormalsOn() {}
#endif
};

template <class T>
T* pointer(uint64_t address, uint64_t element) {
    return reinterpret_cast<T*>(address) + element;
}

template <class T>
void copy_in(T* tile, uint64_t address, uint64_t element, int count) {
    if (count < kTile) std::memset(tile, 0, sizeof(T) * kTile);
    std::memcpy(tile, pointer<T>(address, element), sizeof(T) * count);
}

template <class T>
void copy_out(const T* tile, uint64_t address, uint64_t element, int count) {
    std::memcpy(pointer<T>(address, element), tile, sizeof(T) * count);
}

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

// Without rounding bits: to nearest even.
void store(const float* tile, const uint32_t* bits, Element type, uint64_t address, uint64_t element, int count) {
    if (type == Element::kFloat32) return copy_out(tile, address, element, count);
    alignas(64) uint16_t raw[kTile];
    if (type == Element::kBFloat16 && bits) {
        for (int i = 0; i < kTile; ++i) raw[i] = bfloat16_rotating(tile[i], bits[i]);
    } else if (type == Element::kBFloat16) {
        for (int i = 0; i < kTile; ++i) raw[i] = bfloat16_nearest_even(tile[i]);
    } else if (bits) {
        for (int i = 0; i < kTile; ++i) raw[i] = float16_rotating(tile[i], bits[i]);
    } else {
        for (int i = 0; i < kTile; ++i) raw[i] = float16_nearest_even(tile[i]);
    }
    copy_out(raw, address, element, count);
}

uint64_t global_index(const Shard& shard, uint64_t element) {
    return shard.offset + (element / shard.inner_local) * shard.inner_global + element % shard.inner_local;
}

struct RoundingTile {
    alignas(64) uint32_t state[kTile];
    alignas(64) uint32_t param[kTile];
};

void fill_rounding(RoundingTile& tile, const Shard& shard, const Rounding& rounding, uint64_t element, bool for_param) {
    alignas(64) uint32_t hash[kTile];
    alignas(64) uint32_t lane[kTile];
    uint64_t first = global_index(shard, element);
    bool contiguous = element % shard.inner_local + kTile <= shard.inner_local;
    if (contiguous && (first >> 34) == ((first + kTile) >> 34)) {  // 32-bit quads do not wrap: vectorised
        uint32_t low = static_cast<uint32_t>(first), high = static_cast<uint32_t>(first >> 34) * kGoldenRatio;
        uint32_t quad = static_cast<uint32_t>(first >> 2), phase = low & 3u;
        for (uint32_t i = 0; i < kTile; ++i) {
            hash[i] = mix((quad + ((i + phase) >> 2) + high) ^ shard.key) & rounding.mask;
        }
        for (uint32_t i = 0; i < kTile; ++i) lane[i] = low + i;
    } else {
        for (int i = 0; i < kTile; ++i) {
            uint64_t global = global_index(shard, element + i);
            hash[i] = rounding.hash(shard.key, global);
            lane[i] = static_cast<uint32_t>(global);
        }
    }
    for (int i = 0; i < kTile; ++i) tile.state[i] = rounding.state_bits(hash[i], lane[i]);
    if (!for_param) return;
    for (int i = 0; i < kTile; ++i) tile.param[i] = rounding.param_bits(hash[i], lane[i]);
}

uint32_t block_absmax(const float* values, int block) {
    uint32_t absmax = 0;
    for (int i = 0; i < block; ++i) {
        uint32_t bits = magnitude_bits(values[i]);
        absmax = bits > absmax ? bits : absmax;
    }
    return absmax;
}

template <class Codec>
void load_scaled(float* tile, uint64_t address, uint64_t element, int count, const float* scales, int block) {
    alignas(64) typename Codec::Bits raw[kTile];
    copy_in(raw, address, element, count);
    for (int first = 0; first < kTile; first += block) {
        float scale = first < count ? scales[first / block] : 0.0f;
        for (int i = first; i < first + block; ++i) tile[i] = Codec::decode(raw[i], scale);
    }
}

// `encode(i, inverse)` gives element i's code in a block with that inverse scale.
template <class Codec, class Encode>
void store_scaled(const float* tile, uint64_t address, uint64_t element, int count, float* scales, int block,
                  const Encode& encode) {
    alignas(64) typename Codec::Bits raw[kTile];
    for (int first = 0; first < count; first += block) {
        BlockScale scale = Codec::scale(block_absmax(tile + first, block));
        scales[first / block] = scale.scale;
        for (int i = first; i < first + block; ++i) raw[i] = encode(i, scale.inverse);
    }
    copy_out(raw, address, element, count);
}

// Shards and scalars that one call works on, and where its scales lie.
struct Context {
    const Shard& shard;
    const Scalars& scalars;
    float* exp_avg_scales;
    float* exp_avg_sq_scales;
};

template <class MixType>
void update_tile(const Context& context, uint64_t element, int count) {
    using M = typename MixType::M;
    using V = typename MixType::V;
    const Shard& shard = context.shard;
    alignas(64) float grad[kTile], param[kTile], m[kTile], v[kTile], root[kTile];
    alignas(64) uint16_t high[kTile];
    alignas(64) int16_t low16[kTile];
    alignas(64) int8_t low8[kTile];
    const int block = 1 << shard.block_log2;
    const uint64_t first_block = element >> shard.block_log2;

    load(grad, shard.grad_type, shard.grad, element, count);
    if constexpr (MixType::master == Master::kParameter) {
        load(param, shard.param_type, shard.param, element, count);
    } else if constexpr (MixType::master == Master::kFloat32) {
        copy_in(param, shard.master, element, count);
    } else {
        copy_in(high, shard.param, element, count);
        if constexpr (MixType::master == Master::kRemainder16) {
            copy_in(low16, shard.master, element, count);
            for (int i = 0; i < kTile; ++i) param[i] = join_remainder16(high[i], low16[i]);
        } else {
            copy_in(low8, shard.master, element, count);
            for (int i = 0; i < kTile; ++i) param[i] = join_remainder8(high[i], low8[i]);
        }
    }
    if constexpr (MixType::exp_avg_scaled) {
        load_scaled<M>(m, shard.exp_avg, element, count, context.exp_avg_scales + first_block, block);
    } else {
        load(m, plain_type(shard.exp_avg_format), shard.exp_avg, element, count);
    }
    if constexpr (MixType::exp_avg_sq_scaled) {
        load_scaled<V>(v, shard.exp_avg_sq, element, count, context.exp_avg_sq_scales + first_block, block);
    } else {
        load(v, plain_type(shard.exp_avg_sq_format), shard.exp_avg_sq, element, count);
    }

    for (int i = 0; i < kTile; ++i) {
        Updated updated = update(grad[i], param[i], m[i], v[i], context.scalars);
        param[i] = updated.param;
        m[i] = updated.exp_avg;
        v[i] = updated.exp_avg_sq;
        root[i] = updated.root;
    }
    if (count < kTile) {  // a short last block's scale must not see what lies beyond the end
        for (int i = count; i < kTile; ++i) m[i] = v[i] = root[i] = 0.0f;
    }

    const bool rounds_state = shard.exp_avg_sq_format != Format::kFloat32;
    const bool rounds_param = MixType::master == Master::kParameter && shard.param_type != Element::kFloat32;
    RoundingTile bits;
    if (rounds_state || rounds_param) {
        fill_rounding(bits, shard, context.scalars.rounding, element, rounds_param);
    }
    if constexpr (MixType::exp_avg_scaled) {
        store_scaled<M>(m, shard.exp_avg, element, count, context.exp_avg_scales + first_block, block,
                        [&](int i, float inverse) { return M::encode(m[i], inverse); });
    } else {
        store(m, nullptr, plain_type(shard.exp_avg_format), shard.exp_avg, element, count);
    }
    if constexpr (MixType::exp_avg_sq_scaled) {
        store_scaled<V>(v, shard.exp_avg_sq, element, count, context.exp_avg_sq_scales + first_block, block,
                        [&](int i, float inverse) { return V::encode(v[i], root[i], inverse, bits.state[i]); });
    } else {
        store(v, bits.state, plain_type(shard.exp_avg_sq_format), shard.exp_avg_sq, element, count);
    }

    if constexpr (MixType::master == Master::kParameter) {
        store(param, rounds_param ? bits.param : nullptr, shard.param_type, shard.param, element, count);
    } else if constexpr (MixType::master == Master::kFloat32) {
        copy_out(param, shard.master, element, count);
        store(param, nullptr, shard.param_type, shard.param, element, count);
    } else {
        for (int i = 0; i < kTile; ++i) {
            constexpr bool wide = MixType::master == Master::kRemainder16;
            Split split = wide ? split_remainder16(param[i]) : split_remainder8(param[i]);
            high[i] = split.high;
            low16[i] = split.low;
        }
        copy_out(high, shard.param, element, count);
        if constexpr (MixType::master == Master::kRemainder16) {
            copy_out(low16, shard.master, element, count);
        } else {
            for (int i = 0; i < kTile; ++i) low8[i] = static_cast<int8_t>(low16[i]);
            copy_out(low8, shard.master, element, count);
        }
    }
}

struct UpdateRange {
    const Shard& shard;
    const Scalars& scalars;
    uint64_t begin;
    uint64_t end;

    template <class MixType>
    void operator()(MixType) const {
        float* scales = reinterpret_cast<float*>(shard.scales);
        Context context{shard, scalars, scales, MixType::exp_avg_scaled ? scales + block_count(shard) : scales};
        for (uint64_t element = begin; element < end; element += kTile) {
            uint64_t left = end - element;
            update_tile<MixType>(context, element, left < kTile ? static_cast<int>(left) : kTile);
        }
    }
};

}  // namespace

// `begin` is a multiple of kTile, `end` too unless it is the shard's end.
void FUSED_OPTIM_JOIN(update_range_, FUSED_OPTIM_ISA)(const Shard& shard, const Scalars& scalars, uint64_t begin,
                                                      uint64_t end) {
    DenormalsOn guard;
    dispatch(shard.master_kind, shard.exp_avg_format, shard.exp_avg_sq_format, UpdateRange{shard, scalars, begin, end});
}

}  // namespace fused_optim
