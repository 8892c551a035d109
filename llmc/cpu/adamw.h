// The AdamW update of a shard: llmc/adamw.h for every value, in one pass that reads and writes 16 bytes each.
#pragma once
#include <cmath>

#include "llmc/adamw.h"
#include "llmc/floatx.h"
#include "llmc/stream.h"

namespace cpu {

// Updates master, m, v from grad * *grad_scale, and params = floatX(master). Weight decay applies to the
// first `decayed` values. Does nothing where *grad_scale is not finite: the moments would never recover.
// params, master, m, v, grad: (count).   grad_scale: (1), the clip scale.   t: 1 at the first update
inline void adamw_update(floatX* params, float* master, float* m, float* v, const float* grad, long count,
                         long decayed, float lr, float beta1, float beta2, float eps, float weight_decay,
                         const float* grad_scale, int t, Stream&) {
    const float scale = *grad_scale;
    if (!std::isfinite(scale)) { return; }
    const AdamW step = adamw(lr, beta1, beta2, eps, weight_decay, t);
    #pragma omp parallel for simd
    for (long i = 0; i < count; i++) {
        adamw_value(step, i < decayed ? step.decay : 1.0f, scale * grad[i], master[i], m[i], v[i]);
        params[i] = floatX(master[i]);
    }
}

}  // namespace cpu
