// The AdamW update of a shard: llmc/optimizers.h for every value. The bits are the CPU's, since the
// arithmetic spells out every fmaf and leaves the compiler no product and sum to fuse.
#pragma once
#include "llmc/cuda/memory.cuh"
#include "llmc/floatx.h"
#include "llmc/optimizers.h"
#include "llmc/rounding.h"

namespace cuda {

// params[j] = master[j], rounded as value rounding.first + i + j of the model. A call of Philox gives the
// random bits of 8 values, so two threads make the same call; memory traffic hides its cost.
// params: (4)   i: a multiple of 4
__device__ inline void store_parameters(floatX* params, const Pack<float>& master,
                                        const StochasticRounding& rounding, uint64_t i) {
    const uint64_t index = rounding.first + i;
    const Philox4 bits = rounding_bits(rounding, index);
    Pack<floatX, 4> params4;
    for (uint64_t j = 0; j < 4; j++) {  // chosen by ?: so that the bits stay in registers
        const uint32_t random = index % 8 < 4 ? rounding_bits_of(bits, j) : rounding_bits_of(bits, 4 + j);
        params4[j] = rounded_parameter(master[int(j)], random);
    }
    store_pack(params, params4);
}

// One thread updates four values. Bound by memory: 30 bytes a value in bf16 (16 are read, 14 written).
__global__ void __launch_bounds__(256)
    adamw_update_kernel(floatX* params, float* master, float* m, float* v, const float* grad, long count,
                        long decayed, AdamW step, const float* grad_scale, StochasticRounding rounding) {
    const long i = (long(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
    const float scale = *grad_scale;
    if (i >= count || !std::isfinite(scale)) { return; }

    const Pack<float> g4 = load_pack(grad + i);
    Pack<float> master4 = load_pack(master + i), m4 = load_pack(m + i), v4 = load_pack(v + i);
    for (int j = 0; j < 4; j++) {
        adamw_value(step, i + j < decayed ? step.decay : 1.0f, scale * g4[j], master4[j], m4[j], v4[j]);
    }
    store_pack(master + i, master4);
    store_pack(m + i, m4);
    store_pack(v + i, v4);
    store_parameters(params + i, master4, rounding, uint64_t(i));
}

// Updates master, m, v from grad * *grad_scale, and params from master. Weight decay applies to the first
// `decayed` values. Does nothing if *grad_scale is not finite, since the moments would never recover.
// params, master, m, v, grad: (count), count a multiple of 4, 16-byte aligned (params: 4 parameters)
// grad_scale: (1), the clip scale   rounding: of params, its `first` a multiple of 4
inline void adamw_update(floatX* params, float* master, float* m, float* v, const float* grad, long count,
                         long decayed, const AdamW& step, const float* grad_scale,
                         const StochasticRounding& rounding, Stream& stream) {
    require(count % 4 == 0 && rounding.first % 4 == 0);
    require(are_aligned({master, m, v, grad}) && are_aligned({params}, 4 * sizeof(floatX)));
    if (count == 0) { return; }
    launch(adamw_update_kernel, Grid{blocks_for(count / 4, 256), 256, 0, stream}, params, master, m, v, grad,
           count, decayed, step, grad_scale, rounding);
}

}  // namespace cuda
