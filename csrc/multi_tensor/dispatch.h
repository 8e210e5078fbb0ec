// From run-time formats to compile-time ones. Masters and block-scaled moments are template parameters, because their
// codecs sit in the inner loop; element types (gradient, parameter, plain moment) only change a load and a store.
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

template <class Visit>
FUSED_OPTIM_HD void dispatch_element(Element type, const Visit& visit) {
    switch (type) {
        case Element::kFloat32: return visit(ElementCodec<Element::kFloat32>{});
        case Element::kBFloat16: return visit(ElementCodec<Element::kBFloat16>{});
        default: return visit(ElementCodec<Element::kFloat16>{});
    }
}

// A moment without block scales: an Element whose type is read at run time, as a gradient's.
struct Plain {
    static constexpr Format format = Format::kFloat32;
};

template <template <Format> class Codec, class Visitor>
FUSED_OPTIM_HD void dispatch_codec(Format format, const Visitor& visit) {
    switch (format) {
        case Format::kFloat32:
        case Format::kBFloat16: return visit(Plain{});
        case Format::kFloat16: return visit(Codec<Format::kFloat16>{});
        case Format::kFloat8: return visit(Codec<Format::kFloat8>{});
        case Format::kInt8: return visit(Codec<Format::kInt8>{});
    }
}

FUSED_OPTIM_HD Element plain_type(Format format) {
    return format == Format::kFloat32 ? Element::kFloat32 : Element::kBFloat16;
}

// The format by which a mix is known: FP32 stands for every plain one.
FUSED_OPTIM_HD constexpr Format codec_format(Format format) { return is_scaled(format) ? format : Format::kFloat32; }

// `has_weights_`: parameters may be quantized.
template <Master master_, class ExpAvgCodec, class ExpAvgSqCodec, bool has_weights_ = false>
struct Mix {
    static constexpr Master master = master_;
    static constexpr bool has_weights = has_weights_;
    using M = ExpAvgCodec;
    using V = ExpAvgSqCodec;
    static constexpr bool exp_avg_scaled = !std::is_same_v<M, Plain>;
    static constexpr bool exp_avg_sq_scaled = !std::is_same_v<V, Plain>;
};

template <Master master, class M, class Visitor>
struct VisitExpAvgSq {
    const Visitor& visit;
    template <class V>
    FUSED_OPTIM_HD void operator()(V) const {
        visit(Mix<master, M, V>{});
    }
};

template <Master master, class Visitor>
struct VisitExpAvg {
    Format exp_avg_sq;
    const Visitor& visit;
    template <class M>
    FUSED_OPTIM_HD void operator()(M) const {
        dispatch_codec<ExpAvgSq>(exp_avg_sq, VisitExpAvgSq<master, M, Visitor>{visit});
    }
};

template <Master master, class Visitor>
FUSED_OPTIM_HD void dispatch_moments(Format exp_avg, Format exp_avg_sq, const Visitor& visit) {
    dispatch_codec<ExpAvg>(exp_avg, VisitExpAvg<master, Visitor>{exp_avg_sq, visit});
}

// Calls visit(Mix<...>{}) with the formats as template arguments.
template <class Visitor>
FUSED_OPTIM_HD void dispatch(Master master, Format exp_avg, Format exp_avg_sq, const Visitor& visit) {
    switch (master) {
        case Master::kParameter: return dispatch_moments<Master::kParameter>(exp_avg, exp_avg_sq, visit);
        case Master::kFloat32: return dispatch_moments<Master::kFloat32>(exp_avg, exp_avg_sq, visit);
        case Master::kRemainder16: return dispatch_moments<Master::kRemainder16>(exp_avg, exp_avg_sq, visit);
        case Master::kRemainder8: return dispatch_moments<Master::kRemainder8>(exp_avg, exp_avg_sq, visit);
    }
}

}  // namespace fused_optim
