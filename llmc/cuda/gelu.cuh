// GELU of an array: for recomputation, as matmul_forward applies it on the way.
#pragma once
#include "llmc/cuda/memory.cuh"
#include "llmc/floatx.h"
#include "llmc/gelu.h"

namespace cuda {

// One thread moves 16 bytes: 8 bf16 values. Bound by memory, 4 bytes a value in bf16; about 35 instructions a
// value come close to it on the GPUs of 2022.
__global__ void __launch_bounds__(256) gelu_forward_kernel(floatX* out, const floatX* inp, long n) {
    const long i = (long(blockIdx.x) * blockDim.x + threadIdx.x) * Pack<floatX>::size;
    if (i >= n) { return; }
    Pack<floatX> pack = load_pack(inp + i);
    for (int j = 0; j < Pack<floatX>::size; j++) { pack[j] = floatX(gelu(float(pack[j]))); }
    store_pack(out + i, pack);
}

// out[i] = gelu(inp[i]).   out, inp: (n), n a multiple of 8, 16-byte aligned
inline void gelu_forward(floatX* out, const floatX* inp, long n, Stream& stream) {
    if (n % 8 != 0) { throw std::invalid_argument("gelu_forward: n is not a multiple of 8"); }
    require_aligned("gelu_forward", {out, inp});
    if (n == 0) { return; }
    launch(gelu_forward_kernel, Grid{blocks_for(n / Pack<floatX>::size, 256), 256, 0, stream}, out, inp, n);
}

}  // namespace cuda
