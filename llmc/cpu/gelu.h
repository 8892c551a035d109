// GELU of an array, for recomputation only: in the forward, matmul_forward applies it.
#pragma once
#include "llmc/gelu.h"
#include "llmc/stream.h"

namespace cpu {

// out[i] = gelu(inp[i]).   out, inp: (n)
inline void gelu_forward(float* out, const float* inp, long n, Stream&) {
    #pragma omp parallel for simd
    for (long i = 0; i < n; i++) { out[i] = gelu(inp[i]); }
}

}  // namespace cpu
