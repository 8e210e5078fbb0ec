// The CUDA engine: a kernel whose table of shards travels as its parameter, one thread block per chunk of a shard. Two
// walks share the element math:
//   * vector walk, one instance per mix of formats: a thread updates 8 consecutive elements at a time. It issues the
//     loads of all streams, then decodes, updates, finds the block's absmax by warp shuffles, encodes and stores.
//   * general walk: shard ends and shards whose addresses or offsets are not aligned, one element per thread.
// Steps that consist of one mix run a kernel made for it, others one that calls the walk of each shard's mix.
#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <stdexcept>
#include <string>

#include "adam.h"
#include "cuda/device.h"
#include "dispatch.h"
#include "launch.h"
#include "quantize.h"

namespace fused_optim {
namespace {

constexpr int kThreads = 128;
constexpr int kVector = 8;                 // elements per thread
constexpr int kTile = kThreads * kVector;  // elements per thread block and iteration
constexpr int kSpan = 128;                 // elements per warp in the general walk: the largest block
constexpr int kVectorSpan = 32 * kVector;  // elements per warp in the vector walk
constexpr int kSmallestBlock = 32;
constexpr uint32_t kWarp = 0xFFFFFFFFu;  // all lanes of a warp
constexpr int kMaxTilesPerChunk = 16;
constexpr int kChunksPerBlock = 8;  // wanted at least, to balance the load
constexpr int kMaxShards = 396;
constexpr int kMaxShardsWithWeights = 334;  // where some may be quantized
constexpr int kMaxGroups = 16;
constexpr int kMaxGeometries = 24;
constexpr int kBuckets = 256;
constexpr int kMaxDevices = 64;
constexpr int kParameterLimit = 32764;  // bytes of kernel parameters, compute capability 7.0 and later

struct Geometry {
    uint64_t inner_local;
    uint64_t inner_global;
};

struct ShardInfo {
    uint32_t master : 2;
    uint32_t exp_avg : 3;
    uint32_t exp_avg_sq : 3;
    uint32_t grad_type : 2;
    uint32_t param_type : 2;
    uint32_t block_log2 : 3;
    uint32_t vectors : 1;  // fit for the vector walk
    uint32_t group : 5;
    uint32_t geometry : 6;
    uint32_t quantized : 1;
    uint32_t round_up : 1;
    uint32_t weight_format : 3;
};

// Structure of arrays, so that no padding is wasted on the parameter limit.
template <int capacity>
struct KernelTable {
    static constexpr uint32_t kShards = capacity;
    uint64_t grad[capacity];
    uint64_t param[capacity];
    uint64_t master[capacity];
    uint64_t exp_avg[capacity];
    uint64_t exp_avg_sq[capacity];
    uint64_t scales[capacity];
    uint64_t numel[capacity];
    uint64_t offset[capacity];
    uint32_t key[capacity];
    ShardInfo info[capacity];
    uint32_t first_chunk[capacity + 1];
    Scalars scalars[kMaxGroups];
    Geometry geometries[kMaxGeometries];
    const Scalars* device_scalars;  // read instead of `scalars` unless null
    uint32_t shard_count;
    uint32_t group_count;
    uint32_t geometry_count;
    uint32_t chunk;  // elements
    uint32_t bucket_log2;
    uint16_t bucket_shard[kBuckets];  // the shard of chunk (bucket << bucket_log2): where the search begins
};

using PlainTable = KernelTable<kMaxShards>;

// Of steps in which parameters may be quantized weights; see Shard.
struct WeightsTable : KernelTable<kMaxShardsWithWeights> {
    uint64_t weight_scales[kShards];
    uint64_t absmax[kShards];
};
template <class Table>
constexpr bool kHasWeights = std::is_same_v<Table, WeightsTable>;
static_assert(sizeof(PlainTable) <= kParameterLimit && sizeof(WeightsTable) <= kParameterLimit,
              "the table must fit into the kernel's parameters");

// Eight elements of kBytes each, as they lie in memory.
template <int kBytes>
struct Packet {
    uint32_t words[2 * kBytes];
};

template <int kBytes>
__device__ __forceinline__ uint32_t get(const uint32_t* words, int i) {
    if constexpr (kBytes == 4) return words[i];
    constexpr uint32_t mask = kBytes == 1 ? 0xFFu : 0xFFFFu;
    return (words[i * kBytes / 4] >> (8 * (i * kBytes % 4))) & mask;
}

// Byte `first` of each of four values as one word; what else they hold does not matter.
template <int first>
__device__ __forceinline__ uint32_t pack_bytes(const uint32_t* values) {
    constexpr uint32_t pair = (4 + first) << 4 | first;
    return __byte_perm(__byte_perm(values[0], values[1], pair), __byte_perm(values[2], values[3], pair), 0x5410);
}

// The upper or lower halves of two values as one word.
__device__ __forceinline__ uint32_t pack_high(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }
__device__ __forceinline__ uint32_t pack_low(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); }

// Eight FP32 elements are two accesses of 16 bytes. Were each thread to make both on its own elements, every access of
// the warp would touch halves of 32-byte sectors; so two neighbours access whole sectors and exchange what is the
// other's.
// From what a thread accesses first and second (four words each) to its own elements, and back: its own inverse.
__device__ __forceinline__ void exchange(uint32_t* words) {
    const uint32_t pair = 3u << (threadIdx.x & 30);
    const bool odd = threadIdx.x & 1;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t others = __shfl_xor_sync(pair, odd ? words[i] : words[i + 4], 1);
        words[i] = odd ? others : words[i];
        words[i + 4] = odd ? words[i + 4] : others;
    }
}

// Where a thread's first access lies: at its elements if it is even, beside its neighbour's access if it is odd.
__device__ __forceinline__ uint64_t first_access(uint64_t address, uint32_t element) {
    return address + static_cast<uint64_t>(element) * 4 - (threadIdx.x & 1) * 16;
}

template <int kBytes>
__device__ __forceinline__ void load(uint32_t* words, uint64_t address, uint32_t element) {
    if constexpr (kBytes == 4) {  // exchange() follows when the values are wanted
        const uint4* source = reinterpret_cast<const uint4*>(first_access(address, element));
        uint4 first = __ldcs(source), second = __ldcs(source + 2);
        words[0] = first.x, words[1] = first.y, words[2] = first.z, words[3] = first.w;
        words[4] = second.x, words[5] = second.y, words[6] = second.z, words[7] = second.w;
        return;
    }
    address += static_cast<uint64_t>(element) * kBytes;
    if constexpr (kBytes == 2) {
        uint4 raw = __ldcs(reinterpret_cast<const uint4*>(address));
        words[0] = raw.x, words[1] = raw.y, words[2] = raw.z, words[3] = raw.w;
    } else if constexpr (kBytes == 1) {
        uint2 raw = __ldcs(reinterpret_cast<const uint2*>(address));
        words[0] = raw.x, words[1] = raw.y;
    }
}

template <int kBytes>
__device__ __forceinline__ void store(const uint32_t* words, uint64_t address, uint32_t element) {
    if constexpr (kBytes == 4) {  // after exchange()
        uint4* target = reinterpret_cast<uint4*>(first_access(address, element));
        __stcs(target, make_uint4(words[0], words[1], words[2], words[3]));
        __stcs(target + 2, make_uint4(words[4], words[5], words[6], words[7]));
        return;
    }
    address += static_cast<uint64_t>(element) * kBytes;
    if constexpr (kBytes == 2) {
        __stcs(reinterpret_cast<uint4*>(address), make_uint4(words[0], words[1], words[2], words[3]));
    } else if constexpr (kBytes == 1) {
        __stcs(reinterpret_cast<uint2*>(address), make_uint2(words[0], words[1]));
    }
}

// Streams whose type is known only at run time: 2 or 4 bytes.
__device__ __forceinline__ void load(Packet<4>& packet, Element type, uint64_t address, uint32_t element) {
    if (type == Element::kFloat32) {
        load<4>(packet.words, address, element);
    } else {
        load<2>(packet.words, address, element);
    }
}

// The type is the same for a whole chunk: branches around the loops, not selects inside.
__device__ __forceinline__ void decode(float* values, Packet<4>& packet, Element type) {
    if (type == Element::kFloat32) {
        exchange(packet.words);
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] = bits_float(packet.words[i]);
    } else if (type == Element::kBFloat16) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] = bfloat16_decode(get<2>(packet.words, i));
    } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] = float16_decode(get<2>(packet.words, i));
    }
}

template <bool rotating>
__device__ __forceinline__ uint16_t encode_bfloat16(float value, uint32_t bits) {
    return rotating ? bfloat16_rotating(value, bits) : bfloat16_nearest_even(value);
}

template <bool rotating>
__device__ __forceinline__ uint16_t encode_float16(float value, uint32_t bits) {
    return rotating ? float16_rotating(value, bits) : float16_nearest_even(value);
}

// The value itself, in a way that keeps the compiler from computing it on paths where it is not wanted.
__device__ __forceinline__ float rare(float x) {
    asm volatile("" : "+f"(x));
    return x;
}

// Whether all magnitudes lie safely below BF16's largest, where encoders need no special cases.
__device__ __forceinline__ bool all_moderate(const float* values) {
    float sum = fabsf(values[0]);
#pragma unroll
    for (int i = 1; i < kVector; ++i) sum += fabsf(values[i]);
    return sum < 3.0e38f;
}

template <bool rotating>
__device__ __forceinline__ void encode_bfloat16_words(uint32_t* words, const float* values, uint32_t octet,
                                                      const Rounding& rounding) {
    uint32_t codes[kVector];
    if (all_moderate(values)) {
        if constexpr (rotating) {
#pragma unroll
            for (int i = 0; i < kVector; ++i) codes[i] = float_bits(values[i]) + (rounding.bits(octet, i) >> 16);
#pragma unroll
            for (int k = 0; k < 4; ++k) words[k] = pack_high(codes[2 * k], codes[2 * k + 1]);
        } else {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[k]) : "f"(values[2 * k + 1]), "f"(values[2 * k]));
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            codes[i] = encode_bfloat16<rotating>(values[i], rounding.bits(octet, i));
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) words[k] = pack_low(codes[2 * k], codes[2 * k + 1]);
    }
}

// `octet`: rounding bits of the first element, see Rounding.
template <bool rotating>
__device__ __forceinline__ void store(const float* values, uint32_t octet, const Rounding& rounding, Element type,
                                      uint64_t address, uint32_t element) {
    uint32_t words[kVector];
    if (type == Element::kFloat32) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) words[i] = float_bits(values[i]);
        exchange(words);
        return store<4>(words, address, element);
    }
    if (type == Element::kBFloat16) {
        encode_bfloat16_words<rotating>(words, values, octet, rounding);
    } else {
        uint32_t codes[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            codes[i] = encode_float16<rotating>(values[i], rounding.bits(octet, i));
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) words[k] = pack_low(codes[2 * k], codes[2 * k + 1]);
    }
    store<2>(words, address, element);
}

// ---------------------------------------------------------------------------------------------------------------
// Codecs of eight elements: the functions of formats.h on packed words

template <int kBytes>
__device__ __forceinline__ void pack_codes(uint32_t* words, const uint32_t* codes) {
    if constexpr (kBytes == 1) {
#pragma unroll
        for (int k = 0; k < 2; ++k) words[k] = pack_bytes<0>(codes + 4 * k);
    } else {
#pragma unroll
        for (int k = 0; k < 4; ++k) words[k] = pack_low(codes[2 * k], codes[2 * k + 1]);
    }
}

__device__ __forceinline__ bool has_zero_byte(uint32_t word) {
    return ((word - 0x01010101u) & ~word & 0x80808080u) != 0;
}

// BF16 parameters and remainders. Both directions rest on: joined = (parameter:remainder ^ 0x8000) - 0x8000.
template <int low_bytes>
__device__ __forceinline__ void join_words(float* values, const uint32_t* high, const uint32_t* low) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        uint32_t word;
        if constexpr (low_bytes == 2) {
            word = __byte_perm(low[i / 2] ^ 0x80008000u, high[i / 2], i % 2 ? 0x7632 : 0x5410);
        } else {
            uint32_t others = i % 2 ? 0xFF00FF00u : 0x00FF00FFu;  // a zero byte beside the remainder goes below it
            constexpr uint32_t selectors[4] = {0x5401, 0x7610, 0x5423, 0x7632};
            word = __byte_perm((low[i / 4] ^ 0x80808080u) & others, high[i / 2], selectors[i % 4]);
        }
        values[i] = bits_float(word - 0x8000u);
    }
}

template <int low_bytes>
__device__ __forceinline__ void split_words(float* values, uint32_t* high, uint32_t* low) {
    if (!all_moderate(values)) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] = is_nan(rare(values[i])) ? bits_float(kQuietNaN) : values[i];
    }
    uint32_t carried[kVector];  // into the parameter's half
#pragma unroll
    for (int i = 0; i < kVector; ++i) carried[i] = float_bits(values[i]) + (low_bytes == 2 ? 0x8000u : 0x8080u);
#pragma unroll
    for (int k = 0; k < 4; ++k) high[k] = pack_high(carried[2 * k], carried[2 * k + 1]);
    if constexpr (low_bytes == 2) {
#pragma unroll
        for (int k = 0; k < 4; ++k) low[k] = pack_low(carried[2 * k], carried[2 * k + 1]) ^ 0x80008000u;
    } else {
#pragma unroll
        for (int k = 0; k < 2; ++k) low[k] = pack_bytes<1>(carried + 4 * k) ^ 0x80808080u;
    }
}

template <class Codec>
__device__ __forceinline__ void decode_words(float* values, const uint32_t* words, float scale) {
    constexpr int bytes = sizeof(typename Codec::Bits);
    if constexpr (Codec::format == Format::kInt8) {
        // A code in the last places of 2^23. Signed ones are offset by 128; 2^23 * scale is exact, so unsigned ones
        // need no subtraction of their own.
        constexpr bool is_signed = static_cast<typename Codec::Bits>(-1) < 0;
        const float zero = -8388608.0f * scale;
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            uint32_t word = is_signed ? words[i / 4] ^ 0x80808080u : words[i / 4];
            float code = bits_float(__byte_perm(word, 0x4B000000u, 0x7650u + i % 4));
            values[i] = Codec::expand(is_signed ? (code - 8388736.0f) * scale : fused(code, scale, zero));
        }
#if __CUDA_ARCH__ >= 890
    } else if constexpr (Codec::format == Format::kFloat8) {
#pragma unroll
        for (int i = 0; i < kVector; i += 2) {
            uint16_t pair = static_cast<uint16_t>(words[i / 4] >> 8 * (i % 4));
            uint32_t halves;
            asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
            values[i] = Codec::expand(float16_decode(static_cast<uint16_t>(halves)) * scale);
            values[i + 1] = Codec::expand(float16_decode(static_cast<uint16_t>(halves >> 16)) * scale);
        }
#endif
    } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] = Codec::decode(get<bytes>(words, i), scale);
    }
}

#if __CUDA_ARCH__ >= 890
// To nearest even; what lies beyond the largest saturates.
__device__ __forceinline__ void encode_float8_words(uint32_t* words, const float* values) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        const float* x = values + 4 * k;
        uint16_t low, high;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x[1]), "f"(x[0]));
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x[3]), "f"(x[2]));
        words[k] = pack_low(low, high);
    }
}
#endif

// exp_avg
template <class Codec>
__device__ __forceinline__ void encode_words(uint32_t* words, const float* m, float inverse) {
#if __CUDA_ARCH__ >= 890
    if constexpr (Codec::format == Format::kFloat8) {
        float scaled[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) scaled[i] = m[i] * inverse;
        encode_float8_words(words, scaled);
    } else
#endif
    {
        uint32_t codes[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) codes[i] = Codec::encode(m[i], inverse);
        pack_codes<sizeof(typename Codec::Bits)>(words, codes);
    }
}

// exp_avg_sq
template <class Codec>
__device__ __forceinline__ void encode_words(uint32_t* words, const float* v, const float* root, float inverse,
                                             uint32_t octet, const Rounding& rounding) {
    uint32_t codes[kVector];
    if constexpr (sizeof(typename Codec::Bits) == 2) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            codes[i] = Codec::encode(v[i], root[i], inverse, rounding.bits(octet, i));
        }
        pack_codes<2>(words, codes);
    } else {
        constexpr int shift = Codec::format == Format::kFloat8 ? 4 : 1;  // brings the code to a byte
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            codes[i] = Codec::placed(root[i], inverse, rounding.bits(octet, i)) << shift;
        }
        constexpr int byte = Codec::format == Format::kFloat8 ? 3 : 2;
        words[0] = pack_bytes<byte>(codes);
        words[1] = pack_bytes<byte>(codes + 4);
        if (has_zero_byte(words[0]) || has_zero_byte(words[1])) {
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                uint32_t one = 1u << 8 * (i % 4);
                words[i / 4] |= (words[i / 4] & 0xFFu * one) == 0 && root[i] > 0.0f ? one : 0u;
            }
        }
    }
}

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

template <int count>
__device__ __forceinline__ float thread_absmax(const float* values) {
    float absmax = fabsf(values[0]);
#pragma unroll
    for (int i = 1; i < count; ++i) absmax = max_or_nan(absmax, fabsf(values[i]));
    return absmax;
}

// What a thread block needs to know of its chunk of a shard. Element 0 is the chunk's first, a multiple of kTile in its
// shard, so that nothing but the global index needs 64 bits.
struct View {
    uint64_t grad;
    uint64_t param;
    uint64_t master;
    uint64_t exp_avg;
    uint64_t exp_avg_sq;
    float* exp_avg_scales;
    float* exp_avg_sq_scales;
    uint64_t weight_scales;  // those of the chunk's blocks, or the whole weight's
    uint64_t absmax;
    uint64_t offset;
    uint64_t first;  // index in the shard of element 0
    Geometry geometry;
    uint32_t key;
    ShardInfo info;
    uint32_t count;         // elements of the chunk
    uint32_t vector_count;  // those that the vector walk updates, from element 0 on

    template <class Table>
    __device__ __forceinline__ void prepare(const Table& table, int shard, uint64_t begin) {
        info = table.info[shard];
        const uint64_t numel = table.numel[shard];
        grad = table.grad[shard] + begin * element_bytes(grad_type());
        param = table.param[shard] + begin * element_bytes(param_type());
        if constexpr (kHasWeights<Table>) prepare_weight(table, shard, begin);
        master = table.master[shard] + begin * master_bytes(master_kind());
        exp_avg = table.exp_avg[shard] + begin * format_bytes(exp_avg_format());
        exp_avg_sq = table.exp_avg_sq[shard] + begin * format_bytes(exp_avg_sq_format());
        exp_avg_scales = reinterpret_cast<float*>(table.scales[shard]) + (begin >> info.block_log2);
        exp_avg_sq_scales = exp_avg_scales;
        if (is_scaled(exp_avg_format())) {
            exp_avg_sq_scales += (numel + (1u << info.block_log2) - 1) >> info.block_log2;
        }
        offset = table.offset[shard];
        first = begin;
        geometry = table.geometries[info.geometry];
        key = table.key[shard];
        count = static_cast<uint32_t>(min(numel - begin, static_cast<uint64_t>(table.chunk)));
        vector_count = info.vectors ? count / kVectorSpan * kVectorSpan : 0;
    }

    __device__ __forceinline__ void prepare_weight(const WeightsTable& table, int shard, uint64_t begin) {
        absmax = table.absmax[shard];
        weight_scales = table.weight_scales[shard];
        if (!info.quantized) return;
        param = table.param[shard] ? table.param[shard] + begin : 0;
        if (weight_format() == WeightFormat::kFloat8Blocks) {
            weight_scales += begin / WeightCodec<WeightFormat::kFloat8Blocks>::kBlock * sizeof(float);
        } else if (weight_format() == WeightFormat::kMXFloat8) {
            weight_scales += begin / WeightCodec<WeightFormat::kMXFloat8>::kBlock;
        }
    }

    __device__ __forceinline__ WeightFormat weight_format() const {
        return static_cast<WeightFormat>(info.weight_format);
    }
    __device__ __forceinline__ Element grad_type() const { return static_cast<Element>(info.grad_type); }
    __device__ __forceinline__ Element param_type() const { return static_cast<Element>(info.param_type); }
    __device__ __forceinline__ Master master_kind() const { return static_cast<Master>(info.master); }
    __device__ __forceinline__ Format exp_avg_format() const { return static_cast<Format>(info.exp_avg); }
    __device__ __forceinline__ Format exp_avg_sq_format() const { return static_cast<Format>(info.exp_avg_sq); }

    __device__ __forceinline__ uint64_t global_index(uint64_t element) const {
        element += first;
        if (info.geometry == 0) return offset + element;
        return offset + element / geometry.inner_local * geometry.inner_global + element % geometry.inner_local;
    }
};

// What the threads of a block share, at a place that every function knows.
struct Block {
    View view;
    Scalars scalars;
    // Of the vector walk. Whole sectors are read before it and written after it: accesses of single scales, each of
    // which opens a DRAM page, would cost a fifth of the bandwidth.
    float exp_avg_scales[kMaxTilesPerChunk * kTile / kSmallestBlock];
    float exp_avg_sq_scales[kMaxTilesPerChunk * kTile / kSmallestBlock];
    uint32_t weight_scales[kMaxTilesPerChunk * kTile / kSpan];  // FP32, or four E8M0 of 32 elements each
    uint32_t weight_absmax;                                     // bits
    float weight_partial[kThreads / 32];                        // of the general walk

    template <class Table>
    __device__ __forceinline__ void prepare(const Table& table, uint32_t chunk) {
        weight_absmax = 0;
        uint32_t shard = table.bucket_shard[chunk >> table.bucket_log2];
        while (chunk >= table.first_chunk[shard + 1]) ++shard;
        view.prepare(table, shard, static_cast<uint64_t>(chunk - table.first_chunk[shard]) * table.chunk);
        const uint32_t group = view.info.group;
        scalars = table.device_scalars ? table.device_scalars[group] : table.scalars[group];
    }
};
extern __shared__ Block block[];

// ---------------------------------------------------------------------------------------------------------------
// Vector walk

// A moment between its load and its store.
template <class Codec>
struct Moment {
    static constexpr int kBytes = sizeof(typename Codec::Bits);
    Packet<kBytes> raw;

    __device__ __forceinline__ void load_raw(Format, uint64_t address, uint32_t element) {
        load<kBytes>(raw.words, address, element);
    }
    __device__ __forceinline__ void decode_all(float* values, Format, float scale) const {
        decode_words<Codec>(values, raw.words, scale);
    }
};

template <>
struct Moment<Plain> {
    Packet<4> raw{};

    __device__ __forceinline__ void load_raw(Format format, uint64_t address, uint32_t element) {
        load(raw, plain_type(format), address, element);
    }
    __device__ __forceinline__ void decode_all(float* values, Format format, float) {
        decode(values, raw, plain_type(format));
    }
};

// Sets the scale of a block and returns its inverse.
template <class Codec>
__device__ __forceinline__ float store_scale(float absmax, float* scale, int block_log2, uint32_t element) {
    absmax = lanes_max<kSpan / kVector>(absmax, (1 << block_log2) / kVector);
    BlockScale fresh = Codec::scale(float_bits(absmax));
    __syncwarp();  // every lane has read the old scale
    if ((element & ((1u << block_log2) - 1)) == 0) *scale = fresh.scale;
    return fresh.inverse;
}

template <int kBytes>
__device__ __forceinline__ void store_codes(uint32_t* words, float inverse, uint64_t address, uint32_t element) {
#pragma unroll
    for (int k = 0; k < 2 * kBytes; ++k) words[k] = inverse != 0.0f ? words[k] : 0u;
    store<kBytes>(words, address, element);
}

template <class MixType>
__device__ __forceinline__ void decode_param(float* values, const View& view, Packet<4>& param, Packet<4>& master) {
    if constexpr (MixType::master == Master::kParameter) {
        decode(values, param, view.param_type());
    } else if constexpr (MixType::master == Master::kFloat32) {
        decode(values, master, Element::kFloat32);
    } else {
        join_words<master_bytes(MixType::master)>(values, param.words, master.words);
    }
}

// Writes a thread's codes of a quantized weight and the scale of their block. Called by all lanes of a warp.
struct StoreWeight {
    const View& view;
    uint32_t element;
    const float* values;
    float largest;    // magnitude; infinity or NaN if some value is
    uint32_t finite;  // bits of the largest finite magnitude

    template <class Codec>
    __device__ __forceinline__ void operator()(Codec) const {
        if constexpr (kWrittenByUpdate<Codec>) {
            const float whole = Codec::kTensorScale ? *reinterpret_cast<const float*>(view.weight_scales) : 0.0f;
            const WeightBlock fresh = Codec::prepare(of_block<Codec>(), view.info.round_up, whole);
            using Scale = typename Codec::Scale;
            if constexpr (!std::is_void_v<Scale>) {
                if (element % Codec::kBlock == 0) {
                    reinterpret_cast<Scale*>(block->weight_scales)[element / Codec::kBlock] =
                        static_cast<Scale>(fresh.scale);
                }
            }
            encode<Codec>(fresh.inverse);
        }
    }

    template <class Codec>
    __device__ __forceinline__ Magnitudes of_block() const {
        Magnitudes found;
        if constexpr (!std::is_void_v<typename Codec::Scale>) {
            found.finite = finite;
#pragma unroll
            for (uint32_t lane = 1; lane < Codec::kBlock / kVector; lane *= 2) {
                found.finite = max(found.finite, __shfl_xor_sync(kWarp, found.finite, lane));
            }
        }
        return found;
    }

    template <class Codec>
    __device__ __forceinline__ void encode(float inverse) const {
        float scaled[kVector];
        uint32_t words[2];
#pragma unroll
        for (int i = 0; i < kVector; ++i) scaled[i] = values[i] * inverse;
#if __CUDA_ARCH__ >= 890
        if (largest * inverse < 3.0e38f) {  // else some may be NaN
            encode_float8_words(words, scaled);
        } else
#endif
        {
            uint32_t codes[kVector];
#pragma unroll
            for (int i = 0; i < kVector; ++i) codes[i] = Codec::nearest(scaled[i]);
            pack_codes<1>(words, codes);
        }
        store<1>(words, view.param, element);
    }
};

__device__ __forceinline__ void store_weight(const View& view, uint32_t element, const float* values) {
    const float largest = thread_absmax<kVector>(values);
    uint32_t finite = float_bits(largest);
    if (finite >= kInfinity) {
        Magnitudes magnitudes;
#pragma unroll
        for (int i = 0; i < kVector; ++i) magnitudes.add(rare(values[i]));
        finite = magnitudes.finite;
    }
    if (view.absmax) {
        const uint32_t of_warp = __reduce_max_sync(kWarp, finite);
        if (threadIdx.x % 32 == 0) atomicMax(&block->weight_absmax, of_warp);
    }
    if (view.param) dispatch_weight(view.weight_format(), StoreWeight{view, element, values, largest, finite});
}

template <class MixType>
__device__ __forceinline__ void store_param(const View& view, uint32_t element, float* values, uint32_t octet,
                                            const Rounding& rounding) {
    if constexpr (MixType::master == Master::kParameter) {
        store<true>(values, octet, rounding, view.param_type(), view.param, element);
    } else if constexpr (MixType::master == Master::kFloat32) {
        store<false>(values, 0, rounding, Element::kFloat32, view.master, element);
        if (MixType::has_weights && view.info.quantized) return store_weight(view, element, values);
        store<false>(values, 0, rounding, view.param_type(), view.param, element);
    } else {
        constexpr int low_bytes = master_bytes(MixType::master);
        uint32_t high[4], low[2 * low_bytes];
        split_words<low_bytes>(values, high, low);
        store<2>(high, view.param, element);
        store<low_bytes>(low, view.master, element);
    }
}

// All that a thread reads for eight elements.
template <class MixType>
struct Raw {
    Packet<4> grad{}, param{}, master{};  // zeros: unset words would stay alive across iterations
    Moment<typename MixType::M> m;
    Moment<typename MixType::V> v;

    __device__ __forceinline__ void load_all(const View& view, uint32_t element) {
        load(grad, view.grad_type(), view.grad, element);
        if constexpr (MixType::master == Master::kParameter) {
            load(param, view.param_type(), view.param, element);
        } else if constexpr (MixType::master == Master::kFloat32) {
            load<4>(master.words, view.master, element);
        } else {
            load<2>(param.words, view.param, element);
            load<master_bytes(MixType::master)>(master.words, view.master, element);
        }
        m.load_raw(view.exp_avg_format(), view.exp_avg, element);
        v.load_raw(view.exp_avg_sq_format(), view.exp_avg_sq, element);
    }
};

template <class MixType>
__device__ __forceinline__ void update_vector(const View& view, const Scalars& scalars, Raw<MixType>& raw,
                                              uint32_t element) {
    using M = typename MixType::M;
    using V = typename MixType::V;
    const Format m_format = view.exp_avg_format();
    const Format v_format = view.exp_avg_sq_format();
    float* m_scale = &block->exp_avg_scales[element >> view.info.block_log2];
    float* v_scale = &block->exp_avg_sq_scales[element >> view.info.block_log2];

    float grad[kVector], param[kVector], m[kVector], v[kVector], root[kVector];
    decode(grad, raw.grad, view.grad_type());
    decode_param<MixType>(param, view, raw.param, raw.master);
    raw.m.decode_all(m, m_format, *m_scale);
    raw.v.decode_all(v, v_format, *v_scale);
    if (!scalars.plain_gradient) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) grad[i] = scaled_gradient(grad[i], scalars);
        if (scalars.l2_penalty != 0.0f) {
#pragma unroll
            for (int i = 0; i < kVector; ++i) grad[i] = penalized_gradient(grad[i], param[i], scalars);
        }
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        Moments moments = next_moments(grad[i], m[i], v[i], scalars);
        m[i] = moments.exp_avg;
        v[i] = moments.exp_avg_sq;
        root[i] = square_root(v[i]);
    }
    const float v_max = thread_absmax<kVector>(v);
    if (float_bits(v_max) >= kInfinity) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) root[i] = root_of(rare(v[i]));
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) param[i] = next_param(param[i], m[i], root[i], scalars);

    uint32_t octet = 0;
    if (v_format != Format::kFloat32 ||
        (MixType::master == Master::kParameter && view.param_type() != Element::kFloat32)) {
        octet = scalars.rounding.octet(view.key, view.global_index(element));
    }
    store_param<MixType>(view, element, param, octet, scalars.rounding);
    if constexpr (MixType::exp_avg_scaled) {
        float inverse = store_scale<M>(thread_absmax<kVector>(m), m_scale, view.info.block_log2, element);
        uint32_t words[2 * sizeof(typename M::Bits)];
        encode_words<M>(words, m, inverse);
        store_codes<sizeof(typename M::Bits)>(words, inverse, view.exp_avg, element);
    } else {
        store<false>(m, 0, scalars.rounding, plain_type(m_format), view.exp_avg, element);
    }
    if constexpr (MixType::exp_avg_sq_scaled) {
        float inverse = store_scale<V>(v_max, v_scale, view.info.block_log2, element);
        uint32_t words[2 * sizeof(typename V::Bits)];
        encode_words<V>(words, v, root, inverse, octet, scalars.rounding);
        store_codes<sizeof(typename V::Bits)>(words, inverse, view.exp_avg_sq, element);
    } else {
        store<true>(v, octet, scalars.rounding, plain_type(v_format), view.exp_avg_sq, element);
    }
}

template <class T>
__device__ __forceinline__ void copy_scales(T* target, const T* source, uint32_t count) {
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) target[i] = source[i];
}

struct CopyWeightScales {
    const View& view;

    template <class Codec>
    __device__ __forceinline__ void operator()(Codec) const {
        using Scale = typename Codec::Scale;
        if constexpr (kWrittenByUpdate<Codec> && !std::is_void_v<Scale>) {
            copy_scales(reinterpret_cast<Scale*>(view.weight_scales),
                        reinterpret_cast<const Scale*>(block->weight_scales), view.vector_count / Codec::kBlock);
        }
    }
};

// The loads of the next eight elements are under way while a thread updates the ones before, where registers allow it.
template <class MixType>
__device__ __forceinline__ void walk_elements(const View& view, const Scalars& scalars, Raw<MixType>& raw) {
    constexpr bool prefetches = MixType::exp_avg_scaled || MixType::exp_avg_sq_scaled;
    uint32_t element = threadIdx.x * kVector;
    if (element >= view.vector_count) return;
    for (uint32_t next = element + kTile; next < view.vector_count; next += kTile) {
        Raw<MixType> ahead;
        if (prefetches) ahead.load_all(view, next);
        update_vector<MixType>(view, scalars, raw, element);
        if (!prefetches) ahead.load_all(view, next);
        raw = ahead;
        element = next;
    }
    update_vector<MixType>(view, scalars, raw, element);
}

template <class MixType>
__device__ __forceinline__ void vector_walk() {
    const View view = block->view;
    const Scalars scalars = block->scalars;
    const uint32_t blocks = view.vector_count >> view.info.block_log2;
    Raw<MixType> raw;
    if (threadIdx.x * kVector < view.vector_count) raw.load_all(view, threadIdx.x * kVector);
    if constexpr (MixType::exp_avg_scaled) copy_scales(block->exp_avg_scales, view.exp_avg_scales, blocks);
    if constexpr (MixType::exp_avg_sq_scaled) copy_scales(block->exp_avg_sq_scales, view.exp_avg_sq_scales, blocks);
    __syncthreads();
    walk_elements<MixType>(view, scalars, raw);
    __syncthreads();
    if constexpr (MixType::exp_avg_scaled) copy_scales(view.exp_avg_scales, block->exp_avg_scales, blocks);
    if constexpr (MixType::exp_avg_sq_scaled) copy_scales(view.exp_avg_sq_scales, block->exp_avg_sq_scales, blocks);
    if constexpr (MixType::has_weights) {
        if (view.info.quantized && view.param) dispatch_weight(view.weight_format(), CopyWeightScales{view});
    }
}

// ---------------------------------------------------------------------------------------------------------------
// General walk

template <class T>
__device__ __forceinline__ T& at(uint64_t address, uint64_t element) {
    return reinterpret_cast<T*>(address)[element];
}

__device__ __forceinline__ float load_element(Element type, uint64_t address, uint64_t element) {
    if (type == Element::kFloat32) return at<float>(address, element);
    uint16_t raw = at<uint16_t>(address, element);
    return type == Element::kBFloat16 ? bfloat16_decode(raw) : float16_decode(raw);
}

template <bool rotating>
__device__ __forceinline__ void store_element(Element type, uint64_t address, uint64_t element, float value,
                                              uint32_t bits) {
    if (type == Element::kFloat32) {
        at<float>(address, element) = value;
    } else if (type == Element::kBFloat16) {
        at<uint16_t>(address, element) = encode_bfloat16<rotating>(value, bits);
    } else {
        at<uint16_t>(address, element) = encode_float16<rotating>(value, bits);
    }
}

__device__ __forceinline__ float load_master(const View& view, uint64_t element) {
    switch (view.master_kind()) {
        case Master::kParameter: return load_element(view.param_type(), view.param, element);
        case Master::kFloat32: return at<float>(view.master, element);
        case Master::kRemainder16:
            return join_remainder16(at<uint16_t>(view.param, element), at<int16_t>(view.master, element));
        default: return join_remainder8(at<uint16_t>(view.param, element), at<int8_t>(view.master, element));
    }
}

__device__ __forceinline__ void store_master(const View& view, uint64_t element, float value, uint32_t bits) {
    const Master kind = view.master_kind();
    if (kind == Master::kParameter) return store_element<true>(view.param_type(), view.param, element, value, bits);
    if (kind == Master::kFloat32) {
        at<float>(view.master, element) = value;
        if (!view.info.quantized) store_element<false>(view.param_type(), view.param, element, value, 0);
        return;
    }
    Split split = kind == Master::kRemainder16 ? split_remainder16(value) : split_remainder8(value);
    at<uint16_t>(view.param, element) = split.high;
    if (kind == Master::kRemainder16) {
        at<int16_t>(view.master, element) = split.low;
    } else {
        at<int8_t>(view.master, element) = static_cast<int8_t>(split.low);
    }
}

// The codecs that a kernel's general walk knows beside elements: those of one mix, or all.
template <class M, class V>
struct OwnCodecs {
    template <class Visitor>
    __device__ __forceinline__ static void exp_avg(Format format, const Visitor& visit) {
        is_scaled(format) ? visit(M{}) : visit(Plain{});
    }
    template <class Visitor>
    __device__ __forceinline__ static void exp_avg_sq(Format format, const Visitor& visit) {
        is_scaled(format) ? visit(V{}) : visit(Plain{});
    }
};

struct AllCodecs {
    template <class Visitor>
    __device__ __forceinline__ static void exp_avg(Format format, const Visitor& visit) {
        dispatch_codec<ExpAvg>(format, visit);
    }
    template <class Visitor>
    __device__ __forceinline__ static void exp_avg_sq(Format format, const Visitor& visit) {
        dispatch_codec<ExpAvgSq>(format, visit);
    }
};

struct LoadMoment {
    Format format;
    uint64_t address;
    uint32_t element;
    const float* scales;
    int block_log2;
    float& value;

    __device__ __forceinline__ void operator()(Plain) const {
        value = load_element(plain_type(format), address, element);
    }
    template <class Codec>
    __device__ __forceinline__ void operator()(Codec) const {
        value = Codec::decode(at<typename Codec::Bits>(address, element), scales[element >> block_log2]);
    }
};

// The largest value among the 32, 64 or 128 neighbouring threads that hold a block. `partial`: shared, a slot per warp.
__device__ __forceinline__ float neighbours_max(float x, int block_log2, float* partial) {
    x = lanes_max<32>(x, 32);
    if (block_log2 == 5) return x;
    const uint32_t warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) partial[warp] = x;
    __syncthreads();
    x = max_or_nan(x, partial[warp ^ 1]);
    return block_log2 == 6 ? x : max_or_nan(x, max_or_nan(partial[warp ^ 2], partial[warp ^ 3]));
}

template <class Codec>
struct IsExpAvg : std::false_type {};
template <Format format>
struct IsExpAvg<ExpAvg<format>> : std::true_type {};

// Called by all threads; those beyond the end, which are not `inside`, hold a zero.
struct StoreMoment {
    Format format;
    uint64_t address;
    uint32_t element;
    bool inside;
    bool rotates;  // exp_avg_sq
    float value;
    float root;
    uint32_t bits;
    float* scales;
    int block_log2;
    float* partial;  // shared: one slot per warp

    __device__ __forceinline__ void operator()(Plain) const {
        if (!inside) return;
        if (rotates) {
            store_element<true>(plain_type(format), address, element, value, bits);
        } else {
            store_element<false>(plain_type(format), address, element, value, 0);
        }
    }
    template <class Codec>
    __device__ __forceinline__ void operator()(Codec) const {
        BlockScale fresh = Codec::scale(float_bits(block_max(fabsf(value))));
        if (!inside) return;
        if ((element & ((1u << block_log2) - 1)) == 0) scales[element >> block_log2] = fresh.scale;
        uint32_t code;
        if constexpr (IsExpAvg<Codec>::value) {
            code = Codec::encode(value, fresh.inverse);
        } else {
            code = Codec::encode(value, root, fresh.inverse, bits);
        }
        at<typename Codec::Bits>(address, element) =
            static_cast<typename Codec::Bits>(fresh.inverse != 0.0f ? code : 0u);
    }
    __device__ __forceinline__ float block_max(float x) const { return neighbours_max(x, block_log2, partial); }
};

// As the vector walk's, of one element per thread.
struct StoreWeightElement {
    const View& view;
    uint32_t element;
    bool inside;
    float value;

    template <class Codec>
    __device__ __forceinline__ void operator()(Codec) const {
        if constexpr (kWrittenByUpdate<Codec>) {
            using Scale = typename Codec::Scale;
            Magnitudes magnitudes;
            if constexpr (!std::is_void_v<Scale>) {
                constexpr int block_log2 = Codec::kBlock == 32 ? 5 : 7;
                static_assert(Codec::kBlock == 1u << block_log2, "as many threads as a block has elements");
                magnitudes.finite = float_bits(neighbours_max(bits_float(finite()), block_log2, block->weight_partial));
            }
            if (!inside) return;
            const float whole = Codec::kTensorScale ? *reinterpret_cast<const float*>(view.weight_scales) : 0.0f;
            const WeightBlock fresh = Codec::prepare(magnitudes, view.info.round_up, whole);
            if constexpr (!std::is_void_v<Scale>) {
                if (element % Codec::kBlock == 0) {
                    at<Scale>(view.weight_scales, element / Codec::kBlock) = static_cast<Scale>(fresh.scale);
                }
            }
            at<uint8_t>(view.param, element) = static_cast<uint8_t>(Codec::nearest(value * fresh.inverse));
        }
    }
    __device__ __forceinline__ uint32_t finite() const {
        const uint32_t bits = magnitude_bits(value);
        return bits < kInfinity ? bits : 0u;
    }
};

// Called by all threads; those that are not `inside` hold a zero.
__device__ __forceinline__ void store_weight_element(const View& view, uint32_t element, bool inside, float value) {
    const StoreWeightElement store{view, element, inside, value};
    if (view.absmax) {
        const uint32_t largest = __reduce_max_sync(kWarp, store.finite());
        if (threadIdx.x % 32 == 0) atomicMax(&block->weight_absmax, largest);
    }
    if (view.param) dispatch_weight(view.weight_format(), store);
}

// Elements that the vector walk leaves: each thread of the block updates one.
template <class Codecs, bool has_weights>
__device__ __noinline__ void general_walk() {
    const View& view = block->view;
    const Scalars& scalars = block->scalars;
    const int block_log2 = view.info.block_log2;
    const Format m_format = view.exp_avg_format(), v_format = view.exp_avg_sq_format();
    for (uint32_t first = view.vector_count; first < view.count; first += kThreads) {
        const uint32_t element = first + threadIdx.x;
        const bool inside = element < view.count;
        float m = 0.0f, v = 0.0f, root = 0.0f, param = 0.0f;
        uint32_t bits = 0;
        if (inside) {
            Codecs::exp_avg(m_format, LoadMoment{m_format, view.exp_avg, element, view.exp_avg_scales, block_log2, m});
            Codecs::exp_avg_sq(v_format,
                               LoadMoment{v_format, view.exp_avg_sq, element, view.exp_avg_sq_scales, block_log2, v});
            float grad = scaled_gradient(load_element(view.grad_type(), view.grad, element), scalars);
            param = load_master(view, element);
            if (scalars.l2_penalty != 0.0f) grad = penalized_gradient(grad, param, scalars);
            Moments moments = next_moments(grad, m, v, scalars);
            m = moments.exp_avg;
            v = moments.exp_avg_sq;
            root = root_of(v);
            const uint64_t global = view.global_index(element);
            const uint32_t octet = scalars.rounding.octet(view.key, global);
            bits = scalars.rounding.bits(octet, static_cast<uint32_t>(global));
            param = next_param(param, m, root, scalars);
            store_master(view, element, param, bits);
        }
        __syncthreads();  // every thread has read the old scales, and the partial maxima of the round before
        if (has_weights && view.info.quantized) store_weight_element(view, element, inside, param);
        Codecs::exp_avg(m_format, StoreMoment{m_format, view.exp_avg, element, inside, false, m, root, bits,
                                              view.exp_avg_scales, block_log2, block->exp_avg_scales});
        Codecs::exp_avg_sq(v_format, StoreMoment{v_format, view.exp_avg_sq, element, inside, true, v, root, bits,
                                                 view.exp_avg_sq_scales, block_log2, block->exp_avg_sq_scales});
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Kernels

// A kernel for steps that consist of one mix, but for few elements: norms and biases, whose states are FP32.
template <class MixType>
struct OneMix {
    static constexpr bool scaled = MixType::exp_avg_scaled || MixType::exp_avg_sq_scaled;
    // Measured on an H200. Without scales nothing is gained by more than a tile; more warps hide the loads' latency.
    static constexpr int kBlocksPerMultiprocessor = scaled ? 6 : 7;
    static constexpr int kTilesPerChunk = scaled ? kMaxTilesPerChunk : 1;
    using Table = std::conditional_t<MixType::has_weights, WeightsTable, PlainTable>;

    __device__ __forceinline__ static void vectors() { vector_walk<MixType>(); }
    __device__ __forceinline__ static void others() {
        general_walk<OwnCodecs<typename MixType::M, typename MixType::V>, MixType::has_weights>();
    }
};

template <class MixType>
__device__ __noinline__ void called_vector_walk() {
    vector_walk<MixType>();
}

// Pairs of moment formats that have a vector walk in the kernel for all mixes; others take the general one.
FUSED_OPTIM_HD constexpr bool has_vector_walk(Format exp_avg, Format exp_avg_sq) {
    return !is_scaled(exp_avg) || !is_scaled(exp_avg_sq) || exp_avg == exp_avg_sq;
}

struct CallVectorWalk {
    template <class MixType>
    __device__ __forceinline__ void operator()(MixType) const {
        if constexpr (has_vector_walk(MixType::M::format, MixType::V::format)) called_vector_walk<MixType>();
    }
};

// The kernel for all other steps. Its walks are functions that are called: inlined, they would share their registers.
struct AnyMix {
    static constexpr int kBlocksPerMultiprocessor = 4;
    static constexpr int kTilesPerChunk = kMaxTilesPerChunk;
    using Table = PlainTable;

    __device__ __forceinline__ static void vectors() {
        const View& view = block->view;
        dispatch(view.master_kind(), view.exp_avg_format(), view.exp_avg_sq_format(), CallVectorWalk{});
    }
    __device__ __forceinline__ static void others() { general_walk<AllCodecs, false>(); }
};

// One thread block per chunk: the hardware hands them out in order, which evens out that some multiprocessors reach
// memory faster than others, and keeps the addresses in use close together.
template <class Walks>
__global__ void __launch_bounds__(kThreads, Walks::kBlocksPerMultiprocessor)
    multi_tensor_adam(const __grid_constant__ typename Walks::Table table) {
    if (threadIdx.x == 0) block->prepare(table, blockIdx.x);
    __syncthreads();
    if (block->scalars.skipped) return;
    if (block->view.vector_count > 0) Walks::vectors();
    if (block->view.vector_count < block->view.count) Walks::others();
    if constexpr (kHasWeights<typename Walks::Table>) {
        if (!block->view.absmax) return;
        __syncthreads();
        if (threadIdx.x == 0) atomicMax(reinterpret_cast<uint32_t*>(block->view.absmax), block->weight_absmax);
    }
}

constexpr int kHypersPerLaunch = 128;

struct HyperTable {
    Hyper groups[kHypersPerLaunch];
    uint32_t count;
    Scalars* scalars;
};
static_assert(sizeof(HyperTable) <= kParameterLimit, "the table must fit into the kernel's parameters");

// Where hyperparameters lie in device memory: derives what multi_tensor_adam reads and counts the step.
__global__ void multi_tensor_adam_scalars(const __grid_constant__ HyperTable table) {
    if (threadIdx.x >= table.count) return;
    const Hyper& hyper = table.groups[threadIdx.x];
    const Scalars scalars = derive(hyper);
    table.scalars[threadIdx.x] = scalars;
    if (hyper.step_pointer && !scalars.skipped) *hyper.step_pointer += 1;
}

constexpr const char* kName = "multi_tensor_adam";  // in errors

bool is_aligned(uint64_t address, int bytes_per_element) { return address % (bytes_per_element == 1 ? 8 : 16) == 0; }

bool is_aligned(const Shard& s) {
    return is_aligned(s.grad, element_bytes(s.grad_type)) &&
           is_aligned(s.param, s.quantized ? 1 : element_bytes(s.param_type)) &&
           is_aligned(s.exp_avg, format_bytes(s.exp_avg_format)) &&
           is_aligned(s.exp_avg_sq, format_bytes(s.exp_avg_sq_format)) &&
           (s.master_kind == Master::kParameter || is_aligned(s.master, master_bytes(s.master_kind)));
}

bool is_plain(const Shard& s) { return s.inner_local >= s.numel; }

// A thread's elements are an aligned octet of consecutive global elements.
bool has_octets(const Shard& s) {
    return s.offset % kVector == 0 && (is_plain(s) || (s.inner_local % kVector == 0 && s.inner_global % kVector == 0));
}

bool rounds(const Shard& s) {
    return s.exp_avg_sq_format != Format::kFloat32 ||
           (s.master_kind == Master::kParameter && s.param_type != Element::kFloat32);
}

// One of the kernels, and what the host needs to know of it.
template <class Table>
struct Kernel {
    void (*function)(Table);
    int tiles_per_chunk;
    bool any_mix;
    Master master;  // the mix, where there is one
    Format exp_avg;
    Format exp_avg_sq;
    std::atomic<int> resident[kMaxDevices] = {};  // thread blocks that run at once, by device

    int resident_blocks(int device) {
        std::atomic<int>& known = resident[std::min(device, kMaxDevices - 1)];
        if (int blocks = known.load(std::memory_order_relaxed)) return blocks;
        int multiprocessors = 0, blocks = 0;
        check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), kName, device);
        check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, kThreads, sizeof(Block)), kName,
                   device);
        known.store(std::max(1, multiprocessors * blocks), std::memory_order_relaxed);
        return known;
    }
    bool is_mix_of(const Shard& s) const {
        return s.master_kind == master && codec_format(s.exp_avg_format) == exp_avg &&
               codec_format(s.exp_avg_sq_format) == exp_avg_sq;
    }
    bool walks_vectors(const Shard& s) const {
        return any_mix ? has_vector_walk(s.exp_avg_format, s.exp_avg_sq_format) : is_mix_of(s);
    }
    // Whether the general walk can update a shard.
    bool knows(const Shard& s) const {
        return any_mix || ((!is_scaled(s.exp_avg_format) || s.exp_avg_format == exp_avg) &&
                           (!is_scaled(s.exp_avg_sq_format) || s.exp_avg_sq_format == exp_avg_sq));
    }
};

template <Master master, class M, class V, bool has_weights>
auto make_kernel() {
    using Walks = OneMix<Mix<master, M, V, has_weights>>;
    return Kernel<typename Walks::Table>{
        multi_tensor_adam<Walks>, Walks::kTilesPerChunk, false, master, M::format, V::format};
}

template <class Table>
using KernelsOfMaster = std::array<Kernel<Table>, 4>;

template <Master master, class Table>
KernelsOfMaster<Table> make_kernels() {
    constexpr bool weights = kHasWeights<Table>;
    return {make_kernel<master, Plain, Plain, weights>(),
            make_kernel<master, ExpAvg<Format::kFloat16>, ExpAvgSq<Format::kFloat16>, weights>(),
            make_kernel<master, ExpAvg<Format::kFloat8>, ExpAvgSq<Format::kFloat8>, weights>(),
            make_kernel<master, ExpAvg<Format::kInt8>, ExpAvgSq<Format::kInt8>, weights>()};
}

struct Kernels {
    std::array<KernelsOfMaster<PlainTable>, 4> of_one_mix = {
        make_kernels<Master::kParameter, PlainTable>(), make_kernels<Master::kFloat32, PlainTable>(),
        make_kernels<Master::kRemainder16, PlainTable>(), make_kernels<Master::kRemainder8, PlainTable>()};
    Kernel<PlainTable> of_any_mix{multi_tensor_adam<AnyMix>, AnyMix::kTilesPerChunk, true};
    KernelsOfMaster<WeightsTable> with_weights = make_kernels<Master::kFloat32, WeightsTable>();
};

Kernels& kernels() {
    static Kernels all;
    return all;
}

using Shards = std::vector<Shard>;

// The kernel made for the mix of nearly all elements, if there is one and it knows the rest.
template <class Table>
Kernel<Table>* find_kernel(KernelsOfMaster<Table>& candidates, const Shards& shards) {
    uint64_t total = 0;
    for (const Shard& s : shards) total += s.numel;
    for (Kernel<Table>& kernel : candidates) {
        uint64_t others = 0;
        bool fits = true;
        for (const Shard& s : shards) {
            if (kernel.is_mix_of(s)) continue;
            others += s.numel;
            fits = fits && kernel.knows(s);
            if (!fits || others > total / 64) break;
        }
        if (fits && others <= total / 64) return &kernel;
    }
    return nullptr;
}

Kernel<PlainTable>& choose_kernel(const Shards& shards) {
    for (auto& of_one_master : kernels().of_one_mix) {
        if (Kernel<PlainTable>* kernel = find_kernel(of_one_master, shards)) return *kernel;
    }
    return kernels().of_any_mix;
}

// Fills a table until one of its limits is reached.
template <class Table>
class TableBuilder {
public:
    explicit TableBuilder(Kernel<Table>& kernel) : kernel_(kernel) { reset(); }

    bool add_group(const Scalars& scalars) {
        if (table_.group_count == kMaxGroups) return false;
        table_.scalars[table_.group_count++] = scalars;
        return true;
    }

    bool add_shard(const Shard& s) {
        int geometry = find_geometry(s);
        if (table_.shard_count == Table::kShards || geometry < 0) return false;
        int i = static_cast<int>(table_.shard_count++);
        table_.grad[i] = s.grad;
        table_.param[i] = s.param;
        table_.master[i] = s.master;
        table_.exp_avg[i] = s.exp_avg;
        table_.exp_avg_sq[i] = s.exp_avg_sq;
        table_.scales[i] = s.scales;
        table_.numel[i] = s.numel;
        table_.offset[i] = s.offset;
        table_.key[i] = s.key;
        if constexpr (kHasWeights<Table>) {
            table_.weight_scales[i] = s.weight_scales;
            table_.absmax[i] = s.absmax;
        }
        ShardInfo info{};
        info.master = static_cast<uint32_t>(s.master_kind);
        info.exp_avg = static_cast<uint32_t>(s.exp_avg_format);
        info.exp_avg_sq = static_cast<uint32_t>(s.exp_avg_sq_format);
        info.grad_type = static_cast<uint32_t>(s.grad_type);
        info.param_type = static_cast<uint32_t>(s.param_type);
        info.block_log2 = s.block_log2;
        info.quantized = s.quantized;
        info.round_up = s.round_up;
        info.weight_format = static_cast<uint32_t>(s.weight_format);
        info.vectors = is_aligned(s) && (has_octets(s) || !rounds(s)) && kernel_.walks_vectors(s);
        info.group = table_.group_count - 1;
        info.geometry = static_cast<uint32_t>(geometry);
        table_.info[i] = info;
        return true;
    }

    // Cuts the shards into chunks and returns the table.
    const Table& finish(int device, const Scalars* device_scalars) {
        uint64_t total = 0;
        for (uint32_t i = 0; i < table_.shard_count; ++i) total += table_.numel[i];
        const uint64_t wanted = static_cast<uint64_t>(kTile) * kernel_.resident_blocks(device) * kChunksPerBlock;
        const uint64_t tiles = std::min<uint64_t>(total / wanted, kernel_.tiles_per_chunk);
        table_.chunk = static_cast<uint32_t>(kTile * std::max<uint64_t>(tiles, 1));
        table_.first_chunk[0] = 0;
        for (uint32_t i = 0; i < table_.shard_count; ++i) {
            uint64_t chunks = (table_.numel[i] + table_.chunk - 1) / table_.chunk;
            table_.first_chunk[i + 1] = table_.first_chunk[i] + static_cast<uint32_t>(chunks);
        }
        fill_buckets();
        table_.device_scalars = device_scalars;
        return table_;
    }

    void reset() {
        table_.shard_count = table_.group_count = 0;
        table_.geometry_count = 1;  // 0 stands for consecutive elements
    }

private:
    void fill_buckets() {
        const uint32_t chunks = table_.first_chunk[table_.shard_count];
        table_.bucket_log2 = 0;
        while (chunks >> table_.bucket_log2 >= kBuckets) ++table_.bucket_log2;
        uint16_t shard = 0;
        for (uint32_t bucket = 0; bucket << table_.bucket_log2 < chunks; ++bucket) {
            while (bucket << table_.bucket_log2 >= table_.first_chunk[shard + 1]) ++shard;
            table_.bucket_shard[bucket] = shard;
        }
    }

    int find_geometry(const Shard& s) {
        if (is_plain(s)) return 0;
        for (uint32_t i = 1; i < table_.geometry_count; ++i) {
            const Geometry& known = table_.geometries[i];
            if (known.inner_local == s.inner_local && known.inner_global == s.inner_global) return i;
        }
        if (table_.geometry_count == kMaxGeometries) return -1;
        table_.geometries[table_.geometry_count] = {s.inner_local, s.inner_global};
        return static_cast<int>(table_.geometry_count++);
    }

    Kernel<Table>& kernel_;
    Table table_;
};

bool reads_device(const Hyper& h) {
    return h.lr_pointer || h.grad_scale || h.grad_factor || h.found_inf || h.step_pointer;
}

// Writes the scalars of all groups to device memory.
void launch_scalars(const std::vector<Hyper>& groups, Scalars* scalars, int device, cudaStream_t stream) {
    for (size_t first = 0; first < groups.size(); first += kHypersPerLaunch) {
        HyperTable table{};
        table.count = static_cast<uint32_t>(std::min<size_t>(groups.size() - first, kHypersPerLaunch));
        std::copy_n(groups.begin() + static_cast<int64_t>(first), table.count, table.groups);
        table.scalars = scalars + first;
        multi_tensor_adam_scalars<<<1, kHypersPerLaunch, 0, stream>>>(table);
        check_cuda(cudaGetLastError(), "multi_tensor_adam_scalars", device);
    }
}

}  // namespace

void load_adam_kernels(int device) {
    CudaDeviceGuard guard(kName, device);
    load_kernel(multi_tensor_adam_scalars, kName, device);
    for (const auto& of_one_master : kernels().of_one_mix) {
        for (const auto& kernel : of_one_master) load_kernel(kernel.function, kName, device);
    }
    load_kernel(kernels().of_any_mix.function, kName, device);
    for (const auto& kernel : kernels().with_weights) load_kernel(kernel.function, kName, device);
}

size_t workspace_bytes(const Step& step) { return step.groups.size() * sizeof(Scalars); }

bool writes_weights_cuda(Format exp_avg, Format exp_avg_sq) {
    return codec_format(exp_avg) == codec_format(exp_avg_sq);
}

namespace {

// Launches over some of a step's shards.
struct Launcher {
    const std::vector<Hyper>& groups;
    const Scalars* device_scalars;  // null: they are derived here
    int device;
    cudaStream_t stream;

    template <class Table>
    void operator()(Kernel<Table>& kernel, const Shards& shards) const {
        TableBuilder<Table> builder(kernel);
        size_t first_group = 0;
        auto flush = [&](size_t next_group) {
            const Table& table = builder.finish(device, device_scalars ? device_scalars + first_group : nullptr);
            if (uint32_t chunks = table.first_chunk[table.shard_count]) {
                kernel.function<<<chunks, kThreads, sizeof(Block), stream>>>(table);
                check_cuda(cudaGetLastError(), kName, device);
            }
            builder.reset();
            first_group = next_group;
        };
        size_t next = 0;
        for (size_t g = 0; g < groups.size(); ++g) {
            const Scalars scalars = device_scalars ? Scalars{} : derive(groups[g]);
            if (!builder.add_group(scalars)) {
                flush(g);
                builder.add_group(scalars);
            }
            for (; next < shards.size() && shards[next].group == g; ++next) {
                if (builder.add_shard(shards[next])) continue;
                flush(g);
                builder.add_group(scalars);
                builder.add_shard(shards[next]);
            }
        }
        flush(groups.size());
    }
};

bool is_quantized(const Shard& s) { return s.quantized; }

// One launch if one kernel serves all, else one per kernel that quantized weights need and one for the rest.
void launch_with_weights(const Launcher& launch, const Shards& shards) {
    if (auto* kernel = find_kernel(kernels().with_weights, shards)) return launch(*kernel, shards);
    for (auto& kernel : kernels().with_weights) {
        Shards own;
        std::copy_if(shards.begin(), shards.end(), std::back_inserter(own),
                     [&](const Shard& s) { return s.quantized && kernel.is_mix_of(s); });
        if (!own.empty()) launch(kernel, own);
    }
    Shards others;
    std::remove_copy_if(shards.begin(), shards.end(), std::back_inserter(others), is_quantized);
    if (!others.empty()) launch(choose_kernel(others), others);
}

}  // namespace

void launch_cuda(const Step& step, int device, uint64_t stream_handle, uint64_t workspace) {
    CudaDeviceGuard guard(kName, device);
    const auto stream = reinterpret_cast<cudaStream_t>(stream_handle);
    const bool on_device = std::any_of(step.groups.begin(), step.groups.end(), reads_device);
    Scalars* const device_scalars = on_device ? reinterpret_cast<Scalars*>(workspace) : nullptr;
    if (on_device && workspace == 0)
        throw std::invalid_argument("fused_optim: hyperparameters on the device need a workspace");
    if (on_device) launch_scalars(step.groups, device_scalars, device, stream);
    const Launcher launch{step.groups, device_scalars, device, stream};
    if (std::any_of(step.shards.begin(), step.shards.end(), is_quantized)) {
        launch_with_weights(launch, step.shards);
    } else {
        launch(choose_kernel(step.shards), step.shards);
    }
}

}  // namespace fused_optim
