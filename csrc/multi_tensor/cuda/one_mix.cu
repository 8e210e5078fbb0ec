// The kernels of the mixes in which both moments have one format, FUSED_OPTIM_FORMAT: compiled once per format.
#include <utility>

#include "cuda/kernel.cuh"

namespace fused_optim {
namespace {

// A kernel for steps that consist of one mix, but for few elements: norms and biases, whose states are FP32.
template <class MixType>
struct OneMix {
    // Measured on an H200. Without scales nothing is gained by more than a tile; where there is little to read,
    // instructions are the bound, and fewer chunks take fewer of them.
    static constexpr bool light = MixType::M::format == Format::kInt8 && MixType::master == Master::kParameter;
    static constexpr int kBlocksPerMultiprocessor = 7;
    static constexpr int kTilesPerChunk = !MixType::scaled ? 1 : light ? kMaxTilesPerChunk : kMaxTilesPerChunk / 2;
    static constexpr bool kScaledMasters = is_scaled(MixType::master);
    static constexpr uint32_t kRingBytes = ring_bytes<MixType>();
    using Table = std::conditional_t<MixType::has_weights, WeightsTable, BasicTable>;

    __device__ __forceinline__ static void vectors() { vector_walk<MixType>(); }
    __device__ __forceinline__ static void others() {
        general_walk<OwnCodecs<typename MixType::M, typename MixType::V>, MixType::has_weights, kScaledMasters>();
    }
};

constexpr Format kFormat = Format::FUSED_OPTIM_FORMAT;

template <Master master, bool has_weights>
auto make_kernel() {
    using Walks = OneMix<Mix<master, CodecOf<ExpAvg, kFormat>, CodecOf<ExpAvgSq, kFormat>, has_weights>>;
    return Kernel<typename Walks::Table>{multi_tensor_adam<Walks>,
                                         kSharedBytes<Walks>,
                                         Walks::kTilesPerChunk,
                                         Walks::kScaledMasters,
                                         false,
                                         master,
                                         kFormat,
                                         kFormat};
}

template <int... masters>
KernelsOfFormat make_kernels(std::integer_sequence<int, masters...>) {
    return {{make_kernel<static_cast<Master>(masters), false>()...},
            {make_kernel<Master::kFloat32, true>(), make_kernel<Master::kFloat16, true>()}};
}

}  // namespace

template <>
KernelsOfFormat& kernels_of<kFormat>() {
    static KernelsOfFormat all = make_kernels(std::make_integer_sequence<int, kCount<Master>>{});
    return all;
}

}  // namespace fused_optim
