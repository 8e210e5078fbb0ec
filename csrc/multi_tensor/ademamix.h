// AdEMAMix (Pagliardini et al., "The AdEMAMix Optimizer: Better, Faster, Older", 2024); the fused operations are
// written out. beta3 grows from beta1 so that the average's half-life grows linearly; alpha grows linearly.
#pragma once

#include "update.h"

namespace fused_optim {

// States: the fast first moment, the slow one, and the second moment.
template <>
struct Update<Rule::kAdemamix> {
    using S = Scalars<Rule::kAdemamix>;
    struct Own {
        Averaging rates;
        float beta3, one_minus_beta3;
        float inverse_correction1;       // the fast moment is multiplied by it
        float alpha;                     // the slow moment is multiplied by it
        float inverse_sqrt_correction2;  // roots are multiplied by it
        float eps;
    };

    FUSED_OPTIM_HD static double derive(Own& own, const Hyperparameters<Rule::kAdemamix>& h, double lr, int64_t step) {
        const double count = static_cast<double>(step);
        double one_minus_beta3 = 1.0 - h.beta3;
        if (count < h.t_beta3) {
            const double share = count / h.t_beta3;
            const double mixed = (1.0 - share) * h.log_beta3 + share * h.log_beta1;
            one_minus_beta3 = -exponential_minus_one(h.log_beta1 * h.log_beta3 / mixed);
        }
        own.rates.set(h.beta1, h.beta2);
        own.beta3 = static_cast<float>(1.0 - one_minus_beta3);
        own.one_minus_beta3 = static_cast<float>(one_minus_beta3);
        own.inverse_correction1 = static_cast<float>(1.0 / (1.0 - integer_power(h.beta1, step)));
        own.alpha = static_cast<float>(count < h.t_alpha ? h.alpha * count / h.t_alpha : h.alpha);
        own.inverse_sqrt_correction2 = static_cast<float>(1.0 / sqrt(1.0 - integer_power(h.beta2, step)));
        own.eps = static_cast<float>(h.eps);
        return lr;
    }

    FUSED_OPTIM_HD static float advance(float grad, float (&states)[3], const S& s) {
        const Averaging& r = s.own.rates;
        states[0] = fma(r.beta1, states[0], r.one_minus_beta1 * grad);
        states[1] = fma(s.own.beta3, states[1], s.own.one_minus_beta3 * grad);
        states[2] = fma_ftz(r.one_minus_beta2 * grad, grad, mul_ftz(r.beta2, states[2]));
        return fma(s.own.alpha, states[1], states[0] * s.own.inverse_correction1);
    }

    FUSED_OPTIM_HD static float next_param(float param, float direction, float root, const S& s) {
        float denominator = fma(root, s.own.inverse_sqrt_correction2, s.own.eps);
        return fma(-s.step_size, quotient(direction, denominator), param * s.decay);
    }
};

}  // namespace fused_optim
