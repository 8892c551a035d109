// The outer step on a GPU: momentum, global and local parameters of a fragment, and the copy of local that
// the model computes with, in one pass. The equations and the arithmetic of a value are in outer.h, whose CPU
// version gives the same bits.
#pragma once
#include <stdexcept>
#include <type_traits>

#include "llmc/cuda/device.cuh"
#include "streaming/outer.h"

namespace cuda {

const int outer_step_threads = 256;

using FourParameters = std::conditional_t<sizeof(floatX) == 2, uint2, uint4>;

// One thread, four values: 16 bytes of each fp32 array in one access, all loads before the first store.
// all: (n), n a multiple of 4   params: written in 8 (bf16) or 16 bytes
// Bound by memory, bytes a value: 16 read, 12 and those of a parameter written (bf16: 30 in all); where local
// stays, 12 read and 8 written.
__global__ void outer_step_kernel(float* global, float* momentum, float* local, floatX* params,
                                  const float* mean, long n, OuterStep step) {
    const long i = (blockIdx.x * long(blockDim.x) + threadIdx.x) * 4;
    if (i >= n) { return; }
    const bool merging = step.local_weight < 1;
    const Pack<float> outer_gradient = load_pack(mean + i);
    Pack<float> new_momentum = load_pack(momentum + i), new_global = load_pack(global + i), new_local = {};
    if (merging) { new_local = load_pack(local + i); }
    for (int k = 0; k < 4; k++) {
        new_momentum[k] = outer_momentum(new_momentum[k], outer_gradient[k], step);
        new_global[k] = outer_parameter(new_global[k], new_momentum[k], outer_gradient[k], step);
        new_local[k] = merge(new_local[k], new_global[k], step.local_weight);
    }
    store_pack(momentum + i, new_momentum);
    store_pack(global + i, new_global);
    if (merging) {
        floatX copies[4];
        for (int k = 0; k < 4; k++) { copies[k] = floatX(new_local[k]); }
        FourParameters packed;
        memcpy(&packed, copies, sizeof(packed));
        store_pack(local + i, new_local);
        __stcg(reinterpret_cast<FourParameters*>(params + i), packed);
    }
}

inline void check_outer_step(const char* what, const void* p, size_t alignment) {
    if (reinterpret_cast<uintptr_t>(p) % alignment != 0) {
        throw std::invalid_argument(
            format("the %s of an outer step are not aligned to %zu bytes", what, alignment));
    }
}

// One pass over a range: momentum, global, local and the copy of local that the model computes with.
// With alpha = 1 local and params stay as they are.
// all: (n), n a multiple of 4, 16-byte aligned (params: 4 parameters)
inline void outer_step(float* global, float* momentum, float* local, floatX* params, const float* mean,
                       long n, OuterStep step, Stream& stream) {
    check_outer_step("global parameters", global, 16);
    check_outer_step("momenta", momentum, 16);
    check_outer_step("local parameters", local, 16);
    check_outer_step("model's parameters", params, sizeof(FourParameters));
    check_outer_step("means", mean, 16);
    if (n < 0 || n % 4 != 0) {
        throw std::invalid_argument(format("an outer step of %ld values, not a multiple of 4", n));
    }
    if (n == 0) { return; }
    const long values = outer_step_threads * 4L;  // of a block
    launch(outer_step_kernel, Grid{unsigned((n + values - 1) / values), outer_step_threads, 0, stream},
           global, momentum, local, params, mean, n, step);
}

}  // namespace cuda
