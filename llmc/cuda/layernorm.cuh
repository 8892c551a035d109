// LayerNorm on a GPU: see llmc/cpu/layernorm.h.
//
//     out = (inp - mean) rstd weight + bias,   mean and rstd = 1 / sqrt(variance + 1e-5) of a row of C values
//
// In the forward, a warp computes a row: this needs no barrier, and with GPT's sizes each lane has a few
// packs. In the backward, a block computes one row after another, and a thread the same eight channels of all
// of them, so that the sums over rows stay in registers. Both read a row from memory once. C is a multiple of
// 8 and at most 8192.
#pragma once
#include <algorithm>

#include "llmc/cuda/gradient_sums.cuh"
#include "llmc/cuda/memory.cuh"
#include "llmc/floatx.h"
#include "llmc/stream.h"

namespace cuda {

// Channels that a lane (16 bytes) and a warp (512 bytes) read at a time.
constexpr int channels_of_lane = Pack<floatX>::size, channels_of_warp = 32 * channels_of_lane;

// A warp computes one row, as cpu::layernorm_row does. The variance is computed from centred values.
// row: (C) in shared memory, of which a lane reads only its own packs
__device__ inline void layernorm_row(floatX* out, float* mean, float* rstd, const floatX* row,
                                     const floatX* weight, const floatX* bias, int C) {
    const int lane = threadIdx.x % 32;
    float sum = 0.0f, squares = 0.0f;
    for (int c = lane * channels_of_lane; c < C; c += channels_of_warp) {
        const Pack<floatX> x = load_pack(row + c);
        for (int i = 0; i < channels_of_lane; i++) { sum += float(x[i]); }
    }
    const float m = warp_sum(sum) / float(C);
    for (int c = lane * channels_of_lane; c < C; c += channels_of_warp) {
        const Pack<floatX> x = load_pack(row + c);
        for (int i = 0; i < channels_of_lane; i++) { squares += (float(x[i]) - m) * (float(x[i]) - m); }
    }
    const float r = 1.0f / sqrtf(warp_sum(squares) / float(C) + 1e-5f);
    for (int c = lane * channels_of_lane; c < C; c += channels_of_warp) {
        const Pack<floatX> x = load_pack(row + c), w = load_pack(weight + c), b = load_pack(bias + c);
        Pack<floatX> normed;
        for (int i = 0; i < channels_of_lane; i++) {
            normed[i] = floatX((float(x[i]) - m) * r * float(w[i]) + float(b[i]));
        }
        store_pack(out + c, normed);
    }
    if (lane == 0) {
        *mean = m;
        *rstd = r;
    }
}

// A warp computes a row in shared memory: it loads the whole row at once, for any C. If `adds`, the row is
// inp1 + inp2, rounded first, since the backward reads it rounded, and stored to residual.
// Bound by memory, with bf16: 4 bytes a value, or 8.   dynamic shared memory: (warps, C), or (warps, 2, C)
template <bool adds>
__global__ void layernorm_forward_kernel(floatX* residual, floatX* out, float* mean, float* rstd,
                                         const floatX* inp1, const floatX* inp2, const floatX* weight,
                                         const floatX* bias, int N, int C) {
    DYNAMIC_SHARED(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int n = blockIdx.x * (blockDim.x / 32) + warp;
    if (n >= N) { return; }
    floatX *row = reinterpret_cast<floatX*>(memory) + warp * (adds ? 2 : 1) * C, *row2 = row + C;
    const size_t first = size_t(n) * C;
    for (int c = lane * channels_of_lane; c < C; c += channels_of_warp) {
        copy_async_16(row + c, inp1 + first + c);
        if (adds) { copy_async_16(row2 + c, inp2 + first + c); }
    }
    copy_async_commit();
    copy_async_wait<0>();
    for (int c = lane * channels_of_lane; adds && c < C; c += channels_of_warp) {
        const Pack<floatX> a = load_pack(row + c), b = load_pack(row2 + c);
        Pack<floatX> sum;
        for (int i = 0; i < channels_of_lane; i++) { sum[i] = floatX(float(a[i]) + float(b[i])); }
        store_pack(row + c, sum);
        store_pack(residual + first + c, sum);
    }
    layernorm_row(out + first, mean + n, rstd + n, row, weight, bias, C);
}

// The sums of two values over a block, with one barrier: calls alternate between two `warp_sums`, so that a
// warp can write the next row's sums while another one still reads this row's.
__device__ inline float2 sum_pair(float2 (&warp_sums)[32], float a, float b) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    a = warp_sum(a);
    b = warp_sum(b);
    if (lane == 0) { warp_sums[warp] = make_float2(a, b); }
    __syncthreads();
    float2 sum = make_float2(0.0f, 0.0f);
    #pragma unroll 1  // the caller has no registers to spare
    for (int w = 0; w < warps; w++) {
        sum.x += warp_sums[w].x;
        sum.y += warp_sums[w].y;
    }
    return sum;
}

// A block computes rows blockIdx.x, blockIdx.x + gridDim.x, ..., a thread eight channels of each. With
// x = (inp - mean) rstd and d = weight dout,
//     dinp += rstd (d - mean over C of d - x * mean over C of d x)
// and, for the block's rows, partial[0] = sum of dout x, partial[1] = sum of dout, partial[2] = sum of dinp.
// Bound by memory: 8 bytes a value with bf16 (dout, inp, dinp, and dinp back).   partial: (gridDim.x, 3, C)
template <int threads>
__global__ void __launch_bounds__(threads)
    layernorm_backward_kernel(floatX* dinp, float* partial, const floatX* dout, const floatX* inp,
                              const floatX* weight, const float* mean, const float* rstd, int N, int C) {
    SHARED(float2[2][32], warp_sums);
    const int c = threadIdx.x * 8;
    const bool valid = c < C;
    const float per_channel = 1.0f / float(C);  // no division in the loop: registers are scarce
    float w[8] = {}, dy[8] = {}, y[8] = {}, dx[8] = {};  // invalid channels add nothing to the sums of a row
    float dweight[8] = {}, dbias[8] = {}, dinp_sum[8] = {};
    for (int n = blockIdx.x, turn = 0; n < N; n += gridDim.x, turn ^= 1) {
        const size_t at = size_t(n) * C + c;
        // Invalid channels do not load y anew: r = 0 keeps it from growing from row to row.
        const float m = mean[n], r = valid ? rstd[n] : 0.0f;
        if (valid) {
            load_packs(dy, dout + at);
            load_packs(y, inp + at);
            load_packs(dx, dinp + at);
            load_packs(w, weight + c);
        }
        float sum = 0.0f, sum_x = 0.0f;
        for (int i = 0; i < 8; i++) {
            const float d = w[i] * dy[i], x = (y[i] - m) * r;
            sum += d;
            sum_x += d * x;
            dweight[i] += dy[i] * x;
            dbias[i] += dy[i];
            w[i] = d;
            y[i] = x;
        }
        const float2 total = sum_pair(warp_sums[turn], sum, sum_x);
        const float mean_d = total.x * per_channel, mean_dx = total.y * per_channel;
        for (int i = 0; i < 8; i++) {
            dx[i] += r * (w[i] - mean_d - y[i] * mean_dx);
            if (threads <= 768) { dinp_sum[i] += dx[i]; }  // else there are no registers for it
        }
        if (valid) { store_packs(dinp + at, dx); }
    }
    if (valid) {
        partial += size_t(blockIdx.x) * 3 * C + c;
        store_packs(partial, dweight);
        store_packs(partial + C, dbias);
        store_packs(partial + 2 * C, dinp_sum);
    }
}

// Warps in a forward block: four, or fewer if 48 KiB of shared memory do not hold four rows.
inline unsigned layernorm_warps(size_t bytes_of_warp) {
    return unsigned(std::clamp<size_t>(48 * 1024 / bytes_of_warp, 1, 4));
}

template <bool adds>
void launch_layernorm(floatX* residual, floatX* out, float* mean, float* rstd, const floatX* inp1,
                      const floatX* inp2, const floatX* weight, const floatX* bias, int N, int C,
                      Stream& stream) {
    require(C > 0 && C <= 8192 && C % 8 == 0 && are_aligned({residual, out, inp1, inp2, weight, bias}));
    const size_t bytes = (adds ? 2 : 1) * size_t(C) * sizeof(floatX);
    const unsigned warps = layernorm_warps(bytes);
    launch(layernorm_forward_kernel<adds>, Grid{blocks_for(N, warps), warps * 32, warps * bytes, stream},
           residual, out, mean, rstd, inp1, inp2, weight, bias, N, C);
}

// out: (N,C)   mean, rstd: (N)   inp: (N,C)   weight, bias: (C)   All but mean and rstd are 16-byte aligned.
inline void layernorm_forward(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                              const floatX* bias, int N, int C, Stream& stream) {
    launch_layernorm<false>(nullptr, out, mean, rstd, inp, nullptr, weight, bias, N, C, stream);
}

// residual = inp1 + inp2, rounded; normed = layernorm(residual).   all (N,C), except mean, rstd: (N)
// and weight, bias: (C)   All but mean and rstd are 16-byte aligned.
inline void fused_residual_forward(floatX* residual, floatX* normed, float* mean, float* rstd,
                                   const floatX* inp1, const floatX* inp2, const floatX* weight,
                                   const floatX* bias, int N, int C, Stream& stream) {
    launch_layernorm<true>(residual, normed, mean, rstd, inp1, inp2, weight, bias, N, C, stream);
}

// The number depends on N and C alone, so the order of sums is the same on every GPU. 100,000 threads fill
// today's largest GPU. For rows with many channels, 256 blocks keep the partial sums smaller than the rows.
inline int layernorm_backward_blocks(int N, int C) {
    return std::min(N, std::clamp(1024 * 768 / C, 256, 1024));
}

// Adds to dinp, and with the next sums.add_pending() to dweight, dbias and, if not null, dprojb: the
// sum over rows of dinp, which is the bias gradient of the projection that was added to form inp.
// dinp, dout, inp: (N,C)   dweight, dbias, dprojb: (C) float   weight: (C)   mean, rstd: (N)
// dinp, dout, inp and weight are 16-byte aligned.
inline void layernorm_backward(floatX* dinp, float* dweight, float* dbias, float* dprojb, const floatX* dout,
                               const floatX* inp, const floatX* weight, const float* mean, const float* rstd,
                               int N, int C, GradientSums& sums, Stream& stream) {
    require(C > 0 && C <= 8192 && C % 8 == 0 && are_aligned({dinp, dout, inp, weight}));
    const int blocks = layernorm_backward_blocks(N, C);
    float* partial = sums.partial(blocks, 3 * C);
    const bool wide = C > 8 * 768;
    launch(wide ? layernorm_backward_kernel<1024> : layernorm_backward_kernel<768>,
           Grid{unsigned(blocks), blocks_for(C / 8, 32) * 32, 0, stream}, dinp, partial, dout, inp, weight,
           mean, rstd, N, C);
    for (float* to : {dweight, dbias, wide ? nullptr : dprojb}) {
        sums.add_later(to, partial, blocks, C, 3 * C);
        partial += C;
    }
    if (wide) {
        sums.add_later(dprojb, dinp, N, C, C);
        sums.add_pending(stream);  // before dinp changes
    }
}

}  // namespace cuda
