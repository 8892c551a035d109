// Vectors of the CPU's width, for two things that g++ does not generate from plain loops: sums whose lanes
// are added by halves, and matrices that are transposed in registers.
#pragma once
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include <cstdint>
#include <cstring>

namespace cpu {

#if defined(__AVX512F__)
const int vector_width = 16;
#elif defined(__AVX2__)
const int vector_width = 8;
#else
const int vector_width = 4;
#endif
typedef float Vector __attribute__((vector_size(4 * vector_width)));

inline Vector load(const float* from) {
    Vector v;
    memcpy(&v, from, sizeof v);
#if defined(__AVX2__) && !defined(__AVX512F__)
    asm("" : "+x"(v));  // stays in a register: tuned for AMD, g++ would read it again for each product
#endif
    return v;
}

inline void store(float* to, Vector v) { memcpy(to, &v, sizeof v); }

// Two vectors, rounded to bf16: the values of `first`, and then those of `second`. Denormals become 0, as
// they are for products. Defined where the CPU multiplies bf16.
void round_two(void* out, Vector first, Vector second);
// The same, in pairs: out[2 i] = first[i], out[2 i + 1] = second[i].
void round_pair(void* out, Vector first, Vector second);

#if defined(__AVX512BF16__)
const bool multiplies_bf16 = true;

inline void round_two(void* out, Vector first, Vector second) {
    const __m512bh rounded = _mm512_cvtne2ps_pbh(second, first);
    memcpy(out, &rounded, sizeof rounded);
}

inline void round_pair(void* out, Vector first, Vector second) {
    typedef short Halves __attribute__((vector_size(64)));
    Halves order = {};
    for (int i = 0; i < 32; i++) { order[i] = short(i / 2 + i % 2 * 16); }
    const Halves pairs = __builtin_shuffle((Halves)_mm512_cvtne2ps_pbh(second, first), order);
    memcpy(out, &pairs, sizeof pairs);
}
#else
const bool multiplies_bf16 = false;
#endif

typedef int32_t Lanes __attribute__((vector_size(4 * vector_width)));

// Combines a vector's lanes by halves. In a loop with a reduction g++ combines them one after the other.
template <int half = vector_width / 2, class Combine>
inline float reduce(Vector v, const Combine& combine) {
    Lanes other = {};
    for (int i = 0; i < vector_width; i++) { other[i] = i ^ half; }
    v = combine(v, __builtin_shuffle(v, other));
    if constexpr (half > 1) { return reduce<half / 2>(v, combine); }
    return v[0];
}

inline float sum_of(Vector v) { return reduce(v, [](Vector a, Vector b) { return a + b; }); }

// The sum of value(i) over i < n.
template <class Value>
inline float sum_over(int n, const Value& value) {
    Vector sums = {};
    int i = 0;
    for (; i + vector_width <= n; i += vector_width) {
        float values[vector_width];
        #pragma omp simd
        for (int j = 0; j < vector_width; j++) { values[j] = value(i + j); }
        sums += load(values);
    }
    float sum = sum_of(sums);
    for (; i < n; i++) { sum += value(i); }
    return sum;
}

// Exchanges the two off-diagonal blocks of each square of 2 * size rows and columns.
template <int size>
inline void exchange_blocks(Vector (&rows)[vector_width]) {
    Lanes first = {}, second = {};
    for (int i = 0; i < vector_width; i++) {
        first[i] = i & size ? vector_width + i - size : i;
        second[i] = i & size ? vector_width + i : i + size;
    }
    for (int i = 0; i < vector_width; i++) {
        if (i & size) { continue; }
        const Vector a = rows[i], b = rows[i + size];
        rows[i] = __builtin_shuffle(a, b, first);
        rows[i + size] = __builtin_shuffle(a, b, second);
    }
    if constexpr (size > 1) { exchange_blocks<size / 2>(rows); }
}

// out[j,i] = inp[i,j].   out: (columns,rows), leading dimension ldo   inp: (rows,columns), ldi
// rows, columns: multiples of 16
inline void transpose(float* out, int ldo, const float* inp, int ldi, int rows, int columns) {
    for (int first = 0; first < rows; first += vector_width) {
        for (int j = 0; j < columns; j += vector_width) {
            Vector square[vector_width];
            for (int i = 0; i < vector_width; i++) { square[i] = load(inp + long(first + i) * ldi + j); }
            exchange_blocks<vector_width / 2>(square);
            for (int i = 0; i < vector_width; i++) { store(out + long(j + i) * ldo + first, square[i]); }
        }
    }
}

}  // namespace cpu
