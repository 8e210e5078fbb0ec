// What a thread block does with the values of a tile, wherever they come from: measures them, and writes their codes.
// Every thread of the block calls these.
#pragma once

#include "cast.h"
#include "cuda/cast_tile.cuh"
#include "cuda/warp.cuh"

namespace fused_optim {
namespace {

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
__device__ __forceinline__ void encode_measured(const Cast& cast, const Place& place, const ValuesOf<Pairs>& values) {
    encode_tile<format>(cast, place, values, inverse_of_tensor<format>(cast));
}

// `absmax` are two zeros before: the largest magnitude so far, and how many thread blocks have added theirs. The last
// one of them remembers it: all have read the history then.
template <CastFormat format, class Pairs>
__device__ __forceinline__ void encode_delayed(const Cast& cast, const Place& place, const ValuesOf<Pairs>& values) {
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
__device__ __forceinline__ void measure_both(const Cast& cast, const Place& place, const ValuesOf<Pairs>& values) {
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
__device__ __forceinline__ void encode_both(const Cast& cast, const Place& place, const ValuesOf<Pairs>& values) {
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
__device__ __forceinline__ void encode_blocks(const Cast& cast, const Place& place, const ValuesOf<Pairs>& values) {
    if (cast.codes) cast_rows_of_blocks<format>(cast, place, values);
    if (cast.transposed) cast_columns_of_blocks<format>(cast, place, values);
}

}  // namespace
}  // namespace fused_optim
