// The CUDA engine's pass for diagnostics, compiled once per update rule, FUSED_OPTIM_RULE: the loops of the update
// without their stores. Elements are assigned to threads by number alone, and every sum has a fixed order: the same
// shards give the same bits each time.
#include "cuda/diagnose_group8.cuh"
#include "cuda/diagnosis.h"
#include "cuda/general_loop.cuh"
#include "rules.h"

namespace fused_optim {
namespace {

constexpr Rule kRule = AnyFormats::rule;
static_assert(is_diagnosed(kRule));

// Shared by the threads of a block, a slot per warp: of the largest magnitudes in blocks of scales.
struct BlockMaxima {
    float absmax[kThreads / kWarp];
    float rounded[kThreads / kWarp];
    float kept[kThreads / kWarp];
};

__device__ __forceinline__ float rounded_element(Element type, float value, uint32_t bits) {
    if (type == Element::kFloat32) return value;
    return type == Element::kBFloat16 ? bfloat16_decode(bfloat16_rotating(value, bits))
                                      : float16_decode(float16_rotating(value, bits));
}

// What storing makes of a value. Called by all threads; those beyond the end, which are not `inside`, hold a zero.
struct RoundElement {
    Format format;
    uint32_t element;
    bool inside;
    float value;
    float root;  // of a square
    uint32_t bits;
    int block_log2;
    BlockMaxima& maxima;
    StateDiagnosis& found;
    float& kept;

    __device__ __forceinline__ void operator()(Unscaled) const {
        kept = rounded_element(unscaled_type(format), value, bits);
    }
    template <class Codec>
    __device__ __forceinline__ void operator()(Codec) const {
        uint32_t largest = float_bits(neighbours_max(fabsf(value), block_log2, maxima.absmax));
        if constexpr (kFollowsRounding<Codec>) {
            const float rounded = bits_float(float16_rounded(value, bits));
            largest = float16_largest(largest, float_bits(neighbours_max(rounded, block_log2, maxima.rounded)));
        }
        const BlockScale fresh = Codec::scale(largest);
        const uint32_t code = encode_state<Codec>(value, root, fresh.inverse, bits);
        kept = Codec::decode(static_cast<typename Codec::Bits>(fresh.inverse != 0.0f ? code : 0u), fresh.scale);
        const float top = neighbours_max(inside ? fabsf(kept) : 0.0f, block_log2, maxima.kept);
        if (!inside) return;
        const float smallest = fabsf(Codec::decode(1u, fresh.scale));
        found.coded += value != 0.0f;
        found.top += kept != 0.0f && fabsf(kept) == top;
        found.low += value != 0.0f && fabsf(kept) <= smallest;
        if ((element & ((1u << block_log2) - 1)) == 0) found.widen(fresh.scale);
    }
};

__device__ __forceinline__ double square_of(float x) { return static_cast<double>(x) * static_cast<double>(x); }

__device__ __forceinline__ double square_of_change(float before, float after) {
    const double change = static_cast<double>(after) - static_cast<double>(before);
    return change * change;
}

// What the step makes of the new master. Called by all threads.
__device__ __forceinline__ float rounded_master(const View& view, uint32_t element, bool inside, float before,
                                                float after, uint32_t bits, BlockMaxima& maxima) {
    const Master kind = view.master_kind();
    if (kind == Master::kParameter) return rounded_element(view.param_type(), after, bits);
    if (kind == Master::kRemainder8) {
        const Split split = split_remainder8(after, bits);
        return join_remainder8(split.high, static_cast<int8_t>(split.low));
    }
    if (kind != Master::kFloat16) return after;
    StateDiagnosis unused{};
    float kept = 0.0f;
    const uint32_t own_bits = inside ? master_rounding(before, after, bits) : kNearest;
    const int block_log2 = view.info.block_log2;
    RoundElement{
        Format::kFloat16, element, inside, after, after, own_bits, block_log2, maxima, unused, kept}(Float16Master{});
    return kept;
}

// Each thread looks at one element of the kThreads from `first` on.
__device__ __forceinline__ void diagnose_elements(const View& view, const Scalars& scalars, uint32_t first,
                                                  BlockMaxima (&maxima)[kMaxStates + 1], Diagnosis& found) {
    constexpr int square = square_state(kRule);
    const uint32_t element = first + threadIdx.x;
    const int block_log2 = view.info.block_log2;
    const bool inside = element < view.count;
    float states[state_places(kRule)] = {}, root = 0.0f, before = 0.0f, after = 0.0f;
    uint32_t bits = kNearest;
    if (inside) {
        each_state<kRule>([&](auto state) {
            constexpr int i = decltype(state)::value;
            const Format format = view.state_format(i);
            dispatch_codec<state_kind(kRule, i)>(
                format, LoadState{format, view.states[i], element, view.state_scales[i], block_log2, states[i]});
        });
        float grad = scaled_gradient(load_element(view.grad_type(), view.grad, element), scalars);
        found.gradient += square_of(grad);
        before = is_scaled(view.master_kind()) ? load_float16_master(view, element) : load_master(view, element);
        if (scalars.l2_penalty != 0.0f) grad = penalized_gradient(grad, before, scalars);
        const float direction = Update<kRule>::advance(grad, states, scalars);
        if constexpr (square >= 0) root = root_of(states[square]);
        const uint64_t global = view.global_index(element);
        bits = scalars.rounding.bits(scalars.rounding.group8(view.key, global), static_cast<uint32_t>(global));
        after = Update<kRule>::next_param(before, direction, root, scalars);
        found.elements += 1;
        found.update += square_of_change(before, after);
        found.weight += square_of(before);
    }
    const float rounded = rounded_master(view, element, inside, before, after, bits, maxima[kMaxStates]);
    const bool moves = states[0] != 0.0f || (scalars.decay != 1.0f && before != 0.0f);
    if (inside && moves && scalars.step_size != 0.0f) {
        found.moved += 1;
        found.lost += rounded == before;
    }
    each_state<kRule>([&](auto state) {
        constexpr int i = decltype(state)::value;
        const Format format = view.state_format(i);
        float kept = 0.0f;
        dispatch_codec<state_kind(kRule, i)>(format, RoundElement{format, element, inside, states[i], root, bits,
                                                                  block_log2, maxima[i], found.states[i], kept});
        if (!inside) return;
        found.states[i].value += square_of(states[i]);
        found.states[i].error += square_of_change(states[i], kept);
    });
}

// Of the elements that are left, in a function of its own: its registers are not the vector loop's.
__device__ __noinline__ Diagnosis diagnose_others(Diagnosis found) {
    __shared__ BlockMaxima maxima[kMaxStates + 1];
    const View& view = block->view;
    for (uint32_t first = view.vector_count; first < view.count; first += kThreads) {
        __syncthreads();  // the maxima of the round before have been read
        diagnose_elements(view, block->scalars, first, maxima, found);
    }
    return found;
}

__device__ __noinline__ void leave(Diagnosis found, double* target) {
    constexpr int width = diagnosis_width(kRule);
    double row[width];
    write_row<kRule>(found, row);
#pragma unroll
    for (int i = 0; i < width; ++i) {
        const double value = combine_block(row[i], Combine{i < diagnosis_sums(kRule)});
        if (threadIdx.x == 0) target[i] = value;
    }
}

constexpr int kBlocksPerMultiprocessor = 4;

__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    multi_tensor_diagnosis(const __grid_constant__ DiagnosisTable table) {
    constexpr int width = diagnosis_width(kRule);
    const uint32_t chunks = table.first_chunk[table.shard_count];
    const uint32_t begin = blockIdx.x * table.chunks_per_block, end = min(begin + table.chunks_per_block, chunks);
    uint32_t shard = table.bucket_shard[begin >> table.bucket_log2];
    while (begin >= table.first_chunk[shard + 1]) ++shard;
    uint32_t group = kMaxGroups;  // none: of the scalars that are there
    Diagnosis found = Diagnosis::empty();
#pragma unroll 1
    for (uint32_t chunk = begin; chunk < end; ++chunk) {
        if (chunk == table.first_chunk[shard + 1]) {
            leave(found, table.partial(blockIdx.x, shard++, width));
            found = Diagnosis::empty();
        }
        __syncthreads();  // the chunk before has been looked at
        if (threadIdx.x == 0) {
            block->view.prepare(table, shard, static_cast<uint64_t>(chunk - table.first_chunk[shard]) * table.chunk);
            if (group != block->view.info.group) {
                group = block->view.info.group;
                block->scalars = derive<kRule>(table.hypers[group]);
            }
        }
        __syncthreads();
        if (block->view.vector_count > 0) diagnose_vectors(found);
        if (block->view.vector_count < block->view.count) found = diagnose_others(found);
    }
    leave(found, table.partial(blockIdx.x, shard, width));
}

}  // namespace

template <>
Kernel<DiagnosisTable>& diagnosis_kernel<kRule>() {
    static Kernel<DiagnosisTable> kernel{
        multi_tensor_diagnosis, kBlockBytes<true>, kMaxTilesPerChunk, true, kRule, true};
    return kernel;
}

}  // namespace fused_optim
