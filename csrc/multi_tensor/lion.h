// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023); the fused operations are written out.
#pragma once

#include "update.h"

namespace fused_optim {

// States: the momentum.
template <>
struct Update<Rule::kLion> {
    FUSED_OPTIM_HD static void correct(Scalars& s, const Hyper&, double lr, int64_t) {
        s.step_size = static_cast<float>(lr);
    }

    FUSED_OPTIM_HD static float advance(float grad, float (&states)[1], const Scalars& s) {
        const float mixed = fma(s.beta1, states[0], s.one_minus_beta1 * grad);
        states[0] = fma(s.beta2, states[0], s.one_minus_beta2 * grad);
        return mixed > 0.0f ? 1.0f : mixed < 0.0f ? -1.0f : mixed + 0.0f;  // 0 of either zero, and NaN
    }

    FUSED_OPTIM_HD static float next_param(float param, float direction, float, const Scalars& s) {
        return fma(-s.step_size, direction, param * s.decay);
    }
};

}  // namespace fused_optim
