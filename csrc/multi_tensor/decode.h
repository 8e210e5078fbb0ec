// Stored states and split masters in host memory as FP32 values, which checkpoints hold: by the CPU engine alone, on
// the calling thread. The PyTorch reference (fused_optim/formats/) defines the bits.
#pragma once

#include <cstdint>

#include "table.h"

namespace fused_optim {

// `scale`: of each `block` elements, of which the last ones may be fewer; 0 for BF16.
struct StoredState {
    uint64_t bits;
    uint64_t scale;
    uint64_t numel;
    uint64_t block;
    Format format;
    StateKind kind;
};

void decode_state_cpu(const StoredState& state, float* values);

// `low`: 16 bits of each, or 8.
void join_remainder_cpu(const uint16_t* high, const int16_t* low, uint64_t numel, float* values);
void join_remainder_cpu(const uint16_t* high, const int8_t* low, uint64_t numel, float* values);

}  // namespace fused_optim
