// GELU of an array: matmul_forward applies it, and the backward with --recompute.
#pragma once
#include "llmc/cpu/matmul_input.h"
#include "llmc/gelu.h"
#include "llmc/stream.h"

namespace cpu {

// out[i] = gelu(inp[i]).   out, inp: (n)
template <class T>
inline void apply_gelu(T* out, const float* inp, long n) {
    #pragma omp parallel for simd
    for (long i = 0; i < n; i++) { out[i] = rounded_to<T>(gelu(inp[i])); }
}

inline void gelu_forward(MatmulInput out, const float* inp, long n, Stream&) {
    out.visit([=](auto* values) { apply_gelu(values, inp, n); });
}

}  // namespace cpu
