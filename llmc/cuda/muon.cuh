// Muon without its matrix products (llmc/muon.h): passes over a shard or a matrix. llmc/optimizers.h defines
// what is computed for each value. The bits are the CPU's, apart from the rounding to floatX and the norm,
// whose sum has another order.
#pragma once
#include "llmc/cuda/adamw.cuh"
#include "llmc/cuda/global_norm.cuh"
#include "llmc/cuda/memory.cuh"
#include "llmc/floatx.h"
#include "llmc/optimizers.h"
#include "llmc/rounding.h"

namespace cuda {

// ---- kernels: one thread has four values

// Bound by memory: 14 bytes a value in bf16 (8 are read, 6 written).
__global__ void __launch_bounds__(256)
    muon_direction_kernel(floatX* direction, float* m, const float* grad, long count, Muon step,
                          const float* grad_scale) {
    const long i = (long(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
    const float scale = *grad_scale;
    if (i >= count) { return; }
    float values[4] = {};
    if (std::isfinite(scale)) {
        const Pack<float> g4 = load_pack(grad + i);
        Pack<float> m4 = load_pack(m + i);
        for (int j = 0; j < 4; j++) { values[j] = muon_direction_value(step.momentum, scale * g4[j], m4[j]); }
        store_pack(m + i, m4);
    }
    store_packs(direction + i, values);
}

// Bound by memory: 4 bytes a value in bf16.
__global__ void __launch_bounds__(256)
    muon_normalize_kernel(floatX* out, const floatX* inp, long count, const float* norm_squared) {
    const long i = (long(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
    if (i >= count) { return; }
    const float factor = newton_schulz_normalizer(norm_squared[blockIdx.y]);
    out += blockIdx.y * count, inp += blockIdx.y * count;
    float values[4];
    load_packs(values, inp + i);
    for (float& value : values) { value *= factor; }
    store_packs(out + i, values);
}

// The four values are of one row. Bound by memory: 6 bytes a value in bf16.
__global__ void __launch_bounds__(256)
    newton_schulz_polynomial_kernel(floatX* out, const floatX* gram, const floatX* square, int side,
                                    float scale) {
    const long i = (long(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
    if (i >= long(side) * side) { return; }
    const int row = int(i / side), column = int(i % side);
    const long matrix = blockIdx.y * long(side) * side;
    out += matrix, gram += matrix, square += matrix;
    float g[4], s[4];
    load_packs(g, gram + i);
    load_packs(s, square + i);
    for (int j = 0; j < 4; j++) { g[j] = newton_schulz_value(g[j], s[j], row == column + j, scale); }
    store_packs(out + i, g);
}

// Bound by memory: 12 bytes a value in bf16 (6 are read, 6 written).
__global__ void __launch_bounds__(256)
    muon_update_kernel(floatX* params, float* master, const floatX* direction, long count, Muon step,
                       const float* grad_scale, StochasticRounding rounding) {
    const long i = (long(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
    if (i >= count || !std::isfinite(*grad_scale)) { return; }
    Pack<float> master4 = load_pack(master + i);
    float d[4];
    load_packs(d, direction + i);
    for (int j = 0; j < 4; j++) { muon_value(step, d[j], master4[j]); }
    store_pack(master + i, master4);
    store_parameters(params + i, master4, rounding, uint64_t(i));
}

// ---- launchers

// Adds grad * *grad_scale to the momentum m; direction = Nesterov's. If *grad_scale is not finite, m stays as
// it is, and the direction is zero.
// direction, m, grad: (count), count a multiple of 4, 16-byte aligned (direction: 4 values)
// grad_scale: (1), the clip scale
inline void muon_direction(floatX* direction, float* m, const float* grad, long count, const Muon& step,
                           const float* grad_scale, Stream& stream) {
    require(count % 4 == 0 && are_aligned({m, grad}) && are_aligned({direction}, 4 * sizeof(floatX)));
    if (count == 0) { return; }
    launch(muon_direction_kernel, Grid{blocks_for(count / 4, 256), 256, 0, stream}, direction, m, grad, count,
           step, grad_scale);
}

// out = inp / |inp|, the Frobenius norm.   out, inp: (batch,count), each by itself, count a multiple of 4,
// 16-byte aligned   norm_squared: (batch), scratch
inline void muon_normalize(floatX* out, float* norm_squared, const floatX* inp, long count, Stream& stream,
                           int batch = 1) {
    require(are_aligned({out}));  // global_norm_squared requires the rest
    global_norm_squared(norm_squared, inp, count, stream, batch);
    launch(muon_normalize_kernel, Grid{dim3(blocks_for(count / 4, 256), batch), 256, 0, stream}, out, inp,
           count, norm_squared);
}

// out = scale (a I + b gram + c square).   out, gram, square: (batch,side,side), side a multiple of 4,
// 16-byte aligned
inline void newton_schulz_polynomial(floatX* out, const floatX* gram, const floatX* square, int side,
                                     float scale, Stream& stream, int batch = 1) {
    require(side % 4 == 0 && are_aligned({out, gram, square}));
    launch(newton_schulz_polynomial_kernel,
           Grid{dim3(blocks_for(long(side) * side / 4, 256), batch), 256, 0, stream}, out, gram, square, side,
           scale);
}

// Updates master by its direction, and params from master. Does nothing if *grad_scale is not finite.
// params, master, direction: (count), count a multiple of 4, 16-byte aligned (params, direction: 4 values)
// grad_scale: (1), the clip scale   rounding: of params, its `first` a multiple of 4
inline void muon_update(floatX* params, float* master, const floatX* direction, long count, const Muon& step,
                        const float* grad_scale, const StochasticRounding& rounding, Stream& stream) {
    require(count % 4 == 0 && rounding.first % 4 == 0);
    require(are_aligned({master}) && are_aligned({params, direction}, 4 * sizeof(floatX)));
    if (count == 0) { return; }
    launch(muon_update_kernel, Grid{blocks_for(count / 4, 256), 256, 0, stream}, params, master, direction,
           count, step, grad_scale, rounding);
}

}  // namespace cuda
