// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023); the fused operations are written out.
#pragma once

#include "update.h"

namespace fused_optim {

// States: the momentum.
template <>
struct Update<Rule::kLion> {
    using S = Scalars<Rule::kLion>;
    using Own = Averaging;

    FUSED_OPTIM_HD static double derive(Own& own, const Hyperparameters<Rule::kLion>& h, double lr, int64_t) {
        own.set(h.beta1, h.beta2);
        return lr;
    }

    FUSED_OPTIM_HD static float advance(float grad, float (&states)[1], const S& s) {
        const float mixed = fma(s.own.beta1, states[0], s.own.one_minus_beta1 * grad);
        states[0] = fma(s.own.beta2, states[0], s.own.one_minus_beta2 * grad);
        return mixed > 0.0f ? 1.0f : mixed < 0.0f ? -1.0f : mixed + 0.0f;  // 0 of either zero, and NaN
    }

    FUSED_OPTIM_HD static float next_param(float param, float direction, float, const S& s) {
        return fma(-s.step_size, direction, param * s.decay);
    }
};

}  // namespace fused_optim
