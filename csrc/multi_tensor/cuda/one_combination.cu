// The kernels of the combinations in which all states have one format: compiled once per update rule, FUSED_OPTIM_RULE,
// and format, FUSED_OPTIM_FORMAT.
#include <utility>

#include "cuda/kernel.cuh"

namespace fused_optim {
namespace {

// A kernel for steps that consist of one combination, but for few elements: norms and biases, whose states are FP32.
template <class Formats>
struct OneCombination {
    // Scaled masters of quantized weights need the registers that one thread block less leaves to each.
    static constexpr int kBlocksPerMultiprocessor = Formats::has_weights && is_scaled(Formats::master) ? 6 : 7;
    static constexpr int kTilesPerChunk = Pace<Formats>::kTilesPerChunk;
    static constexpr bool kScaledMasters = is_scaled(Formats::master);
    static constexpr uint32_t kRingBytes = ring_bytes<Formats>();
    using Table = std::conditional_t<Formats::has_weights, WeightsTable<Formats::rule>, BasicTable<Formats::rule>>;

    __device__ __forceinline__ static void vectors() { vector_loop<Formats>(); }
    __device__ __forceinline__ static void others() {
        general_loop<Formats::rule, OwnCodecs<Formats::format>, Formats::has_weights, kScaledMasters>();
    }
};

constexpr Rule kRule = Rule::FUSED_OPTIM_RULE;
constexpr Format kFormat = Format::FUSED_OPTIM_FORMAT;

template <Master master, bool has_weights>
auto* kernel() {
    using Loops = OneCombination<Combination<kRule, master, kFormat, has_weights>>;
    static Kernel<typename Loops::Table> own{multi_tensor_update<Loops>,
                                             kSharedBytes<Loops>,
                                             Loops::kTilesPerChunk,
                                             Loops::kScaledMasters,
                                             false,
                                             master,
                                             kFormat};
    return &own;
}

template <int... masters>
KernelsOfFormat<kRule> kernels(std::integer_sequence<int, masters...>) {
    // What takes the place of the parameter is never a weight, and has no master.
    if constexpr (!reads_param(kRule))
        return {{kernel<Master::kParameter, false>()}, {}};
    else
        return {{kernel<static_cast<Master>(masters), false>()...},
                {kernel<Master::kFloat32, true>(), kernel<Master::kFloat16, true>()}};
}

}  // namespace

template <>
const KernelsOfFormat<kRule>& kernels_of<kRule, kFormat>() {
    static const KernelsOfFormat<kRule> all = kernels(std::make_integer_sequence<int, kCount<Master>>{});
    return all;
}

}  // namespace fused_optim
