// The table of shards that travels as the kernel's parameter.
#pragma once

#include "cuda/device.h"
#include "cuda/packets.cuh"
#include "cuda/warp.cuh"
#include "launch.h"
#include "quantize.h"
#include "rules.h"
#include "update.h"

namespace fused_optim {

constexpr int kThreads = 128;
constexpr int kTile = kThreads * kVector;     // elements per thread block and iteration of the vector loop
constexpr int kVectorSpan = kWarp * kVector;  // elements per warp in the vector loop
constexpr int kSmallestBlock = 32;
constexpr int kLargestBlockLog2 = 7;
constexpr int kLargestBlock = 1 << kLargestBlockLog2;
constexpr int kMaxTilesPerChunk = 16;
constexpr int kChunksPerBlock = 8;          // wanted at least, to balance the load
constexpr int kMaxShards = 396;             // of rules with two states at most
constexpr int kMaxShardsWithWeights = 334;  // the same where some may be quantized
constexpr int kMaxGroups = 16;
constexpr int kMaxGeometries = 24;
constexpr int kBuckets = 256;
constexpr size_t kLine = 128;  // of shared memory: copies that begin elsewhere take twice the requests

template <class Enum>
constexpr int bits_for() {
    int bits = 0;
    while (1 << bits < kCount<Enum>) ++bits;
    return bits;
}

// With the formats of `columns` states.
template <int columns>
struct ShardInfo;

template <>
struct ShardInfo<2> {
    uint32_t master_low : 2;
    uint32_t state0 : bits_for<Format>();
    uint32_t state1 : bits_for<Format>();
    uint32_t grad_type : bits_for<Element>();
    uint32_t param_type : bits_for<Element>();
    uint32_t block_log2 : 3;
    uint32_t vectors : 1;  // fit for the vector loop
    uint32_t group : 4;
    uint32_t master_high : bits_for<Master>() -
        2;  // moves nothing else, which took the FP8 kernels eight registers more
    uint32_t geometry : 6;
    uint32_t quantized : 1;
    uint32_t round_up : 1;
    uint32_t weight_format : bits_for<WeightFormat>();

    FUSED_OPTIM_HD Format state_format(int state) const { return static_cast<Format>(state == 0 ? state0 : state1); }
    void set_state_format(int state, Format format) {
        if (state == 0) state0 = static_cast<uint32_t>(format);
        if (state == 1) state1 = static_cast<uint32_t>(format);
    }
};
static_assert(sizeof(ShardInfo<2>) == sizeof(uint32_t), "one word");

template <int columns>
struct ShardInfo : ShardInfo<2> {
    Format others[columns - 2];

    FUSED_OPTIM_HD Format state_format(int state) const {
        return state < 2 ? ShardInfo<2>::state_format(state) : others[state - 2];
    }
    void set_state_format(int state, Format format) {
        ShardInfo<2>::set_state_format(state, format);
        if (state > 1) others[state - 2] = format;
    }
};
static_assert(kMaxGroups <= 1 << 4 && kMaxGeometries <= 1 << 6, "numbers that fit");

// States that a rule's table has places for: two at least, so that kernels of all usual rules address alike.
constexpr int columns_of(Rule rule) { return state_count(rule) > 2 ? state_count(rule) : 2; }

// A shard takes some 76 bytes of the table, and 12 more for each further state.
constexpr int capacity_of(Rule rule, int of_two) {
    const int further = columns_of(rule) - 2;
    return of_two * 76 / (76 + 12 * further) - 8 * further;
}

// Structure of arrays, so that no padding is wasted on the parameter limit.
template <Rule rule_, int capacity>
struct KernelTable {
    static constexpr Rule rule = rule_;
    static constexpr int kColumns = columns_of(rule);
    static constexpr uint32_t kShards = capacity;
    uint64_t grad[capacity];
    uint64_t param[capacity];
    uint64_t master[capacity];
    uint64_t states[kColumns][capacity];
    uint64_t scales[capacity];
    uint64_t numel[capacity];
    uint64_t offset[capacity];
    uint32_t key[capacity];
    ShardInfo<kColumns> info[capacity];
    uint32_t first_chunk[capacity + 1];
    Scalars<rule> scalars[kMaxGroups];
    Geometry geometries[kMaxGeometries];
    const Scalars<rule>* device_scalars;  // read instead of `scalars` unless null
    uint32_t shard_count;
    uint32_t group_count;
    uint32_t geometry_count;
    uint32_t chunk;  // elements
    uint32_t bucket_log2;
    uint16_t bucket_shard[kBuckets];  // the shard of chunk (bucket << bucket_log2): where the search begins
};

template <Rule rule>
using BasicTable = KernelTable<rule, capacity_of(rule, kMaxShards)>;

// Of steps in which parameters may be quantized weights; see Shard.
template <Rule rule>
struct WeightsTable : KernelTable<rule, capacity_of(rule, kMaxShardsWithWeights)> {
    uint64_t weight_scales[WeightsTable::kShards];
    uint64_t absmax[WeightsTable::kShards];
};

template <class Table>
constexpr bool kHasWeights = std::is_same_v<Table, WeightsTable<Table::rule>>;
#define FUSED_OPTIM_FITS(enumerator, ...)                                        \
    static_assert(sizeof(BasicTable<Rule::enumerator>) <= kParameterLimit &&     \
                      sizeof(WeightsTable<Rule::enumerator>) <= kParameterLimit, \
                  "the table must fit into the kernel's parameters");
FUSED_OPTIM_RULES(FUSED_OPTIM_FITS)
#undef FUSED_OPTIM_FITS

}  // namespace fused_optim
