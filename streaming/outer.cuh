// The outer step on a GPU: momentum, global and local parameters of a fragment, and the copy of local that
// the model computes with, in one pass. The equations and the arithmetic of a value are in outer.h, whose CPU
// version gives the same bits.
#pragma once
#include "llmc/cuda/device.cuh"
#include "streaming/outer.h"

namespace cuda {

const int outer_step_threads = 256;

// One thread, four values: 16 bytes of each fp32 array in one access, all loads before the first store.
// all: (n), n a multiple of 4   params: written in 8 (bf16) or 16 bytes
// Bound by memory, bytes per value: 16 read, 12 and those of a parameter written (bf16: 30 in all); if local
// stays, 12 read and 8 written.
__global__ void outer_step_kernel(float* global, float* momentum, float* local, floatX* params,
                                  const float* mean, long n, OuterStep step) {
    const long i = (blockIdx.x * long(blockDim.x) + threadIdx.x) * 4;
    if (i >= n) { return; }
    const bool moves_local = step.moves_local();
    const Pack<float> outer_gradient = load_pack(mean + i);
    Pack<float> new_momentum = load_pack(momentum + i), new_global = load_pack(global + i), new_local = {};
    if (moves_local) { new_local = load_pack(local + i); }
    for (int k = 0; k < 4; k++) {
        const float old_global = new_global[k];
        new_momentum[k] = outer_momentum(new_momentum[k], outer_gradient[k], step);
        new_global[k] = outer_parameter(old_global, new_momentum[k], outer_gradient[k], step);
        new_local[k] = moved_local(new_local[k], old_global, new_global[k], step);
    }
    store_pack(momentum + i, new_momentum);
    store_pack(global + i, new_global);
    if (moves_local) {
        Pack<floatX, 4> copies;
        for (int k = 0; k < 4; k++) { copies[k] = floatX(new_local[k]); }
        store_pack(local + i, new_local);
        store_pack(params + i, copies);
    }
}

// One pass over a range: momentum, global, local and the copy of local that the model computes with.
// With alpha = 1 local and params stay as they are, unless local follows.
// all: (n), n a multiple of 4, 16-byte aligned (params: 4 parameters)
inline void outer_step(float* global, float* momentum, float* local, floatX* params, const float* mean,
                       long n, OuterStep step, Stream& stream) {
    require(n >= 0 && n % 4 == 0 && are_aligned({global, momentum, local, mean}));
    require(are_aligned({params}, 4 * sizeof(floatX)));
    if (n == 0) { return; }
    launch(outer_step_kernel, Grid{blocks_for(n / 4, outer_step_threads), outer_step_threads, 0, stream},
           global, momentum, local, params, mean, n, step);
}

}  // namespace cuda
