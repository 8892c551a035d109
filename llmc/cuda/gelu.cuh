// GELU of an array, for recomputation and where matmul_forward does not fuse it. Recomputation starts from
// the kept activation, which is rounded to floatX, so its bits differ from those of a product with fused
// GELU, which applies GELU before rounding.
#pragma once
#include <type_traits>

#include "llmc/cuda/memory.cuh"
#include "llmc/floatx.h"
#include "llmc/gelu.h"

namespace cuda {

// gelu(x) = x / gelu_divisor(x, x x) and gelu'(x), for a result of type floatX. For bf16 the relative errors
// (the derivative's: of its terms) are up to 2^-15, which bf16 rounds away. x / d is 0 for d above 2^126.
__device__ inline float gelu_divisor(float x, float square) {
    return 1.0f + exp2_approximate(-1.44269504f * (x * (gelu_2k + gelu_2k_cubic * square)));
}
__device__ inline float gelu_of_floatX(float x) {
    return std::is_same<floatX, float>::value ? gelu(x) : __fdividef(x, gelu_divisor(x, x * x));
}
__device__ inline float gelu_derivative_of_floatX(float x) {
    if (std::is_same<floatX, float>::value) { return gelu_derivative(x); }
    const float square = x * x, s = __fdividef(1.0f, gelu_divisor(x, square));
    return s + x * s * (1.0f - s) * (gelu_2k + 3.0f * gelu_2k_cubic * square);
}

// One thread moves 16 bytes: 8 bf16 values. Bound by memory, 4 bytes a value in bf16.
__global__ void __launch_bounds__(256) gelu_forward_kernel(floatX* out, const floatX* inp, long n) {
    const long i = (long(blockIdx.x) * blockDim.x + threadIdx.x) * Pack<floatX>::size;
    if (i >= n) { return; }
    Pack<floatX> pack = load_pack(inp + i);
    for (int j = 0; j < Pack<floatX>::size; j++) { pack[j] = floatX(gelu_of_floatX(float(pack[j]))); }
    store_pack(out + i, pack);
}

// out[i] = gelu(inp[i]).   out, inp: (n), n a multiple of 8, 16-byte aligned
inline void gelu_forward(floatX* out, const floatX* inp, long n, Stream& stream) {
    require(n % 8 == 0 && are_aligned({out, inp}));
    if (n == 0) { return; }
    launch(gelu_forward_kernel, Grid{blocks_for(n / Pack<floatX>::size, 256), 256, 0, stream}, out, inp, n);
}

}  // namespace cuda
