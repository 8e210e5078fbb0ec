// Marks where two copies of tensors differ in their bits: of what an update does not mark itself.
#include "compare.h"
#include "cuda/device.h"
#include "cuda/units.cuh"
#include "cuda/warp.cuh"

namespace fused_optim {
namespace {

constexpr uint32_t kCompareThreads = 256;
constexpr uint32_t kElementsPerThread = 32;  // a word of bits
constexpr uint64_t kUnit = uint64_t{kCompareThreads} * kElementsPerThread;

struct CompareArguments {
    Table<Comparison, 720> table;
};
static_assert(sizeof(CompareArguments) <= kParameterLimit, "the table must fit into the kernel's parameters");

// A lane compares every 32nd element of its warp's, so that accesses lie side by side; a ballot has the bits of 32.
template <class Bits>
__device__ __forceinline__ void compare(const Comparison& c, uint64_t first) {
    const Bits* const before = reinterpret_cast<const Bits*>(c.before);
    const Bits* const after = reinterpret_cast<const Bits*>(c.after);
    const uint64_t of_warp = first + threadIdx.x / kWarp * uint64_t{kWarp} * kElementsPerThread;
    const uint32_t lane = threadIdx.x % kWarp;
    uint32_t own = 0;
#pragma unroll 8
    for (uint32_t k = 0; k < kElementsPerThread; ++k) {
        const uint64_t element = of_warp + k * kWarp + lane;
        const bool differs = element < c.numel && before[element] != after[element];
        const uint32_t word = __ballot_sync(kAllLanes, differs);
        own = lane == k ? word : own;
    }
    if (own) reinterpret_cast<uint32_t*>(c.bits)[of_warp / 32 + lane] |= own;
}

__global__ void __launch_bounds__(kCompareThreads)
    mark_differences(const __grid_constant__ CompareArguments arguments) {
    const auto place = arguments.table.find(blockIdx.x);
    const Comparison& c = arguments.table.entries[place.entry];
    const uint64_t first = uint64_t{place.unit} * kUnit;
    if (c.bytes == 1) return compare<uint8_t>(c, first);
    if (c.bytes == 2) return compare<uint16_t>(c, first);
    compare<uint32_t>(c, first);
}

}  // namespace

void compare_cuda(const std::vector<Comparison>& comparisons, int device, uint64_t stream) {
    constexpr const char* kernel = "mark_differences";
    CudaDeviceGuard guard(kernel, device);
    CompareArguments arguments{};
    const auto units = [](const Comparison& c) { return (c.numel + kUnit - 1) / kUnit; };
    for_each_table(arguments.table, comparisons, units, [&](size_t, uint32_t grid) {
        mark_differences<<<grid, kCompareThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(arguments);
        check_cuda(cudaGetLastError(), kernel, device);
    });
}

}  // namespace fused_optim
