// Causal self-attention, a tile of queries at a time as in FlashAttention (Dao et al., arXiv 2205.14135):
// the T x T scores are never in memory. For one head, with q, k, v: (T,hs) and scale = 1 / sqrt(hs):
//
//     s = scale q k^T (s <= t only),   lse = log(sum over s of e^s),   p = e^(s - lse),   out = p v
//     dv = p^T dout,   dp = dout v^T,   ds = p (dp - sum over hs of dout out)
//     dq = scale ds k,   dk = scale ds^T q
//
// A thread computes one (batch, head) at a time in scratch of its own, where heads are contiguous and padded
// with zeros to whole tiles, and k and v are transposed, so that scores are vectors along the keys. Tiles
// above the diagonal are skipped. Flops: 2 T^2 C forward and 5 T^2 C backward a sequence.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "llmc/arithmetic.h"
#include "llmc/cpu/tile_matmul.h"
#include "llmc/stream.h"

namespace cpu {

const int attention_queries = 32;  // in a tile

// Sizes of one head's scratch, padded to the tiles of tile_matmul.
struct AttentionShape {
    int T, hs;
    int padded_T, padded_hs;
    int ld_keys;  // of matrices with a column per key; no power of two, or rows would share cache sets
    float scale;

    AttentionShape(int T, int hs)
        : T(T), hs(hs), padded_T((T + attention_queries - 1) / attention_queries * attention_queries),
          padded_hs((hs + 15) / 16 * 16), ld_keys(padded_T + 16), scale(1.0f / sqrtf(float(hs))) {}
    size_t head() const { return size_t(padded_T) * size_t(padded_hs); }
    size_t transposed() const { return size_t(padded_hs) * size_t(ld_keys); }
    size_t scores() const { return size_t(attention_queries) * size_t(ld_keys); }
};

// out[t] = scale * inp[t].   out: (padded_T,padded_hs); its padding is not written
// inp: (T,hs) with leading dimension ld
inline void gather_head(const AttentionShape& s, float* out, const float* inp, int ld, float scale) {
    for (int t = 0; t < s.T; t++) {
        #pragma omp simd
        for (int i = 0; i < s.hs; i++) { out[long(t) * s.padded_hs + i] = scale * inp[long(t) * ld + i]; }
    }
}

// out: (padded_hs,ld_keys); its padding is not written   inp: (T,hs) with leading dimension ld
inline void gather_transposed(const AttentionShape& s, float* out, const float* inp, int ld) {
    for (int t = 0; t < s.T; t++) {
        for (int i = 0; i < s.hs; i++) { out[long(i) * s.ld_keys + t] = inp[long(t) * ld + i]; }
    }
}

// Turns the scores of one query into probabilities; those of later keys, up to `columns`, become 0.
// Returns lse.   scores: (columns), the first `keys` valid
inline float softmax_row(float* scores, int keys, int columns) {
    float max = scores[0], sum = 0;
    #pragma omp simd reduction(max : max)
    for (int i = 0; i < keys; i++) { max = scores[i] > max ? scores[i] : max; }
    #pragma omp simd reduction(+ : sum)
    for (int i = 0; i < keys; i++) {
        scores[i] = exponential(scores[i] - max);
        sum += scores[i];
    }
    const float inverse = 1.0f / sum;
    #pragma omp simd
    for (int i = 0; i < keys; i++) { scores[i] *= inverse; }
    std::fill(scores + keys, scores + columns, 0.0f);
    return max + logf(sum);
}

// A thread's scratch for the forward of one head. Padding is zero.
struct AttentionForwardScratch {
    std::vector<float> q, v;    // (padded_T,padded_hs), q scaled
    std::vector<float> kt;      // (padded_hs,ld_keys)
    std::vector<float> scores;  // (attention_queries,ld_keys)
    std::vector<float> mixed;   // (attention_queries,padded_hs)

    explicit AttentionForwardScratch(const AttentionShape& s)
        : q(s.head()), v(s.head()), kt(s.transposed()), scores(s.scores()),
          mixed(size_t(attention_queries) * size_t(s.padded_hs)) {}
};

// One head, from x.   out: (T,hs) with leading dimension C   lse: (T)
inline void attention_forward_head(float* out, float* lse, const AttentionShape& s,
                                   AttentionForwardScratch& x, int C) {
    for (int first = 0; first < s.T; first += attention_queries) {
        const int keys = first + attention_queries, queries = std::min(attention_queries, s.T - first);
        tile_matmul(x.scores.data(), s.ld_keys, x.q.data() + long(first) * s.padded_hs, s.padded_hs, 1,
                    x.kt.data(), s.ld_keys, attention_queries, keys, s.padded_hs, false);
        for (int i = 0; i < queries; i++) {
            lse[first + i] = softmax_row(x.scores.data() + long(i) * s.ld_keys, first + i + 1, keys);
        }
        tile_matmul(x.mixed.data(), s.padded_hs, x.scores.data(), s.ld_keys, 1, x.v.data(), s.padded_hs,
                    attention_queries, s.padded_hs, keys, false);
        for (int i = 0; i < queries; i++) {
            std::copy_n(x.mixed.data() + long(i) * s.padded_hs, s.hs, out + long(first + i) * C);
        }
    }
}

// out: (B,T,C)   lse: (B,NH,T)   qkv: (B,T,3C), each of q, k, v being NH heads of hs = C / NH
inline void attention_forward(float* out, float* lse, const float* qkv, int B, int T, int C, int NH,
                              Stream&) {
    const AttentionShape s(T, C / NH);
    #pragma omp parallel
    {
        AttentionForwardScratch x(s);
        #pragma omp for collapse(2)
        for (int b = 0; b < B; b++) {
            for (int h = 0; h < NH; h++) {
                const long at = long(b) * T * C + h * s.hs, at3 = long(b) * T * 3 * C + h * s.hs;
                gather_head(s, x.q.data(), qkv + at3, 3 * C, s.scale);
                gather_transposed(s, x.kt.data(), qkv + at3 + C, 3 * C);
                gather_head(s, x.v.data(), qkv + at3 + 2 * C, 3 * C, 1.0f);
                attention_forward_head(out + at, lse + (long(b) * NH + h) * T, s, x, C);
            }
        }
    }
}

// One query's row of the backward: scores become p, dp becomes ds; both 0 for later keys, up to `columns`.
// scores, dp: (columns), the first `keys` valid   dot: sum over hs of dout out
inline void softmax_backward_row(float* scores, float* dp, float lse, float dot, int keys, int columns) {
    #pragma omp simd
    for (int i = 0; i < keys; i++) {
        scores[i] = exponential(scores[i] - lse);
        dp[i] = scores[i] * (dp[i] - dot);
    }
    std::fill(scores + keys, scores + columns, 0.0f);
    std::fill(dp + keys, dp + columns, 0.0f);
}

// A thread's scratch for the backward of one head. Padding is zero.
struct AttentionBackwardScratch {
    std::vector<float> q, k, dout;            // (padded_T,padded_hs), q scaled
    std::vector<float> kt, vt;                // (padded_hs,ld_keys)
    std::vector<float> scores, dp;            // (attention_queries,ld_keys)
    std::vector<float> dq, dk, dv;            // (padded_T,padded_hs)

    explicit AttentionBackwardScratch(const AttentionShape& s)
        : q(s.head()), k(s.head()), dout(s.head()), kt(s.transposed()), vt(s.transposed()),
          scores(s.scores()), dp(s.scores()), dq(s.head()), dk(s.head()), dv(s.head()) {}
};

// dq, dk, dv of one head, in x, from q, k, v and dout there.
// out: (T,hs) with leading dimension C   lse: (T)
inline void attention_backward_head(const AttentionShape& s, AttentionBackwardScratch& x, const float* out,
                                    const float* lse, int C) {
    std::fill(x.dk.begin(), x.dk.end(), 0.0f);
    std::fill(x.dv.begin(), x.dv.end(), 0.0f);
    for (int first = 0; first < s.T; first += attention_queries) {
        const int keys = first + attention_queries, queries = std::min(attention_queries, s.T - first);
        const long offset = long(first) * s.padded_hs;
        tile_matmul(x.scores.data(), s.ld_keys, x.q.data() + offset, s.padded_hs, 1, x.kt.data(), s.ld_keys,
                    attention_queries, keys, s.padded_hs, false);
        tile_matmul(x.dp.data(), s.ld_keys, x.dout.data() + offset, s.padded_hs, 1, x.vt.data(), s.ld_keys,
                    attention_queries, keys, s.padded_hs, false);
        for (int i = 0; i < attention_queries; i++) {
            const bool padding = i >= queries;
            float dot = 0;
            if (!padding) {
                const float* o = out + long(first + i) * C;
                const float* d = x.dout.data() + offset + long(i) * s.padded_hs;
                #pragma omp simd reduction(+ : dot)
                for (int c = 0; c < s.hs; c++) { dot += o[c] * d[c]; }
            }
            softmax_backward_row(x.scores.data() + long(i) * s.ld_keys, x.dp.data() + long(i) * s.ld_keys,
                                 padding ? 0.0f : lse[first + i], dot, padding ? 0 : first + i + 1, keys);
        }
        tile_matmul(x.dq.data() + offset, s.padded_hs, x.dp.data(), s.ld_keys, 1, x.k.data(), s.padded_hs,
                    attention_queries, s.padded_hs, keys, false);
        tile_matmul(x.dk.data(), s.padded_hs, x.dp.data(), 1, s.ld_keys, x.q.data() + offset, s.padded_hs,
                    keys, s.padded_hs, attention_queries, true);
        tile_matmul(x.dv.data(), s.padded_hs, x.scores.data(), 1, s.ld_keys, x.dout.data() + offset,
                    s.padded_hs, keys, s.padded_hs, attention_queries, true);
    }
}

// Overwrites dqkv.   dqkv, qkv: (B,T,3C)   dout, out: (B,T,C)   lse: (B,NH,T)
inline void attention_backward(float* dqkv, const float* dout, const float* out, const float* qkv,
                               const float* lse, int B, int T, int C, int NH, Stream&) {
    const AttentionShape s(T, C / NH);
    #pragma omp parallel
    {
        AttentionBackwardScratch x(s);
        #pragma omp for collapse(2)
        for (int b = 0; b < B; b++) {
            for (int h = 0; h < NH; h++) {
                const long at = long(b) * T * C + h * s.hs, at3 = long(b) * T * 3 * C + h * s.hs;
                gather_head(s, x.q.data(), qkv + at3, 3 * C, s.scale);
                gather_head(s, x.k.data(), qkv + at3 + C, 3 * C, 1.0f);
                gather_head(s, x.dout.data(), dout + at, C, 1.0f);
                gather_transposed(s, x.kt.data(), qkv + at3 + C, 3 * C);
                gather_transposed(s, x.vt.data(), qkv + at3 + 2 * C, 3 * C);
                attention_backward_head(s, x, out + at, lse + (long(b) * NH + h) * T, C);
                for (int t = 0; t < T; t++) {
                    float* row = dqkv + at3 + long(t) * 3 * C;
                    #pragma omp simd
                    for (int i = 0; i < s.hs; i++) {
                        row[i] = s.scale * x.dq[size_t(t) * size_t(s.padded_hs) + size_t(i)];
                        row[C + i] = x.dk[size_t(t) * size_t(s.padded_hs) + size_t(i)];
                        row[2 * C + i] = x.dv[size_t(t) * size_t(s.padded_hs) + size_t(i)];
                    }
                }
            }
        }
    }
}

}  // namespace cpu
