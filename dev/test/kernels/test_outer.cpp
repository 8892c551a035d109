// The outer step on the device gives the same bits as the CPU's. There are no tolerances here, since global
// parameters and momentum must be the same on all workers, with and without a GPU. Compiles with nvcc, too
// (-x cu).
#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <string>
#include <vector>

#include "dev/emulator/device_array.h"
#include "dev/test/kernels/values.h"
#include "streaming/outer.h"

namespace {

struct Arrays {
    Floats global, momentum, local, mean;
    std::vector<floatX> params;  // not copies of local, so that a value that is not written is noticed
};

// Random values. The last `guard` values lie past those that a step may touch.
Arrays random_arrays(long n, uint64_t seed, float deviation) {
    auto values = [=](uint64_t stream, float scale) {
        Floats out(size_t(n) + guard);
        for (size_t i = 0; i < out.size(); i++) {
            out[i] = scale * deviation * standard_normal(seed + stream, RandomUse::sampling, i);
        }
        return out;
    };
    Arrays arrays{values(0, 1.0f), values(1, 0.125f), values(2, 1.0f), values(3, 0.0625f), {}};
    arrays.params.assign(size_t(n) + guard, floatX(77.0f));
    return arrays;
}

// Takes two steps in a row, so that a momentum that was not stored is noticed. Returns the arrays as the CPU
// leaves them.
Arrays expect_same_steps(Arrays arrays, OuterStep step) {
    const long n = long(arrays.global.size() - guard);
    DeviceArray<float> global(arrays.global), momentum(arrays.momentum), local(arrays.local);
    DeviceArray<float> mean(arrays.mean);
    DeviceArray<floatX> params(arrays.params);
    const Floats mean_before = arrays.mean;
    cpu::Stream cpu_stream;
    Stream stream;
    for (int i = 0; i < 2; i++) {
        cpu::outer_step(arrays.global.data(), arrays.momentum.data(), arrays.local.data(),
                        arrays.params.data(), arrays.mean.data(), n, step, cpu_stream);
        cuda::outer_step(global, momentum, local, params, mean, n, step, stream);
        stream.synchronize();
        expect_same_bits(momentum.to_host(), arrays.momentum, "momentum");
        expect_same_bits(global.to_host(), arrays.global, "global");
        expect_same_bits(local.to_host(), arrays.local, "local");
        expect_same_bits(params.to_host(), arrays.params, "parameter");
        expect_same_bits(mean.to_host(), mean_before, "mean");
    }
    return arrays;
}

const float alphas[] = {0.0f, 0.3f, 0.5f, 1.0f};

// A block of threads has 1024 values. The sizes are less than a block, one, and a little more than three.
TEST(OuterStepKernel, GlobalMomentumLocalAndParametersHaveTheCpusBits) {
    for_each_order(2, [] {
        for (long n : {4L, 128L, 1024L, 1024L * 3 + 132}) {
            for (float alpha : alphas) {
                for (float deviation : {1.0f, 0x1p-20f, 0x1p-130f}) {
                    const Arrays arrays = random_arrays(n, uint64_t(n), deviation);
                    expect_same_steps(arrays, {0.4f, 0.9f, alpha});  // nesterov
                    expect_same_steps(arrays, {1.0f, 0.0f, alpha});  // average
                    expect_same_steps(arrays, {0.4f, 0.9f, alpha, LocalMove::follow});
                }
            }
        }
    });
}

bool all_equal(const Floats& a, const Floats& b) { return memcmp(a.data(), b.data(), a.size() * 4) == 0; }

TEST(OuterStepKernel, WithAlphaOneLocalAndParametersStayWhateverTheyAre) {
    Arrays before = random_arrays(1024 + 128, 1, 1.0f);
    before.local[3] = -0.0f;
    before.local[500] = INFINITY;
    before.local[501] = bits_to_float(0x7fc12345);
    before.local[1027] = FLT_TRUE_MIN;
    const Arrays after = expect_same_steps(before, {0.4f, 0.9f, 1.0f});
    EXPECT_TRUE(all_equal(after.local, before.local));
    expect_same_bits(after.params, before.params, "parameter");
    EXPECT_FALSE(all_equal(after.global, before.global));
}

TEST(OuterStepKernel, WithAlphaZeroLocalBecomesGlobalWhateverItWas) {
    Arrays before = random_arrays(1024 + 128, 2, 1.0f);
    for (size_t i = 0; i < 1024; i += 5) { before.local[i] = i % 2 ? INFINITY : NAN; }
    const Arrays after = expect_same_steps(before, {0.4f, 0.9f, 0.0f});
    const size_t n = 1024 + 128;
    for (size_t i = 0; i < n; i++) {
        ASSERT_EQ(after.local[i], after.global[i]);
        ASSERT_EQ(float(after.params[i]), float(floatX(after.global[i])));
    }
}

TEST(OuterStepKernel, WhoFollowsMovesByWhatGlobalMovesWhateverAlphaIs) {
    for (float alpha : alphas) {
        const Arrays before = random_arrays(1024 + 128, 6, 1.0f);
        Arrays expected = before;
        const Arrays after = expect_same_steps(before, {0.4f, 0.9f, alpha, LocalMove::follow});
        for (size_t i = 0; i < 1024 + 128; i++) {
            for (int step = 0; step < 2; step++) {
                const float old = expected.global[i];
                expected.momentum[i] = fmaf(0.9f, expected.momentum[i], expected.mean[i]);
                const float move = fmaf(0.9f, expected.momentum[i], expected.mean[i]);
                expected.global[i] = fmaf(-0.4f, move, old);
                expected.local[i] += expected.global[i] - old;
            }
            ASSERT_EQ(after.local[i], expected.local[i]);
            ASSERT_EQ(float(after.params[i]), float(floatX(expected.local[i])));
        }
    }
}

// A parameter is local rounded to nearest, ties to even. In bf16 these values are ties and their neighbours.
TEST(OuterStepKernel, TheParameterIsTheRoundedLocal) {
    Arrays arrays = random_arrays(1024, 3, 1.0f);
    for (size_t i = 0; i < 1024; i++) {
        arrays.global[i] = bits_to_float(uint32_t(0x3f800000 + (i / 3 << 16) + 0x7fff + i % 3));
        arrays.momentum[i] = arrays.mean[i] = 0.0f;
    }
    const Arrays after = expect_same_steps(arrays, {0.4f, 0.9f, 0.0f});
    for (size_t i = 0; i < 1024; i++) { ASSERT_EQ(after.local[i], arrays.global[i]); }
}

TEST(OuterStepKernel, LargeValuesOverflowAsOnTheCpu) {
    Arrays arrays = random_arrays(1024, 4, 1.0f);
    for (size_t i = 0; i < 1024; i++) {
        arrays.global[i] = i % 2 ? FLT_MAX : -FLT_MAX;
        arrays.mean[i] = (i % 4 < 2 ? 1.0f : -1.0f) * FLT_MAX / float(1 + i % 7);
        arrays.momentum[i] = 0.0f;
    }
    const long n = 1024;
    DeviceArray<float> global(arrays.global), momentum(arrays.momentum), local(arrays.local);
    DeviceArray<float> mean(arrays.mean);
    DeviceArray<floatX> params(arrays.params);
    cpu::Stream cpu_stream;
    Stream stream;
    const OuterStep step{0.4f, 0.9f, 0.5f};
    cpu::outer_step(arrays.global.data(), arrays.momentum.data(), arrays.local.data(), arrays.params.data(),
                    arrays.mean.data(), n, step, cpu_stream);
    cuda::outer_step(global, momentum, local, params, mean, n, step, stream);
    stream.synchronize();
    expect_same_bits(global.to_host(), arrays.global, "global");
    expect_same_bits(local.to_host(), arrays.local, "local");
    expect_same_bits(params.to_host(), arrays.params, "parameter");
}

TEST(OuterStepKernel, WhatTheKernelCannotTakeIsRefusedBeforeTheLaunch) {
    DeviceArray<float> array(64);
    DeviceArray<floatX> parameters(64);
    float* a = array;
    floatX* p = parameters;
    Stream stream;
    const OuterStep step{0.4f, 0.9f, 0.5f};
    for (int wrong = 0; wrong < 4; wrong++) {
        auto array = [&](int i) { return a + (i == wrong ? 1 + i % 3 : 0); };
        expect_refused("array " + std::to_string(wrong), [&] {
            cuda::outer_step(array(0), array(1), array(2), p, array(3), 16, step, stream);
        });
    }
    expect_refused("the array of parameters", [&] { cuda::outer_step(a, a, a, p + 2, a, 16, step, stream); });
    for (long n : {15L, 14L, -4L}) {
        expect_refused(std::to_string(n) + " values",
                       [&] { cuda::outer_step(a, a, a, p, a, n, step, stream); });
    }
}

TEST(OuterStepKernel, NoValuesAreNoWork) {
    Arrays before = random_arrays(0, 5, 1.0f);
    const Arrays after = expect_same_steps(before, {0.4f, 0.9f, 0.5f});
    EXPECT_TRUE(all_equal(after.global, before.global));
}

}  // namespace
