// What an engine offers to compare copies of tensors with what they are.
#pragma once

#include <cstdint>
#include <vector>

namespace fused_optim {

// `bits`: one for each element, which is set where `before` and `after` differ in theirs; whole words of 32.
struct Comparison {
    uint64_t before;
    uint64_t after;
    uint64_t bits;
    uint64_t numel;
    uint32_t bytes;  // of an element: 1, 2 or 4
};

void compare_cuda(const std::vector<Comparison>& comparisons, int device, uint64_t stream);

}  // namespace fused_optim
