// The CUDA engine's pass for diagnostics: a launch for each shard, one element per thread at a time, in the way of the
// general loop but without its stores. Elements are assigned to threads by number alone, and every sum has a fixed
// order: the same shard gives the same bits each time.
#include <algorithm>

#include "cuda/general_loop.cuh"
#include "diagnose.h"
#include "rules.h"

namespace fused_optim {
namespace {

struct DiagnosisArguments {
    Shard shard;
    Hyper hyper;
    double* row;
    double* partials;    // [thread block][number]
    uint32_t* arrivals;  // 0 between launches
};

constexpr int kWarps = kThreads / kWarp;

// Shared by the threads of a block, a slot per warp: of the largest magnitudes in blocks of scales.
struct BlockMaxima {
    float absmax[kWarps];
    float rounded[kWarps];
    float kept[kWarps];
};

// The scales of a state, or of the master, from those of the shard's first element on.
__device__ __forceinline__ const float* scales_of(const Shard& shard, int state) {
    const auto* scales = reinterpret_cast<const float*>(shard.scales);
    for (int i = 0; i < state; ++i) {
        if (is_scaled(shard.states[i].format)) scales += block_count(shard);
    }
    return scales;
}

struct DecodeElement {
    State state;
    uint64_t element;
    const float* scales;
    int block_log2;
    float& value;

    __device__ __forceinline__ void operator()(Unscaled) const {
        value = load_element(unscaled_type(state.format), state.address, element);
    }
    template <class Codec>
    __device__ __forceinline__ void operator()(Codec) const {
        value = Codec::decode(at<typename Codec::Bits>(state.address, element), scales[element >> block_log2]);
    }
};

__device__ __forceinline__ float decode_master(const Shard& shard, uint64_t element) {
    switch (shard.master_kind) {
        case Master::kParameter: return load_element(shard.param_type, shard.param, element);
        case Master::kFloat32: return at<float>(shard.master, element);
        case Master::kRemainder16:
            return join_remainder16(at<uint16_t>(shard.param, element), at<int16_t>(shard.master, element));
        case Master::kRemainder8:
            return join_remainder8(at<uint16_t>(shard.param, element), at<int8_t>(shard.master, element));
        default:
            return Float16Master::decode(at<uint16_t>(shard.master, element),
                                         scales_of(shard, kMaxStates)[element >> shard.block_log2]);
    }
}

template <bool rotates>
__device__ __forceinline__ float rounded_element(Element type, float value, uint32_t bits) {
    if (type == Element::kFloat32) return value;
    if (type == Element::kBFloat16) {
        return bfloat16_decode(rotates ? bfloat16_rotating(value, bits) : bfloat16_nearest_even(value));
    }
    return float16_decode(rotates ? float16_rotating(value, bits) : float16_nearest_even(value));
}

// What storing makes of a value. Called by all threads; those beyond the end, which are not `inside`, hold a zero.
struct RoundElement {
    Format format;
    uint64_t element;
    bool inside;
    bool rotates;  // a square, and an FP16 master
    float value;
    float root;
    uint32_t bits;
    int block_log2;
    BlockMaxima& maxima;
    StateDiagnosis& found;
    float& kept;

    __device__ __forceinline__ void operator()(Unscaled) const {
        const Element type = unscaled_type(format);
        kept = rotates ? rounded_element<true>(type, value, bits) : rounded_element<false>(type, value, 0);
    }
    template <class Codec>
    __device__ __forceinline__ void operator()(Codec) const {
        uint32_t largest = float_bits(neighbours_max(fabsf(value), block_log2, maxima.absmax));
        if constexpr (kFollowsRounding<Codec>) {
            const float rounded = bits_float(float16_rounded(value, bits));
            largest = float16_largest(largest, float_bits(neighbours_max(rounded, block_log2, maxima.rounded)));
        }
        const BlockScale fresh = Codec::scale(largest);
        uint32_t code;
        if constexpr (kIsSigned<Codec>) {
            code = Codec::encode(value, fresh.inverse);
        } else {
            code = Codec::encode(value, root, fresh.inverse, bits);
        }
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
__device__ __forceinline__ float rounded_master(const Shard& shard, uint64_t element, bool inside, float before,
                                                float after, uint32_t bits, BlockMaxima& maxima) {
    if (shard.master_kind == Master::kParameter) return rounded_element<true>(shard.param_type, after, bits);
    if (shard.master_kind == Master::kRemainder8) {
        const Split split = split_remainder8(after);
        return join_remainder8(split.high, static_cast<int8_t>(split.low));
    }
    if (shard.master_kind != Master::kFloat16) return after;
    StateDiagnosis unused{};
    float kept = 0.0f;
    RoundElement{
        Format::kFloat16, element, inside, true, after, after, inside ? master_rounding(before, after, bits) : kNearest,
        shard.block_log2, maxima,  unused, kept}(Float16Master{});
    return kept;
}

// Each thread looks at one element of the kThreads from `first` on.
template <Rule rule>
__device__ __forceinline__ void diagnose_elements(const Shard& shard, const Scalars& scalars, uint64_t first,
                                                  BlockMaxima (&maxima)[kMaxStates + 1], Diagnosis& found) {
    constexpr int square = square_state(rule);
    const uint64_t element = first + threadIdx.x;
    const bool inside = element < shard.numel;
    float states[state_places(rule)] = {}, root = 0.0f, before = 0.0f, after = 0.0f;
    uint32_t bits = kNearest;
    if (inside) {
        each_state<rule>([&](auto state) {
            constexpr int i = decltype(state)::value;
            dispatch_codec<state_kind(rule, i)>(
                shard.states[i].format,
                DecodeElement{shard.states[i], element, scales_of(shard, i), shard.block_log2, states[i]});
        });
        float grad = scaled_gradient(load_element(shard.grad_type, shard.grad, element), scalars);
        found.gradient += square_of(grad);
        before = decode_master(shard, element);
        if (scalars.l2_penalty != 0.0f) grad = penalized_gradient(grad, before, scalars);
        const float direction = Update<rule>::advance(grad, states, scalars);
        if constexpr (square >= 0) root = root_of(states[square]);
        const uint64_t global =
            global_index(element, shard.offset, shard.geometry, shard.geometry.is_consecutive(shard.numel));
        bits = scalars.rounding.bits(scalars.rounding.group8(shard.key, global), static_cast<uint32_t>(global));
        after = Update<rule>::next_param(before, direction, root, scalars);
        found.elements += 1;
        found.update += square_of_change(before, after);
        found.weight += square_of(before);
    }
    const float rounded = rounded_master(shard, element, inside, before, after, bits, maxima[kMaxStates]);
    const bool moves = states[0] != 0.0f || (scalars.decay != 1.0f && before != 0.0f);
    if (inside && moves && scalars.step_size != 0.0f) {
        found.moved += 1;
        found.lost += rounded == before;
    }
    each_state<rule>([&](auto state) {
        constexpr int i = decltype(state)::value;
        const Format format = shard.states[i].format;
        float kept = 0.0f;
        dispatch_codec<state_kind(rule, i)>(
            format, RoundElement{format, element, inside, i == square, states[i], root, bits, shard.block_log2,
                                 maxima[i], found.states[i], kept});
        if (!inside) return;
        found.states[i].value += square_of(states[i]);
        found.states[i].error += square_of_change(states[i], kept);
    });
}

// Rows of numbers combined, sums and maxima: those of a block's threads, and those of all blocks.
struct Combine {
    bool is_sum;

    __device__ __forceinline__ double operator()(double a, double b) const { return is_sum ? a + b : fmax(a, b); }
    __device__ __forceinline__ double none() const { return is_sum ? 0.0 : -INFINITY; }
};

// The block's values combined, on thread 0. Every thread calls it.
__device__ double combine_block(double value, const Combine& combine, double (&warps)[kWarps]) {
    value = combine_lanes<kWarp>(value, combine);
    __syncthreads();  // the values of the call before have been read
    if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = value;
    __syncthreads();
    for (int warp = 1; warp < kWarps && threadIdx.x == 0; ++warp) value = combine(value, warps[warp]);
    return value;
}

template <Rule rule>
__global__ void __launch_bounds__(kThreads) diagnose_shard(const __grid_constant__ DiagnosisArguments arguments) {
    constexpr int width = diagnosis_width(rule);
    __shared__ Scalars scalars;
    __shared__ BlockMaxima maxima[kMaxStates + 1];
    __shared__ double warps[kWarps];
    __shared__ bool last;
    const Shard& shard = arguments.shard;
    if (threadIdx.x == 0) scalars = derive<rule>(arguments.hyper);
    Diagnosis found = Diagnosis::empty();
    for (uint64_t first = uint64_t{blockIdx.x} * kThreads; first < shard.numel;
         first += uint64_t{gridDim.x} * kThreads) {
        __syncthreads();  // scalars are there, and the maxima of the round before have been read
        diagnose_elements<rule>(shard, scalars, first, maxima, found);
    }
    double row[width];
    write_row<rule>(found, row);
#pragma unroll
    for (int i = 0; i < width; ++i) {
        const double value = combine_block(row[i], Combine{i < diagnosis_sums(rule)}, warps);
        if (threadIdx.x == 0) arguments.partials[uint64_t{blockIdx.x} * width + i] = value;
    }
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(arguments.arrivals, 1u) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (!last) return;  // the block that comes last sees all
    for (int i = 0; i < width; ++i) {
        const Combine combine{i < diagnosis_sums(rule)};
        double value = combine.none();
        for (uint32_t other = threadIdx.x; other < gridDim.x; other += kThreads) {
            value = combine(value, __ldcg(arguments.partials + uint64_t{other} * width + i));
        }
        value = combine_block(value, combine, warps);
        if (threadIdx.x == 0) arguments.row[i] = value;
    }
    if (threadIdx.x == 0) *arguments.arrivals = 0;
}

constexpr uint64_t kArrivalsBytes = 16;  // keeps the partial results behind it aligned

}  // namespace

void diagnose_cuda(Rule rule, const Shard& shard, const Hyper& hyper, double* row, int device, uint64_t stream,
                   uint64_t workspace) {
    constexpr const char* kernel = "diagnose_shard";
    CudaDeviceGuard guard(kernel, device);
    DiagnosisArguments arguments{};
    arguments.shard = shard;
    arguments.hyper = hyper;
    arguments.row = row;
    arguments.arrivals = reinterpret_cast<uint32_t*>(workspace);
    arguments.partials = reinterpret_cast<double*>(workspace + kArrivalsBytes);
    const uint64_t wanted = (shard.numel + kThreads - 1) / kThreads;
    const auto blocks = static_cast<uint32_t>(std::min<uint64_t>(std::max<uint64_t>(wanted, 1), kDiagnosisBlocks));
    dispatch_rule(rule, [&](auto known) {
        diagnose_shard<decltype(known)::value>
            <<<blocks, kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(arguments);
    });
    check_cuda(cudaGetLastError(), kernel, device);
}

}  // namespace fused_optim
