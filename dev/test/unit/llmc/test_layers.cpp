// The CPU's layers. Forward: against the same formula written naively in double. Backward: against central
// finite differences of that double formula, so that no gradient is derived twice. And: the number of threads
// changes no bit.
#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "dev/test/unit/in_bf16.h"
#include "llmc/cpu/adamw.h"
#include "llmc/cpu/attention.h"
#include "llmc/cpu/classifier.h"
#include "llmc/cpu/encoder.h"
#include "llmc/cpu/gelu.h"
#include "llmc/cpu/global_norm.h"
#include "llmc/cpu/layernorm.h"
#include "llmc/random.h"

namespace test_layers {

using Doubles = std::vector<double>;
using Floats = std::vector<float>;

Floats random_floats(long n, uint64_t seed, float scale = 1.0f) {
    Floats values(static_cast<size_t>(n));
    for (long i = 0; i < n; i++) {
        values[size_t(i)] = scale * standard_normal(seed, RandomUse::parameters, uint64_t(i));
    }
    return values;
}

std::vector<int> random_tokens(long n, uint64_t seed, int vocabulary) {
    std::vector<int> tokens(static_cast<size_t>(n));
    for (long i = 0; i < n; i++) {
        tokens[size_t(i)] =
            int(random_bits(seed, RandomUse::sampling, uint64_t(i)).v[0] % uint32_t(vocabulary));
    }
    return tokens;
}

Doubles doubles(const Floats& values) { return Doubles(values.begin(), values.end()); }

double dot(const Doubles& a, const Floats& b) {
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

template <class Expected>
double relative_error(const Floats& values, const Expected& expected) {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < values.size(); i++) {
        difference += std::pow(values[i] - double(expected[i]), 2);
        norm += std::pow(double(expected[i]), 2);
    }
    return std::sqrt(difference / (norm + 1e-30));
}

// Compares gradients with central differences of `loss` at `x`, at up to 60 places spread over x.
void expect_gradient(const Floats& gradient, const Floats& x,
                     const std::function<double(const Doubles&)>& loss, double tolerance = 2e-5) {
    double largest = 0;
    for (float g : gradient) { largest = std::max(largest, double(std::fabs(g))); }
    ASSERT_GT(largest, 0);
    Doubles at = doubles(x);
    const size_t places = std::min<size_t>(60, x.size()), step = x.size() / places;
    for (size_t place = 0; place < places; place++) {
        const size_t i = std::min(place * step + place % 3, x.size() - 1);
        const double h = 1e-5, before = at[i];
        at[i] = before + h;
        const double above = loss(at);
        at[i] = before - h;
        const double below = loss(at);
        at[i] = before;
        EXPECT_NEAR(gradient[i], (above - below) / (2 * h), tolerance * largest) << "at " << i;
    }
}

// Runs `compute` with 1, 2, 3 and 5 threads and expects the same bits.
void expect_same_bits_at_any_thread_count(const std::function<Floats()>& compute) {
    const int before = omp_get_max_threads();
    omp_set_num_threads(1);
    const Floats one = compute();
    for (int threads : {2, 3, 5}) {
        omp_set_num_threads(threads);
        const Floats many = compute();
        EXPECT_EQ(memcmp(one.data(), many.data(), one.size() * sizeof(float)), 0) << threads << " threads";
    }
    omp_set_num_threads(before);
}

cpu::Stream main_stream;

// ---------------------------------------------------------------------------------------------------------
// - Functions of one value

TEST(Exponential, is_within_one_ulp_everywhere) {
    double worst = 0;
    for (uint64_t bits = 0; bits < (1ull << 32); bits += 1009) {
        const float x = bits_to_float(uint32_t(bits));
        if (std::isnan(x)) { continue; }
        const double exact = std::exp(double(x));
        const float value = exponential(x);
        if (exact > double(std::numeric_limits<float>::max())) {
            EXPECT_GE(value, std::numeric_limits<float>::max()) << x;
            continue;
        }
        if (exact < 0x1p-125) {
            EXPECT_EQ(value, 0.0f) << x;
            continue;
        }
        worst = std::max(worst, std::fabs(value - exact) / std::ldexp(1.0, std::ilogb(exact) - 23));
    }
    EXPECT_LT(worst, 1.0);
}

TEST(Exponential, is_right_at_the_ends) {
    EXPECT_EQ(exponential(0.0f), 1.0f);
    EXPECT_EQ(exponential(INFINITY), INFINITY);
    EXPECT_EQ(exponential(-INFINITY), 0.0f);
    EXPECT_EQ(exponential(88.72283f), std::exp(88.72283f));  // just below the largest float
    EXPECT_EQ(exponential(88.72284f), INFINITY);
    EXPECT_NEAR(exponential(-86.6f), std::exp(-86.6f), 0x1p-148f);
    EXPECT_EQ(exponential(-86.7f), 0.0f);
    EXPECT_EQ(exponential(-1e30f), 0.0f);
    EXPECT_TRUE(std::isnan(exponential(NAN)));
    EXPECT_TRUE(std::isnan(exponential(bits_to_float(0xffffffff))));
}

double gelu_exact(double x) {
    return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

TEST(Gelu, matches_the_tanh_form_and_its_derivative) {
    for (float x = -12; x < 12; x += 0.00137f) {
        const double h = 1e-5, slope = (gelu_exact(x + h) - gelu_exact(x - h)) / (2 * h);
        EXPECT_NEAR(gelu(x), gelu_exact(x), 2e-7 * std::max(1.0, std::fabs(double(x)))) << x;
        EXPECT_NEAR(gelu_derivative(x), slope, 3e-6) << x;
    }
    EXPECT_EQ(gelu(0.0f), 0.0f);
    EXPECT_EQ(gelu(1e30f), 1e30f);
    EXPECT_EQ(gelu(-1e30f), 0.0f);
}

TEST(Gelu, of_an_array_is_that_of_its_values) {
    const Floats inp = random_floats(1003, 1, 3);
    Floats out(inp.size());
    cpu::gelu_forward(out.data(), inp.data(), long(inp.size()), main_stream);
    for (size_t i = 0; i < inp.size(); i++) { EXPECT_NEAR(out[i], gelu_exact(inp[i]), 1e-6); }
}

// ---------------------------------------------------------------------------------------------------------
// - Embedding

TEST(Encoder, adds_token_and_position) {
    const int B = 3, T = 7, C = 70, V = 11;
    const Floats wte = random_floats(V * C, 1), wpe = random_floats(T * C, 2);
    const std::vector<int> inp = random_tokens(B * T, 3, V);
    Floats out(size_t(B * T * C));
    cpu::encoder_forward(out.data(), inp.data(), wte.data(), wpe.data(), B, T, C, main_stream);
    for (int i = 0; i < B * T * C; i++) {
        EXPECT_EQ(out[size_t(i)],
                  wte[size_t(inp[size_t(i / C)] * C + i % C)] + wpe[size_t(i / C % T * C + i % C)]);
    }
}

TEST(Encoder, backward_adds_to_gradients_of_repeated_tokens_in_order) {
    const int B = 4, T = 9, C = 130, V = 5;  // 36 tokens of 5: all repeat
    const Floats dout = random_floats(B * T * C, 1), before = random_floats(V * C, 2);
    const std::vector<int> inp = random_tokens(B * T, 3, V);
    expect_same_bits_at_any_thread_count([&] {
        Floats dwte = before, dwpe(size_t(T * C), 1.0f), expected = before;
        cpu::encoder_backward(dwte.data(), dwpe.data(), dout.data(), inp.data(), B, T, C, main_stream);
        for (int i = 0; i < B * T * C; i++) {
            expected[size_t(inp[size_t(i / C)] * C + i % C)] += dout[size_t(i)];
        }
        EXPECT_EQ(dwte, expected);
        for (int i = 0; i < T * C; i++) {
            float sum = 1.0f;
            for (int b = 0; b < B; b++) { sum += dout[size_t(b * T * C + i)]; }
            EXPECT_EQ(dwpe[size_t(i)], sum);
        }
        dwte.insert(dwte.end(), dwpe.begin(), dwpe.end());
        return dwte;
    });
}

// ---------------------------------------------------------------------------------------------------------
// - LayerNorm

Doubles layernorm_exact(const Doubles& inp, const Doubles& weight, const Doubles& bias) {
    const size_t C = weight.size();
    Doubles out(inp.size());
    for (size_t row = 0; row < inp.size(); row += C) {
        double mean = 0, variance = 0;
        for (size_t c = 0; c < C; c++) { mean += inp[row + c] / double(C); }
        for (size_t c = 0; c < C; c++) { variance += std::pow(inp[row + c] - mean, 2) / double(C); }
        for (size_t c = 0; c < C; c++) {
            out[row + c] = (inp[row + c] - mean) / std::sqrt(variance + 1e-5) * weight[c] + bias[c];
        }
    }
    return out;
}

cpu::GradientSums sums;

// The sums over rows, as cpu::add_column_sums adds them.
Floats sums_of_rows(const Floats& rows, int columns) {
    Floats result(size_t(columns), 0.0f);
    cpu::add_column_sums({result.data()}, int(rows.size()) / columns, columns, sums, [&](float* sum, long n) {
        for (int i = 0; i < columns; i++) { sum[i] += rows[size_t(n * columns + i)]; }
    });
    return result;
}

struct LayerNormCase {
    int N, C;
    Floats inp, weight, bias, dout, out, mean, rstd, dinp, dweight, dbias, dprojb;

    LayerNormCase(int N, int C)
        : N(N), C(C), inp(random_floats(long(N) * C, 1)), weight(random_floats(C, 2)),
          bias(random_floats(C, 3)), dout(random_floats(long(N) * C, 4)), out(inp.size()), mean(size_t(N)),
          rstd(size_t(N)), dinp(inp.size()), dweight(weight.size()), dbias(bias.size()),
          dprojb(bias.size()) {
        for (float& x : inp) { x = 0.7f * x + 3.0f; }
    }
    void run() {
        cpu::layernorm_forward(out.data(), mean.data(), rstd.data(), inp.data(), weight.data(), bias.data(),
                               N, C, main_stream);
        cpu::layernorm_backward(dinp.data(), dweight.data(), dbias.data(), dprojb.data(), dout.data(),
                                inp.data(), weight.data(), mean.data(), rstd.data(), N, C, sums, main_stream);
    }
};

TEST(LayerNorm, forward_and_backward_match_double_precision) {
    for (auto [N, C] : {std::pair(1, 1), {7, 16}, {65, 33}, {130, 100}, {3, 1600}}) {
        SCOPED_TRACE(testing::Message() << "N " << N << " C " << C);
        LayerNormCase x(N, C);
        x.run();
        const Doubles inp = doubles(x.inp), weight = doubles(x.weight), bias = doubles(x.bias);
        EXPECT_LT(relative_error(x.out, layernorm_exact(inp, weight, bias)), 1e-5);
        if (C == 1) { continue; }  // every row is its mean: dinp and dweight are 0
        expect_gradient(x.dinp, x.inp,
                        [&](const Doubles& at) { return dot(layernorm_exact(at, weight, bias), x.dout); });
        expect_gradient(x.dweight, x.weight,
                        [&](const Doubles& at) { return dot(layernorm_exact(inp, at, bias), x.dout); });
        expect_gradient(x.dbias, x.bias,
                        [&](const Doubles& at) { return dot(layernorm_exact(inp, weight, at), x.dout); });
    }
}

TEST(LayerNorm, backward_sums_the_rows_of_dinp_for_the_projection_before) {
    LayerNormCase x(130, 33);
    x.run();
    EXPECT_EQ(x.dprojb, sums_of_rows(x.dinp, 33));
    LayerNormCase none(130, 33);
    cpu::layernorm_forward(none.out.data(), none.mean.data(), none.rstd.data(), none.inp.data(),
                           none.weight.data(), none.bias.data(), 130, 33, main_stream);
    cpu::layernorm_backward(none.dinp.data(), none.dweight.data(), none.dbias.data(), nullptr,
                            none.dout.data(), none.inp.data(), none.weight.data(), none.mean.data(),
                            none.rstd.data(), 130, 33, sums, main_stream);
    EXPECT_EQ(none.dweight, x.dweight);
    EXPECT_EQ(none.dbias, x.dbias);
    EXPECT_EQ(none.dinp, x.dinp);
}

TEST(LayerNorm, backward_adds_to_all_three_gradients) {
    LayerNormCase once(65, 48), added(65, 48);
    once.run();
    added.run();
    added.run();
    for (auto [gradient, half] : {std::pair(&added.dinp, &once.dinp), {&added.dweight, &once.dweight},
                                  {&added.dbias, &once.dbias}}) {
        Floats twice = *half;
        for (float& g : twice) { g *= 2; }
        EXPECT_LT(relative_error(*gradient, twice), 1e-6);
    }
}

TEST(LayerNorm, fused_residual_is_addition_then_layernorm) {
    LayerNormCase x(65, 100);
    const Floats other = random_floats(65 * 100, 9);
    Floats residual(other.size()), normed(other.size()), mean(65), rstd(65);
    cpu::fused_residual_forward(residual.data(), normed.data(), mean.data(), rstd.data(), x.inp.data(),
                                other.data(), x.weight.data(), x.bias.data(), 65, 100, main_stream);
    for (size_t i = 0; i < other.size(); i++) { x.inp[i] += other[i]; }
    x.run();
    EXPECT_EQ(residual, x.inp);
    EXPECT_EQ(normed, x.out);
    EXPECT_EQ(mean, x.mean);
    EXPECT_EQ(rstd, x.rstd);
}

TEST(LayerNorm, gives_the_same_bits_at_any_thread_count) {
    expect_same_bits_at_any_thread_count([] {
        LayerNormCase x(333, 80);
        x.run();
        x.dinp.insert(x.dinp.end(), x.dweight.begin(), x.dweight.end());
        x.dinp.insert(x.dinp.end(), x.dbias.begin(), x.dbias.end());
        x.dinp.insert(x.dinp.end(), x.dprojb.begin(), x.dprojb.end());
        return x.dinp;
    });
}

// Stored in bf16, the outputs of LayerNorm and GELU are those in fp32, rounded.
TEST(Activation, holds_the_values_rounded) {
    const int N = 65, C = 67;  // in more than one chunk, with a rest
    Floats a = random_floats(N * C, 1);
    std::vector<uint16_t> a_in_bf16 = in_bf16(a);
    const Floats b = random_floats(N * C, 2), weight = random_floats(C, 3),
                 bias = random_floats(C, 4);
    Floats residual(a.size()), mean(N), rstd(N), exact(a.size());
    cpu::ActivationBuffer fp32(N * C, false), bf16(N * C, true);
    const auto expect_rounded = [&](const auto& compute) {
        compute(cpu::Activation(fp32));
        compute(cpu::Activation(bf16));
        cpu::Activation(fp32).visit([&](auto* values) { std::copy_n(values, N * C, exact.begin()); });
        std::vector<uint16_t> halves(exact.size());
        cpu::Activation(bf16).visit([&](auto* values) { std::copy_n(values, N * C, halves.begin()); });
        for (size_t i = 0; i < exact.size(); i++) { ASSERT_EQ(halves[i], cpu::bf16_bits(exact[i])) << i; }
    };
    expect_rounded([&](cpu::Activation out) {
        const cpu::Activation inp = out.is_bf16() ? cpu::Activation(a_in_bf16.data()) : a.data();
        cpu::gelu_forward(out, inp, N * C, main_stream);
    });
    EXPECT_THROW(cpu::gelu_forward(bf16, a.data(), N * C, main_stream), std::logic_error);
    expect_rounded([&](cpu::Activation out) {
        cpu::layernorm_forward(out, mean.data(), rstd.data(), a.data(), weight.data(), bias.data(), N, C,
                               main_stream);
    });
    expect_rounded([&](cpu::Activation out) {
        cpu::fused_residual_forward(residual.data(), out, mean.data(), rstd.data(), a.data(), b.data(),
                                    weight.data(), bias.data(), N, C, main_stream);
    });
}

// ---------------------------------------------------------------------------------------------------------
// - Attention

struct AttentionCase {
    int B, T, C, NH;
    Floats qkv, dout, out, lse, dqkv, dqkvb;

    AttentionCase(int B, int T, int C, int NH, float scale = 1.0f)
        : B(B), T(T), C(C), NH(NH), qkv(random_floats(long(B) * T * 3 * C, 1, scale)),
          dout(random_floats(long(B) * T * C, 2)), out(dout.size()), lse(size_t(B) * size_t(NH) * size_t(T)),
          dqkv(qkv.size(), NAN), dqkvb(3 * size_t(C)) {}
    void run(bool bf16 = false) {
        cpu::attention_forward(out.data(), lse.data(), qkv.data(), B, T, C, NH, main_stream, bf16);
        cpu::attention_backward(dqkv.data(), dqkvb.data(), dout.data(), out.data(), qkv.data(), lse.data(), B,
                                T, C, NH, sums, main_stream, bf16);
    }
};

TEST(Attention, backward_sums_the_rows_of_dqkv_for_the_bias) {
    AttentionCase x(2, 128, 32, 2), uneven(2, 70, 32, 2);
    x.run();
    EXPECT_EQ(x.dqkvb, sums_of_rows(x.dqkv, 96));
    uneven.run();
    const Floats expected = sums_of_rows(uneven.dqkv, 96);  // in another order
    for (size_t i = 0; i < 96; i++) { EXPECT_NEAR(uneven.dqkvb[i], expected[i], 1e-5); }
}

TEST(Attention, in_bf16_is_that_in_fp32_rounded) {
    AttentionCase x(2, 70, 32, 2), y = x;
    std::vector<uint16_t> qkv = in_bf16(x.qkv), out(x.out.size()), dqkv(x.dqkv.size());
    cpu::attention_forward(cpu::Activation(out.data()), y.lse.data(), cpu::Activation(qkv.data()), 2, 70, 32,
                           2, main_stream, false);
    cpu::attention_forward(x.out.data(), x.lse.data(), x.qkv.data(), 2, 70, 32, 2, main_stream, false);
    EXPECT_EQ(out, in_bf16(x.out));  // from here on it is the same in fp32
    EXPECT_EQ(y.lse, x.lse);
    cpu::attention_backward(cpu::Activation(dqkv.data()), y.dqkvb.data(), x.dout.data(),
                            cpu::Activation(out.data()), cpu::Activation(qkv.data()), x.lse.data(), 2, 70, 32,
                            2, sums, main_stream, false);
    cpu::attention_backward(x.dqkv.data(), x.dqkvb.data(), x.dout.data(), x.out.data(), x.qkv.data(),
                            x.lse.data(), 2, 70, 32, 2, sums, main_stream, false);
    // Sums of dout * out have another order.
    for (size_t i = 0; i < x.dqkvb.size(); i++) { EXPECT_NEAR(y.dqkvb[i], x.dqkvb[i], 1e-5); }
    for (size_t i = 0; i < dqkv.size(); i++) {
        EXPECT_NEAR(cpu::widened(dqkv[i]), x.dqkv[i], std::fabs(x.dqkv[i]) / 256 + 1e-6);
    }
}

// A thread's scratch serves head after head, and layer after layer.
TEST(Attention, leaves_nothing_behind_for_the_next) {
    for (bool bf16 : {false, true}) {
        AttentionCase before(2, 70, 32, 2), after = before, other(2, 70, 32, 2), of_other_size(2, 70, 64, 2);
        other.qkv.assign(other.qkv.size(), NAN);
        of_other_size.run(bf16);
        before.run(bf16);  // in new scratch
        other.run(bf16);
        after.run(bf16);
        EXPECT_EQ(after.out, before.out);
        EXPECT_EQ(after.dqkv, before.dqkv);
        EXPECT_EQ(after.dqkvb, before.dqkvb);
    }
}

TEST(GradientSums, begin_a_step_with_zeros_where_its_first_micro_step_does_not_write) {
    const Layout layout = gpt_layout({8, 100, 128, 2, 1, 64}, 2, 1);
    ASSERT_LT(layout.values, layout.size);
    const Floats ones(size_t(layout.size), 1.0f);
    Floats grads = ones, expected(ones.size());
    cpu::GradientSums anew;
    anew.begin(grads.data(), layout, false, main_stream);
    EXPECT_TRUE(anew.adds);
    EXPECT_EQ(grads, ones);
    for (const Tensor& tensor : layout.tensors) {
        if (tensor.name != "wpe") { std::fill_n(expected.begin() + tensor.offset, tensor.count(), 1.0f); }
    }
    anew.begin(grads.data(), layout, true, main_stream);
    EXPECT_FALSE(anew.adds);
    EXPECT_EQ(grads, expected);
}

// The first micro-step of a step.
TEST(GradientSums, overwrite_gradients_if_they_do_not_add) {
    LayerNormCase normed(65, 48), normed_anew(65, 48);
    AttentionCase attention(2, 70, 32, 2), attention_anew(2, 70, 32, 2);
    for (Floats* one :
         {&normed_anew.dweight, &normed_anew.dbias, &normed_anew.dprojb, &attention_anew.dqkvb}) {
        std::fill(one->begin(), one->end(), NAN);
    }
    normed.run();
    attention.run();
    sums.adds = false;
    normed_anew.run();
    attention_anew.run();
    sums.adds = true;
    EXPECT_EQ(normed_anew.dweight, normed.dweight);
    EXPECT_EQ(normed_anew.dbias, normed.dbias);
    EXPECT_EQ(normed_anew.dprojb, normed.dprojb);
    EXPECT_EQ(attention_anew.dqkvb, attention.dqkvb);
}

// Returns out, followed by lse.
Doubles attention_exact(const Doubles& qkv, int B, int T, int C, int NH) {
    const int hs = C / NH;
    Doubles out(size_t(B) * size_t(T) * size_t(C) + size_t(B) * size_t(NH) * size_t(T));
    auto at = [&](int b, int t, int part, int h, int i) {
        return qkv[size_t(((b * T + t) * 3 + part) * C + h * hs + i)];
    };
    for (int b = 0; b < B; b++) {
        for (int h = 0; h < NH; h++) {
            for (int t = 0; t < T; t++) {
                Doubles p(static_cast<size_t>(t) + 1);
                double sum = 0;
                for (int s = 0; s <= t; s++) {
                    for (int i = 0; i < hs; i++) {
                        p[size_t(s)] += at(b, t, 0, h, i) * at(b, s, 1, h, i) / std::sqrt(hs);
                    }
                    p[size_t(s)] = std::exp(p[size_t(s)]);
                    sum += p[size_t(s)];
                }
                for (int i = 0; i < hs; i++) {
                    double& o = out[size_t((b * T + t) * C + h * hs + i)];
                    for (int s = 0; s <= t; s++) { o += p[size_t(s)] / sum * at(b, s, 2, h, i); }
                }
                out[size_t(B * T * C + (b * NH + h) * T + t)] = std::log(sum);
            }
        }
    }
    return out;
}

TEST(Attention, forward_and_backward_match_double_precision_at_any_size) {
    for (auto [B, T, C, NH] : {std::array<int, 4>{2, 1, 8, 2}, {1, 7, 6, 2}, {2, 33, 48, 3}, {1, 65, 64, 1},
                               {1, 130, 40, 2}, {3, 32, 5, 5}, {1, 64, 130, 1}}) {
        SCOPED_TRACE(testing::Message() << "B " << B << " T " << T << " C " << C << " NH " << NH);
        AttentionCase x(B, T, C, NH);
        x.run();
        const Doubles exact = attention_exact(doubles(x.qkv), B, T, C, NH);
        EXPECT_LT(relative_error(x.out, exact), 1e-6);
        EXPECT_LT(relative_error(x.lse, Doubles(exact.begin() + long(B) * T * C, exact.end())), 1e-6);
        const int b = B, t = T, c = C, nh = NH;
        expect_gradient(x.dqkv, x.qkv, [&](const Doubles& at) {
            Doubles out = attention_exact(at, b, t, c, nh);
            out.resize(x.dout.size());
            return dot(out, x.dout);
        });
    }
}

// Its inputs are bf16 already. So what it rounds itself are p and ds, to 8 bits, and q after its scaling. Where the CPU
// does not multiply bf16, it is the same as in fp32.
TEST(Attention, in_bf16_the_error_is_that_of_rounding) {
    for (auto [B, T, C, NH] : {std::array<int, 4>{1, 7, 6, 2}, {2, 33, 48, 3}, {1, 130, 40, 2}, {2, 256, 128, 2}}) {
        SCOPED_TRACE(testing::Message() << "B " << B << " T " << T << " C " << C << " NH " << NH);
        AttentionCase x(B, T, C, NH), y(B, T, C, NH);
        for (AttentionCase* one : {&x, &y}) {
            for (Floats* inputs : {&one->qkv, &one->dout}) {
                in_bf16(*inputs);
            }
        }
        x.run(false);
        y.run(true);
        EXPECT_LT(relative_error(y.out, doubles(x.out)), 4e-3);
        EXPECT_LT(relative_error(y.lse, doubles(x.lse)), 1e-3);
        EXPECT_LT(relative_error(y.dqkv, doubles(x.dqkv)), 6e-3);
        if (cpu::multiplies_bf16) { EXPECT_NE(y.dqkv, x.dqkv); }
    }
}

// Sums of 320 products in another order, with and without accumulation.
TEST(Attention, the_products_of_amx_are_those_of_the_vector_unit) {
    if (!cpu::multiplies_in_amx()) { GTEST_SKIP() << "no AMX in this CPU, or in this build"; }
    const int rows = 64, columns = 96, K = 160, lda = K + 16, ldb = columns + 32, ldo = columns + 5;
    Floats a(rows * lda), b(K * ldb);
    const Floats a_values = random_floats(2 * rows * lda, 1), b_values = random_floats(2 * K * ldb, 2);
    cpu::convert_to_bf16(reinterpret_cast<uint16_t*>(a.data()), a_values.data(), long(a_values.size()));
    cpu::convert_to_bf16(reinterpret_cast<uint16_t*>(b.data()), b_values.data(), long(b_values.size()));
    for (const bool accumulate : {false, true}) {
        Floats out = random_floats(rows * ldo, 3), expected = out;
        cpu::tile_matmul<true>(expected.data(), ldo, a.data(), lda, b.data(), ldb, rows, columns, K, accumulate, false);
        {
            const cpu::AmxRegisters registers(true);
            cpu::tile_matmul<true>(out.data(), ldo, a.data(), lda, b.data(), ldb, rows, columns, K, accumulate, true);
        }
        EXPECT_NE(out, expected);  // the bits of another order
        EXPECT_LT(relative_error(out, doubles(expected)), 1e-6);
    }
}

TEST(Attention, does_not_look_ahead) {
    AttentionCase x(1, 70, 32, 2);
    x.run();
    const Floats before = x.out;
    for (size_t i = 50 * 3 * 32; i < x.qkv.size(); i++) { x.qkv[i] = 100.0f; }  // tokens 50 and later
    x.run();
    EXPECT_EQ(memcmp(before.data(), x.out.data(), 50 * 32 * sizeof(float)), 0);
}

TEST(Attention, survives_scores_whose_exponentials_overflow) {
    // Scores of thousands; and of 10^10, whose neighbours are hundreds apart, times a scale that is no power of 2.
    for (const auto& [hs, size] : {std::pair(16, 30.0f), {32, 1e5f}}) {
        AttentionCase x(1, 40, hs, 1, size);
        for (const bool bf16 : {false, true}) {
            x.run(bf16);
            for (float value : x.out) { ASSERT_TRUE(std::isfinite(value)); }
            for (float value : x.dqkv) { ASSERT_TRUE(std::isfinite(value)); }
        }
    }
}

TEST(Attention, gives_the_same_bits_at_any_thread_count) {
    for (const bool bf16 : {false, true}) {
        expect_same_bits_at_any_thread_count([bf16] {
            AttentionCase x(3, 70, 48, 3);
            x.run(bf16);
            x.dqkv.insert(x.dqkv.end(), x.out.begin(), x.out.end());
            x.dqkv.insert(x.dqkv.end(), x.dqkvb.begin(), x.dqkvb.end());
            return x.dqkv;
        });
    }
}

// ---------------------------------------------------------------------------------------------------------
// - Classifier

double cross_entropy_exact(const Doubles& logits, const std::vector<int>& targets, int V, int Vp,
                           Doubles* losses = nullptr) {
    double total = 0;
    for (size_t n = 0; n < targets.size(); n++) {
        const double* row = logits.data() + n * size_t(Vp);
        double sum = 0;
        for (int v = 0; v < V; v++) { sum += std::exp(row[v]); }
        const double loss = std::log(sum) - row[targets[n]];
        if (losses) { losses->push_back(loss); }
        total += loss;
    }
    return total;
}

TEST(Classifier, losses_and_gradients_match_double_precision_and_ignore_the_padding) {
    const int N = 37, V = 53, Vp = 64;
    Floats logits = random_floats(N * Vp, 1, 3);
    for (int n = 0; n < N; n++) {
        for (int v = V; v < Vp; v++) { logits[size_t(n * Vp + v)] = 1000.0f; }
    }
    const std::vector<int> targets = random_tokens(N, 2, V);
    Doubles exact;
    cross_entropy_exact(doubles(logits), targets, V, Vp, &exact);

    Floats untouched = logits, losses(N), gradient = logits, losses_again(N);
    cpu::fused_classifier(untouched.data(), losses.data(), 0.25f, targets.data(), N, V, Vp, false,
                          main_stream);
    EXPECT_EQ(untouched, logits);
    EXPECT_LT(relative_error(losses, exact), 1e-6);

    cpu::fused_classifier(gradient.data(), losses_again.data(), 0.25f, targets.data(), N, V, Vp, true,
                          main_stream);
    EXPECT_EQ(losses, losses_again);
    for (int n = 0; n < N; n++) {
        for (int v = V; v < Vp; v++) { EXPECT_EQ(gradient[size_t(n * Vp + v)], 0.0f); }
    }
    expect_gradient(gradient, logits,
                    [&](const Doubles& at) { return 0.25 * cross_entropy_exact(at, targets, V, Vp); });
}

TEST(Classifier, survives_large_logits_and_shows_a_nan) {
    Floats logits = {1e4f, -1e4f, 0.0f, 1.0f, NAN, 0.0f}, losses(2);
    const std::vector<int> targets = {0, 0};
    cpu::fused_classifier(logits.data(), losses.data(), 1.0f, targets.data(), 2, 3, 3, true, main_stream);
    EXPECT_EQ(losses[0], 0.0f);
    EXPECT_TRUE(std::isnan(losses[1]));
}

// ---------------------------------------------------------------------------------------------------------
// - Update

TEST(GlobalNorm, is_that_of_double_precision_at_any_thread_count) {
    for (long n : {0L, 1L, 1000L, 200001L}) {
        const Floats values = random_floats(n, 1);
        const double exact = dot(doubles(values), values);
        expect_same_bits_at_any_thread_count([&] {
            Floats out(1, NAN);
            cpu::global_norm_squared(out.data(), values.data(), n, main_stream);
            EXPECT_NEAR(out[0], exact, 1e-7 * exact);
            return out;
        });
    }
}

TEST(AdamW, ten_steps_match_double_precision_with_decay_on_the_first_values_only) {
    const long count = 1001, decayed = 400;
    const double lr = 1e-2, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1, scale = 0.5;
    Floats master = random_floats(count, 1), params(master.size()), m(master.size()), v(master.size());
    Doubles w = doubles(master), exact_m(master.size()), exact_v(master.size());
    const float grad_scale = float(scale);
    for (int t = 1; t <= 10; t++) {
        const Floats grad = random_floats(count, uint64_t(100 + t));
        const AdamW step =
            adamw(float(lr), {float(beta1), float(beta2), float(eps), float(weight_decay)}, t);
        cpu::adamw_update(params.data(), master.data(), m.data(), v.data(), grad.data(), count, decayed, step,
                          &grad_scale, {}, main_stream);
        for (size_t i = 0; i < w.size(); i++) {
            const double g = scale * grad[i];
            w[i] *= 1 - (long(i) < decayed ? lr * weight_decay : 0);
            exact_m[i] = beta1 * exact_m[i] + (1 - beta1) * g;
            exact_v[i] = beta2 * exact_v[i] + (1 - beta2) * g * g;
            w[i] -= lr * (exact_m[i] / (1 - std::pow(beta1, t))) /
                    (std::sqrt(exact_v[i] / (1 - std::pow(beta2, t))) + eps);
        }
    }
    EXPECT_LT(relative_error(master, w), 1e-6);
    EXPECT_LT(relative_error(m, exact_m), 1e-6);
    EXPECT_LT(relative_error(v, exact_v), 1e-6);
    EXPECT_EQ(params, master);
}

TEST(AdamW, a_gradient_that_is_not_finite_changes_nothing) {
    for (float scale : {NAN, INFINITY}) {
        const Floats before = random_floats(64, 1);
        Floats params = before, master = before, m = before, v = before;
        cpu::adamw_update(params.data(), master.data(), m.data(), v.data(), before.data(), 64, 64,
                          adamw(1e-2f, {0.9f, 0.95f, 1e-8f, 0.1f}, 1), &scale, {}, main_stream);
        for (const Floats* values : {&params, &master, &m, &v}) { EXPECT_EQ(*values, before); }
    }
}

}  // namespace test_layers
