// What all update rules share: their scalars, and what becomes of gradients before a rule sees them.
#pragma once

#include "formats.h"

namespace fused_optim {

// What the update of an element reads, derived once per step and group.
struct Scalars {
    float grad_factor;
    float beta1;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float inverse_sqrt_correction2;  // what Adam's roots are multiplied by
    float eps;
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

// The math of one element, in FP32; each rule's is in its own header:
//   correct(scalars, hyper, lr, step)  sets the scalars that follow from the learning rate and the number of the step.
//   advance(grad, states, scalars)     puts the new states in the old ones' places, and returns the direction. `states`
//                                      has state_places(rule) elements.
//   next_param(param, direction, root, scalars)    `root`: of the new state that is a square, where there is one.
template <Rule rule>
struct Update;

// base^exponent by squaring: the same bits on host and device, which library pow does not promise.
FUSED_OPTIM_HD double integer_power(double base, int64_t exponent) {
    double result = 1.0;
    for (; exponent > 0; exponent >>= 1) {
        if (exponent & 1) result *= base;
        base *= base;
    }
    return result;
}

FUSED_OPTIM_HD bool is_skipped(const Hyper& hyper) { return hyper.found_inf != nullptr && *hyper.found_inf != 0.0f; }

template <Rule rule>
FUSED_OPTIM_HD Scalars derive(const Hyper& hyper) {
    int64_t step = hyper.step_pointer ? *hyper.step_pointer + 1 : hyper.step;
    double lr = hyper.lr_pointer ? static_cast<double>(*hyper.lr_pointer) : hyper.lr;
    double factor = hyper.grad_factor ? static_cast<double>(*hyper.grad_factor) : 1.0;
    if (hyper.grad_scale) factor /= static_cast<double>(*hyper.grad_scale);
    Scalars scalars{};
    Update<rule>::correct(scalars, hyper, lr, step);
    scalars.grad_factor = static_cast<float>(hyper.maximize ? -factor : factor);
    scalars.beta1 = static_cast<float>(hyper.beta1);
    scalars.one_minus_beta1 = static_cast<float>(1.0 - hyper.beta1);
    scalars.beta2 = static_cast<float>(hyper.beta2);
    scalars.one_minus_beta2 = static_cast<float>(1.0 - hyper.beta2);
    scalars.eps = static_cast<float>(hyper.eps);
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
FUSED_OPTIM_HD float unscaled_gradient(float grad, const Scalars& s) {
#if defined(__CUDA_ARCH__)
    const float near = grad * s.inverse_grad_scale;
    const float exact = fma(fma(-near, s.grad_scale, grad), s.inverse_grad_scale, near);
    return exact == exact ? exact : near;  // what is infinite has no remainder
#else
    return grad / s.grad_scale;
#endif
}

// The gradient that the states see. The L2 penalty is the same for a whole group: hoist it out of loops.
FUSED_OPTIM_HD float scaled_gradient(float grad, const Scalars& s) { return grad * s.grad_factor; }
FUSED_OPTIM_HD float penalized_gradient(float grad, float param, const Scalars& s) {
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
