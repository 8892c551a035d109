// LayerNorm's kernels against the CPU's functions of the same names. Values are small multiples of powers of
// two: floatX holds them exactly, and sums of them are the same in any order where a test says so.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "dev/emulator/device_array.h"
#include "dev/test/kernels/values.h"
#include "llmc/cpu/layernorm.h"
#include "llmc/cuda/layernorm.cuh"

namespace {

struct Shape {
    int N, C;
};

// Multiples of 1 / 2^bits from `least` to `greatest`.
std::vector<float> fractions(size_t count, float least, float greatest, int bits, unsigned seed) {
    std::mt19937 random(seed);
    std::uniform_int_distribution<int> integer(int(ldexpf(least, bits)), int(ldexpf(greatest, bits)));
    std::vector<float> values(count);
    for (float& value : values) { value = ldexpf(float(integer(random)), -bits); }
    return values;
}

std::vector<float> to_float(const DeviceArray<floatX>& values) { return to_floats(values.to_host()); }

// Rounding to floatX once, by at most half of bf16's spacing, and `noise`: what float's arithmetic adds to
// values of the size of 1.
void expect_rounded(const std::vector<float>& actual, const std::vector<float>& expected, float noise) {
    const float rounding = sizeof(floatX) == 2 ? 1.0f / 256 : 0.0f;
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < expected.size(); i++) {
        const float size = fabsf(expected[i]);
        ASSERT_NEAR(actual[i], expected[i], size * rounding + (1.0f + size) * noise) << "value " << i;
    }
}

// ---- forward

// Rows of all kinds: spread around 0; close to one another and far from 0, where E[x^2] - E[x]^2 would have
// lost three digits; and all equal, where only the 1e-5 is left.
std::vector<float> rows_of_all_kinds(const Shape& shape, unsigned seed) {
    const float far = shape.C < 1300 ? 192 : 24;  // sums stay below 2^24 of 1/64
    std::vector<float> rows = fractions(size_t(shape.N) * shape.C, -3, 3, 5, seed);
    for (int n = 0; n < shape.N; n++) {
        for (int c = 0; c < shape.C; c++) {
            float& value = rows[size_t(n) * shape.C + c];
            if (n % 3 == 1) { value = far + floorf(value); }
            if (n % 5 == 4) { value = 1.5f; }
        }
    }
    return rows;
}

struct Normed {
    explicit Normed(const Shape& shape) : out(size_t(shape.N) * shape.C), mean(shape.N), rstd(shape.N) {}
    std::vector<float> out, mean, rstd;
};

// The sum of a row is exact in any order (multiples of 1/64, below 2^24 of them), so mean has the CPU's bits.
// rstd is half as far off as the sum of C squares, which the CPU here forms one after another: C roundings of
// at most 2^-24 of a sum that is half the whole on average, C 2^-26. out is that far off and rounds a few
// times.
void expect_normed(const DeviceArray<floatX>& out, const DeviceArray<float>& mean,
                   const DeviceArray<float>& rstd, const Normed& expected) {
    EXPECT_EQ(mean.to_host(), expected.mean);
    const std::vector<float> rstds = rstd.to_host();
    const float C = float(expected.out.size() / rstds.size()), off = ldexpf(C + 32, -26);
    for (size_t n = 0; n < rstds.size(); n++) {
        ASSERT_NEAR(rstds[n], expected.rstd[n], off * expected.rstd[n]) << "row " << n;
    }
    expect_rounded(to_float(out), expected.out, off + 1e-6f);
}

// Rows that fill a part of a warp's packs; three and a bit of them; blocks of four warps that are not full.
const Shape forward_shapes[] = {{1, 8}, {6, 64}, {13, 328}, {5, 776}, {5, 1288}};

void expect_forward_of_the_cpu(const Shape& shape, unsigned seed) {
    const auto [N, C] = shape;
    const std::vector<float> inp = rows_of_all_kinds(shape, seed);
    const std::vector<float> weight = fractions(C, 0.5f, 1.5f, 6, seed + 1);
    const std::vector<float> bias = fractions(C, -1, 1, 6, seed + 2);
    Normed expected(shape);
    cpu::Stream cpu_stream;
    cpu::layernorm_forward(expected.out.data(), expected.mean.data(), expected.rstd.data(), inp.data(),
                           weight.data(), bias.data(), N, C, cpu_stream);
    Stream stream;
    DeviceArray<floatX> device_inp(to_floatX(inp)), device_weight(to_floatX(weight));
    DeviceArray<floatX> device_bias(to_floatX(bias)), out(inp.size());
    DeviceArray<float> mean(N), rstd(N);
    cuda::layernorm_forward(out, mean, rstd, device_inp, device_weight, device_bias, N, C, stream);
    stream.synchronize();
    expect_normed(out, mean, rstd, expected);
}

TEST(LayerNorm, ForwardIsTheCpusUpToRounding) {
    for_each_order(3, [] {
        for (const Shape& shape : forward_shapes) {
            expect_forward_of_the_cpu(shape, unsigned(shape.N * 7 + shape.C));
        }
    });
}

void expect_residual_of_the_cpu(const Shape& shape, unsigned seed) {
    const auto [N, C] = shape;
    // 1/32 and 1/64: bf16 does not hold every sum, and the norm is that of the rounded one.
    const std::vector<float> inp1 = rows_of_all_kinds(shape, seed);
    const std::vector<float> inp2 = fractions(inp1.size(), -1, 1, 6, seed + 3);
    const std::vector<float> weight = fractions(C, 0.5f, 1.5f, 6, seed + 1);
    const std::vector<float> bias = fractions(C, -1, 1, 6, seed + 2);
    std::vector<float> sum(inp1.size());
    for (size_t i = 0; i < sum.size(); i++) { sum[i] = float(floatX(inp1[i] + inp2[i])); }
    Normed expected(shape);
    cpu::Stream cpu_stream;
    cpu::layernorm_forward(expected.out.data(), expected.mean.data(), expected.rstd.data(), sum.data(),
                           weight.data(), bias.data(), N, C, cpu_stream);
    Stream stream;
    DeviceArray<floatX> device_inp1(to_floatX(inp1)), device_inp2(to_floatX(inp2));
    DeviceArray<floatX> device_weight(to_floatX(weight)), device_bias(to_floatX(bias));
    DeviceArray<floatX> residual(sum.size()), normed(sum.size());
    DeviceArray<float> mean(N), rstd(N);
    cuda::fused_residual_forward(residual, normed, mean, rstd, device_inp1, device_inp2, device_weight,
                                 device_bias, N, C, stream);
    stream.synchronize();
    EXPECT_EQ(to_float(residual), sum);
    expect_normed(normed, mean, rstd, expected);
}

TEST(LayerNorm, FusedResidualIsTheSumRoundedOnceAndItsNorm) {
    for_each_order(3, [] {
        for (const Shape& shape : forward_shapes) {
            expect_residual_of_the_cpu(shape, unsigned(shape.N * 5 + shape.C));
        }
    });
}

// Rows for which 48 KiB have less than four warps' room, or none.
TEST(LayerNorm, ForwardTakesTheLargestRows) {
    for_each_order(1, [] {
        expect_forward_of_the_cpu({4, 8192}, 1);
        expect_residual_of_the_cpu({2, 8192}, 2);
    });
}

// ---- backward

// Mean and rstd are any numbers here, not those of inp: with the true ones, the sums that backward subtracts
// would be too small to be missed.
struct Backward {
    Backward(const Shape& shape, unsigned seed)
        : N(shape.N),
          C(shape.C),
          dinp(fractions(size_t(N) * C, -1, 1, 5, seed)),
          dout(fractions(size_t(N) * C, -1, 1, 5, seed + 1)),
          inp(fractions(size_t(N) * C, -4, 4, 4, seed + 2)),
          weight(fractions(C, 0.5f, 1.5f, 5, seed + 3)),
          mean(fractions(N, -1, 1, 4, seed + 4)),
          rstd(fractions(N, 0.5f, 1.5f, 3, seed + 5)),
          dweight(fractions(C, -8, 8, 3, seed + 6)),
          dbias(fractions(C, -8, 8, 3, seed + 7)),
          dprojb(fractions(C, -8, 8, 3, seed + 8)) {}
    int N, C;
    std::vector<float> dinp, dout, inp, weight, mean, rstd, dweight, dbias, dprojb;
};

struct Gradients {
    std::vector<float> dinp, dweight, dbias, dprojb;
};

Gradients cpu_gradients(const Backward& b) {
    Gradients of_cpu{b.dinp, b.dweight, b.dbias, b.dprojb};
    cpu::GradientSums sums;
    cpu::Stream stream;
    cpu::layernorm_backward(of_cpu.dinp.data(), of_cpu.dweight.data(), of_cpu.dbias.data(),
                            of_cpu.dprojb.data(), b.dout.data(), b.inp.data(), b.weight.data(), b.mean.data(),
                            b.rstd.data(), b.N, b.C, sums, stream);
    return of_cpu;
}

// Of the launcher, or of its kernel with fewer blocks than it takes.
Gradients cuda_gradients(const Backward& b, unsigned blocks = 0) {
    Stream stream;
    cuda::GradientSums sums;
    DeviceArray<floatX> dinp(to_floatX(b.dinp)), dout(to_floatX(b.dout)), inp(to_floatX(b.inp));
    DeviceArray<floatX> weight(to_floatX(b.weight));
    DeviceArray<float> mean(b.mean), rstd(b.rstd), dweight(b.dweight), dbias(b.dbias), dprojb(b.dprojb);
    if (blocks == 0) {
        cuda::layernorm_backward(dinp, dweight, dbias, dprojb, dout, inp, weight, mean, rstd, b.N, b.C, sums,
                                 stream);
    } else {
        float* partial = sums.partial(blocks, 3 * b.C);
        launch(cuda::layernorm_backward_kernel<768>, Grid{blocks, blocks_for(b.C / 8, 32) * 32, 0, stream},
               dinp, partial, dout, inp, weight, mean, rstd, b.N, b.C);
        sums.add_later(dweight, partial, blocks, b.C, 3 * b.C);
        sums.add_later(dbias, partial + b.C, blocks, b.C, 3 * b.C);
        sums.add_later(dprojb, partial + 2 * b.C, blocks, b.C, 3 * b.C);
    }
    sums.add_pending(stream);
    stream.synchronize();
    return {to_float(dinp), dweight.to_host(), dbias.to_host(), dprojb.to_host()};
}

// dprojb is a sum of N values of dinp, each below 2^4 here and 1e-6 of 1 + its size off, and rounds as often.
// Of more than 6144 channels, dinp is summed after it was rounded.
void expect_gradients(const Gradients& actual, const Gradients& expected, float noise) {
    EXPECT_EQ(actual.dweight, expected.dweight);
    EXPECT_EQ(actual.dbias, expected.dbias);
    expect_rounded(actual.dinp, expected.dinp, noise);
    const size_t C = expected.dprojb.size(), values = expected.dinp.size();
    const float rounding = C > 6144 && sizeof(floatX) == 2 ? 1.0f / 256 : 0.0f;
    for (size_t c = 0; c < C; c++) {
        float off = float(values / C) * 16 * noise;
        for (size_t i = c; i < values; i += C) { off += rounding * fabsf(expected.dinp[i]); }
        ASSERT_NEAR(actual.dprojb[c], expected.dprojb[c], off) << "channel " << c;
    }
}

// The terms of dbias are multiples of 2^-5, those of dweight of 2^-12, and their sums stay below 2^12: exact
// in any order. dinp rounds once, after sums of C values of the size of 1 over C, below 1e-6 off.
void expect_backward_of_the_cpu(const Shape& shape, unsigned seed) {
    const Backward b(shape, seed);
    const Gradients expected = cpu_gradients(b), actual = cuda_gradients(b);
    expect_gradients(actual, expected, 1e-6f);
}

TEST(LayerNorm, BackwardIsTheCpusUpToRounding) {
    for_each_order(3, [] {
        for (const Shape& shape : {Shape{1, 8}, {9, 64}, {70, 72}, {7, 264}, {21, 776}}) {
            expect_backward_of_the_cpu(shape, unsigned(shape.N + shape.C));
        }
    });
}

// More rows than blocks: some have two rows, some three.
TEST(LayerNorm, BackwardOfMoreRowsThanBlocksIsTheCpus) {
    for_each_order(1, [] {
        ASSERT_EQ(cuda::layernorm_backward_blocks(2100, 40), 1024);
        expect_backward_of_the_cpu({2100, 40}, 1);
    });
}

// Four warps that take turns with the sums of three or four rows a block.
TEST(LayerNorm, RowsOfABlockDoNotMeet) {
    const Backward b({11, 776}, 3);
    const Gradients expected = cpu_gradients(b);
    for_each_order(8, [&] {
        const Gradients actual = cuda_gradients(b, 3);
        expect_gradients(actual, expected, 1e-6f);
    });
}

// Forty rows a block, with an rstd of 32 to 96: what a thread beyond the last channel kept from row to row
// would grow by as much, and soon be infinite. Values are those of above but for powers of two: dweight and
// dbias are exact again, dinp's sums 64 times as large.
TEST(LayerNorm, ThreadsWithoutChannelsTakeNothingFromRowToRow) {
    for (int C : {64, 320}) {
        Backward b({80, C}, unsigned(C));
        for (float& value : b.inp) { value /= 64; }
        for (float& value : b.mean) { value /= 64; }
        for (float& value : b.rstd) { value *= 64; }
        const Gradients expected = cpu_gradients(b), actual = cuda_gradients(b, 2);
        expect_gradients(actual, expected, 64 * 1e-6f);
    }
}

TEST(LayerNorm, BackwardTakesTheLargestRows) {
    for_each_order(1, [] { expect_backward_of_the_cpu({3, 8192}, 1); });
}

TEST(LayerNorm, BackwardGivesTheSameBitsInAnyOrder) {
    Backward b({70, 264}, 1);
    for (float& value : b.mean) { value = value / 3; }
    for (float& value : b.rstd) { value = value / 3; }
    const Gradients first = cuda_gradients(b);
    for_each_order(4, [&] {
        const Gradients again = cuda_gradients(b);
        EXPECT_EQ(again.dinp, first.dinp);
        EXPECT_EQ(again.dweight, first.dweight);
        EXPECT_EQ(again.dbias, first.dbias);
        EXPECT_EQ(again.dprojb, first.dprojb);
    });
}

// Layer 0's first LayerNorm reads the embedding, which has no bias.
TEST(LayerNorm, BackwardWithoutAProjectionBeforeItAddsToTheRest) {
    const Backward b({70, 72}, 1);
    const Gradients expected = cpu_gradients(b);
    Stream stream;
    cuda::GradientSums sums;
    DeviceArray<floatX> dinp(to_floatX(b.dinp)), dout(to_floatX(b.dout)), inp(to_floatX(b.inp));
    DeviceArray<floatX> weight(to_floatX(b.weight));
    DeviceArray<float> mean(b.mean), rstd(b.rstd), dweight(b.dweight), dbias(b.dbias);
    cuda::layernorm_backward(dinp, dweight, dbias, nullptr, dout, inp, weight, mean, rstd, b.N, b.C, sums,
                             stream);
    sums.add_pending(stream);
    stream.synchronize();
    EXPECT_EQ(dweight.to_host(), expected.dweight);
    EXPECT_EQ(dbias.to_host(), expected.dbias);
}

// What the first micro-step of a step adds to, and what no gradient is, is zero when it begins.
TEST(LayerNorm, AStepBeginsWithZerosWhereItsFirstMicroStepDoesNotWrite) {
    const Layout layout = gpt_layout({8, 100, 128, 2, 1, 64}, 2, 1);
    Stream stream;
    DeviceArray<float> grads(std::vector<float>(size_t(layout.size), 1.0f));
    cuda::GradientSums sums;
    sums.begin(grads, layout, false, stream);
    stream.synchronize();
    EXPECT_TRUE(sums.adds);
    EXPECT_EQ(grads.to_host(), std::vector<float>(size_t(layout.size), 1.0f));
    std::vector<float> expected(size_t(layout.size), 0.0f);
    for (const Tensor& tensor : layout.tensors) {
        if (tensor.name == "wpe") { continue; }
        std::fill_n(expected.begin() + tensor.offset, tensor.count(), 1.0f);
    }
    ASSERT_LT(layout.values, layout.size);
    sums.begin(grads, layout, true, stream);
    stream.synchronize();
    EXPECT_FALSE(sums.adds);
    EXPECT_EQ(grads.to_host(), expected);
}

// Sums of several lengths and widths in one launch, and then none; more than a launch takes are refused.
TEST(LayerNorm, PendingSumsAreAddedOnce) {
    for_each_order(3, [] {
        Stream stream;
        cuda::GradientSums sums;
        const std::vector<float> rows = fractions(600 * 40, -1, 1, 5, 1), before = fractions(40, -8, 8, 3, 2);
        DeviceArray<float> all(rows), to(before), of_floatX(before);
        DeviceArray<floatX> row(to_floatX(before));
        sums.add_later(to, static_cast<float*>(all), 600, 33, 40);
        sums.add_later(of_floatX, static_cast<floatX*>(row), 1, 40, 40);
        sums.add_later(nullptr, static_cast<float*>(all), 600, 40, 40);
        sums.add_pending(stream);
        sums.add_pending(stream);
        stream.synchronize();
        std::vector<float> expected = before, twice = before;
        for (size_t i = 0; i < rows.size(); i++) { expected[i % 40] += i % 40 < 33 ? rows[i] : 0.0f; }
        for (float& value : twice) { value *= 2; }
        EXPECT_EQ(to.to_host(), expected);
        EXPECT_EQ(of_floatX.to_host(), twice);
        sums.adds = false;
        sums.add_later(to, static_cast<floatX*>(row), 1, 40, 40);
        sums.add_pending(stream);
        stream.synchronize();
        EXPECT_EQ(to.to_host(), before) << "overwritten";
        for (int i = 0; i < 12; i++) { sums.add_later(to, static_cast<float*>(all), 1, 1, 1); }
        EXPECT_THROW(sums.add_later(to, static_cast<float*>(all), 1, 1, 1), std::logic_error);
    });
}

TEST(LayerNorm, ForwardHasAsManyWarpsAsSharedMemoryHasRoomFor) {
    EXPECT_EQ(cuda::layernorm_warps(1536), 4u);
    EXPECT_EQ(cuda::layernorm_warps(16384), 3u);
    EXPECT_EQ(cuda::layernorm_warps(24576), 2u);
    EXPECT_EQ(cuda::layernorm_warps(65536), 1u);
}

TEST(LayerNorm, BlocksOfBackwardDependOnRowsAndChannels) {
    EXPECT_EQ(cuda::layernorm_backward_blocks(5, 768), 5);
    EXPECT_EQ(cuda::layernorm_backward_blocks(65536, 64), 1024);
    EXPECT_EQ(cuda::layernorm_backward_blocks(65536, 768), 1024);
    EXPECT_EQ(cuda::layernorm_backward_blocks(65536, 1600), 491);
    EXPECT_EQ(cuda::layernorm_backward_blocks(65536, 8192), 256);
}

TEST(LayerNorm, ChannelsThatItCannotTakeAreRefused) {
    Stream stream;
    cuda::GradientSums sums;
    DeviceArray<floatX> x(8208);
    DeviceArray<float> f(8208);
    for (int C : {-8, 0, 12, 8200}) {
        EXPECT_THROW(cuda::layernorm_forward(x, f, f, x, x, x, 1, C, stream), std::invalid_argument);
        EXPECT_THROW(cuda::fused_residual_forward(x, x, f, f, x, x, x, x, 1, C, stream),
                     std::invalid_argument);
        EXPECT_THROW(cuda::layernorm_backward(x, f, f, f, x, x, x, f, f, 1, C, sums, stream),
                     std::invalid_argument);
    }
}

TEST(LayerNorm, AnyArrayThatIsNotAlignedIsRefused) {
    Stream stream;
    cuda::GradientSums sums;
    DeviceArray<floatX> x(128);
    DeviceArray<float> f(64);
    for (int wrong = 0; wrong < 6; wrong++) {
        auto array = [&](int i) { return x + 16 * i + (i == wrong ? 1 : 0); };
        EXPECT_THROW(cuda::fused_residual_forward(array(0), array(1), f, f, array(2), array(3), array(4),
                                                  array(5), 1, 8, stream),
                     std::invalid_argument)
            << wrong;
        if (wrong >= 4) { continue; }
        EXPECT_THROW(cuda::layernorm_forward(array(0), f, f, array(1), array(2), array(3), 1, 8, stream),
                     std::invalid_argument)
            << wrong;
        EXPECT_THROW(
            cuda::layernorm_backward(array(0), f, f, f, array(1), array(2), array(3), f, f, 1, 8, sums,
                                     stream),
            std::invalid_argument)
            << wrong;
    }
}

}  // namespace
