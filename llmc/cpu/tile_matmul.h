// Small matrix products from cache, for attention: too small for a library call, but large enough to matter.
// Sums are fp32. Factors are words of 32 bits: a word is an fp32 or, where the CPU multiplies bf16, two bf16
// that are adjacent along the dimension that is summed over.
//
// The inner loop keeps a tile of 8 x 32 (AVX-512), 4 x 16 (AVX2) or 4 x 8 sums in registers. Each step adds
// the outer product of a column of a and a row of b: with AVX-512, 10 loads (8 of them broadcasts) for 16
// fused multiply-adds. With AMX it keeps 32 x 32 sums in four tile registers, and each step adds the products
// of 16 words of 32 rows of a and 32 columns of b.
#pragma once
#include <cmath>
#include <cstdint>

#include "llmc/cpu/vector.h"

namespace cpu {

const int tile_rows = vector_width == 16 ? 8 : 4;

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
inline void tile(float* out, int ldo, const float* a, int lda, const float* b, int ldb, int K,
                 bool accumulate) {
    Vector sum[tile_rows][vectors] = {};
    if (accumulate) {
        for (int i = 0; i < tile_rows; i++) {
            for (int j = 0; j < vectors; j++) { sum[i][j] = load(out + i * ldo + j * vector_width); }
        }
    }
    for (int k = 0; k < K; k++) {
        for (int i = 0; i < tile_rows; i++) {
            for (int j = 0; j < vectors; j++) {
                sum[i][j] = multiply_add<bf16>(a[long(i) * lda + k],
                                               load(b + long(k) * ldb + j * vector_width), sum[i][j]);
            }
        }
    }
    for (int i = 0; i < tile_rows; i++) {
        for (int j = 0; j < vectors; j++) { store(out + i * ldo + j * vector_width, sum[i][j]); }
    }
}

// Configures the calling thread's AMX registers, 16 rows of 16 words each, for its lifetime. Does nothing
// without `amx`.
class AmxRegisters {
public:
    explicit AmxRegisters(bool amx) : amx(amx) {
#if defined(__AMX_BF16__)
        // A constant: g++ 12 does not know that the instruction reads all of it, and might drop stores.
        alignas(64) static const struct {
            uint8_t palette, start_row, reserved[14];
            uint16_t bytes_of_a_row[16];
            uint8_t rows[16];
        } config = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
        if (amx) { _tile_loadconfig(&config); }
#endif
    }
    AmxRegisters(const AmxRegisters&) = delete;
    ~AmxRegisters() {
#if defined(__AMX_BF16__)
        if (amx) { _tile_release(); }
#endif
    }

private:
    [[maybe_unused]] const bool amx;
};

#if defined(__AMX_BF16__)
// tile_matmul in AmxRegisters.   rows, columns: multiples of 32   K: of 16
inline void amx_matmul(float* out, int ldo, const float* a, int lda, const float* b, int ldb, int rows,
                       int columns, int K, bool accumulate) {
    asm volatile("" ::: "memory");  // g++ does not know that _tile_loadd reads memory
    for (int i = 0; i < rows; i += 32) {
        for (int j = 0; j < columns; j += 32) {
            float* upper = out + long(i) * ldo + j;
            float* lower = upper + 16L * ldo;
            if (accumulate) {
                _tile_loadd(0, upper, 4L * ldo);
                _tile_loadd(1, upper + 16, 4L * ldo);
                _tile_loadd(2, lower, 4L * ldo);
                _tile_loadd(3, lower + 16, 4L * ldo);
            } else {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            }
            for (int k = 0; k < K; k += 16) {
                const float *a_rows = a + long(i) * lda + k, *b_rows = b + long(k) * ldb + j;
                _tile_loadd(4, a_rows, 4L * lda);
                _tile_loadd(5, a_rows + 16L * lda, 4L * lda);
                _tile_loadd(6, b_rows, 4L * ldb);
                _tile_loadd(7, b_rows + 16, 4L * ldb);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, upper, 4L * ldo);
            _tile_stored(1, upper + 16, 4L * ldo);
            _tile_stored(2, lower, 4L * ldo);
            _tile_stored(3, lower + 16, 4L * ldo);
        }
    }
}
#endif

// out (rows,columns) = or += a (rows,K) b (K,columns), K in words; row-major, with leading dimensions ldo,
// lda and ldb.   rows, columns: multiples of 16
// amx: the caller holds AmxRegisters, words are bf16, rows and columns multiples of 32, and K of 16
template <bool bf16>
inline void tile_matmul(float* out, int ldo, const float* a, int lda, const float* b, int ldb, int rows,
                        int columns, int K, bool accumulate, [[maybe_unused]] bool amx) {
#if defined(__AMX_BF16__)
    if (bf16 && amx) { return amx_matmul(out, ldo, a, lda, b, ldb, rows, columns, K, accumulate); }
#endif
    for (int i = 0; i < rows; i += tile_rows) {
        const float* a_rows = a + long(i) * lda;
        float* out_rows = out + long(i) * ldo;
        int j = 0;
        for (; j + 2 * vector_width <= columns; j += 2 * vector_width) {
            tile<bf16, 2>(out_rows + j, ldo, a_rows, lda, b + j, ldb, K, accumulate);
        }
        for (; j < columns; j += vector_width) {
            tile<bf16, 1>(out_rows + j, ldo, a_rows, lda, b + j, ldb, K, accumulate);
        }
    }
}

}  // namespace cpu
