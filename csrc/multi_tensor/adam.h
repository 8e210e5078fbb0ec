// Adam(W), following torch.optim.Adam(W) (Kingma & Ba 2015; Loshchilov & Hutter 2019); the fused operations are written
// out. Denormal second moments become zero: their roots lie 11 orders of magnitude below the usual eps.
#pragma once

#include "update.h"

namespace fused_optim {

// States: the first moment, and the second.
template <>
struct Update<Rule::kAdam> {
    using S = Scalars<Rule::kAdam>;
    struct Own {
        Averaging rates;
        float inverse_sqrt_correction2;  // roots are multiplied by it
        float eps;
    };

    FUSED_OPTIM_HD static double derive(Own& own, const Hyperparameters<Rule::kAdam>& h, double lr, int64_t step) {
        const bool corrects = h.bias_correction != 0.0;
        double correction1 = corrects ? 1.0 - integer_power(h.beta1, step) : 1.0;
        double correction2 = corrects ? 1.0 - integer_power(h.beta2, step) : 1.0;
        own.rates.set(h.beta1, h.beta2);
        own.inverse_sqrt_correction2 = static_cast<float>(1.0 / sqrt(correction2));
        own.eps = static_cast<float>(h.eps);
        return lr / correction1;
    }

    FUSED_OPTIM_HD static float advance(float grad, float (&states)[2], const S& s) {
        const Averaging& r = s.own.rates;
        states[0] = fma(r.beta1, states[0], r.one_minus_beta1 * grad);
        states[1] = fma_ftz(r.one_minus_beta2 * grad, grad, mul_ftz(r.beta2, states[1]));
        return states[0];
    }

    FUSED_OPTIM_HD static float next_param(float param, float direction, float root, const S& s) {
        float denominator = fma(root, s.own.inverse_sqrt_correction2, s.own.eps);
        return fma(-s.step_size, quotient(direction, denominator), param * s.decay);
    }
};

}  // namespace fused_optim
