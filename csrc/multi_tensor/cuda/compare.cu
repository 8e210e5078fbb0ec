// Marks elements whose bits differ from those of a copy, and brings the copy up to date.
#include "compare.h"
#include "cuda/device.h"
#include "cuda/units.cuh"

namespace fused_optim {
namespace {

constexpr uint32_t kCompareThreads = 256;
constexpr uint32_t kElementsPerThread = 32;  // a word of bits
constexpr uint64_t kUnit = uint64_t{kCompareThreads} * kElementsPerThread;

struct CompareArguments {
    Table<Comparison, 720> table;
};
static_assert(sizeof(CompareArguments) <= kParameterLimit, "the table must fit into the kernel's parameters");

// Which elements of a word differ, from bit 0 on.
template <class Bits>
__device__ __forceinline__ uint32_t differing(uint32_t a, uint32_t b) {
    if constexpr (sizeof(Bits) == 4) return a != b ? 1u : 0u;
    if constexpr (sizeof(Bits) == 2) return ((a ^ b) & 0xFFFFu ? 1u : 0u) | ((a ^ b) >> 16 ? 2u : 0u);
    constexpr uint32_t kGather = 0x01020408u;  // brings the lowest bits of four bytes together in the highest byte
    return (__vsetne4(a, b) * kGather >> 24) & 0xFu;
}

// A unit that is whole and aligned. Neighbouring threads have neighbouring groups, whose bits are whole bytes; all
// loads of a thread are made before the first store.
template <class Bits>
__device__ __forceinline__ void compare_groups(const Comparison& c, uint64_t first) {
    constexpr uint32_t kVectors = sizeof(Bits) == 4 ? 2 : 1;  // of 16 bytes, in a group
    constexpr uint32_t kGroup = kVectors * sizeof(uint4) / sizeof(Bits);
    constexpr uint32_t kGroups = kElementsPerThread / kGroup, kPerWord = 4 / sizeof(Bits);
    uint4* const copy = reinterpret_cast<uint4*>(c.copy + first * sizeof(Bits));
    const uint4* const values = reinterpret_cast<const uint4*>(c.values + first * sizeof(Bits));
    uint4 was[kGroups][kVectors], is[kGroups][kVectors];
#pragma unroll
    for (uint32_t k = 0; k < kGroups; ++k) {
#pragma unroll
        for (uint32_t v = 0; v < kVectors; ++v) {
            const uint32_t at = (k * kCompareThreads + threadIdx.x) * kVectors + v;
            was[k][v] = copy[at];
            is[k][v] = values[at];
        }
    }
#pragma unroll
    for (uint32_t k = 0; k < kGroups; ++k) {
        const uint32_t group = k * kCompareThreads + threadIdx.x;
        uint32_t found = 0;
#pragma unroll
        for (uint32_t v = 0; v < kVectors; ++v) {
            const uint4 &a = was[k][v], &b = is[k][v];
            const uint32_t own = differing<Bits>(a.x, b.x) | differing<Bits>(a.y, b.y) << kPerWord |
                                 differing<Bits>(a.z, b.z) << 2 * kPerWord | differing<Bits>(a.w, b.w) << 3 * kPerWord;
            if (own) copy[group * kVectors + v] = b;
            found |= own << v * 4 * kPerWord;
        }
        if (!found) continue;
        if constexpr (kGroup == 16) {
            reinterpret_cast<uint16_t*>(c.bits)[first / kGroup + group] |= static_cast<uint16_t>(found);
        } else {
            reinterpret_cast<uint8_t*>(c.bits)[first / kGroup + group] |= static_cast<uint8_t>(found);
        }
    }
}

// Any other unit: a thread has neighbouring elements.
template <class Bits>
__device__ __forceinline__ void compare_elements(const Comparison& c, uint64_t first) {
    Bits* const copy = reinterpret_cast<Bits*>(c.copy);
    const Bits* const values = reinterpret_cast<const Bits*>(c.values);
    const uint64_t begin = first + threadIdx.x * kElementsPerThread;
    uint32_t found = 0;
    for (uint32_t i = 0; i < kElementsPerThread && begin + i < c.numel; ++i) {
        if (copy[begin + i] == values[begin + i]) continue;
        copy[begin + i] = values[begin + i];
        found |= 1u << i;
    }
    if (found) reinterpret_cast<uint32_t*>(c.bits)[begin / kElementsPerThread] |= found;
}

template <class Bits>
__device__ __forceinline__ void compare(const Comparison& c, uint64_t first) {
    const bool aligned = c.copy % sizeof(uint4) == 0 && c.values % sizeof(uint4) == 0;
    aligned&& first + kUnit <= c.numel ? compare_groups<Bits>(c, first) : compare_elements<Bits>(c, first);
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
