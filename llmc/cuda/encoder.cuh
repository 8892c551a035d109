// The embedding on a GPU: see llmc/cpu/encoder.h.   out[b,t] = wte[inp[b,t]] + wpe[t]
//
// In the backward, the rows of dout for one token are added without atomics and in a fixed order. The pairs
// (token, position) are sorted stably, and a block adds the rows of a chunk of the sorted pairs, token by
// token. If a token spans several chunks, the first one adds to dwte and the others write partial sums, which
// a last kernel adds chunk by chunk. So a frequent token is as parallel as rare ones. C is a multiple of 8.
#pragma once
#include <algorithm>

#include "llmc/cuda/memory.cuh"
#include "llmc/floatx.h"
#include "llmc/stream.h"

namespace cuda {

// A block computes a row.   Bound by memory: 4 bytes a value with bf16, and wpe, which stays in the cache.
__global__ void encoder_forward_kernel(floatX* out, const int* inp, const floatX* wte, const floatX* wpe,
                                       int T, int C) {
    const int bt = blockIdx.x;
    const floatX *token = wte + size_t(inp[bt]) * C, *position = wpe + size_t(bt % T) * C;
    for (int c = threadIdx.x * Pack<floatX>::size; c < C; c += blockDim.x * Pack<floatX>::size) {
        const Pack<floatX> a = load_pack(token + c), b = load_pack(position + c);
        Pack<floatX> sum;
        for (int i = 0; i < Pack<floatX>::size; i++) { sum[i] = floatX(float(a[i]) + float(b[i])); }
        store_pack(out + size_t(bt) * C + c, sum);
    }
}

// A thread adds four channels of a position over the batch, in order, as the CPU does.
// Bound by memory: 2 bytes a value of dout with bf16.
__global__ void encoder_backward_position_kernel(float* dwpe, const floatX* dout, int B, int T, int C) {
    const int t = blockIdx.x, c = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
    if (c >= C) { return; }
    float sum[4], row[4];
    load_packs(sum, dwpe + size_t(t) * C + c);
    #pragma unroll 8
    for (int b = 0; b < B; b++) {
        load_packs(row, dout + (size_t(b) * T + t) * C + c);
        for (int i = 0; i < 4; i++) { sum[i] += row[i]; }
    }
    store_packs(dwpe + size_t(t) * C + c, sum);
}

constexpr int sort_threads = 1024, sort_warps = sort_threads / 32;
constexpr int sort_digit_bits = 8, sort_digits = 1 << sort_digit_bits;

// The place of a warp's count of pairs with a digit. Rows of 257 avoid bank conflicts between the threads of
// `offsets_of_counts`, which read columns.
__device__ inline int count_at(int digit, int warp) { return warp * (sort_digits + 1) + digit; }
constexpr int sort_counts = sort_warps * (sort_digits + 1);

// Replaces each count by the sum of all counts before it: those of smaller digits, and of this digit in
// earlier warps. A thread handles eight warps' counts of a digit.
__device__ inline void offsets_of_counts(int* counts) {
    SHARED(int[32], warp_sums);
    constexpr int each = sort_digits * sort_warps / sort_threads;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int* own = counts + count_at(threadIdx.x * each / sort_warps, threadIdx.x * each % sort_warps);
    int sum = 0;
    for (int i = 0; i < each; i++) { sum += own[count_at(0, i)]; }
    int up_to_lane = sum;
    for (int delta = 1; delta < 32; delta *= 2) {
        const int before = __shfl_up_sync(full_warp, up_to_lane, delta);
        if (lane >= delta) { up_to_lane += before; }
    }
    if (lane == 31) { warp_sums[warp] = up_to_lane; }
    __syncthreads();
    int offset = up_to_lane - sum;
    for (int w = 0; w < warp; w++) { offset += warp_sums[w]; }
    for (int i = 0; i < each; i++) {
        const int count = own[count_at(0, i)];
        own[count_at(0, i)] = offset;
        offset += count;
    }
}

// A bit mask of the lanes of this warp that are `valid` and have this lane's digit.
__device__ inline unsigned lanes_with_digit(int digit, bool valid) {
    unsigned lanes = __ballot_sync(full_warp, valid);
    for (int bit = 0; bit < sort_digit_bits; bit++) {
        const bool is_set = digit >> bit & 1;
        const unsigned set = __ballot_sync(full_warp, is_set);
        lanes &= is_set ? set : ~set;
    }
    return lanes;
}

// One pass of a radix sort: orders the pairs by the digit at bit `shift` of their tokens, and keeps the order
// of pairs with the same digit. A warp has neighbouring pairs, and moves 32 of them at a time.
__device__ inline void sort_by_digit(int2* to, const int2* from, int N, int shift, int* counts) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int each = (N + sort_threads - 1) / sort_threads * 32;
    const int begin = min(N, warp * each), end = min(N, begin + each);
    auto digit_of = [&](int2 pair) { return pair.x >> shift & (sort_digits - 1); };
    for (int i = threadIdx.x; i < sort_counts; i += sort_threads) { counts[i] = 0; }
    __syncthreads();
    for (int i = begin + lane; i < end; i += 32) { atomicAdd(&counts[count_at(digit_of(from[i]), warp)], 1); }
    __syncthreads();
    offsets_of_counts(counts);
    __syncthreads();
    for (int first = begin; first < end; first += 32) {
        const bool valid = first + lane < end;
        const int2 pair = valid ? from[first + lane] : make_int2(0, 0);
        const unsigned lanes = lanes_with_digit(digit_of(pair), valid);
        int& offset = counts[count_at(digit_of(pair), warp)];
        const int place = offset + __popc(lanes & ((1u << lane) - 1));
        if (valid) { to[place] = pair; }
        __syncwarp();                                    // all lanes have read their offset
        if (lanes >> lane == 1) { offset = place + 1; }  // the last of these lanes advances it
        __syncwarp();
    }
    __syncthreads();  // the next pass reads what other threads wrote
}

// pairs = (inp[i], i), sorted by token and then by i. One block. A pass moves 24 bytes a token; writes are
// scattered, and an SM stores to about one line a clock: 65,536 tokens should take about 50 us a pass. All of
// the encoder's backward takes 0.35 ms of a step of 111 ms on an H200 (d12). Passes come in twos, so that
// the result lies in `pairs`, and end with the highest bit in use.   pairs, spare: (N)   inp: (N)
// dynamic shared memory: int (sort_counts)
__global__ void __launch_bounds__(sort_threads)
    sort_tokens_kernel(int2* pairs, int2* spare, const int* inp, int N) {
    DYNAMIC_SHARED(memory);
    int* counts = reinterpret_cast<int*>(memory);
    int bits = 0;
    for (int i = threadIdx.x; i < N; i += sort_threads) {
        pairs[i] = make_int2(inp[i], i);
        bits |= inp[i];
    }
    for (int shift = 0; shift < 32 && __syncthreads_or(bits >> shift); shift += 2 * sort_digit_bits) {
        sort_by_digit(spare, pairs, N, shift, counts);
        sort_by_digit(pairs, spare, N, shift + sort_digit_bits, counts);
    }
}

constexpr int chunk_pairs = 32;

// Whether chunk `chunk` begins with the token that ends the chunk before it.
__device__ inline bool continues(const int2* pairs, int chunk) {
    return chunk > 0 && pairs[chunk * chunk_pairs].x == pairs[chunk * chunk_pairs - 1].x;
}

__device__ inline void add_four(float* to, const float (&sum)[4]) {
    Pack<float> total = load_pack(to);
    for (int i = 0; i < 4; i++) { total[i] += sum[i]; }
    store_pack(to, total);
}

// dwte[token] += the rows of dout at the token's positions in a chunk of pairs. For a token that began in an
// earlier chunk, partial[chunk] = their sum instead. A block adds a chunk, a thread four channels.
// Bound by memory: 2 bytes a value of dout with bf16, 8 a value of each row of dwte in use.
// pairs: (N)   partial: (chunks, C)
__global__ void encoder_backward_chunk_kernel(float* dwte, float* partial, const floatX* dout,
                                              const int2* pairs, int N, int C) {
    const int chunk = blockIdx.x, c = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
    if (c >= C) { return; }
    const int begin = chunk * chunk_pairs, end = min(N, begin + chunk_pairs);
    bool of_chunk_before = continues(pairs, chunk);
    float sum[4] = {}, row[4];
    for (int i = begin; i < end; i++) {
        const int2 pair = pairs[i];
        load_packs(row, dout + size_t(pair.y) * C + c);
        for (int k = 0; k < 4; k++) { sum[k] += row[k]; }
        if (i + 1 < end && pairs[i + 1].x == pair.x) { continue; }
        if (of_chunk_before) {
            store_packs(partial + size_t(chunk) * C + c, sum);
        } else {
            add_four(dwte + size_t(pair.x) * C + c, sum);
        }
        of_chunk_before = false;
        for (float& value : sum) { value = 0.0f; }
    }
}

// The first chunk from `chunk` on that does not begin with `token`; chunk `chunk` does.
__device__ inline int end_of_token(const int2* pairs, int token, int chunk, int chunks) {
    int last = chunk, end = chunks;
    while (end - last > 1) {
        const int middle = last + (end - last) / 2;
        (pairs[middle * chunk_pairs].x == token ? last : end) = middle;
    }
    return end;
}

// dwte[token] += the partial sums of a token; the block of the token's first partial sum adds them.
// Bound by latency: a token of 3000 positions has 100 chunks.   pairs: (N)   partial: (chunks, C)
__global__ void encoder_backward_partial_kernel(float* dwte, const float* partial, const int2* pairs,
                                                int chunks, int C) {
    const int chunk = blockIdx.x, c = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
    if (c >= C || !continues(pairs, chunk)) { return; }
    const int token = pairs[chunk * chunk_pairs].x;
    const bool first = !continues(pairs, chunk - 1) || pairs[(chunk - 1) * chunk_pairs].x != token;
    if (!first) { return; }
    const int end = end_of_token(pairs, token, chunk, chunks);
    float sum[4] = {}, part[4];
    #pragma unroll 4
    for (int i = chunk; i < end; i++) {
        load_packs(part, partial + size_t(i) * C + c);
        for (int k = 0; k < 4; k++) { sum[k] += part[k]; }
    }
    add_four(dwte + size_t(token) * C + c, sum);
}

// out: (B,T,C)   inp: (B,T) tokens   wte: (V,C)   wpe: (maxT,C)   All but inp are 16-byte aligned.
inline void encoder_forward(floatX* out, const int* inp, const floatX* wte, const floatX* wpe, int B, int T,
                            int C, Stream& stream) {
    require(C > 0 && C % 8 == 0 && are_aligned({out, wte, wpe}));
    launch(encoder_forward_kernel,
           Grid{unsigned(B * T), std::min(256u, blocks_for(C / 8, 32) * 32), 0, stream}, out, inp, wte, wpe,
           T, C);
}

// pairs = (inp[i], i), sorted by token and then by i.   pairs, spare: (N)   inp: (N), not negative
inline void sort_tokens(int2* pairs, int2* spare, const int* inp, int N, Stream& stream) {
    launch(sort_tokens_kernel, Grid{1, sort_threads, sort_counts * sizeof(int), stream}, pairs, spare, inp,
           N);
}

// dwte[inp[b,t]] += dout[b,t], dwpe[t] += dout[b,t].   dwte: (V,C) float   dwpe: (maxT,C) float
// dout: (B,T,C)   inp: (B,T)   All but inp are 16-byte aligned.
inline void encoder_backward(float* dwte, float* dwpe, const floatX* dout, const int* inp, int B, int T,
                             int C, Stream& stream) {
    require(C > 0 && C % 8 == 0 && are_aligned({dwte, dwpe, dout}));
    const int N = B * T, chunks = (N + chunk_pairs - 1) / chunk_pairs;
    const unsigned threads = std::min(256u, blocks_for(C / 4, 32) * 32);
    const unsigned slices = blocks_for(C / 4, threads);
    float* partial = stream.scratch<float>(long(chunks) * C + 4 * long(N));
    int2* pairs = reinterpret_cast<int2*>(partial + long(chunks) * C);
    sort_tokens(pairs, pairs + N, inp, N, stream);
    launch(encoder_backward_chunk_kernel, Grid{dim3(chunks, slices), threads, 0, stream}, dwte, partial, dout,
           pairs, N, C);
    launch(encoder_backward_partial_kernel, Grid{dim3(chunks, slices), threads, 0, stream}, dwte, partial,
           pairs, chunks, C);
    launch(encoder_backward_position_kernel, Grid{dim3(T, slices), threads, 0, stream}, dwpe, dout, B, T, C);
}

}  // namespace cuda
