// Tensors that are compared with copies of them.
#pragma once

#include <cstdint>
#include <vector>

namespace fused_optim {

// `bits`: one for each element, whole words of 32; set if copy and value differ. The copy takes the values.
struct Comparison {
    uint64_t copy;
    uint64_t values;
    uint64_t bits;
    uint64_t numel;
    uint32_t bytes;  // of an element: 1, 2 or 4
};

void compare_cuda(const std::vector<Comparison>& comparisons, int device, uint64_t stream);

}  // namespace fused_optim
