// Causal self-attention in float, for fp32 builds: the equations of attention.cuh with plain FMAs.
//
// Tiles have 32 rows and lie in shared memory. The 256 threads form a square of 16 x 16: thread (y, x) has
// rows y and y + 16 of every product, with columns x and x + 16 of scores, and with four columns out of each
// 64 of a matrix (rows, hs). Flops per sequence: 2 T^2 C forward, 7 T^2 C backward, as in attention.cuh.
#pragma once
#include "llmc/arithmetic.h"
#include "llmc/cuda/gradient_sums.cuh"
#include "llmc/cuda/memory.cuh"
#include "llmc/stream.h"

namespace cuda {

// Whether the kernels, here and in attention.cuh, compute attention of this shape.
inline bool is_attention_shape(int B, int T, int C, int NH) {
    return B > 0 && T > 0 && NH > 0 && (C == 64 * NH || C == 128 * NH);
}

namespace attention_fp32 {

constexpr int side = 16, threads = side * side, rows = 2 * side;  // rows: of a tile
constexpr int ld_scores = rows + 1;

// Rows of tiles are padded by 16 bytes, so that a column's successive rows lie in different banks.
template <int hs>
constexpr int ld_tile = hs + 4;
template <int hs>
constexpr size_t tile_bytes = rows* ld_tile<hs> * sizeof(float);
constexpr size_t scores_bytes = rows * ld_scores * sizeof(float);

__device__ inline int thread_x() { return threadIdx.x % side; }
__device__ inline int thread_y() { return threadIdx.x / side; }

// Loads rows `first`.. of a head to a tile; rows from T on are 0.   head: (T,hs) with leading dimension ld
template <int hs>
__device__ inline void load_tile(float* tile, const float* head, int ld, int first, int T) {
    for (int i = threadIdx.x; i < rows * hs / 4; i += threads) {
        const int row = i / (hs / 4), column = i % (hs / 4) * 4;
        Pack<float> pack = {};
        if (first + row < T) { pack = load_pack(head + size_t(first + row) * ld + column); }
        store_pack(tile + row * ld_tile<hs> + column, pack);
    }
}

// s[i][j] = sum over hs of row y + 16 i of a and row x + 16 j of b.
template <int hs>
__device__ inline void product_of_tiles(float (&s)[2][2], const float* a, const float* b) {
    s[0][0] = s[0][1] = s[1][0] = s[1][1] = 0.0f;
    for (int c = 0; c < hs; c += 4) {
        Pack<float> a_pack[2], b_pack[2];
        for (int i = 0; i < 2; i++) {
            a_pack[i] = load_pack(a + (thread_y() + side * i) * ld_tile<hs> + c);
            b_pack[i] = load_pack(b + (thread_x() + side * i) * ld_tile<hs> + c);
        }
        for (int i = 0; i < 16; i++) {
            float& sum = s[i / 8][i / 4 % 2];
            sum = fmaf(a_pack[i / 8][i % 4], b_pack[i / 4 % 2][i % 4], sum);
        }
    }
}

// A thread's part of a matrix (rows, hs): rows y + 16 i, columns 64 n + 4 x + 0..3.
template <int hs>
struct Rows {
    Pack<float> v[2][hs / 64] = {};

    // += A B.   a: element (row, k) at row * row_stride + k * k_stride   b: tile (rows, hs)
    __device__ void add_product(const float* a, int row_stride, int k_stride, const float* b) {
        for (int k = 0; k < rows; k++) {
            float weight[2];
            for (int i = 0; i < 2; i++) {
                weight[i] = a[(thread_y() + side * i) * row_stride + k * k_stride];
            }
            for (int n = 0; n < hs / 64; n++) {
                const Pack<float> pack = load_pack(b + k * ld_tile<hs> + 64 * n + 4 * thread_x());
                for (int i = 0; i < 2; i++) {
                    for (int c = 0; c < 4; c++) { v[i][n][c] = fmaf(weight[i], pack[c], v[i][n][c]); }
                }
            }
        }
    }

    __device__ void multiply_row(int i, float factor) {
        for (int n = 0; n < hs / 64; n++) {
            for (int c = 0; c < 4; c++) { v[i][n][c] *= factor; }
        }
    }

    // Stores rows `first`.. of a head, except those from T on.   head: (T,hs) with leading dimension ld
    __device__ void store(float* head, int ld, int first, int T) const {
        for (int i = 0; i < 2; i++) {
            const int row = first + thread_y() + side * i;
            if (row >= T) { continue; }
            for (int n = 0; n < hs / 64; n++) {
                store_pack(head + size_t(row) * ld + 64 * n + 4 * thread_x(), v[i][n]);
            }
        }
    }
};

// ---- kernels: blocks (tiles, NH, B), in the same order as in attention.cuh

// out: (B,T,C)   lse: (B,NH,T)   qkv: (B,T,3C)
// A block owns queries and loops over keys. Bound by shared memory: about 4 T C bytes per query.
template <int hs>
__global__ void __launch_bounds__(threads)
    forward_kernel(float* out, float* lse, const float* qkv, int T, int C, float scale) {
    DYNAMIC_SHARED(memory);
    float* q_tile = reinterpret_cast<float*>(memory);
    float* k_tile = q_tile + rows * ld_tile<hs>;
    float* v_tile = k_tile + rows * ld_tile<hs>;
    float* p_tile = v_tile + rows * ld_tile<hs>;

    const int h = blockIdx.y, b = blockIdx.z, first_query = int(gridDim.x - 1 - blockIdx.x) * rows;
    const float* q = qkv + size_t(b) * T * 3 * C + h * hs;
    Rows<hs> sum;
    float max[2] = {-INFINITY, -INFINITY}, total[2] = {};
    load_tile<hs>(q_tile, q, 3 * C, first_query, T);
    for (int first_key = 0; first_key <= first_query; first_key += rows) {
        load_tile<hs>(k_tile, q + C, 3 * C, first_key, T);
        load_tile<hs>(v_tile, q + 2 * C, 3 * C, first_key, T);
        __syncthreads();
        float s[2][2];
        product_of_tiles<hs>(s, q_tile, k_tile);
        for (int i = 0; i < 2; i++) {
            const int row = thread_y() + side * i;
            for (int j = 0; j < 2; j++) {
                const bool later = first_key + thread_x() + side * j > first_query + row;
                s[i][j] = later ? -INFINITY : scale * s[i][j];
            }
            const float largest = warp_reduce<side>(fmaxf(s[i][0], s[i][1]), Maximum());  // of the row
            const float new_max = fmaxf(max[i], largest);
            const float correction = exponential(max[i] - new_max);
            max[i] = new_max;
            total[i] *= correction;
            sum.multiply_row(i, correction);
            for (int j = 0; j < 2; j++) {
                const float p = exponential(s[i][j] - new_max);
                total[i] += p;
                p_tile[row * ld_scores + thread_x() + side * j] = p;
            }
        }
        __syncthreads();
        sum.add_product(p_tile, ld_scores, 1, v_tile);
        __syncthreads();  // the next round overwrites the tiles
    }
    for (int i = 0; i < 2; i++) {
        const float row_total = warp_reduce<side>(total[i], Sum());
        const int query = first_query + thread_y() + side * i;
        sum.multiply_row(i, 1.0f / row_total);
        if (thread_x() == 0 && query < T) {
            lse[(size_t(b) * gridDim.y + h) * T + query] = max[i] + logf(row_total);
        }
    }
    sum.store(out + size_t(b) * T * C + h * hs, C, first_query, T);
}

// dot[b,h,t] = sum over hs of dout out.   dot: (B,NH,T)   dout, out: (B,T,C)
// A block has four values of t, and a warp for each. Bound by memory: 8 bytes per value.
__global__ void dot_kernel(float* dot, const float* dout, const float* out, int T, int NH, int hs) {
    const int t = blockIdx.x * 4 + threadIdx.x / 32, h = blockIdx.y, b = blockIdx.z;
    const size_t at = (size_t(b) * T + t) * NH * hs + h * hs;
    float sum = 0.0f;
    if (t < T) {
        for (int c = threadIdx.x % 32; c < hs; c += 32) { sum = fmaf(dout[at + c], out[at + c], sum); }
    }
    sum = warp_sum(sum);
    if (t < T && threadIdx.x % 32 == 0) { dot[(size_t(b) * NH + h) * T + t] = sum; }
}

// This thread's p and ds of a tile of queries and one of keys: element [i][j] is of query y + 16 i and key
// x + 16 j. They are 0 where the key comes after the query, or the query is not before T.   lse, dot: (T)
template <int hs>
__device__ inline void recompute_scores(float (&p)[2][2], float (&ds)[2][2], const float* q_tile,
                                        const float* k_tile, const float* dout_tile, const float* v_tile,
                                        const float* lse, const float* dot, int first_query, int first_key,
                                        int T, float scale) {
    product_of_tiles<hs>(p, q_tile, k_tile);
    product_of_tiles<hs>(ds, dout_tile, v_tile);
    for (int i = 0; i < 2; i++) {
        const int query = first_query + thread_y() + side * i;
        const float row_lse = query < T ? lse[query] : INFINITY, row_dot = query < T ? dot[query] : 0.0f;
        for (int j = 0; j < 2; j++) {
            const bool later = first_key + thread_x() + side * j > query;
            p[i][j] = later ? 0.0f : exponential(scale * p[i][j] - row_lse);
            ds[i][j] = p[i][j] * (ds[i][j] - row_dot);
        }
    }
}

// Stores scores to a tile (queries, keys).
__device__ inline void store_scores(float* tile, const float (&s)[2][2]) {
    for (int i = 0; i < 4; i++) {
        tile[(thread_y() + i / 2 * side) * ld_scores + thread_x() + i % 2 * side] = s[i / 2][i % 2];
    }
}

// The parts k and v of dqkv: (B,T,3C).   dout: (B,T,C)   qkv: (B,T,3C)   lse, dot: (B,NH,T)
// A block owns keys and loops over queries. Bound by shared memory: about 8 T C bytes per key.
template <int hs>
__global__ void __launch_bounds__(threads)
    backward_dkv_kernel(float* dqkv, const float* dout, const float* qkv, const float* lse, const float* dot,
                        int T, int C, float scale) {
    DYNAMIC_SHARED(memory);
    float* q_tile = reinterpret_cast<float*>(memory);
    float* k_tile = q_tile + rows * ld_tile<hs>;
    float* v_tile = k_tile + rows * ld_tile<hs>;
    float* dout_tile = v_tile + rows * ld_tile<hs>;
    float* p_tile = dout_tile + rows * ld_tile<hs>;
    float* ds_tile = p_tile + rows * ld_scores;

    const int h = blockIdx.y, b = blockIdx.z, first_key = blockIdx.x * rows;
    const float* q = qkv + size_t(b) * T * 3 * C + h * hs;
    const size_t statistics = (size_t(b) * gridDim.y + h) * T;
    Rows<hs> dk, dv;
    load_tile<hs>(k_tile, q + C, 3 * C, first_key, T);
    load_tile<hs>(v_tile, q + 2 * C, 3 * C, first_key, T);
    for (int first_query = first_key; first_query < T; first_query += rows) {
        load_tile<hs>(q_tile, q, 3 * C, first_query, T);
        load_tile<hs>(dout_tile, dout + size_t(b) * T * C + h * hs, C, first_query, T);
        __syncthreads();
        float p[2][2], ds[2][2];
        recompute_scores<hs>(p, ds, q_tile, k_tile, dout_tile, v_tile, lse + statistics, dot + statistics,
                             first_query, first_key, T, scale);
        store_scores(p_tile, p);
        store_scores(ds_tile, ds);
        __syncthreads();
        dv.add_product(p_tile, 1, ld_scores, dout_tile);  // transposed: (keys, queries)
        dk.add_product(ds_tile, 1, ld_scores, q_tile);
        __syncthreads();  // the next round overwrites the tiles
    }
    for (int i = 0; i < 2; i++) { dk.multiply_row(i, scale); }
    float* dq = dqkv + size_t(b) * T * 3 * C + h * hs;
    dk.store(dq + C, 3 * C, first_key, T);
    dv.store(dq + 2 * C, 3 * C, first_key, T);
}

// The part q of dqkv: (B,T,3C).   dout: (B,T,C)   qkv: (B,T,3C)   lse, dot: (B,NH,T)
// A block owns queries and loops over keys. Bound by shared memory: about 6 T C bytes per query.
template <int hs>
__global__ void __launch_bounds__(threads)
    backward_dq_kernel(float* dqkv, const float* dout, const float* qkv, const float* lse, const float* dot,
                       int T, int C, float scale) {
    DYNAMIC_SHARED(memory);
    float* q_tile = reinterpret_cast<float*>(memory);
    float* k_tile = q_tile + rows * ld_tile<hs>;
    float* v_tile = k_tile + rows * ld_tile<hs>;
    float* dout_tile = v_tile + rows * ld_tile<hs>;
    float* ds_tile = dout_tile + rows * ld_tile<hs>;

    const int h = blockIdx.y, b = blockIdx.z, first_query = int(gridDim.x - 1 - blockIdx.x) * rows;
    const float* q = qkv + size_t(b) * T * 3 * C + h * hs;
    const size_t statistics = (size_t(b) * gridDim.y + h) * T;
    Rows<hs> dq;
    load_tile<hs>(q_tile, q, 3 * C, first_query, T);
    load_tile<hs>(dout_tile, dout + size_t(b) * T * C + h * hs, C, first_query, T);
    for (int first_key = 0; first_key <= first_query; first_key += rows) {
        load_tile<hs>(k_tile, q + C, 3 * C, first_key, T);
        load_tile<hs>(v_tile, q + 2 * C, 3 * C, first_key, T);
        __syncthreads();
        float p[2][2], ds[2][2];
        recompute_scores<hs>(p, ds, q_tile, k_tile, dout_tile, v_tile, lse + statistics, dot + statistics,
                             first_query, first_key, T, scale);
        store_scores(ds_tile, ds);
        __syncthreads();
        dq.add_product(ds_tile, ld_scores, 1, k_tile);
        __syncthreads();  // the next round overwrites the tiles
    }
    for (int i = 0; i < 2; i++) { dq.multiply_row(i, scale); }
    dq.store(dqkv + size_t(b) * T * 3 * C + h * hs, 3 * C, first_query, T);
}

// ---- launchers

template <int hs>
void forward(float* out, float* lse, const float* qkv, int B, int T, int C, Stream& stream) {
    const float scale = 1.0f / sqrtf(float(hs));
    const dim3 blocks((T + rows - 1) / rows, C / hs, B);
    launch(forward_kernel<hs>, Grid{blocks, threads, 3 * tile_bytes<hs> + scores_bytes, stream}, out, lse,
           qkv, T, C, scale);
}

template <int hs>
void backward(float* dqkv, const float* dout, const float* out, const float* qkv, const float* lse, int B,
              int T, int C, Stream& stream) {
    const int NH = C / hs;
    const float scale = 1.0f / sqrtf(float(hs));
    float* dot = stream.scratch<float>(long(B) * NH * T);
    launch(dot_kernel, Grid{dim3((T + 3) / 4, NH, B), 128, 0, stream}, dot, dout, out, T, NH, hs);
    const dim3 blocks((T + rows - 1) / rows, NH, B);
    launch(backward_dkv_kernel<hs>, Grid{blocks, threads, 4 * tile_bytes<hs> + 2 * scores_bytes, stream},
           dqkv, dout, qkv, lse, dot, T, C, scale);
    launch(backward_dq_kernel<hs>, Grid{blocks, threads, 4 * tile_bytes<hs> + scores_bytes, stream}, dqkv,
           dout, qkv, lse, dot, T, C, scale);
}

}  // namespace attention_fp32

// out: (B,T,C)   lse: (B,NH,T)   qkv: (B,T,3C), each of q, k, v being NH heads of hs = C / NH, 64 or 128
// out and qkv are 16-byte aligned.
inline void attention_forward(float* out, float* lse, const float* qkv, int B, int T, int C, int NH,
                              Stream& stream, bool = false) {
    require(is_attention_shape(B, T, C, NH) && are_aligned({out, qkv}));
    const auto compute = C == 64 * NH ? attention_fp32::forward<64> : attention_fp32::forward<128>;
    compute(out, lse, qkv, B, T, C, stream);
}

// Overwrites dqkv, and with the next sums.add_pending() adds to dqkvb, or overwrites it unless sums.adds.
// dqkv, qkv: (B,T,3C)   dqkvb: (3C)
// dout, out: (B,T,C)   lse: (B,NH,T)   All but dqkvb and lse are 16-byte aligned.
inline void attention_backward(float* dqkv, float* dqkvb, const float* dout, const float* out,
                               const float* qkv, const float* lse, int B, int T, int C, int NH,
                               GradientSums& sums, Stream& stream, bool = false) {
    require(is_attention_shape(B, T, C, NH) && are_aligned({dqkv, dout, out, qkv}));
    const auto compute = C == 64 * NH ? attention_fp32::backward<64> : attention_fp32::backward<128>;
    compute(dqkv, dout, out, qkv, lse, B, T, C, stream);
    sums.add_later(dqkvb, dqkv, long(B) * T, 3 * C, 3 * C);
}

}  // namespace cuda
