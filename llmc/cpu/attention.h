// Causal self-attention, a tile of queries at a time as in FlashAttention (Dao et al., arXiv 2205.14135):
// the T x T scores are never in memory. For one head, with q, k, v: (T,hs) and scale = 1 / sqrt(hs):
//
//     s = scale q k^T (s <= t only),   lse = log(sum over s of e^s),   p = e^(s - lse),   out = p v
//     dv = p^T dout,   dp = dout v^T,   ds = p (dp - sum over hs of dout out)
//     dq = scale ds k,   dk = scale ds^T q
//
// A thread computes one (batch, head) at a time in scratch of its own, padded with zeros to whole tiles.
// Tiles above the diagonal are skipped. Flops: 2 T^2 C forward and 5 T^2 C backward a sequence. Forward, p is
// e^(s - max), and out is divided by the sum. Where matmuls round their inputs to bf16, so do the products
// here: q, k, v, dout, p and ds are rounded; scores, exponentials and sums are fp32. The factors of a product
// are words (llmc/cpu/tile_matmul.h), which lie along the dimension that the product sums over:
//
//     rows          (t, i / 2): values of one row, adjacent along the head
//     pairs         (t / 2, i): values of two adjacent rows
//     transposed    (i / 2, t) of rows, so that scores are vectors along the keys; (i, t / 2) of pairs
//
// In fp32, where a word is one value, pairs are rows. dk and dv are accumulated as their transposes, (hs, T),
// so that these products, too, read adjacent words of p and ds.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <type_traits>
#include <vector>

#include "llmc/arithmetic.h"
#include "llmc/cpu/matmul.h"
#include "llmc/cpu/tile_matmul.h"
#include "llmc/stream.h"

namespace cpu {

const int attention_queries = 32;  // in a tile

// A thread's scratch for one head, padded to the tiles of tile_matmul. Padding is zero.
template <bool bf16>
struct AttentionHead {
    static constexpr int in_word = bf16 ? 2 : 1;  // values
    const int T, hs, padded_T, padded_hs;
    const int ld_keys;      // for a column per key: an odd multiple of 32, or rows would share cache sets
    const int words, ld_p;  // in a row of a head, and of probabilities
    const float scale;
    const bool amx = bf16 && multiplies_in_amx();
    Buffer<float> q, k, v, dout;  // rows
    Buffer<float> q_pairs, k_pairs, v_pairs, dout_pairs;
    Buffer<float> kt, vt;                    // transposed rows
    Buffer<float> qt, dout_t;                // transposed pairs, with leading dimension ld_p
    Buffer<float> scores, dp;                // (attention_queries,ld_keys) of fp32
    Buffer<float> p, ds, p_pairs, ds_pairs;  // of a tile of queries
    Buffer<float> mixed, dq;                 // (padded_T,padded_hs) of fp32
    Buffer<float> dkt, dvt;                  // (padded_hs,ld_keys) of fp32

    AttentionHead(int T, int hs)
        : T(T), hs(hs), padded_T((T + attention_queries - 1) / attention_queries * attention_queries),
          padded_hs((hs + 16 * in_word - 1) / (16 * in_word) * 16 * in_word), ld_keys(padded_T | 32),
          words(padded_hs / in_word), ld_p(ld_keys / in_word), scale(1.0f / sqrtf(float(hs))) {
        const long head = long(padded_T) * padded_hs, tile = long(attention_queries) * ld_keys;
        for (auto* one : {&q, &k, &v, &dout, &mixed, &dq}) { *one = Buffer<float>(head); }
        for (auto* one : {&q_pairs, &k_pairs, &v_pairs, &dout_pairs}) { *one = Buffer<float>(head); }
        for (auto* one : {&kt, &vt, &qt, &dout_t}) { *one = Buffer<float>(long(words) * ld_keys); }
        for (auto* one : {&scores, &dp, &p, &ds, &p_pairs, &ds_pairs}) { *one = Buffer<float>(tile); }
        for (auto* one : {&dkt, &dvt}) { *one = Buffer<float>(long(padded_hs) * ld_keys); }
    }
};

// Packs values into words: rounds them to bf16, or copies them.   words: (n / in_word)   inp: (n)
template <bool bf16, class T>
inline void pack_row(float* words, const T* inp, int n) {
    if constexpr (bf16 && std::is_same_v<T, uint16_t>) {
        memcpy(words, inp, size_t(n) * sizeof(T));
    } else {
        auto* values = reinterpret_cast<std::conditional_t<bf16, uint16_t, float>*>(words);
        assign(values, n, [=](long i) { return widened(inp[i]); });
    }
}

// Prefetches row t + 8 of a head: rows lie too far apart for the CPU's own prefetching. The row may lie
// beyond the array, since a prefetch never faults.
template <class T>
inline void prefetch_row(const T* inp, long t, int ld, int hs) {
    const int ahead = 8;  // rows
    for (int i = 0; i < hs; i += int(64 / sizeof(T))) { __builtin_prefetch(inp + (t + ahead) * ld + i); }
}

// out[t] = inp[t].   out: rows of a head, but for its padding   inp: (T,hs), leading dimension ld
template <bool bf16, class T>
inline void pack_rows(AttentionHead<bf16>& x, Buffer<float>& out, const T* inp, int ld) {
    for (int t = 0; t < x.T; t++) {
        prefetch_row(inp, t, ld, x.hs);
        pack_row<bf16>(out.data() + long(t) * x.words, inp + long(t) * ld, x.hs);
    }
}

// Returns the pairs of rows: `out`, or in fp32 the rows themselves.
// out: (count / 2,columns)   rows: (count,columns) values; both with leading dimension ld
template <bool bf16>
inline const float* pair_rows(Buffer<float>& out, const Buffer<float>& rows, int count, int columns, int ld) {
    if (!bf16) { return rows.data(); }
    uint32_t* words = reinterpret_cast<uint32_t*>(out.data());
    const uint16_t* row = reinterpret_cast<const uint16_t*>(rows.data());
    for (int t = 0; t < count; t += 2, row += 2 * ld, words += ld) {
        #pragma omp simd
        for (int i = 0; i < columns; i++) { words[i] = row[i] | uint32_t(row[ld + i]) << 16; }
    }
    return out.data();
}

// The same for rows of fp32, which are rounded.   columns: a multiple of 16
template <bool bf16>
inline const float* round_pairs(Buffer<float>& out, const Buffer<float>& rows, int count, int columns,
                                int ld) {
    if constexpr (!bf16) {
        return rows.data();
    } else {
        for (int t = 0; t < count; t += 2) {
            const float* row = rows.data() + long(t) * ld;
            float* words = out.data() + long(t / 2) * ld;
            for (int i = 0; i < columns; i += vector_width) {
                round_pair(words + i, load(row + i), load(row + ld + i));
            }
        }
        return out.data();
    }
}

// A row of a gradient: out[i] = scale * inp[i], and sums[i] += the same.   out, sums, inp: (n)
template <class T>
inline void store_gradients(T* out, float* sums, const float* inp, int n, float scale) {
    assign(out, n, [=](long i) {
        const float value = scale * inp[i];
        sums[i] += value;
        return value;
    });
}

// Overwrites the scores of keys later than each row's query with -infinity.
// scores: (attention_queries,columns) of the last queries before key `columns`, with leading dimension ld
inline void mask_later_keys(float* scores, int columns, int ld) {
    float* row = scores + columns - attention_queries;
    for (int i = 0; i < attention_queries; i++, row += ld) {
        #pragma omp simd
        for (int j = 0; j < attention_queries; j++) { row[j] = j > i ? -INFINITY : row[j]; }
    }
}

// The largest of a query's scores.   scores: (columns), here and below a multiple of 16
inline float max_of_row(const float* scores, int columns) {
    Vector largest = load(scores);
    for (int i = vector_width; i < columns; i += vector_width) {
        const Vector v = load(scores + i);
        largest = v > largest ? v : largest;
    }
    return reduce(largest, [](Vector a, Vector b) { return a > b ? a : b; });
}

// scores = e^(scale scores - shift). Returns their sum. scale * score is rounded before the subtraction, as
// it was when `shift` was found: so the largest score's exponential is 1, however large the scores are.
inline float exponential_row(float* scores, float scale, float shift, int columns) {
    Vector sums = {};
    for (int i = 0; i < columns; i += vector_width) {
        #pragma omp simd
        for (int j = i; j < i + vector_width; j++) { scores[j] = exponential(scores[j] * scale - shift); }
        sums += load(scores + i);
    }
    return sum_of(sums);
}

// Scores become p, and dp becomes ds.   dot: sum over hs of dout out
inline void softmax_backward_row(float* scores, float* dp, float scale, float lse, float dot, int columns) {
    for (int i = 0; i < columns; i += vector_width) {
        #pragma omp simd
        for (int j = i; j < i + vector_width; j++) {
            scores[j] = exponential(scores[j] * scale - lse);
            dp[j] = scores[j] * (dp[j] - dot);
        }
    }
}

// One head.   out: (T,hs) with leading dimension C   lse: (T)   qkv: (T,hs) of q, with leading dimension 3C
template <bool bf16, class T>
inline void attention_forward_head(AttentionHead<bf16>& x, T* out, float* lse, const T* qkv, int C) {
    pack_rows(x, x.q, qkv, 3 * C);
    pack_rows(x, x.k, qkv + C, 3 * C);
    pack_rows(x, x.v, qkv + 2 * C, 3 * C);
    transpose(x.kt.data(), x.ld_keys, x.k.data(), x.words, x.padded_T, x.words);
    const float* v = pair_rows<bf16>(x.v_pairs, x.v, x.padded_T, x.padded_hs, x.padded_hs);
    const Buffer<float>& p = bf16 ? x.p : x.scores;
    for (int first = 0; first < x.T; first += attention_queries) {
        const int keys = first + attention_queries, queries = std::min(attention_queries, x.T - first);
        tile_matmul<bf16>(x.scores.data(), x.ld_keys, x.q.data() + long(first) * x.words, x.words,
                          x.kt.data(), x.ld_keys, attention_queries, keys, x.words, false, x.amx);
        mask_later_keys(x.scores.data(), keys, x.ld_keys);
        float max[attention_queries], sum[attention_queries];
        for (int i = 0; i < queries; i++) {  // a loop of its own: the rows' reductions overlap
            max[i] = x.scale * max_of_row(x.scores.data() + long(i) * x.ld_keys, keys);
        }
        for (int i = 0; i < queries; i++) {
            float* scores = x.scores.data() + long(i) * x.ld_keys;
            sum[i] = exponential_row(scores, x.scale, max[i], keys);
            if (bf16) { pack_row<bf16>(x.p.data() + long(i) * x.ld_p, scores, keys); }
        }
        tile_matmul<bf16>(x.mixed.data(), x.padded_hs, p.data(), x.ld_p, v, x.padded_hs, attention_queries,
                          x.padded_hs, keys / x.in_word, false, x.amx);
        for (int i = 0; i < queries; i++) {
            lse[first + i] = max[i] + logf(sum[i]);
            const float *from = x.mixed.data() + long(i) * x.padded_hs, inverse = 1.0f / sum[i];
            T* to = out + long(first + i) * C;
            assign(to, x.hs, [=](long c) { return inverse * from[c]; });
        }
    }
}

// A tile of queries, from `first` on: adds to dq, dk and dv in x, where q, k, v and dout are packed.
template <bool bf16, class T>
inline void attention_backward_tile(AttentionHead<bf16>& x, const float* dout, const T* out,
                                    const float* lse, int C, int first) {
    const int keys = first + attention_queries, queries = std::min(attention_queries, x.T - first);
    const long row = long(first) * x.words, pair = first / x.in_word;
    tile_matmul<bf16>(x.scores.data(), x.ld_keys, x.q.data() + row, x.words, x.kt.data(), x.ld_keys,
                      attention_queries, keys, x.words, false, x.amx);
    tile_matmul<bf16>(x.dp.data(), x.ld_keys, x.dout.data() + row, x.words, x.vt.data(), x.ld_keys,
                      attention_queries, keys, x.words, false, x.amx);
    mask_later_keys(x.scores.data(), keys, x.ld_keys);
    for (int i = 0; i < attention_queries; i++) {
        float dot = 0, shift = 0;  // for padding, where q and dout are 0, and so are dp and ds
        if (i < queries) {
            const T* o = out + long(first + i) * C;
            const float* d = dout + long(first + i) * C;
            prefetch_row(out, first + i, C, x.hs);
            dot = sum_over(x.hs, [=](int c) { return widened(o[c]) * d[c]; });
            shift = lse[first + i];
        }
        float *scores = x.scores.data() + long(i) * x.ld_keys, *dp = x.dp.data() + long(i) * x.ld_keys;
        softmax_backward_row(scores, dp, x.scale, shift, dot, keys);
        if (bf16) { pack_row<bf16>(x.ds.data() + long(i) * x.ld_p, dp, keys); }
    }
    const Buffer<float>& ds = bf16 ? x.ds : x.dp;
    const float* p_pairs = round_pairs<bf16>(x.p_pairs, x.scores, attention_queries, keys, x.ld_keys);
    const float* ds_pairs = round_pairs<bf16>(x.ds_pairs, x.dp, attention_queries, keys, x.ld_keys);
    tile_matmul<bf16>(x.dq.data() + long(first) * x.padded_hs, x.padded_hs, ds.data(), x.ld_p,
                      (bf16 ? x.k_pairs : x.k).data(), x.padded_hs, attention_queries, x.padded_hs,
                      keys / x.in_word, false, x.amx);
    tile_matmul<bf16>(x.dkt.data(), x.ld_keys, x.qt.data() + pair, x.ld_p, ds_pairs, x.ld_keys, x.padded_hs,
                      keys, attention_queries / x.in_word, true, x.amx);
    tile_matmul<bf16>(x.dvt.data(), x.ld_keys, x.dout_t.data() + pair, x.ld_p, p_pairs, x.ld_keys,
                      x.padded_hs, keys, attention_queries / x.in_word, true, x.amx);
}

// One head. Adds the sums of dqkv's rows, rows_of_a_sum at a time, to `sums`.   lse: (T)
// dqkv, qkv: (T,hs) of q, with leading dimension 3C, like sums: (T / rows_of_a_sum,hs)
// dout, out: (T,hs), with leading dimension C
template <bool bf16, class T>
inline void attention_backward_head(AttentionHead<bf16>& x, T* dqkv, float* sums, const float* dout,
                                    const T* out, const T* qkv, const float* lse, int C) {
    pack_rows(x, x.q, qkv, 3 * C);
    pack_rows(x, x.k, qkv + C, 3 * C);
    pack_rows(x, x.v, qkv + 2 * C, 3 * C);
    pack_rows(x, x.dout, dout, C);
    transpose(x.kt.data(), x.ld_keys, x.k.data(), x.words, x.padded_T, x.words);
    transpose(x.vt.data(), x.ld_keys, x.v.data(), x.words, x.padded_T, x.words);
    pair_rows<bf16>(x.k_pairs, x.k, x.padded_T, x.padded_hs, x.padded_hs);
    const float* q = pair_rows<bf16>(x.q_pairs, x.q, x.padded_T, x.padded_hs, x.padded_hs);
    const float* d = pair_rows<bf16>(x.dout_pairs, x.dout, x.padded_T, x.padded_hs, x.padded_hs);
    transpose(x.qt.data(), x.ld_p, q, x.padded_hs, x.padded_T / x.in_word, x.padded_hs);
    transpose(x.dout_t.data(), x.ld_p, d, x.padded_hs, x.padded_T / x.in_word, x.padded_hs);
    for (auto* one : {&x.dkt, &x.dvt}) { std::fill_n(one->data(), one->count(), 0.0f); }
    for (int first = 0; first < x.T; first += attention_queries) {
        attention_backward_tile(x, dout, out, lse, C, first);
    }
    // The pairs of q and dout are no longer needed: their memory receives dk and dv.
    Buffer<float>&dk = x.q_pairs, &dv = x.dout_pairs;
    transpose(dk.data(), x.padded_hs, x.dkt.data(), x.ld_keys, x.padded_hs, x.padded_T);
    transpose(dv.data(), x.padded_hs, x.dvt.data(), x.ld_keys, x.padded_hs, x.padded_T);
    for (int t = 0; t < x.T; t++, dqkv += 3 * C) {
        const long from = long(t) * x.padded_hs;
        float* sum = sums + long(t / rows_of_a_sum) * 3 * C;
        store_gradients(dqkv, sum, x.dq.data() + from, x.hs, x.scale);
        store_gradients(dqkv + C, sum + C, dk.data() + from, x.hs, x.scale);
        store_gradients(dqkv + 2 * C, sum + 2 * C, dv.data() + from, x.hs, 1.0f);
    }
}

// The calling thread's scratch. It is kept for the next layer: fresh memory would cost a tenth of the time.
template <bool bf16>
inline AttentionHead<bf16>& scratch_of_thread(int T, int hs) {
    thread_local std::optional<AttentionHead<bf16>> x;
    if (!x || x->T != T || x->hs != hs) { x.emplace(T, hs); }
    return *x;
}

// Calls work(scratch, b, h) for all heads, on all threads.
template <bool bf16, typename Work>
inline void for_each_head_of(int B, int T, int hs, int NH, const Work& work) {
    #pragma omp parallel
    {
        AttentionHead<bf16>& x = scratch_of_thread<bf16>(T, hs);
        const AmxRegisters registers(x.amx);
        #pragma omp for collapse(2)
        for (int b = 0; b < B; b++) {
            for (int h = 0; h < NH; h++) { work(x, b, h); }
        }
    }
}

template <typename Work>
inline void for_each_head(bool bf16, int B, int T, int hs, int NH, const Work& work) {
    if constexpr (multiplies_bf16) {
        if (bf16) { return for_each_head_of<true>(B, T, hs, NH, work); }
    }
    for_each_head_of<false>(B, T, hs, NH, work);
}

// bf16: products round their inputs, if the program is built for a CPU that multiplies bf16.
// out: (B,T,C)   lse: (B,NH,T)   qkv: (B,T,3C), each of q, k, v being NH heads of hs = C / NH
inline void attention_forward(Activation out, float* lse, Activation qkv, int B, int T, int C, int NH,
                              Stream&, bool bf16) {
    const int hs = C / NH;
    out.visit([&](auto* to) {
        const auto* from = qkv.like(to);
        const auto work = [&](auto& x, int b, int h) {
            attention_forward_head(x, to + long(b) * T * C + h * hs, lse + (long(b) * NH + h) * T,
                                   from + long(b) * T * 3 * C + h * hs, C);
        };
        for_each_head(bf16, B, T, hs, NH, work);
    });
}

// Overwrites dqkv. Adds its sum over rows to dqkvb, or overwrites that unless sums.adds: the same bits with
// any number of threads. bf16: as in attention_forward
// dqkv, qkv: (B,T,3C)   dqkvb: (3C)   dout, out: (B,T,C)   lse: (B,NH,T)
inline void attention_backward(Activation dqkv, float* dqkvb, const float* dout, Activation out,
                               Activation qkv, const float* lse, int B, int T, int C, int NH,
                               const GradientSums& sums, Stream&, bool bf16) {
    const int hs = C / NH, rows = (T + rows_of_a_sum - 1) / rows_of_a_sum;  // of sums, for each sequence
    std::vector<float> partial(size_t(B) * size_t(rows) * 3 * size_t(C));   // (B,rows,3C)
    dqkv.visit([&](auto* to) {
        const auto *o = out.like(to), *from = qkv.like(to);
        const auto work = [&](auto& x, int b, int h) {
            const long at = long(b) * T * C + h * hs, at3 = long(b) * T * 3 * C + h * hs;
            attention_backward_head(x, to + at3, partial.data() + long(b) * rows * 3 * C + h * hs, dout + at,
                                    o + at, from + at3, lse + (long(b) * NH + h) * T, C);
        };
        for_each_head(bf16, B, T, hs, NH, work);
    });
    sums.add(dqkvb, partial.data(), long(B) * rows, 3 * C, 3 * C);
}

}  // namespace cpu
