// The CUDA engine's quantized weights. Each kernel serves many of them, whose table travels as a kernel parameter.
// Every value is read once: a lane takes groups of 8 consecutive elements, and groups of lanes share blocks; a
// thread block takes a tile of 128 x 128. Weights whose addresses or sizes do not allow that are read by strips of 128
// elements.
#include <algorithm>
#include <utility>

#include "cuda/device.h"
#include "cuda/units.cuh"
#include "cuda/warp.cuh"
#include "cuda/weight_decode.cuh"
#include "cuda/weight_group8.cuh"
#include "cuda/weight_lanes.cuh"
#include "quantize.h"

namespace fused_optim {
namespace {

// Several rounds to a unit, since finding a unit takes about as long as a round.
constexpr uint32_t kGroups8PerUnit = 4 * kGroups8PerRound;
constexpr uint32_t kEncodeUnit = kGroups8PerUnit * kVector;  // elements
constexpr uint32_t kTileThreads = 512;
constexpr uint32_t kTileWarps = kTileThreads / kWarp;
constexpr uint32_t kRowsPerWarp = kStrip / kTileWarps;  // of a tile
constexpr uint32_t kAbsmaxLoads = 8;                    // of four elements, that a thread has in flight
constexpr uint32_t kAbsmaxUnit = kThreads * kPerLane * kAbsmaxLoads;

struct EncodeArguments {
    Table<Weight, 352> table;
    bool round_up;
};

struct AbsmaxArguments {
    Table<Values, 1600> table;
    uint32_t* absmax;
};

template <uint32_t capacity>
struct RescaleArguments {
    TensorScale scales[capacity];
    uint32_t count;
    ScaleRule rule;
};
constexpr uint32_t kMostScales = 1344;
constexpr uint32_t kFewScales = 160;  // of most models; the launch copies all of its parameters, 4 KB for these
static_assert(sizeof(EncodeArguments) <= kParameterLimit && sizeof(AbsmaxArguments) <= kParameterLimit &&
                  sizeof(RescaleArguments<kMostScales>) <= kParameterLimit,
              "the table must fit into the kernel's parameters");

__device__ __forceinline__ void add(Magnitudes& block, const float4& x) {
    block.add(x.x);
    block.add(x.y);
    block.add(x.z);
    block.add(x.w);
}

template <class Codec>
__device__ __forceinline__ uint32_t encode(const Weight& w, const Rounding& rounding, uint64_t element, float x) {
    return w.rotates() ? Codec::rotating(x, w.fraction(rounding, element)) : Codec::nearest(x);
}

template <class Codec>
__device__ __forceinline__ void encode_lane(const Weight& w, const Rounding& rounding, const Lane& lane,
                                            const float4& x, float inverse) {
    constexpr int kBits = 8 / Codec::kPerByte;
    const float values[4] = {x.x, x.y, x.z, x.w};
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        word |= encode<Codec>(w, rounding, lane.element + i, values[i] * inverse) << (kBits * i);
    }
    uint8_t* const target = reinterpret_cast<uint8_t*>(w.data) + lane.element / Codec::kPerByte;
    store_bytes<4 / Codec::kPerByte>(target, word, lane.count / Codec::kPerByte);
}

__device__ __forceinline__ Rounding rounding_of(const Weight& w) { return w.rotates() ? w.rounding() : Rounding{}; }

// Every lane of the warp calls it.
template <class Codec>
__device__ __forceinline__ void encode_strip(const Weight& w, bool round_up, float whole, const Rounding& rounding,
                                             const Strip& strip, const float4& x) {
    constexpr bool scaled = !std::is_void_v<typename Codec::Scale>;
    const Lane lane(strip);
    Magnitudes magnitudes;
    if constexpr (scaled) {
        constexpr uint32_t lanes = Codec::kBlock / kPerLane;
        add(magnitudes, x);
        magnitudes.finite = lanes_max<lanes>(magnitudes.finite);
        if constexpr (Codec::kPoisons) magnitudes.largest = lanes_max<lanes>(magnitudes.largest);
    }
    const WeightBlock block = Codec::prepare(magnitudes, round_up, whole);
    if (lane.count <= 0) return;
    const uint32_t first = threadIdx.x % kWarp * kPerLane;
    if (scaled && first % Codec::kBlock == 0) {
        store_scale<Codec>(w, scale_index<Codec>(w, strip.row, strip.column + first), block.scale);
    }
    encode_lane<Codec>(w, rounding, lane, x, block.inverse);
}

template <class Codec>
__device__ __forceinline__ void encode_strips(const Weight& w, bool round_up, uint64_t begin) {
    const uint64_t count = strip_count(w);
    const uint64_t first = begin + threadIdx.x / kWarp;
    Strip strips[kStripsPerWarp];
    float4 x[kStripsPerWarp];
#pragma unroll
    for (uint32_t k = 0; k < kStripsPerWarp; ++k) {
        const uint64_t index = first + k * kWarps;
        strips[k] = index < count ? strip_at(w, index) : Strip{};
        x[k] = Lane(strips[k]).load(w);
    }
    const float whole = w.whole();
    const Rounding rounding = rounding_of(w);
#pragma unroll
    for (uint32_t k = 0; k < kStripsPerWarp; ++k) {
        encode_strip<Codec>(w, round_up, whole, rounding, strips[k], x[k]);
    }
}

// Rotating rounding is left to strips: it would take registers from all.
__device__ __forceinline__ bool fits_groups8(const Weight& w, uint32_t per_byte) {
    return w.rows == 1 && !w.rotates() && w.columns % (2 * kVector) == 0 && w.values % sizeof(uint4) == 0 &&
           w.data % (kVector / per_byte) == 0;
}

// Every lane of the warp calls it; `group8` is beyond the last one where there is none.
template <class Codec>
__device__ __forceinline__ void encode_group8_of(const Weight& w, bool round_up, float whole, uint64_t group8,
                                                 const float* values) {
    const float absmax = thread_absmax<kVector>(values);
    Magnitudes block;
    constexpr bool scaled = !std::is_void_v<typename Codec::Scale>;
    constexpr uint32_t lanes = Codec::kBlock / kVector;
    if constexpr (scaled) {
        block = magnitudes_of<kVector>(values, absmax);
        block.finite = lanes_max<lanes>(block.finite);
        if constexpr (Codec::kPoisons) block.largest = lanes_max<lanes>(block.largest);
    }
    const WeightBlock fresh = Codec::prepare(block, round_up, whole);
    if (group8 >= w.columns / kVector) return;
    if (scaled && group8 % lanes == 0) store_scale<Codec>(w, group8 / lanes, fresh.scale);
    uint32_t words[2];
    encode_group8<Codec>(words, values, fresh.inverse, absmax);
    if constexpr (kGroup8Words<Codec> == 2) {
        reinterpret_cast<uint2*>(w.data)[group8] = make_uint2(words[0], words[1]);
    } else {
        reinterpret_cast<uint32_t*>(w.data)[group8] = words[0];
    }
}

template <class Codec>
__device__ __forceinline__ void encode_groups8(const Weight& w, bool round_up, uint64_t begin) {
    const uint64_t first = begin + threadIdx.x;
    const uint64_t last = w.columns / kVector - 2 + threadIdx.x % 2;  // an even lane's or an odd lane's
    Packet<4> raw[kGroups8PerThread];
#pragma unroll
    for (uint32_t k = 0; k < kGroups8PerThread; ++k) {
        load<4>(raw[k].words, w.values, min(first + k * kThreads, last) * kVector);
    }
    const float whole = w.whole();
#pragma unroll
    for (uint32_t k = 0; k < kGroups8PerThread; ++k) {
        float values[kVector];
        decode(values, raw[k], Element::kFloat32);
        encode_group8_of<Codec>(w, round_up, whole, first + k * kThreads, values);
    }
}

template <class Codec>
__global__ void __launch_bounds__(kThreads) encode_rows(const __grid_constant__ EncodeArguments arguments) {
    const auto place = arguments.table.find(blockIdx.x);
    const Weight& w = arguments.table.entries[place.entry];
    if (fits_groups8(w, Codec::kPerByte)) {
        const uint64_t begin = uint64_t{place.unit} * kGroups8PerUnit;
        const uint64_t end = min(begin + kGroups8PerUnit, w.columns / kVector);
#pragma unroll 1
        for (uint64_t i = begin; i < end; i += kGroups8PerRound) {
            encode_groups8<Codec>(w, arguments.round_up, i);
        }
    } else {
        constexpr uint32_t kStrips = kEncodeUnit / kStrip;
        const uint64_t begin = uint64_t{place.unit} * kStrips;
        const uint64_t end = min(begin + kStrips, strip_count(w));
#pragma unroll 1
        for (uint64_t i = begin; i < end; i += kStripsPerUnit) {
            encode_strips<Codec>(w, arguments.round_up, i);
        }
    }
}

// The largest value of the whole thread block. Every thread calls it, once.
template <uint32_t warps>
__device__ __forceinline__ uint32_t combine_block(uint32_t value) {
    __shared__ uint32_t largest[warps];
    value = lanes_max<kWarp>(value);
    if (threadIdx.x % kWarp == 0) largest[threadIdx.x / kWarp] = value;
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < warps; ++i) value = max(value, largest[i]);
    return value;
}

// A tile of 128 x 128 elements, of which some may not be there. A warp takes every kTileWarps-th row, a lane four
// elements of each.
struct Tile {
    const Weight& w;
    uint64_t corner;  // index of its first element
    uint32_t rows;
    uint32_t columns;

    __device__ __forceinline__ Tile(const Weight& weight, uint32_t unit) : w(weight) {
        const uint32_t per_row = static_cast<uint32_t>(ceil_divide(w.columns, kStrip));
        const uint64_t row = uint64_t{unit / per_row} * kStrip;
        const uint64_t column = uint64_t{unit % per_row} * kStrip;
        corner = row * w.columns + column;
        rows = static_cast<uint32_t>(min(w.rows - row, uint64_t{kStrip}));
        columns = static_cast<uint32_t>(min(w.columns - column, uint64_t{kStrip}));
    }
    __device__ __forceinline__ bool is_full() const {
        return rows == kStrip && columns == kStrip && w.columns % kPerLane == 0 && w.values % sizeof(float4) == 0 &&
               w.data % kPerLane == 0;
    }
    __device__ __forceinline__ Lane lane(uint32_t k) const {
        const uint32_t row = threadIdx.x / kWarp + k * kTileWarps;
        return Lane(row < rows ? Strip{0, 0, corner + row * w.columns, columns} : Strip{});
    }
};

template <class Codec>
__device__ __forceinline__ void encode_partial_rows(const Tile& tile, const float4* x, float inverse) {
    const Rounding rounding = rounding_of(tile.w);
#pragma unroll
    for (uint32_t k = 0; k < kRowsPerWarp; ++k) {
        const Lane lane = tile.lane(k);
        if (lane.count > 0) encode_lane<Codec>(tile.w, rounding, lane, x[k], inverse);
    }
}

// To nearest even; the elements of two rows make a group of 8.
template <class Codec>
__device__ __forceinline__ void encode_full_rows(const Tile& tile, const float4* x, float inverse, float absmax) {
    static_assert(Codec::kPerByte == 1, "a word for four elements");
#pragma unroll
    for (uint32_t k = 0; k < kRowsPerWarp; k += 2) {
        const float values[kVector] = {x[k].x, x[k].y, x[k].z, x[k].w, x[k + 1].x, x[k + 1].y, x[k + 1].z, x[k + 1].w};
        uint32_t words[2];
        encode_group8<Codec>(words, values, inverse, absmax);
        *reinterpret_cast<uint32_t*>(tile.w.data + tile.lane(k).element) = words[0];
        *reinterpret_cast<uint32_t*>(tile.w.data + tile.lane(k + 1).element) = words[1];
    }
}

template <class Codec>
__global__ void __launch_bounds__(kTileThreads, 2) encode_tiles(const __grid_constant__ EncodeArguments arguments) {
    const auto place = arguments.table.find(blockIdx.x);
    const Weight& w = arguments.table.entries[place.entry];
    const Tile tile(w, place.unit);
    const bool full = tile.is_full();
    alignas(16) float4 x[kRowsPerWarp];
    if (full) {  // all loads at once
#pragma unroll
        for (uint32_t k = 0; k < kRowsPerWarp; ++k) {
            x[k] = __ldcs(reinterpret_cast<const float4*>(w.values) + tile.lane(k).element / kPerLane);
        }
    } else {
#pragma unroll
        for (uint32_t k = 0; k < kRowsPerWarp; ++k) x[k] = tile.lane(k).load(w);
    }
    const float* values = reinterpret_cast<const float*>(x);
    const float absmax = thread_absmax<kPerLane * kRowsPerWarp>(values);
    Magnitudes magnitudes = magnitudes_of<kPerLane * kRowsPerWarp>(values, absmax);
    magnitudes.finite = combine_block<kTileWarps>(magnitudes.finite);
    const WeightBlock fresh = Codec::prepare(magnitudes, arguments.round_up, w.whole());
    if (threadIdx.x == 0) store_scale<Codec>(w, place.unit, fresh.scale);
    if (full && !w.rotates()) {
        encode_full_rows<Codec>(tile, x, fresh.inverse, absmax);
    } else {
        encode_partial_rows<Codec>(tile, x, fresh.inverse);
    }
}

// Magnitudes compare as their bits do, so the order of the maxima does not matter. `absmax` is zero before.
__global__ void __launch_bounds__(kThreads) absmax(const __grid_constant__ AbsmaxArguments arguments) {
    const auto place = arguments.table.find(blockIdx.x);
    const Values& tensor = arguments.table.entries[place.entry];
    const uint64_t first = uint64_t{place.unit} * kAbsmaxUnit + threadIdx.x * kPerLane;
    float4 x[kAbsmaxLoads];
#pragma unroll
    for (uint32_t k = 0; k < kAbsmaxLoads; ++k) {
        const uint64_t element = first + k * kThreads * kPerLane;
        x[k] = load4(reinterpret_cast<const float*>(tensor.address) + element,
                     static_cast<int64_t>(tensor.numel) - static_cast<int64_t>(element));
    }
    Magnitudes magnitudes;
#pragma unroll
    for (uint32_t k = 0; k < kAbsmaxLoads; ++k) add(magnitudes, x[k]);
    const uint32_t largest = combine_block<kWarps>(magnitudes.finite);
    if (threadIdx.x == 0 && largest > 0) atomicMax(arguments.absmax + place.entry, largest);
}

template <uint32_t capacity>
__global__ void __launch_bounds__(kThreads)
    rescale_weights(const __grid_constant__ RescaleArguments<capacity> arguments) {
    const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
    if (i >= arguments.count) return;
    rescale(arguments.scales[i], arguments.rule);
}

using EncodeKernel = void (*)(EncodeArguments);

template <class Codec>
constexpr EncodeKernel kernel_of() {
    if constexpr (Codec::kTiled) {
        return encode_tiles<Codec>;
    } else {
        return encode_rows<Codec>;
    }
}

template <int... formats>
EncodeKernel encode_kernel(int format, std::integer_sequence<int, formats...>) {
    const EncodeKernel kernels[] = {kernel_of<WeightCodec<static_cast<WeightFormat>(formats)>>()...};
    return kernels[format];
}

EncodeKernel encode_kernel(WeightFormat format) {
    return encode_kernel(static_cast<int>(format), std::make_integer_sequence<int, kCount<WeightFormat>>{});
}

template <uint32_t capacity>
void rescale_by(const std::vector<TensorScale>& scales, const ScaleRule& rule, int device, uint64_t stream) {
    constexpr const char* kernel = "quantize_rescale";
    CudaDeviceGuard guard(kernel, device);
    RescaleArguments<capacity> arguments;
    arguments.rule = rule;
    for (size_t first = 0; first < scales.size(); first += arguments.count) {
        arguments.count = static_cast<uint32_t>(std::min<size_t>(scales.size() - first, capacity));
        std::copy_n(scales.begin() + first, arguments.count, arguments.scales);
        const uint32_t grid = (arguments.count + kThreads - 1) / kThreads;
        rescale_weights<capacity><<<grid, kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(arguments);
        check_cuda(cudaGetLastError(), kernel, device);
    }
}

}  // namespace

void load_quantize_kernels(int device) {
    CudaDeviceGuard guard("quantize", device);
    for (int format = 0; format < kCount<WeightFormat>; ++format) {
        load_kernel(encode_kernel(static_cast<WeightFormat>(format)), "quantize_encode", device);
    }
    load_kernel(absmax, "quantize_absmax", device);
    load_kernel(rescale_weights<kFewScales>, "quantize_rescale", device);
    load_kernel(rescale_weights<kMostScales>, "quantize_rescale", device);
    load_kernel(decode_strips, "quantize_decode", device);
    load_kernel(decode_groups8, "quantize_decode", device);
}

void absmax_cuda(const std::vector<Values>& tensors, float* result, int device, uint64_t stream) {
    constexpr const char* kernel = "quantize_absmax";
    CudaDeviceGuard guard(kernel, device);
    const auto on = reinterpret_cast<cudaStream_t>(stream);
    check_cuda(cudaMemsetAsync(result, 0, tensors.size() * sizeof(float), on), kernel, device);
    AbsmaxArguments arguments{};
    const auto units = [](const Values& tensor) { return ceil_divide(tensor.numel, kAbsmaxUnit); };
    for_each_table(arguments.table, tensors, units, [&](size_t first, uint32_t grid) {
        arguments.absmax = reinterpret_cast<uint32_t*>(result + first);
        absmax<<<grid, kThreads, 0, on>>>(arguments);
        check_cuda(cudaGetLastError(), kernel, device);
    });
}

void rescale_cuda(const std::vector<TensorScale>& scales, const ScaleRule& rule, int device, uint64_t stream) {
    const bool few = scales.size() <= kFewScales;
    const auto rescale = few ? rescale_by<kFewScales> : rescale_by<kMostScales>;
    rescale(scales, rule, device, stream);
}

namespace {

void launch_encode(const std::vector<Weight>& weights, const WeightKind& kind, int device, uint64_t stream) {
    constexpr const char* kernel = "quantize_encode";
    CudaDeviceGuard guard(kernel, device);
    const WeightTraits traits = traits_of(kind.format);
    const auto units = [&](const Weight& w) {
        return traits.tiled ? tile_count(w) : ceil_divide(strip_count(w), kEncodeUnit / kStrip);
    };
    EncodeArguments arguments{};
    arguments.round_up = kind.round_up;
    for_each_table(arguments.table, weights, units, [&]([[maybe_unused]] size_t first, uint32_t grid) {
        const uint32_t threads = traits.tiled ? kTileThreads : kThreads;
        encode_kernel(kind.format)<<<grid, threads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(arguments);
        check_cuda(cudaGetLastError(), kernel, device);
    });
}

}  // namespace

void encode_cuda(const std::vector<Weight>& weights, const WeightKind& kind, int device, uint64_t stream) {
    std::vector<Weight> flat;
    flat.reserve(weights.size());
    for (const Weight& weight : weights) flat.push_back(flattened(weight, traits_of(kind.format)));
    launch_encode(flat, kind, device, stream);
}

void decode_cuda(const Weight& weight, WeightFormat format, Element type, int device, uint64_t stream) {
    constexpr const char* kernel = "quantize_decode";
    CudaDeviceGuard guard(kernel, device);
    const WeightTraits traits = traits_of(format);
    const DecodeArguments arguments{flattened(weight, traits), format, type};
    const bool groups8 = has_groups8(arguments.weight, traits);
    const uint64_t units = groups8 ? ceil_divide(arguments.weight.numel() / kVector, kGroups8PerRound)
                                   : ceil_divide(strip_count(arguments.weight), kStripsPerUnit);
    if (units > kMostUnits) throw std::runtime_error("fused_optim: a quantized weight is too large");
    if (units == 0) return;
    const auto decode = groups8 ? decode_groups8 : decode_strips;
    decode<<<static_cast<uint32_t>(units), kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(arguments);
    check_cuda(cudaGetLastError(), kernel, device);
}

}  // namespace fused_optim
