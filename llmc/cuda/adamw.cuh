// The AdamW update of a shard: llmc/adamw.h for every value. The bits are the CPU's: it says fmaf where it
// means it, and leaves the compiler no product and sum to fuse.
#pragma once
#include "llmc/adamw.h"
#include "llmc/cuda/memory.cuh"
#include "llmc/floatx.h"
#include "llmc/rounding.h"

namespace cuda {

// One thread updates 8 values, whose rounding needs one call of Philox. Bound by memory: 30 bytes a value in
// bf16 (16 are read, 14 written).
__global__ void __launch_bounds__(256)
    adamw_update_kernel(floatX* params, float* master, float* m, float* v, const float* grad, long count,
                        long decayed, AdamW step, const float* grad_scale, StochasticRounding rounding) {
    const long i = (long(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
    const float scale = *grad_scale;
    if (i >= count || !std::isfinite(scale)) { return; }

    float g8[8], master8[8], m8[8], v8[8];
    load_packs(g8, grad + i);
    load_packs(master8, master + i);
    load_packs(m8, m + i);
    load_packs(v8, v + i);
    for (int j = 0; j < 8; j++) {
        adamw_value(step, i + j < decayed ? step.decay : 1.0f, scale * g8[j], master8[j], m8[j], v8[j]);
    }
    store_packs(master + i, master8);
    store_packs(m + i, m8);
    store_packs(v + i, v8);

    const Philox4 bits = rounding_bits(rounding, rounding.first + uint64_t(i));
    for (int first = 0; first < 8; first += Pack<floatX>::size) {
        Pack<floatX> pack;
        for (int j = 0; j < Pack<floatX>::size; j++) {
            pack[j] = rounded_parameter(master8[first + j], rounding_bits_of(bits, uint64_t(first + j)));
        }
        store_pack(params + i + first, pack);
    }
}

// Updates master, m, v from grad * *grad_scale, and params from master. Weight decay applies to the first
// `decayed` values. Does nothing where *grad_scale is not finite: the moments would never recover.
// params, master, m, v, grad: (count), count a multiple of 8, 16-byte aligned
// grad_scale: (1), the clip scale   rounding: of params, its `first` a multiple of 8
inline void adamw_update(floatX* params, float* master, float* m, float* v, const float* grad, long count,
                         long decayed, const AdamW& step, const float* grad_scale,
                         const StochasticRounding& rounding, Stream& stream) {
    if (count % 8 != 0) { throw std::invalid_argument("adamw_update: count is not a multiple of 8"); }
    if (rounding.first % 8 != 0) {
        throw std::invalid_argument("adamw_update: rounding.first is not a multiple of 8");
    }
    require_aligned("adamw_update", {params, master, m, v, grad});
    if (count == 0) { return; }
    launch(adamw_update_kernel, Grid{blocks_for(count / 8, 256), 256, 0, stream}, params, master, m, v, grad,
           count, decayed, step, grad_scale, rounding);
}

}  // namespace cuda
