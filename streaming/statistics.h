// Statistics of the outer gradients: their norms, the cosines between workers, and the rounding error. All
// are sums of products of two rows, in double and in a fixed order; squares of fp32 neither overflow nor
// underflow there.
//
//     row w of M workers        the decoded payload of worker w
//     sum w, w = 0..M-1         row w . row w
//     then, for M <= 8          row a . row b, a < b: (0, 1), (0, 2), ..., (1, 2), ...
//     then, for more workers    row w . mean for each w; mean . mean
//
// and, for this worker's own payload, delta . delta and lost . lost with lost = delta - decoded.
//
// Cost, in bytes of memory traffic per value and sync, with P bytes of payload per value: on the outer
// stream M^2 P for M <= 8 (fp4, M = 2: 2; M = 8: 32, most of them from a cache), else 2 M P + 4 M + 4; on
// the main stream 8 + P at a send (with error feedback 4 + P), and 4 for the norm of a mean. For GPT-2 124M
// in fp4 between two workers that is 1.8 GB in H steps, or 0.9 ms by the kernels' times on an H200, so there
// is no option to turn them off. One core of a CPU takes 0.5 ns per value at a send and, for two workers,
// 0.7 ns on the outer stream.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "llmc/cpu/global_norm.h"
#include "streaming/quantize.h"

const int most_pairwise = 8;  // workers up to which each pair is compared

// A sum of products is first computed by chunks. Their number depends on the number of values alone, so
// that the order of additions is fixed.
const int most_chunks = 256;
const long smallest_chunk = 1024;  // values

HD inline int chunks_of(long values) {
    const long chunks = (values + smallest_chunk - 1) / smallest_chunk;
    return int(chunks < 1 ? 1 : chunks < most_chunks ? chunks : most_chunks);
}

HD inline bool has_mean_row(int workers) { return workers > most_pairwise; }

// Sums of products of rows.
HD inline int row_sums(int workers) {
    return has_mean_row(workers) ? 2 * workers + 1 : workers * (workers + 1) / 2;
}

// The largest row_sums() of this many workers or fewer: above most_pairwise there are fewer again.
inline int most_row_sums(int workers) {
    return std::max(row_sums(std::min(workers, most_pairwise)), row_sums(workers));
}

// The two rows of a sum; row number `workers` is the mean.
struct RowPair {
    int a, b;
};

HD inline RowPair rows_of(int sum, int workers) {
    if (sum < workers) { return {sum, sum}; }
    int b = sum - workers, a = 0;
    if (has_mean_row(workers)) { return {b, workers}; }
    for (; b >= workers - 1 - a; a++) { b -= workers - 1 - a; }
    return {a, a + 1 + b};
}

const int encoding_sums = 2;  // delta . delta, lost . lost

// The most partial sums of a call for this many workers or fewer.
inline long partial_sums(int workers) {
    return long(most_chunks) * std::max(most_row_sums(workers), encoding_sums);
}

// The statistics of one sync. NaN: undefined, because a row is all zeros.
struct OuterStatistics {
    double delta_norm = std::numeric_limits<double>::quiet_NaN();
    double quantization_error = std::numeric_limits<double>::quiet_NaN();  // |lost| / |delta|
    std::vector<double> cosines;       // of rows a < b, for two to eight workers
    std::vector<double> mean_cosines;  // of each row and the mean, for more
};

// encoding: (encoding_sums)   rows: (row_sums(workers))
inline OuterStatistics outer_statistics(const double* encoding, const std::vector<double>& rows,
                                        int workers) {
    OuterStatistics statistics;
    statistics.delta_norm = std::sqrt(encoding[0]);
    statistics.quantization_error = std::sqrt(encoding[1] / encoding[0]);
    auto& cosines = has_mean_row(workers) ? statistics.mean_cosines : statistics.cosines;
    const double mean_square = rows.back();  // if there is a mean
    const int end = row_sums(workers) - (has_mean_row(workers) ? 1 : 0);
    for (int sum = workers; sum < end; sum++) {
        const auto [a, b] = rows_of(sum, workers);
        const double other = b == workers ? mean_square : rows[size_t(b)];
        cosines.push_back(rows[size_t(sum)] / (std::sqrt(rows[size_t(a)]) * std::sqrt(other)));
    }
    return statistics;
}

namespace cpu {

// row = a decoded block.   row: (128)   payload: of a part   block: of the part
template <class F>
inline void decode_block(float* row, const uint8_t* payload, const PayloadLayout& layout, long block) {
    decode_block<F>(row, payload + layout.codes + block * quantization_block * F::bits / 8,
                    payload + layout.scales + block * 2);
}

// a . b, in 32 independent sums, because additions to a single one would wait for each other.   a, b: (128)
inline double dot_block(const float* a, const float* b) {
    const int lanes = 32;
    double sums[lanes] = {};
    for (int k = 0; k < quantization_block; k += lanes) {
        for (int j = 0; j < lanes; j++) { sums[j] += double(a[k + j]) * double(b[k + j]); }
    }
    for (int width = lanes / 2; width > 0; width /= 2) {
        for (int j = 0; j < width; j++) { sums[j] += sums[j + width]; }
    }
    return sums[0];
}

// out[s] = or += the chunks of sum s, in their order.   partial: (sums, chunks)
inline void add_chunks(double* out, const double* partial, int sums, int chunks, bool add) {
    for (int s = 0; s < sums; s++) {
        double sum = 0;
        for (int c = 0; c < chunks; c++) { sum += partial[s * chunks + c]; }
        out[s] = add ? out[s] + sum : sum;
    }
}

// One thread, because this runs beside the training step, on the outer stream.
template <class F>
inline void row_sums_loop(double* out, double* partial, const uint8_t* payloads, size_t stride, int workers,
                          const PayloadLayout& layout, const float* mean) {
    const int sums = row_sums(workers), chunks = chunks_of(layout.values);
    const long blocks = layout.values / quantization_block;
    std::vector<float> rows(size_t(workers + 1) * quantization_block);
    auto row = [&](int number) { return &rows[size_t(number) * quantization_block]; };
    std::fill_n(partial, sums * chunks, 0.0);
    for (int c = 0; c < chunks; c++) {
        for (long block = blocks * c / chunks; block < blocks * (c + 1) / chunks; block++) {
            for (int w = 0; w < workers; w++) {
                decode_block<F>(row(w), payloads + size_t(w) * stride, layout, block);
            }
            if (has_mean_row(workers)) {
                std::copy_n(mean + block * quantization_block, quantization_block, row(workers));
            }
            for (int s = 0; s < sums; s++) {
                const auto [a, b] = rows_of(s, workers);
                partial[s * chunks + c] += dot_block(row(a), row(b));
            }
        }
    }
    add_chunks(out, partial, sums, chunks, false);
}

// delta . delta and lost . lost of one block. With error feedback `lost` is the residual.
template <class F>
inline void add_encoding(double (&sums)[encoding_sums], const uint8_t* payload, const PayloadLayout& layout,
                         long block, const Source& source, long i) {
    float decoded[quantization_block], delta[quantization_block], lost[quantization_block];
    decode_block<F>(decoded, payload, layout, block);
    if (source.residual != nullptr) {
        memcpy(lost, source.residual + i, sizeof(lost));
        for (int k = 0; k < quantization_block; k++) { delta[k] = add_rn(decoded[k], lost[k]); }
    } else {
        const float *values = source.values + i, *minus = source.minus + i;
        for (int k = 0; k < quantization_block; k++) { delta[k] = subtract_rn(values[k], minus[k]); }
        for (int k = 0; k < quantization_block; k++) { lost[k] = subtract_rn(delta[k], decoded[k]); }
    }
    sums[0] += dot_block(delta, delta);
    sums[1] += dot_block(lost, lost);
}

// first: of the values in the fragment
template <class F>
inline void encoding_sums_loop(double* out, double* partial, const uint8_t* payload,
                               const PayloadLayout& layout, long first, const Source& source, long count) {
    const int chunks = chunks_of(count);
    const long blocks = count / quantization_block, part_blocks = layout.part_values / quantization_block;
    #pragma omp parallel for if (blocks >= parallel_blocks)
    for (int c = 0; c < chunks; c++) {
        double sums[encoding_sums] = {};
        for (long block = blocks * c / chunks; block < blocks * (c + 1) / chunks; block++) {
            const long place = first / quantization_block + block, part = place / part_blocks;
            add_encoding<F>(sums, payload + size_t(part) * layout.bytes, layout, place - part * part_blocks,
                            source, block * quantization_block);
        }
        for (int s = 0; s < encoding_sums; s++) { partial[s * chunks + c] = sums[s]; }
    }
    add_chunks(out, partial, encoding_sums, chunks, true);
}

// The sums of products of `workers` payloads, which lie `stride` bytes apart.
// out: (row_sums(workers))   partial: (partial_sums(workers)), workspace
// layout: of a fragment in one part   mean: (layout.values), for more workers than most_pairwise
inline void sum_rows(double* out, double* partial, const uint8_t* payloads, size_t stride, int workers,
                     const PayloadLayout& layout, const float* mean, Stream& stream) {
    stream.enqueue([=] {
        with_format(layout.format, [=](auto f) {
            row_sums_loop<decltype(f)>(out, partial, payloads, stride, workers, layout, mean);
        });
    });
}

// Adds to `out` the sums of values [first, first + count) of a fragment, which quantize() has just encoded.
// out: (encoding_sums)   partial: (partial_sums(1)), workspace   source: as quantize() has left it
inline void sum_encoding(double* out, double* partial, const uint8_t* payload, const PayloadLayout& layout,
                         long first, const Source& source, long count, Stream& stream) {
    if (count == 0) { return; }
    stream.enqueue([=] {
        with_format(layout.format, [=](auto f) {
            encoding_sums_loop<decltype(f)>(out, partial, payload, layout, first, source, count);
        });
    });
}

}  // namespace cpu

#ifdef USE_CUDA
#include "streaming/statistics.cuh"
#endif
