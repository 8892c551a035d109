// Softmax, cross entropy and its gradient, visiting each row of the logits, the largest activation, only
// once:
//
//     loss = log(sum over v of e^(logits[v] - max)) + max - logits[target]
//     dlogits = (softmax - onehot(target)) dloss
#pragma once
#include <algorithm>
#include <cmath>

#include "llmc/arithmetic.h"
#include "llmc/stream.h"

namespace cpu {

// logits: (N,Vp), of which columns V..Vp are padding. If write_dlogits, they are replaced by dlogits, which
// are 0 in the padding; else they stay.
// losses: (N), the cross entropy   targets: (N) in [0, V)   dloss: the gradient of each row's loss
inline void fused_classifier(float* logits, float* losses, float dloss, const int* targets, int N, int V,
                             int Vp, bool write_dlogits, Stream&) {
    #pragma omp parallel for
    for (int n = 0; n < N; n++) {
        float* row = logits + long(n) * Vp;
        float max = row[0], sum = 0;
        #pragma omp simd reduction(max : max)
        for (int v = 0; v < V; v++) { max = row[v] > max ? row[v] : max; }
        const float target = row[targets[n]];
        if (write_dlogits) {
            #pragma omp simd reduction(+ : sum)
            for (int v = 0; v < V; v++) {
                row[v] = exponential(row[v] - max);
                sum += row[v];
            }
            const float scale = dloss / sum;
            #pragma omp simd
            for (int v = 0; v < V; v++) { row[v] *= scale; }
            row[targets[n]] -= dloss;
            std::fill(row + V, row + Vp, 0.0f);
        } else {
            #pragma omp simd reduction(+ : sum)
            for (int v = 0; v < V; v++) { sum += exponential(row[v] - max); }
        }
        losses[n] = logf(sum) + max - target;
    }
}

}  // namespace cpu
