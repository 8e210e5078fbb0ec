// What a thread block takes from the table of shards. Compiled once per update rule, FUSED_OPTIM_RULE, whose states and
// scalars it has places for.
#pragma once

#include "cuda/table.cuh"

namespace fused_optim {
namespace {

constexpr int kColumns = columns_of(Rule::FUSED_OPTIM_RULE);
using RuleScalars = Scalars<Rule::FUSED_OPTIM_RULE>;

// From the scales of a weight to those of the blocks that begin at an element.
struct AdvanceScales {
    uint64_t& scales;
    uint64_t element;

    template <class Codec>
    __device__ __forceinline__ void operator()(Codec) const {
        if constexpr (kWrittenByUpdate<Codec>) scales += element / Codec::kBlock * kScaleBytes<typename Codec::Scale>;
    }
};

// What a thread block needs to know of its chunk of a shard. Element 0 is the chunk's first, a multiple of kTile in its
// shard, so that nothing but the global index needs 64 bits.
struct View {
    uint64_t grad;
    uint64_t param;
    uint64_t master;
    uint64_t states[kColumns];
    float* state_scales[kColumns];
    float* master_scales;
    uint64_t weight_scales;  // those of the chunk's blocks, or the whole weight's
    uint64_t absmax;
    uint64_t offset;
    uint64_t first;  // index in the shard of element 0
    Geometry geometry;
    uint32_t key;
    ShardInfo<kColumns> info;
    uint32_t count;         // elements of the chunk
    uint32_t vector_count;  // those that the vector loop updates, from element 0 on

    template <class Table>
    __device__ __forceinline__ void prepare(const Table& table, int shard, uint64_t begin) {
        info = table.info[shard];
        const uint64_t numel = table.numel[shard];
        grad = table.grad[shard] + begin * element_bytes(grad_type());
        param = table.param[shard] + begin * element_bytes(param_type());
        if constexpr (kHasWeights<Table>) prepare_weight(table, shard, begin);
        master = table.master[shard] + begin * master_bytes(master_kind());
        for (int i = 0; i < kColumns; ++i) {
            states[i] = table.states[i][shard] + begin * format_bytes(state_format(i));
        }
        state_scales[0] = reinterpret_cast<float*>(table.scales[shard]) + (begin >> info.block_log2);
        const uint64_t blocks = (numel + (1u << info.block_log2) - 1) >> info.block_log2;
        for (int i = 1; i < kColumns; ++i) {
            state_scales[i] = state_scales[i - 1] + (is_scaled(state_format(i - 1)) ? blocks : 0);
        }
        master_scales = state_scales[kColumns - 1] + (is_scaled(state_format(kColumns - 1)) ? blocks : 0);
        offset = table.offset[shard];
        first = begin;
        geometry = table.geometries[info.geometry];
        key = table.key[shard];
        count = static_cast<uint32_t>(min(numel - begin, static_cast<uint64_t>(table.chunk)));
        vector_count = info.vectors ? count / kVectorSpan * kVectorSpan : 0;
    }

    template <class Table>
    __device__ __forceinline__ void prepare_weight(const Table& table, int shard, uint64_t begin) {
        absmax = table.absmax[shard];
        weight_scales = table.weight_scales[shard];
        if (!info.quantized) return;
        param = table.param[shard] ? table.param[shard] + begin : 0;
        dispatch_weight(weight_format(), AdvanceScales{weight_scales, begin});
    }

    __device__ __forceinline__ WeightFormat weight_format() const {
        return static_cast<WeightFormat>(info.weight_format);
    }
    __device__ __forceinline__ Element grad_type() const { return static_cast<Element>(info.grad_type); }
    __device__ __forceinline__ Element param_type() const { return static_cast<Element>(info.param_type); }
    __device__ __forceinline__ Master master_kind() const {
        return static_cast<Master>(info.master_low | info.master_high << 2);
    }
    // Gradients in BF16, parameters in BF16 or quantized, and blocks of 128.
    template <bool has_weights>
    __device__ __forceinline__ bool is_usual() const {
        const bool no_type = has_weights && info.quantized;
        return grad_type() == Element::kBFloat16 && (no_type || param_type() == Element::kBFloat16) &&
               info.block_log2 == kLargestBlockLog2;
    }
    __device__ __forceinline__ void assume_usual() {
        info.grad_type = info.param_type = static_cast<uint32_t>(Element::kBFloat16);
        info.block_log2 = kLargestBlockLog2;
    }
    __device__ __forceinline__ Format state_format(int state) const { return info.state_format(state); }

    __device__ __forceinline__ uint64_t global_index(uint64_t element) const {
        return fused_optim::global_index(first + element, offset, geometry, info.geometry == 0);
    }
};

// What the threads of a block share, at a place that every function knows.
struct alignas(kLine) Block {
    View view;
    RuleScalars scalars;
    // Of the vector loop. Whole sectors are read before it and written after it: accesses of single scales, each of
    // which opens a DRAM page, would cost a fifth of the bandwidth.
    float state_scales[kColumns][kMaxTilesPerChunk * kTile / kSmallestBlock];
    uint32_t weight_scales[kMaxTilesPerChunk * kTile / kLargestBlock];  // as kWrittenByUpdate says
    uint32_t weight_absmax;                                             // bits
    float weight_partial[kThreads / kWarp];                             // of the general loop
    // Only where masters may be scaled.
    float master_scales[kMaxTilesPerChunk * kTile / kSmallestBlock];

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

template <bool scaled_masters>
constexpr size_t kBlockBytes =
    scaled_masters ? sizeof(Block) : (offsetof(Block, master_scales) + kLine - 1) / kLine * kLine;

}  // namespace
}  // namespace fused_optim
