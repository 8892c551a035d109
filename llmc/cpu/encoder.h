// The embedding: a token's vector plus its position's.   out[b,t] = wte[inp[b,t]] + wpe[t]
#pragma once
#include <algorithm>

#include "llmc/stream.h"

namespace cpu {

// out: (B,T,C)   inp: (B,T) tokens   wte: (V,C)   wpe: (maxT,C)
inline void encoder_forward(float* out, const int* inp, const float* wte, const float* wpe, int B, int T,
                            int C, Stream&) {
    #pragma omp parallel for collapse(2)
    for (int b = 0; b < B; b++) {
        for (int t = 0; t < T; t++) {
            const long bt = long(b) * T + t;
            const float *token = wte + long(inp[bt]) * C, *position = wpe + long(t) * C;
            for (int c = 0; c < C; c++) { out[bt * C + c] = token[c] + position[c]; }
        }
    }
}

// dwte[inp[b,t]] += dout[b,t], dwpe[t] += dout[b,t].   dwte: (V,C)   dwpe: (maxT,C)   dout: (B,T,C)
// inp: (B,T). Threads divide the channels, not the tokens, so that sums are formed in the order of the tokens
// with any number of threads.
inline void encoder_backward(float* dwte, float* dwpe, const float* dout, const int* inp, int B, int T, int C,
                             Stream&) {
    const int slice = 64;
    #pragma omp parallel for
    for (int begin = 0; begin < C; begin += slice) {
        const int end = std::min(begin + slice, C);
        for (int b = 0; b < B; b++) {
            for (int t = 0; t < T; t++) {
                const long bt = long(b) * T + t;
                float *token = dwte + long(inp[bt]) * C, *position = dwpe + long(t) * C;
                const float* gradient = dout + bt * C;
                #pragma omp simd
                for (int c = begin; c < end; c++) {
                    token[c] += gradient[c];
                    position[c] += gradient[c];
                }
            }
        }
    }
}

}  // namespace cpu
