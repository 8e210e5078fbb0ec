// Marks where two copies of tensors differ in their bits: of what an update does not mark itself.
#include <algorithm>
#include <stdexcept>

#include "compare.h"
#include "cuda/device.h"
#include "cuda/warp.cuh"

namespace fused_optim {
namespace {

constexpr uint32_t kCompareThreads = 256;
constexpr uint32_t kElementsPerThread = 32;  // a word of bits
constexpr uint64_t kUnit = uint64_t{kCompareThreads} * kElementsPerThread;
constexpr uint32_t kMostComparisons = 720;
constexpr uint32_t kLargestGrid = 0x7FFFFFFFu;

struct CompareArguments {
    Comparison entries[kMostComparisons];
    uint32_t ends[kMostComparisons];  // units up to and with this one
    uint32_t count;
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
    uint32_t low = 0, high = arguments.count - 1;
    while (low < high) {
        const uint32_t middle = (low + high) / 2;
        if (blockIdx.x < arguments.ends[middle]) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    const Comparison& c = arguments.entries[low];
    const uint64_t first = uint64_t{low == 0 ? blockIdx.x : blockIdx.x - arguments.ends[low - 1]} * kUnit;
    if (c.bytes == 1) return compare<uint8_t>(c, first);
    if (c.bytes == 2) return compare<uint16_t>(c, first);
    compare<uint32_t>(c, first);
}

}  // namespace

void compare_cuda(const std::vector<Comparison>& comparisons, int device, uint64_t stream) {
    constexpr const char* kernel = "mark_differences";
    CudaDeviceGuard guard(kernel, device);
    CompareArguments arguments{};
    for (size_t next = 0; next < comparisons.size();) {
        uint64_t units = 0;
        arguments.count = 0;
        for (; next < comparisons.size() && arguments.count < kMostComparisons; ++next) {
            const uint64_t more = (comparisons[next].numel + kUnit - 1) / kUnit;
            if (more > kLargestGrid) throw std::runtime_error("fused_optim: a parameter is too large to be compared");
            if (units + more > kLargestGrid) break;
            units += more;
            arguments.entries[arguments.count] = comparisons[next];
            arguments.ends[arguments.count++] = static_cast<uint32_t>(units);
        }
        if (!units) continue;
        mark_differences<<<static_cast<uint32_t>(units), kCompareThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(
            arguments);
        check_cuda(cudaGetLastError(), kernel, device);
    }
}

}  // namespace fused_optim
