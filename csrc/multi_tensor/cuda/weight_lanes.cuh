// Which elements of a quantized weight the threads of a block take, and how they reach memory.
#pragma once

#include "cuda/device.h"
#include "cuda/warp.cuh"
#include "quantize.h"

namespace fused_optim {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kWarps = kThreads / kWarp;
constexpr uint32_t kPerLane = kStrip / kWarp;  // elements of a strip
constexpr uint32_t kStripsPerWarp = 2;         // loaded before the first is worked on
constexpr uint32_t kStripsPerUnit = kWarps * kStripsPerWarp;
constexpr uint32_t kGroups8PerThread = 4;
constexpr uint32_t kGroups8PerRound = kThreads * kGroups8PerThread;
static_assert(kPerLane == 4, "lanes load and store vectors of four");

template <class T>
__device__ __forceinline__ bool is_aligned(const T* address, uint32_t bytes) {
    return reinterpret_cast<uint64_t>(address) % bytes == 0;
}

// Four elements, of which `count` are there; zeros stand for the others.
__device__ __forceinline__ float4 load4(const float* values, int64_t count) {
    if (count >= 4 && is_aligned(values, 16)) return *reinterpret_cast<const float4*>(values);
    return make_float4(count > 0 ? values[0] : 0.0f, count > 1 ? values[1] : 0.0f, count > 2 ? values[2] : 0.0f,
                       count > 3 ? values[3] : 0.0f);
}

// The first `count` of kMost bytes.
template <int kMost>
__device__ __forceinline__ void store_bytes(uint8_t* target, uint32_t word, int count) {
    if (count >= kMost && is_aligned(target, kMost)) {
        if constexpr (kMost == 4) {
            *reinterpret_cast<uint32_t*>(target) = word;
        } else {
            *reinterpret_cast<uint16_t*>(target) = static_cast<uint16_t>(word);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
        if (i < count) target[i] = static_cast<uint8_t>(word >> (8 * i));
    }
}

// This lane's elements of a strip.
struct Lane {
    uint64_t element;  // the first one
    int count;         // 0 or less: none

    __device__ __forceinline__ explicit Lane(const Strip& strip) {
        const uint32_t first = threadIdx.x % kWarp * kPerLane;
        element = strip.element + first;
        count = static_cast<int>(strip.count) - static_cast<int>(first);
    }
    __device__ __forceinline__ float4 load(const Weight& w) const {
        return load4(reinterpret_cast<const float*>(w.values) + element, count);
    }
};

}  // namespace
}  // namespace fused_optim
