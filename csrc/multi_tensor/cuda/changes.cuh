// Marks which elements of a parameter, and which scales, have other stored bits after the update than before. What was
// stored follows from the master's value before: the caller promises that the parameter was that one rounded.
#pragma once

#include "cuda/codecs.cuh"
#include "cuda/packets.cuh"
#include "cuda/table.cuh"
#include "dispatch.h"

namespace fused_optim {
namespace {

// The bits that a parameter has of a value. `rotating`: rounds by `bits`, else to nearest even.
template <bool rotating>
__device__ __forceinline__ uint32_t stored_bits(Element type, float value, uint32_t bits) {
    if (type == Element::kFloat32) return float_bits(value);
    return type == Element::kBFloat16 ? encode_bfloat16<rotating>(value, bits) : encode_float16<rotating>(value, bits);
}

// `carry`: what splitting a master adds before its upper half becomes the parameter.
__device__ __forceinline__ uint32_t upper_bits(float value, uint32_t carry) {
    return (float_bits(value) + carry) >> 16;
}

// Whether the parameter of a master changes with it. What it was is taken as it is stored, whatever NaN it may be; what
// it becomes is rounded as it will be.
__device__ __forceinline__ bool is_changed(Master master, Element type, float before, float after, uint32_t bits) {
    if (master == Master::kParameter) {
        const uint32_t was = type == Element::kBFloat16 ? upper_bits(before, 0) : stored_bits<false>(type, before, 0);
        return was != stored_bits<true>(type, after, bits);
    }
    if (is_remainder(master)) {
        const uint32_t carry = 0x8000u + (master == Master::kRemainder16 ? 0u : remainder8_carry(bits));
        return upper_bits(before, 0x8000u) != upper_bits(bits_float(canonical_bits(after)), carry);
    }
    return stored_bits<false>(type, before, 0) != stored_bits<false>(type, after, 0);
}

// A word of bits that one thread has to itself; it is sent off without waiting for what was there.
__device__ __forceinline__ void mark_word(uint64_t index, uint32_t word) {
    uint32_t* const target = reinterpret_cast<uint32_t*>(changes_of_chunk.elements) + index;
    if (changes_of_chunk.overwrites) {
        *target = word;
    } else if (word) {
        atomicOr(target, word);
    }
}

// Eight bits that one thread has to itself, of elements that are updated together. Others' bits in the same word stay
// as they are, so a warp needs no exchange.
__device__ __forceinline__ uint8_t* marks_of_group8(uint32_t element) {
    return reinterpret_cast<uint8_t*>(changes_of_chunk.elements) + element / 8;
}

// What a thread's eight elements have before the update: bits that are set already, and what is stored, the codes of a
// quantized weight or the halves that remainders complete. Read long before they are needed, since memory takes its
// time. `changed`: what the update finds, bit i of element i.
struct Earlier {
    uint32_t marked = 0;
    uint32_t stored[4]{};
    uint32_t changed = 0;
};

// Whether the update marks this chunk's elements. The codes of some quantized weights are another kernel's.
template <bool has_weights>
__device__ __forceinline__ bool marks_elements(const View& view) {
    return changes_of_chunk.elements && !(has_weights && view.info.quantized && !view.param);
}

// Whether the bits that are set already are kept.
__device__ __forceinline__ bool keeps_marks() { return changes_of_chunk.elements && !changes_of_chunk.overwrites; }

// Whether the update replaces codes whose changes are marked.
template <bool has_weights>
__device__ __forceinline__ bool replaces_codes(const View& view) {
    return has_weights && view.info.quantized && view.param && changes_of_chunk.elements;
}

template <bool has_weights>
__device__ __forceinline__ void load_earlier(Earlier& earlier, const View& view, uint32_t element) {
    if (replaces_codes<has_weights>(view)) load<1>(earlier.stored, view.param, element);
    if (keeps_marks()) earlier.marked = *marks_of_group8(element);
}

// Bytes without a new bit are not written.
template <bool has_weights>
__device__ __forceinline__ void mark_group8(const View& view, uint32_t element, const Earlier& earlier) {
    const uint32_t all = earlier.marked | earlier.changed;
    if (marks_elements<has_weights>(view) && (changes_of_chunk.overwrites || all != earlier.marked)) {
        *marks_of_group8(element) = static_cast<uint8_t>(all);
    }
}

// Two elements of 16 bits to a word: bit i says whether element i differs.
__device__ __forceinline__ uint32_t differing_halves(const uint32_t* before, const uint32_t* after) {
    uint32_t found = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) found += __vminu2(before[k] ^ after[k], 0x00010001u) << 2 * k;
    return (found | found >> 15) & 0xFFu;
}

// What is_changed() says of eight elements. `stored`: as in Earlier.
__device__ __forceinline__ uint32_t changed_group8(Master master, Element type, const float* before, const float* after,
                                                   const uint32_t* stored, uint32_t group8, const Rounding& rounding) {
    uint32_t was[4], is[4];
    if (is_remainder(master)) {
        uint32_t carried[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            const uint32_t bits = master == Master::kRemainder16 ? 0u : rounding.bits(group8, i);
            carried[i] = float_bits(after[i]) + 0x8000u + remainder8_carry(bits);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) is[k] = pack_high(carried[2 * k], carried[2 * k + 1]);
        return differing_halves(stored, is);
    }
    if (type == Element::kBFloat16) {
        if (master == Master::kParameter) {
#pragma unroll
            for (int k = 0; k < 4; ++k) was[k] = pack_high(float_bits(before[2 * k]), float_bits(before[2 * k + 1]));
            encode_bfloat16_words<true>(is, after, group8, rounding);
        } else {
            encode_bfloat16_words<false>(was, before, 0, rounding);
            encode_bfloat16_words<false>(is, after, 0, rounding);
        }
        return differing_halves(was, is);
    }
    uint32_t changed = 0;
    if (type == Element::kFloat32) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) changed |= (float_bits(before[i]) != float_bits(after[i]) ? 1u : 0u) << i;
        return changed;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        const uint32_t bits = master == Master::kParameter ? rounding.bits(group8, i) : 0u;
        changed |= (is_changed(master, type, before[i], after[i], bits) ? 1u : 0u) << i;
    }
    return changed;
}

// The same of eight codes of a quantized weight.
__device__ __forceinline__ uint32_t changed_codes(const uint32_t* before, const uint32_t* after) {
    return differing_bytes(before[0], after[0]) | differing_bytes(before[1], after[1]) << 4;
}

// Scales of neighbouring chunks may have bits in one word.
__device__ __forceinline__ void mark_scale(uint64_t scale) {
    atomicOr(reinterpret_cast<uint32_t*>(changes_of_chunk.scales) + scale / 32, 1u << scale % 32);
}

template <class Scale>
__device__ __forceinline__ bool same_bits(Scale a, Scale b) {
    if constexpr (std::is_same_v<Scale, float>) {
        return float_bits(a) == float_bits(b);
    } else {
        return a == b;
    }
}

// `first`: number of the chunk's first scale in its shard.
template <class T>
__device__ __forceinline__ void copy_scales_and_mark(T* target, const T* source, uint32_t count, uint64_t first) {
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
        if (changes_of_chunk.scales && !same_bits(target[i], source[i])) mark_scale(first + i);
        target[i] = source[i];
    }
}

// Of the general loop: a warp's elements begin at a multiple of 32, and their word is no other warp's. All lanes call.
__device__ __forceinline__ void mark_element(uint32_t element, bool inside, bool changed) {
    const uint32_t of_warp = __ballot_sync(kAllLanes, changed);
    if (inside && threadIdx.x % kWarp == 0 && changes_of_chunk.elements) mark_word(element / kWarp, of_warp);
}

// What was stored of a quantized weight at an element, and of the block that begins there.
struct StoredWeight {
    uint32_t code = 0;
    uint32_t scale = 0;

    __device__ __forceinline__ StoredWeight(const View& view, uint32_t element, bool inside) {
        if (!inside || !view.param) return;
        code = reinterpret_cast<const uint8_t*>(view.param)[element];
        dispatch_weight(view.weight_format(), ReadScale{view, element, scale});
    }

    // `before`: the same before the update.
    __device__ __forceinline__ void mark_scale_after(const View& view, uint32_t element,
                                                     const StoredWeight& before) const {
        if (changes_of_chunk.scales && scale != before.scale) {
            dispatch_weight(view.weight_format(), MarkScale{view, element});
        }
    }

private:
    struct ReadScale {
        const View& view;
        uint32_t element;
        uint32_t& scale;

        template <class Codec>
        __device__ __forceinline__ void operator()(Codec) const {
            using Scale = typename Codec::Scale;
            if constexpr (kWrittenByUpdate<Codec> && !std::is_void_v<Scale>) {
                if (element % Codec::kBlock != 0) return;
                const Scale found = reinterpret_cast<const Scale*>(view.weight_scales)[element / Codec::kBlock];
                if constexpr (std::is_same_v<Scale, float>) {
                    scale = float_bits(found);
                } else {
                    scale = found;
                }
            }
        }
    };
    struct MarkScale {
        const View& view;
        uint32_t element;

        template <class Codec>
        __device__ __forceinline__ void operator()(Codec) const {
            mark_scale((view.first + element) / Codec::kBlock);
        }
    };
};

}  // namespace
}  // namespace fused_optim
