// Adam(W), following torch.optim.Adam(W) (Kingma & Ba 2015; Loshchilov & Hutter 2019); the fused operations are written
// out. Denormal second moments become zero: their roots lie 11 orders of magnitude below the usual eps.
#pragma once

#include "update.h"

namespace fused_optim {

// States: the first moment, and the second.
template <>
struct Update<Rule::kAdam> {
    FUSED_OPTIM_HD static void correct(Scalars& s, const Hyper& hyper, double lr, int64_t step) {
        double correction1 = hyper.bias_correction ? 1.0 - integer_power(hyper.beta1, step) : 1.0;
        double correction2 = hyper.bias_correction ? 1.0 - integer_power(hyper.beta2, step) : 1.0;
        s.inverse_sqrt_correction2 = static_cast<float>(1.0 / sqrt(correction2));
        s.step_size = static_cast<float>(lr / correction1);
    }

    FUSED_OPTIM_HD static float advance(float grad, float (&states)[2], const Scalars& s) {
        states[0] = fma(s.beta1, states[0], s.one_minus_beta1 * grad);
        states[1] = fma_ftz(s.one_minus_beta2 * grad, grad, mul_ftz(s.beta2, states[1]));
        return states[0];
    }

    FUSED_OPTIM_HD static float next_param(float param, float direction, float root, const Scalars& s) {
        float denominator = fma(root, s.inverse_sqrt_correction2, s.eps);
        return fma(-s.step_size, quotient(direction, denominator), param * s.decay);
    }
};

}  // namespace fused_optim
