// The CUDA engine: one persistent kernel walks the chunks of every shard in its table, which travels as a kernel
// parameter. Two walks share the element math:
//   * vector walk, one instance per mix of formats: a thread updates 8 consecutive elements. It issues the loads of all
//     streams, then decodes, updates, finds the block's absmax by warp shuffles, encodes and stores.
//   * general walk, one instance for all formats: shard ends and shards whose addresses or offsets are not aligned. A
//     warp updates 128 elements, read and written one by one.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "adam.h"
#include "dispatch.h"
#include "launch.h"

namespace fused_optim {
namespace {

constexpr int kThreads = 128;
constexpr int kBlocksPerMultiprocessor = 5;
constexpr int kVector = 8;                 // elements per thread
constexpr int kTile = kThreads * kVector;  // elements per thread block and iteration
constexpr int kSpan = 128;                 // elements per warp in the general walk: the largest block
constexpr int kMaxTilesPerChunk = 16;
constexpr int kChunksPerBlock = 16;  // wanted at least, to balance the load
constexpr int kMaxShards = 400;
constexpr int kMaxGroups = 16;
constexpr int kMaxGeometries = 24;
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
};

// Structure of arrays, so that no padding is wasted on the parameter limit.
struct KernelTable {
    uint64_t grad[kMaxShards];
    uint64_t param[kMaxShards];
    uint64_t master[kMaxShards];
    uint64_t exp_avg[kMaxShards];
    uint64_t exp_avg_sq[kMaxShards];
    uint64_t scales[kMaxShards];
    uint64_t numel[kMaxShards];
    uint64_t offset[kMaxShards];
    uint32_t key[kMaxShards];
    ShardInfo info[kMaxShards];
    uint32_t first_chunk[kMaxShards + 1];
    Hyper groups[kMaxGroups];
    Geometry geometries[kMaxGeometries];
    uint32_t* arrivals;
    uint32_t advance;  // bit per group: this launch is the last one that uses it
    uint32_t shard_count;
    uint32_t group_count;
    uint32_t geometry_count;
    uint32_t chunk;  // elements
};
static_assert(sizeof(KernelTable) <= kParameterLimit, "the table must fit into the kernel's parameters");

// Eight elements of kBytes each, as they lie in memory.
template <int kBytes>
struct Packet {
    uint32_t words[2 * kBytes];
};

template <int kBytes>
struct Word;
template <>
struct Word<1> {
    using type = uint8_t;
};
template <>
struct Word<2> {
    using type = uint16_t;
};
template <>
struct Word<4> {
    using type = uint32_t;
};

template <int kBytes>
__device__ __forceinline__ uint32_t get(const uint32_t* words, int i) {
    if constexpr (kBytes == 4) return words[i];
    constexpr uint32_t mask = kBytes == 1 ? 0xFFu : 0xFFFFu;
    return (words[i * kBytes / 4] >> (8 * (i * kBytes % 4))) & mask;
}

// Packs the low bytes of eight values; what stands above them does not matter.
template <int kBytes>
__device__ __forceinline__ void pack(uint32_t* words, const uint32_t* values) {
    if constexpr (kBytes == 1) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            uint32_t low = __byte_perm(values[4 * k], values[4 * k + 1], 0x0040);
            uint32_t high = __byte_perm(values[4 * k + 2], values[4 * k + 3], 0x0040);
            words[k] = __byte_perm(low, high, 0x5410);
        }
    } else {
#pragma unroll
        for (int k = 0; k < 4; ++k) words[k] = __byte_perm(values[2 * k], values[2 * k + 1], 0x5410);
    }
}

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

template <bool rotating>
__device__ __forceinline__ void store(const float* values, const uint32_t* bits, Element type, uint64_t address,
                                      uint32_t element) {
    uint32_t codes[kVector];
    uint32_t words[kVector];
    if (type == Element::kFloat32) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) words[i] = float_bits(values[i]);
        exchange(words);
        return store<4>(words, address, element);
    }
    if (type == Element::kBFloat16) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) codes[i] = encode_bfloat16<rotating>(values[i], rotating ? bits[i] : 0);
    } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) codes[i] = encode_float16<rotating>(values[i], rotating ? bits[i] : 0);
    }
    pack<2>(words, codes);
    store<2>(words, address, element);
}

// The largest magnitude among the lanes whose numbers differ below bit `lanes_log2`.
__device__ __forceinline__ uint32_t lanes_absmax(uint32_t absmax, int lanes_log2, uint32_t mask) {
    absmax = max(absmax, __shfl_xor_sync(mask, absmax, 1));
    absmax = max(absmax, __shfl_xor_sync(mask, absmax, 2));
    if (lanes_log2 > 2) absmax = max(absmax, __shfl_xor_sync(mask, absmax, 4));
    if (lanes_log2 > 3) absmax = max(absmax, __shfl_xor_sync(mask, absmax, 8));
    if (lanes_log2 > 4) absmax = max(absmax, __shfl_xor_sync(mask, absmax, 16));
    return absmax;
}

template <int count>
__device__ __forceinline__ uint32_t thread_absmax(const float* values) {
    uint32_t absmax = magnitude_bits(values[0]);
#pragma unroll
    for (int i = 1; i < count; ++i) absmax = max(absmax, magnitude_bits(values[i]));
    return absmax;
}

// What a walk needs to know of its shard, read from the table once per chunk.
struct View {
    uint64_t grad;
    uint64_t param;
    uint64_t master;
    uint64_t exp_avg;
    uint64_t exp_avg_sq;
    float* exp_avg_scales;
    float* exp_avg_sq_scales;
    uint64_t numel;
    uint64_t offset;
    uint64_t first = 0;
    Geometry geometry;
    uint32_t key;
    ShardInfo info;

    __device__ __forceinline__ View(const KernelTable& table, int shard)
        : grad(table.grad[shard]),
          param(table.param[shard]),
          master(table.master[shard]),
          exp_avg(table.exp_avg[shard]),
          exp_avg_sq(table.exp_avg_sq[shard]),
          exp_avg_scales(reinterpret_cast<float*>(table.scales[shard])),
          exp_avg_sq_scales(exp_avg_scales),
          numel(table.numel[shard]),
          offset(table.offset[shard]),
          geometry(table.geometries[table.info[shard].geometry]),
          key(table.key[shard]),
          info(table.info[shard]) {
        if (is_scaled(exp_avg_format())) {
            exp_avg_sq_scales += (numel + (1u << info.block_log2) - 1) >> info.block_log2;
        }
    }

    __device__ __forceinline__ Element grad_type() const { return static_cast<Element>(info.grad_type); }
    __device__ __forceinline__ Element param_type() const { return static_cast<Element>(info.param_type); }
    __device__ __forceinline__ Master master_kind() const { return static_cast<Master>(info.master); }
    __device__ __forceinline__ Format exp_avg_format() const { return static_cast<Format>(info.exp_avg); }
    __device__ __forceinline__ Format exp_avg_sq_format() const { return static_cast<Format>(info.exp_avg_sq); }

    // Makes element 0 what element `begin`, a multiple of kSpan, was; nothing but the global index needs 64 bits then.
    __device__ __forceinline__ void advance(uint64_t begin) {
        grad += begin * element_bytes(grad_type());
        param += begin * element_bytes(param_type());
        master += begin * master_bytes(master_kind());
        exp_avg += begin * format_bytes(exp_avg_format());
        exp_avg_sq += begin * format_bytes(exp_avg_sq_format());
        exp_avg_scales += begin >> info.block_log2;
        exp_avg_sq_scales += begin >> info.block_log2;
        first = begin;
    }

    __device__ __forceinline__ uint64_t global_index(uint64_t element) const {
        element += first;
        if (info.geometry == 0) return offset + element;
        return offset + element / geometry.inner_local * geometry.inner_global + element % geometry.inner_local;
    }
};

// ---------------------------------------------------------------------------------------------------------------
// Vector walk

// A moment between its load and its store: raw words, and for block-scaled formats the block's scale.
template <class Codec>
struct Moment {
    static constexpr int kBytes = sizeof(typename Codec::Bits);
    Packet<kBytes> raw;
    float old_scale;

    __device__ __forceinline__ void load_raw(Format, uint64_t address, const float* scale, uint32_t element) {
        load<kBytes>(raw.words, address, element);
        old_scale = *scale;
    }
    __device__ __forceinline__ void decode_all(float* values, Format) const {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            values[i] = Codec::decode(get<kBytes>(raw.words, i), old_scale);
        }
    }
    // `encode(i, inverse)` gives element i's code in a block with that inverse scale.
    template <class Encode>
    __device__ __forceinline__ void store_all(const float* values, uint64_t address, float* scale, int block_log2,
                                              uint32_t element, uint32_t mask, const Encode& encode) {
        BlockScale fresh = Codec::scale(lanes_absmax(thread_absmax<kVector>(values), block_log2 - 3, mask));
        if ((element & ((1u << block_log2) - 1)) == 0) *scale = fresh.scale;
        uint32_t codes[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) codes[i] = static_cast<uint32_t>(encode(i, fresh.inverse));
        pack<kBytes>(raw.words, codes);
        store<kBytes>(raw.words, address, element);
    }
};

template <>
struct Moment<Plain> {
    Packet<4> raw{};

    __device__ __forceinline__ void load_raw(Format format, uint64_t address, const float*, uint32_t element) {
        load(raw, plain_type(format), address, element);
    }
    __device__ __forceinline__ void decode_all(float* values, Format format) {
        decode(values, raw, plain_type(format));
    }
};

struct RoundingBits {
    uint32_t state[kVector];
    uint32_t param[kVector];
};

__device__ __forceinline__ void fill_rounding(RoundingBits& bits, const View& view, uint32_t element,
                                              const Rounding& rounding) {
    uint64_t global = view.global_index(element);
#pragma unroll
    for (int i = 0; i < kVector; i += 4) {
        uint32_t hash = rounding.hash(view.key, global + i);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            bits.state[i + k] = rounding.state_bits(hash, k);
            bits.param[i + k] = rounding.param_bits(hash, k);
        }
    }
}

template <class MixType>
__device__ __forceinline__ void update_vector(const View& view, const Scalars& scalars, uint32_t element,
                                              uint32_t mask) {
    using M = typename MixType::M;
    using V = typename MixType::V;
    constexpr Master master = MixType::master;
    constexpr int low_bytes = master == Master::kRemainder16 ? 2 : 1;
    const Format m_format = view.exp_avg_format();
    const Format v_format = view.exp_avg_sq_format();
    float* m_scale = view.exp_avg_scales + (element >> view.info.block_log2);
    float* v_scale = view.exp_avg_sq_scales + (element >> view.info.block_log2);

    Packet<4> grad_raw{}, param_raw{}, master_raw{};  // zeros: unset words would stay alive across iterations
    Moment<M> m_moment;
    Moment<V> v_moment;
    load(grad_raw, view.grad_type(), view.grad, element);
    if constexpr (master == Master::kParameter) {
        load(param_raw, view.param_type(), view.param, element);
    } else if constexpr (master == Master::kFloat32) {
        load<4>(master_raw.words, view.master, element);
    } else {
        load<2>(param_raw.words, view.param, element);
        load<low_bytes>(master_raw.words, view.master, element);
    }
    m_moment.load_raw(m_format, view.exp_avg, m_scale, element);
    v_moment.load_raw(v_format, view.exp_avg_sq, v_scale, element);

    float grad[kVector], param[kVector], m[kVector], v[kVector], root[kVector];
    decode(grad, grad_raw, view.grad_type());
    if constexpr (master == Master::kParameter) {
        decode(param, param_raw, view.param_type());
    } else if constexpr (master == Master::kFloat32) {
        decode(param, master_raw, Element::kFloat32);
    } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            if constexpr (master == Master::kRemainder16) {
                param[i] = join_remainder16(get<2>(param_raw.words, i), get<2>(master_raw.words, i));
            } else {
                param[i] = join_remainder8(get<2>(param_raw.words, i), get<1>(master_raw.words, i));
            }
        }
    }
    m_moment.decode_all(m, m_format);
    v_moment.decode_all(v, v_format);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        Updated updated = update(grad[i], param[i], m[i], v[i], scalars);
        param[i] = updated.param;
        m[i] = updated.exp_avg;
        v[i] = updated.exp_avg_sq;
        root[i] = updated.root;
    }

    if constexpr (master == Master::kFloat32) {
        store<false>(param, nullptr, Element::kFloat32, view.master, element);
        store<false>(param, nullptr, view.param_type(), view.param, element);
    } else if constexpr (master != Master::kParameter) {
        uint32_t high[kVector], low[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            Split split = low_bytes == 2 ? split_remainder16(param[i]) : split_remainder8(param[i]);
            high[i] = split.high;
            low[i] = static_cast<uint32_t>(split.low);
        }
        pack<2>(param_raw.words, high);
        pack<low_bytes>(master_raw.words, low);
        store<2>(param_raw.words, view.param, element);
        store<low_bytes>(master_raw.words, view.master, element);
    }

    RoundingBits bits;
    if (v_format != Format::kFloat32 || (master == Master::kParameter && view.param_type() != Element::kFloat32)) {
        fill_rounding(bits, view, element, scalars.rounding);
    }
    if constexpr (master == Master::kParameter) {
        store<true>(param, bits.param, view.param_type(), view.param, element);
    }
    if constexpr (MixType::exp_avg_scaled) {
        m_moment.store_all(m, view.exp_avg, m_scale, view.info.block_log2, element, mask,
                           [&](int i, float inverse) { return M::encode(m[i], inverse); });
    } else {
        store<false>(m, nullptr, plain_type(m_format), view.exp_avg, element);
    }
    if constexpr (MixType::exp_avg_sq_scaled) {
        v_moment.store_all(v, view.exp_avg_sq, v_scale, view.info.block_log2, element, mask,
                           [&](int i, float inverse) { return V::encode(v[i], root[i], inverse, bits.state[i]); });
    } else {
        store<true>(v, bits.state, plain_type(v_format), view.exp_avg_sq, element);
    }
}

// Elements [begin, end) of a shard, both multiples of kSpan.
template <class MixType>
__device__ __forceinline__ void vector_walk(const KernelTable& table, int shard, const Scalars& shared_scalars,
                                            uint64_t begin, uint64_t end) {
    View view(table, shard);
    view.advance(begin);
    const Scalars scalars = shared_scalars;
    const uint32_t mask = 0xFFFFu << (threadIdx.x & 16);  // 16 lanes share a span, the rest may lie beyond the end
    const uint32_t count = static_cast<uint32_t>(end - begin);
    for (uint32_t element = threadIdx.x * kVector; element < count; element += kTile) {
        update_vector<MixType>(view, scalars, element, mask);
    }
}

// Pairs of moment formats that have a vector walk; others take the general one. Each costs a second of compile time.
FUSED_OPTIM_HD constexpr bool has_vector_walk(Format exp_avg, Format exp_avg_sq) {
    return !is_scaled(exp_avg) || !is_scaled(exp_avg_sq) || exp_avg == exp_avg_sq;
}

struct VectorWalk {
    const KernelTable& table;
    const Scalars& scalars;
    int shard;
    uint64_t begin;
    uint64_t end;

    template <class MixType>
    __device__ __forceinline__ void operator()(MixType) const {
        if constexpr (has_vector_walk(MixType::M::format, MixType::V::format)) {
            vector_walk<MixType>(table, shard, scalars, begin, end);
        }
    }
};

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
        return store_element<false>(view.param_type(), view.param, element, value, 0);
    }
    Split split = kind == Master::kRemainder16 ? split_remainder16(value) : split_remainder8(value);
    at<uint16_t>(view.param, element) = split.high;
    if (kind == Master::kRemainder16) {
        at<int16_t>(view.master, element) = split.low;
    } else {
        at<int8_t>(view.master, element) = static_cast<int8_t>(split.low);
    }
}

struct LoadMoment {
    Format format;
    uint64_t address;
    uint64_t element;
    float scale;
    float& value;

    __device__ __forceinline__ void operator()(Plain) const {
        value = load_element(plain_type(format), address, element);
    }
    template <class Codec>
    __device__ __forceinline__ void operator()(Codec) const {
        value = Codec::decode(at<typename Codec::Bits>(address, element), scale);
    }
};

template <class Codec>
struct IsExpAvg : std::false_type {};
template <Format format>
struct IsExpAvg<ExpAvg<format>> : std::true_type {};

// Called by all lanes, `inside` or not; lanes beyond the end hold zeros.
struct StoreMoment {
    Format format;
    uint64_t address;
    uint64_t element;
    int count;
    const float* values;
    const float* roots;
    const uint32_t* bits;  // null for exp_avg
    float* scales;
    int block_log2;

    __device__ __forceinline__ void operator()(Plain) const {
        for (int i = 0; i < count; ++i) {
            if (bits) {
                store_element<true>(plain_type(format), address, element + i, values[i], bits[i]);
            } else {
                store_element<false>(plain_type(format), address, element + i, values[i], 0);
            }
        }
    }
    template <class Codec>
    __device__ __forceinline__ void operator()(Codec) const {
        constexpr int elements = kSpan / 32;
        BlockScale fresh = Codec::scale(lanes_absmax(thread_absmax<elements>(values), block_log2 - 2, 0xFFFFFFFFu));
        if (count > 0 && (element & ((1u << block_log2) - 1)) == 0) scales[element >> block_log2] = fresh.scale;
        for (int i = 0; i < count; ++i) {
            auto& target = at<typename Codec::Bits>(address, element + i);
            if constexpr (IsExpAvg<Codec>::value) {
                target = Codec::encode(values[i], fresh.inverse);
            } else {
                target = Codec::encode(values[i], roots[i], fresh.inverse, bits[i]);
            }
        }
    }
};

// Elements [begin, end) of a shard; `begin` is a multiple of kSpan. A lane takes 4 consecutive elements.
__device__ __noinline__ void general_walk(const KernelTable& table, int shard, const Scalars& scalars, uint64_t begin,
                                          uint64_t end) {
    constexpr int elements = kSpan / 32;
    const View view(table, shard);
    const int block_log2 = view.info.block_log2;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (uint64_t span = begin + warp * kSpan; span < end; span += kTile / 2) {
        const uint64_t element = span + lane * elements;
        const int count = element >= end ? 0 : static_cast<int>(min(end - element, static_cast<uint64_t>(elements)));
        float m[elements], v[elements], root[elements];
        uint32_t bits[elements];
        for (int i = 0; i < elements; ++i) {
            m[i] = v[i] = root[i] = 0.0f;
            if (i >= count) continue;
            const uint64_t block = (element + i) >> block_log2;
            float old_m, old_v;
            const float m_scale = is_scaled(view.exp_avg_format()) ? view.exp_avg_scales[block] : 0.0f;
            const float v_scale = is_scaled(view.exp_avg_sq_format()) ? view.exp_avg_sq_scales[block] : 0.0f;
            dispatch_codec<ExpAvg>(view.exp_avg_format(),
                                   LoadMoment{view.exp_avg_format(), view.exp_avg, element + i, m_scale, old_m});
            dispatch_codec<ExpAvgSq>(view.exp_avg_sq_format(), LoadMoment{view.exp_avg_sq_format(), view.exp_avg_sq,
                                                                          element + i, v_scale, old_v});
            Updated updated = update(load_element(view.grad_type(), view.grad, element + i),
                                     load_master(view, element + i), old_m, old_v, scalars);
            m[i] = updated.exp_avg;
            v[i] = updated.exp_avg_sq;
            root[i] = updated.root;
            const uint64_t global = view.global_index(element + i);
            const uint32_t hash = scalars.rounding.hash(view.key, global);
            bits[i] = scalars.rounding.state_bits(hash, static_cast<uint32_t>(global));
            store_master(view, element + i, updated.param,
                         scalars.rounding.param_bits(hash, static_cast<uint32_t>(global)));
        }
        __syncwarp();  // every lane has read the old scales
        dispatch_codec<ExpAvg>(view.exp_avg_format(), StoreMoment{view.exp_avg_format(), view.exp_avg, element, count,
                                                                  m, root, nullptr, view.exp_avg_scales, block_log2});
        dispatch_codec<ExpAvgSq>(view.exp_avg_sq_format(),
                                 StoreMoment{view.exp_avg_sq_format(), view.exp_avg_sq, element, count, v, root, bits,
                                             view.exp_avg_sq_scales, block_log2});
    }
}

// The last thread block to finish advances the step counters, when no other one can read them any more.
__device__ void advance_steps(const KernelTable& table) {
    if (table.arrivals == nullptr || threadIdx.x != 0) return;
    __threadfence();
    if (atomicAdd(table.arrivals, 1u) != gridDim.x - 1) return;
    for (uint32_t g = 0; g < table.group_count; ++g) {
        const Hyper& hyper = table.groups[g];
        if ((table.advance >> g & 1u) && hyper.step_pointer && !is_skipped(hyper)) *hyper.step_pointer += 1;
    }
    *table.arrivals = 0;
}

__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    multi_tensor_adam(const __grid_constant__ KernelTable table) {
    __shared__ Scalars scalars[kMaxGroups];
    __shared__ bool skipped[kMaxGroups];
    if (threadIdx.x < table.group_count) {
        scalars[threadIdx.x] = derive(table.groups[threadIdx.x]);
        skipped[threadIdx.x] = is_skipped(table.groups[threadIdx.x]);
    }
    __syncthreads();
    const uint32_t chunks = table.first_chunk[table.shard_count];
    uint32_t shard = 0;
    for (uint32_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        while (chunk >= table.first_chunk[shard + 1]) ++shard;
        const ShardInfo info = table.info[shard];
        if (skipped[info.group]) continue;
        const uint64_t begin = static_cast<uint64_t>(chunk - table.first_chunk[shard]) * table.chunk;
        const uint64_t end = min(begin + table.chunk, table.numel[shard]);
        const uint64_t vector_end = info.vectors ? end / kSpan * kSpan : begin;
        const Scalars& group = scalars[info.group];
        if (begin < vector_end) {
            dispatch(static_cast<Master>(info.master), static_cast<Format>(info.exp_avg),
                     static_cast<Format>(info.exp_avg_sq),
                     VectorWalk{table, group, static_cast<int>(shard), begin, vector_end});
        }
        if (vector_end < end) general_walk(table, static_cast<int>(shard), group, vector_end, end);
    }
    advance_steps(table);
}

void check(cudaError_t error, int device) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // launch errors that are not sticky must not surface in somebody else's call
    throw std::runtime_error("fused_optim: kernel multi_tensor_adam on cuda:" + std::to_string(device) + ": " +
                             cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

class DeviceGuard {
public:
    explicit DeviceGuard(int device) : device_(device) {
        check(cudaGetDevice(&previous_), device);
        if (previous_ != device_) check(cudaSetDevice(device_), device);
    }
    ~DeviceGuard() {
        if (previous_ != device_) cudaSetDevice(previous_);
    }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

private:
    int device_;
    int previous_ = 0;
};

bool is_aligned(uint64_t address, int bytes_per_element) { return address % (bytes_per_element == 1 ? 8 : 16) == 0; }

bool is_aligned(const Shard& s) {
    return is_aligned(s.grad, element_bytes(s.grad_type)) && is_aligned(s.param, element_bytes(s.param_type)) &&
           is_aligned(s.exp_avg, format_bytes(s.exp_avg_format)) &&
           is_aligned(s.exp_avg_sq, format_bytes(s.exp_avg_sq_format)) &&
           (s.master_kind == Master::kParameter || is_aligned(s.master, master_bytes(s.master_kind)));
}

bool is_plain(const Shard& s) { return s.inner_local >= s.numel; }

// A thread's 8 elements are two aligned quads of consecutive global elements.
bool has_quads(const Shard& s) {
    return s.offset % 4 == 0 && (is_plain(s) || (s.inner_local % kVector == 0 && s.inner_global % 4 == 0));
}

// Fills tables until one limit is reached; `done` is what is packed so far.
class TableBuilder {
public:
    TableBuilder() { reset(); }

    bool add_group(const Hyper& hyper) {
        if (table_.group_count == kMaxGroups) return false;
        table_.groups[table_.group_count++] = hyper;
        return true;
    }

    bool add_shard(const Shard& s) {
        int geometry = find_geometry(s);
        if (table_.shard_count == kMaxShards || geometry < 0) return false;
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
        ShardInfo info{};
        info.master = static_cast<uint32_t>(s.master_kind);
        info.exp_avg = static_cast<uint32_t>(s.exp_avg_format);
        info.exp_avg_sq = static_cast<uint32_t>(s.exp_avg_sq_format);
        info.grad_type = static_cast<uint32_t>(s.grad_type);
        info.param_type = static_cast<uint32_t>(s.param_type);
        info.block_log2 = s.block_log2;
        info.vectors = is_aligned(s) && has_quads(s) && has_vector_walk(s.exp_avg_format, s.exp_avg_sq_format);
        info.group = table_.group_count - 1;
        info.geometry = static_cast<uint32_t>(geometry);
        table_.info[i] = info;
        return true;
    }

    void advance_last_group() { table_.advance |= 1u << (table_.group_count - 1); }

    // Cuts the shards into chunks and returns the table.
    const KernelTable& finish(int resident_blocks, uint64_t arrivals) {
        uint64_t total = 0;
        for (uint32_t i = 0; i < table_.shard_count; ++i) total += table_.numel[i];
        uint64_t tiles = total / (static_cast<uint64_t>(kTile) * resident_blocks * kChunksPerBlock);
        uint64_t most = std::max<uint64_t>(kMaxTilesPerChunk, total / kTile >> 31);  // chunk numbers have 32 bits
        table_.chunk = static_cast<uint32_t>(kTile * std::min(std::max<uint64_t>(tiles, 1), most));
        table_.first_chunk[0] = 0;
        for (uint32_t i = 0; i < table_.shard_count; ++i) {
            uint64_t chunks = (table_.numel[i] + table_.chunk - 1) / table_.chunk;
            table_.first_chunk[i + 1] = table_.first_chunk[i] + static_cast<uint32_t>(chunks);
        }
        table_.arrivals = reinterpret_cast<uint32_t*>(arrivals);
        return table_;
    }

    void reset() {
        table_.shard_count = table_.group_count = table_.advance = 0;
        table_.geometry_count = 1;  // 0 stands for consecutive elements
    }

private:
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

    KernelTable table_;
};

int resident_blocks(int device) {
    constexpr int kMaxDevices = 64;
    static int known[kMaxDevices];  // benign race: every thread computes the same value
    if (device < kMaxDevices && known[device] > 0) return known[device];
    int multiprocessors = 0, blocks = 0;
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), device);
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, multi_tensor_adam, kThreads, 0), device);
    int resident = std::max(1, multiprocessors * blocks);
    if (device < kMaxDevices) known[device] = resident;
    return resident;
}

bool advances(const Step& step) {
    return std::any_of(step.groups.begin(), step.groups.end(),
                       [](const Hyper& h) { return h.step_pointer != nullptr; });
}

}  // namespace

void launch_cuda(const Step& step, int device, uint64_t stream, uint64_t arrivals) {
    DeviceGuard guard(device);
    const int resident = resident_blocks(device);
    const bool counts = advances(step);
    TableBuilder builder;
    auto flush = [&]() {
        const KernelTable& table = builder.finish(resident, counts ? arrivals : 0);
        uint32_t chunks = table.first_chunk[table.shard_count];
        uint32_t grid = std::min<uint32_t>(chunks, static_cast<uint32_t>(resident));
        if (grid > 0 || (counts && table.advance)) {
            multi_tensor_adam<<<std::max(grid, 1u), kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(table);
            check(cudaGetLastError(), device);
        }
        builder.reset();
    };
    size_t next = 0;
    for (size_t g = 0; g < step.groups.size(); ++g) {
        if (!builder.add_group(step.groups[g])) {
            flush();
            builder.add_group(step.groups[g]);
        }
        for (; next < step.shards.size() && step.shards[next].group == g; ++next) {
            if (builder.add_shard(step.shards[next])) continue;
            flush();
            builder.add_group(step.groups[g]);
            builder.add_shard(step.shards[next]);
        }
        builder.advance_last_group();
    }
    flush();
}

}  // namespace fused_optim
