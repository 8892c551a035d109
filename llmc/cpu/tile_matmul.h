// Small matrix products from cache, for attention: too small for a library call, but large enough to matter.
// Sums are fp32. Factors are words of 32 bits: a word is an fp32 or, where the CPU multiplies bf16, two bf16
// that are adjacent along the dimension that is summed over.
//
// The inner loop keeps a tile of 8 x 32 (AVX-512), 4 x 16 (AVX2) or 4 x 8 sums in registers. Each step adds
// the outer product of a column of a and a row of b: with AVX-512, 10 loads (8 of them broadcasts) for 16
// fused multiply-adds.
#pragma once
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include <cmath>
#include <cstring>

namespace cpu {

#if defined(__AVX512F__)
const int vector_width = 16, tile_rows = 8;
#elif defined(__AVX2__)
const int vector_width = 8, tile_rows = 4;
#else
const int vector_width = 4, tile_rows = 4;
#endif
typedef float Vector __attribute__((vector_size(4 * vector_width)));

inline Vector load(const float* from) {
    Vector v;
    memcpy(&v, from, sizeof v);
    return v;
}

inline void store(float* to, Vector v) { memcpy(to, &v, sizeof v); }

#if defined(__AVX512BF16__)
const bool multiplies_bf16 = true;
#else
const bool multiplies_bf16 = false;
#endif

// a * b + c with one rounding; with bf16, a[0] * b[0] + a[1] * b[1] + c of each word's two values.
template <bool bf16>
inline Vector multiply_add(float a, Vector b, Vector c) {
#if defined(__AVX512BF16__)
    if (bf16) { return _mm512_dpbf16_ps(c, (__m512bh)_mm512_set1_ps(a), (__m512bh)b); }
#endif
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(_mm512_set1_ps(a), b, c);
#elif defined(__AVX2__) && defined(__FMA__)
    return _mm256_fmadd_ps(_mm256_set1_ps(a), b, c);
#else
    for (int i = 0; i < vector_width; i++) { c[i] = fmaf(a, b[i], c[i]); }
    return c;
#endif
}

// One tile: tile_rows rows, `vectors` vectors wide.
template <bool bf16, int vectors>
inline void tile(float* out, int ldo, const float* a, long row_stride, long k_stride, const float* b, int ldb,
                 int K, bool accumulate) {
    Vector sum[tile_rows][vectors] = {};
    if (accumulate) {
        for (int i = 0; i < tile_rows; i++) {
            for (int j = 0; j < vectors; j++) { sum[i][j] = load(out + i * ldo + j * vector_width); }
        }
    }
    for (int k = 0; k < K; k++) {
        for (int i = 0; i < tile_rows; i++) {
            for (int j = 0; j < vectors; j++) {
                sum[i][j] = multiply_add<bf16>(a[i * row_stride + k * k_stride],
                                               load(b + long(k) * ldb + j * vector_width), sum[i][j]);
            }
        }
    }
    for (int i = 0; i < tile_rows; i++) {
        for (int j = 0; j < vectors; j++) { store(out + i * ldo + j * vector_width, sum[i][j]); }
    }
}

// out (rows,columns) = or += a (rows,K) b (K,columns), K in words.   a[i,k] is at i * row_stride +
// k * k_stride, so it may be transposed; out and b are row-major with leading dimensions ldo and ldb.
// rows: a multiple of 8   columns: of 16
template <bool bf16>
inline void tile_matmul(float* out, int ldo, const float* a, long row_stride, long k_stride, const float* b,
                        int ldb, int rows, int columns, int K, bool accumulate) {
    for (int i = 0; i < rows; i += tile_rows) {
        const float* a_rows = a + i * row_stride;
        int j = 0;
        for (; j + 2 * vector_width <= columns; j += 2 * vector_width) {
            tile<bf16, 2>(out + i * ldo + j, ldo, a_rows, row_stride, k_stride, b + j, ldb, K, accumulate);
        }
        for (; j < columns; j += vector_width) {
            tile<bf16, 1>(out + i * ldo + j, ldo, a_rows, row_stride, k_stride, b + j, ldb, K, accumulate);
        }
    }
}

}  // namespace cpu
