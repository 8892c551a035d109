// Causal self-attention, a tile of queries at a time as in FlashAttention (Dao et al., arXiv 2205.14135):
// the T x T scores are never in memory. For one head, with q, k, v: (T,hs) and scale = 1 / sqrt(hs):
//
//     s = scale q k^T (s <= t only),   lse = log(sum over s of e^s),   p = e^(s - lse),   out = p v
//     dv = p^T dout,   dp = dout v^T,   ds = p (dp - sum over hs of dout out)
//     dq = scale ds k,   dk = scale ds^T q
//
// A thread computes one (batch, head) at a time in scratch of its own, where heads are contiguous and padded
// with zeros to whole tiles. Tiles above the diagonal are skipped. Flops: 2 T^2 C forward and 5 T^2 C backward
// a sequence. Where matmuls round their inputs to bf16, so do the products here: q, k, v, dout, p and ds are
// rounded; scores, exponentials and sums are fp32. The factors of a product are words (llmc/cpu/tile_matmul.h),
// two values each in bf16, which lie along the dimension that the product sums over:
//
//     rows          (t, i / 2): values of one row, adjacent along the head
//     transposed    (i / 2, t): the same words, so that scores are vectors along the keys
//     pairs         (t / 2, i): values of two adjacent rows
//
// In fp32, where a word is a value, pairs are rows.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "llmc/arithmetic.h"
#include "llmc/cpu/matmul.h"
#include "llmc/cpu/tile_matmul.h"
#include "llmc/stream.h"

namespace cpu {

const int attention_queries = 32;  // in a tile
const int rows_ahead = 16;         // that are prefetched

// Sizes of one head's scratch, padded to the tiles of tile_matmul.
template <bool bf16>
struct AttentionShape {
    static constexpr int in_word = bf16 ? 2 : 1;  // values
    int T, hs;
    int padded_T, padded_hs;
    int ld_keys;  // of matrices with a column per key; no power of two, or rows would share cache sets
    float scale;

    AttentionShape(int T, int hs)
        : T(T), hs(hs), padded_T((T + attention_queries - 1) / attention_queries * attention_queries),
          padded_hs((hs + 15) / 16 * 16), ld_keys(padded_T + 16), scale(1.0f / sqrtf(float(hs))) {}
    int head_words() const { return padded_hs / in_word; }
    int key_words() const { return ld_keys / in_word; }
    size_t head() const { return size_t(padded_T) * size_t(padded_hs); }
    size_t transposed() const { return size_t(head_words()) * size_t(ld_keys); }
    size_t scores() const { return size_t(attention_queries) * size_t(ld_keys); }
};

// Packs values into words: rounds them to bf16, or copies them.   words: (n / in_word)   inp: (n)
template <bool bf16>
inline void pack_row(float* words, const float* inp, int n, float scale = 1.0f) {
    #pragma omp simd
    for (int i = 0; i < n; i++) {
        if (bf16) {
            reinterpret_cast<uint16_t*>(words)[i] = bf16_bits(scale * inp[i]);
        } else {
            words[i] = scale * inp[i];
        }
    }
}

// Starts to load a row of a head. It is in memory of its own, where the CPU does not foresee it.
inline void prefetch_row(const float* row, int hs) {
    for (int i = 0; i < hs; i += 16) { __builtin_prefetch(row + i); }
}

// out[t] = scale * inp[t], as rows.   out: (padded_T,head_words); its padding is not written
// inp: (T,hs) with leading dimension ld
template <bool bf16>
inline void pack_rows(const AttentionShape<bf16>& s, float* out, const float* inp, int ld, float scale) {
    for (int t = 0; t < s.T; t++) {
        prefetch_row(inp + long(t + rows_ahead) * ld, s.hs);
        pack_row<bf16>(out + long(t) * s.head_words(), inp + long(t) * ld, s.hs, scale);
    }
}

// Rows to transposed.   out: (head_words,ld_keys)   rows: (padded_T,head_words)
template <bool bf16>
inline void transpose_rows(const AttentionShape<bf16>& s, float* out, const float* rows) {
    for (int first = 0; first < s.padded_T; first += 16) {
        for (int i = 0; i < s.head_words(); i++) {
            #pragma omp simd
            for (int t = first; t < first + 16; t++) {
                out[long(i) * s.ld_keys + t] = rows[long(t) * s.head_words() + i];
            }
        }
    }
}

// Rows to pairs: returns `out`, or in fp32 `rows` itself.   out: (count / 2,columns)
// rows: (count,columns / in_word) with leading dimension ld
template <bool bf16>
inline const float* pair_rows(float* out, const float* rows, int ld, int count, int columns) {
    if (!bf16) { return rows; }
    uint32_t* words = reinterpret_cast<uint32_t*>(out);
    for (int t = 0; t < count; t += 2) {
        const uint16_t* row = reinterpret_cast<const uint16_t*>(rows + long(t) * ld);
        #pragma omp simd
        for (int i = 0; i < columns; i++) {
            words[long(t / 2) * columns + i] = row[i] | uint32_t(row[2 * ld + i]) << 16;
        }
    }
    return out;
}

// The words of e^(s - max) of one query, 0 for later keys, up to `columns`. Sets their sum; returns lse.
// words: (columns / in_word), in fp32 may be scores   scores: (columns), the first `keys` valid
template <bool bf16>
inline float softmax_row(float* words, float* sum, float* scores, int keys, int columns) {
    float max = scores[0], total = 0;
    #pragma omp simd reduction(max : max)
    for (int i = 0; i < keys; i++) { max = scores[i] > max ? scores[i] : max; }
    #pragma omp simd reduction(+ : total)
    for (int i = 0; i < columns; i++) {
        const float e = exponential(scores[i] - max);
        scores[i] = i < keys ? e : 0.0f;
        total += scores[i];
    }
    if (bf16) { pack_row<bf16>(words, scores, columns); }
    *sum = total;
    return max + logf(total);
}

// A thread's scratch for the forward of one head. Padding is zero.
template <bool bf16>
struct AttentionForwardScratch {
    std::vector<float> q, k, v, pairs;  // rows of q (scaled), k and v; pairs of v
    std::vector<float> kt;              // transposed
    std::vector<float> scores, p;       // (attention_queries,ld_keys), p: rows
    std::vector<float> mixed;           // (attention_queries,padded_hs)

    explicit AttentionForwardScratch(const AttentionShape<bf16>& s)
        : q(s.head()), k(s.head()), v(s.head()), pairs(s.head()), kt(s.transposed()), scores(s.scores()),
          p(s.scores()), mixed(size_t(attention_queries) * size_t(s.padded_hs)) {}
};

// One head.   out: (T,hs) with leading dimension C   lse: (T)   qkv: (T,hs) of q, with leading dimension 3C
template <bool bf16>
inline void attention_forward_head(float* out, float* lse, const float* qkv, const AttentionShape<bf16>& s,
                                   AttentionForwardScratch<bf16>& x, int C) {
    pack_rows(s, x.q.data(), qkv, 3 * C, s.scale);
    pack_rows(s, x.k.data(), qkv + C, 3 * C, 1.0f);
    pack_rows(s, x.v.data(), qkv + 2 * C, 3 * C, 1.0f);
    transpose_rows(s, x.kt.data(), x.k.data());
    const float* v = pair_rows<bf16>(x.pairs.data(), x.v.data(), s.head_words(), s.padded_T, s.padded_hs);
    float* p = bf16 ? x.p.data() : x.scores.data();
    float sums[attention_queries];
    for (int first = 0; first < s.T; first += attention_queries) {
        const int keys = first + attention_queries, queries = std::min(attention_queries, s.T - first);
        tile_matmul<bf16>(x.scores.data(), s.ld_keys, x.q.data() + long(first) * s.head_words(),
                          s.head_words(), 1, x.kt.data(), s.ld_keys, attention_queries, keys, s.head_words(),
                          false);
        for (int i = 0; i < queries; i++) {
            lse[first + i] = softmax_row<bf16>(p + long(i) * s.key_words(), &sums[i],
                                               x.scores.data() + long(i) * s.ld_keys, first + i + 1, keys);
        }
        tile_matmul<bf16>(x.mixed.data(), s.padded_hs, p, s.key_words(), 1, v, s.padded_hs, attention_queries,
                          s.padded_hs, keys / s.in_word, false);
        for (int i = 0; i < queries; i++) {
            pack_row<false>(out + long(first + i) * C, x.mixed.data() + long(i) * s.padded_hs, s.hs,
                            1.0f / sums[i]);
        }
    }
}

template <bool bf16>
inline void attention_forward_heads(float* out, float* lse, const float* qkv, int B, int T, int C, int NH) {
    const AttentionShape<bf16> s(T, C / NH);
    #pragma omp parallel
    {
        AttentionForwardScratch<bf16> x(s);
        #pragma omp for collapse(2)
        for (int b = 0; b < B; b++) {
            for (int h = 0; h < NH; h++) {
                const long at = long(b) * T * C + h * s.hs, at3 = long(b) * T * 3 * C + h * s.hs;
                attention_forward_head(out + at, lse + (long(b) * NH + h) * T, qkv + at3, s, x, C);
            }
        }
    }
}

// out: (B,T,C)   lse: (B,NH,T)   qkv: (B,T,3C), each of q, k, v being NH heads of hs = C / NH
inline void attention_forward(float* out, float* lse, const float* qkv, int B, int T, int C, int NH, Stream&,
                              MatmulPrecision precision = MatmulPrecision::highest) {
    const bool bf16 = multiplies_bf16 && rounds_to_bf16(precision);
    (bf16 ? attention_forward_heads<true> : attention_forward_heads<false>)(out, lse, qkv, B, T, C, NH);
}

// One query's row of the backward: scores become p, dp becomes ds; both 0 for later keys, up to `columns`.
// scores, dp: (columns), the first `keys` valid   dot: sum over hs of dout out
inline void softmax_backward_row(float* scores, float* dp, float lse, float dot, int keys, int columns) {
    #pragma omp simd
    for (int i = 0; i < columns; i++) {
        const float p = exponential(scores[i] - lse);
        scores[i] = i < keys ? p : 0.0f;
        dp[i] = i < keys ? p * (dp[i] - dot) : 0.0f;
    }
}

// A thread's scratch for the backward of one head. Padding is zero.
template <bool bf16>
struct AttentionBackwardScratch {
    std::vector<float> q, k, v, dout;                 // rows, q scaled
    std::vector<float> q_pairs, k_pairs, dout_pairs;
    std::vector<float> kt, vt;                        // transposed
    std::vector<float> scores, dp;                    // (attention_queries,ld_keys)
    std::vector<float> p, ds, p_pairs, ds_pairs;      // of a tile of queries
    std::vector<float> dq, dk, dv;                    // (padded_T,padded_hs)

    explicit AttentionBackwardScratch(const AttentionShape<bf16>& s)
        : q(s.head()), k(s.head()), v(s.head()), dout(s.head()), q_pairs(s.head()), k_pairs(s.head()),
          dout_pairs(s.head()), kt(s.transposed()), vt(s.transposed()), scores(s.scores()), dp(s.scores()),
          p(s.scores()), ds(s.scores()), p_pairs(s.scores()), ds_pairs(s.scores()), dq(s.head()),
          dk(s.head()), dv(s.head()) {}
};

// dq, dk, dv of one head, in x.
// dout, out: (T,hs) with leading dimension C   qkv: (T,hs) of q, with leading dimension 3C   lse: (T)
template <bool bf16>
inline void attention_backward_head(const AttentionShape<bf16>& s, AttentionBackwardScratch<bf16>& x,
                                    const float* dout, const float* out, const float* qkv, const float* lse,
                                    int C) {
    const int words = s.head_words();
    pack_rows(s, x.q.data(), qkv, 3 * C, s.scale);
    pack_rows(s, x.k.data(), qkv + C, 3 * C, 1.0f);
    pack_rows(s, x.v.data(), qkv + 2 * C, 3 * C, 1.0f);
    pack_rows(s, x.dout.data(), dout, C, 1.0f);
    transpose_rows(s, x.kt.data(), x.k.data());
    transpose_rows(s, x.vt.data(), x.v.data());
    const float* q_pairs = pair_rows<bf16>(x.q_pairs.data(), x.q.data(), words, s.padded_T, s.padded_hs);
    const float* k_pairs = pair_rows<bf16>(x.k_pairs.data(), x.k.data(), words, s.padded_T, s.padded_hs);
    const float* dout_pairs =
        pair_rows<bf16>(x.dout_pairs.data(), x.dout.data(), words, s.padded_T, s.padded_hs);
    std::fill(x.dk.begin(), x.dk.end(), 0.0f);
    std::fill(x.dv.begin(), x.dv.end(), 0.0f);
    for (int first = 0; first < s.T; first += attention_queries) {
        const int keys = first + attention_queries, queries = std::min(attention_queries, s.T - first);
        const long row = long(first) * words, pair = long(first / s.in_word) * s.padded_hs;
        tile_matmul<bf16>(x.scores.data(), s.ld_keys, x.q.data() + row, words, 1, x.kt.data(), s.ld_keys,
                          attention_queries, keys, words, false);
        tile_matmul<bf16>(x.dp.data(), s.ld_keys, x.dout.data() + row, words, 1, x.vt.data(), s.ld_keys,
                          attention_queries, keys, words, false);
        const float *p = x.scores.data(), *ds = x.dp.data();
        for (int i = 0; i < attention_queries; i++) {
            const bool padding = i >= queries;
            float dot = 0;
            if (!padding) {
                const float *o = out + long(first + i) * C, *d = dout + long(first + i) * C;
                prefetch_row(o + long(rows_ahead) * C, s.hs);
                #pragma omp simd reduction(+ : dot)
                for (int c = 0; c < s.hs; c++) { dot += o[c] * d[c]; }
            }
            float *scores = x.scores.data() + long(i) * s.ld_keys, *dp = x.dp.data() + long(i) * s.ld_keys;
            softmax_backward_row(scores, dp, padding ? 0.0f : lse[first + i], dot,
                                 padding ? 0 : first + i + 1, keys);
            if (!bf16) { continue; }
            pack_row<bf16>(x.p.data() + long(i) * s.key_words(), scores, keys);
            pack_row<bf16>(x.ds.data() + long(i) * s.key_words(), dp, keys);
        }
        if (bf16) {
            ds = x.ds.data();
            p = pair_rows<bf16>(x.p_pairs.data(), x.p.data(), s.key_words(), attention_queries, s.ld_keys);
        }
        tile_matmul<bf16>(x.dq.data() + long(first) * s.padded_hs, s.padded_hs, ds, s.key_words(), 1, k_pairs,
                          s.padded_hs, attention_queries, s.padded_hs, keys / s.in_word, false);
        ds = pair_rows<bf16>(x.ds_pairs.data(), ds, s.key_words(), attention_queries, s.ld_keys);
        tile_matmul<bf16>(x.dk.data(), s.padded_hs, ds, 1, s.ld_keys, q_pairs + pair, s.padded_hs, keys,
                          s.padded_hs, attention_queries / s.in_word, true);
        tile_matmul<bf16>(x.dv.data(), s.padded_hs, p, 1, s.ld_keys, dout_pairs + pair, s.padded_hs, keys,
                          s.padded_hs, attention_queries / s.in_word, true);
    }
}

template <bool bf16>
inline void attention_backward_heads(float* dqkv, const float* dout, const float* out, const float* qkv,
                                     const float* lse, int B, int T, int C, int NH) {
    const AttentionShape<bf16> s(T, C / NH);
    #pragma omp parallel
    {
        AttentionBackwardScratch<bf16> x(s);
        #pragma omp for collapse(2)
        for (int b = 0; b < B; b++) {
            for (int h = 0; h < NH; h++) {
                const long at = long(b) * T * C + h * s.hs, at3 = long(b) * T * 3 * C + h * s.hs;
                attention_backward_head(s, x, dout + at, out + at, qkv + at3, lse + (long(b) * NH + h) * T,
                                        C);
                for (int t = 0; t < T; t++) {
                    float* row = dqkv + at3 + long(t) * 3 * C;
                    const size_t from = size_t(t) * size_t(s.padded_hs);
                    for (int part = 0; part < 3; part++) { prefetch_row(row + (3 * rows_ahead + part) * C, s.hs); }
                    pack_row<false>(row, x.dq.data() + from, s.hs, s.scale);
                    pack_row<false>(row + C, x.dk.data() + from, s.hs);
                    pack_row<false>(row + 2 * C, x.dv.data() + from, s.hs);
                }
            }
        }
    }
}

// Overwrites dqkv.   dqkv, qkv: (B,T,3C)   dout, out: (B,T,C)   lse: (B,NH,T)
inline void attention_backward(float* dqkv, const float* dout, const float* out, const float* qkv,
                               const float* lse, int B, int T, int C, int NH, Stream&,
                               MatmulPrecision precision = MatmulPrecision::highest) {
    const bool bf16 = multiplies_bf16 && rounds_to_bf16(precision);
    (bf16 ? attention_backward_heads<true> : attention_backward_heads<false>)(dqkv, dout, out, qkv, lse, B, T,
                                                                              C, NH);
}

}  // namespace cpu
