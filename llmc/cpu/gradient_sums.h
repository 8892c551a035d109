// Gradients that are sums over all rows of a tensor: of biases, and of LayerNorm's parameters.
#pragma once
#include <algorithm>
#include <vector>

#include "llmc/cpu/memory.h"
#include "llmc/layout.h"
#include "llmc/stream.h"

namespace cpu {

// A GPU adds a layer's sums in one launch, here each function adds its own: nothing is ever pending.
struct GradientSums {
    void begin(float* grads, const Layout& layout, bool first, Stream& stream) {
        if (first) { set_zero(grads, layout.size, stream); }
    }
    void add_pending(Stream&) {}
};

// sums[i] += sum over n of inp[n,i], where finish(n) completes row n.   sums: (columns)   inp: (N,columns)
// Sums chunks of a fixed size, then the chunks in order: the same bits with any number of threads.
template <class Finish>
inline void column_sums(float* sums, const float* inp, int N, int columns, const Finish& finish) {
    const int rows = 64, chunks = (N + rows - 1) / rows;
    std::vector<float> partial(size_t(chunks) * size_t(columns));
    #pragma omp parallel for
    for (int chunk = 0; chunk < chunks; chunk++) {
        float* sum = partial.data() + size_t(chunk) * size_t(columns);
        for (long n = chunk * rows; n < std::min(N, (chunk + 1) * rows); n++) {
            finish(n);
            #pragma omp simd
            for (int i = 0; i < columns; i++) { sum[i] += inp[n * columns + i]; }
        }
    }
    for (int chunk = 0; chunk < chunks; chunk++) {
        #pragma omp simd
        for (int i = 0; i < columns; i++) { sums[i] += partial[size_t(chunk) * size_t(columns) + size_t(i)]; }
    }
}

}  // namespace cpu
