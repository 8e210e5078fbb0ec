// SwiGLU and its gradients, cast where they are computed: no values of them are written, but for their codes.
#include "cast.h"
#include "cuda/cast_launch.cuh"
#include "cuda/cast_tile.cuh"
#include "cuda/device.h"
#include "cuda/tile_codes.cuh"

namespace fused_optim {
namespace {

// ---------------------------------------------------------------------------------------------------------------
// Values

constexpr float kZeroSigmoid = -87.0f;  // below: sigmoids would be subnormal numbers, and are 0

// 1 / x, rounded to nearest, for x from 1 to 2^126: what a division does there, without its branch, around which no
// other element's operations could be moved.
__device__ __forceinline__ float reciprocal(float x) {
    float near;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(x));
    return fused(near, fused(-x, near, 1.0f), near);
}

__device__ __forceinline__ float sigmoid(float x) {
    const float result = reciprocal(1.0f + expf(-x));
    return x < kZeroSigmoid ? 0.0f : result;
}

__device__ __forceinline__ float hidden(float gate, float up) { return gate * sigmoid(gate) * up; }

// Of gate and up.
__device__ __forceinline__ float2 gradients(float gradient, float gate, float up) {
    const float s = sigmoid(gate);
    return make_float2(gradient * up * (s * (1.0f + gate * (1.0f - s))), gradient * (gate * s));
}

// What is cast: one matrix or two.
template <bool backward>
struct Results;

template <>
struct Results<false> {
    static constexpr uint32_t kCount = 1;
    Values values[1];

    __device__ __forceinline__ Results(const SwiGLU& work, const Place& place)
        : values{Values(work.results[0], place, work.gate)} {
        const Values ups(work.results[0], place, work.up);
#pragma unroll
        for (uint32_t i = 0; i < kRowsPerLane; ++i) {
#pragma unroll
            for (uint32_t k = 0; k < kPairs; ++k) {
                const uint32_t gate = values[0].pairs[i][k], up = ups.pairs[i][k];
                values[0].pairs[i][k] = rounded_pair(hidden(low_value(gate), low_value(up)),  //
                                                     hidden(high_value(gate), high_value(up)));
            }
        }
    }
};

template <>
struct Results<true> {
    static constexpr uint32_t kCount = 2;
    Values values[2];

    __device__ __forceinline__ Results(const SwiGLU& work, const Place& place)
        : values{Values(work.results[0], place, work.gate), Values(work.results[0], place, work.up)} {
        const Values incoming(work.results[0], place, work.gradient);
#pragma unroll
        for (uint32_t i = 0; i < kRowsPerLane; ++i) {
#pragma unroll
            for (uint32_t k = 0; k < kPairs; ++k) {
                const uint32_t gradient = incoming.pairs[i][k];
                const uint32_t gate = values[0].pairs[i][k], up = values[1].pairs[i][k];
                const float2 low = gradients(low_value(gradient), low_value(gate), low_value(up));
                const float2 high = gradients(high_value(gradient), high_value(gate), high_value(up));
                values[0].pairs[i][k] = rounded_pair(low.x, high.x);
                values[1].pairs[i][k] = rounded_pair(low.y, high.y);
            }
        }
    }
};

// Calls run(cast, values) for each result. Shared memory is used again.
template <bool backward, class Run>
__device__ __forceinline__ void for_each_result(const SwiGLU& work, const Place& place, const Run& run) {
    const Results<backward> results(work, place);
#pragma unroll
    for (uint32_t i = 0; i < Results<backward>::kCount; ++i) {
        if (i > 0) __syncthreads();
        run(work.results[i], results.values[i]);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Kernels

constexpr uint32_t kBlocksBackward = 2;  // registers for 96 words of values, and some more
#define FUSED_OPTIM_SWIGLU __global__ void __launch_bounds__(kThreads, backward ? kBlocksBackward : kBlocksPerProcessor)

// `absmax`: zero before.
template <bool backward>
FUSED_OPTIM_SWIGLU measure(const __grid_constant__ SwiGLU work) {
    const Place place(work.results[0]);
    for_each_result<backward>(work, place, [&](const Cast& cast, const Values& values) {
        uint32_t absmax = 0;
#pragma unroll
        for (uint32_t i = 0; i < kRowsPerLane; ++i) absmax = max(absmax, values.largest(i));
        absmax = largest_of_block(absmax);
        if (threadIdx.x == 0 && absmax > 0) atomicMax(reinterpret_cast<uint32_t*>(cast.absmax), absmax);
    });
}

template <bool backward>
FUSED_OPTIM_SWIGLU measure_rows(const __grid_constant__ SwiGLU work) {
    const Place place(work.results[0]);
    for_each_result<backward>(work, place,
                              [&](const Cast& cast, const Values& values) { measure_both(cast, place, values); });
}

template <CastFormat format, CastScaling scaling, bool backward>
FUSED_OPTIM_SWIGLU encode(const __grid_constant__ SwiGLU work) {
    const Place place(work.results[0]);
    for_each_result<backward>(work, place, [&](const Cast& cast, const Values& values) {
        if constexpr (scaling == CastScaling::kTensor) encode_measured<format>(cast, place, values);
        if constexpr (scaling == CastScaling::kDelayed) encode_delayed<format>(cast, place, values);
        if constexpr (scaling == CastScaling::kRow) encode_both<format>(cast, place, values);
        if constexpr (scaling == CastScaling::kBlock) encode_blocks<format>(cast, place, values);
    });
}

// ---------------------------------------------------------------------------------------------------------------
// Launches

constexpr const char* kName = "swiglu";

SwiGLU from_the_end(SwiGLU work) {
    for (Cast& cast : work.results) cast.backwards = true;
    return work;
}

struct Launch {
    const SwiGLU& work;
    int device;
    uint64_t stream;

    void run(void (*kernel)(SwiGLU), bool backwards) const {
        launch(kernel, kName, tiles(work.results[0]), backwards ? from_the_end(work) : work, device, stream);
    }
    void clear(uint64_t words) const {
        clear_absmax(work.results[0], words * (work.gradient ? 2 : 1), kName, device, stream);
    }
};

// Calls with(backward, format), both as types.
template <class With>
void with_kernels(bool backward, CastFormat format, const With& with) {
    const auto with_format = [&](auto known) {
        if (backward) return with(std::true_type{}, known);
        return with(std::false_type{}, known);
    };
    if (format == CastFormat::kE4M3) return with_format(std::integral_constant<CastFormat, CastFormat::kE4M3>{});
    return with_format(std::integral_constant<CastFormat, CastFormat::kE5M2>{});
}

}  // namespace

void load_swiglu_kernels(int device) {
    CudaDeviceGuard guard(kName, device);
    for (const bool backward : {false, true}) {
        for (const CastFormat format : {CastFormat::kE4M3, CastFormat::kE5M2}) {
            with_kernels(backward, format, [&](auto direction, auto known) {
                load_kernel(measure<direction()>, kName, device);
                load_kernel(measure_rows<direction()>, kName, device);
                load_kernel(encode<known(), CastScaling::kTensor, direction()>, kName, device);
                load_kernel(encode<known(), CastScaling::kDelayed, direction()>, kName, device);
                load_kernel(encode<known(), CastScaling::kRow, direction()>, kName, device);
                load_kernel(encode<known(), CastScaling::kBlock, direction()>, kName, device);
            });
        }
    }
}

void swiglu_cuda(const SwiGLU& work, CastFormat format, CastScaling scaling, int device, uint64_t stream) {
    CudaDeviceGuard guard(kName, device);
    const Launch on{work, device, stream};
    const Cast& shape = work.results[0];
    with_kernels(work.gradient != 0, format, [&](auto direction, auto known) {
        switch (scaling) {
            case CastScaling::kTensor:
                on.clear(2);
                on.run(measure<direction()>, true);
                return on.run(encode<known(), CastScaling::kTensor, direction()>, false);
            case CastScaling::kDelayed:
                on.clear(2);
                return on.run(encode<known(), CastScaling::kDelayed, direction()>, true);
            case CastScaling::kRow:
                on.clear(shape.rows + shape.columns);
                on.run(measure_rows<direction()>, true);
                return on.run(encode<known(), CastScaling::kRow, direction()>, false);
            case CastScaling::kBlock: return on.run(encode<known(), CastScaling::kBlock, direction()>, true);
        }
    });
}

}  // namespace fused_optim
