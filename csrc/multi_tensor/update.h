// What all update rules share: their scalars, and what becomes of gradients before a rule sees them.
#pragma once

#include <cstring>

#include "formats.h"

namespace fused_optim {

// The math of one element, in FP32; each rule's is in its own header:
//   Own                                the rule's own scalars, floats
//   derive(own, hyperparameters, lr, step)    sets them, from double precision, and returns the step size.
//   advance(grad, states, scalars)     puts the new states in the old ones' places, and returns the direction. `states`
//                                      has state_places(rule) elements.
//   next_param(param, direction, root, scalars)    `root`: of the new state that is a square, where there is one.
template <Rule rule>
struct Update;

// The rule's hyperparameters, as rules.toml names them.
template <Rule rule>
struct Hyperparameters;
#define FUSED_OPTIM_FIELDS(enumerator, fields) \
    template <>                                \
    struct Hyperparameters<Rule::enumerator> { \
        fields                                 \
    };
FUSED_OPTIM_HYPERPARAMETERS(FUSED_OPTIM_FIELDS)
#undef FUSED_OPTIM_FIELDS

// Inputs of an element's update, derived once per step and group.
template <Rule rule>
struct Scalars {
    float grad_factor;
    union {
        typename Update<rule>::Own own;
        float reserved[6];  // as many for every rule with less: kernels address what follows alike
    };
    float step_size;
    float decay;       // decoupled: the parameter is multiplied by it
    float l2_penalty;  // coupled: added to the gradient, times the parameter
    float grad_scale;  // what gradients that are written back were multiplied by
    float inverse_grad_scale;
    bool writes_gradient;
    bool unchanged_gradient;  // neither scaled nor penalized nor written
    bool skipped;
    Rounding rounding;
};

// Scalars of two averages, beta * average + (1 - beta) * value each.
struct Averaging {
    float beta1;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;

    FUSED_OPTIM_HD void set(double first, double second) {
        beta1 = static_cast<float>(first);
        one_minus_beta1 = static_cast<float>(1.0 - first);
        beta2 = static_cast<float>(second);
        one_minus_beta2 = static_cast<float>(1.0 - second);
    }
};

// base^exponent by squaring: the same bits on host and device, which library pow does not promise.
FUSED_OPTIM_HD double integer_power(double base, int64_t exponent) {
    double result = 1.0;
    for (; exponent > 0; exponent >>= 1) {
        if (exponent & 1) result *= base;
        base *= base;
    }
    return result;
}

// exp(x) - 1 by a series and doublings: likewise. Accurate for x in [-40, 0].
FUSED_OPTIM_HD double exponential_minus_one(double x) {
    const double part = x / 4096.0;
    double sum = 1.0;
    for (int i = 6; i > 1; --i) sum = 1.0 + part / i * sum;
    sum *= part;
    for (int i = 0; i < 12; ++i) sum *= 2.0 + sum;
    return sum;
}

FUSED_OPTIM_HD bool is_skipped(const Hyper& hyper) { return hyper.found_inf != nullptr && *hyper.found_inf != 0.0f; }

template <Rule rule>
FUSED_OPTIM_HD Scalars<rule> derive(const Hyper& hyper) {
    int64_t step = hyper.step_pointer ? *hyper.step_pointer + 1 : hyper.step;
    double lr = hyper.lr_pointer ? static_cast<double>(*hyper.lr_pointer) : hyper.lr;
    double factor = hyper.grad_factor ? static_cast<double>(*hyper.grad_factor) : 1.0;
    if (hyper.grad_scale) factor /= static_cast<double>(*hyper.grad_scale);
    Scalars<rule> scalars{};
    Hyperparameters<rule> hyperparameters;
    memcpy(&hyperparameters, hyper.values, sizeof hyperparameters);
    scalars.step_size = static_cast<float>(Update<rule>::derive(scalars.own, hyperparameters, lr, step));
    scalars.grad_factor = static_cast<float>(hyper.maximize ? -factor : factor);
    scalars.decay = hyper.decoupled ? static_cast<float>(1.0 - lr * hyper.weight_decay) : 1.0f;
    scalars.l2_penalty = hyper.decoupled ? 0.0f : static_cast<float>(hyper.weight_decay);
    scalars.skipped = is_skipped(hyper);
    scalars.grad_scale = hyper.grad_scale ? *hyper.grad_scale : 1.0f;
    scalars.inverse_grad_scale = static_cast<float>(1.0 / static_cast<double>(scalars.grad_scale));
    scalars.writes_gradient = scalars.grad_scale != 1.0f;
    scalars.unchanged_gradient = scalars.grad_factor == 1.0f && scalars.l2_penalty == 0.0f && !scalars.writes_gradient;
    scalars.rounding.mask = hyper.stochastic_rounding ? 0xFFFFFFFFu : 0u;
    scalars.rounding.offset = hyper.stochastic_rounding ? static_cast<uint32_t>(step) * kGoldenRatio : kNearest;
    return scalars;
}

// What is left in the gradient's place: grad / grad_scale, as torch's fused optimizers leave it. The device corrects a
// product with the inverse by its remainder: the same bits, but for the last place of denormal quotients, and no
// branch.
template <Rule rule>
FUSED_OPTIM_HD float unscaled_gradient(float grad, const Scalars<rule>& s) {
#if defined(__CUDA_ARCH__)
    const float near = grad * s.inverse_grad_scale;
    const float exact = fma(fma(-near, s.grad_scale, grad), s.inverse_grad_scale, near);
    return exact == exact ? exact : near;  // what is infinite has no remainder
#else
    return grad / s.grad_scale;
#endif
}

// The gradient that the states see. The L2 penalty is the same for a whole group: hoist it out of loops.
template <Rule rule>
FUSED_OPTIM_HD float scaled_gradient(float grad, const Scalars<rule>& s) {
    return grad * s.grad_factor;
}
template <Rule rule>
FUSED_OPTIM_HD float penalized_gradient(float grad, float param, const Scalars<rule>& s) {
    return fma(s.l2_penalty, param, grad);
}

// sqrt(square) for every value; square_root() alone serves finite ones.
FUSED_OPTIM_HD float root_of(float square) {
#if defined(__CUDA_ARCH__)
    return float_bits(square) < kInfinity ? square_root(square) : square;
#else
    return sqrtf(square);
#endif
}

}  // namespace fused_optim
