// The reductions of llmc/cuda/device.cuh: what each thread gets, one call after another; and a GPU that
// llmc/cuda/gpu.cuh refuses. Compiles with nvcc, too (-x cu).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "dev/emulator/device_array.h"
#include "llmc/cuda/gpu.cuh"

namespace {

// out[i] is what thread i gets from each of the reductions of inp, and of their results: the second reduction
// of a kind writes where the first one is still read.
struct Reduced {
    float warp_sum, block_sum, block_max, block_max_of_sums;
    double block_sum_double;
};

__global__ void reduce(Reduced* out, const float* inp, const double* inp_double) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const float x = inp[i];
    Reduced own;
    own.warp_sum = warp_sum(x);
    own.block_sum = block_sum(x);
    own.block_max = block_max(x);
    own.block_max_of_sums = block_max(own.warp_sum);
    own.block_sum_double = block_sum(inp_double[i]);
    out[i] = own;
}

// What reduce() has to give for values of which all sums are exact.
std::vector<Reduced> expected_of(const std::vector<float>& inp, const std::vector<double>& inp_double,
                                 int threads) {
    std::vector<Reduced> expected(inp.size());
    const auto sum = [&](size_t first, int count) {
        float total = 0;
        for (int i = 0; i < count; i++) { total += inp[first + size_t(i)]; }
        return total;
    };
    for (size_t i = 0; i < inp.size(); i++) {
        const size_t warp = i / 32 * 32, block = i / size_t(threads) * size_t(threads);
        Reduced& own = expected[i];
        own.warp_sum = sum(warp, 32);
        own.block_sum = sum(block, threads);
        own.block_max = *std::max_element(&inp[block], &inp[block] + threads);
        own.block_max_of_sums = -INFINITY;
        own.block_sum_double = 0;
        for (size_t j = block; j < block + size_t(threads); j++) {
            own.block_max_of_sums = std::max(own.block_max_of_sums, sum(j / 32 * 32, 32));
            own.block_sum_double += inp_double[j];
        }
    }
    return expected;
}

// Negative numbers alone: 0 is no result. In double they need more than a float's 24 bits.
void expect_exact_reductions(int threads) {
    const int blocks = 2;
    std::vector<float> inp;
    std::vector<double> inp_double;
    for (int i = 0; i < blocks * threads; i++) {
        inp.push_back(-1.0f - float(i * 1237 % 4001));
        inp_double.push_back(double(inp.back()) - 0x1p30);
    }
    const std::vector<Reduced> expected = expected_of(inp, inp_double, threads);
    for_each_order(4, [&] {
        DeviceArray<float> device_inp(inp);
        DeviceArray<double> device_inp_double(inp_double);
        DeviceArray<Reduced> out(inp.size());
        launch(reduce, Grid{blocks, unsigned(threads)}, out, device_inp, device_inp_double);
        const std::vector<Reduced> found = out.to_host();
        for (size_t i = 0; i < found.size(); i++) {
            ASSERT_EQ(found[i].warp_sum, expected[i].warp_sum) << "thread " << i;
            ASSERT_EQ(found[i].block_sum, expected[i].block_sum) << "thread " << i;
            ASSERT_EQ(found[i].block_max, expected[i].block_max) << "thread " << i;
            ASSERT_EQ(found[i].block_max_of_sums, expected[i].block_max_of_sums) << "thread " << i;
            ASSERT_EQ(found[i].block_sum_double, expected[i].block_sum_double) << "thread " << i;
        }
    });
}

TEST(Reductions, EveryThreadGetsTheExactResultOfOneWarp) { expect_exact_reductions(32); }
TEST(Reductions, EveryThreadGetsTheExactResultOfThreeWarps) { expect_exact_reductions(96); }
TEST(Reductions, EveryThreadGetsTheExactResultOfAllWarpsThatABlockCanHave) { expect_exact_reductions(1024); }

TEST(Device, AGpuThatTheProgramHasNoCodeForIsRefused) {
    cudaDeviceProp a100 = {};
    strcpy(a100.name, "NVIDIA A100");
    a100.major = 8;
    for (const std::vector<int>& built_for : {std::vector<int>{750}, {800}, {800, 1000}, {700, 750}}) {
        cuda::check_code_for(a100, built_for);
    }
    for (const std::vector<int>& built_for : {std::vector<int>{860}, {750, 860}, {900}, {700, 900}}) {
        try {
            cuda::check_code_for(a100, built_for);
            FAIL() << built_for[0];
        } catch (const UserError& error) {
            const std::string text = error.what();
            EXPECT_NE(text.find(" and later, but NVIDIA A100 has 8.0"), std::string::npos) << text;
            EXPECT_NE(text.find("GPU_ARCH=80"), std::string::npos) << text;
        }
    }
}

}  // namespace
