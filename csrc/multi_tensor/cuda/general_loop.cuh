// The general loop, one element per thread: shard ends, and shards whose addresses or offsets are not aligned.
#pragma once

#include "cuda/codecs.cuh"
#include "cuda/view.cuh"
#include "cuda/warp.cuh"
#include "dispatch.h"
#include "update.h"

namespace fused_optim {
namespace {

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
    Split split = kind == Master::kRemainder16 ? split_remainder16(value) : split_remainder8(value, bits);
    at<uint16_t>(view.param, element) = split.high;
    if (kind == Master::kRemainder16) {
        at<int16_t>(view.master, element) = split.low;
    } else {
        at<int8_t>(view.master, element) = static_cast<int8_t>(split.low);
    }
}

// The codecs that a kernel's general loop knows beside elements: those of one format, or all.
template <Format own>
struct OwnCodecs {
    template <StateKind kind, class Visitor>
    __device__ __forceinline__ static void visit(Format format, const Visitor& visitor) {
        is_scaled(format) ? visitor(CodecOf<kind, own>{}) : visitor(Unscaled{});
    }
};

struct AllCodecs {
    template <StateKind kind, class Visitor>
    __device__ __forceinline__ static void visit(Format format, const Visitor& visitor) {
        dispatch_codec<kind>(format, visitor);
    }
};

struct LoadState {
    Format format;
    uint64_t address;
    uint32_t element;
    const float* scales;
    int block_log2;
    float& value;

    __device__ __forceinline__ void operator()(Unscaled) const {
        value = load_element(unscaled_type(format), address, element);
    }
    template <class Codec>
    __device__ __forceinline__ void operator()(Codec) const {
        value = Codec::decode(at<typename Codec::Bits>(address, element), scales[element >> block_log2]);
    }
};

// The largest value among the 32, 64 or 128 neighbouring threads that hold a block. `partial`: shared, a slot per warp.
__device__ __forceinline__ float neighbours_max(float x, int block_log2, float* partial) {
    x = combine_lanes<kWarp>(x, max_or_nan);
    if (block_log2 == 5) return x;
    const uint32_t warp = threadIdx.x / kWarp;
    if (threadIdx.x % kWarp == 0) partial[warp] = x;
    __syncthreads();
    x = max_or_nan(x, partial[warp ^ 1]);
    return block_log2 == 6 ? x : max_or_nan(x, max_or_nan(partial[warp ^ 2], partial[warp ^ 3]));
}

// Called by all threads; those beyond the end, which are not `inside`, hold a zero.
struct StoreState {
    Format format;
    uint64_t address;
    uint32_t element;
    bool inside;
    float value;
    float root;  // of a square
    uint32_t bits;
    float* scales;
    int block_log2;
    float* partial;  // shared: two slots per warp

    __device__ __forceinline__ void operator()(Unscaled) const {
        if (inside) store_element<true>(unscaled_type(format), address, element, value, bits);
    }
    template <class Codec>
    __device__ __forceinline__ void operator()(Codec) const {
        uint32_t largest = float_bits(block_max(fabsf(value), partial));
        if constexpr (kFollowsRounding<Codec>) {
            const float rounded = bits_float(float16_rounded(value, bits));
            largest = float16_largest(largest, float_bits(block_max(rounded, partial + kThreads / 32)));
        }
        BlockScale fresh = Codec::scale(largest);
        if (!inside) return;
        if ((element & ((1u << block_log2) - 1)) == 0) scales[element >> block_log2] = fresh.scale;
        const uint32_t code = encode_state<Codec>(value, root, fresh.inverse, bits);
        at<typename Codec::Bits>(address, element) =
            static_cast<typename Codec::Bits>(fresh.inverse != 0.0f ? code : 0u);
    }
    __device__ __forceinline__ float block_max(float x, float* slots) const {
        return neighbours_max(x, block_log2, slots);
    }
};

// As the vector loop's, of one element per thread.
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
                constexpr int block_log2 = Codec::kBlock == 32 ? 5 : Codec::kBlock == 64 ? 6 : 7;
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
        const uint32_t largest = __reduce_max_sync(kAllLanes, store.finite());
        if (threadIdx.x % kWarp == 0) atomicMax(&block->weight_absmax, largest);
    }
    if (view.param) dispatch_weight(view.weight_format(), store);
}

__device__ __forceinline__ float load_float16_master(const View& view, uint32_t element) {
    return Float16Master::decode(at<uint16_t>(view.master, element),
                                 view.master_scales[element >> view.info.block_log2]);
}

// Called by all threads; those that are not `inside` hold a zero. Returns the value of the master as it is now.
__device__ __forceinline__ float store_float16_master(const View& view, uint32_t element, bool inside, float value,
                                                      uint32_t bits) {
    StoreState{Format::kFloat16,
               view.master,
               element,
               inside,
               value,
               value,
               bits,
               view.master_scales,
               static_cast<int>(view.info.block_log2),
               block->master_scales}(Float16Master{});
    __syncthreads();  // the scale is another thread's
    if (!inside) return 0.0f;
    value = load_float16_master(view, element);
    if (!view.info.quantized) store_element<false>(view.param_type(), view.param, element, value, 0);
    return value;
}

// Elements that the vector loop leaves: each thread of the block updates one. `scaled_masters`: there may be some.
template <Rule rule, class Codecs, bool has_weights, bool scaled_masters>
__device__ __noinline__ void general_loop() {
    constexpr int count = state_count(rule), square = square_state(rule);
    const View& view = block->view;
    const RuleScalars& scalars = block->scalars;
    const int block_log2 = view.info.block_log2;
    Format formats[state_places(rule)];
#pragma unroll
    for (int i = 0; i < count; ++i) formats[i] = view.state_format(i);
    const bool scaled_master = scaled_masters && is_scaled(view.master_kind());
    for (uint32_t first = view.vector_count; first < view.count; first += kThreads) {
        const uint32_t element = first + threadIdx.x;
        const bool inside = element < view.count;
        float states[state_places(rule)] = {}, root = 0.0f, param = 0.0f;
        uint32_t bits = 0, master_bits = 0;
        if (inside) {
            each_state<rule>([&](auto state) {
                constexpr int i = decltype(state)::value;
                Codecs::template visit<state_kind(rule, i)>(
                    formats[i],
                    LoadState{formats[i], view.states[i], element, view.state_scales[i], block_log2, states[i]});
            });
            float grad = load_element(view.grad_type(), view.grad, element);
            if (scalars.writes_gradient) {
                store_element<false>(view.grad_type(), view.grad, element, unscaled_gradient(grad, scalars), 0);
            }
            grad = scaled_gradient(grad, scalars);
            if constexpr (reads_param(rule)) {
                param = scaled_master ? load_float16_master(view, element) : load_master(view, element);
            }
            if (scalars.l2_penalty != 0.0f) grad = penalized_gradient(grad, param, scalars);
            const float direction = Update<rule>::advance(grad, states, scalars);
            if constexpr (square >= 0) root = root_of(states[square]);
            const uint64_t global = view.global_index(element);
            const uint32_t group8 = scalars.rounding.group8(view.key, global);
            bits = scalars.rounding.bits(group8, static_cast<uint32_t>(global));
            const float before = param;
            param = Update<rule>::next_param(param, direction, root, scalars);
            if (scaled_master) master_bits = master_rounding(before, param, bits);
            if (!scaled_master) store_master(view, element, param, bits);
        }
        __syncthreads();  // every thread has read the old scales, and the partial maxima of the round before
        if (scaled_master) param = store_float16_master(view, element, inside, param, master_bits);
        if (has_weights && view.info.quantized) store_weight_element(view, element, inside, param);
        each_state<rule>([&](auto state) {
            constexpr int i = decltype(state)::value;
            Codecs::template visit<state_kind(rule, i)>(
                formats[i], StoreState{formats[i], view.states[i], element, inside, states[i], root, bits,
                                       view.state_scales[i], block_log2, block->state_scales[i]});
        });
    }
}

}  // namespace
}  // namespace fused_optim
