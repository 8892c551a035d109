// Single-precision operations that no compiler fuses, reorders or approximates. Whatever must be bitwise
// the same on all workers (payloads, means, global parameters, momentum) is computed with these alone: they
// give the same bits on all CPUs and GPUs. Host code is compiled with -ffp-contract=off, and denormals are
// kept.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "llmc/host_device.h"

#ifdef __CUDA_ARCH__
HD inline float add_rn(float a, float b) { return __fadd_rn(a, b); }
HD inline float subtract_rn(float a, float b) { return __fsub_rn(a, b); }
HD inline float multiply_rn(float a, float b) { return __fmul_rn(a, b); }
HD inline float divide_rn(float a, float b) { return __fdiv_rn(a, b); }
HD inline float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
#else
HD inline float add_rn(float a, float b) { return a + b; }
HD inline float subtract_rn(float a, float b) { return a - b; }
HD inline float multiply_rn(float a, float b) { return a * b; }
HD inline float divide_rn(float a, float b) { return a / b; }
HD inline float fma_rn(float a, float b, float c) { return fmaf(a, b, c); }  // a * b + c, rounded once
#endif

HD inline uint32_t float_to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

HD inline float bits_to_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}
