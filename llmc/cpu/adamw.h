// The AdamW update of a shard: llmc/optimizers.h for every value, in one pass.
#pragma once
#include <cmath>

#include "llmc/floatx.h"
#include "llmc/optimizers.h"
#include "llmc/rounding.h"
#include "llmc/stream.h"

namespace cpu {

// Updates master, m, v from grad * *grad_scale, and params from master. Weight decay applies to the first
// `decayed` values. Does nothing if *grad_scale is not finite, since the moments would never recover.
// params, master, m, v, grad: (count)   grad_scale: (1), the clip scale   rounding: of params
// master: may be params where these are fp32
inline void adamw_update(floatX* params, float* master, float* m, float* v, const float* grad, long count,
                         long decayed, const AdamW& step, const float* grad_scale,
                         const StochasticRounding& rounding, Stream&) {
    const float scale = *grad_scale;
    if (!std::isfinite(scale)) { return; }
    #pragma omp parallel for simd
    for (long i = 0; i < count; i++) {
        adamw_value(step, i < decayed ? step.decay : 1.0f, scale * grad[i], master[i], m[i], v[i]);
        const uint64_t index = rounding.first + uint64_t(i);
        params[i] = rounded_parameter(master[i], rounding_bits_of(rounding_bits(rounding, index), index));
    }
}

}  // namespace cpu
