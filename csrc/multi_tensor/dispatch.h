// From run-time formats to compile-time ones. Masters and block-scaled states are template parameters, because their
// codecs sit in the inner loop; element types (gradient, parameter, state without scales) only change a load and a
// store.
#pragma once

#include <type_traits>

#include "formats.h"

namespace fused_optim {

// `Bits` holds an element of this type.
template <Element type>
struct ElementCodec;
template <>
struct ElementCodec<Element::kFloat32> {
    using Bits = uint32_t;
    FUSED_OPTIM_HD static float decode(uint32_t bits) { return bits_float(bits); }
    FUSED_OPTIM_HD static uint32_t encode(float x) { return float_bits(x); }
};
template <>
struct ElementCodec<Element::kBFloat16> {
    using Bits = uint16_t;
    FUSED_OPTIM_HD static float decode(uint16_t bits) { return bfloat16_decode(bits); }
    FUSED_OPTIM_HD static uint16_t encode(float x) { return bfloat16_nearest_even(x); }
};
template <>
struct ElementCodec<Element::kFloat16> {
    using Bits = uint16_t;
    FUSED_OPTIM_HD static float decode(uint16_t bits) { return float16_decode(bits); }
    FUSED_OPTIM_HD static uint16_t encode(float x) { return float16_nearest_even(x); }
};

static_assert(kCount<Element> == 3, "loads and stores of elements tell three types apart");

template <class Visit>
FUSED_OPTIM_HD void dispatch_element(Element type, const Visit& visit) {
    switch (type) {
        case Element::kFloat32: return visit(ElementCodec<Element::kFloat32>{});
        case Element::kBFloat16: return visit(ElementCodec<Element::kBFloat16>{});
        default: return visit(ElementCodec<Element::kFloat16>{});
    }
}

// The codec of a state without block scales: an Element whose type is read at run time, as a gradient's.
struct Unscaled {
    static constexpr Format format = Format::kFloat32;
};

// The codec of a state of some kind.
template <StateKind kind, Format format>
using CodecOf =
    std::conditional_t<is_scaled(format),
                       std::conditional_t<kind == StateKind::kSquare, SquareCodec<format>, SignedCodec<format>>,
                       Unscaled>;

// Calls visit(CodecOf<kind, format>{}).
template <StateKind kind, class Visitor>
FUSED_OPTIM_HD void dispatch_codec(Format format, const Visitor& visit) {
    if (!is_scaled(format)) return visit(Unscaled{});
#define FUSED_OPTIM_VISIT(enumerator, name, bytes, scaled)                       \
    case Format::enumerator:                                                     \
        if constexpr (scaled) return visit(CodecOf<kind, Format::enumerator>{}); \
        return;
    switch (format) { FUSED_OPTIM_FORMATS(FUSED_OPTIM_VISIT) }
#undef FUSED_OPTIM_VISIT
}

FUSED_OPTIM_HD constexpr Element unscaled_type(Format format) {
    return format == Format::kFloat32 ? Element::kFloat32 : Element::kBFloat16;
}

// Codecs and elements hold as many bytes as the list says.
template <Format format>
constexpr bool has_listed_bytes() {
    if constexpr (is_scaled(format)) {
        return sizeof(typename SignedCodec<format>::Bits) == format_bytes(format) &&
               sizeof(typename SquareCodec<format>::Bits) == format_bytes(format);
    } else {
        return (format == Format::kFloat32 || format == Format::kBFloat16) &&  // those that unscaled_type() knows
               element_bytes(unscaled_type(format)) == format_bytes(format);
    }
}
#define FUSED_OPTIM_CHECK(enumerator, ...) \
    static_assert(has_listed_bytes<Format::enumerator>(), #enumerator ": no element, or other bytes than listed");
FUSED_OPTIM_FORMATS(FUSED_OPTIM_CHECK)
#undef FUSED_OPTIM_CHECK

// The format by which a combination is known: FP32 for all that have no scales.
FUSED_OPTIM_HD constexpr Format codec_format(Format format) { return is_scaled(format) ? format : Format::kFloat32; }

// What a kernel of one combination knows at compile time: the update rule, and the format of all states.
// `has_weights_`: parameters may be quantized.
template <Rule rule_, Master master_, Format format_, bool has_weights_ = false>
struct Combination {
    static constexpr Rule rule = rule_;
    static constexpr Master master = master_;
    static constexpr Format format = format_;
    static constexpr bool has_weights = has_weights_;
    static constexpr bool staged = is_scaled(format);  // what is read goes through a Ring
    static constexpr bool scaled = staged || is_scaled(master);

    template <StateKind kind>
    using Codec = CodecOf<kind, format>;

    // Of what a shard says at run time.
    FUSED_OPTIM_HD static constexpr Master master_of(Master) { return master; }
    FUSED_OPTIM_HD static constexpr bool has_scales(Format) { return is_scaled(format); }
};

// The same of the parameter alone.
template <Master master_>
struct MasterAlone {
    static constexpr Master master = master_;
    static constexpr bool has_weights = false;
};

// Calls visit(MasterAlone<master>{}).
template <class Visitor>
FUSED_OPTIM_HD void dispatch_master(Master master, const Visitor& visit) {
#define FUSED_OPTIM_VISIT(enumerator, ...) \
    case Master::enumerator: return visit(MasterAlone<Master::enumerator>{});
    switch (master) { FUSED_OPTIM_MASTERS(FUSED_OPTIM_VISIT) }
#undef FUSED_OPTIM_VISIT
}

// Calls visit(std::integral_constant<int, i>{}) for each state of a rule, from `first` on.
template <Rule rule, int first = 0, class Visitor>
FUSED_OPTIM_HD void each_state(const Visitor& visit) {
    if constexpr (first < state_count(rule)) {
        visit(std::integral_constant<int, first>{});
        each_state<rule, first + 1>(visit);
    }
}

}  // namespace fused_optim
