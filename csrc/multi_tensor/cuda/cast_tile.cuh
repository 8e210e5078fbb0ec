// A tile of 128 x 128 values: a warp has 16 rows, eight lanes a row, and a lane four neighbouring rows, so that it can
// turn 4 x 4 codes in registers; a tile in shared memory turns the rest.
#pragma once

#include "cast.h"
#include "cuda/packets.cuh"
#include "cuda/warp.cuh"

namespace fused_optim {
namespace {

constexpr uint32_t kTileSize = 128;
constexpr uint32_t kThreads = 256;
constexpr uint32_t kBlocksPerProcessor = 3;  // at least, of kernels that would take more registers and be slower
constexpr uint32_t kWarps = kThreads / kWarp;
constexpr uint32_t kRowsPerLane = 4;
constexpr uint32_t kLanesPerRow = 8;
constexpr uint32_t kWordsPerColumn = kTileSize / 4;  // of codes, in shared memory
constexpr uint32_t kPacket = 8;                      // values that a lane loads at once, 16 bytes
constexpr uint32_t kPairs = 2 * kPacket / 2;  // of values that a lane has of a row: two packets, half a tile apart
constexpr uint32_t kAbsmaxLoads = 8;          // packets that a thread has in flight
constexpr uint32_t kAbsmaxUnit = kThreads * kPacket * kAbsmaxLoads;
constexpr uint32_t kRowLoads = 8;  // packets of a row that a thread keeps
static_assert(kWarps * (kWarp / kLanesPerRow) * kRowsPerLane == kTileSize && kLanesPerRow * 2 * kPacket == kTileSize &&
                  kTileSize == kCastBlock,
              "threads fill a tile, which is a block high and wide");

constexpr uint32_t kPairMagnitude = 0x7FFF7FFFu;

// What the kernels know of a dtype: pairs of 16-bit values in a word. larger(): the larger magnitudes, and NaN for NaN.
struct BF16Pairs {
    __device__ __forceinline__ static float low(uint32_t pair) { return bits_float(pair << 16); }
    __device__ __forceinline__ static float high(uint32_t pair) { return bits_float(pair & 0xFFFF0000u); }
    __device__ __forceinline__ static uint32_t larger(uint32_t a, uint32_t b) {
        uint32_t result;
        asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a & kPairMagnitude), "r"(b & kPairMagnitude));
        return result;
    }
};

struct FP16Pairs {
    __device__ __forceinline__ static float low(uint32_t pair) {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(pair)));
        return value;
    }
    __device__ __forceinline__ static float high(uint32_t pair) { return low(pair >> 16); }
    __device__ __forceinline__ static uint32_t larger(uint32_t a, uint32_t b) {
        uint32_t result;
        asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a & kPairMagnitude), "r"(b & kPairMagnitude));
        return result;
    }
};

// The bits of magnitudes as FP32 numbers, which compare as integers.
template <class Pairs>
__device__ __forceinline__ uint32_t low_magnitude(uint32_t pair) {
    return float_bits(Pairs::low(pair)) & kMagnitude;
}
template <class Pairs>
__device__ __forceinline__ uint32_t high_magnitude(uint32_t pair) {
    return float_bits(Pairs::high(pair)) & kMagnitude;
}
template <class Pairs>
__device__ __forceinline__ uint32_t larger_of(uint32_t pair) {
    return max(low_magnitude<Pairs>(pair), high_magnitude<Pairs>(pair));
}

// Two codes, that of `a` in the low byte. Scales leave nothing that would overflow, and infinities become NaN with
// them.
template <CastFormat format>
__device__ __forceinline__ uint32_t encode_pair(float a, float b) {
#if __CUDA_ARCH__ >= 890
    uint16_t pair;
    if constexpr (format == CastFormat::kE4M3) {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
    } else {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
    }
    return pair;
#else
    using Codec = CastCodec<format>;
    return (Codec::encode(a) & 0xFFu) | (Codec::encode(b) & 0xFFu) << 8;
#endif
}

// Four codes of two pairs.
template <CastFormat format, class Pairs>
__device__ __forceinline__ uint32_t encode_word(uint32_t first, uint32_t second, const float (&inverse)[4]) {
    return encode_pair<format>(Pairs::low(first) * inverse[0], Pairs::high(first) * inverse[1]) |
           encode_pair<format>(Pairs::low(second) * inverse[2], Pairs::high(second) * inverse[3]) << 16;
}

template <CastFormat format, class Pairs>
__device__ __forceinline__ uint32_t encode_word(uint32_t first, uint32_t second, float inverse) {
    const float all[4] = {inverse, inverse, inverse, inverse};
    return encode_word<format, Pairs>(first, second, all);
}

// Words of four rows become words of four columns: byte i of word j and byte j of word i change places.
__device__ __forceinline__ void turn(uint32_t (&words)[4]) {
    const uint32_t a = __byte_perm(words[0], words[1], 0x5140), b = __byte_perm(words[2], words[3], 0x5140);
    const uint32_t c = __byte_perm(words[0], words[1], 0x7362), d = __byte_perm(words[2], words[3], 0x7362);
    words[0] = __byte_perm(a, b, 0x5410);
    words[1] = __byte_perm(a, b, 0x7632);
    words[2] = __byte_perm(c, d, 0x5410);
    words[3] = __byte_perm(c, d, 0x7632);
}

// A tile of codes by columns: four rows to a word. The words of a column are shifted by `turns` groups of four, so that
// neither the lanes of a warp that write one each, nor those of a quarter that read four each, meet in a bank.
struct TurnedTile {
    uint32_t words[kTileSize][kWordsPerColumn];

    __device__ __forceinline__ void put(uint32_t column, uint32_t group_of_rows, uint32_t turns, uint32_t word) {
        words[column][group_of_rows ^ turns * 4] = word;
    }
    __device__ __forceinline__ uint4 get(uint32_t column, uint32_t sixteen_rows, uint32_t turns) const {
        return *reinterpret_cast<const uint4*>(&words[column][(sixteen_rows ^ turns) * 4]);
    }
};

// The largest of the whole thread block. Every thread calls it, once.
__device__ __forceinline__ uint32_t largest_of_block(uint32_t value) {
    __shared__ uint32_t largest[kWarps];
    value = lanes_max<kWarp>(value);
    if (threadIdx.x % kWarp == 0) largest[threadIdx.x / kWarp] = value;
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < kWarps; ++i) value = max(value, largest[i]);
    return value;
}

// The number of this thread block's part of the matrix.
__device__ __forceinline__ uint32_t block_number(const Cast& cast) {
    return cast.backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
}

// Where a tile lies, and this thread in it.
struct Place {
    uint64_t row;     // of the tile
    uint64_t column;  // of the tile
    uint32_t lane;    // of those that share a row
    uint32_t group;   // of rows of the tile: its first row / 4

    __device__ __forceinline__ explicit Place(const Cast& cast) {
        const uint32_t across = static_cast<uint32_t>(ceil_divide(cast.columns, kTileSize)), tile = block_number(cast);
        row = uint64_t{tile / across} * kTileSize;
        column = uint64_t{tile % across} * kTileSize;
        lane = threadIdx.x % kLanesPerRow;
        group = threadIdx.x / kLanesPerRow;
    }
    __device__ __forceinline__ uint64_t first_row() const { return row + group * kRowsPerLane; }
};

// Writes a tile of codes by columns. `turns(column)` as they were put.
template <class Turns>
__device__ __forceinline__ void store_turned(const Cast& cast, const Place& place, const TurnedTile& tile,
                                             const Turns& turns) {
    constexpr uint32_t kVectors = kWordsPerColumn / 4;
    static_assert(kVectors == kLanesPerRow);
#pragma unroll
    for (uint32_t first = 0; first < kTileSize; first += kThreads / kVectors) {
        const uint32_t column = first + place.group;
        const uint64_t row = place.row + place.lane * 16;
        if (place.column + column >= cast.columns || row >= cast.rows) continue;
        const uint4 codes = tile.get(column, place.lane, turns(column));
        *reinterpret_cast<uint4*>(cast.transposed + (place.column + column) * cast.rows + row) = codes;
    }
}

// This thread's values: pairs[i] of row i, the first half of them at columns 8 * lane, the second one half a tile on.
template <class Pairs>
struct ValuesOf {
    uint32_t pairs[kRowsPerLane][kPairs];

    __device__ __forceinline__ ValuesOf(const Cast& cast, const Place& place) {
#pragma unroll
        for (uint32_t i = 0; i < kRowsPerLane; ++i) {
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                const uint64_t row = place.first_row() + i, column = column_of(place, half);
                const uint64_t address = cast.values + (row * cast.columns + column) * 2;
                const bool inside = row < cast.rows && column < cast.columns;
                const uint4 packet = inside ? *reinterpret_cast<const uint4*>(address) : uint4{};
                reinterpret_cast<uint4*>(pairs[i])[half] = packet;
            }
        }
    }
    // The bits of the largest magnitude of row i.
    __device__ __forceinline__ uint32_t largest(uint32_t i) const {
        uint32_t pair = pairs[i][0];
#pragma unroll
        for (uint32_t k = 1; k < kPairs; ++k) pair = Pairs::larger(pair, pairs[i][k]);
        return larger_of<Pairs>(pair);
    }
    __device__ __forceinline__ static uint64_t column_of(const Place& place, uint32_t half) {
        return place.column + half * (kTileSize / 2) + place.lane * kPacket;
    }
};

template <CastFormat format, class Pairs>
__device__ __forceinline__ void encode_rows(const Cast& cast, const Place& place, const ValuesOf<Pairs>& values,
                                            const float (&inverses)[kRowsPerLane],
                                            uint32_t (&codes)[kRowsPerLane][kPairs / 2]) {
#pragma unroll
    for (uint32_t i = 0; i < kRowsPerLane; ++i) {
#pragma unroll
        for (uint32_t k = 0; k < kPairs / 2; ++k) {
            codes[i][k] = encode_word<format, Pairs>(values.pairs[i][2 * k], values.pairs[i][2 * k + 1], inverses[i]);
        }
        if (!cast.codes) continue;
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            const uint64_t row = place.first_row() + i, column = ValuesOf<Pairs>::column_of(place, half);
            if (row >= cast.rows || column >= cast.columns) continue;
            const uint2 packet = make_uint2(codes[i][2 * half], codes[i][2 * half + 1]);
            *reinterpret_cast<uint2*>(cast.codes + row * cast.columns + column) = packet;
        }
    }
}

// Four words, one of each of this thread's rows, that begin at its column 4 * k.
__device__ __forceinline__ void put_turned(TurnedTile& tile, const Place& place, uint32_t k, uint32_t (&words)[4]) {
    turn(words);
    const uint32_t column = k / 2 * (kTileSize / 2) + place.lane * kPacket + k % 2 * 4;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) tile.put(column + i, place.group, place.lane, words[i]);
}

__device__ __forceinline__ uint32_t turns_of(uint32_t column) { return column / kPacket % kLanesPerRow; }

// Of columns 2 * threadIdx.x and the next one of the tile, in the first threads. Every thread of the block calls it.
template <class Pairs>
__device__ __forceinline__ uint32_t largest_of_columns(const Place& place, const ValuesOf<Pairs>& values) {
    __shared__ uint32_t largest[kWarps][kTileSize / 2];  // pairs of columns
#pragma unroll
    for (uint32_t k = 0; k < kPairs; ++k) {
        uint32_t pair = Pairs::larger(Pairs::larger(values.pairs[0][k], values.pairs[1][k]),
                                      Pairs::larger(values.pairs[2][k], values.pairs[3][k]));
#pragma unroll
        for (uint32_t distance = kLanesPerRow; distance < kWarp; distance *= 2) {
            pair = Pairs::larger(pair, __shfl_xor_sync(kAllLanes, pair, distance));
        }
        const uint32_t column = k / 4 * (kTileSize / 4) + place.lane * (kPacket / 2) + k % 4;
        if (threadIdx.x % kWarp < kLanesPerRow) largest[threadIdx.x / kWarp][column] = pair;
    }
    __syncthreads();
    uint32_t pair = 0;
    if (threadIdx.x < kTileSize / 2) {
#pragma unroll
        for (uint32_t warp = 0; warp < kWarps; ++warp) pair = Pairs::larger(pair, largest[warp][threadIdx.x]);
    }
    return pair;
}

// `inverses`: of the columns of the tile, in shared memory. Every thread of the block calls it.
template <CastFormat format, class Pairs>
__device__ __forceinline__ void encode_columns(const Cast& cast, const Place& place, const ValuesOf<Pairs>& values,
                                               const float* inverses) {
    __shared__ TurnedTile tile;
    __syncthreads();
#pragma unroll
    for (uint32_t k = 0; k < kPairs / 2; ++k) {
        const uint32_t column = k / 2 * (kTileSize / 2) + place.lane * kPacket + k % 2 * 4;
        const float4 of_columns = *reinterpret_cast<const float4*>(&inverses[column]);
        const float four[4] = {of_columns.x, of_columns.y, of_columns.z, of_columns.w};
        uint32_t words[4];
#pragma unroll
        for (uint32_t i = 0; i < kRowsPerLane; ++i) {
            words[i] = encode_word<format, Pairs>(values.pairs[i][2 * k], values.pairs[i][2 * k + 1], four);
        }
        put_turned(tile, place, k, words);
    }
    __syncthreads();
    store_turned(cast, place, tile, turns_of);
}

}  // namespace
}  // namespace fused_optim
