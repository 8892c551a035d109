// The inner optimizers: what they compute for one value.
//
// AdamW (Loshchilov & Hutter, arXiv 1711.05101) as torch.optim.AdamW computes it:
//
//     w = w (1 - lr weight_decay)
//     m = beta1 m + (1 - beta1) g,      v = beta2 v + (1 - beta2) g^2
//     w = w - lr / (1 - beta1^t)  m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//
// Muon (Keller Jordan, kellerjordan.github.io/posts/muon) for a matrix of a layer, with Moonlight's scale
// (arXiv 2502.16982):
//
//     m = momentum m + g,      u = g + momentum m                       (Nesterov)
//     X = u / |u|, then five times X = (a I + b A + c A A) X, A = X X^T     (Newton-Schulz: llmc/muon.h)
//     w = w (1 - lr weight_decay) - lr  0.2 sqrt(max(rows, columns))  X
//
// Before both, gradients are clipped by their norm (Pascanu et al., arXiv 1211.5063).
#pragma once
#include <cmath>

#include "llmc/host_device.h"

struct AdamWOptions {
    float beta1 = 0.9f, beta2 = 0.95f, epsilon = 1e-8f;
    float weight_decay = 0;  // of the matrices
    float clip = 1;          // the gradient is scaled down to this norm; 0: never
};

struct MuonOptions {
    float learning_rate = 0.01f;  // at the schedule's peak
    float momentum = 0.95f;
};

// The factor that multiplies all gradients so that their norm is at most `clip`. 1 for clip 0; NaN if the
// norm is not finite: the optimizers then leave everything as it is.
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

// -----------------------------------------------------------------------------------------------------------
// Muon

// The constants of a step. Its weight decay is AdamW's option.
struct Muon {
    float lr, momentum;
    float decay;  // 1 - lr weight_decay
};

inline Muon muon(float lr, const MuonOptions& options, float weight_decay) {
    return {lr, options.momentum, float(1.0 - double(lr) * double(weight_decay))};
}

// Adds a gradient to the momentum, and returns Nesterov's direction.
HD inline float muon_direction_value(float momentum, float gradient, float& m) {
    m = fmaf(momentum, m, gradient);
    return fmaf(momentum, m, gradient);
}

// The factor that makes a matrix's Frobenius norm 1. A zero matrix stays zero.
HD inline float newton_schulz_normalizer(float norm_squared) {
    return norm_squared > 0 ? 1.0f / sqrtf(norm_squared) : 0.0f;
}

// An element of scale (a I + b A + c A A), from those of A and A A. The polynomial is Jordan's: small
// singular values grow fast, and five iterations bring those above 0.002 between 0.68 and 1.21.
HD inline float newton_schulz_value(float gram, float square, bool on_diagonal, float scale) {
    const float a = 3.4445f, b = -4.7750f, c = 2.0315f;
    return scale * fmaf(c, square, fmaf(b, gram, on_diagonal ? a : 0.0f));
}

HD inline void muon_value(const Muon& step, float direction, float& master) {
    master = fmaf(-step.lr, direction, master * step.decay);
}
