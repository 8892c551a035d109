// GELU of an array, for matmul_forward and, with --recompute, for the backward pass.
#pragma once
#include "llmc/cpu/activation.h"
#include "llmc/gelu.h"
#include "llmc/stream.h"

namespace cpu {

// out[i] = gelu(inp[i]).   out, inp: (n)
template <class T>
inline void apply_gelu(T* out, const T* inp, long n) {
    assign_in_parallel(out, n, [=](long i) { return gelu(widened(inp[i])); });
}

inline void gelu_forward(Activation out, Activation inp, long n, Stream&) {
    out.visit([=](auto* to) { apply_gelu(to, inp.like(to), n); });
}

}  // namespace cpu
