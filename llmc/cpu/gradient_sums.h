// Gradients that are sums over all rows of a tensor: of biases, and of LayerNorm's parameters.
#pragma once
#include <algorithm>
#include <initializer_list>
#include <vector>

#include "llmc/cpu/memory.h"
#include "llmc/layout.h"
#include "llmc/stream.h"

namespace cpu {

const int rows_of_a_sum = 64;  // rows in one partial sum

// On a GPU one launch adds all sums of a layer; here each function adds its own, so nothing is ever pending.
struct GradientSums : MicroStep {
    void add_pending(Stream&) {}

    // to[i] = sum over rows of from[.,i], or += if `adds`. Does nothing if `to` is null.
    // from: (rows,columns), with leading dimension ld
    void add(float* to, const float* from, long rows, int columns, int ld) const {
        if (!to) { return; }
        if (!adds) { std::fill_n(to, columns, 0.0f); }
        for (long n = 0; n < rows; n++, from += ld) {
            #pragma omp simd
            for (int i = 0; i < columns; i++) { to[i] += from[i]; }
        }
    }
};

// Adds sums over rows to each of `to`, or overwrites it unless sums.adds. add_row(sum, n) adds row n to sum.
// to: (columns) each; null: its sum is not needed   sum: (as many, columns)
// Sums chunks of a fixed size, then the chunks in order: the same bits with any number of threads.
template <class AddRow>
inline void add_column_sums(std::initializer_list<float*> to, int N, int columns, const GradientSums& sums,
                            const AddRow& add_row) {
    const int rows = rows_of_a_sum, chunks = (N + rows - 1) / rows, all = int(to.size()) * columns;
    std::vector<float> partial(size_t(chunks) * size_t(all));
    #pragma omp parallel for
    for (int chunk = 0; chunk < chunks; chunk++) {
        float* sum = partial.data() + size_t(chunk) * size_t(all);
        for (long n = chunk * rows; n < std::min(N, (chunk + 1) * rows); n++) { add_row(sum, n); }
    }
    const float* from = partial.data();
    for (float* one : to) {
        sums.add(one, from, chunks, columns, all);
        from += columns;
    }
}

}  // namespace cpu
