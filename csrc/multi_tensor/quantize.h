// Quantized weights: the table, the math of their scales and elements, and what both engines offer. The PyTorch
// reference (fused_optim/quantized/recipes/) defines the bits. Divisions are IEEE divisions: scales reach 2^-126,
// beyond what arithmetic.h's divide() and reciprocal() take.
#pragma once

#include <cstdint>
#include <vector>

#include "dispatch.h"

namespace fused_optim {

struct WeightKind {
    WeightFormat format;
    bool round_up;  // scales of blocks become powers of two, rounded up
};

constexpr uint32_t kStrip = 128;  // elements of a row that are worked on together: whole blocks of every format
constexpr uint64_t kMaxWeightNumel = uint64_t{1} << 43;

// One local weight as a matrix, and which fractions it is rounded by.
struct Weight {
    uint64_t values;  // FP32 when it is encoded; of any element type when it is decoded into
    uint64_t data;
    uint64_t scales;        // of blocks
    uint64_t tensor_scale;  // FP32
    uint64_t rows;
    uint64_t columns;
    uint64_t steps;     // address of the step's number (int64); 0: `step` is its number
    uint64_t offset;    // global index of element 0
    Geometry geometry;  // inner_local = 0: round to nearest even
    uint32_t step;
    uint32_t key;

    FUSED_OPTIM_HD uint64_t numel() const { return rows * columns; }
    FUSED_OPTIM_HD bool rotates() const { return geometry.inner_local != 0; }
    FUSED_OPTIM_HD float whole() const { return tensor_scale ? *reinterpret_cast<const float*>(tensor_scale) : 0.0f; }
    FUSED_OPTIM_HD Rounding rounding() const {
        const uint32_t number = steps ? static_cast<uint32_t>(*reinterpret_cast<const int64_t*>(steps)) : step;
        return {number * kGoldenRatio, 0xFFFFFFFFu};
    }
    FUSED_OPTIM_HD uint32_t fraction(const Rounding& rounding, uint64_t element) const {
        const uint64_t global = global_index(element, offset, geometry, geometry.is_consecutive(numel()));
        return rounding.bits(rounding.group8(key, global), static_cast<uint32_t>(global));
    }
};

// Up to kStrip elements of one row.
struct Strip {
    uint64_t row;
    uint64_t column;
    uint64_t element;  // the first one's index
    uint32_t count;
};

FUSED_OPTIM_HD constexpr uint64_t ceil_divide(uint64_t x, uint64_t by) { return (x + by - 1) / by; }

FUSED_OPTIM_HD uint64_t strip_count(const Weight& w) { return w.rows * ceil_divide(w.columns, kStrip); }

FUSED_OPTIM_HD Strip strip_at(const Weight& w, uint64_t index) {
    const uint64_t per_row = ceil_divide(w.columns, kStrip);
    const uint64_t row = w.rows == 1 ? 0 : index / per_row;
    const uint64_t column = (index - row * per_row) * kStrip;
    const uint64_t rest = w.columns - column;
    return {row, column, row * w.columns + column, static_cast<uint32_t>(rest < kStrip ? rest : kStrip)};
}

FUSED_OPTIM_HD uint64_t tile_count(const Weight& w) {
    return ceil_divide(w.rows, kStrip) * ceil_divide(w.columns, kStrip);
}

// ---------------------------------------------------------------------------------------------------------------
// Elements

// Magnitudes beyond the largest saturate. E4M3 takes what is not finite as NaN; E2M1, which has none, takes NaN as 0.
struct Float8Element {
    static constexpr int kPerByte = 1;
    static constexpr uint32_t kNaN = 0x7Fu;

    FUSED_OPTIM_HD static uint32_t finish(float x, uint32_t magnitude) {
        return magnitude_bits(x) < kInfinity ? magnitude | (float_bits(x) >> 24 & 0x80u) : kNaN;
    }
    FUSED_OPTIM_HD static uint32_t nearest(float x) {
        return finish(x, float8_nearest_even(clamp_top(fabsf(x), kFloat8Top)));
    }
    // The top is a code itself: no fraction lifts it.
    FUSED_OPTIM_HD static uint32_t rotating(float x, uint32_t u) {
        return finish(x, (scaled_bits<120>(clamp_top(fabsf(x), kFloat8Top)) + (u >> 12)) >> 20);
    }
    FUSED_OPTIM_HD static float decode(uint32_t code) {
        return (code & 0x7Fu) == kNaN ? bits_float(kQuietNaN) : float8_decode(code);
    }
};

struct Float4Element {
    static constexpr int kPerByte = 2;

    FUSED_OPTIM_HD static float magnitude(uint32_t code) {
        const uint32_t normal = ((code >> 1 & 3u) + 126u) << 23 | (code & 1u) << 22;
        return bits_float((code & 7u) < 2u ? (code & 1u) * 0x3F000000u : normal);
    }
    FUSED_OPTIM_HD static float saturated(float x) { return is_nan(x) ? 0.0f : clamp_top(fabsf(x), 6.0f); }
    FUSED_OPTIM_HD static uint32_t sign(float x) { return is_nan(x) ? 0u : float_bits(x) >> 28 & 8u; }

    // Adding a power of two whose last place is the gap between levels rounds to a multiple of it. From one power of
    // two to the next there are two codes.
    FUSED_OPTIM_HD static uint32_t nearest(float x) {
        const float value = clamp_top(fabsf(x), 6.0f);
        const float at_least_one = larger(value, 1.0f);  // below it the gap stays the same
        const uint32_t base = float_bits(at_least_one) & kInfinity;
        const uint32_t rounder = base + (22u << 23);
        const uint32_t gaps = float_bits(value + bits_float(rounder)) - rounder;
        return is_nan(x) ? 0u : (gaps + (base >> 22) - 254u) | (float_bits(x) >> 28 & 8u);
    }
    // The level below, and the next one if the part of the way to it and u make 1.
    FUSED_OPTIM_HD static uint32_t rotating(float x, uint32_t u) {
        const float value = saturated(x);
        const uint32_t b = float_bits(value);
        const uint32_t level = b < 0x3F800000u ? (b >= 0x3F000000u ? 1u : 0u) : (b >> 22) - 252u;
        const uint32_t below = level < 6u ? level : 6u;
        const float inverse_gap = below < 4u ? 2.0f : below < 6u ? 1.0f : 0.5f;
        const float part = (value - magnitude(below)) * inverse_gap;
        return (below + (reaches_one(part, u) ? 1u : 0u)) | sign(x);
    }
    // Whether part + u * 2^-32 >= 1 as a sum in double precision, which rounds up what lacks less than 2^-54, or that
    // much: of a float only where `part` is below 2^-30.
    FUSED_OPTIM_HD static bool reaches_one(float part, uint32_t u) {
        const float exact = part * 4294967296.0f;
        const float units = exact < 4.0f ? exact + 2.384185791015625e-07f : exact;
        return part >= 1.0f || u > 0xFFFFFFFFu - static_cast<uint32_t>(units);
    }
    FUSED_OPTIM_HD static float decode(uint32_t code) {
        return bits_float(float_bits(magnitude(code)) | (code & 8u) << 28);
    }
};

// ---------------------------------------------------------------------------------------------------------------
// Scales

// The magnitudes of a block's elements, as bits: they compare alike.
struct Magnitudes {
    uint32_t finite = 0;   // the largest finite one
    uint32_t largest = 0;  // infinity and beyond: not all are finite

    FUSED_OPTIM_HD void add(float x) {
        const uint32_t bits = magnitude_bits(x);
        merge({bits < kInfinity ? bits : 0u, bits});
    }
    FUSED_OPTIM_HD void merge(const Magnitudes& other) {
        finite = other.finite > finite ? other.finite : finite;
        largest = other.largest > largest ? other.largest : largest;
    }
};

// At least the smallest normal number, so that its reciprocal exists.
FUSED_OPTIM_HD float scale_for(float absmax, float largest) { return larger(absmax / largest, kSmallestNormal); }

FUSED_OPTIM_HD float next_power_of_two(float x) { return bits_float((float_bits(x) + 0x7FFFFFu) & 0x7F800000u); }

// 2^(exponent - 127), and NaN of 255.
FUSED_OPTIM_HD float power_of_two(uint32_t exponent) {
    const uint32_t bits = exponent == 0 ? 0x400000u : exponent << 23;
    return bits_float(exponent == 255u ? kQuietNaN : bits);
}

// ---------------------------------------------------------------------------------------------------------------
// Formats. A codec has: kBlock, the elements of a row that share a scale; kTiled, whether as many rows do; Scale, how
// it is stored, void if only the whole weight has one; kTensorScale, whether it has; kPoisons, whether a block with an
// element that is not finite is stored as NaN; prepare(), from a block's magnitudes and the tensor's scale; step(), by
// which codes are multiplied; and those of an element.

struct WeightBlock {
    uint32_t scale;  // stored: the bits of an FP32 scale, or a byte
    float inverse;   // what elements are multiplied by
};

template <WeightFormat format>
struct WeightCodec;

template <>
struct WeightCodec<WeightFormat::kFloat8> : Float8Element {
    static constexpr uint32_t kBlock = kStrip;
    static constexpr bool kTiled = false, kTensorScale = true, kPoisons = false;
    using Scale = void;
    FUSED_OPTIM_HD static WeightBlock prepare(const Magnitudes&, bool, float whole) { return {0, 1.0f / whole}; }
    FUSED_OPTIM_HD static float step(uint32_t, float whole) { return whole; }
};

template <>
struct WeightCodec<WeightFormat::kFloat8Blocks> : Float8Element {
    static constexpr uint32_t kBlock = 128;
    static constexpr bool kTiled = false, kTensorScale = false, kPoisons = false;
    using Scale = uint32_t;
    FUSED_OPTIM_HD static WeightBlock prepare(const Magnitudes& block, bool round_up, float) {
        const float exact = scale_for(bits_float(block.finite), kFloat8Top);
        const float scale = round_up ? next_power_of_two(exact) : exact;
        return {float_bits(scale), 1.0f / scale};
    }
    FUSED_OPTIM_HD static float step(uint32_t scale, float) { return bits_float(scale); }
};

template <>
struct WeightCodec<WeightFormat::kFloat8Tiles> : WeightCodec<WeightFormat::kFloat8Blocks> {
    static constexpr bool kTiled = true;
};

template <>
struct WeightCodec<WeightFormat::kMXFloat8> : Float8Element {
    static constexpr uint32_t kBlock = 32;
    static constexpr bool kTiled = false, kTensorScale = false, kPoisons = false;
    using Scale = uint8_t;
    FUSED_OPTIM_HD static WeightBlock prepare(const Magnitudes& block, bool round_up, float) {
        const uint32_t floor = block.finite >> 23;  // E4M3's largest is 1.75 * 2^8
        const uint32_t exponent =
            round_up ? float_bits(next_power_of_two(scale_for(bits_float(block.finite), kFloat8Top))) >> 23
                     : (floor > 8u ? floor - 8u : 0u);
        return {exponent, power_of_two(254u - exponent)};
    }
    FUSED_OPTIM_HD static float step(uint32_t scale, float) { return power_of_two(scale); }
};

template <>
struct WeightCodec<WeightFormat::kNVFloat4> : Float4Element {
    static constexpr uint32_t kBlock = 16;
    static constexpr bool kTiled = false, kTensorScale = true, kPoisons = true;
    using Scale = uint8_t;
    FUSED_OPTIM_HD static WeightBlock prepare(const Magnitudes& block, bool, float whole) {
        const uint32_t code = Float8Element::nearest(bits_float(block.finite) / 6.0f / whole);
        const float value = step(code, whole);
        const float inverse = 1.0f / value;
        return {block.largest < kInfinity ? code : Float8Element::kNaN, value > 0.0f ? inverse : 0.0f};
    }
    FUSED_OPTIM_HD static float step(uint32_t scale, float whole) { return Float8Element::decode(scale) * whole; }
};

template <class Visit>
FUSED_OPTIM_HD void dispatch_weight(WeightFormat format, const Visit& visit) {
#define FUSED_OPTIM_VISIT(enumerator, ...) \
    case WeightFormat::enumerator: return visit(WeightCodec<WeightFormat::enumerator>{});
    switch (format) { FUSED_OPTIM_WEIGHT_FORMATS(FUSED_OPTIM_VISIT) }
#undef FUSED_OPTIM_VISIT
}

// Bytes of a block's scale.
template <class Scale>
inline constexpr uint32_t kScaleBytes = sizeof(Scale);
template <>
inline constexpr uint32_t kScaleBytes<void> = 0;

// Whether the update of a weight's FP32 master can write the codes, to nearest even. It has one address of scales:
// those of blocks, which it writes, or the whole weight's, which it reads. It looks at finite magnitudes only. Blocks
// are 32, 64 or 128 elements of a row, and the CUDA engine has four bytes for the scales of 128 elements.
template <class Codec>
constexpr bool kWrittenByUpdate = Codec::kPerByte == 1 && !Codec::kTiled && !Codec::kPoisons &&
                                  Codec::kTensorScale == std::is_void_v<typename Codec::Scale> &&
                                  (Codec::kBlock == 32 || Codec::kBlock == 64 || Codec::kBlock == 128) &&
                                  kScaleBytes<typename Codec::Scale> * 128 <= 4 * Codec::kBlock;

// What the host needs to know of a format.
struct WeightTraits {
    uint32_t block;
    bool tiled;
    bool block_scales;
    bool tensor_scale;
    bool written_by_update;
    int per_byte;
};

struct ReadTraits {
    WeightTraits& traits;
    template <class Codec>
    FUSED_OPTIM_HD void operator()(Codec) const {
        traits = {Codec::kBlock,       Codec::kTiled,           !std::is_void_v<typename Codec::Scale>,
                  Codec::kTensorScale, kWrittenByUpdate<Codec>, Codec::kPerByte};
    }
};

inline WeightTraits traits_of(WeightFormat format) {
    WeightTraits traits{};
    dispatch_weight(format, ReadTraits{traits});
    return traits;
}

// Scales of blocks lie row by row, those of tiles one row per 128 rows of the weight.
template <class Codec>
FUSED_OPTIM_HD uint64_t scale_index(const Weight& w, uint64_t row, uint64_t column) {
    const uint64_t scale_row = Codec::kTiled ? row / kStrip : row;
    return scale_row * ceil_divide(w.columns, Codec::kBlock) + column / Codec::kBlock;
}

template <class Codec>
FUSED_OPTIM_HD void store_scale(const Weight& w, uint64_t index, uint32_t scale) {
    using Scale = typename Codec::Scale;
    if constexpr (!std::is_void_v<Scale>) reinterpret_cast<Scale*>(w.scales)[index] = static_cast<Scale>(scale);
}

template <class Codec>
FUSED_OPTIM_HD uint32_t load_scale(const Weight& w, uint64_t index) {
    using Scale = typename Codec::Scale;
    if constexpr (std::is_void_v<Scale>) {
        return 0;
    } else {
        return reinterpret_cast<const Scale*>(w.scales)[index];
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Scales of whole weights

// When scales are derived.
#define FUSED_OPTIM_SCALE_STAGES(ROW)                                     \
    ROW(kBefore, "BEFORE") /* an update: from earlier absmaxes */         \
    ROW(kAfter, "AFTER")   /* an update: with the absmax of its values */ \
    ROW(kAgain, "AGAIN")   /* for the values of the last update: likewise */
FUSED_OPTIM_ENUM(ScaleStage, FUSED_OPTIM_SCALE_STAGES);

struct ScaleRule {
    float largest;     // what a weight's absmax is divided by
    float factor;      // leaves room
    uint32_t history;  // earlier absmaxes that are kept, the latest first; 0: the scale is that of the new one
    bool most_recent;  // of them counts, not the largest
    ScaleStage stage;
    const bool* applies;  // where it is false nothing is changed; null means true
};

struct TensorScale {
    float* scale;
    float* history;
    const float* absmax;
};

// Without a history to speak of the scale stays, unless it is that of zeros.
FUSED_OPTIM_HD void scale_from_history(const TensorScale& t, const ScaleRule& rule) {
    float seen = t.history[0];
    for (uint32_t i = 1; i < rule.history && !rule.most_recent; ++i) seen = larger(t.history[i], seen);
    const float kept = *t.scale > kSmallestNormal * rule.factor ? *t.scale : 1.0f;
    *t.scale = seen > 0.0f ? scale_for(seen, rule.largest) * rule.factor : kept;
}

FUSED_OPTIM_HD void push_history(const TensorScale& t, const ScaleRule& rule) {
    for (uint32_t i = rule.history - 1; i > 0; --i) t.history[i] = t.history[i - 1];
    t.history[0] = *t.absmax;
}

FUSED_OPTIM_HD void rescale(const TensorScale& t, const ScaleRule& rule) {
    if (rule.applies && !*rule.applies) return;
    if (rule.stage == ScaleStage::kBefore) {
        if (rule.history) scale_from_history(t, rule);
        return;
    }
    if (!rule.history || !(*t.scale > 0.0f)) *t.scale = scale_for(*t.absmax, rule.largest) * rule.factor;
    if (rule.history && rule.stage == ScaleStage::kAfter) push_history(t, rule);
}

// ---------------------------------------------------------------------------------------------------------------
// What an engine offers. Addresses lie in the memory of its device.

struct Values {
    uint64_t address;  // FP32
    uint64_t numel;
};

// Blocks that fill whole rows do so in one long row as well, whose strips are full; without blocks, all is one row.
inline Weight flattened(const Weight& w, const WeightTraits& traits) {
    Weight flat = w;
    if (!traits.tiled && (!traits.block_scales || w.columns % traits.block == 0)) {
        flat.columns = w.numel();
        flat.rows = flat.columns ? 1 : 0;
    }
    return flat;
}

// The largest finite magnitude of each, 0 of none, into absmax[i].
void absmax_cpu(const std::vector<Values>& tensors, float* absmax, int threads);
void rescale_cpu(const std::vector<TensorScale>& scales, const ScaleRule& rule, int threads);
void encode_cpu(const std::vector<Weight>& weights, const WeightKind& kind, int threads);
void decode_cpu(const Weight& weight, WeightFormat format, Element type, int threads);

// As above, enqueued on `stream` of `device`; nothing is read back. Throw std::runtime_error naming the kernel and the
// CUDA error.
void absmax_cuda(const std::vector<Values>& tensors, float* absmax, int device, uint64_t stream);
void rescale_cuda(const std::vector<TensorScale>& scales, const ScaleRule& rule, int device, uint64_t stream);
void encode_cuda(const std::vector<Weight>& weights, const WeightKind& kind, int device, uint64_t stream);
void decode_cuda(const Weight& weight, WeightFormat format, Element type, int device, uint64_t stream);
void load_quantize_kernels(int device);

}  // namespace fused_optim
