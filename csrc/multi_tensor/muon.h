// The two passes over elements of Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
// 2024), as torch.optim.Muon has them; the fused operations are written out. Between them matrices are orthogonalized.
#pragma once

#include "update.h"

namespace fused_optim {

// State: the momentum. The "parameter" takes what is to be orthogonalized, and is not read. beta1: of the momentum;
// beta2: how much of the new momentum that is, beside the gradient (Nesterov's; else 1).
template <>
struct Update<Rule::kMuon> {
    FUSED_OPTIM_HD static void correct(Scalars&, const Hyper&, double, int64_t) {}

    FUSED_OPTIM_HD static float advance(float grad, float (&states)[1], const Scalars& s) {
        states[0] = fma(s.beta1, states[0], s.one_minus_beta1 * grad);
        return fma(s.beta2, states[0], s.one_minus_beta2 * grad);
    }

    FUSED_OPTIM_HD static float next_param(float, float direction, float, const Scalars&) { return direction; }
};

// No state. The "gradient" is the direction.
template <>
struct Update<Rule::kDescent> {
    FUSED_OPTIM_HD static void correct(Scalars& s, const Hyper&, double lr, int64_t) {
        s.step_size = static_cast<float>(lr);
    }

    FUSED_OPTIM_HD static float advance(float grad, float (&)[1], const Scalars&) { return grad; }

    FUSED_OPTIM_HD static float next_param(float param, float direction, float, const Scalars& s) {
        return fma(-s.step_size, direction, param * s.decay);
    }
};

}  // namespace fused_optim
