// Softmax, cross entropy and its gradient, visiting each row of the logits, the largest activation, only
// once:
//
//     loss = log(sum over v of e^(logits[v] - max)) + max - logits[target]
//     dlogits = (softmax - onehot(target)) dloss
//
// Maximum and sum in one pass (Milakov & Gimelshein, "Online normalizer calculation for softmax",
// arXiv 1805.02867): a thread's sum is relative to the largest of the logits it has seen. The pass that
// writes the gradient finds the row in shared memory, or, if it is too long, in the L2 cache.
#pragma once
#include <algorithm>
#include <cfloat>

#include "llmc/cuda/memory.cuh"
#include "llmc/floatx.h"

namespace cuda {

struct SoftmaxSum {
    float max, sum;  // sum of e^(x - max)
};

// e^(x - max), for x <= max. Its relative error is (max - x) 2^-23 + 2^-22: 2e-6 for a result of 1e-6. It
// does not depend on the size of x and max, since their difference is formed before the product.
__device__ inline float exponential_of_difference(float x, float max) {
    return exp2_approximate(1.44269504f * (x - max));
}

// A thread's part of a row. Its maximum begins finite: e^(-inf - max) is 0, but e^(-inf - -inf) would be NaN.
// row: (Vp), of which V count
__device__ inline SoftmaxSum softmax_sum_of_thread(const floatX* row, int V) {
    constexpr int size = Pack<floatX>::size;
    SoftmaxSum part = {-FLT_MAX, 0.0f};
    for (int first = threadIdx.x * size; first < V; first += int(blockDim.x) * size) {
        float x[size], max = part.max;
        load_packs(x, row + first);
        if (first + size > V) {
            for (int j = 0; j < size; j++) { x[j] = first + j < V ? x[j] : -INFINITY; }
        }
        for (int j = 0; j < size; j++) { max = fmaxf(max, x[j]); }
        part.sum *= exponential_of_difference(part.max, max);
        part.max = max;
        for (int j = 0; j < size; j++) { part.sum += exponential_of_difference(x[j], max); }
    }
    return part;
}

// The shared memory that a block can have on every GPU from sm_80 on, minus what it declares. A row of
// GPT-2's 50,304 bf16 logits takes 98.25 KiB.
constexpr size_t largest_row_in_shared_memory = 99 * 1024 - 512;

// Copies the row to shared memory: a thread loads all its packs at once, and no other thread reads them.
__device__ inline void load_row(floatX* to, const floatX* row, int Vp) {
    constexpr int size = Pack<floatX>::size;
    for (int first = threadIdx.x * size; first < Vp; first += int(blockDim.x) * size) {
        copy_async_16(to + first, row + first);
    }
    copy_async_commit();
    copy_async_wait<0>();
}

// One block a row, in shared memory if it fits. On sm_90 and sm_100 two blocks with GPT-2's rows fit an SM if
// a thread has at most 32 registers: one loads while the other computes. On sm_80 one fits.
// Bound by memory: in bf16, 2 bytes a logit are read for the loss, and 2 written for the gradient; about 18
// instructions a logit for both, as target and padding have branches of their own.
// dynamic shared memory: (Vp) if in_shared_memory
template <bool in_shared_memory>
__global__ void __launch_bounds__(1024)
    fused_classifier_kernel(floatX* logits, float* losses, float dloss, const int* targets, int V, int Vp,
                            bool write_dlogits) {
    constexpr int size = Pack<floatX>::size;
    DYNAMIC_SHARED(memory);
    floatX *row = logits + long(blockIdx.x) * Vp, *held = row;
    const int target = targets[blockIdx.x];
    const float target_logit = float(row[target]);  // read before the barriers: after them it is overwritten
    if constexpr (in_shared_memory) {
        held = reinterpret_cast<floatX*>(memory);
        load_row(held, row, Vp);
    }
    const SoftmaxSum part = softmax_sum_of_thread(held, V);
    const float max = block_max(part.max);
    const float sum = block_sum(part.sum * exponential_of_difference(part.max, max));
    if (threadIdx.x == 0) { losses[blockIdx.x] = logf(sum) + max - target_logit; }
    if (!write_dlogits) { return; }

    const float scale = dloss / sum;
    for (int first = threadIdx.x * size; first < Vp; first += int(blockDim.x) * size) {
        float x[size];
        load_packs(x, held + first);
        for (int j = 0; j < size; j++) { x[j] = scale * exponential_of_difference(x[j], max); }
        if (first + size > V || unsigned(target - first) < unsigned(size)) {
            for (int j = 0; j < size; j++) {
                const int v = first + j;
                x[j] = v < V ? x[j] - (v == target ? dloss : 0.0f) : 0.0f;
            }
        }
        store_packs(row + first, x);
    }
}

// logits: (N,Vp), of which columns V..Vp are padding; Vp a multiple of 8, 16-byte aligned. If write_dlogits,
// they are replaced by dlogits, which are 0 in the padding; else they stay.
// losses: (N), the cross entropy   targets: (N) in [0, V)   dloss: the gradient of each row's loss
inline void fused_classifier(floatX* logits, float* losses, float dloss, const int* targets, int N, int V,
                             int Vp, bool write_dlogits, Stream& stream) {
    require(Vp % 8 == 0 && are_aligned({logits}));
    if (N == 0) { return; }
    // As many threads as a row has packs, in whole warps. Blocks are large, so that few rows are in flight.
    const int warps = std::min((Vp / Pack<floatX>::size + 31) / 32, 32);
    const size_t bytes = size_t(Vp) * sizeof(floatX);
    const bool fits = bytes <= largest_row_in_shared_memory;
    launch(fits ? fused_classifier_kernel<true> : fused_classifier_kernel<false>,
           Grid{unsigned(N), unsigned(warps) * 32, fits ? bytes : 0, stream}, logits, losses, dloss, targets,
           V, Vp, write_dlogits);
}

}  // namespace cuda
