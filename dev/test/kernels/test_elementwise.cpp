// GELU, copies, casts, the scalars of a step and the gradient norm on the device, against the CPU's functions
// of the same names. Compiles with nvcc, too (-x cu).
#include <gtest/gtest.h>

#include "dev/emulator/device_array.h"
#include "dev/test/kernels/values.h"
#include "llmc/cpu/gelu.h"
#include "llmc/cpu/global_norm.h"
#include "llmc/cpu/memory.h"
#include "llmc/cuda/gelu.cuh"
#include "llmc/cuda/global_norm.cuh"
#include "llmc/cuda/memory.cuh"

namespace {

using bf16 = __nv_bfloat16;
// ---- GELU

// Infinities and the ends of the range of interest among random values.
std::vector<floatX> gelu_inputs(long n, uint64_t seed) {
    Floats values = random_floats(n, seed, 12.0f);
    const float special[] = {0.0f, -0.0f, INFINITY, 1e30f, -1e4f, 1e-30f, -13.0f};
    for (size_t i = 0; i < 7; i++) { values[i * 37 % size_t(n)] = special[i]; }
    return converted<floatX>(values);
}

// bf16: half of its spacing, and what the kernel leaves out, 2^-15. fp32: the kernel's code is the CPU's, but
// nvcc fuses a product and a sum in the exponent of e^-u, whose error is the result's where x is negative;
// two more roundings follow. Results that are denormals may be 0 on a GPU.
float gelu_tolerance([[maybe_unused]] float x, float expected) {
    if (sizeof(floatX) == 2) { return 0x1.02p-8f * fabsf(expected) + 1e-37f; }
#ifdef __CUDACC__
    const float exponent = std::max(0.0f, -x * (gelu_2k + gelu_2k_cubic * x * x));
    return (exponent + 2) * 0x1p-23f * fabsf(expected) + 1e-37f;
#else
    return 0.0f;
#endif
}

TEST(Gelu, IsTheCpusForEveryValueAndLeavesTheRestAlone) {
    for (long n : {8, 2040, 2056, 6152}) {
        const std::vector<floatX> inp = gelu_inputs(n, uint64_t(n));
        const Floats exact_inp = converted<float>(inp);
        Floats expected(exact_inp.size());
        cpu::Stream cpu_stream;
        cpu::gelu_forward(expected.data(), exact_inp.data(), n, cpu_stream);
        for_each_order(3, [&] {
            cuda::Stream stream;
            DeviceArray<floatX> device_inp(inp), out(std::vector<floatX>(inp.size() + guard, floatX(-7.0f)));
            cuda::gelu_forward(out, device_inp, n, stream);
            stream.synchronize();
            const Floats values = converted<float>(out.to_host());
            for (size_t i = 0; i < inp.size(); i++) {
                if (std::isinf(expected[i])) {
                    ASSERT_EQ(values[i], expected[i]) << i;
                } else {
                    ASSERT_NEAR(values[i], expected[i], gelu_tolerance(exact_inp[i], expected[i])) << i;
                }
            }
            for (size_t i = inp.size(); i < values.size(); i++) { ASSERT_EQ(values[i], -7.0f) << i; }
        });
    }
}

TEST(Gelu, RefusesWhatItCannotLoadInPacks) {
    cuda::Stream stream;
    DeviceArray<floatX> inp(32), out(32);
    EXPECT_THROW(cuda::gelu_forward(out, inp, 12, stream), std::invalid_argument);
    EXPECT_THROW(cuda::gelu_forward(out, inp + 1, 8, stream), std::invalid_argument);
    EXPECT_THROW(cuda::gelu_forward(out + 1, inp, 8, stream), std::invalid_argument);
}

// ---- copies and casts

TEST(Memory, CopiesToTheDeviceAndBackKeepWhatLiesBehind) {
    const Floats values = random_floats(1001, 1, 4.0f);
    DeviceArray<float> array(Floats(values.size() + guard, -7.0f));
    cuda::Stream stream;
    cuda::copy_to_device(static_cast<float*>(array), values.data(), long(values.size()), stream);
    Floats back(values.size() + 2 * guard, 3.0f), expected = values;
    cuda::copy_to_host(back.data(), static_cast<const float*>(array), long(values.size() + guard), stream);
    expected.resize(values.size() + guard, -7.0f);
    expected.resize(values.size() + 2 * guard, 3.0f);
    expect_same_bits(back, expected);
}

TEST(Memory, SetZeroKeepsWhatLiesBehind) {
    std::vector<double> expected(1001, 5.0);
    DeviceArray<double> array(expected);
    cuda::Stream stream;
    cuda::set_zero(static_cast<double*>(array), 999, stream);
    stream.synchronize();
    std::fill_n(expected.begin(), 999, 0.0);
    EXPECT_EQ(array.to_host(), expected);
}

template <class Out, class In>
void expect_cast_like_cpus(long n) {
    std::vector<In> inp = converted<In>(random_floats(n, uint64_t(n), 3.0f));
    if (n > 4) {
        inp[1] = In(INFINITY);
        inp[2] = In(0x1.fffffep127f);  // rounds to infinity
        inp[3] = In(1.00390625f);      // halfway between two bf16
        inp[4] = In(0x1p-140f);        // a denormal
    }
    std::vector<Out> expected(inp.size(), Out(0.0f));
    cpu::Stream cpu_stream;
    cpu::cast(expected.data(), inp.data(), n, cpu_stream);
    expected.resize(inp.size() + guard, Out(-7.0f));
    for_each_order(3, [&] {
        cuda::Stream stream;
        DeviceArray<In> device_inp(inp);
        DeviceArray<Out> out(std::vector<Out>(inp.size() + guard, Out(-7.0f)));
        cuda::cast(static_cast<Out*>(out), static_cast<const In*>(device_inp), n, stream);
        stream.synchronize();
        expect_same_bits(out.to_host(), expected);
    });
}

TEST(Memory, CastsOfAnyLengthHaveTheCpusBits) {
    for (long n : {1, 7, 8, 1023, 1025, 6155}) {
        expect_cast_like_cpus<bf16, float>(n);
        expect_cast_like_cpus<float, bf16>(n);
        expect_cast_like_cpus<float, float>(n);
        expect_cast_like_cpus<bf16, bf16>(n);
    }
}

TEST(Memory, CastRefusesWhatItCannotLoadInPacksAndTakesNothing) {
    cuda::Stream stream;
    DeviceArray<float> inp(Floats(32, 1.0f)), out(Floats(32, 2.0f));
    float *to = out, *from = inp;
    EXPECT_THROW(cuda::cast(to + 1, from, 8, stream), std::invalid_argument);
    EXPECT_THROW(cuda::cast(to, from + 2, 8, stream), std::invalid_argument);
    cuda::cast(to, from, 0, stream);
    EXPECT_EQ(out.to_host(), Floats(32, 2.0f));
}

// ---- scalars of a step

// What the sum of n values adds to 0.75.
float scaled_sum(const Floats& values, float scale) {
    cuda::Stream stream;
    DeviceArray<float> device_values(values), out(Floats{0.75f, -7.0f});
    cuda::add_scaled_sum(out, device_values, long(values.size()), scale, stream);
    stream.synchronize();
    EXPECT_EQ(out.to_host()[1], -7.0f);
    return out.to_host()[0];
}

TEST(Memory, AddScaledSumHasTheCpusBitsWhereTheOrderDoesNotShow) {
    for (long n : {1, 31, 1024, 3333}) {
        Floats values = random_floats(n, uint64_t(n), 4.0f);  // multiples of 2^-21: exact in double
        values[0] = 0x1p30f;                                  // and not in float
        cpu::Stream cpu_stream;
        float expected = 0.75f;
        cpu::add_scaled_sum(&expected, values.data(), n, 0.3f, cpu_stream);
        Floats rest(values.begin() + 1, values.end());
        rest.push_back(-0x1p30f);
        values.insert(values.end(), rest.begin(), rest.end());  // what is left shows every small value
        float small = 0.75f;
        cpu::add_scaled_sum(&small, values.data(), 2 * n, 0.3f, cpu_stream);
        for_each_order(3, [&] {
            EXPECT_EQ(scaled_sum(Floats(values.begin(), values.begin() + n), 0.3f), expected);
            EXPECT_EQ(scaled_sum(values, 0.3f), small);
        });
    }
}

TEST(Memory, ClipScaleIsTheCpus) {
    const float cases[][2] = {{0.25f, 1.0f}, {16.0f, 1.0f},   {1.0f, 1.0f}, {16.0f, 0.0f},
                              {2.0f, 1.4f},  {0.0f, 0.0f},    {0.0f, 1.0f}, {INFINITY, 1.0f},
                              {NAN, 1.0f},   {INFINITY, 0.0f}};
    for (const auto& [norm_squared, clip] : cases) {
        Floats expected(2);
        cpu::Stream cpu_stream;
        cpu::clip_scale(&expected[0], &expected[1], &norm_squared, clip, cpu_stream);
        cuda::Stream stream;
        DeviceArray<float> device_norm_squared(Floats{norm_squared}), norm(1), scale(1);
        cuda::clip_scale(norm, scale, device_norm_squared, clip, stream);
        stream.synchronize();
        const Floats results = {norm.to_host()[0], scale.to_host()[0]};
        for (size_t i = 0; i < 2; i++) {
            if (std::isnan(expected[i])) {
                EXPECT_TRUE(std::isnan(results[i])) << norm_squared << " " << clip;
            } else {
                EXPECT_EQ(results[i], expected[i]) << norm_squared << " " << clip;
            }
        }
    }
}

// ---- the gradient norm

float norm_squared_of(const Floats& values, long count) {
    cuda::Stream stream;
    DeviceArray<float> device_values(values), out(Floats{-7.0f, -7.0f});
    cuda::global_norm_squared(out, device_values + 0, count, stream);
    stream.synchronize();
    EXPECT_EQ(out.to_host()[1], -7.0f);
    return out.to_host()[0];
}

// Squares of integers below 2^5, and sums of them, are exact in float too: every value shows.
TEST(GlobalNorm, CountsEveryValueOnce) {
    for (long count : {4, 128, 16384, 16388, 4 * 16384 + 2052}) {
        Floats values = random_floats(count + 4, uint64_t(count), 15.5f);
        for (float& value : values) { value = rintf(value); }
        float expected = NAN;
        cpu::Stream cpu_stream;
        cpu::global_norm_squared(&expected, values.data(), count, cpu_stream);
        values[size_t(count)] = 100.0f;  // after the end
        for_each_order(2, [&] { EXPECT_EQ(norm_squared_of(values, count), expected); });
    }
}

TEST(GlobalNorm, SumsMoreChunksThanABlockHasThreads) {
    std::vector<double> partial(2051);
    double expected = 0;
    for (size_t i = 0; i < partial.size(); i++) { expected += partial[i] = double(i % 97 + 1); }
    for_each_order(3, [&] {
        DeviceArray<double> device_partial(partial);
        DeviceArray<float> out(1);
        launch(cuda::global_norm_total_kernel, Grid{1, cuda::norm_threads}, out, device_partial,
               int(partial.size()));
        EXPECT_EQ(out.to_host()[0], float(expected));
    });
}

// 2^24 + 1 is 2^24 in float, in whatever order: each thread meets one 4096 first, and then ones.
TEST(GlobalNorm, KeepsSmallValuesBesideLargeOnes) {
    const long count = 3 * cuda::norm_chunk;
    Floats values(size_t(count), 1.0f);
    double expected = 0;
    for (long i = 0; i < count; i++) {
        if (i % cuda::norm_chunk < 4 * cuda::norm_threads && i % 4 == 0) { values[size_t(i)] = 4096.0f; }
        expected += double(values[size_t(i)]) * double(values[size_t(i)]);
    }
    EXPECT_EQ(norm_squared_of(values, count), float(expected));
}

TEST(GlobalNorm, SquaresMayLeaveTheRangeOfFloat) {
    Floats values(20000, 0x1p-76f);  // the square is 0 in float
    EXPECT_EQ(norm_squared_of(values, 16384), 0x1p-138f);
    values[19999] = 0x1p64f;
    EXPECT_EQ(norm_squared_of(values, 20000), INFINITY);
    values[19999] = NAN;
    EXPECT_TRUE(std::isnan(norm_squared_of(values, 20000)));
}

TEST(GlobalNorm, OfNothingIsZeroAndOfHalfAPackRefused) {
    EXPECT_EQ(norm_squared_of(Floats(4, 1.0f), 0), 0.0f);
    EXPECT_THROW(norm_squared_of(Floats(8, 1.0f), 6), std::invalid_argument);
    cuda::Stream stream;
    DeviceArray<float> values(16), out(1);
    EXPECT_THROW(cuda::global_norm_squared(out, values + 1, 8, stream), std::invalid_argument);
}

}  // namespace
