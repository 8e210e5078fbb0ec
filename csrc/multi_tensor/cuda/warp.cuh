// What the lanes of a warp find together.
#pragma once

#include <cstdint>

namespace fused_optim {
namespace {

constexpr uint32_t kWarp = 32;
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

// combine() of the values of each aligned group of `lanes`, a power of two, on all of them; sums have a fixed order.
template <uint32_t lanes, class T, class Combine>
__device__ __forceinline__ T combine_lanes(T value, const Combine& combine) {
#pragma unroll
    for (uint32_t distance = lanes / 2; distance > 0; distance /= 2) {
        value = combine(value, __shfl_xor_sync(kAllLanes, value, distance));
    }
    return value;
}

template <uint32_t lanes>
__device__ __forceinline__ uint32_t lanes_max(uint32_t value) {
    return combine_lanes<lanes>(value, [](uint32_t a, uint32_t b) { return max(a, b); });
}

// max that hands on NaN, as 0x7FFFFFFF.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float x;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
    return x;
}

// The same of groups whose size is known at run time only; `usual` is what it mostly is.
template <uint32_t usual>
__device__ __forceinline__ float lanes_max_or_nan(float x, uint32_t lanes) {
    if (lanes == usual) return combine_lanes<usual>(x, max_or_nan);
    for (uint32_t distance = 1; distance < lanes; distance *= 2) {
        x = max_or_nan(x, __shfl_xor_sync(kAllLanes, x, distance));
    }
    return x;
}

}  // namespace
}  // namespace fused_optim
