// Causal self-attention on tensor cores, a tile at a time as in FlashAttention-2 (Dao, arXiv 2307.08691):
// the T x T scores are never in memory. For one head, with q, k, v: (T,hs) and scale = 1 / sqrt(hs):
//
//     s = scale q k^T (s <= t only),   lse = log(sum over s of e^s),   p = e^(s - lse),   out = p v
//     dv = p^T dout,   dp = dout v^T,   ds = p (dp - sum over hs of dout out)
//     dq = scale ds k,   dk = scale ds^T q
//
// A warp owns 16 or 32 rows of a tile (queries, or keys for dk and dv), and its scores go from one product
// into the next in its registers. Exponentials are to base 2, scale log2(e) folded in. The backward
// recomputes s and dp in each of two kernels, one that sums over queries and one that sums over keys: 7
// products instead of 5, but no atomics, and the same bits in every run. Flops: 2 T^2 C forward, 7 T^2 C
// backward a sequence. Overloads for float are in attention_fp32.cuh.
#pragma once
#include <cuda_bf16.h>

#include "llmc/cuda/attention_fp32.cuh"
#include "llmc/cuda/device.cuh"
#include "llmc/stream.h"

namespace cuda {
namespace attention {

using bf16 = __nv_bfloat16;

constexpr int warps = 4,  // of a block
    largest_tile = 128;   // rows; the sizes of the backward's tiles divide it
constexpr float log2_e = 1.44269504f, ln_2 = 0.693147181f;

// The rows that a block of each kernel owns, and those that it loops over in a step. They are as large as 255
// registers a thread and 99 KiB of shared memory allow. Two blocks fit an SM with 228 KiB (sm_90, sm_100).
// With 164 KiB (sm_80) all but dq of heads of 128 do so; with 100 KiB (sm_86, sm_89), only the forward and
// dkv of heads of 64. Latency limits all of them, with two warps on a scheduler. Eight warps of 16 rows hide
// more of it, but read shared memory twice as often: on an H200 the forward of heads of 64 takes 3% longer,
// dq 5%, dk and dv 20%. The queries that a warp multiplies in every step stay in registers if they fit.
template <int hs>
struct Tiles {
    static constexpr float scale = hs == 64 ? 0.125f : 0.0883883476f;  // 1 / sqrt(hs)
    static constexpr bool forward_q_in_registers = hs == 64;
    static constexpr int forward_queries = 128, forward_keys = hs == 64 ? 64 : 32;
    static constexpr int dkv_keys = hs == 64 ? 128 : 64, dkv_queries = 32;
    static constexpr int dq_queries = 128, dq_keys = hs == 64 ? 64 : 32;

    static constexpr size_t forward_bytes = (forward_queries + 4 * forward_keys) * hs * sizeof(bf16);
    static constexpr size_t dkv_bytes =
        (2 * dkv_keys + 4 * dkv_queries) * hs * sizeof(bf16) + 4 * dkv_queries * sizeof(float);
    static constexpr size_t dq_bytes = (2 * dq_queries + 4 * dq_keys) * hs * sizeof(bf16);
};

// ---- tiles in shared memory: (rows, hs)
//
// The 16-byte packs of a row are permuted: pack c of row r lies at c ^ (r % 8). So the same pack of 8
// successive rows, which is what ldmatrix reads, lies in 8 different groups of banks.

// The place in a tile of `column`, a multiple of 8, of `row`.
template <int hs>
__device__ inline int tile_index(int row, int column) {
    return row * hs + column / 64 * 64 + (column % 64 ^ row % 8 * 8);
}

// The address that this lane gives to load_matrix_x4 for the 16 x 16 values at (row, column), multiples of
// 16. Matrices 0 and 1 are the left columns, 0 and 2 the upper rows: operand A of mma or, transposed, two
// operands B.
template <int hs>
__device__ inline const bf16* lane_address(const bf16* tile, int row, int column) {
    const int lane = threadIdx.x % 32;
    return tile + row * hs + tile_index<hs>(lane % 16, column + lane / 16 * 8);
}

// The same, but matrices 0 and 1 are the upper rows, 0 and 2 the left columns: two operands B, untransposed.
// Either way an operand B is two successive registers, as mma takes it, and none has to be moved.
template <int hs>
__device__ inline const bf16* lane_address_of_b(const bf16* tile, int row, int column) {
    const int lane = threadIdx.x % 32;
    return tile + row * hs + tile_index<hs>(lane / 16 * 8 + lane % 8, column + lane / 8 % 2 * 8);
}

// Copies rows `first`.. of a head to shared memory; zeros from row T on.   head: (T,hs), leading dimension ld
template <int rows, int hs>
__device__ inline void load_tile_async(bf16* tile, const bf16* head, int ld, int first, int T) {
    constexpr int step = 32 * warps * 8 / hs;  // rows that all threads together copy; a multiple of 8
    const int row = threadIdx.x / (hs / 8), column = threadIdx.x % (hs / 8) * 8;
    bf16* to = tile + tile_index<hs>(row, column);
    // Two forms of one address: each makes nvcc spill fewer of dq's registers at its head size.
    const bf16* from = hs == 128 ? head + size_t(first) * ld + (row * ld + column)
                                 : head + size_t(first + row) * ld + column;
    #pragma unroll
    for (int i = 0; i < rows; i += step, from += step * ld) {
        copy_async_16(to + i * hs, from, first + row + i < T);
    }
}

// ---- matrices in registers: float[M][N][4], (16 M, 8 N), [i][j] being one tile's sum of mma_m16n8k16_bf16

// Row and column of element [i][j][r] of this lane.
__device__ inline int row_of(int i, int r) { return 16 * i + threadIdx.x % 32 / 4 + r / 2 * 8; }
__device__ inline int column_of(int j, int r) { return 8 * j + threadIdx.x % 4 * 2 + r % 2; }

__device__ inline uint32_t bf16_pair(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}

// 16 columns, from k on, of 16 M rows of a tile, from `row` on: operand A of mma.
template <int hs, int M>
__device__ inline void load_a(uint32_t (&a)[M][4], const bf16* tile, int row, int k) {
    #pragma unroll
    for (int i = 0; i < M; i++) { load_matrix_x4(a[i], lane_address<hs>(tile, row + 16 * i, k)); }
}

// sum += A B^T, over columns k.. k + 15.   B: the 8 N rows of b_tile
template <int hs, int M, int N>
__device__ inline void add_product_of_columns(float (&sum)[M][N][4], const uint32_t (&a)[M][4],
                                              const bf16* b_tile, int k) {
    #pragma unroll
    for (int j = 0; j < N; j += 2) {
        uint32_t b[4];
        load_matrix_x4(b, lane_address_of_b<hs>(b_tile, 8 * j, k));
        #pragma unroll
        for (int i = 0; i < M; i++) {
            mma_m16n8k16_bf16(sum[i][j], a[i], b[0], b[1]);
            mma_m16n8k16_bf16(sum[i][j + 1], a[i], b[2], b[3]);
        }
    }
}

// sum += A B^T, a product over hs.   A: 16 M rows of a_tile from a_row on   B: the 8 N rows of b_tile
template <int hs, int M, int N>
__device__ inline void add_product_of_tiles(float (&sum)[M][N][4], const bf16* a_tile, int a_row,
                                            const bf16* b_tile) {
    #pragma unroll
    for (int k = 0; k < hs; k += 16) {
        uint32_t a[M][4];
        load_a<hs>(a, a_tile, a_row, k);
        add_product_of_columns<hs>(sum, a, b_tile, k);
    }
}

// sum += A B, with A rounded to bf16.   A: (16 M, 8 N)   B: the 8 N rows of b_tile, (8 N, hs)
// A lane holds the sums of one mma just where the next one expects A: nothing has to move.
template <int hs, int M, int N>
__device__ inline void add_product(float (&sum)[M][hs / 8][4], const float (&a)[M][N][4],
                                   const bf16* b_tile) {
    #pragma unroll
    for (int k = 0; k < N; k += 2) {
        uint32_t pairs[M][4];
        #pragma unroll
        for (int i = 0; i < M; i++) {
            pairs[i][0] = bf16_pair(a[i][k][0], a[i][k][1]);
            pairs[i][1] = bf16_pair(a[i][k][2], a[i][k][3]);
            pairs[i][2] = bf16_pair(a[i][k + 1][0], a[i][k + 1][1]);
            pairs[i][3] = bf16_pair(a[i][k + 1][2], a[i][k + 1][3]);
        }
        #pragma unroll
        for (int j = 0; j < hs / 8; j += 2) {
            uint32_t b[4];
            load_matrix_x4<true>(b, lane_address<hs>(b_tile, 8 * k, 8 * j));
            #pragma unroll
            for (int i = 0; i < M; i++) {
                mma_m16n8k16_bf16(sum[i][j], pairs[i], b[0], b[1]);
                mma_m16n8k16_bf16(sum[i][j + 1], pairs[i], b[2], b[3]);
            }
        }
    }
}

// Writes factor x to rows `first`.. of a head, up to T. The values pass through the warp's own rows of a
// shared tile (from tile_row on), which no other warp reads, so that 16 bytes are written at a time.
// head: (T,hs) with leading dimension ld
template <int hs, int M>
__device__ inline void store_rows(bf16* head, int ld, int first, int T, const float (&x)[M][hs / 8][4],
                                  float factor, bf16* tile, int tile_row) {
    const int lane = threadIdx.x % 32;
    __syncwarp();  // all lanes have read what these rows held
    #pragma unroll
    for (int i = 0; i < M; i++) {
        #pragma unroll
        for (int j = 0; j < hs / 8; j++) {
            #pragma unroll
            for (int r = 0; r < 4; r += 2) {
                bf16* at = tile + tile_index<hs>(tile_row + row_of(i, r), 8 * j) + column_of(0, 0);
                *reinterpret_cast<uint32_t*>(at) = bf16_pair(factor * x[i][j][r], factor * x[i][j][r + 1]);
            }
        }
    }
    __syncwarp();
    #pragma unroll
    for (int pack = lane; pack < 16 * M * hs / 8; pack += 32) {
        const int row = pack / (hs / 8), column = pack % (hs / 8) * 8;
        if (first + row < T) {  // as one int4: nvcc would split a pack of bf16 into words
            const auto* from = reinterpret_cast<int4*>(tile + tile_index<hs>(tile_row + row, column));
            __stcg(reinterpret_cast<int4*>(head + size_t(first + row) * ld + column), *from);
        }
    }
}

// sums[c] = the sum of column c of a tile, whose rows the block's warps have stored, 16 M each: a product
// with ones. Then overwrites the first of each warp's rows.   sums: (hs)
template <int hs, int M>
__device__ inline void sum_columns(float* sums, bf16* tile) {
    constexpr int rows = 16 * M * hs;  // of a warp, in values
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float ones[1][2 * M][4], sum[1][hs / 8][4] = {};
    #pragma unroll
    for (int k = 0; k < 8 * M; k++) { ones[0][k / 4][k % 4] = 1.0f; }
    add_product<hs>(sum, ones, tile + warp * rows);
    __syncwarp();  // all lanes have read these rows
    float* warp_sums = reinterpret_cast<float*>(tile);
    #pragma unroll
    for (int j = 0; j < hs / 8; j++) {
        for (int r = 0; r < 2; r++) {
            if (lane < 4) { warp_sums[warp * rows / 2 + column_of(j, r)] = sum[0][j][r]; }
        }
    }
    __syncthreads();
    if (threadIdx.x < hs) {
        float total = 0.0f;
        for (int w = 0; w < warps; w++) { total += warp_sums[w * rows / 2 + threadIdx.x]; }
        sums[threadIdx.x] = total;
    }
}

// ---- softmax

// Sets the scores of keys that come after their query to -infinity.   s: (queries, keys), or transposed
template <bool transposed, int M, int N>
__device__ inline void mask(float (&s)[M][N][4], int first_query, int first_key) {
    #pragma unroll
    for (int i = 0; i < M; i++) {
        #pragma unroll
        for (int j = 0; j < N; j++) {
            #pragma unroll
            for (int r = 0; r < 4; r++) {
                const int key = transposed ? row_of(i, r) : column_of(j, r);
                const int query = transposed ? column_of(j, r) : row_of(i, r);
                if (first_key + key > first_query + query) { s[i][j][r] = -INFINITY; }
            }
        }
    }
}

// The four lanes of a quad hold a row of a matrix in registers.
__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(full_warp, x, 1));
    return fmaxf(x, __shfl_xor_sync(full_warp, x, 2));
}
__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(full_warp, x, 1);
    return x + __shfl_xor_sync(full_warp, x, 2);
}

// The dot product over this lane's packs of a row: each lane of a quad has every fourth pack.   x, y: (hs)
template <int hs>
__device__ inline float dot_of_quarter(const bf16* x, const bf16* y) {
    Pack<bf16> a[hs / 32], b[hs / 32];
    for (int p = 0; p < hs / 32; p++) {
        a[p] = load_pack(x + (4 * p + threadIdx.x % 4) * 8);
        b[p] = load_pack(y + (4 * p + threadIdx.x % 4) * 8);
    }
    float sum = 0.0f;
    for (int i = 0; i < hs / 4; i++) {
        sum = fmaf(__bfloat162float(a[i / 8][i % 8]), __bfloat162float(b[i / 8][i % 8]), sum);
    }
    return sum;
}

// Row i's running softmax; [0] is row_of(i, 0), [1] is row_of(i, 2).
template <int M>
struct Softmax {
    float max[M][2], sum[M][2];  // max: times scale, rounded   sum: of this lane's columns only

    __device__ Softmax() {
        #pragma unroll
        for (int i = 0; i < M; i++) {
            max[i][0] = max[i][1] = -INFINITY;
            sum[i][0] = sum[i][1] = 0.0f;
        }
    }

    // Scores become 2^(scale s - max). Earlier sums, and `out`, are rescaled to the new maximum. Each row
    // has, or has had, a score that is not masked.
    template <int N, int K>
    __device__ void update(float (&s)[M][N][4], float (&out)[M][K][4], float scale) {
        #pragma unroll
        for (int i = 0; i < M; i++) {
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                float largest = -INFINITY;
                #pragma unroll
                for (int j = 0; j < N; j++) {
                    largest = fmaxf(largest, fmaxf(s[i][j][2 * half], s[i][j][2 * half + 1]));
                }
                const float new_max = fmaxf(max[i][half], scale * quad_max(largest));
                const float correction = exp2_approximate(max[i][half] - new_max);
                max[i][half] = new_max;
                sum[i][half] *= correction;
                #pragma unroll
                for (int j = 0; j < N; j++) {
                    #pragma unroll
                    for (int r = 2 * half; r < 2 * half + 2; r++) {
                        s[i][j][r] = exp2_approximate(fmaf(scale, s[i][j][r], -new_max));
                        sum[i][half] += s[i][j][r];
                    }
                }
                #pragma unroll
                for (int j = 0; j < K; j++) {
                    out[i][j][2 * half] *= correction;
                    out[i][j][2 * half + 1] *= correction;
                }
            }
        }
    }

    // `out` becomes the weighted mean of v. Writes the lse of rows before T.   lse: (T)
    template <int K>
    __device__ void finish(float (&out)[M][K][4], float* lse, int first, int T) {
        #pragma unroll
        for (int i = 0; i < M; i++) {
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                const float total = quad_sum(sum[i][half]), inverse = 1.0f / total;
                #pragma unroll
                for (int j = 0; j < K; j++) {
                    out[i][j][2 * half] *= inverse;
                    out[i][j][2 * half + 1] *= inverse;
                }
                const int row = first + row_of(i, 2 * half);
                if (threadIdx.x % 4 == 0 && row < T) { lse[row] = (max[i][half] + log2f(total)) * ln_2; }
            }
        }
    }
};

// ---- kernels. A block is one tile of one head: blocks (tiles, NH, B). Successive blocks are of one head, so
// that what they all read stays in the L2 cache, and go from the one with most work to the one with least.

// out: (B,T,C)   lse: (B,NH,T)   qkv: (B,T,3C)
// A block owns queries and loops over keys, from 0 to its last query; it loads the next tile of k and v while
// it uses one. Flops: 2 T C a query, on average over positions. Bound by latency.
template <int hs>
__global__ void __launch_bounds__(32 * warps, 2)
    forward_kernel(bf16* out, float* lse, const bf16* qkv, int T, int C) {
    constexpr int queries = Tiles<hs>::forward_queries, keys = Tiles<hs>::forward_keys;
    constexpr int M = queries / warps / 16, N = keys / 8;
    DYNAMIC_SHARED(memory);
    bf16* q_tile = reinterpret_cast<bf16*>(memory);
    bf16* k_tiles = q_tile + queries * hs;
    bf16* v_tiles = k_tiles + 2 * keys * hs;

    const int h = blockIdx.y, b = blockIdx.z;
    const bf16* q = qkv + size_t(b) * T * 3 * C + h * hs;
    const int first_query = int(gridDim.x - 1 - blockIdx.x) * queries;
    const int row = threadIdx.x / 32 * 16 * M, query = first_query + row;  // the warp's first
    auto load_stage = [&](int first_key) {
        const int stage = first_key / keys % 2 * keys * hs;
        load_tile_async<keys, hs>(k_tiles + stage, q + C, 3 * C, first_key, T);
        load_tile_async<keys, hs>(v_tiles + stage, q + 2 * C, 3 * C, first_key, T);
    };

    float sum[M][hs / 8][4] = {};
    Softmax<M> softmax;
    const int end = min(first_query + queries, T);
    load_tile_async<queries, hs>(q_tile, q, 3 * C, first_query, T);
    copy_async_commit();
    load_stage(0);
    copy_async_commit();
    uint32_t q_rows[hs / 16][M][4];
    if constexpr (Tiles<hs>::forward_q_in_registers) {
        copy_async_wait<1>();
        __syncthreads();  // q is there
        #pragma unroll
        for (int k = 0; k < hs; k += 16) { load_a<hs>(q_rows[k / 16], q_tile, row, k); }
    }
    for (int key = 0; key < end; key += keys) {
        copy_async_wait<0>();
        __syncthreads();  // this tile is there, and the one before it no longer in use
        if (key + keys < end) { load_stage(key + keys); }
        copy_async_commit();
        if (key < query + 16 * M) {  // else all keys come after the warp's queries
            const int stage = key / keys % 2 * keys * hs;
            float s[M][N][4] = {};
            if constexpr (Tiles<hs>::forward_q_in_registers) {
                #pragma unroll
                for (int k = 0; k < hs; k += 16) {
                    add_product_of_columns<hs>(s, q_rows[k / 16], k_tiles + stage, k);
                }
            } else {
                add_product_of_tiles<hs>(s, q_tile, row, k_tiles + stage);
            }
            if (key + keys > query + 1) { mask<false>(s, query, key); }
            softmax.update(s, sum, Tiles<hs>::scale * log2_e);
            add_product<hs>(sum, s, v_tiles + stage);
        }
    }
    softmax.finish(sum, lse + (size_t(b) * gridDim.y + h) * T, query, T);
    store_rows<hs>(out + size_t(b * T) * C + h * hs, C, query, T, sum, 1.0f, q_tile, row);
}

// The q part of dqkv: (B,T,3C), and the sum of each tile's rows.   partial: (B,tiles,C)
// dout, out: (B,T,C)   qkv: (B,T,3C)   lse: (B,NH,T)
// Also, for dk and dv, in rows padded to whole tiles: each query's lse to base 2, and its sum over hs of
// dout out. In the padding lse is infinite, which makes probabilities 0, and the sum is 0.
// lse2, dot: (B,NH,padded_T)
// A block owns queries and goes through keys, from 0 to its last query. Flops: 3 T C a query, on average.
// Bound by latency and reads of shared memory.
template <int hs>
__global__ void __launch_bounds__(32 * warps, 2)
    backward_dq_kernel(bf16* dqkv, float* partial, float* lse2, float* dot, const bf16* dout, const bf16* out,
                       const bf16* qkv, const float* lse, int T, int padded_T, int C) {
    constexpr int queries = Tiles<hs>::dq_queries, keys = Tiles<hs>::dq_keys;
    constexpr int M = queries / warps / 16, N = keys / 8;
    constexpr float scale = Tiles<hs>::scale;
    DYNAMIC_SHARED(memory);
    bf16* q_tile = reinterpret_cast<bf16*>(memory);
    bf16* dout_tile = q_tile + queries * hs;
    bf16* k_tiles = dout_tile + queries * hs;
    bf16* v_tiles = k_tiles + 2 * keys * hs;

    const int h = blockIdx.y, b = blockIdx.z;
    const bf16* q = qkv + size_t(b) * T * 3 * C + h * hs;
    const size_t head = size_t(b) * gridDim.y + h, first_value = size_t(b) * T * C + h * hs;
    dout += first_value, out += first_value;
    lse += head * T, lse2 += head * padded_T, dot += head * padded_T;
    const int first_query = int(gridDim.x - 1 - blockIdx.x) * queries;
    const int row = threadIdx.x / 32 * 16 * M, query = first_query + row;  // the warp's first
    auto load_stage = [&](int first_key) {
        const int stage = first_key / keys % 2 * keys * hs;
        load_tile_async<keys, hs>(k_tiles + stage, q + C, 3 * C, first_key, T);
        load_tile_async<keys, hs>(v_tiles + stage, q + 2 * C, 3 * C, first_key, T);
    };

    float row_lse2[M][2], row_dot[M][2];
    #pragma unroll
    for (int i = 0; i < M; i++) {
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            const int t = query + row_of(i, 2 * half);
            const size_t at = size_t(t) * C;
            row_lse2[i][half] = t < T ? lse[t] * log2_e : INFINITY;
            row_dot[i][half] = quad_sum(t < T ? dot_of_quarter<hs>(dout + at, out + at) : 0.0f);
            if (threadIdx.x % 4 == 0) {
                lse2[t] = row_lse2[i][half];
                dot[t] = row_dot[i][half];
            }
        }
    }
    float dq[M][hs / 8][4] = {};
    const int end = min(first_query + queries, T);
    load_tile_async<queries, hs>(q_tile, q, 3 * C, first_query, T);
    load_tile_async<queries, hs>(dout_tile, dout, C, first_query, T);
    load_stage(0);
    copy_async_commit();
    for (int key = 0; key < end; key += keys) {
        copy_async_wait<0>();
        __syncthreads();  // this tile is there, and the one before it no longer in use
        if (key + keys < end) { load_stage(key + keys); }
        copy_async_commit();
        if (key < query + 16 * M) {  // else all keys come after the warp's queries
            const int stage = key / keys % 2 * keys * hs;
            float p[M][N][4] = {}, ds[M][N][4] = {};
            add_product_of_tiles<hs>(p, q_tile, row, k_tiles + stage);
            add_product_of_tiles<hs>(ds, dout_tile, row, v_tiles + stage);
            if (key + keys > query + 1) { mask<false>(p, query, key); }
            #pragma unroll
            for (int i = 0; i < M; i++) {
                #pragma unroll
                for (int j = 0; j < N; j++) {
                    #pragma unroll
                    for (int r = 0; r < 4; r++) {
                        const float probability =
                            exp2_approximate(fmaf(scale * log2_e, p[i][j][r], -row_lse2[i][r / 2]));
                        ds[i][j][r] = probability * (ds[i][j][r] - row_dot[i][r / 2]);
                    }
                }
            }
            add_product<hs>(dq, ds, k_tiles + stage);
        }
    }
    store_rows<hs>(dqkv + size_t(b) * T * 3 * C + h * hs, 3 * C, query, T, dq, scale, q_tile, row);
    partial += (size_t(b) * gridDim.x + blockIdx.x) * C + h * hs;
    sum_columns<hs, M>(partial, q_tile);
}

// The k and v parts of dqkv: (B,T,3C), and the sums of each tile's rows.   partial: (B,tiles,2C)
// dout: (B,T,C)   qkv: (B,T,3C)   lse2, dot: (B,NH,padded_T)
// A block owns keys and goes through queries, from its first key to T. All matrices are transposed, keys by
// queries. Runs after the dq kernel. Flops: 4 T C a key, on average. Bound by shared memory and latency.
template <int hs>
__global__ void __launch_bounds__(32 * warps, 2)
    backward_dkv_kernel(bf16* dqkv, float* partial, const bf16* dout, const bf16* qkv, const float* lse2,
                        const float* dot, int T, int padded_T, int C) {
    constexpr int keys = Tiles<hs>::dkv_keys, queries = Tiles<hs>::dkv_queries;
    constexpr int M = keys / warps / 16, N = queries / 8;
    constexpr float scale = Tiles<hs>::scale;
    DYNAMIC_SHARED(memory);
    bf16* k_tile = reinterpret_cast<bf16*>(memory);
    bf16* v_tile = k_tile + keys * hs;
    bf16* q_tiles = v_tile + keys * hs;
    bf16* dout_tiles = q_tiles + 2 * queries * hs;
    float* lse2_tiles = reinterpret_cast<float*>(dout_tiles + 2 * queries * hs);
    float* dot_tiles = lse2_tiles + 2 * queries;

    const int h = blockIdx.y, b = blockIdx.z;
    const bf16* q = qkv + size_t(b) * T * 3 * C + h * hs;
    const int first_key = blockIdx.x * keys;
    const int row = threadIdx.x / 32 * 16 * M, key = first_key + row;  // the warp's first
    lse2 += (size_t(b) * gridDim.y + h) * padded_T;
    dot += (size_t(b) * gridDim.y + h) * padded_T;
    auto load_stage = [&](int first_query) {
        const int stage = first_query / queries % 2 * queries;
        load_tile_async<queries, hs>(q_tiles + stage * hs, q, 3 * C, first_query, T);
        load_tile_async<queries, hs>(dout_tiles + stage * hs, dout + size_t(b) * T * C + h * hs, C,
                                     first_query, T);
        if (threadIdx.x < queries / 4) {
            const int i = 4 * threadIdx.x;
            copy_async_16(lse2_tiles + stage + i, lse2 + first_query + i);
            copy_async_16(dot_tiles + stage + i, dot + first_query + i);
        }
    };

    float dk[M][hs / 8][4] = {}, dv[M][hs / 8][4] = {};
    load_tile_async<keys, hs>(k_tile, q + C, 3 * C, first_key, T);
    load_tile_async<keys, hs>(v_tile, q + 2 * C, 3 * C, first_key, T);
    load_stage(first_key);
    copy_async_commit();
    for (int query = first_key; query < T; query += queries) {
        copy_async_wait<0>();
        __syncthreads();  // this tile is there, and the one before it no longer in use
        if (query + queries < T) { load_stage(query + queries); }
        copy_async_commit();
        if (key < query + queries) {  // else all queries come before the warp's keys
            const int stage = query / queries % 2 * queries;
            const bf16 *q_tile = q_tiles + stage * hs, *dout_tile = dout_tiles + stage * hs;
            float p[M][N][4] = {}, ds[M][N][4] = {};
            add_product_of_tiles<hs>(p, k_tile, row, q_tile);
            if (key + 16 * M > query + 1) { mask<true>(p, query, key); }
            #pragma unroll
            for (int j = 0; j < N; j++) {
                #pragma unroll
                for (int r = 0; r < 4; r++) {
                    const float column_lse2 = lse2_tiles[stage + column_of(j, r)];
                    #pragma unroll
                    for (int i = 0; i < M; i++) {
                        p[i][j][r] = exp2_approximate(fmaf(scale * log2_e, p[i][j][r], -column_lse2));
                    }
                }
            }
            add_product<hs>(dv, p, dout_tile);
            add_product_of_tiles<hs>(ds, v_tile, row, dout_tile);
            #pragma unroll
            for (int j = 0; j < N; j++) {
                #pragma unroll
                for (int r = 0; r < 4; r++) {
                    const float column_dot = dot_tiles[stage + column_of(j, r)];
                    #pragma unroll
                    for (int i = 0; i < M; i++) { ds[i][j][r] = p[i][j][r] * (ds[i][j][r] - column_dot); }
                }
            }
            add_product<hs>(dk, ds, q_tile);
        }
    }
    bf16* dq = dqkv + size_t(b) * T * 3 * C + h * hs;
    store_rows<hs>(dq + C, 3 * C, key, T, dk, scale, k_tile, row);
    store_rows<hs>(dq + 2 * C, 3 * C, key, T, dv, 1.0f, v_tile, row);
    partial += (size_t(b) * gridDim.x + blockIdx.x) * 2 * C + h * hs;
    sum_columns<hs, M>(partial, k_tile);
    sum_columns<hs, M>(partial + C, v_tile);
}

// ---- launchers

template <int hs>
void forward(bf16* out, float* lse, const bf16* qkv, int B, int T, int C, Stream& stream) {
    using Tile = Tiles<hs>;
    const int tiles = (T + Tile::forward_queries - 1) / Tile::forward_queries;
    launch(forward_kernel<hs>, Grid{dim3(tiles, C / hs, B), 32 * warps, Tile::forward_bytes, stream}, out,
           lse, qkv, T, C);
}

template <int hs>
void backward(bf16* dqkv, float* dqkvb, const bf16* dout, const bf16* out, const bf16* qkv, const float* lse,
              int B, int T, int C, GradientSums& sums, Stream& stream) {
    using Tile = Tiles<hs>;
    const int NH = C / hs, padded_T = (T + largest_tile - 1) / largest_tile * largest_tile;
    const long rows = long(B) * NH * padded_T;
    float* lse2 = stream.scratch<float>(2 * rows);
    float* dot = lse2 + rows;
    const int query_tiles = padded_T / Tile::dq_queries;
    const int key_tiles = (T + Tile::dkv_keys - 1) / Tile::dkv_keys;
    const long q_rows = long(B) * query_tiles, kv_rows = long(B) * key_tiles;
    float *q_sums = sums.partial(q_rows, C), *kv_sums = sums.partial(kv_rows, 2 * C);
    launch(backward_dq_kernel<hs>, Grid{dim3(query_tiles, NH, B), 32 * warps, Tile::dq_bytes, stream}, dqkv,
           q_sums, lse2, dot, dout, out, qkv, lse, T, padded_T, C);
    launch(backward_dkv_kernel<hs>, Grid{dim3(key_tiles, NH, B), 32 * warps, Tile::dkv_bytes, stream}, dqkv,
           kv_sums, dout, qkv, lse2, dot, T, padded_T, C);
    sums.add_later(dqkvb, q_sums, q_rows, C, C);
    sums.add_later(dqkvb + C, kv_sums, kv_rows, 2 * C, 2 * C);
}

}  // namespace attention

// out: (B,T,C)   lse: (B,NH,T)   qkv: (B,T,3C), each of q, k, v being NH heads of hs = C / NH, 64 or 128
// out and qkv are 16-byte aligned.
inline void attention_forward(__nv_bfloat16* out, float* lse, const __nv_bfloat16* qkv, int B, int T, int C,
                              int NH, Stream& stream, bool = true) {
    require(is_attention_shape(B, T, C, NH) && are_aligned({out, qkv}));
    const auto compute = C == 64 * NH ? attention::forward<64> : attention::forward<128>;
    compute(out, lse, qkv, B, T, C, stream);
}

// Overwrites dqkv, and with the next sums.add_pending() adds to dqkvb, or overwrites it unless sums.adds.
// dqkv, qkv: (B,T,3C)   dqkvb: (3C)
// dout, out: (B,T,C)   lse: (B,NH,T)   All but dqkvb and lse are 16-byte aligned.
inline void attention_backward(__nv_bfloat16* dqkv, float* dqkvb, const __nv_bfloat16* dout,
                               const __nv_bfloat16* out, const __nv_bfloat16* qkv, const float* lse, int B,
                               int T, int C, int NH, GradientSums& sums, Stream& stream, bool = true) {
    require(is_attention_shape(B, T, C, NH) && are_aligned({dqkv, dout, out, qkv}));
    const auto compute = C == 64 * NH ? attention::backward<64> : attention::backward<128>;
    compute(dqkv, dqkvb, dout, out, qkv, lse, B, T, C, sums, stream);
}

}  // namespace cuda
