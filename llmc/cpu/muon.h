// Muon without its matrix products (llmc/muon.h): passes over a shard or a matrix. llmc/optimizers.h defines
// what is computed for each value.
#pragma once
#include <cmath>

#include "llmc/cpu/global_norm.h"
#include "llmc/floatx.h"
#include "llmc/optimizers.h"
#include "llmc/rounding.h"
#include "llmc/stream.h"

namespace cpu {

// Adds grad * *grad_scale to the momentum m; direction = Nesterov's. If *grad_scale is not finite, m stays as
// it is, and the direction is zero.
// direction, m, grad: (count)   grad_scale: (1), the clip scale
inline void muon_direction(float* direction, float* m, const float* grad, long count, const Muon& step,
                           const float* grad_scale, Stream&) {
    const float scale = *grad_scale;
    const bool is_skipped = !std::isfinite(scale);
    #pragma omp parallel for simd
    for (long i = 0; i < count; i++) {
        direction[i] = is_skipped ? 0.0f : muon_direction_value(step.momentum, scale * grad[i], m[i]);
    }
}

// out = inp / |inp|, the Frobenius norm, of each of a batch.   out, inp: (batch,count)   norm_squared: (1)
inline void muon_normalize(float* out, float* norm_squared, const float* inp, long count, Stream& stream,
                           int batch = 1) {
    for (; batch > 0; batch--, out += count, inp += count) {
        global_norm_squared(norm_squared, inp, count, stream);
        const float factor = newton_schulz_normalizer(*norm_squared);
        #pragma omp parallel for simd
        for (long i = 0; i < count; i++) { out[i] = factor * inp[i]; }
    }
}

// out = scale (a I + b gram + c square).   out, gram, square: (batch,side,side)
inline void newton_schulz_polynomial(float* out, const float* gram, const float* square, int side,
                                     float scale, Stream&, int batch = 1) {
    #pragma omp parallel for
    for (long row = 0; row < long(batch) * side; row++) {
        for (int column = 0; column < side; column++) {
            const long i = row * side + column;
            out[i] = newton_schulz_value(gram[i], square[i], row % side == column, scale);
        }
    }
}

// Updates master by its direction, and params from master. Does nothing if *grad_scale is not finite.
// params, master, direction: (count)   grad_scale: (1), the clip scale   rounding: of params
// master: may be params where these are fp32
inline void muon_update(floatX* params, float* master, const float* direction, long count, const Muon& step,
                        const float* grad_scale, const StochasticRounding& rounding, Stream&) {
    if (!std::isfinite(*grad_scale)) { return; }
    #pragma omp parallel for simd
    for (long i = 0; i < count; i++) {
        muon_value(step, direction[i], master[i]);
        const uint64_t index = rounding.first + uint64_t(i);
        params[i] = rounded_parameter(master[i], rounding_bits_of(rounding_bits(rounding, index), index));
    }
}

}  // namespace cpu
