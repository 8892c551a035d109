// LayerNorm (Ba et al., arXiv 1607.06450), and fused with the residual addition before it.
//
//     out = (inp - mean) rstd weight + bias,   mean and rstd = 1 / sqrt(variance + 1e-5) of a row of C values
#pragma once
#include <cmath>

#include "llmc/cpu/activation.h"
#include "llmc/cpu/gradient_sums.h"
#include "llmc/cpu/vector.h"
#include "llmc/stream.h"

namespace cpu {

// One row. The variance is computed from centred values: E[x^2] - E[x]^2 would cancel for a large mean.
template <class T>
inline void layernorm_row(T* out, float* mean, float* rstd, const float* inp, const float* weight,
                          const float* bias, int C) {
    const float m = sum_over(C, [=](int c) { return inp[c]; }) / float(C);
    const float squares = sum_over(C, [=](int c) { return (inp[c] - m) * (inp[c] - m); });
    const float r = 1.0f / sqrtf(squares / float(C) + 1e-5f);
    assign(out, C, [=](long c) { return (inp[c] - m) * r * weight[c] + bias[c]; });
    *mean = m;
    *rstd = r;
}

// out: (N,C)   mean, rstd: (N)   inp: (N,C)   weight, bias: (C)
inline void layernorm_forward(Activation out, float* mean, float* rstd, const float* inp,
                              const float* weight, const float* bias, int N, int C, Stream&) {
    out.visit([=](auto* rows) {
        #pragma omp parallel for
        for (int n = 0; n < N; n++) {
            layernorm_row(rows + long(n) * C, mean + n, rstd + n, inp + long(n) * C, weight, bias, C);
        }
    });
}

// residual = inp1 + inp2, normed = layernorm(residual).   all (N,C), except mean, rstd: (N)
// and weight, bias: (C)
inline void fused_residual_forward(float* residual, Activation normed, float* mean, float* rstd,
                                   const float* inp1, const float* inp2, const float* weight,
                                   const float* bias, int N, int C, Stream&) {
    normed.visit([=](auto* rows) {
        #pragma omp parallel for
        for (int n = 0; n < N; n++) {
            const long at = long(n) * C;
            const float *a = inp1 + at, *b = inp2 + at;
            float* sum = residual + at;
            #pragma omp simd
            for (int c = 0; c < C; c++) { sum[c] = a[c] + b[c]; }
            layernorm_row(rows + at, mean + n, rstd + n, sum, weight, bias, C);
        }
    });
}

// One row: with x = (inp - mean) rstd and d = weight dout,
//     dinp += rstd (d - mean over C of d - x * mean over C of d x),
//     dweight += dout x,   dbias += dout,   dinp_sum += dinp
inline void layernorm_backward_row(float* dinp, float* dweight, float* dbias, float* dinp_sum,
                                   const float* dout, const float* inp, const float* weight, float mean,
                                   float rstd, int C) {
    const auto d = [=](int c) { return weight[c] * dout[c]; };
    const auto x = [=](int c) { return (inp[c] - mean) * rstd; };
    const float mean_d = sum_over(C, d) / float(C);
    const float mean_dx = sum_over(C, [=](int c) { return d(c) * x(c); }) / float(C);
    #pragma omp simd
    for (int c = 0; c < C; c++) {
        dinp[c] += rstd * (d(c) - mean_d - x(c) * mean_dx);
        dweight[c] += dout[c] * x(c);
        dbias[c] += dout[c];
        dinp_sum[c] += dinp[c];
    }
}

// Adds to dinp. Adds to dweight, dbias and, if it is not null, dprojb, or overwrites them if !gradients.adds.
// dprojb: the sum over rows of dinp, which is the bias gradient of the projection that was added to form inp
// dinp, dout, inp: (N,C)   dweight, dbias, dprojb, weight: (C)   mean, rstd: (N)
inline void layernorm_backward(float* dinp, float* dweight, float* dbias, float* dprojb, const float* dout,
                               const float* inp, const float* weight, const float* mean, const float* rstd,
                               int N, int C, const GradientSums& gradients, Stream&) {
    add_column_sums({dweight, dbias, dprojb}, N, C, gradients, [=](float* sums, long n) {
        layernorm_backward_row(dinp + n * C, sums, sums + C, sums + 2 * C, dout + n * C, inp + n * C, weight,
                               mean[n], rstd[n], C);
    });
}

}  // namespace cpu
