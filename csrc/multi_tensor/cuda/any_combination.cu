// The kernel of shards whose combination has none of its own, compiled once per update rule, FUSED_OPTIM_RULE.
#include "cuda/any_formats.cuh"
#include "cuda/kernel.cuh"

namespace fused_optim {
namespace {

struct AnyCombination {
    static constexpr int kBlocksPerMultiprocessor = 4;
    static constexpr int kTilesPerChunk = kMaxTilesPerChunk;
    static constexpr bool kScaledMasters = true;
    static constexpr uint32_t kRingBytes = 0;
    using Table = BasicTable<AnyFormats::rule>;

    __device__ __forceinline__ static void vectors() { vector_loop<AnyFormats>(); }
    __device__ __forceinline__ static void others() {
        general_loop<AnyFormats::rule, AllCodecs, false, kScaledMasters>();
    }
};

}  // namespace

template <>
Kernel<AnyCombination::Table>& kernel_of_any_combination<AnyFormats::rule>() {
    static Kernel<AnyCombination::Table> kernel{multi_tensor_update<AnyCombination>, kSharedBytes<AnyCombination>,
                                                AnyCombination::kTilesPerChunk, AnyCombination::kScaledMasters, true};
    return kernel;
}

}  // namespace fused_optim
