// Shards of Muon in its two passes over elements: the first writes what is to be orthogonalized, the second reads what
// was made of that.
#pragma once

#include <cstdint>

#include "table.h"

namespace fused_optim {

// `update`: takes the place of the parameter.
inline Shard before_matrices(Shard s, uint64_t update, Element type) {
    s.param = update;
    s.param_type = type;
    s.master = s.weight_scales = s.absmax = 0;
    s.master_kind = Master::kParameter;
    s.quantized = false;
    return s;
}

// `direction`: takes the place of the gradient. There are no states, so only the master's scales are left.
inline Shard after_matrices(Shard s, uint64_t direction, Element type) {
    s.grad = direction;
    s.grad_type = type;
    for (const State& state : s.states) {
        if (is_scaled(state.format)) s.scales += block_count(s) * sizeof(float);
    }
    for (State& state : s.states) state = {};
    return s;
}

}  // namespace fused_optim
