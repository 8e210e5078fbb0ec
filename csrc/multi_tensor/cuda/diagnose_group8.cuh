// Diagnostics of eight elements of a thread: the vector loop's update, and in place of its stores what they would make
// of the new values. Squares of eight elements are summed up in FP32, but for those of squares, which may be too small
// for that; what follows is FP64.
#pragma once

#include "cuda/any_formats.cuh"
#include "diagnose.h"

namespace fused_optim {
namespace {

template <bool is_square>
__device__ __forceinline__ double sum_of_squares(const float* values) {
    if constexpr (is_square) {
        double sum = 0.0;
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            const auto value = static_cast<double>(values[i]);
            sum = fma(value, value, sum);
        }
        return sum;
    } else {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kVector; ++i) sum = fused(values[i], values[i], sum);
        return static_cast<double>(sum);
    }
}

template <bool is_square>
__device__ __forceinline__ double sum_of_changes(const float* before, const float* after) {
    float changes[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) changes[i] = after[i] - before[i];
    return sum_of_squares<is_square>(changes);
}

template <class Codec>
__device__ __forceinline__ void decode_kept(float* kept, uint32_t* words, const BlockScale& fresh) {
#pragma unroll
    for (int k = 0; k < 2 * format_bytes(Codec::format); ++k) words[k] = fresh.inverse != 0.0f ? words[k] : 0u;
    decode_words<Codec>(kept, words, fresh.scale);
}

__device__ __forceinline__ void round_bfloat16(float* values, uint32_t group8, const Rounding& rounding) {
    uint32_t words[4];
    encode_bfloat16_words<true>(words, values, group8, rounding);
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[i] = bfloat16_decode(get<2>(words, i));
}

// What storing makes of eight new values of a state: leaves it in `kept`, and counts codes. Called by all lanes of a
// warp. `largest` and `root`: of a square, what the update has found.
template <StateKind kind>
struct RoundGroup8 {
    Format format;
    uint32_t element;
    const float* values;
    float largest;
    const float* root;
    uint32_t group8;
    const Rounding& rounding;
    int block_log2;
    StateDiagnosis& found;
    float* kept;

    __device__ __forceinline__ void operator()(Unscaled) const {
        const bool is_float32 = unscaled_type(format) == Element::kFloat32;
#pragma unroll
        for (int i = 0; i < kVector; ++i) kept[i] = values[i];
        if (!is_float32) round_bfloat16(kept, group8, rounding);
    }

    template <class Codec>
    __device__ __forceinline__ void operator()(Codec) const {
        const float absmax = kind == StateKind::kSquare ? largest : thread_absmax<kVector>(values);
        const Rounded<Rounding> rounded{values, group8, rounding};
        const BlockScale fresh = fresh_scale<Codec>(absmax, rounded, block_log2);
        uint32_t words[2 * format_bytes(Codec::format)];
        encode_words<Codec>(words, values, root, fresh.inverse, group8, rounding);
        decode_kept<Codec>(kept, words, fresh);
        count(fabsf(Codec::decode(1u, fresh.scale)));
        if ((element & ((1u << block_log2) - 1)) == 0) found.widen(fresh.scale);
    }

    __device__ __forceinline__ void count(float smallest) const {
        const float top =
            lanes_max_or_nan<kLargestBlock / kVector>(thread_absmax<kVector>(kept), (1 << block_log2) / kVector);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            found.coded += values[i] != 0.0f;
            found.top += kept[i] != 0.0f && fabsf(kept[i]) == top;
            found.low += values[i] != 0.0f && fabsf(kept[i]) <= smallest;
        }
    }
};

// What the step makes of the new masters. Called by all lanes of a warp.
__device__ __forceinline__ void round_masters(float* rounded, const View& view, const float* before, const float* after,
                                              uint32_t group8, const Rounding& rounding) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) rounded[i] = after[i];
    const Master kind = view.master_kind();
    if (kind == Master::kRemainder8) {
        uint32_t high[4], low[2];
        split_words<1>(rounded, high, low, group8, rounding);
        join_words<1>(rounded, high, low);
    } else if (kind == Master::kFloat16) {
        const MasterRounding bits{rounding, before, after};
        const Rounded<MasterRounding> largest{after, group8, bits};
        const BlockScale fresh =
            fresh_scale<Float16Master>(thread_absmax<kVector>(after), largest, view.info.block_log2);
        uint32_t words[4];
        encode_words<Float16Master>(words, after, after, fresh.inverse, group8, bits);
        decode_kept<Float16Master>(rounded, words, fresh);
    } else if (kind == Master::kParameter && view.param_type() == Element::kBFloat16) {
        round_bfloat16(rounded, group8, rounding);
    } else if (kind == Master::kParameter && view.param_type() == Element::kFloat16) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            rounded[i] = float16_decode(encode_float16<true>(after[i], rounding.bits(group8, i)));
        }
    }
}

__device__ __forceinline__ void diagnose_group8(const View& view, const Scalars& scalars, Values<AnyFormats>& values,
                                                uint32_t element, Diagnosis& found) {
    constexpr Rule rule = AnyFormats::rule;
    float (&grad)[kVector] = values.grad, (&param)[kVector] = values.param;
    auto& states = values.states;
    float root[kVector]{}, before[kVector], scaled[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        before[i] = param[i];
        scaled[i] = scaled_gradient(grad[i], scalars);
    }
    found.gradient += sum_of_squares<false>(scaled);
    const float largest = update_values<rule>(grad, param, states, root, scalars);
    found.elements += kVector;
    found.update += sum_of_changes<false>(before, param);
    found.weight += sum_of_squares<false>(before);
    const uint32_t group8 = scalars.rounding.group8(view.key, view.global_index(element));

    float rounded[kVector];
    round_masters(rounded, view, before, param, group8, scalars.rounding);
    const bool decays = scalars.decay != 1.0f;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        const bool moves = scalars.step_size != 0.0f && (states[0][i] != 0.0f || (decays && before[i] != 0.0f));
        found.moved += moves;
        found.lost += moves && rounded[i] == before[i];
    }
    each_state<rule>([&](auto state) {
        constexpr int i = decltype(state)::value;
        constexpr StateKind kind = state_kind(rule, i);
        constexpr bool is_square = kind == StateKind::kSquare;
        const Format format = view.state_format(i);
        const int block_log2 = view.info.block_log2;
        float kept[kVector];
        dispatch_codec<kind>(format, RoundGroup8<kind>{format, element, states[i], largest, root, group8,
                                                       scalars.rounding, block_log2, found.states[i], kept});
        found.states[i].value += sum_of_squares<is_square>(states[i]);
        found.states[i].error += sum_of_changes<is_square>(states[i], kept);
    });
}

// Of the elements that the vector loop would update.
__device__ __forceinline__ void diagnose_vectors(Diagnosis& found) {
    const View view = block->view;
    const Scalars scalars = block->scalars;
    read_scales<AnyFormats>(view, view.vector_count >> view.info.block_log2);
    __syncthreads();
#pragma unroll 1
    for (uint32_t element = threadIdx.x * kVector; element < view.vector_count; element += kTile) {
        Raw<AnyFormats> raw;
        raw.load_all(view, element);
        Values<AnyFormats> values;
        values.decode_all(view, raw, element);
        diagnose_group8(view, scalars, values, element, found);
    }
}

}  // namespace
}  // namespace fused_optim
