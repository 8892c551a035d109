// The fully connected layer on cuBLASLt (the emulated one, where there is no GPU) against the CPU's, and its
// kernel: the derivative of GELU.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <thread>

#include "dev/emulator/device_array.h"
#ifndef __CUDACC__
#include <nccl.h>

#include "dev/emulator/cublaslt.h"
#endif
#include "dev/test/kernels/values.h"
#include "llmc/cpu/matmul.h"
#include "llmc/cuda/matmul.cuh"

namespace {

constexpr bool bf16 = !std::is_same<floatX, float>::value;

// What rounding to floatX may change, relative to the value: half of the last of 8 bits. In the fp32 build,
// where GELU's exponential is at stake, a few units of the last of 24.
constexpr float rounding = bf16 ? 0x1p-8f : 0x1p-21f;

// Multiples of `step` from -3 to 3 steps: exact in bf16, and so are their products and sums in float.
Floats small_multiples(long count, float step, unsigned seed) {
    std::mt19937 random(seed);
    Floats values;
    for (long i = 0; i < count; i++) { values.push_back(float(int(random() % 7) - 3) * step); }
    return values;
}

// Sums that are exact in float, rounded to floatX once.
void expect_rounded(const DeviceArray<floatX>& values, const Floats& expected, const char* what) {
    EXPECT_EQ(to_floats(values.to_host()), to_floats(to_floatX(expected))) << what;
}

// A GPU's cuBLASLt takes tanh to 2^-11 and may apply GELU to a sum that is rounded already, as the kernels
// that are not fused do. The emulated one rounds once, and takes tanh in double.
float of_source(bool fused) {
#ifdef __CUDACC__
    return fused || bf16 ? rounding : 0x1p-20f;
#else
    return !fused && bf16 ? rounding : 0x1p-20f;
#endif
}

// Each value is the expected one but for its own rounding, and `of_source` of what it was computed from.
void expect_near(const DeviceArray<floatX>& values, const Floats& expected, const Floats& source,
                 float of_source) {
    const Floats all = to_floats(values.to_host());
    ASSERT_EQ(all.size(), expected.size());
    for (size_t i = 0; i < all.size(); i++) {
        ASSERT_LE(std::fabs(all[i] - expected[i]),
                  rounding * std::fabs(expected[i]) + of_source * std::fabs(source[i]))
            << all[i] << " for " << expected[i] << " at " << i;
    }
}

struct Case {
    int N, C, OC;
    Floats inp, weight, bias, dout, pre_gelu, dweight, dbias;
    Floats out, out_pre_gelu, dinp;  // the CPU's

    Case(int N, int C, int OC, unsigned seed)
        : N(N),
          C(C),
          OC(OC),
          inp(small_multiples(long(N) * C, 0.25f, seed)),
          weight(small_multiples(long(OC) * C, 0.25f, seed + 1)),
          bias(small_multiples(OC, 0.25f, seed + 2)),
          dout(small_multiples(long(N) * OC, 0.25f, seed + 3)),
          pre_gelu(small_multiples(long(N) * C, 0.75f, seed + 4)),
          dweight(small_multiples(long(OC) * C, 0.5f, seed + 5)),
          dbias(small_multiples(C, 1.0f, seed + 6)),
          out(dout.size()),
          out_pre_gelu(dout.size()),
          dinp(inp.size()) {
        // Eight bits each; added to a product they are more than eight, so that each rounding shows.
        const Floats fine = small_multiples(OC, 0x1p-8f, seed + 7);
        for (int i = 0; i < OC; i++) { bias[size_t(i)] += fine[size_t(i)]; }
    }
};

cpu::Matmul& cpu_matmul() {
    static cpu::Matmul matmul(MatmulPrecision::highest);
    return matmul;
}

// The same call on both sides. out and pre_gelu are rounded to floatX; the CPU's are not.
void expect_forward(cuda::Matmul& matmul, Case x, bool with_bias, bool with_gelu) {
    SCOPED_TRACE(testing::Message() << "N " << x.N << " C " << x.C << " OC " << x.OC << " bias " << with_bias
                                    << " gelu " << with_gelu);
    cpu::Stream host;
    cpu::matmul_forward(cpu_matmul(), x.out.data(), x.inp.data(), x.weight.data(),
                        with_bias ? x.bias.data() : nullptr, x.N, x.C, x.OC, host);
    if (with_gelu) {
        x.out_pre_gelu = x.out;
        cpu::gelu_forward(x.out.data(), x.out_pre_gelu.data(), long(x.out.size()), host);
    }
    Stream stream;
    DeviceArray<floatX> inp(to_floatX(x.inp)), weight(to_floatX(x.weight)), bias(to_floatX(x.bias));
    DeviceArray<floatX> out(x.out.size()), pre_gelu(x.out.size());
    cuda::matmul_forward(matmul, out, inp, weight, with_bias ? static_cast<floatX*>(bias) : nullptr, x.N, x.C,
                         x.OC, stream, with_gelu ? static_cast<floatX*>(pre_gelu) : nullptr);
    stream.synchronize();
    if (!with_gelu) {
        expect_rounded(out, x.out, "out");
        return;
    }
    expect_rounded(pre_gelu, x.out_pre_gelu, "pre_gelu");
    // The largest slope of GELU, 1.13, and a quarter of a rounding for tanh.
    Floats source = x.out_pre_gelu;
    for (float& value : source) { value *= 1.4f; }
    expect_near(out, x.out, source, of_source(matmul.fuses_gelu));
}

void expect_backward(cuda::Matmul& matmul, Case x, bool adds = true) {
    SCOPED_TRACE(testing::Message() << "N " << x.N << " C " << x.C << " OC " << x.OC);
    Stream stream;
    cpu::Stream host;
    DeviceArray<floatX> dout(to_floatX(x.dout)), inp(to_floatX(x.inp)), weight(to_floatX(x.weight));
    DeviceArray<floatX> dinp(x.inp.size());
    DeviceArray<float> dweight(x.dweight);
    cuda::GradientSums sums;
    cpu::GradientSums host_sums;
    sums.adds = adds;
    cuda::matmul_backward(matmul, dinp, dweight, dout, inp, weight, x.N, x.C, x.OC, sums, stream);
    stream.synchronize();
    if (!sums.adds) { x.dweight.assign(x.dweight.size(), 0.0f); }
    cpu::matmul_backward(cpu_matmul(), x.dinp.data(), x.dweight.data(), x.dout.data(), x.inp.data(),
                         x.weight.data(), x.N, x.C, x.OC, host_sums, host);
    EXPECT_EQ(dweight.to_host(), x.dweight);
    expect_rounded(dinp, x.dinp, "dinp");
}

// The gradient of the bias is as far off as the values that it sums and, where cuBLASLt sums them, rounded to
// floatX before it is added.
void expect_gelu_backward(cuda::Matmul& matmul, Case x) {
    SCOPED_TRACE(testing::Message() << "N " << x.N << " C " << x.C << " OC " << x.OC << " gelu");
    Stream stream;
    cpu::Stream host;
    cuda::GradientSums sums;
    cpu::GradientSums host_sums;
    DeviceArray<floatX> dout(to_floatX(x.dout)), inp(to_floatX(x.inp)), weight(to_floatX(x.weight));
    DeviceArray<floatX> pre_gelu(to_floatX(x.pre_gelu)), dinp(x.inp.size());
    DeviceArray<float> dweight(x.dweight), dbias(x.dbias);
    cuda::matmul_gelu_backward(matmul, dinp, dweight, dbias, dout, inp, pre_gelu, weight, x.N, x.C, x.OC,
                               sums, stream);
    sums.add_pending(stream);
    stream.synchronize();
    // `product` is what the derivative is applied to.
    Floats product(x.dinp.size()), expected_dweight = x.dweight, expected_dbias = x.dbias;
    cpu::matmul_backward(cpu_matmul(), product.data(), x.dweight.data(), x.dout.data(), x.inp.data(),
                         x.weight.data(), x.N, x.C, x.OC, host_sums, host);
    cpu::matmul_gelu_backward(cpu_matmul(), x.dinp.data(), expected_dweight.data(), expected_dbias.data(),
                              x.dout.data(), x.inp.data(), x.pre_gelu.data(), x.weight.data(), x.N, x.C, x.OC,
                              host_sums, host);
    EXPECT_EQ(dweight.to_host(), expected_dweight);
    const bool fused = matmul.fuses_gelu_backward;
    expect_near(dinp, x.dinp, product, of_source(fused));
    const Floats all = dbias.to_host();
    for (size_t c = 0; c < all.size(); c++) {
        float off = fused ? rounding * std::fabs(expected_dbias[c] - x.dbias[c]) : 0.0f;
        for (size_t i = c; i < product.size(); i += all.size()) {
            off += of_source(fused) * std::fabs(product[i]) + 0x1p-20f * std::fabs(x.dinp[i]);
        }
        ASSERT_NEAR(all[c], expected_dbias[c], off) << "channel " << c;
    }
}

const std::vector<std::array<int, 3>> shapes = {  // N, C, OC
    {1, 8, 16},
    {3, 72, 24},
    {133, 64, 192},
    {37, 192, 136},
    {300, 16, 520}};

TEST(Matmul, ForwardIsTheCpusWithAndWithoutBiasAndGelu) {
    cuda::Matmul fused({MatmulPrecision::highest, 1}), apart({MatmulPrecision::highest, 0});
    unsigned seed = 1;
    for (const auto& [N, C, OC] : shapes) {
        for (const bool with_bias : {true, false}) {
            expect_forward(fused, Case(N, C, OC, seed++), with_bias, false);
            expect_forward(fused, Case(N, C, OC, seed++), with_bias, true);
            expect_forward(apart, Case(N, C, OC, seed++), with_bias, true);
        }
    }
}

TEST(Matmul, BackwardAddsToTheSumsAndOverwritesDinpAsTheCpuDoes) {
    cuda::Matmul fused({MatmulPrecision::highest, 2}), apart({MatmulPrecision::highest, 1});
    unsigned seed = 100;
    for (const auto& [N, C, OC] : shapes) {
        expect_backward(fused, Case(N, C, OC, seed++));
        expect_backward(fused, Case(N, C, OC, seed++), false);
        expect_gelu_backward(fused, Case(N, C, OC, seed++));
        expect_gelu_backward(apart, Case(N, C, OC, seed++));
    }
}

// Where GELU is not fused, its kernels get the sums rounded, as the caller does.
TEST(Matmul, GeluThatIsNotFusedIsThatOfTheRoundedSums) {
    cuda::Matmul matmul({MatmulPrecision::highest, 0});
    ASSERT_FALSE(matmul.fuses_gelu);
    const int N = 13, C = 72, OC = 40;
    const Case x(N, C, OC, 400);
    Stream stream;
    DeviceArray<floatX> inp(to_floatX(x.inp)), weight(to_floatX(x.weight)), bias(to_floatX(x.bias));
    DeviceArray<floatX> dout(to_floatX(x.dout)), pre_gelu(to_floatX(x.pre_gelu));
    DeviceArray<floatX> out(size_t(N) * OC), sums(size_t(N) * OC), dinp(size_t(N) * C), dsums(size_t(N) * C);
    DeviceArray<float> dweight(x.dweight), dbias(x.dbias);
    cuda::GradientSums of_columns;
    cuda::matmul_forward(matmul, out, inp, weight, bias, N, C, OC, stream, sums);
    cuda::matmul_gelu_backward(matmul, dinp, dweight, dbias, dout, inp, pre_gelu, weight, N, C, OC,
                               of_columns, stream);
    cuda::matmul_backward(matmul, dsums, dweight, dout, inp, weight, N, C, OC, of_columns, stream);
    cuda::gelu_forward(sums, sums, long(N) * OC, stream);
    cuda::multiply_by_gelu_derivative(dsums, dbias, pre_gelu, N, C, of_columns, stream);
    stream.synchronize();
    EXPECT_EQ(to_floats(out.to_host()), to_floats(sums.to_host()));
    EXPECT_EQ(to_floats(dinp.to_host()), to_floats(dsums.to_host()));
}

// Another bias, pre_gelu and shape must not meet the plan, or the pointers, of the call before.
TEST(Matmul, APlanIsForItsShapeAndTakesTheCallsOwnPointers) {
    cuda::Matmul matmul(MatmulPrecision::highest);
    for (unsigned seed = 200; seed < 203; seed++) {
        for (const auto& [N, C, OC] : {std::array<int, 3>{5, 64, 8}, {5, 8, 64}, {8, 64, 8}, {5, 64, 16}}) {
            expect_forward(matmul, Case(N, C, OC, seed), true, true);
            expect_gelu_backward(matmul, Case(N, C, OC, seed));
        }
    }
}

// The results of a forward and a backward call, for tensors that begin `by` values after a multiple of 256
// bytes.
std::vector<Floats> results_of(cuda::Matmul& matmul, const Case& x, long by) {
    auto shifted = [=](Floats values) {
        values.insert(values.begin(), size_t(by), NAN);
        return values;
    };
    auto from = [=](const Floats& all) {
        for (long i = 0; i < by; i++) { EXPECT_TRUE(std::isnan(all[size_t(i)])) << "before the tensor"; }
        return Floats(all.begin() + by, all.end());
    };
    DeviceArray<floatX> inp(to_floatX(shifted(x.inp))), weight(to_floatX(shifted(x.weight)));
    DeviceArray<floatX> bias(to_floatX(shifted(x.bias))), dout(to_floatX(shifted(x.dout)));
    DeviceArray<floatX> pre_gelu_in(to_floatX(shifted(x.pre_gelu))), dinp(to_floatX(shifted(x.dinp)));
    DeviceArray<floatX> out(to_floatX(shifted(x.out))), pre_gelu(to_floatX(shifted(x.out)));
    DeviceArray<float> dweight(shifted(x.dweight)), dbias(shifted(x.dbias));
    Stream stream;
    cuda::GradientSums sums;
    cuda::matmul_forward(matmul, out + by, inp + by, weight + by, bias + by, x.N, x.C, x.OC, stream,
                         pre_gelu + by);
    cuda::matmul_gelu_backward(matmul, dinp + by, dweight + by, dbias + by, dout + by, inp + by,
                               pre_gelu_in + by, weight + by, x.N, x.C, x.OC, sums, stream);
    sums.add_pending(stream);
    stream.synchronize();
    return {from(to_floats(out.to_host())), from(to_floats(pre_gelu.to_host())),
            from(to_floats(dinp.to_host())), from(dweight.to_host()), from(dbias.to_host())};
}

TEST(Matmul, GeluIsFusedWhereItGainsUnlessAnOptionSaysOtherwise) {
    for (const int major : {8, 9, 10, 12}) {
        EXPECT_EQ(cuda::Matmul::gains_from_fusing_gelu(major), major == 9 || major == 10) << major;
    }
    EXPECT_FALSE(cuda::Matmul({MatmulPrecision::highest, 0}).fuses_gelu);
    EXPECT_FALSE(cuda::Matmul(MatmulPrecision::highest).fuses_gelu_backward);
    for (const int both : {1, 2}) {
        const cuda::Matmul matmul({MatmulPrecision::highest, both});
        EXPECT_EQ(matmul.fuses_gelu, cuda::Matmul::bf16);
        EXPECT_EQ(matmul.fuses_gelu_backward, cuda::Matmul::bf16 && both == 2);
    }
}

// The plan is made in the first call, whose tensors are aligned to 256 bytes.
TEST(Matmul, TensorsThatBeginAnywhereAtAMultipleOf16BytesAreTaken) {
    const Case x(6, 24, 16, 300);
    for (const int fuse_gelu : {2, 1, 0}) {
        cuda::Matmul matmul({MatmulPrecision::highest, fuse_gelu});
        const std::vector<Floats> expected = results_of(matmul, x, 0);
        for (const long by : {128, 8, 16, 24, 32}) { EXPECT_EQ(results_of(matmul, x, by), expected) << by; }
    }
}

// 512 + 1 is no bf16: a sum of parts that were rounded to bf16 on the way would lose the ones.
TEST(Matmul, SumsStayFp32UntilTheEnd) {
    cuda::Matmul matmul(MatmulPrecision::medium);
    const int N = 5, C = 64, OC = 8;
    Floats inp(size_t(N) * C, 1.0f), weight(size_t(OC) * C, 1.0f);
    for (int c = 0; c < OC; c++) {
        weight[size_t(c) * C] = 512.0f;
        weight[size_t(c) * C + C - 1] = -512.0f;
    }
    Stream stream;
    DeviceArray<floatX> device_inp(to_floatX(inp)), device_weight(to_floatX(weight)), out(size_t(N) * OC);
    cuda::matmul_forward(matmul, out, device_inp, device_weight, static_cast<floatX*>(nullptr), N, C, OC,
                         stream);
    stream.synchronize();
    EXPECT_EQ(to_floats(out.to_host()), Floats(size_t(N) * OC, float(C - 2)));
}

// The products of ones count the tokens. If k is split, cuBLASLt can lose the last ones.
TEST(Matmul, AGradientIsASumOverAllTokens) {
    cuda::Matmul matmul(MatmulPrecision::medium);
    for (const int N : {1, 63, 64, 65, 127, 2048 + 1, 2048 + 15, 4096 + 33}) {
        const int C = 64;
        Stream stream;
        DeviceArray<floatX> inp(to_floatX(Floats(size_t(N) * C, 1.0f)));
        DeviceArray<float> gram(Floats(C * C, 8.0f));
        cuda::matmul_gram(matmul, gram, inp, N, C, stream);
        stream.synchronize();
        EXPECT_EQ(gram.to_host(), Floats(C * C, float(N))) << N;
    }
}

// In the fp32 build: `highest` keeps 24 bits of the inputs, the others 11.
TEST(Matmul, PrecisionIsWhatTheDescriptionSays) {
    const float value = 1.0f + 0x1p-12f;  // in tf32: 1
    for (const auto precision : {MatmulPrecision::highest, MatmulPrecision::high, MatmulPrecision::medium}) {
        cuda::Matmul matmul(precision);
        const bool exact = precision == MatmulPrecision::highest;
        EXPECT_EQ(matmul.description(), bf16 ? "bf16, sums in fp32" : exact ? "fp32" : "tf32, sums in fp32");
        if (bf16) { continue; }
        const int N = 8, C = 8, OC = 8;
        Stream stream;
        DeviceArray<floatX> inp(to_floatX(Floats(N * C, value))), weight(to_floatX(Floats(OC * C, 1.0f)));
        DeviceArray<floatX> out(N * OC);
        cuda::matmul_forward(matmul, out, inp, weight, static_cast<floatX*>(nullptr), N, C, OC, stream);
        stream.synchronize();
        EXPECT_EQ(to_floats(out.to_host()), Floats(N * OC, exact ? 8.0f * value : 8.0f));
    }
}

TEST(Matmul, RefusesWhatItCannotMultiplyBeforeItBegins) {
    cuda::Matmul matmul(MatmulPrecision::highest);
    Stream stream;
    const int N = 4;
    DeviceArray<floatX> a(to_floatX(Floats(1024, 1.0f))), b(to_floatX(Floats(1024, 1.0f)));
    DeviceArray<floatX> out(to_floatX(Floats(1024, 7.0f)));
    auto forward = [&](floatX* result, const floatX* inp, const floatX* weight, int C, int OC) {
        cuda::matmul_forward(matmul, result, inp, weight, static_cast<floatX*>(nullptr), N, C, OC, stream);
    };
    EXPECT_THROW(forward(out, a, b, 12, 8), std::invalid_argument);
    EXPECT_THROW(forward(out, a, b, 8, 12), std::invalid_argument);
    EXPECT_THROW(forward(out, a, b, 8, 0), std::invalid_argument);
    EXPECT_THROW(forward(out, a, b, 0, 8), std::invalid_argument);
    EXPECT_THROW(cuda::matmul_forward(matmul, out, a, b, static_cast<floatX*>(nullptr), 0, 8, 8, stream),
                 std::invalid_argument);
    EXPECT_THROW(forward(out + 2, a, b, 8, 8), std::invalid_argument);
    EXPECT_THROW(forward(out, a + 2, b, 8, 8), std::invalid_argument);
    EXPECT_THROW(forward(out, a, b + 2, 8, 8), std::invalid_argument);
    floatX *none = nullptr, *bias = b + 2, *pre_gelu = out + 514;
    EXPECT_THROW(cuda::matmul_forward(matmul, out, a, b, bias, N, 8, 8, stream), std::invalid_argument);
    EXPECT_THROW(cuda::matmul_forward(matmul, out, a, b, none, N, 8, 8, stream, pre_gelu),
                 std::invalid_argument);
    EXPECT_EQ(to_floats(out.to_host()), Floats(1024, 7.0f));
}

#ifndef __CUDACC__
TEST(Matmul, ThePlanOfAShapeIsMadeOnce) {
    cuda::Matmul matmul(MatmulPrecision::highest);
    const long before = emulator::heuristics_asked();
    for (unsigned seed = 0; seed < 3; seed++) { expect_forward(matmul, Case(5, 16, 8, seed), true, false); }
    EXPECT_EQ(emulator::heuristics_asked(), before + 1);
    expect_backward(matmul, Case(5, 16, 8, 1));
    expect_backward(matmul, Case(5, 16, 8, 1), false);
    EXPECT_EQ(emulator::heuristics_asked(), before + 3);
}

// inp^T inp of random values, written over `begin`.
Floats gram(cuda::Matmul& matmul, float begin) {
    const int N = 64, C = 512;
    std::mt19937 random(1);
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    Floats values(size_t(N) * C);
    for (float& value : values) { value = uniform(random); }
    Stream stream;
    DeviceArray<floatX> inp(to_floatX(values));
    DeviceArray<float> out(Floats(size_t(C) * C, begin));
    cuda::matmul_gram(matmul, out, inp, N, C, stream);
    stream.synchronize();
    return out.to_host();
}

TEST(Matmul, AGramMatrixOverwritesWhatIsThere) {
    cuda::Matmul matmul(MatmulPrecision::highest);
    EXPECT_EQ(gram(matmul, 0.0f), gram(matmul, NAN));
}

// While a collective holds one SM of the emulator's four, the library refuses all other products.
TEST(Matmul, ProductsAreCutForTheSmsThatAnExchangeLeaves) {
    cuda::Matmul matmul({MatmulPrecision::highest, -1, 1});
    Stream main, stream;
    DeviceArray<floatX> inp(to_floatX(Floats(64, 1.0f))), weight(to_floatX(Floats(64, 1.0f))), out(64);
    const auto multiply = [&](bool leaves_sms) {
        matmul.leaves_sms = leaves_sms;
        cuda::matmul_forward(matmul, out, inp, weight, static_cast<floatX*>(nullptr), 8, 8, 8, main);
    };
    ncclUniqueId id;
    ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.minCTAs = config.maxCTAs = 1;
    ncclComm_t comm = nullptr, other = nullptr;
    std::thread second([&] { EXPECT_EQ(ncclCommInitRankConfig(&other, 2, id, 1, &config), ncclSuccess); });
    EXPECT_EQ(ncclCommInitRankConfig(&comm, 2, id, 0, &config), ncclSuccess);
    second.join();
    EXPECT_NO_THROW(multiply(false));
    DeviceArray<float> values(Floats(4, 1.0f));
    std::thread waits([&] { ncclAllReduce(values, values, 4, ncclFloat, ncclSum, comm, stream); });
    while (emulator::sms_of_communicators() == 0) { std::this_thread::yield(); }
    EXPECT_NO_THROW(multiply(true));
    EXPECT_THROW(multiply(false), std::runtime_error);
    ncclCommAbort(comm);
    waits.join();
    ncclCommAbort(other);
    EXPECT_NO_THROW(multiply(false));
    main.synchronize();
}

// The library's refusal (here of an output in the host's memory) becomes an error that names the shape.
TEST(Matmul, AnErrorOfTheLibraryNamesTheShape) {
    cuda::Matmul matmul(MatmulPrecision::highest);
    Stream stream;
    DeviceArray<floatX> a(to_floatX(Floats(64, 1.0f))), b(to_floatX(Floats(64, 1.0f)));
    alignas(16) static floatX out[64];
    try {
        cuda::matmul_forward(matmul, out, a, b, static_cast<floatX*>(nullptr), 8, 8, 8, stream);
        FAIL() << "no error";
    } catch (const std::runtime_error& error) {
        const std::string what = error.what();
        EXPECT_NE(what.find("matmul forward of N 8, C 8, OC 8"), std::string::npos) << what;
        EXPECT_NE(what.find("CUBLASLT_LOG_LEVEL"), std::string::npos) << what;
    }
}
#endif

// Where GELU is not fused. More than two blocks of columns, rows of several chunks and a part of one, fewer
// rows than warps. The product is rounded to floatX once. The derivative is a sum of two terms of at most 1.2
// together, which cancel near x = -0.75, so that their roundings show next to it: in bf16, whose exponential
// and quotient are approximate, 2^-19 of dinp; in fp32, where nvcc fuses products and sums, one unit of each
// and one of the exponent, 2^-21. The emulator's in fp32 is the CPU's. So is the sum over rows, but for the
// order of its terms.
TEST(Matmul, MultiplyByGeluDerivativeTakesEveryValueAndSumsColumns) {
#ifdef __CUDACC__
    const float of_dinp = cuda::Matmul::bf16 ? 0x1p-19f : 0x1p-21f;
#else
    const float of_dinp = cuda::Matmul::bf16 ? 0x1p-19f : 0.0f;
#endif
    for (const auto& [rows, columns] :
         {std::pair<int, int>{1, 8}, {7, 264}, {257, 520}, {300, 72}, {520, 776}, {2310, 8}}) {
        const long n = long(rows) * columns;
        const Floats dinp = small_multiples(n, 0.5f, unsigned(n)), x = small_multiples(n, 0.75f, 9);
        const Floats before = small_multiples(columns, 1.0f, 7);
        Floats expected;
        std::vector<double> sums(before.begin(), before.end()), sizes(before.size());
        for (size_t i = 0; i < dinp.size(); i++) {
            expected.push_back(dinp[i] * gelu_derivative(x[i]));
            sums[i % before.size()] += expected[i];
            sizes[i % before.size()] += std::fabs(dinp[i]);
        }
        Floats first;
        for_each_order(3, [&, rows = rows, columns = columns] {
            Stream stream;
            cuda::GradientSums gradients;
            DeviceArray<floatX> device_dinp(to_floatX(dinp)), device_x(to_floatX(x));
            DeviceArray<float> device_sums(before);
            cuda::multiply_by_gelu_derivative(device_dinp, device_sums, device_x, rows, columns, gradients,
                                              stream);
            gradients.add_pending(stream);
            stream.synchronize();
            expect_near(device_dinp, expected, dinp, of_dinp);
            const Floats result = device_sums.to_host();
            for (size_t c = 0; c < sums.size(); c++) {
                ASSERT_NEAR(result[c], sums[c], (0x1p-20 + of_dinp) * (sizes[c] + 3)) << "column " << c;
            }
            if (first.empty()) { first = result; }
            EXPECT_EQ(result, first) << "in another order of blocks and threads";
        });
    }
}

}  // namespace
