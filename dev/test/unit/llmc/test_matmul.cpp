// The fully connected layer on oneDNN: fp32 against double precision, bf16 against products of inputs that
// were rounded to bf16 by hand, and the GELU and bias that are fused into it.
#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "dev/test/unit/in_bf16.h"
#include "llmc/cpu/gelu.h"
#include "llmc/cpu/matmul.h"
#include "llmc/random.h"

namespace test_matmul {

using Doubles = std::vector<double>;
using Floats = std::vector<float>;

Floats random_floats(long n, uint64_t seed) {
    Floats values(static_cast<size_t>(n));
    for (long i = 0; i < n; i++) {
        values[size_t(i)] = standard_normal(seed, RandomUse::parameters, uint64_t(i));
    }
    return values;
}

// out (M,N) = a b, in double; a[i,k] at i * a_row + k * a_column, and so for b.
Doubles product(const Floats& a, int a_row, int a_column, const Floats& b, int b_row, int b_column, int M,
                int N, int K) {
    Doubles out(size_t(M) * size_t(N));
    for (int i = 0; i < M; i++) {
        for (int k = 0; k < K; k++) {
            for (int j = 0; j < N; j++) {
                out[size_t(i) * size_t(N) + size_t(j)] +=
                    double(a[size_t(i * a_row + k * a_column)]) * b[size_t(k * b_row + j * b_column)];
            }
        }
    }
    return out;
}

double relative_error(const Floats& values, const Doubles& expected) {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < values.size(); i++) {
        difference += std::pow(values[i] - expected[i], 2);
        norm += std::pow(expected[i], 2);
    }
    return std::sqrt(difference / norm);
}

// Rounds a float to bf16 by arithmetic instead of bit operations: 8 significant bits, ties to even.
float rounded_to_bf16(float value) {
    int exponent;
    const float fraction = std::frexp(value, &exponent);
    return std::ldexp(std::nearbyint(std::ldexp(fraction, 8)), exponent - 8);
}

cpu::Stream main_stream;

struct Case {
    int N, C, OC;
    Floats inp, weight, bias, dout, pre_gelu;
    Floats out, out_pre_gelu, dinp, dweight, dbias;

    Case(int N, int C, int OC)
        : N(N), C(C), OC(OC), inp(random_floats(long(N) * C, 1)), weight(random_floats(long(OC) * C, 2)),
          bias(random_floats(OC, 3)), dout(random_floats(long(N) * OC, 4)),
          pre_gelu(random_floats(long(N) * C, 5)), out(dout.size(), NAN), out_pre_gelu(dout.size(), NAN),
          dinp(inp.size(), NAN), dweight(weight.size()),
          dbias(size_t(C)) {}
    void forward(cpu::Matmul& matmul, bool with_bias, bool with_gelu) {
        const float* added = with_bias ? bias.data() : nullptr;
        if (with_gelu) {
            cpu::matmul_forward(matmul, out.data(), inp.data(), weight.data(), added, N, C, OC, main_stream,
                                out_pre_gelu.data());
        } else {
            cpu::matmul_forward(matmul, out.data(), inp.data(), weight.data(), added, N, C, OC, main_stream);
        }
    }
    void backward(cpu::Matmul& matmul, const cpu::GradientSums& sums = {}) {
        cpu::matmul_backward(matmul, dinp.data(), dweight.data(), dout.data(), inp.data(), weight.data(), N,
                             C, OC, sums, main_stream);
    }
    void gelu_backward(cpu::Matmul& matmul, const cpu::GradientSums& sums = {}) {
        cpu::matmul_gelu_backward(matmul, dinp.data(), dweight.data(), dbias.data(), dout.data(), inp.data(),
                                  pre_gelu.data(), weight.data(), N, C, OC, sums, main_stream);
    }
    Doubles exact_out(bool with_bias) const {
        Doubles exact = product(inp, C, 1, weight, 1, C, N, OC, C);
        for (size_t i = 0; with_bias && i < exact.size(); i++) { exact[i] += bias[i % size_t(OC)]; }
        return exact;
    }
};

const std::vector<std::array<int, 3>> shapes = {  // N, C, OC
    {1, 1, 1}, {1, 16, 48}, {7, 33, 5}, {65, 48, 130}, {130, 100, 64}};

TEST(Matmul, highest_precision_matches_double_precision) {
    cpu::Matmul matmul(MatmulPrecision::highest);
    for (auto [N, C, OC] : shapes) {
        SCOPED_TRACE(testing::Message() << "N " << N << " C " << C << " OC " << OC);
        for (bool with_bias : {true, false}) {
            Case x(N, C, OC);
            x.forward(matmul, with_bias, false);
            x.backward(matmul);
            EXPECT_LT(relative_error(x.out, x.exact_out(with_bias)), 1e-6);
            EXPECT_LT(relative_error(x.dinp, product(x.dout, OC, 1, x.weight, C, 1, N, C, OC)), 1e-6);
            EXPECT_LT(relative_error(x.dweight, product(x.dout, 1, OC, x.inp, C, 1, OC, C, N)), 1e-6);
        }
    }
}

// The products of rounded inputs are exact in fp32, so only the order of the fp32 sums is left.
TEST(Matmul, medium_precision_is_the_product_of_inputs_rounded_to_bf16) {
    cpu::Matmul matmul(MatmulPrecision::medium);
    const bool rounds = cpu::cpu_has_fast_bf16();
    for (auto [N, C, OC] : shapes) {
        SCOPED_TRACE(testing::Message() << "N " << N << " C " << C << " OC " << OC);
        Case x(N, C, OC), exact = x;
        x.forward(matmul, true, false);
        x.backward(matmul);
        for (Floats* values : {&exact.inp, &exact.weight, &exact.dout}) {
            for (float& value : *values) { value = rounds ? rounded_to_bf16(value) : value; }
        }
        EXPECT_LT(relative_error(x.out, exact.exact_out(true)), 1e-6);
        EXPECT_LT(relative_error(x.dinp, product(exact.dout, OC, 1, exact.weight, C, 1, N, C, OC)), 1e-6);
        EXPECT_LT(relative_error(x.dweight, product(exact.dout, 1, OC, exact.inp, C, 1, OC, C, N)), 1e-6);
    }
}

// Rounding to 8 bits has an error of at most 2^-9 per factor, about 2^-9 / sqrt(3) on average: 1.6e-3 for two
// factors.
TEST(Matmul, medium_precision_is_near_highest) {
    cpu::Matmul highest(MatmulPrecision::highest), medium(MatmulPrecision::medium);
    Case x(130, 200, 96), y = x;
    x.forward(highest, true, false);
    y.forward(medium, true, false);
    EXPECT_LT(relative_error(y.out, Doubles(x.out.begin(), x.out.end())), 3e-3);
    EXPECT_EQ(cpu::cpu_has_fast_bf16(), x.out != y.out);
    EXPECT_EQ(highest.description(), "fp32");
    EXPECT_EQ(medium.description(), cpu::cpu_has_fast_bf16() ? "bf16, sums in fp32" : "fp32");
}

// The bits do not depend on who rounds, the product or the layer that wrote its input.
TEST(Matmul, an_array_in_bf16_gives_the_bits_of_one_that_the_product_rounds) {
    cpu::Matmul matmul(MatmulPrecision::medium), highest(MatmulPrecision::highest);
    Case x(65, 48, 130);
    std::vector<uint16_t> rounded = in_bf16(x.inp), pre_gelu = in_bf16(x.pre_gelu);
    Case y = x;
    const cpu::Activation inp(rounded.data());
    cpu::GradientSums sums;
    EXPECT_THROW(highest.round_inp(inp, 1), std::logic_error);
    if (!cpu::cpu_has_fast_bf16()) { GTEST_SKIP() << "products do not round here"; }
    x.forward(matmul, true, false);
    x.gelu_backward(matmul);
    cpu::matmul_forward(matmul, y.out.data(), inp, y.weight.data(), y.bias.data(), 65, 48, 130, main_stream);
    cpu::matmul_gelu_backward(matmul, y.dinp.data(), y.dweight.data(), y.dbias.data(), y.dout.data(), inp,
                              y.pre_gelu.data(), y.weight.data(), 65, 48, 130, sums, main_stream);
    EXPECT_EQ(y.out, x.out);
    EXPECT_EQ(y.dweight, x.dweight);
    EXPECT_EQ(y.dinp, x.dinp);

    // Outputs and gradients that are rounded as they are stored.
    cpu::GradientSums overwrite;
    overwrite.adds = false;
    std::vector<uint16_t> out(x.out.size()), dinp(x.dinp.size());
    cpu::matmul_forward(matmul, cpu::Activation(out.data()), inp, y.weight.data(), y.bias.data(), 65, 48, 130,
                        main_stream);
    EXPECT_EQ(out, in_bf16(x.out));
    cpu::matmul_gelu_backward(matmul, cpu::Activation(dinp.data()), y.dweight.data(), y.dbias.data(),
                              y.dout.data(), inp, cpu::Activation(pre_gelu.data()), y.weight.data(), 65, 48,
                              130, overwrite, main_stream);
    EXPECT_EQ(dinp, in_bf16(x.dinp));
    EXPECT_EQ(y.dbias, x.dbias) << "is the sum of what is not rounded";
    Case next(65, 64, 48), next_y = next;
    next.dout = x.dinp;
    next.backward(matmul);
    cpu::matmul_backward(matmul, next_y.dinp.data(), next_y.dweight.data(), cpu::Activation(dinp.data()),
                         next_y.inp.data(), next_y.weight.data(), 65, 64, 48, sums, main_stream);
    EXPECT_EQ(next_y.dinp, next.dinp);
    EXPECT_EQ(next_y.dweight, next.dweight);
}

TEST(Matmul, bf16_rounding_is_to_nearest_even_and_keeps_what_is_not_a_number) {
    for (uint64_t bits = 0; bits < (1ull << 32); bits += 4099) {
        const float value = bits_to_float(uint32_t(bits));
        const float rounded = bits_to_float(uint32_t(cpu::bf16_bits(value)) << 16);
        if (std::isnan(value)) {
            EXPECT_TRUE(std::isnan(rounded));
        } else if (std::fabs(value) > 1e-37f && std::fabs(value) < 3.3e38f) {
            EXPECT_EQ(rounded, rounded_to_bf16(value)) << value;
        }
    }
    EXPECT_EQ(cpu::bf16_bits(INFINITY), 0x7f80);
    EXPECT_EQ(cpu::bf16_bits(bits_to_float(0x7fffffff)), 0x7fc0);  // adding to these bits would wrap around
}

TEST(Matmul, forward_applies_gelu_and_keeps_its_input) {
    cpu::Matmul matmul(MatmulPrecision::highest);
    Case plain(65, 40, 52), fused = plain;
    plain.forward(matmul, true, false);
    fused.forward(matmul, true, true);
    EXPECT_EQ(fused.out_pre_gelu, plain.out);
    for (size_t i = 0; i < plain.out.size(); i++) { EXPECT_NEAR(fused.out[i], gelu(plain.out[i]), 1e-6); }
}

TEST(Matmul, gelu_backward_applies_the_derivative_of_gelu_to_dinp_and_sums_its_rows) {
    for (MatmulPrecision precision : {MatmulPrecision::highest, MatmulPrecision::medium}) {
        cpu::Matmul matmul(precision);
        Case plain(130, 40, 52), fused = plain;
        plain.backward(matmul);
        fused.gelu_backward(matmul);
        for (size_t i = 0; i < plain.dinp.size(); i++) {
            EXPECT_NEAR(fused.dinp[i], plain.dinp[i] * gelu_derivative(plain.pre_gelu[i]), 1e-5);
        }
        EXPECT_EQ(fused.dweight, plain.dweight);
        const Floats ones(130, 1.0f);
        EXPECT_LT(relative_error(fused.dbias, product(ones, 0, 1, fused.dinp, 40, 1, 1, 40, 130)), 1e-6);
    }
}

TEST(Matmul, backward_adds_to_dweight_and_dbias_and_overwrites_dinp) {
    for (MatmulPrecision precision : {MatmulPrecision::highest, MatmulPrecision::high}) {
        cpu::Matmul matmul(precision);
        Case once(130, 40, 52), twice = once;
        once.gelu_backward(matmul);
        twice.gelu_backward(matmul);
        twice.gelu_backward(matmul);
        EXPECT_EQ(once.dinp, twice.dinp);
        Doubles dweight(once.dweight.begin(), once.dweight.end());
        Doubles dbias(once.dbias.begin(), once.dbias.end());
        for (double& value : dweight) { value *= 2; }
        for (double& value : dbias) { value *= 2; }
        EXPECT_LT(relative_error(twice.dweight, dweight), 1e-6);
        EXPECT_LT(relative_error(twice.dbias, dbias), 1e-6);
    }
}

TEST(Matmul, backward_overwrites_dweight_and_dbias_in_the_first_micro_step) {
    cpu::GradientSums overwrite;
    overwrite.adds = false;
    for (MatmulPrecision precision : {MatmulPrecision::highest, MatmulPrecision::high}) {
        cpu::Matmul matmul(precision);
        Case added(130, 40, 52), overwritten = added;
        for (Floats* one : {&overwritten.dweight, &overwritten.dbias}) {
            std::fill(one->begin(), one->end(), NAN);
        }
        added.gelu_backward(matmul);
        overwritten.gelu_backward(matmul, overwrite);
        EXPECT_EQ(overwritten.dweight, added.dweight);
        EXPECT_EQ(overwritten.dbias, added.dbias);
    }
}

TEST(Matmul, a_product_does_not_depend_on_those_before_it) {
    cpu::Matmul used(MatmulPrecision::medium), fresh(MatmulPrecision::medium);
    Case large(130, 96, 200), small(7, 96, 33), expected = small;
    large.forward(used, true, true);
    large.gelu_backward(used);
    for (auto [x, matmul] : {std::pair(&small, &used), {&expected, &fresh}}) {
        x->forward(*matmul, true, false);
        x->backward(*matmul);
    }
    EXPECT_EQ(small.out, expected.out);
    EXPECT_EQ(small.dinp, expected.dinp);
    EXPECT_EQ(small.dweight, expected.dweight);
}

TEST(Matmul, column_sums_have_the_same_bits_at_any_thread_count) {
    const Floats inp = random_floats(333 * 50, 1);
    const int before = omp_get_max_threads();
    Floats first;
    for (int threads : {1, 2, 3, 5}) {
        omp_set_num_threads(threads);
        Floats sums(50, 1.0f);
        cpu::add_column_sums({sums.data()}, 333, 50, cpu::GradientSums(), [&](float* sum, long n) {
            for (size_t i = 0; i < 50; i++) { sum[i] += inp[size_t(n) * 50 + i]; }
        });
        if (threads == 1) { first = sums; }
        EXPECT_EQ(memcmp(first.data(), sums.data(), sums.size() * sizeof(float)), 0) << threads << " threads";
    }
    omp_set_num_threads(before);
}

}  // namespace test_matmul
