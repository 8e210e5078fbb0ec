// The CUDA engine's quantized weights. Each kernel serves many of them, whose table travels as a kernel parameter.
// Every value is read once: a lane takes octets of eight consecutive elements, and groups of lanes share blocks; a
// thread block takes a tile of 128 x 128. Weights whose addresses or sizes do not allow that are read by strips of 128
// elements.
#include <algorithm>
#include <utility>

#include "cuda/device.h"
#include "cuda/warp.cuh"
#include "cuda/weight_octets.cuh"
#include "quantize.h"

namespace fused_optim {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kWarps = kThreads / kWarp;
constexpr uint32_t kPerLane = kStrip / kWarp;  // elements of a strip
constexpr uint32_t kStripsPerWarp = 2;         // loaded before the first is worked on
constexpr uint32_t kStripsPerUnit = kWarps * kStripsPerWarp;
constexpr uint32_t kOctetsPerThread = 4;
constexpr uint32_t kOctetsPerRound = kThreads * kOctetsPerThread;
// Several rounds to a unit, since finding a unit takes about as long as a round.
constexpr uint32_t kOctetsPerUnit = 4 * kOctetsPerRound;
constexpr uint32_t kEncodeUnit = kOctetsPerUnit * kVector;  // elements
constexpr uint32_t kTileThreads = 512;
constexpr uint32_t kTileWarps = kTileThreads / kWarp;
constexpr uint32_t kRowsPerWarp = kStrip / kTileWarps;  // of a tile
constexpr uint32_t kAbsmaxLoads = 8;                    // of four elements, that a thread has in flight
constexpr uint32_t kAbsmaxUnit = kThreads * kPerLane * kAbsmaxLoads;
static_assert(kPerLane == 4, "lanes load and store vectors of four");

// Tensors that share a launch. Each is cut into units, one to a thread block.
template <class Entry, int capacity_>
struct Table {
    static constexpr int capacity = capacity_;
    Entry entries[capacity];
    uint32_t ends[capacity];  // units of the entries up to this one
    uint32_t count;

    struct Place {
        uint32_t entry;
        uint32_t unit;
    };
    __device__ __forceinline__ Place find(uint32_t unit) const {
        uint32_t low = 0, high = count - 1;
        while (low < high) {
            const uint32_t middle = (low + high) / 2;
            if (unit < ends[middle]) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        return {low, low == 0 ? unit : unit - ends[low - 1]};
    }
};

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
        const uint64_t column = strip.column + first;
        store_scale<Codec>(w, scale_index<Codec>(w, strip.row, column), block.scale);
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
__device__ __forceinline__ bool fits_octets(const Weight& w, uint32_t per_byte) {
    return w.rows == 1 && !w.rotates() && w.columns % (2 * kVector) == 0 && w.values % sizeof(uint4) == 0 &&
           w.data % (kVector / per_byte) == 0;
}

// Every lane of the warp calls it; `octet` is beyond the last one where there is none.
template <class Codec>
__device__ __forceinline__ void encode_octet_of(const Weight& w, bool round_up, float whole, uint64_t octet,
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
    if (octet >= w.columns / kVector) return;
    if (scaled && octet % lanes == 0) store_scale<Codec>(w, octet / lanes, fresh.scale);
    uint32_t words[2];
    encode_octet<Codec>(words, values, fresh.inverse, absmax);
    if constexpr (kOctetWords<Codec> == 2) {
        reinterpret_cast<uint2*>(w.data)[octet] = make_uint2(words[0], words[1]);
    } else {
        reinterpret_cast<uint32_t*>(w.data)[octet] = words[0];
    }
}

template <class Codec>
__device__ __forceinline__ void encode_octets(const Weight& w, bool round_up, uint64_t begin) {
    const uint64_t first = begin + threadIdx.x;
    const uint64_t last = w.columns / kVector - 2 + threadIdx.x % 2;  // an even lane's or an odd lane's
    Packet<4> raw[kOctetsPerThread];
#pragma unroll
    for (uint32_t k = 0; k < kOctetsPerThread; ++k) {
        load<4>(raw[k].words, w.values, min(first + k * kThreads, last) * kVector);
    }
    const float whole = w.whole();
#pragma unroll
    for (uint32_t k = 0; k < kOctetsPerThread; ++k) {
        float values[kVector];
        decode(values, raw[k], Element::kFloat32);
        encode_octet_of<Codec>(w, round_up, whole, first + k * kThreads, values);
    }
}

template <class Codec>
__global__ void __launch_bounds__(kThreads) encode_rows(const __grid_constant__ EncodeArguments arguments) {
    const auto place = arguments.table.find(blockIdx.x);
    const Weight& w = arguments.table.entries[place.entry];
    if (fits_octets(w, Codec::kPerByte)) {
        const uint64_t begin = uint64_t{place.unit} * kOctetsPerUnit;
        const uint64_t end = min(begin + kOctetsPerUnit, w.columns / kVector);
#pragma unroll 1
        for (uint64_t i = begin; i < end; i += kOctetsPerRound) encode_octets<Codec>(w, arguments.round_up, i);
    } else {
        constexpr uint32_t kStrips = kEncodeUnit / kStrip;
        const uint64_t begin = uint64_t{place.unit} * kStrips;
        const uint64_t end = min(begin + kStrips, strip_count(w));
#pragma unroll 1
        for (uint64_t i = begin; i < end; i += kStripsPerUnit) encode_strips<Codec>(w, arguments.round_up, i);
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

// To nearest even; the elements of two rows make an octet.
template <class Codec>
__device__ __forceinline__ void encode_full_rows(const Tile& tile, const float4* x, float inverse, float absmax) {
    static_assert(Codec::kPerByte == 1, "a word for four elements");
#pragma unroll
    for (uint32_t k = 0; k < kRowsPerWarp; k += 2) {
        const float values[kVector] = {x[k].x, x[k].y, x[k].z, x[k].w, x[k + 1].x, x[k + 1].y, x[k + 1].z, x[k + 1].w};
        uint32_t words[2];
        encode_octet<Codec>(words, values, inverse, absmax);
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
    if (i < arguments.count) rescale(arguments.scales[i], arguments.rule);
}

struct StoreLane {
    const Weight& w;
    const Lane& lane;
    const float (&values)[4];

    template <class Output>
    __device__ __forceinline__ void operator()(Output) const {
        using Bits = typename Output::Bits;
        Bits* const target = reinterpret_cast<Bits*>(w.values) + lane.element;
        alignas(16) Bits raw[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) raw[i] = Output::encode(values[i]);
        if (lane.count >= 4 && is_aligned(target, sizeof(raw))) {
            using Vector = std::conditional_t<sizeof(Bits) == 4, uint4, uint2>;
            *reinterpret_cast<Vector*>(target) = *reinterpret_cast<const Vector*>(raw);
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i < lane.count) target[i] = raw[i];
        }
    }
};

template <class Codec>
__device__ __forceinline__ uint32_t load_codes(const Weight& w, const Lane& lane) {
    constexpr int kBytes = 4 / Codec::kPerByte;
    const uint8_t* const source = reinterpret_cast<const uint8_t*>(w.data) + lane.element / Codec::kPerByte;
    uint32_t word = 0;
    if (lane.count >= 4 && is_aligned(source, kBytes)) {
        if constexpr (kBytes == 4) {
            word = *reinterpret_cast<const uint32_t*>(source);
        } else {
            word = *reinterpret_cast<const uint16_t*>(source);
        }
        return word;
    }
#pragma unroll
    for (int i = 0; i < kBytes; ++i) {
        if (i * Codec::kPerByte < lane.count) word |= static_cast<uint32_t>(source[i]) << (8 * i);
    }
    return word;
}

struct DecodeArguments {
    Weight weight;
    WeightFormat format;
    Element type;
};

struct DecodeStrip {
    const DecodeArguments& arguments;
    const Strip& strip;

    template <class Codec>
    __device__ __forceinline__ void operator()(Codec) const {
        constexpr int kBits = 8 / Codec::kPerByte;
        const Weight& w = arguments.weight;
        const Lane lane(strip);
        if (lane.count <= 0) return;
        const uint64_t column = strip.column + threadIdx.x % kWarp * kPerLane;
        const uint64_t scale = scale_index<Codec>(w, strip.row, column);
        const float step = Codec::step(load_scale<Codec>(w, scale), w.whole());
        const uint32_t word = load_codes<Codec>(w, lane);
        float values[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = Codec::decode(word >> (kBits * i) & ((1u << kBits) - 1u)) * step;
        dispatch_element(arguments.type, StoreLane{w, lane, values});
    }
};

__global__ void __launch_bounds__(kThreads) decode_strips(const __grid_constant__ DecodeArguments arguments) {
    const uint64_t count = strip_count(arguments.weight);
    const uint64_t first = uint64_t{blockIdx.x} * kStripsPerUnit + threadIdx.x / kWarp;
#pragma unroll
    for (uint32_t k = 0; k < kStripsPerWarp; ++k) {
        const uint64_t index = first + k * kWarps;
        if (index >= count) return;
        const Strip strip = strip_at(arguments.weight, index);
        dispatch_weight(arguments.format, DecodeStrip{arguments, strip});
    }
}

// The same for weights whose rows are whole octets of elements, in which all elements share a scale: with wider
// accesses, and the loads of several octets under way at once.
template <class Codec>
__device__ __forceinline__ uint64_t octet_scale(const Weight& w, uint64_t octet) {
    const uint64_t element = octet * kVector;
    if (w.rows == 1) return scale_index<Codec>(w, 0, element);
    const bool narrow = (element | w.columns) >> 32 == 0;  // the short division
    const uint64_t row =
        narrow ? static_cast<uint32_t>(element) / static_cast<uint32_t>(w.columns) : element / w.columns;
    return scale_index<Codec>(w, row, element - row * w.columns);
}

struct StoreOctet {
    uint64_t address;  // of the first value
    uint64_t octet;
    const float (&values)[kVector];

    template <class Output>
    __device__ __forceinline__ void operator()(Output) const {
        using Bits = typename Output::Bits;
        constexpr uint32_t kVectors = kVector * sizeof(Bits) / sizeof(uint4);
        alignas(16) Bits raw[kVector];
#pragma unroll
        for (uint32_t i = 0; i < kVector; ++i) raw[i] = Output::encode(values[i]);
        uint4* const target = reinterpret_cast<uint4*>(address) + octet * kVectors;
#pragma unroll
        for (uint32_t i = 0; i < kVectors; ++i) target[i] = reinterpret_cast<const uint4*>(raw)[i];
    }
};

struct DecodeOctets {
    const DecodeArguments& arguments;

    template <class Codec>
    __device__ __forceinline__ void operator()(Codec) const {
        using Codes = std::conditional_t<Codec::kPerByte == 1, uint64_t, uint32_t>;
        constexpr int kBits = 8 / Codec::kPerByte;
        const Weight& w = arguments.weight;
        const uint64_t count = w.numel() / kVector;
        const uint64_t first = uint64_t{blockIdx.x} * kOctetsPerRound + threadIdx.x;
        Codes codes[kOctetsPerThread];
        uint32_t scales[kOctetsPerThread];
#pragma unroll
        for (uint32_t k = 0; k < kOctetsPerThread; ++k) {
            const uint64_t octet = min(first + k * kThreads, count - 1);
            codes[k] = reinterpret_cast<const Codes*>(w.data)[octet];
            scales[k] = load_scale<Codec>(w, octet_scale<Codec>(w, octet));
        }
        const float whole = w.whole();
#pragma unroll
        for (uint32_t k = 0; k < kOctetsPerThread; ++k) {
            const uint64_t octet = first + k * kThreads;
            if (octet >= count) return;
            const float step = Codec::step(scales[k], whole);
            float values[kVector];
#pragma unroll
            for (uint32_t i = 0; i < kVector; ++i) {
                values[i] = Codec::decode(static_cast<uint32_t>(codes[k] >> (kBits * i)) & ((1u << kBits) - 1u)) * step;
            }
            dispatch_element(arguments.type, StoreOctet{w.values, octet, values});
        }
    }
};

__global__ void __launch_bounds__(kThreads) decode_octets(const __grid_constant__ DecodeArguments arguments) {
    dispatch_weight(arguments.format, DecodeOctets{arguments});
}

bool has_octets(const Weight& w, const WeightTraits& traits) {
    return w.columns % kVector == 0 && w.data % (kVector / traits.per_byte) == 0 && w.values % sizeof(uint4) == 0;
}

constexpr uint32_t kMostUnits = 0x7FFFFFFFu;  // thread blocks of a launch

// Calls launch(number of the first entry, units) for as many tables as it takes. `units(entry)` are at least 0.
template <class Table, class Entries, class Units, class Launch>
void for_each_table(Table& table, const Entries& entries, const Units& units, const Launch& launch) {
    for (size_t next = 0; next < entries.size();) {
        const size_t first = next;
        uint64_t total = 0;
        table.count = 0;
        for (; next < entries.size() && table.count < Table::capacity; ++next) {
            const uint64_t more = units(entries[next]);
            if (more > kMostUnits) throw std::runtime_error("fused_optim: a quantized weight is too large");
            if (total + more > kMostUnits) break;
            total += more;
            table.entries[table.count] = entries[next];
            table.ends[table.count++] = static_cast<uint32_t>(total);
        }
        if (total) launch(first, static_cast<uint32_t>(total));
    }
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
    load_kernel(decode_octets, "quantize_decode", device);
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
    const auto rescale = scales.size() <= kFewScales ? rescale_by<kFewScales> : rescale_by<kMostScales>;
    rescale(scales, rule, device, stream);
}

void encode_cuda(const std::vector<Weight>& weights, const WeightKind& kind, int device, uint64_t stream) {
    constexpr const char* kernel = "quantize_encode";
    CudaDeviceGuard guard(kernel, device);
    const WeightTraits traits = traits_of(kind.format);
    std::vector<Weight> flat;
    flat.reserve(weights.size());
    for (const Weight& weight : weights) flat.push_back(flattened(weight, traits));
    const auto units = [&](const Weight& w) {
        return traits.tiled ? tile_count(w) : ceil_divide(strip_count(w), kEncodeUnit / kStrip);
    };
    EncodeArguments arguments{};
    arguments.round_up = kind.round_up;
    for_each_table(arguments.table, flat, units, [&](size_t, uint32_t grid) {
        const uint32_t threads = traits.tiled ? kTileThreads : kThreads;
        encode_kernel(kind.format)<<<grid, threads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(arguments);
        check_cuda(cudaGetLastError(), kernel, device);
    });
}

void decode_cuda(const Weight& weight, WeightFormat format, Element type, int device, uint64_t stream) {
    constexpr const char* kernel = "quantize_decode";
    CudaDeviceGuard guard(kernel, device);
    const WeightTraits traits = traits_of(format);
    const DecodeArguments arguments{flattened(weight, traits), format, type};
    const bool octets = has_octets(arguments.weight, traits);
    const uint64_t units = octets ? ceil_divide(arguments.weight.numel() / kVector, kOctetsPerRound)
                                  : ceil_divide(strip_count(arguments.weight), kStripsPerUnit);
    if (units > kMostUnits) throw std::runtime_error("fused_optim: a quantized weight is too large");
    if (units == 0) return;
    const auto decode = octets ? decode_octets : decode_strips;
    decode<<<static_cast<uint32_t>(units), kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(arguments);
    check_cuda(cudaGetLastError(), kernel, device);
}

}  // namespace fused_optim
