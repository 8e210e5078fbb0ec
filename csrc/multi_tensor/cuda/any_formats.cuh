// In the place of a Combination: masters and formats are branches, taken alike by all threads of a thread block. The
// update rule is FUSED_OPTIM_RULE.
#pragma once

#include "cuda/vector_loop.cuh"

namespace fused_optim {
namespace {

// In place of a codec.
struct Any {
    static constexpr Format format = Format::kFloat32;  // elements of as many bytes fit
};

// In place of a Combination.
struct AnyFormats {
    static constexpr Rule rule = Rule::FUSED_OPTIM_RULE;
    static constexpr Format format = Any::format;
    static constexpr bool has_weights = false;
    static constexpr bool staged = false;

    template <StateKind>
    using Codec = Any;

    __device__ __forceinline__ static Master master_of(Master master) { return master; }
    __device__ __forceinline__ static bool has_scales(Format format) { return is_scaled(format); }
};

template <StateKind kind>
struct LoadGroup8 {
    Packet<4>& raw;
    Format format;
    uint64_t address;
    uint32_t element;

    template <class Codec>
    __device__ __forceinline__ void operator()(Codec) const {
        StateAccess<kind, Codec>::load_raw(raw, format, address, element);
    }
};

template <StateKind kind>
struct DecodeGroup8 {
    float* values;
    Packet<4>& raw;
    Format format;
    float scale;

    template <class Codec>
    __device__ __forceinline__ void operator()(Codec) const {
        StateAccess<kind, Codec>::decode_all(values, raw, format, scale);
    }
};

template <StateKind kind>
struct StoreGroup8 {
    const View& view;
    int state;
    Format format;
    uint32_t element;
    const float* values;
    float largest;
    const float* root;
    uint32_t group8;
    const Rounding& rounding;

    template <class Codec>
    __device__ __forceinline__ void operator()(Codec) const {
        StateAccess<kind, Codec>::store_all(view, state, format, element, values, largest, root, group8, rounding);
    }
};

template <StateKind kind>
struct StateAccess<kind, Any> {
    __device__ __forceinline__ static void load_raw(Packet<4>& raw, Format format, uint64_t address, uint32_t element) {
        dispatch_codec<kind>(format, LoadGroup8<kind>{raw, format, address, element});
    }
    __device__ __forceinline__ static void decode_all(float* values, Packet<4>& raw, Format format, float scale) {
        dispatch_codec<kind>(format, DecodeGroup8<kind>{values, raw, format, scale});
    }
    __device__ __forceinline__ static void store_all(const View& view, int state, Format format, uint32_t element,
                                                     const float* values, float largest, const float* root,
                                                     uint32_t group8, const Rounding& rounding) {
        dispatch_codec<kind>(format,
                             StoreGroup8<kind>{view, state, format, element, values, largest, root, group8, rounding});
    }
};

struct LoadParam {
    Packet<4>& param;
    Packet<4>& master;
    const View& view;
    uint32_t element;

    template <class Formats>
    __device__ __forceinline__ void operator()(Formats) const {
        load_param<Formats>(param, master, view, element);
    }
};

template <>
__device__ __forceinline__ void load_param<AnyFormats>(Packet<4>& param, Packet<4>& master, const View& view,
                                                       uint32_t element) {
    dispatch_master(view.master_kind(), LoadParam{param, master, view, element});
}

struct DecodeParam {
    float* values;
    const View& view;
    Packet<4>& param;
    Packet<4>& master;
    float master_scale;

    template <class Formats>
    __device__ __forceinline__ void operator()(Formats) const {
        decode_param<Formats>(values, view, param, master, master_scale);
    }
};

template <>
__device__ __forceinline__ void decode_param<AnyFormats, Packet<4>>(float* values, const View& view, Packet<4>& param,
                                                                    Packet<4>& master, float master_scale) {
    dispatch_master(view.master_kind(), DecodeParam{values, view, param, master, master_scale});
}

struct StoreParam {
    const View& view;
    uint32_t element;
    const float* before;
    float* values;
    uint32_t group8;
    const Rounding& rounding;
    float* master_scale;

    template <class Formats>
    __device__ __forceinline__ void operator()(Formats) const {
        store_param<Formats>(view, element, before, values, group8, rounding, master_scale);
    }
};

template <>
__device__ __forceinline__ void store_param<AnyFormats>(const View& view, uint32_t element, const float* before,
                                                        float* values, uint32_t group8, const Rounding& rounding,
                                                        float* master_scale) {
    dispatch_master(view.master_kind(), StoreParam{view, element, before, values, group8, rounding, master_scale});
}

}  // namespace
}  // namespace fused_optim
