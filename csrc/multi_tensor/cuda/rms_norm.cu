// RMSNorm, cast where it is computed, so that no values of it are written; and its gradients. Rows are measured one by
// one, and cast tile by tile.
#include "arithmetic.h"
#include "cast.h"
#include "cuda/cast_launch.cuh"
#include "cuda/cast_tile.cuh"
#include "cuda/device.h"
#include "cuda/tile_codes.cuh"
#include "cuda/warp.cuh"

namespace fused_optim {
namespace {

// ---------------------------------------------------------------------------------------------------------------
// Rows

constexpr uint32_t kRowPackets = 2;  // of a row that a thread has
constexpr uint32_t kMostThreads = 1024;
static_assert(kMostThreads * kRowPackets * kPacket == kNormColumns, "a thread block has a whole row");

// This thread's packets of a row, as pairs of values.
struct RowPackets {
    uint32_t pairs[kRowPackets][kPacket / 2];

    __device__ __forceinline__ RowPackets(uint64_t address, uint64_t row, uint32_t packets) {
        const uint4* const source = reinterpret_cast<const uint4*>(address) + row * packets;
#pragma unroll
        for (uint32_t k = 0; k < kRowPackets; ++k) {
            const uint32_t packet = threadIdx.x + k * blockDim.x;
            *reinterpret_cast<uint4*>(pairs[k]) = packet < packets ? source[packet] : uint4{};
        }
    }
};

// Calls run(k, i) for each pair.
template <class Run>
__device__ __forceinline__ void for_each_pair(const Run& run) {
#pragma unroll
    for (uint32_t k = 0; k < kRowPackets; ++k) {
#pragma unroll
        for (uint32_t i = 0; i < kPacket / 2; ++i) run(k, i);
    }
}

// combine() over the thread block, in a fixed order. Every thread calls it.
template <class T, class Combine>
__device__ __forceinline__ T combine_block(T value, const Combine& combine) {
    __shared__ T of_warps[kMostThreads / kWarp];
    value = combine_lanes<kWarp>(value, combine);
    __syncthreads();  // those of the call before were read
    if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = value;
    __syncthreads();
    const uint32_t lane = threadIdx.x % kWarp;
    return combine_lanes<kWarp>(lane < blockDim.x / kWarp ? of_warps[lane] : T{}, combine);
}

__device__ __forceinline__ float sum_of_block(float value) {
    return combine_block(value, [](float a, float b) { return a + b; });
}

__device__ __forceinline__ uint32_t larger_of_block(uint32_t value) {
    return combine_block(value, [](uint32_t a, uint32_t b) { return max(a, b); });
}

__device__ __forceinline__ uint32_t normed_pair(uint32_t x, float rstd, uint32_t weight) {
    return rounded_pair(low_value(x) * rstd * low_value(weight), high_value(x) * rstd * high_value(weight));
}

// Where largest magnitudes of columns lie, pair by pair, for each thread block that measures rows.
__device__ __forceinline__ uint32_t* parts_of_columns(const Cast& cast) {
    return reinterpret_cast<uint32_t*>(cast.absmax) + cast.rows + cast.columns;
}

template <CastScaling scaling>
constexpr bool kMeasuresResult = scaling == CastScaling::kTensor || scaling == CastScaling::kRow;

// rstd of each row, and the largest magnitudes that a cast with measured scales wants: of all, `absmax`, zero before;
// or of each row, and of the columns of this thread block's rows, as pairs of values, which largest_of_parts combines.
template <CastScaling scaling>
__global__ void __launch_bounds__(kMostThreads) measure(const __grid_constant__ RMSNorm work) {
    constexpr bool measures = kMeasuresResult<scaling>;
    const Cast& cast = work.result;
    const uint32_t packets = static_cast<uint32_t>(cast.columns / kPacket);
    const RowPackets weight(work.weight, 0, measures ? packets : 0);
    uint32_t* const absmax = reinterpret_cast<uint32_t*>(cast.absmax);
    uint32_t of_columns[kRowPackets][kPacket / 2] = {};
    for (uint64_t row = blockIdx.x; row < cast.rows; row += gridDim.x) {
        const RowPackets x(cast.values, row, packets);
        float sum = 0.0f;
        for_each_pair([&](uint32_t k, uint32_t i) {
            const float low = low_value(x.pairs[k][i]), high = high_value(x.pairs[k][i]);
            sum += low * low + high * high;
        });
        sum = sum_of_block(sum);
        const float rstd = 1.0f / sqrtf(sum / static_cast<float>(cast.columns) + work.eps);
        if (threadIdx.x == 0) reinterpret_cast<float*>(work.rstd)[row] = rstd;
        if constexpr (measures) {
            uint32_t of_row = 0;
            for_each_pair([&](uint32_t k, uint32_t i) {
                const uint32_t pair = normed_pair(x.pairs[k][i], rstd, weight.pairs[k][i]);
                of_columns[k][i] = larger_pair(of_columns[k][i], pair);
                of_row = larger_pair(of_row, pair);
            });
            if constexpr (scaling == CastScaling::kRow) {
                const uint32_t largest = larger_of_block(larger_of(of_row));
                if (threadIdx.x == 0) absmax[row] = largest;
            }
        }
    }
    if constexpr (scaling == CastScaling::kTensor) {
        uint32_t largest = 0;
        for_each_pair([&](uint32_t k, uint32_t i) { largest = max(largest, larger_of(of_columns[k][i])); });
        largest = larger_of_block(largest);
        if (threadIdx.x == 0) atomicMax(absmax, largest);
    }
    if constexpr (scaling == CastScaling::kRow) {
        uint4* const part = reinterpret_cast<uint4*>(parts_of_columns(cast)) + blockIdx.x * packets;
#pragma unroll
        for (uint32_t k = 0; k < kRowPackets; ++k) {
            const uint32_t packet = threadIdx.x + k * blockDim.x;
            if (packet < packets) part[packet] = *reinterpret_cast<const uint4*>(of_columns[k]);
        }
    }
}

// A warp has 32 pairs of columns of every kWarps-th part.
__global__ void __launch_bounds__(kThreads) largest_of_parts(const __grid_constant__ RMSNorm work) {
    __shared__ uint32_t largest[kWarps][kWarp];
    const Cast& cast = work.result;
    const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const uint64_t index = uint64_t{blockIdx.x} * kWarp + lane, pairs = cast.columns / 2;
    uint32_t pair = 0;
    if (index < pairs) {
#pragma unroll 16
        for (uint64_t part = warp; part < norm_parts(cast.rows); part += kWarps) {
            pair = larger_pair(pair, parts_of_columns(cast)[part * pairs + index]);
        }
    }
    largest[warp][lane] = pair;
    __syncthreads();
    if (warp > 0 || index >= pairs) return;
#pragma unroll
    for (uint32_t i = 1; i < kWarps; ++i) pair = larger_pair(pair, largest[i][lane]);
    uint2* const of_columns = reinterpret_cast<uint2*>(cast.absmax + cast.rows * sizeof(float));
    of_columns[index] = make_uint2(low_magnitude(pair), high_magnitude(pair));
}

// ---------------------------------------------------------------------------------------------------------------
// Tiles

__device__ __forceinline__ Values normed(const RMSNorm& work, const Place& place) {
    const Cast& cast = work.result;
    Values values(cast, place);
    float rstd[kRowsPerLane];
#pragma unroll
    for (uint32_t i = 0; i < kRowsPerLane; ++i) {
        const uint64_t row = place.first_row() + i;
        rstd[i] = row < cast.rows ? reinterpret_cast<const float*>(work.rstd)[row] : 0.0f;
    }
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
        const uint64_t column = Values::column_of(place, half);
        const uint4* const source = reinterpret_cast<const uint4*>(work.weight + column * 2);
        const uint4 packet = column < cast.columns ? *source : uint4{};
        const uint32_t weight[kPairs / 2] = {packet.x, packet.y, packet.z, packet.w};
#pragma unroll
        for (uint32_t i = 0; i < kRowsPerLane; ++i) {
#pragma unroll
            for (uint32_t k = 0; k < kPairs / 2; ++k) {
                uint32_t& pair = values.pairs[i][half * (kPairs / 2) + k];
                pair = normed_pair(pair, rstd[i], weight[k]);
            }
        }
    }
    return values;
}

template <CastFormat format, CastScaling scaling>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor) encode(const __grid_constant__ RMSNorm work) {
    const Place place(work.result);
    const Values values = normed(work, place);
    if constexpr (scaling == CastScaling::kTensor) encode_measured<format>(work.result, place, values);
    if constexpr (scaling == CastScaling::kDelayed) encode_delayed<format>(work.result, place, values);
    if constexpr (scaling == CastScaling::kRow) encode_both<format>(work.result, place, values);
    if constexpr (scaling == CastScaling::kBlock) encode_blocks<format>(work.result, place, values);
}

// ---------------------------------------------------------------------------------------------------------------
// Gradients

// Of x, and of the weight over this thread block's rows.
template <uint32_t count>
__global__ void __launch_bounds__(kMostThreads) differentiate(const __grid_constant__ RMSNormGradient work) {
    const uint32_t packets = static_cast<uint32_t>(work.columns / kPacket);
    const float columns = static_cast<float>(work.columns);
    float2 of_weight[kRowPackets][kPacket / 2] = {};
    for (uint64_t row = blockIdx.x; row < work.rows; row += gridDim.x) {
        const RowPackets x(work.x, row, packets);
        const RowPackets addend(work.addend, row, work.addend ? packets : 0);
        float2 gradient[kRowPackets][kPacket / 2] = {};
#pragma unroll
        for (uint32_t number = 0; number < count; ++number) {
            const RowPackets incoming(work.gradients[number], row, packets);
            for_each_pair([&](uint32_t k, uint32_t i) {
                gradient[k][i].x += low_value(incoming.pairs[k][i]);
                gradient[k][i].y += high_value(incoming.pairs[k][i]);
            });
        }
        const float rstd = reinterpret_cast<const float*>(work.rstd)[row];
        const RowPackets weight(work.weight, 0, packets);
        float sum = 0.0f;
        for_each_pair([&](uint32_t k, uint32_t i) {
            const float low = low_value(x.pairs[k][i]) * rstd, high = high_value(x.pairs[k][i]) * rstd;
            of_weight[k][i].x += gradient[k][i].x * low;
            of_weight[k][i].y += gradient[k][i].y * high;
            gradient[k][i].x *= low_value(weight.pairs[k][i]);
            gradient[k][i].y *= high_value(weight.pairs[k][i]);
            sum += gradient[k][i].x * low + gradient[k][i].y * high;
        });
        const float mean = sum_of_block(sum) / columns;
        uint4* const target = reinterpret_cast<uint4*>(work.of_x) + row * packets;
#pragma unroll
        for (uint32_t k = 0; k < kRowPackets; ++k) {
            uint32_t pairs[kPacket / 2];
#pragma unroll
            for (uint32_t i = 0; i < kPacket / 2; ++i) {
                const float low = rstd * (gradient[k][i].x - low_value(x.pairs[k][i]) * rstd * mean);
                const float high = rstd * (gradient[k][i].y - high_value(x.pairs[k][i]) * rstd * mean);
                pairs[i] = rounded_pair(low + low_value(addend.pairs[k][i]), high + high_value(addend.pairs[k][i]));
            }
            const uint32_t packet = threadIdx.x + k * blockDim.x;
            if (packet < packets) target[packet] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
    }
    float2* const part = reinterpret_cast<float2*>(work.parts) + blockIdx.x * (work.columns / 2);
    for_each_pair([&](uint32_t k, uint32_t i) {
        const uint32_t packet = threadIdx.x + k * blockDim.x;
        if (packet < packets) part[packet * (kPacket / 2) + i] = of_weight[k][i];
    });
}

// A warp has 32 columns of every kWarps-th part.
__global__ void __launch_bounds__(kThreads) sum_parts(const __grid_constant__ RMSNormGradient work) {
    __shared__ float sums[kWarps][kWarp];
    const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const uint64_t column = uint64_t{blockIdx.x} * kWarp + lane;
    const uint64_t parts = norm_parts(work.rows);
    float sum = 0.0f;
    if (column < work.columns) {
#pragma unroll 8
        for (uint64_t part = warp; part < parts; part += kWarps) {
            sum += reinterpret_cast<const float*>(work.parts)[part * work.columns + column];
        }
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= work.columns) return;
#pragma unroll
    for (uint32_t i = 1; i < kWarps; ++i) sum += sums[i][lane];
    reinterpret_cast<uint16_t*>(work.of_weight)[column] = static_cast<uint16_t>(rounded_pair(sum, 0.0f));
}

// ---------------------------------------------------------------------------------------------------------------
// Launches

constexpr const char* kForward = "rms_norm";
constexpr const char* kBackward = "rms_norm_backward";

template <class Work>
void launch_rows(void (*kernel)(Work), const char* name, uint64_t blocks, uint64_t columns, const Work& work,
                 int device, uint64_t stream) {
    if (blocks == 0 || columns == 0) return;
    if (blocks > 0x7FFFFFFFu) throw std::runtime_error("fused_optim: a matrix is too large to be normed");
    const uint32_t threads = static_cast<uint32_t>(ceil_divide(columns, kRowPackets * kPacket * kWarp)) * kWarp;
    kernel<<<static_cast<uint32_t>(blocks), threads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(work);
    check_cuda(cudaGetLastError(), name, device);
}

// Calls with(format, scaling), both as types.
template <class With>
void with_kernels(CastFormat format, CastScaling scaling, const With& with) {
    const auto with_format = [&](auto known) {
        switch (scaling) {
            case CastScaling::kTensor: return with(known, std::integral_constant<CastScaling, CastScaling::kTensor>{});
            case CastScaling::kDelayed:
                return with(known, std::integral_constant<CastScaling, CastScaling::kDelayed>{});
            case CastScaling::kRow: return with(known, std::integral_constant<CastScaling, CastScaling::kRow>{});
            case CastScaling::kBlock: return with(known, std::integral_constant<CastScaling, CastScaling::kBlock>{});
        }
    };
    if (format == CastFormat::kE4M3) return with_format(std::integral_constant<CastFormat, CastFormat::kE4M3>{});
    return with_format(std::integral_constant<CastFormat, CastFormat::kE5M2>{});
}

}  // namespace

void load_rms_norm_kernels(int device) {
    CudaDeviceGuard guard(kForward, device);
    for (const CastFormat format : {CastFormat::kE4M3, CastFormat::kE5M2}) {
        for (uint32_t scaling = 0; scaling < kCount<CastScaling>; ++scaling) {
            with_kernels(format, static_cast<CastScaling>(scaling), [&](auto known, auto kind) {
                load_kernel(measure<kind()>, kForward, device);
                load_kernel(encode<known(), kind()>, kForward, device);
            });
        }
    }
    load_kernel(largest_of_parts, kForward, device);
    load_kernel(differentiate<1>, kBackward, device);
    load_kernel(differentiate<2>, kBackward, device);
    load_kernel(differentiate<3>, kBackward, device);
    load_kernel(sum_parts, kBackward, device);
}

void rms_norm_cuda(const RMSNorm& work, CastFormat format, CastScaling scaling, int device, uint64_t stream) {
    CudaDeviceGuard guard(kForward, device);
    const Cast& cast = work.result;
    if (scaling == CastScaling::kTensor || scaling == CastScaling::kDelayed) {
        clear_absmax(cast, 2, kForward, device, stream);
    }
    RMSNorm order = work;
    order.result.backwards = true;
    with_kernels(format, scaling, [&](auto known, auto kind) {
        const uint64_t blocks = kMeasuresResult<kind()> ? norm_parts(cast.rows) : cast.rows;
        if (!work.measured) launch_rows(measure<kind()>, kForward, blocks, cast.columns, work, device, stream);
        if constexpr (kind() == CastScaling::kRow) {
            launch(largest_of_parts, kForward, ceil_divide(cast.columns, 2 * kWarp), work, device, stream);
        }
        launch(encode<known(), kind()>, kForward, tiles(cast), order, device, stream);
    });
}

void rms_norm_backward_cuda(const RMSNormGradient& work, int device, uint64_t stream) {
    CudaDeviceGuard guard(kBackward, device);
    const uint64_t blocks = norm_parts(work.rows);
    static_assert(kNormGradients == 3);
    const auto kernel = work.gradients[2] ? differentiate<3> : work.gradients[1] ? differentiate<2> : differentiate<1>;
    launch_rows(kernel, kBackward, blocks, work.columns, work, device, stream);
    launch(sum_parts, kBackward, ceil_divide(work.columns, kWarp), work, device, stream);
}

}  // namespace fused_optim
