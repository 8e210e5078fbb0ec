// Marks elements whose bits differ from those of a copy, and brings the copy up to date.
#include "compare.h"
#include "cuda/device.h"
#include "cuda/units.cuh"

namespace fused_optim {
namespace {

constexpr uint32_t kCompareThreads = 256;
constexpr uint32_t kBytesPerThread = 64;  // of either side, all on their way at once, whatever an element is
constexpr uint64_t kUnitBytes = uint64_t{kCompareThreads} * kBytesPerThread;
constexpr uint32_t kWord = 32;  // elements of a word of bits

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
    constexpr uint32_t kGroups = kBytesPerThread / sizeof(Bits) / kGroup, kPerWord = 4 / sizeof(Bits);
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

// Any other unit: a thread has the elements of whole words of bits.
template <class Bits>
__device__ __forceinline__ void compare_elements(const Comparison& c, uint64_t first, uint64_t end) {
    Bits* const copy = reinterpret_cast<Bits*>(c.copy);
    const Bits* const values = reinterpret_cast<const Bits*>(c.values);
    for (uint64_t begin = first + threadIdx.x * kWord; begin < end; begin += kCompareThreads * kWord) {
        uint32_t found = 0;
        for (uint32_t i = 0; i < kWord && begin + i < end; ++i) {
            if (copy[begin + i] == values[begin + i]) continue;
            copy[begin + i] = values[begin + i];
            found |= 1u << i;
        }
        if (found) reinterpret_cast<uint32_t*>(c.bits)[begin / kWord] |= found;
    }
}

template <class Bits>
__device__ __forceinline__ void compare(const Comparison& c, uint32_t unit) {
    constexpr uint64_t kElements = kUnitBytes / sizeof(Bits);
    const uint64_t first = unit * kElements, end = first + kElements;
    const bool aligned = c.copy % sizeof(uint4) == 0 && c.values % sizeof(uint4) == 0;
    if (aligned && end <= c.numel) return compare_groups<Bits>(c, first);
    compare_elements<Bits>(c, first, end < c.numel ? end : c.numel);
}

__global__ void __launch_bounds__(kCompareThreads)
    mark_differences(const __grid_constant__ CompareArguments arguments) {
    const auto place = arguments.table.find(blockIdx.x);
    const Comparison& c = arguments.table.entries[place.entry];
    if (c.bytes == 1) return compare<uint8_t>(c, place.unit);
    if (c.bytes == 2) return compare<uint16_t>(c, place.unit);
    compare<uint32_t>(c, place.unit);
}

}  // namespace

void compare_cuda(const std::vector<Comparison>& comparisons, int device, uint64_t stream) {
    constexpr const char* kernel = "mark_differences";
    CudaDeviceGuard guard(kernel, device);
    CompareArguments arguments{};
    const auto units = [](const Comparison& c) { return (c.numel * c.bytes + kUnitBytes - 1) / kUnitBytes; };
    for_each_table(arguments.table, comparisons, units, [&](size_t, uint32_t grid) {
        mark_differences<<<grid, kCompareThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(arguments);
        check_cuda(cudaGetLastError(), kernel, device);
    });
}

}  // namespace fused_optim
