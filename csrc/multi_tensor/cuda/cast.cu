// The CUDA engine's casts for products.
#include <stdexcept>

#include "cast.h"
#include "cuda/cast_tile.cuh"
#include "cuda/device.h"
#include "cuda/packets.cuh"
#include "cuda/warp.cuh"

namespace fused_optim {
namespace {

// ---------------------------------------------------------------------------------------------------------------
// Transposes

__global__ void __launch_bounds__(kThreads) transpose_codes(const __grid_constant__ Cast cast) {
    __shared__ TurnedTile tile;
    const Place place(cast);
    const uint64_t column = place.column + place.lane * 16;
    const bool inside = place.first_row() < cast.rows && column < cast.columns;
    uint4 loaded[kRowsPerLane];
#pragma unroll
    for (uint32_t i = 0; i < kRowsPerLane; ++i) {
        const uint64_t element = (place.first_row() + i) * cast.columns + column;
        loaded[i] = inside ? *reinterpret_cast<const uint4*>(cast.codes + element) : uint4{};
    }
#pragma unroll
    for (uint32_t k = 0; k < 4; ++k) {
        uint32_t words[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) words[i] = reinterpret_cast<const uint32_t*>(&loaded[i])[k];
        turn(words);
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) tile.put(place.lane * 16 + 4 * k + i, place.group, place.lane, words[i]);
    }
    __syncthreads();
    store_turned(cast, place, tile, [](uint32_t column) { return column / 16; });
}

// ---------------------------------------------------------------------------------------------------------------
// Casts by tiles

// Each thread block derives the scale; the first one writes it.
template <CastFormat format>
__device__ __forceinline__ float inverse_of_tensor(const Cast& cast) {
    const float scale = cast_scale<CastCodec<format>>(*reinterpret_cast<const uint32_t*>(cast.absmax));
    if (blockIdx.x == 0 && threadIdx.x == 0) *reinterpret_cast<float*>(cast.scale) = scale;
    return 1.0f / scale;
}

template <CastFormat format, class Pairs>
__device__ __forceinline__ void encode_tile(const Cast& cast, const Place& place, const ValuesOf<Pairs>& values,
                                            float inverse) {
    __shared__ TurnedTile tile;
    const float inverses[kRowsPerLane] = {inverse, inverse, inverse, inverse};
    uint32_t codes[kRowsPerLane][kPairs / 2];
    encode_rows<format>(cast, place, values, inverses, codes);
    if (!cast.transposed) return;
#pragma unroll
    for (uint32_t k = 0; k < kPairs / 2; ++k) {
        uint32_t words[4] = {codes[0][k], codes[1][k], codes[2][k], codes[3][k]};
        put_turned(tile, place, k, words);
    }
    __syncthreads();
    store_turned(cast, place, tile, turns_of);
}

template <CastFormat format, class Pairs>
__global__ void __launch_bounds__(kThreads) cast_tiles(const __grid_constant__ Cast cast) {
    const Place place(cast);
    const ValuesOf<Pairs> values(cast, place);
    encode_tile<format>(cast, place, values, inverse_of_tensor<format>(cast));
}

// `absmax` are two zeros before: the largest magnitude so far, and how many thread blocks have added theirs. The last
// one of them remembers it: all have read the history then.
template <CastFormat format, class Pairs>
__global__ void __launch_bounds__(kThreads) cast_delayed(const __grid_constant__ Cast cast) {
    const Place place(cast);
    const ValuesOf<Pairs> values(cast, place);
    float* const history = reinterpret_cast<float*>(cast.history);
    const float inverse = 1.0f / delayed_scale(history);
    uint32_t absmax = 0;
#pragma unroll
    for (uint32_t i = 0; i < kRowsPerLane; ++i) absmax = max(absmax, values.largest(i));
    absmax = largest_of_block(absmax);
    if (threadIdx.x == 0) {
        uint32_t* const found = reinterpret_cast<uint32_t*>(cast.absmax);
        atomicMax(found, absmax);
        __threadfence();
        if (atomicAdd(found + 1, 1) == gridDim.x - 1) {
            const float scale = remember<CastCodec<format>>(history, cast.remembered, atomicMax(found, 0));
            *reinterpret_cast<float*>(cast.scale) = scale;
        }
    }
    encode_tile<format>(cast, place, values, inverse);
}

// `absmax`: zeros before, of rows, then of columns. The lanes of a warp have neighbouring ones, so that the cache
// combines them in few operations.
template <class Pairs>
__global__ void __launch_bounds__(kThreads) measure_rows_and_columns(const __grid_constant__ Cast cast) {
    const Place place(cast);
    const ValuesOf<Pairs> values(cast, place);
    __shared__ uint32_t of_rows[kTileSize];
#pragma unroll
    for (uint32_t i = 0; i < kRowsPerLane; ++i) {
        const uint32_t absmax = lanes_max<kLanesPerRow>(values.largest(i));
        if (place.lane == 0) of_rows[place.group * kRowsPerLane + i] = absmax;
    }
    const uint32_t pair = largest_of_columns(place, values);  // waits for all of_rows
    uint32_t* const absmax = reinterpret_cast<uint32_t*>(cast.absmax);
    if (threadIdx.x >= kThreads - kTileSize) {
        const uint32_t number = threadIdx.x - (kThreads - kTileSize);
        if (place.row + number < cast.rows) atomicMax(absmax + place.row + number, of_rows[number]);
    } else if (threadIdx.x < kTileSize / 2) {
        const uint32_t lane = threadIdx.x % kWarp, first = threadIdx.x / kWarp * 2 * kWarp;
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            const uint32_t other = __shfl_sync(kAllLanes, pair, half * (kWarp / 2) + lane / 2);
            const uint32_t found = lane % 2 ? high_magnitude<Pairs>(other) : low_magnitude<Pairs>(other);
            const uint64_t column = place.column + first + half * kWarp + lane;
            if (column < cast.columns) atomicMax(absmax + cast.rows + column, found);
        }
    }
}

// The inverse scale of row or column `index`. The tile that comes first in its direction writes the scale.
template <CastFormat format>
__device__ __forceinline__ float known_inverse(uint64_t absmax, uint64_t scales, uint64_t index, bool writes) {
    const float scale = cast_scale<CastCodec<format>>(reinterpret_cast<const uint32_t*>(absmax)[index]);
    if (writes) reinterpret_cast<float*>(scales)[index] = scale;
    return 1.0f / scale;
}

template <CastFormat format, class Pairs>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    cast_rows_and_columns(const __grid_constant__ Cast cast) {
    const Place place(cast);
    const ValuesOf<Pairs> values(cast, place);
    __shared__ __align__(16) float of_columns[kTileSize];
    const uint64_t column = place.column + threadIdx.x;
    if (threadIdx.x < kTileSize && column < cast.columns) {
        const uint64_t absmax = cast.absmax + cast.rows * sizeof(float);
        of_columns[threadIdx.x] = known_inverse<format>(absmax, cast.transposed_scale, column, place.row == 0);
    }
    if (cast.codes) {
        float inverses[kRowsPerLane];
        uint32_t codes[kRowsPerLane][kPairs / 2];
#pragma unroll
        for (uint32_t i = 0; i < kRowsPerLane; ++i) {
            const uint64_t row = min(place.first_row() + i, cast.rows - 1);
            inverses[i] = known_inverse<format>(cast.absmax, cast.scale, row, place.column + place.lane == 0);
        }
        encode_rows<format>(cast, place, values, inverses, codes);
    }
    encode_columns<format>(cast, place, values, of_columns);
}

template <CastFormat format, class Pairs>
__device__ __forceinline__ void cast_rows_of_blocks(const Cast& cast, const Place& place,
                                                    const ValuesOf<Pairs>& values) {
    float scales[kRowsPerLane], inverses[kRowsPerLane];
#pragma unroll
    for (uint32_t i = 0; i < kRowsPerLane; ++i) {
        scales[i] = cast_scale<CastCodec<format>>(lanes_max<kLanesPerRow>(values.largest(i)), cast.power_of_two);
        inverses[i] = 1.0f / scales[i];
    }
    if (place.lane == 0 && place.first_row() < cast.rows) {
        float* const target = reinterpret_cast<float*>(cast.scale) + place.column / kTileSize * cast.rows;
        *reinterpret_cast<float4*>(target + place.first_row()) =
            make_float4(scales[0], scales[1], scales[2], scales[3]);
    }
    uint32_t codes[kRowsPerLane][kPairs / 2];
    encode_rows<format>(cast, place, values, inverses, codes);
}

// Every thread of the block calls it.
template <CastFormat format, class Pairs>
__device__ __forceinline__ void cast_columns_of_blocks(const Cast& cast, const Place& place,
                                                       const ValuesOf<Pairs>& values) {
    __shared__ __align__(16) float inverses[kTileSize];
    const uint32_t pair = largest_of_columns(place, values);
    float2 scale = make_float2(cast_scale<CastCodec<format>>(low_magnitude<Pairs>(pair), cast.power_of_two),
                               cast_scale<CastCodec<format>>(high_magnitude<Pairs>(pair), cast.power_of_two));
    float* const target = reinterpret_cast<float*>(cast.transposed_scale);
    const uint64_t row = place.row / kTileSize, column = place.column + 2 * threadIdx.x;
    if (cast.tiles) {
        scale.x = scale.y = cast_scale<CastCodec<format>>(largest_of_block(larger_of<Pairs>(pair)), cast.power_of_two);
        const uint64_t down = ceil_divide(cast.rows, kTileSize);
        if (threadIdx.x == 0) target[place.column / kTileSize * down + row] = scale.x;
    } else if (threadIdx.x < kTileSize / 2 && column < cast.columns) {
        *reinterpret_cast<float2*>(target + row * cast.columns + column) = scale;
    }
    if (threadIdx.x < kTileSize / 2) {
        *reinterpret_cast<float2*>(&inverses[2 * threadIdx.x]) = make_float2(1.0f / scale.x, 1.0f / scale.y);
    }
    encode_columns<format>(cast, place, values, inverses);
}

template <CastFormat format, class Pairs>
__global__ void __launch_bounds__(kThreads) cast_blocks(const __grid_constant__ Cast cast) {
    const Place place(cast);
    const ValuesOf<Pairs> values(cast, place);
    if (cast.codes) cast_rows_of_blocks<format>(cast, place, values);
    if (cast.transposed) cast_columns_of_blocks<format>(cast, place, values);
}

// ---------------------------------------------------------------------------------------------------------------
// Casts that keep the order

template <class Pairs>
__device__ __forceinline__ uint32_t larger_of(const uint4& packet) {
    return larger_of<Pairs>(Pairs::larger(Pairs::larger(packet.x, packet.y), Pairs::larger(packet.z, packet.w)));
}

template <CastFormat format, class Pairs>
__device__ __forceinline__ uint2 encode_packet(const uint4& packet, float inverse) {
    return make_uint2(encode_word<format, Pairs>(packet.x, packet.y, inverse),
                      encode_word<format, Pairs>(packet.z, packet.w, inverse));
}

__device__ __forceinline__ uint4 packet_at(const Cast& cast, uint64_t packet) {
    return reinterpret_cast<const uint4*>(cast.values)[packet];
}

// `absmax` is zero before. Magnitudes compare as their bits do, so the order of the maxima does not matter.
template <class Pairs>
__global__ void __launch_bounds__(kThreads) measure(const __grid_constant__ Cast cast) {
    const uint64_t count = cast.rows * cast.columns / kPacket;
    const uint64_t first = uint64_t{block_number(cast)} * (kThreads * kAbsmaxLoads) + threadIdx.x;
    uint4 packets[kAbsmaxLoads];
#pragma unroll
    for (uint32_t k = 0; k < kAbsmaxLoads; ++k) {
        const uint64_t packet = first + k * kThreads;
        packets[k] = packet < count ? packet_at(cast, packet) : uint4{};
    }
    uint32_t absmax = 0;
#pragma unroll
    for (uint32_t k = 0; k < kAbsmaxLoads; ++k) absmax = max(absmax, larger_of<Pairs>(packets[k]));
    absmax = largest_of_block(absmax);
    if (threadIdx.x == 0 && absmax > 0) atomicMax(reinterpret_cast<uint32_t*>(cast.absmax), absmax);
}

template <CastFormat format, class Pairs>
__global__ void __launch_bounds__(kThreads) cast_elements(const __grid_constant__ Cast cast) {
    const uint64_t count = cast.rows * cast.columns / kPacket;
    const uint64_t first = uint64_t{block_number(cast)} * (kThreads * kAbsmaxLoads) + threadIdx.x;
    uint4 packets[kAbsmaxLoads];
#pragma unroll
    for (uint32_t k = 0; k < kAbsmaxLoads; ++k) {
        const uint64_t packet = first + k * kThreads;
        packets[k] = packet < count ? packet_at(cast, packet) : uint4{};
    }
    const float inverse = inverse_of_tensor<format>(cast);
#pragma unroll
    for (uint32_t k = 0; k < kAbsmaxLoads; ++k) {
        const uint64_t packet = first + k * kThreads;
        if (packet >= count) continue;
        reinterpret_cast<uint2*>(cast.codes)[packet] = encode_packet<format, Pairs>(packets[k], inverse);
    }
}

// A thread block per row. What does not fit into registers is read again, from the cache.
template <CastFormat format, class Pairs>
__global__ void __launch_bounds__(kThreads) cast_whole_rows(const __grid_constant__ Cast cast) {
    const uint32_t count = static_cast<uint32_t>(cast.columns / kPacket);
    const uint32_t number = block_number(cast);
    const uint64_t row = uint64_t{number} * count;
    uint4 packets[kRowLoads];
#pragma unroll
    for (uint32_t k = 0; k < kRowLoads; ++k) {
        const uint32_t packet = threadIdx.x + k * kThreads;
        packets[k] = packet < count ? packet_at(cast, row + packet) : uint4{};
    }
    uint32_t absmax = 0;
#pragma unroll
    for (uint32_t k = 0; k < kRowLoads; ++k) absmax = max(absmax, larger_of<Pairs>(packets[k]));
    for (uint32_t packet = threadIdx.x + kRowLoads * kThreads; packet < count; packet += kThreads) {
        absmax = max(absmax, larger_of<Pairs>(packet_at(cast, row + packet)));
    }
    const float scale = cast_scale<CastCodec<format>>(largest_of_block(absmax));
    const float inverse = 1.0f / scale;
    if (threadIdx.x == 0) reinterpret_cast<float*>(cast.scale)[number] = scale;
    uint2* const codes = reinterpret_cast<uint2*>(cast.codes) + row;
#pragma unroll
    for (uint32_t k = 0; k < kRowLoads; ++k) {
        const uint32_t packet = threadIdx.x + k * kThreads;
        if (packet < count) codes[packet] = encode_packet<format, Pairs>(packets[k], inverse);
    }
    for (uint32_t packet = threadIdx.x + kRowLoads * kThreads; packet < count; packet += kThreads) {
        codes[packet] = encode_packet<format, Pairs>(packet_at(cast, row + packet), inverse);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Launches

using Kernel = void (*)(Cast);

// One of the kernels for the formats, in their order.
Kernel kernel_for(CastFormat format, Kernel e4m3, Kernel e5m2) {
    static_assert(kCount<CastFormat> == 2);
    return format == CastFormat::kE4M3 ? e4m3 : e5m2;
}

// `half`: of FP16 values.
#define FUSED_OPTIM_KERNEL(name, format, half)                                                           \
    ((half) ? kernel_for(format, name<CastFormat::kE4M3, FP16Pairs>, name<CastFormat::kE5M2, FP16Pairs>) \
            : kernel_for(format, name<CastFormat::kE4M3, BF16Pairs>, name<CastFormat::kE5M2, BF16Pairs>))

void launch(Kernel kernel, const char* name, uint64_t blocks, const Cast& cast, int device, uint64_t stream) {
    if (blocks == 0) return;
    if (blocks > 0x7FFFFFFFu) throw std::runtime_error("fused_optim: a matrix is too large to be cast");
    kernel<<<static_cast<uint32_t>(blocks), kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(cast);
    check_cuda(cudaGetLastError(), name, device);
}

// What was written or read from its start on is read from its end on, which the L2 cache still has.
Cast from_the_end(Cast cast) {
    cast.backwards = true;
    return cast;
}

void clear_absmax(const Cast& cast, uint64_t words, const char* name, int device, uint64_t stream) {
    const auto absmax = reinterpret_cast<void*>(cast.absmax);
    check_cuda(cudaMemsetAsync(absmax, 0, words * sizeof(float), reinterpret_cast<cudaStream_t>(stream)), name, device);
}

uint64_t tiles(const Cast& cast) { return ceil_divide(cast.rows, kTileSize) * ceil_divide(cast.columns, kTileSize); }

}  // namespace

void load_cast_kernels(int device) {
    CudaDeviceGuard guard("cast", device);
    for (const bool half : {false, true}) {
        for (const CastFormat format : {CastFormat::kE4M3, CastFormat::kE5M2}) {
            load_kernel(FUSED_OPTIM_KERNEL(cast_tiles, format, half), "cast_tensor", device);
            load_kernel(FUSED_OPTIM_KERNEL(cast_elements, format, half), "cast_tensor", device);
            load_kernel(FUSED_OPTIM_KERNEL(cast_delayed, format, half), "cast_delayed", device);
            load_kernel(FUSED_OPTIM_KERNEL(cast_rows_and_columns, format, half), "cast_rows", device);
            load_kernel(FUSED_OPTIM_KERNEL(cast_whole_rows, format, half), "cast_rows", device);
            load_kernel(FUSED_OPTIM_KERNEL(cast_blocks, format, half), "cast_blocks", device);
        }
        load_kernel(half ? measure<FP16Pairs> : measure<BF16Pairs>, "cast_tensor", device);
        load_kernel(half ? measure_rows_and_columns<FP16Pairs> : measure_rows_and_columns<BF16Pairs>, "cast_rows",
                    device);
    }
    load_kernel(transpose_codes, "transpose", device);
}

void cast_tensor_cuda(const Cast& cast, CastFormat format, bool measured, int device, uint64_t stream) {
    constexpr const char* name = "cast_tensor";
    CudaDeviceGuard guard(name, device);
    const uint64_t units = ceil_divide(cast.rows * cast.columns, kAbsmaxUnit);
    if (!measured) {
        clear_absmax(cast, 1, name, device, stream);
        launch(cast.half ? measure<FP16Pairs> : measure<BF16Pairs>, name, units, from_the_end(cast), device, stream);
    }
    const Cast order = measured ? from_the_end(cast) : cast;
    if (cast.transposed) {
        return launch(FUSED_OPTIM_KERNEL(cast_tiles, format, cast.half), name, tiles(cast), order, device, stream);
    }
    launch(FUSED_OPTIM_KERNEL(cast_elements, format, cast.half), name, units, order, device, stream);
}

void cast_delayed_cuda(const Cast& cast, CastFormat format, int device, uint64_t stream) {
    constexpr const char* name = "cast_delayed";
    CudaDeviceGuard guard(name, device);
    clear_absmax(cast, 2, name, device, stream);
    launch(FUSED_OPTIM_KERNEL(cast_delayed, format, cast.half), name, tiles(cast), from_the_end(cast), device, stream);
}

void cast_rows_cuda(const Cast& cast, CastFormat format, int device, uint64_t stream) {
    constexpr const char* name = "cast_rows";
    CudaDeviceGuard guard(name, device);
    if (cast.transposed) {
        clear_absmax(cast, cast.rows + cast.columns, name, device, stream);
        const auto measure = cast.half ? measure_rows_and_columns<FP16Pairs> : measure_rows_and_columns<BF16Pairs>;
        launch(measure, name, tiles(cast), from_the_end(cast), device, stream);
        const auto encode = FUSED_OPTIM_KERNEL(cast_rows_and_columns, format, cast.half);
        return launch(encode, name, tiles(cast), cast, device, stream);
    }
    const uint64_t blocks = cast.columns ? cast.rows : 0;
    launch(FUSED_OPTIM_KERNEL(cast_whole_rows, format, cast.half), name, blocks, from_the_end(cast), device, stream);
}

void cast_blocks_cuda(const Cast& cast, CastFormat format, int device, uint64_t stream) {
    constexpr const char* name = "cast_blocks";
    CudaDeviceGuard guard(name, device);
    launch(FUSED_OPTIM_KERNEL(cast_blocks, format, cast.half), name, tiles(cast), from_the_end(cast), device, stream);
}

void transpose_cuda(const Cast& cast, int device, uint64_t stream) {
    constexpr const char* name = "transpose";
    CudaDeviceGuard guard(name, device);
    launch(transpose_codes, name, tiles(cast), cast, device, stream);
}

}  // namespace fused_optim
