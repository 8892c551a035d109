// The squared L2 norm of a buffer of gradients, or of a matrix, in double as on the CPU: squares exceed a
// float's range, and a sum of so many values its precision. One kernel sums chunks of a fixed size, and one
// the chunks: the same bits on any GPU.
#pragma once
#include <algorithm>

#include "llmc/cuda/memory.cuh"

namespace cuda {

constexpr int norm_threads = 512;
constexpr long norm_chunk = 32 * norm_threads;

// partial[b] = sum of values[i]^2 over chunk b, one block each.   partial: (chunks)   values: (count)
// Bound by memory: 4 bytes a value, 2 in bf16.
template <class T>
__global__ void __launch_bounds__(norm_threads)
    global_norm_partial_kernel(double* partial, const T* values, long count) {
    const long begin = blockIdx.x * norm_chunk, end = min(count, begin + norm_chunk);
    values += blockIdx.y * count, partial += blockIdx.y * gridDim.x;
    double sum = 0;
    for (long i = begin + threadIdx.x * 4; i < end; i += norm_threads * 4) {
        float some[4];
        load_packs(some, values + i);
        for (float value : some) { sum = fma(double(value), double(value), sum); }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) { partial[blockIdx.x] = sum; }
}

// *out = sum of partial.   partial: (chunks), one block. Bound by latency: 8 bytes for norm_chunk values.
__global__ void __launch_bounds__(norm_threads)
    global_norm_total_kernel(float* out, const double* partial, int chunks) {
    double sum = 0;
    for (int i = threadIdx.x; i < chunks; i += blockDim.x) { sum += partial[blockIdx.x * chunks + i]; }
    sum = block_sum(sum);
    if (threadIdx.x == 0) { out[blockIdx.x] = float(sum); }
}

// out[b] = sum of values[b][i]^2.   out: (batch)   values: (batch,count), float or bf16, 16-byte aligned,
// count a multiple of 4
template <class T>
void global_norm_squared(float* out, const T* values, long count, Stream& stream, int batch = 1) {
    require(count % 4 == 0 && are_aligned({values}));
    const unsigned chunks = blocks_for(std::max(count, 1L), int(norm_chunk));
    double* partial = stream.scratch<double>(long(chunks) * batch);
    launch(global_norm_partial_kernel<T>, Grid{dim3(chunks, batch), norm_threads, 0, stream}, partial, values,
           count);
    launch(global_norm_total_kernel, Grid{unsigned(batch), norm_threads, 0, stream}, out, partial,
           int(chunks));
}

}  // namespace cuda
