// The two passes over elements of Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
// 2024), as torch.optim.Muon has them; the fused operations are written out. Between them matrices are orthogonalized.
#pragma once

#include "update.h"

namespace fused_optim {

// State: the momentum. The "parameter" takes what is to be orthogonalized, and is not read. `mixing`: the share of the
// new momentum in that, beside the gradient (Nesterov's; else 1).
template <>
struct Update<Rule::kMuon> {
    using S = Scalars<Rule::kMuon>;
    using Own = Averaging;

    FUSED_OPTIM_HD static double derive(Own& own, const Hyperparameters<Rule::kMuon>& h, double lr, int64_t) {
        own.set(h.momentum, h.mixing);
        return lr;
    }

    FUSED_OPTIM_HD static float advance(float grad, float (&states)[1], const S& s) {
        states[0] = fma(s.own.beta1, states[0], s.own.one_minus_beta1 * grad);
        return fma(s.own.beta2, states[0], s.own.one_minus_beta2 * grad);
    }

    FUSED_OPTIM_HD static float next_param(float, float direction, float, const S&) { return direction; }
};

// No state. The "gradient" is the direction.
template <>
struct Update<Rule::kDescent> {
    using S = Scalars<Rule::kDescent>;
    struct Own {};

    FUSED_OPTIM_HD static double derive(Own&, const Hyperparameters<Rule::kDescent>&, double lr, int64_t) { return lr; }

    FUSED_OPTIM_HD static float advance(float grad, float (&)[1], const S&) { return grad; }

    FUSED_OPTIM_HD static float next_param(float param, float direction, float, const S& s) {
        return fma(-s.step_size, direction, param * s.decay);
    }
};

}  // namespace fused_optim
