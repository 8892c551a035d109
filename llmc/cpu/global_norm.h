// The squared L2 norm of a buffer of gradients.
#pragma once
#include <algorithm>
#include <vector>

#include "llmc/stream.h"

namespace cpu {

// *out = sum of values[i]^2.   values: (count)
// Sums chunks of a fixed size in double, and then the chunks in order: the same bits with any number of
// threads.
inline void global_norm_squared(float* out, const float* values, long count, Stream&) {
    const long chunk = 1 << 15, chunks = (count + chunk - 1) / chunk;
    std::vector<double> partial(static_cast<size_t>(chunks));
    #pragma omp parallel for
    for (long i = 0; i < chunks; i++) {
        const long end = std::min(count, (i + 1) * chunk);
        double sum = 0;
        #pragma omp simd reduction(+ : sum)
        for (long j = i * chunk; j < end; j++) { sum += double(values[j]) * double(values[j]); }
        partial[size_t(i)] = sum;
    }
    double sum = 0;
    for (double part : partial) { sum += part; }
    *out = float(sum);
}

}  // namespace cpu
