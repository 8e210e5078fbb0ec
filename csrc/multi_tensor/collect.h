// Which elements of tensors have a bit set, and what they are: how many there are in each unit of elements, and then,
// where all units before have their places, indices and values. What both engines do, and what they offer.
#pragma once

#include <cstdint>
#include <vector>

#include "table.h"

namespace fused_optim {

constexpr uint32_t kBitsOfWord = 32;
constexpr uint32_t kUnitWords = 1024;
constexpr uint64_t kUnitBits = uint64_t{kUnitWords} * kBitsOfWord;

// A tensor. `bits`: one for each element, whole words; those beyond the last element are 0.
struct Marked {
    uint64_t bits;
    uint64_t numel;
    uint64_t first_unit;  // number of its first unit among those of all tensors
    // What only collecting needs:
    uint64_t values;
    uint64_t first;        // what the index of element 0 is
    uint64_t bytes;        // of an element: 1, 2 or 4
    uint64_t indices_out;  // int64, one for each bit that is set; 0: all are, and only values are wanted
    uint64_t values_out;

    FUSED_OPTIM_HD uint64_t units() const { return (numel + kUnitBits - 1) / kUnitBits; }
    FUSED_OPTIM_HD uint64_t words() const { return (numel + kBitsOfWord - 1) / kBitsOfWord; }
    FUSED_OPTIM_HD uint32_t word(uint64_t i) const {
        return i < words() ? reinterpret_cast<const uint32_t*>(bits)[i] : 0u;
    }
};

template <class Visit>
FUSED_OPTIM_HD void dispatch_bytes(uint64_t bytes, const Visit& visit) {
    if (bytes == 1) return visit(uint8_t{});
    if (bytes == 2) return visit(uint16_t{});
    visit(uint32_t{});
}

// How many bits are set: in all of each tensor, which is returned, and in `places`, in the memory of the tensors'
// device, in the tensor's units before each unit. `places` has a number per unit and, after those, one per tensor.
// Waits for the device.
std::vector<int64_t> count_cpu(const std::vector<Marked>& tensors, int64_t* places, int threads);
std::vector<int64_t> count_cuda(const std::vector<Marked>& tensors, int64_t* places, int device, uint64_t stream);

// Waits for nothing.
void collect_cpu(const std::vector<Marked>& tensors, const int64_t* places, int threads);
void collect_cuda(const std::vector<Marked>& tensors, const int64_t* places, int device, uint64_t stream);

}  // namespace fused_optim
