// Statistics of the outer gradients on a GPU: sums of products of payloads. The sums and their cost are in
// statistics.h; the CPU's differ from these in nothing but the order of additions, in double.
//
// Each call launches two kernels: one block per chunk, then one block per sum for its chunks. There are no
// atomics, so that any GPU computes the same bits.
#pragma once
#include "llmc/cuda/global_norm.cuh"
#include "streaming/quantize.cuh"
#include "streaming/statistics.h"

namespace cuda {

const int statistics_threads = 256;  // a chunk has at least a pack for each
const int statistics_at_once = 4;    // packs of each row that a thread loads before it uses the first

__device__ inline double dot_four(const Pack<float>& a, const Pack<float>& b, double sum) {
    for (int k = 0; k < 4; k++) { sum = fma(double(a[k]), double(b[k]), sum); }
    return sum;
}

// Block (c, s) computes chunk c of sum s: groups c, c + chunks, ... of packs, with one pack for each thread.
// partial: (sums, chunks)   mean: (layout.values), or null
// Bound by memory or (except fp32) instructions: bits / 8 bytes a value and row (squares: one row), mean 4.
template <class F>
__global__ void __launch_bounds__(statistics_threads)
    row_sums_kernel(double* partial, const uint8_t* payloads, size_t stride, int workers,
                    PayloadLayout layout, const float* mean) {
    const RowPair rows = rows_of(int(blockIdx.y), workers);
    const bool is_square = rows.a == rows.b, with_mean = rows.b == workers;
    const long step = long(gridDim.x) * statistics_threads * 4;
    double sum = 0;
    for (long first = (blockIdx.x * long(statistics_threads) + threadIdx.x) * 4; first < layout.values;
         first += statistics_at_once * step) {
        Encoded<F> a[statistics_at_once] = {}, b[statistics_at_once] = {};  // beyond the last value: zeros
        Pack<float> of_mean[statistics_at_once] = {};
        for (int k = 0; k < statistics_at_once; k++) {
            const long i = first + k * step;
            if (i >= layout.values) { continue; }
            if (rows.a < workers) { a[k].load(payloads + size_t(rows.a) * stride, layout, i); }
            if (!is_square && !with_mean) { b[k].load(payloads + size_t(rows.b) * stride, layout, i); }
            if (with_mean) { of_mean[k] = load_pack(mean + i); }
        }
        for (int k = 0; k < statistics_at_once; k++) {
            const Pack<float> left = rows.a < workers ? a[k].decoded() : of_mean[k];
            sum = dot_four(left, is_square ? left : with_mean ? of_mean[k] : b[k].decoded(), sum);
        }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) { partial[blockIdx.y * gridDim.x + blockIdx.x] = sum; }
}

// Block c computes chunk c of both sums, as above.   partial: (encoding_sums, chunks)
// first: where the range of `count` values begins in the fragment
// Bound by memory: 8 bytes a value, or 4 with error feedback, and bits / 8 (fp4: 0.5).
template <class F>
__global__ void __launch_bounds__(statistics_threads)
    encoding_sums_kernel(double* partial, const uint8_t* payload, PayloadLayout layout, long first,
                         Source source, long count) {
    const long step = long(gridDim.x) * statistics_threads * 4;
    double delta_square = 0, lost_square = 0;
    for (long begin = (blockIdx.x * long(statistics_threads) + threadIdx.x) * 4; begin < count;
         begin += statistics_at_once * step) {
        Encoded<F> encoded[statistics_at_once] = {};  // beyond the last value: zeros
        Pack<float> values[statistics_at_once] = {}, minus[statistics_at_once] = {};
        for (int k = 0; k < statistics_at_once; k++) {
            const long i = begin + k * step;
            if (i >= count) { continue; }
            const unsigned part = part_of(layout, (first + i) / quantization_block);
            encoded[k].load(payload + part * layout.bytes, layout, first + i - part * layout.part_values);
            minus[k] = load_pack((source.residual ? source.residual : source.minus) + i);
            if (!source.residual) { values[k] = load_pack(source.values + i); }
        }
        for (int k = 0; k < statistics_at_once; k++) {
            const Pack<float> decoded = encoded[k].decoded();
            Pack<float> delta, lost = minus[k];
            for (int j = 0; j < 4; j++) {
                delta[j] = source.residual ? add_rn(decoded[j], lost[j])
                                           : subtract_rn(values[k][j], minus[k][j]);
                if (!source.residual) { lost[j] = subtract_rn(delta[j], decoded[j]); }
            }
            delta_square = dot_four(delta, delta, delta_square);
            lost_square = dot_four(lost, lost, lost_square);
        }
    }
    delta_square = block_sum(delta_square);
    lost_square = block_sum(lost_square);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = delta_square;
        partial[gridDim.x + blockIdx.x] = lost_square;
    }
}

// Block s adds up the chunks of sum s, one per thread.   out: (sums)   partial: (sums, chunks)
static_assert(most_chunks <= statistics_threads, "one chunk a thread");
__global__ void __launch_bounds__(statistics_threads)
    add_chunks_kernel(double* out, const double* partial, int chunks, bool add) {
    const int c = int(threadIdx.x);
    const double sum = block_sum(c < chunks ? partial[blockIdx.x * chunks + c] : 0.0);
    if (c == 0) { out[blockIdx.x] = add ? out[blockIdx.x] + sum : sum; }
}

// These work on hosted streams, too, since they go through enqueue().

// The sums of products of `workers` payloads, which lie `stride` bytes apart.
// out: (row_sums(workers))   partial: (partial_sums(workers)), workspace
// layout: of a fragment in one part
// mean: (layout.values), 16-byte aligned; may be null for at most most_pairwise workers
inline void sum_rows(double* out, double* partial, const uint8_t* payloads, size_t stride, int workers,
                     const PayloadLayout& layout, const float* mean, Stream& stream) {
    require(is_whole_blocks(layout.values) && are_aligned({payloads, payloads + stride, mean}));
    require(mean || !has_mean_row(workers));
    stream.enqueue([=](cudaStream_t on) {
        const unsigned chunks = unsigned(chunks_of(layout.values)), sums = unsigned(row_sums(workers));
        with_format(layout.format, [&](auto f) {
            launch(row_sums_kernel<decltype(f)>, Grid{dim3(chunks, sums), statistics_threads, 0, on}, partial,
                   payloads, stride, workers, layout, mean);
        });
        launch(add_chunks_kernel, Grid{sums, statistics_threads, 0, on}, out, partial, int(chunks), false);
    });
}

// Adds to `out` the sums of values [first, first + count) of a fragment, which quantize() has just encoded.
// out: (encoding_sums)   partial: (partial_sums(1)), workspace   source: as quantize() has left it
inline void sum_encoding(double* out, double* partial, const uint8_t* payload, const PayloadLayout& layout,
                         long first, const Source& source, long count, Stream& stream) {
    require(is_whole_blocks(first) && is_whole_blocks(count));
    require(are_aligned({payload, source.values, source.minus, source.residual}));
    if (count == 0) { return; }
    stream.enqueue([=](cudaStream_t on) {
        const unsigned chunks = unsigned(chunks_of(count));
        with_format(layout.format, [&](auto f) {
            launch(encoding_sums_kernel<decltype(f)>, Grid{chunks, statistics_threads, 0, on}, partial,
                   payload, layout, first, source, count);
        });
        launch(add_chunks_kernel, Grid{encoding_sums, statistics_threads, 0, on}, out, partial, int(chunks),
               true);
    });
}

}  // namespace cuda
