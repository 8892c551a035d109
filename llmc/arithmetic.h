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

// -----------------------------------------------------------------------------------------------------------
// e^x and the logistic function in straight-line float arithmetic, so that compilers vectorize the loops
// around them without fast-math (a libm call in the loop would prevent that).
//
//     e^x = 2^n e^r,   n = round(x / ln 2),   r = x - n ln 2 in [-0.35, 0.35]  (ln 2 in two floats)
//
// and e^r by its minimax polynomial of degree 6. Error: below 0.9 ulp (test_layers sweeps the range of
// float). Infinity above the largest float, 0 below 2^-125, passes NaN on.

HD_INLINE float exponential(float x) {
    const float round_to_integer =
        0x1.8p23f;  // added to a small float, leaves its nearest integer in the low bits
    const float shifted = fmaf(x, 0x1.715476p0f, round_to_integer);
    const float n = shifted - round_to_integer;
    const float r =
        fmaf(n, 0x1.05c61p-29f, fmaf(n, -0x1.62e43p-1f, x));  // ln 2 = 0x1.62e43p-1 - 0x1.05c61p-29
    float p = 0x1.6a4748p-10f;
    p = fmaf(p, r, 0x1.1239a2p-7f);
    p = fmaf(p, r, 0x1.5558b6p-5f);
    p = fmaf(p, r, 0x1.555492p-3f);
    p = fmaf(p, r, 0x1.fffffcp-2f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r + r, 2.0f);
    // 2 e^r times 2^(n - 1): a float's exponent holds -126 to 127.
    float y = p * bits_to_float((float_to_bits(shifted) + 126u) << 23);
    y = x < -0x1.5a92d6p6f ? 0.0f : y;
    return x > 0x1.62e42ep6f ? INFINITY : y;  // e^x is above the largest float
}

HD_INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
