// The vector loop: a thread updates eight consecutive elements at a time. It issues the loads of all streams, then
// decodes, updates, finds the block's absmax by warp shuffles, encodes and stores.
#pragma once

#include "cuda/codecs.cuh"
#include "cuda/packets.cuh"
#include "cuda/ring.cuh"
#include "cuda/view.cuh"
#include "cuda/warp.cuh"
#include "cuda/weight_group8.cuh"
#include "dispatch.h"
#include "update.h"

namespace fused_optim {
namespace {

// As Rounding, of an FP16 master: bit i of `nearest` says that element i of the group of 8 rounds to nearest.
struct MasterRounding {
    const Rounding& rounding;
    uint32_t nearest;

    __device__ __forceinline__ MasterRounding(const Rounding& all, const float* before, const float* after)
        : rounding(all), nearest(0) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            nearest |= (master_rounding(before[i], after[i], 0) == kNearest ? 1u : 0u) << i;
        }
    }
    __device__ __forceinline__ uint32_t bits(uint32_t group8, uint32_t element) const {
        return nearest >> element & 1u ? kNearest : rounding.bits(group8, element);
    }
};

// What a thread's values round to, where a block's scale depends on it.
template <class R>
struct Rounded {
    const float* values;
    uint32_t group8;
    const R& rounding;

    __device__ __forceinline__ float largest() const {
        uint32_t found = 0;
#pragma unroll
        for (int i = 0; i < kVector; ++i) found = max(found, float16_rounded(values[i], rounding.bits(group8, i)));
        return bits_float(found);
    }
};

// The scale of a block. Called by all lanes of a warp.
template <class Codec, class R>
__device__ __forceinline__ BlockScale fresh_scale(float absmax, const Rounded<R>& rounded, int block_log2) {
    const int lanes = (1 << block_log2) / kVector;
    uint32_t largest = float_bits(lanes_max_or_nan<kLargestBlock / kVector>(absmax, lanes));
    if constexpr (kFollowsRounding<Codec>) {
        if (__any_sync(kAllLanes, is_above_power(largest))) {
            const float of_block = lanes_max_or_nan<kLargestBlock / kVector>(rounded.largest(), lanes);
            largest = float16_largest(largest, float_bits(of_block));
        }
    }
    return Codec::scale(largest);
}

// Sets the scale of a block. Called by all lanes of a warp.
template <class Codec, class R>
__device__ __forceinline__ BlockScale store_scale(float absmax, const Rounded<R>& rounded, float* scale, int block_log2,
                                                  uint32_t element) {
    const BlockScale fresh = fresh_scale<Codec>(absmax, rounded, block_log2);
    __syncwarp();  // every lane has read the old scale
    if ((element & ((1u << block_log2) - 1)) == 0) *scale = fresh.scale;
    return fresh;
}

template <int kBytes>
__device__ __forceinline__ void store_codes(uint32_t* words, float inverse, uint64_t address, uint32_t element) {
#pragma unroll
    for (int k = 0; k < 2 * kBytes; ++k) words[k] = inverse != 0.0f ? words[k] : 0u;
    store<kBytes>(words, address, element);
}

template <class Formats, class Packet4>
__device__ __forceinline__ void decode_param(float* values, const View& view, Packet4& param, Packet4& master,
                                             float master_scale) {
    if constexpr (Formats::master == Master::kFloat16) {
        decode_words<Float16Master>(values, master.words, master_scale);
    } else if constexpr (Formats::master == Master::kParameter) {
        decode(values, param, view.param_type());
    } else if constexpr (Formats::master == Master::kFloat32) {
        decode(values, master, Element::kFloat32);
    } else {
        join_words<master_bytes(Formats::master)>(values, param.words, master.words);
    }
}

// Writes a thread's codes of a quantized weight and the scale of their block. Called by all lanes of a warp.
struct StoreWeight {
    const View& view;
    uint32_t element;
    const float* values;
    float absmax;     // infinity or NaN if some value is
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
            found.finite = lanes_max<Codec::kBlock / kVector>(finite);
        }
        return found;
    }

    template <class Codec>
    __device__ __forceinline__ void encode(float inverse) const {
        uint32_t words[2];
        encode_group8<Codec>(words, values, inverse, absmax);
        store<1>(words, view.param, element);
    }
};

__device__ __forceinline__ void store_weight(const View& view, uint32_t element, const float* values) {
    const float absmax = thread_absmax<kVector>(values);
    const uint32_t finite = magnitudes_of<kVector>(values, absmax).finite;
    if (view.absmax) {
        const uint32_t of_warp = __reduce_max_sync(kAllLanes, finite);
        if (threadIdx.x % kWarp == 0) atomicMax(&block->weight_absmax, of_warp);
    }
    if (!view.param) return;
    dispatch_weight(view.weight_format(), StoreWeight{view, element, values, absmax, finite});
}

// Writes an FP16 master and leaves in `values` what it is now.
__device__ __forceinline__ void store_float16_master(const View& view, uint32_t element, float* values, uint32_t group8,
                                                     const MasterRounding& rounding, float* scale) {
    const Rounded<MasterRounding> rounded{values, group8, rounding};
    const BlockScale fresh =
        store_scale<Float16Master>(thread_absmax<kVector>(values), rounded, scale, view.info.block_log2, element);
    uint32_t words[4];
    encode_words<Float16Master>(words, values, values, fresh.inverse, group8, rounding);
    store_codes<2>(words, fresh.inverse, view.master, element);
    decode_words<Float16Master>(values, words, fresh.scale);
}

template <class Formats>
__device__ __forceinline__ void store_param(const View& view, uint32_t element, const float* before, float* values,
                                            uint32_t group8, const Rounding& rounding, float* master_scale) {
    if constexpr (Formats::master == Master::kParameter) {
        store<true>(values, group8, rounding, view.param_type(), view.param, element);
    } else if constexpr (!is_remainder(Formats::master)) {
        if constexpr (Formats::master == Master::kFloat16) {
            store_float16_master(view, element, values, group8, {rounding, before, values}, master_scale);
        } else {
            store<false>(values, 0, rounding, Element::kFloat32, view.master, element);
        }
        if (Formats::has_weights && view.info.quantized) return store_weight(view, element, values);
        store<false>(values, 0, rounding, view.param_type(), view.param, element);
    } else {
        constexpr int low_bytes = master_bytes(Formats::master);
        uint32_t high[4], low[2 * low_bytes];
        split_words<low_bytes>(values, high, low, group8, rounding);
        store<2>(high, view.param, element);
        store<low_bytes>(low, view.master, element);
    }
}

template <class Formats>
__device__ __forceinline__ void load_param(Packet<4>& param, Packet<4>& master, const View& view, uint32_t element) {
    if constexpr (Formats::master == Master::kParameter) {
        load(param, view.param_type(), view.param, element);
    } else if constexpr (!is_remainder(Formats::master)) {
        load<master_bytes(Formats::master)>(master.words, view.master, element);
    } else {
        load<2>(param.words, view.param, element);
        load<master_bytes(Formats::master)>(master.words, view.master, element);
    }
}

// How eight elements of a state come and go.
template <StateKind kind, class Codec>
struct StateAccess {
    template <class Raw>
    __device__ __forceinline__ static void load_raw(Raw& raw, Format format, uint64_t address, uint32_t element) {
        if constexpr (is_scaled(Codec::format)) {
            load<format_bytes(Codec::format)>(raw.words, address, element);
        } else {
            load(raw, unscaled_type(format), address, element);
        }
    }

    template <class Raw>
    __device__ __forceinline__ static void decode_all(float* values, Raw& raw, Format format, float scale) {
        if constexpr (is_scaled(Codec::format)) {
            decode_words<Codec>(values, raw.words, scale);
        } else {
            decode(values, raw, unscaled_type(format));
        }
    }

    // `largest` and `root`: of a square, what the update has found.
    __device__ __forceinline__ static void store_all(const View& view, int state, Format format, uint32_t element,
                                                     const float* values, float largest, const float* root,
                                                     uint32_t group8, const Rounding& rounding) {
        if constexpr (is_scaled(Codec::format)) {
            constexpr int bytes = format_bytes(Codec::format);
            if constexpr (kind != StateKind::kSquare) largest = thread_absmax<kVector>(values);
            const Rounded<Rounding> rounded{values, group8, rounding};
            float* scale = &block->state_scales[state][element >> view.info.block_log2];
            const float inverse = store_scale<Codec>(largest, rounded, scale, view.info.block_log2, element).inverse;
            uint32_t words[2 * bytes];
            encode_words<Codec>(words, values, root, inverse, group8, rounding);
            store_codes<bytes>(words, inverse, view.states[state], element);
        } else {
            store<true>(values, group8, rounding, unscaled_type(format), view.states[state], element);
        }
    }
};

template <class Formats, int state>
using AccessOf =
    StateAccess<state_kind(Formats::rule, state), typename Formats::template Codec<state_kind(Formats::rule, state)>>;

// All that a thread reads for eight elements.
template <class Formats, class Packet4 = Packet<4>>
struct Raw {
    Packet4 grad{}, param{}, master{};  // zeros: unset words would stay alive across iterations
    Packet<format_bytes(Formats::format)> states[state_places(Formats::rule)]{};

    __device__ __forceinline__ void load_all(const View& view, uint32_t element) {
        load(grad, view.grad_type(), view.grad, element);
        if constexpr (reads_param(Formats::rule)) load_param<Formats>(param, master, view, element);
        each_state<Formats::rule>([&](auto state) {
            constexpr int i = decltype(state)::value;
            AccessOf<Formats, i>::load_raw(states[i], view.state_format(i), view.states[i], element);
        });
    }
};

// The update of a thread's elements, the twin of the CPU engine's. Returns the largest new square, NaN if one is.
template <Rule rule, int places = state_places(rule)>
__device__ __forceinline__ float update_values(float* grad, float* param, float (&states)[places][kVector], float* root,
                                               const RuleScalars& s) {
    constexpr int count = state_count(rule), square = square_state(rule);
    if (!s.unchanged_gradient) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) grad[i] = scaled_gradient(grad[i], s);
        if (s.l2_penalty != 0.0f) {
#pragma unroll
            for (int i = 0; i < kVector; ++i) grad[i] = penalized_gradient(grad[i], param[i], s);
        }
    }
    float direction[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        float own[places] = {};
#pragma unroll
        for (int k = 0; k < count; ++k) own[k] = states[k][i];
        direction[i] = Update<rule>::advance(grad[i], own, s);
#pragma unroll
        for (int k = 0; k < count; ++k) states[k][i] = own[k];
        if constexpr (square >= 0) root[i] = square_root(own[square]);
    }
    float largest = 0.0f;
    if constexpr (square >= 0) {
        largest = thread_absmax<kVector>(states[square]);
        if (float_bits(largest) >= kInfinity) {
#pragma unroll
            for (int i = 0; i < kVector; ++i) root[i] = root_of(rare(states[square][i]));
        }
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) param[i] = Update<rule>::next_param(param[i], direction[i], root[i], s);
    return largest;
}

// The eight elements of a thread.
template <class Formats>
struct Values {
    float grad[kVector], param[kVector], states[state_places(Formats::rule)][kVector];

    template <class Packet4>
    __device__ __forceinline__ void decode_all(const View& view, Raw<Formats, Packet4>& raw, uint32_t element) {
        const uint32_t scale = element >> view.info.block_log2;
        decode(grad, raw.grad, view.grad_type());
        const Master master = Formats::master_of(view.master_kind());
        const bool scaled = is_scaled(master);
        decode_param<Formats, Packet4>(param, view, raw.param, raw.master, scaled ? block->master_scales[scale] : 0.0f);
        each_state<Formats::rule>([&](auto state) {
            constexpr int i = decltype(state)::value;
            AccessOf<Formats, i>::decode_all(states[i], raw.states[i], view.state_format(i),
                                             block->state_scales[i][scale]);
        });
    }
};

template <class Formats>
__device__ __forceinline__ void update_vector(const View& view, const RuleScalars& scalars, Values<Formats>& values,
                                              uint32_t element) {
    Format formats[state_places(Formats::rule)];
    bool states_rotate = false;
    each_state<Formats::rule>([&](auto state) {
        constexpr int i = decltype(state)::value;
        formats[i] = view.state_format(i);
        states_rotate = states_rotate || formats[i] != Format::kFloat32;
    });
    const Master master = Formats::master_of(view.master_kind());
    float* master_scale = &block->master_scales[element >> view.info.block_log2];

    auto& [grad, param, states] = values;
    float root[kVector]{}, before[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) before[i] = param[i];
    const float largest = update_values<Formats::rule>(grad, param, states, root, scalars);

    uint32_t group8 = 0;
    if (states_rotate || master_rotates(master, view.param_type())) {
        group8 = scalars.rounding.group8(view.key, view.global_index(element));
    }
    store_param<Formats>(view, element, before, param, group8, scalars.rounding, master_scale);
    each_state<Formats::rule>([&](auto state) {
        constexpr int i = decltype(state)::value;
        AccessOf<Formats, i>::store_all(view, i, formats[i], element, values.states[i], largest, root, group8,
                                        scalars.rounding);
    });
}

// What the update has read, once more: it is still at hand, and costs fewer registers than to keep it.
__device__ __forceinline__ void store_unscaled(const View& view, const RuleScalars& scalars, uint32_t element) {
    Packet<4> raw{};
    float grad[kVector];
    load(raw, view.grad_type(), view.grad, element);
    decode(grad, raw, view.grad_type());
#pragma unroll
    for (int i = 0; i < kVector; ++i) grad[i] = unscaled_gradient(grad[i], block->scalars);
    store<false>(grad, 0, scalars.rounding, view.grad_type(), view.grad, element);
}

template <class T>
__device__ __forceinline__ void copy_scales(T* target, const T* source, uint32_t count) {
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) target[i] = source[i];
}

template <class Formats>
__device__ __forceinline__ void read_scales(const View& view, uint32_t blocks) {
    each_state<Formats::rule>([&](auto state) {
        constexpr int i = decltype(state)::value;
        if (Formats::has_scales(view.state_format(i)))
            copy_scales(block->state_scales[i], view.state_scales[i], blocks);
    });
    if (is_scaled(Formats::master_of(view.master_kind()))) {
        copy_scales(block->master_scales, view.master_scales, blocks);
    }
}

template <class Formats>
__device__ __forceinline__ void write_scales(const View& view, uint32_t blocks) {
    each_state<Formats::rule>([&](auto state) {
        constexpr int i = decltype(state)::value;
        if (Formats::has_scales(view.state_format(i)))
            copy_scales(view.state_scales[i], block->state_scales[i], blocks);
    });
    if (is_scaled(Formats::master_of(view.master_kind()))) {
        copy_scales(view.master_scales, block->master_scales, blocks);
    }
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

template <class Formats>
__device__ __forceinline__ void update_elements(const View& view, const RuleScalars& scalars, Values<Formats>& values,
                                                uint32_t element) {
    update_vector<Formats>(view, scalars, values, element);
    if (block->scalars.writes_gradient) store_unscaled(view, scalars, element);
}

// Each tile is loaded when its turn comes; other thread blocks fill the time.
template <class Formats>
__device__ __forceinline__ void loop_loading(const View& view, const RuleScalars& scalars) {
    for (uint32_t element = threadIdx.x * kVector; element < view.vector_count; element += kTile) {
        Raw<Formats> raw;
        raw.load_all(view, element);
        Values<Formats> values;
        values.decode_all(view, raw, element);
        update_elements<Formats>(view, scalars, values, element);
    }
}

// The next tiles are on their way while one is updated.
template <class Formats, bool usual>
__device__ __forceinline__ void loop_staged(const View& view, const RuleScalars& scalars, Ring<Formats, usual> ring) {
    uint32_t stage = 0;
#pragma unroll 1
    for (uint32_t element = threadIdx.x * kVector; element < view.vector_count; element += kTile) {
        Raw<Formats, OrderedPacket> raw;
        ring.take_tile(raw, stage);
        Values<Formats> values;
        values.decode_all(view, raw, element);
        ring.fetch_tile(element + ring.kStages * kTile, stage);
        update_elements<Formats>(view, scalars, values, element);
        stage = stage + 1 == ring.kStages ? 0 : stage + 1;
    }
}

template <class Formats, bool usual>
__device__ __forceinline__ void loop_over_chunk(const View& view) {
    const RuleScalars scalars = block->scalars;
    const uint32_t blocks = view.vector_count >> view.info.block_log2;
    if constexpr (Formats::staged) {
        const Ring<Formats, usual> ring{view, reinterpret_cast<char*>(block) + kBlockBytes<is_scaled(Formats::master)>};
        for (uint32_t stage = 0; stage < ring.kStages; ++stage) {
            ring.fetch_tile(threadIdx.x * kVector + stage * kTile, stage);
        }
        read_scales<Formats>(view, blocks);
        __syncthreads();
        loop_staged<Formats, usual>(view, scalars, ring);
    } else {
        read_scales<Formats>(view, blocks);
        __syncthreads();
        loop_loading<Formats>(view, scalars);
    }
    __syncthreads();
    write_scales<Formats>(view, blocks);
    if constexpr (Formats::has_weights) {
        if (view.info.quantized && view.param) dispatch_weight(view.weight_format(), CopyWeightScales{view});
    }
}

// The usual case has code of its own, which looks at neither types nor the size of blocks: to the compiler they are
// constants there.
template <class Formats>
__device__ __forceinline__ void vector_loop() {
    View view = block->view;
    if (Formats::staged && view.is_usual<Formats::has_weights>()) {
        view.assume_usual();
        loop_over_chunk<Formats, Formats::staged>(view);
    } else {
        loop_over_chunk<Formats, false>(view);
    }
}

}  // namespace
}  // namespace fused_optim
