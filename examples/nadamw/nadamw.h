// NAdamW: AdamW with Nesterov's momentum. The twin of nadamw.py, operation by operation.
#pragma once

#include "update.h"

namespace fused_optim {

template <>
struct Update<Rule::kNadamw> {
    using S = Scalars<Rule::kNadamw>;
    struct Own {
        Averaging rates;
        float inverse_sqrt_correction2, eps;
    };

    FUSED_OPTIM_HD static double derive(Own& own, const Hyperparameters<Rule::kNadamw>& h, double lr, int64_t step) {
        own.rates.set(h.beta1, h.beta2);
        own.inverse_sqrt_correction2 = static_cast<float>(1.0 / sqrt(1.0 - integer_power(h.beta2, step)));
        own.eps = static_cast<float>(h.eps);
        return lr / (1.0 - integer_power(h.beta1, step));
    }

    FUSED_OPTIM_HD static float advance(float grad, float (&states)[2], const S& s) {
        const Averaging& r = s.own.rates;
        states[0] = fma(r.beta1, states[0], r.one_minus_beta1 * grad);
        states[1] = fma_ftz(r.one_minus_beta2 * grad, grad, mul_ftz(r.beta2, states[1]));
        return fma(r.beta1, states[0], r.one_minus_beta1 * grad);
    }

    FUSED_OPTIM_HD static float next_param(float param, float direction, float root, const S& s) {
        const float denominator = fma(root, s.own.inverse_sqrt_correction2, s.own.eps);
        return fma(-s.step_size, quotient(direction, denominator), param * s.decay);
    }
};

}  // namespace fused_optim
