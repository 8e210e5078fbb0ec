// The CUDA engine's casts for products.
#include "cast.h"
#include "cuda/cast_launch.cuh"
#include "cuda/cast_tile.cuh"
#include "cuda/device.h"
#include "cuda/packets.cuh"
#include "cuda/tile_codes.cuh"
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

template <CastFormat format, class Pairs>
__global__ void __launch_bounds__(kThreads) cast_tiles(const __grid_constant__ Cast cast) {
    const Place place(cast);
    encode_measured<format>(cast, place, ValuesOf<Pairs>(cast, place));
}

template <CastFormat format, class Pairs>
__global__ void __launch_bounds__(kThreads) cast_delayed(const __grid_constant__ Cast cast) {
    const Place place(cast);
    encode_delayed<format>(cast, place, ValuesOf<Pairs>(cast, place));
}

template <class Pairs>
__global__ void __launch_bounds__(kThreads) measure_rows_and_columns(const __grid_constant__ Cast cast) {
    const Place place(cast);
    measure_both(cast, place, ValuesOf<Pairs>(cast, place));
}

template <CastFormat format, class Pairs>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    cast_rows_and_columns(const __grid_constant__ Cast cast) {
    const Place place(cast);
    encode_both<format>(cast, place, ValuesOf<Pairs>(cast, place));
}

template <CastFormat format, class Pairs>
__global__ void __launch_bounds__(kThreads) cast_blocks(const __grid_constant__ Cast cast) {
    const Place place(cast);
    encode_blocks<format>(cast, place, ValuesOf<Pairs>(cast, place));
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
