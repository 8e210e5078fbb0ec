// The kernel of shards whose mix has none of its own. Masters and formats are branches, taken alike by all threads of a
// thread block.
#include "cuda/kernel.cuh"

namespace fused_optim {
namespace {

// In place of Codec<format>.
template <template <Format> class Codec>
struct Any {};

// In place of a Mix.
struct AnyFormats {
    static constexpr bool has_weights = false;
    static constexpr bool staged = false;
    using M = Any<ExpAvg>;
    using V = Any<ExpAvgSq>;

    __device__ __forceinline__ static Master master_of(Master master) { return master; }
};

struct LoadWords {
    Packet<4>& raw;
    Format format;
    uint64_t address;
    uint32_t element;

    template <class Codec>
    __device__ __forceinline__ void operator()(Codec) const {
        if constexpr (is_scaled(Codec::format)) {
            load<sizeof(typename Codec::Bits)>(raw.words, address, element);
        } else {
            load(raw, unscaled_type(format), address, element);
        }
    }
};

struct DecodeWords {
    Packet<4>& raw;
    Format format;
    float scale;
    float* values;

    template <class Codec>
    __device__ __forceinline__ void operator()(Codec) const {
        if constexpr (is_scaled(Codec::format)) {
            decode_words<Codec>(values, raw.words, scale);
        } else {
            decode(values, raw, unscaled_type(format));
        }
    }
};

template <template <Format> class Codec>
struct Moment<Any<Codec>> {
    Packet<4> raw{};

    __device__ __forceinline__ void load_raw(Format format, uint64_t address, uint32_t element) {
        dispatch_codec<Codec>(format, LoadWords{raw, format, address, element});
    }
    __device__ __forceinline__ void decode_all(float* values, Format format, float scale) {
        dispatch_codec<Codec>(format, DecodeWords{raw, format, scale, values});
    }
};

struct StoreExpAvg {
    const View& view;
    Format format;
    uint32_t element;
    const float* m;
    uint32_t octet;
    const Rounding& rounding;
    float* scale;

    template <class Codec>
    __device__ __forceinline__ void operator()(Codec) const {
        store_exp_avg<Codec>(view, format, element, m, octet, rounding, scale);
    }
};

template <>
__device__ __forceinline__ void store_exp_avg<Any<ExpAvg>>(const View& view, Format format, uint32_t element,
                                                           const float* m, uint32_t octet, const Rounding& rounding,
                                                           float* scale) {
    dispatch_codec<ExpAvg>(format, StoreExpAvg{view, format, element, m, octet, rounding, scale});
}

struct StoreExpAvgSq {
    const View& view;
    Format format;
    uint32_t element;
    const float* v;
    float v_max;
    const float* root;
    uint32_t octet;
    const Rounding& rounding;
    float* scale;

    template <class Codec>
    __device__ __forceinline__ void operator()(Codec) const {
        store_exp_avg_sq<Codec>(view, format, element, v, v_max, root, octet, rounding, scale);
    }
};

template <>
__device__ __forceinline__ void store_exp_avg_sq<Any<ExpAvgSq>>(const View& view, Format format, uint32_t element,
                                                                const float* v, float v_max, const float* root,
                                                                uint32_t octet, const Rounding& rounding,
                                                                float* scale) {
    dispatch_codec<ExpAvgSq>(format, StoreExpAvgSq{view, format, element, v, v_max, root, octet, rounding, scale});
}

struct LoadParam {
    Packet<4>& param;
    Packet<4>& master;
    const View& view;
    uint32_t element;

    template <class MixType>
    __device__ __forceinline__ void operator()(MixType) const {
        load_param<MixType>(param, master, view, element);
    }
};

template <>
__device__ __forceinline__ void load_param<AnyFormats>(Packet<4>& param, Packet<4>& master, const View& view,
                                                       uint32_t element) {
    dispatch_master(view.master_kind(), LoadParam{param, master, view, element});
}

struct DecodeParam {
    float* values;
    const View& view;
    Packet<4>& param;
    Packet<4>& master;
    float master_scale;

    template <class MixType>
    __device__ __forceinline__ void operator()(MixType) const {
        decode_param<MixType>(values, view, param, master, master_scale);
    }
};

template <>
__device__ __forceinline__ void decode_param<AnyFormats, Packet<4>>(float* values, const View& view, Packet<4>& param,
                                                                    Packet<4>& master, float master_scale) {
    dispatch_master(view.master_kind(), DecodeParam{values, view, param, master, master_scale});
}

struct StoreParam {
    const View& view;
    uint32_t element;
    const float* before;
    float* values;
    uint32_t octet;
    const Rounding& rounding;
    float* master_scale;

    template <class MixType>
    __device__ __forceinline__ void operator()(MixType) const {
        store_param<MixType>(view, element, before, values, octet, rounding, master_scale);
    }
};

template <>
__device__ __forceinline__ void store_param<AnyFormats>(const View& view, uint32_t element, const float* before,
                                                        float* values, uint32_t octet, const Rounding& rounding,
                                                        float* master_scale) {
    dispatch_master(view.master_kind(), StoreParam{view, element, before, values, octet, rounding, master_scale});
}

template <>
__device__ __forceinline__ void read_scales<AnyFormats>(const View& view, uint32_t blocks) {
    if (is_scaled(view.exp_avg_format())) copy_scales(block->exp_avg_scales, view.exp_avg_scales, blocks);
    if (is_scaled(view.exp_avg_sq_format())) copy_scales(block->exp_avg_sq_scales, view.exp_avg_sq_scales, blocks);
    if (is_scaled(view.master_kind())) copy_scales(block->master_scales, view.master_scales, blocks);
}

template <>
__device__ __forceinline__ void write_scales<AnyFormats>(const View& view, uint32_t blocks) {
    if (is_scaled(view.exp_avg_format())) copy_scales(view.exp_avg_scales, block->exp_avg_scales, blocks);
    if (is_scaled(view.exp_avg_sq_format())) copy_scales(view.exp_avg_sq_scales, block->exp_avg_sq_scales, blocks);
    if (is_scaled(view.master_kind())) copy_scales(view.master_scales, block->master_scales, blocks);
}

struct AnyMix {
    static constexpr int kBlocksPerMultiprocessor = 4;
    static constexpr int kTilesPerChunk = kMaxTilesPerChunk;
    static constexpr bool kScaledMasters = true;
    static constexpr uint32_t kRingBytes = 0;
    using Table = BasicTable;

    __device__ __forceinline__ static void vectors() { vector_walk<AnyFormats>(); }
    __device__ __forceinline__ static void others() { general_walk<AllCodecs, false, kScaledMasters>(); }
};

}  // namespace

Kernel<BasicTable>& kernel_of_any_mix() {
    static Kernel<BasicTable> kernel{multi_tensor_adam<AnyMix>, kSharedBytes<AnyMix>, AnyMix::kTilesPerChunk,
                                     AnyMix::kScaledMasters, true};
    return kernel;
}

}  // namespace fused_optim
