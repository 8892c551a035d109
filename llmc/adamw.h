// The inner optimizer. AdamW (Loshchilov & Hutter, arXiv 1711.05101) as torch.optim.AdamW computes it, for
// one value:
//
//     w = w (1 - lr weight_decay)
//     m = beta1 m + (1 - beta1) g,      v = beta2 v + (1 - beta2) g^2
//     w = w - lr / (1 - beta1^t)  m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//
// Before it, gradients are clipped by their norm (Pascanu et al., arXiv 1211.5063).
#pragma once
#include <cmath>

#include "llmc/host_device.h"

struct AdamWOptions {
    float beta1 = 0.9f, beta2 = 0.95f, epsilon = 1e-8f;
    float weight_decay = 0;  // of the matrices
    float clip = 1;          // the gradient is scaled down to this norm; 0: never
};

// The factor that multiplies all gradients so that their norm is at most `clip`. 1 for clip 0; NaN if the
// norm is not finite: AdamW then leaves everything as it is.
HD inline float clip_factor(float norm, float clip) {
    if (!std::isfinite(norm)) { return NAN; }
    return clip > 0 && norm > clip ? clip / norm : 1.0f;
}

// The constants of a step, computed once on the host, the powers in double.
struct AdamW {
    float beta1, beta2, eps;
    float one_minus_beta1, one_minus_beta2;
    float step_size;             // lr / (1 - beta1^t)
    float sqrt_bias_correction;  // sqrt(1 - beta2^t)
    float decay;                 // 1 - lr weight_decay
};

// t is 1 at the first update.
inline AdamW adamw(float lr, const AdamWOptions& options, int t) {
    const double beta1 = options.beta1, beta2 = options.beta2;
    return {options.beta1, options.beta2, options.epsilon, float(1.0 - beta1), float(1.0 - beta2),
            float(double(lr) / (1.0 - pow(beta1, t))), float(sqrt(1.0 - pow(beta2, t))),
            float(1.0 - double(lr) * double(options.weight_decay))};
}

// decay: step.decay, or 1 for values without weight decay
HD inline void adamw_value(const AdamW& step, float decay, float gradient, float& master, float& m,
                           float& v) {
    m = fmaf(step.beta1, m, step.one_minus_beta1 * gradient);
    v = fmaf(step.beta2, v, step.one_minus_beta2 * gradient * gradient);
    master = fmaf(-step.step_size, m / (sqrtf(v) / step.sqrt_bias_correction + step.eps), master * decay);
}
