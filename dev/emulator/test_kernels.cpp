// Correct kernels that use all of the seam: the same right results on a GPU and, under any order of blocks
// and threads and any sanitizer, on the emulator. Compiles with nvcc, too (-x cu).
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "dev/emulator/device_array.h"

namespace {

using bf16 = __nv_bfloat16;

constexpr int tile = 64, tile_k = 32;                // a block's part of the output; the depth of one stage
constexpr int warp_tile = 32;                        // a warp's: 2 x 2 warps
constexpr int row_k = tile_k + 8, row_n = tile + 8;  // rows in shared memory, padded: no bank conflicts
constexpr int matmul_threads = 128;

// The (rows, columns) part of `matrix` at (row0, column0) to shared memory, zeros beyond its end; its columns
// are a multiple of 8.
__device__ void load_tile(bf16* shared, int stride, const bf16* matrix, int row0, int column0, int rows,
                          int columns, int all_rows, int all_columns) {
    for (int i = threadIdx.x; i < rows * columns / 8; i += matmul_threads) {
        const int row = i / (columns / 8), column = i % (columns / 8) * 8;
        const bool valid = row0 + row < all_rows && column0 + column < all_columns;
        const bf16* from = valid ? matrix + size_t(row0 + row) * all_columns + column0 + column : matrix;
        copy_async_16(shared + row * stride + column, from, valid);
    }
}

// The fragments of B for two tiles of 8 columns, 16 deep.
template <bool b_is_transposed>
__device__ void load_b(uint32_t (&b)[4], const bf16* b_tile, int n, int k) {
    const int lane = threadIdx.x % 32;
    if (b_is_transposed) {
        load_matrix_x4(b, b_tile + (n + lane / 16 * 8 + lane % 8) * row_k + k + lane / 8 % 2 * 8);
    } else {
        load_matrix_x4<true>(b, b_tile + (k + lane % 16) * row_n + n + lane / 16 * 8);
    }
}

template <bool b_is_transposed>
__device__ void multiply_stage(float (&sum)[2][4][4], const bf16* a_tile, const bf16* b_tile) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int m = warp / 2 * warp_tile, n = warp % 2 * warp_tile;
    for (int k = 0; k < tile_k; k += 16) {
        uint32_t a[2][4], b[2][4];
        for (int i = 0; i < 2; i++) {
            load_matrix_x4(a[i], a_tile + (m + i * 16 + lane % 16) * row_k + k + lane / 16 * 8);
            load_b<b_is_transposed>(b[i], b_tile, n + i * 16, k);
        }
        for (int i = 0; i < 2; i++) {
            for (int j = 0; j < 4; j++) {
                mma_m16n8k16_bf16(sum[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
            }
        }
    }
}

// out = A B.   out: (M, N)   a: (M, K)   b: (N, K) if b_is_transposed, else (K, N).   K and, if not
// transposed, N are multiples of 8. While one stage is multiplied the next one is on its way.
template <bool b_is_transposed>
__global__ void matmul(float* out, const bf16* a, const bf16* b, int M, int N, int K) {
    SHARED(bf16[2][tile * row_k], a_tile);
    SHARED(bf16[2][tile * row_k], b_tile);  // (tile, row_k) or (tile_k, row_n), which is smaller
    const int row0 = blockIdx.y * tile, column0 = blockIdx.x * tile;
    auto load_stage = [&](int k) {
        const int stage = k / tile_k % 2;
        load_tile(a_tile[stage], row_k, a, row0, k, tile, tile_k, M, K);
        if (b_is_transposed) {
            load_tile(b_tile[stage], row_k, b, column0, k, tile, tile_k, N, K);
        } else {
            load_tile(b_tile[stage], row_n, b, k, column0, tile_k, tile, K, N);
        }
    };

    float sum[2][4][4] = {};
    load_stage(0);
    copy_async_commit();
    for (int k = 0; k < K; k += tile_k) {
        if (k + tile_k < K) { load_stage(k + tile_k); }
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        multiply_stage<b_is_transposed>(sum, a_tile[k / tile_k % 2], b_tile[k / tile_k % 2]);
        __syncthreads();  // the next round overwrites this stage
    }

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int i = 0; i < 32; i++) {
        const int row = row0 + warp / 2 * warp_tile + i / 16 * 16 + lane / 4 + i / 2 % 2 * 8;
        const int column = column0 + warp % 2 * warp_tile + i / 4 % 4 * 8 + lane % 4 * 2 + i % 2;
        if (row < M && column < N) { out[size_t(row) * N + column] = sum[i / 16][i / 4 % 4][i % 4]; }
    }
}

// Integers of at most 5 in size: all sums are exact in any order.
std::vector<bf16> small_integers(size_t count, unsigned seed) {
    std::vector<bf16> values(count);
    for (bf16& value : values) {
        seed = seed * 1664525u + 1013904223u;
        value = __float2bfloat16(float(int(seed >> 24) % 11 - 5));
    }
    return values;
}

template <bool b_is_transposed>
void expect_exact_matmul(int M, int N, int K) {
    const std::vector<bf16> a = small_integers(size_t(M) * K, 1), b = small_integers(size_t(N) * K, 2);
    std::vector<float> expected(size_t(M) * N);
    for (int i = 0; i < M; i++) {
        for (int j = 0; j < N; j++) {
            for (int k = 0; k < K; k++) {
                expected[i * N + j] += __bfloat162float(a[i * K + k]) *
                                       __bfloat162float(b[b_is_transposed ? j * K + k : k * N + j]);
            }
        }
    }
    DeviceArray<bf16> device_a(a), device_b(b);
    DeviceArray<float> out(expected.size());
    launch(matmul<b_is_transposed>, Grid{dim3((N + tile - 1) / tile, (M + tile - 1) / tile), matmul_threads},
           out, device_a, device_b, M, N, K);
    EXPECT_EQ(out.to_host(), expected);
}

TEST(Kernels, TiledMatmulOfThreeTilesAndOddSizesIsExact) {
    for_each_order(3, [] { expect_exact_matmul<true>(131, 137, 72); });
}

TEST(Kernels, TiledMatmulThroughTransposedLoadsIsExact) {
    for_each_order(3, [] { expect_exact_matmul<false>(65, 136, 72); });
}

// spread[row] = max - min of the row, sum[row] = sum of row - min.   inp: (rows, C), one block a row
// Two reductions of a kind follow each other: the second one writes where the first one is still read.
__global__ void reduce_rows(float* spread, float* sum, const float* inp, int C) {
    const float* row = inp + size_t(blockIdx.x) * C;
    float part = -INFINITY, negative_part = -INFINITY;
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        part = fmaxf(part, row[c]);
        negative_part = fmaxf(negative_part, -row[c]);
    }
    const float largest = block_max(part), smallest = -block_max(negative_part);
    part = 0.0f;
    for (int c = threadIdx.x; c < C; c += blockDim.x) { part += row[c] - smallest; }
    const float total = block_sum(part);
    if (threadIdx.x == 0) {
        spread[blockIdx.x] = largest - smallest;
        sum[blockIdx.x] = total;
    }
}

TEST(Kernels, BlockReductionsOneAfterAnotherAreExact) {
    for (int C : {5, 127, 1001}) {
        const int rows = 3;
        std::vector<float> inp(size_t(rows) * C), spread, sum;
        // No two of a row are equal: a warp that misses an extreme has another result. Sums stay below 2^24.
        for (size_t i = 0; i < inp.size(); i++) { inp[i] = float(i * 1237 % 4001); }
        for (auto row = inp.begin(); row < inp.end(); row += C) {
            const auto [smallest, largest] = std::minmax_element(row, row + C);
            spread.push_back(*largest - *smallest);
            sum.push_back(std::accumulate(row, row + C, 0.0f) - float(C) * *smallest);
        }
        for_each_order(8, [&] {
            DeviceArray<float> device_inp(inp), device_spread(rows), device_sum(rows);
            launch(reduce_rows, Grid{rows, 128}, device_spread, device_sum, device_inp, C);
            EXPECT_EQ(device_spread.to_host(), spread);
            EXPECT_EQ(device_sum.to_host(), sum);
        });
    }
}

// out[i] = inp[0] + ... + inp[i] within each 32 values.
__global__ void warp_scan(int* out, const int* inp) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32;
    int value = inp[i];
    for (int delta = 1; delta < 32; delta *= 2) {
        const int before = __shfl_up_sync(full_warp, value, delta);
        if (lane >= delta) { value += before; }
    }
    out[i] = value;
}

TEST(Kernels, WarpScanIsExact) {
    const int count = 3 * 96;
    std::vector<int> inp(count), expected(count);
    for (int i = 0; i < count; i++) {
        inp[i] = i * i % 29;
        expected[i] = inp[i] + (i % 32 == 0 ? 0 : expected[i - 1]);
    }
    for_each_order(8, [&] {
        DeviceArray<int> device_inp(inp), out(count);
        launch(warp_scan, Grid{3, 96}, out, device_inp);
        EXPECT_EQ(out.to_host(), expected);
    });
}

// ranks[i] = the even values before inp[i] in its warp; *total += the even values of each block.
__global__ void count_even(int* ranks, int* total, const int* inp) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32;
    const unsigned even = __ballot_sync(full_warp, inp[i] % 2 == 0);
    ranks[i] = __popc(even & ((1u << lane) - 1));
    const int in_block = __syncthreads_count(inp[i] % 2 == 0);
    if (threadIdx.x == 0) { atomicAdd(total, in_block); }
}

TEST(Kernels, VotesAndAtomicsCountExactly) {
    const int count = 4 * 64;
    std::vector<int> inp(count), expected(count);
    for (int i = 0; i < count; i++) {
        inp[i] = i * i / 3;
        expected[i] = i % 32 == 0 ? 0 : expected[i - 1] + (inp[i - 1] % 2 == 0);
    }
    const int evens = int(std::count_if(inp.begin(), inp.end(), [](int value) { return value % 2 == 0; }));
    for_each_order(8, [&] {
        DeviceArray<int> device_inp(inp), ranks(count), total(std::vector<int>{0});
        launch(count_even, Grid{4, 64}, ranks, total, device_inp);
        EXPECT_EQ(ranks.to_host(), expected);
        EXPECT_EQ(total.to_host()[0], evens);
    });
}

// out[i] = inp[n - 1 - i], n a multiple of 4, through dynamic shared memory.
__global__ void reverse(float* out, const float* inp, int n) {
    DYNAMIC_SHARED(memory);
    float* values = reinterpret_cast<float*>(memory);
    for (int i = threadIdx.x * 4; i < n; i += blockDim.x * 4) { store_pack(values + i, load_pack(inp + i)); }
    __syncthreads();
    for (int i = threadIdx.x * 4; i < n; i += blockDim.x * 4) {
        Pack<float> pack;
        for (int j = 0; j < 4; j++) { pack[j] = values[n - 1 - i - j]; }
        store_pack(out + i, pack);
    }
}

TEST(Kernels, PacksThroughDynamicSharedMemoryKeepEveryValue) {
    const int n = 15 * 1024;  // 60 KiB: more than a kernel gets without asking
    std::vector<float> inp(n);
    std::iota(inp.begin(), inp.end(), 0.0f);
    const std::vector<float> expected(inp.rbegin(), inp.rend());
    for_each_order(3, [&] {
        DeviceArray<float> device_inp(inp), out(n);
        launch(reverse, Grid{1, 256, n * sizeof(float)}, out, device_inp, n);
        EXPECT_EQ(out.to_host(), expected);
    });
}

// A warp that exchanges values through shared memory with __syncwarp alone.
__global__ void reverse_in_warps(int* out, const int* inp) {
    SHARED(int[128], values);
    const int i = threadIdx.x;
    values[i] = inp[i];
    __syncwarp();
    out[i] = values[i / 32 * 32 + 31 - i % 32];
}

TEST(Kernels, SyncwarpOrdersSharedMemoryWithinAWarp) {
    std::vector<int> inp(128), expected(128);
    std::iota(inp.begin(), inp.end(), 100);
    for (int i = 0; i < 128; i++) { expected[i] = inp[i / 32 * 32 + 31 - i % 32]; }
    for_each_order(8, [&] {
        DeviceArray<int> device_inp(inp), out(128);
        launch(reverse_in_warps, Grid{1, 128}, out, device_inp);
        EXPECT_EQ(out.to_host(), expected);
    });
}

}  // namespace
