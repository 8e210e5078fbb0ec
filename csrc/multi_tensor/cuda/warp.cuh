// What the lanes of a warp find together.
#pragma once

#include <cstdint>

namespace fused_optim {
namespace {

constexpr uint32_t kWarp = 0xFFFFFFFFu;  // all lanes of a warp

// max that hands on NaN, as 0x7FFFFFFF.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float x;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
    return x;
}

// The largest value among the lanes whose numbers differ below `lanes`, a power of two; `usual` is what it mostly is.
template <int usual>
__device__ __forceinline__ float lanes_max(float x, int lanes) {
    if (lanes == usual) {
#pragma unroll
        for (int other = 1; other < usual; other *= 2) x = max_or_nan(x, __shfl_xor_sync(kWarp, x, other));
    } else {
        for (int other = 1; other < lanes; other *= 2) x = max_or_nan(x, __shfl_xor_sync(kWarp, x, other));
    }
    return x;
}

}  // namespace
}  // namespace fused_optim
