// Kernels that decode one quantized weight.
#pragma once

#include "cuda/device.h"
#include "cuda/warp.cuh"
#include "cuda/weight_group8.cuh"
#include "cuda/weight_lanes.cuh"
#include "quantize.h"

namespace fused_optim {
namespace {

struct StoreLane {
    const Weight& w;
    const Lane& lane;
    const float (&values)[4];

    template <class Output>
    __device__ __forceinline__ void operator()(Output) const {
        using Bits = typename Output::Bits;
        Bits* const target = reinterpret_cast<Bits*>(w.values) + lane.element;
        alignas(16) Bits raw[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) raw[i] = Output::encode(values[i]);
        if (lane.count >= 4 && is_aligned(target, sizeof(raw))) {
            using Vector = std::conditional_t<sizeof(Bits) == 4, uint4, uint2>;
            *reinterpret_cast<Vector*>(target) = *reinterpret_cast<const Vector*>(raw);
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i < lane.count) target[i] = raw[i];
        }
    }
};

template <class Codec>
__device__ __forceinline__ uint32_t load_codes(const Weight& w, const Lane& lane) {
    constexpr int kBytes = 4 / Codec::kPerByte;
    const uint8_t* const source = reinterpret_cast<const uint8_t*>(w.data) + lane.element / Codec::kPerByte;
    uint32_t word = 0;
    if (lane.count >= 4 && is_aligned(source, kBytes)) {
        if constexpr (kBytes == 4) {
            word = *reinterpret_cast<const uint32_t*>(source);
        } else {
            word = *reinterpret_cast<const uint16_t*>(source);
        }
        return word;
    }
#pragma unroll
    for (int i = 0; i < kBytes; ++i) {
        if (i * Codec::kPerByte < lane.count) word |= static_cast<uint32_t>(source[i]) << (8 * i);
    }
    return word;
}

struct DecodeArguments {
    Weight weight;
    WeightFormat format;
    Element type;
};

struct DecodeStrip {
    const DecodeArguments& arguments;
    const Strip& strip;

    template <class Codec>
    __device__ __forceinline__ void operator()(Codec) const {
        constexpr int kBits = 8 / Codec::kPerByte;
        const Weight& w = arguments.weight;
        const Lane lane(strip);
        if (lane.count <= 0) return;
        const uint64_t column = strip.column + threadIdx.x % kWarp * kPerLane;
        const uint64_t scale = scale_index<Codec>(w, strip.row, column);
        const float step = Codec::step(load_scale<Codec>(w, scale), w.whole());
        const uint32_t word = load_codes<Codec>(w, lane);
        float values[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = Codec::decode(word >> (kBits * i) & ((1u << kBits) - 1u)) * step;
        dispatch_element(arguments.type, StoreLane{w, lane, values});
    }
};

__global__ void __launch_bounds__(kThreads) decode_strips(const __grid_constant__ DecodeArguments arguments) {
    const uint64_t count = strip_count(arguments.weight);
    const uint64_t first = uint64_t{blockIdx.x} * kStripsPerUnit + threadIdx.x / kWarp;
#pragma unroll
    for (uint32_t k = 0; k < kStripsPerWarp; ++k) {
        const uint64_t index = first + k * kWarps;
        if (index >= count) return;
        const Strip strip = strip_at(arguments.weight, index);
        dispatch_weight(arguments.format, DecodeStrip{arguments, strip});
    }
}

// The same for weights whose rows are whole groups of 8 elements, in which all elements share a scale: with wider
// accesses, and the loads of several groups of 8 under way at once.
template <class Codec>
__device__ __forceinline__ uint64_t group8_scale(const Weight& w, uint64_t group8) {
    const uint64_t element = group8 * kVector;
    if (w.rows == 1) return scale_index<Codec>(w, 0, element);
    const bool narrow = (element | w.columns) >> 32 == 0;  // the short division
    const uint64_t row =
        narrow ? static_cast<uint32_t>(element) / static_cast<uint32_t>(w.columns) : element / w.columns;
    return scale_index<Codec>(w, row, element - row * w.columns);
}

struct StoreGroup8 {
    uint64_t address;  // of the first value
    uint64_t group8;
    const float (&values)[kVector];

    template <class Output>
    __device__ __forceinline__ void operator()(Output) const {
        using Bits = typename Output::Bits;
        constexpr uint32_t kVectors = kVector * sizeof(Bits) / sizeof(uint4);
        alignas(16) Bits raw[kVector];
#pragma unroll
        for (uint32_t i = 0; i < kVector; ++i) raw[i] = Output::encode(values[i]);
        uint4* const target = reinterpret_cast<uint4*>(address) + group8 * kVectors;
#pragma unroll
        for (uint32_t i = 0; i < kVectors; ++i) target[i] = reinterpret_cast<const uint4*>(raw)[i];
    }
};

struct DecodeGroups8 {
    const DecodeArguments& arguments;

    template <class Codec>
    __device__ __forceinline__ void operator()(Codec) const {
        using Codes = std::conditional_t<Codec::kPerByte == 1, uint64_t, uint32_t>;
        constexpr int kBits = 8 / Codec::kPerByte;
        const Weight& w = arguments.weight;
        const uint64_t count = w.numel() / kVector;
        const uint64_t first = uint64_t{blockIdx.x} * kGroups8PerRound + threadIdx.x;
        Codes codes[kGroups8PerThread];
        uint32_t scales[kGroups8PerThread];
#pragma unroll
        for (uint32_t k = 0; k < kGroups8PerThread; ++k) {
            const uint64_t group8 = min(first + k * kThreads, count - 1);
            codes[k] = reinterpret_cast<const Codes*>(w.data)[group8];
            scales[k] = load_scale<Codec>(w, group8_scale<Codec>(w, group8));
        }
        const float whole = w.whole();
#pragma unroll
        for (uint32_t k = 0; k < kGroups8PerThread; ++k) {
            const uint64_t group8 = first + k * kThreads;
            if (group8 >= count) return;
            const float step = Codec::step(scales[k], whole);
            float values[kVector];
#pragma unroll
            for (uint32_t i = 0; i < kVector; ++i) {
                values[i] = Codec::decode(static_cast<uint32_t>(codes[k] >> (kBits * i)) & ((1u << kBits) - 1u)) * step;
            }
            dispatch_element(arguments.type, StoreGroup8{w.values, group8, values});
        }
    }
};

__global__ void __launch_bounds__(kThreads) decode_groups8(const __grid_constant__ DecodeArguments arguments) {
    dispatch_weight(arguments.format, DecodeGroups8{arguments});
}

bool has_groups8(const Weight& w, const WeightTraits& traits) {
    return w.columns % kVector == 0 && w.data % (kVector / traits.per_byte) == 0 && w.values % sizeof(uint4) == 0;
}

}  // namespace
}  // namespace fused_optim
