// Attention's kernels, bf16 and float, against the CPU's functions of the same names, from inputs that a bf16
// holds exactly. Every element has an error bound of its own, a multiple of its sum's terms without signs.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <type_traits>

#include "dev/emulator/device_array.h"
#include "llmc/cpu/attention.h"
#include "llmc/cuda/attention.cuh"

namespace {

using bf16 = __nv_bfloat16;

// logits: the standard deviation of scores, a power of 2.
struct Shape {
    int B, T, NH, hs;
    float logits = 1.0f;

    int C() const { return NH * hs; }
    size_t tokens() const { return size_t(B) * size_t(T); }
};

float as_bf16(float x) { return __bfloat162float(__float2bfloat16(x)); }

std::vector<float> random_values(size_t count, unsigned seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> distribution;
    std::vector<float> values(count);
    for (float& value : values) { value = as_bf16(distribution(generator)); }
    return values;
}

struct Results {
    std::vector<float> out, lse, dqkv, dqkvb;
};

// Inputs, and what the CPU makes of them. Both backwards start from its `out`, rounded to bf16, and `lse`.
struct Case {
    Shape shape;
    std::vector<float> qkv, dout;
    Results expected;
    std::vector<float> rounded_out;

    Case(const Shape& s, unsigned seed)
        : shape(s),
          qkv(random_values(s.tokens() * 3 * size_t(s.C()), seed)),
          dout(random_values(s.tokens() * size_t(s.C()), seed + 1000)) {
        for (size_t i = 0; i < qkv.size(); i++) {
            if (int(i % size_t(3 * s.C())) < s.C()) { qkv[i] *= s.logits; }
        }
        expected = {std::vector<float>(dout.size()), std::vector<float>(s.tokens() * size_t(s.NH)),
                    std::vector<float>(qkv.size()), std::vector<float>(3 * size_t(s.C()), 0.5f)};
        cpu::Stream stream;
        cpu::GradientSums sums;
        cpu::attention_forward(expected.out.data(), expected.lse.data(), qkv.data(), s.B, s.T, s.C(), s.NH,
                               stream, false);
        for (float x : expected.out) { rounded_out.push_back(as_bf16(x)); }
        cpu::attention_backward(expected.dqkv.data(), expected.dqkvb.data(), dout.data(), rounded_out.data(),
                                qkv.data(), expected.lse.data(), s.B, s.T, s.C(), s.NH, sums, stream, false);
    }
};

template <class T>
Results run(const Case& c) {
    auto from_float = [](const std::vector<float>& x) { return std::vector<T>(x.begin(), x.end()); };
    auto to_float = [](const std::vector<T>& x) { return std::vector<float>(x.begin(), x.end()); };
    const Shape& s = c.shape;
    DeviceArray<T> qkv(from_float(c.qkv)), dout(from_float(c.dout)), rounded_out(from_float(c.rounded_out));
    DeviceArray<float> expected_lse(c.expected.lse);
    DeviceArray<T> out(c.dout.size()), dqkv(c.qkv.size());
    DeviceArray<float> lse(c.expected.lse.size()), dqkvb(std::vector<float>(3 * size_t(s.C()), 0.5f));
    cuda::Stream stream;
    cuda::GradientSums sums;
    cuda::attention_forward(out, lse, qkv, s.B, s.T, s.C(), s.NH, stream);
    cuda::attention_backward(dqkv, dqkvb, dout, rounded_out, qkv, expected_lse, s.B, s.T, s.C(), s.NH, sums,
                             stream);
    sums.add_pending(stream);
    stream.synchronize();
    return {to_float(out.to_host()), lse.to_host(), to_float(dqkv.to_host()), dqkvb.to_host()};
}

// How far each result may be from the CPU's. `stored`, relative: p or ds, and the result itself, are rounded
// to T, by half a unit each. `computed`, relative: in float, sums of T or hs terms are formed in another
// order on either side, with roundings of either sign, or all of one where tensor cores truncate; a score is
// wrong by units of its terms, which is the relative error of its exponential. dp and dot have errors
// relative to their terms, not to their difference.
class Bounds {
public:
    Bounds(const Case& c, float stored) : c(c), s(c.shape), stored(stored) {
        bounds = {std::vector<float>(c.dout.size(), 1e-30f), std::vector<float>(c.expected.lse.size()),
                  std::vector<float>(c.qkv.size(), 1e-30f), {}};
        for (int b = 0; b < s.B; b++) {
            for (int h = 0; h < s.NH; h++) {
                for (int t = 0; t < s.T; t++) {
                    for (int key = 0; key <= t; key++) { add_pair(b, h, t, key); }
                }
            }
        }
    }
    Results bounds;

private:
    void add_pair(int b, int h, int t, int key) {
        const size_t C = size_t(s.C()), token = size_t(b) * size_t(s.T) + size_t(t), head = size_t(h * s.hs);
        const size_t at = token * C + head, q = token * 3 * C + head;
        const size_t k = (size_t(b) * size_t(s.T) + size_t(key)) * 3 * C + head + C, v = k + C;
        const size_t statistics = (size_t(b) * size_t(s.NH) + size_t(h)) * size_t(s.T) + size_t(t);
        const float scale = 1.0f / sqrtf(float(s.hs));
        float score = 0, score_terms = 0, difference = 0, difference_terms = 0;
        for (size_t i = 0; i < size_t(s.hs); i++) {
            score += scale * c.qkv[q + i] * c.qkv[k + i];
            score_terms += scale * fabsf(c.qkv[q + i] * c.qkv[k + i]);
            difference += c.dout[at + i] * (c.qkv[v + i] - c.rounded_out[at + i]);
            difference_terms +=
                fabsf(c.dout[at + i] * c.qkv[v + i]) + fabsf(c.dout[at + i] * c.rounded_out[at + i]);
        }
        const float unit = 1.0f / (1 << 23), lse = c.expected.lse[statistics];
        const float terms = float(s.T + s.hs), roundings = stored > unit ? terms : sqrtf(terms);
        const float computed = unit * (roundings + 4 * score_terms + 4 * fabsf(lse));
        const float p = expf(score - lse);
        const float ds = p * (fabsf(difference) * (stored + computed) + difference_terms * computed);
        bounds.lse[statistics] = std::max(bounds.lse[statistics], computed);
        for (size_t i = 0; i < size_t(s.hs); i++) {
            bounds.out[at + i] += p * fabsf(c.qkv[v + i]) * (stored + computed);
            bounds.dqkv[q + i] += scale * ds * fabsf(c.qkv[k + i]);
            bounds.dqkv[k + i] += scale * ds * fabsf(c.qkv[q + i]);
            bounds.dqkv[v + i] += p * fabsf(c.dout[at + i]) * (stored + computed);
        }
    }

    const Case& c;
    const Shape& s;
    const float stored;
};

void expect_near(const char* name, const std::vector<float>& got, const std::vector<float>& expected,
                 const std::vector<float>& bounds) {
    size_t wrong = 0;
    for (size_t i = 0; i < got.size(); i++) {
        if (fabsf(got[i] - expected[i]) <= bounds[i]) { continue; }  // not so for NaN
        if (wrong++ == 0) {
            ADD_FAILURE() << name << "[" << i << "] is " << got[i] << ", expected " << expected[i] << " +- "
                          << bounds[i];
        }
    }
    EXPECT_EQ(wrong, 0u) << name << ", of " << got.size();
}

// ||got - expected|| / ||expected|| of part 0, 1, 2 (q, k, v) of dqkv, or of all of a tensor.
double relative_error(const std::vector<float>& got, const std::vector<float>& expected, size_t width,
                      size_t parts, size_t part) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < got.size(); i++) {
        if (i / width % parts != part) { continue; }
        error += std::pow(double(got[i]) - expected[i], 2);
        norm += std::pow(double(expected[i]), 2);
    }
    return std::sqrt(error / norm);
}

template <class T>
constexpr float stored_error = std::is_same_v<T, bf16> ? 1.0f / 128 : 1.0f / (1 << 23);

// The gradient of the bias, which was 0.5, is the sum over rows of dqkv.
void expect_sums_of_rows(const Results& got) {
    const size_t width = got.dqkvb.size();
    std::vector<double> sums(width, 0.5), sizes(width, 1.0);
    for (size_t i = 0; i < got.dqkv.size(); i++) {
        sums[i % width] += got.dqkv[i];
        sizes[i % width] += std::fabs(got.dqkv[i]);
    }
    for (size_t i = 0; i < width; i++) { ASSERT_NEAR(got.dqkvb[i], sums[i], 0x1p-20 * sizes[i]) << i; }
}

template <class T>
void expect_same_as_cpu(const Shape& s, unsigned seed, int orders = 1) {
    SCOPED_TRACE(format("B %d, T %d, NH %d, hs %d, logits %g", s.B, s.T, s.NH, s.hs, double(s.logits)));
    const Case c(s, seed);
    const Results bounds = Bounds(c, stored_error<T>).bounds;
    for_each_order(orders, [&] {
        const Results got = run<T>(c);
        expect_near("out", got.out, c.expected.out, bounds.out);
        expect_near("lse", got.lse, c.expected.lse, bounds.lse);
        expect_near("dqkv", got.dqkv, c.expected.dqkv, bounds.dqkv);
        expect_sums_of_rows(got);
        // Rounding errors are random: over a tensor they stay below that of one value, or, in float, of the
        // largest scores' exponentials.
        const double largest = std::is_same_v<T, bf16> ? 1.0 / 256 : 1e-6 * std::max(1.0f, s.logits);
        const size_t width = size_t(s.C());
        EXPECT_LT(relative_error(got.out, c.expected.out, width, 1, 0), largest) << "out";
        EXPECT_LT(relative_error(got.dqkv, c.expected.dqkv, width, 3, 2), largest) << "dv";
        if (s.T == 1) { return; }  // dq and dk are 0 but for rounding
        EXPECT_LT(relative_error(got.dqkv, c.expected.dqkv, width, 3, 0), largest) << "dq";
        EXPECT_LT(relative_error(got.dqkv, c.expected.dqkv, width, 3, 1), largest) << "dk";
    });
}

TEST(Attention, OfOddShapesAndHeadsOf64EqualsTheCpus) {
    expect_same_as_cpu<bf16>({2, 1, 3, 64}, 1);
    expect_same_as_cpu<bf16>({1, 63, 3, 64}, 2);
    expect_same_as_cpu<bf16>({1, 64, 1, 64}, 3);
    expect_same_as_cpu<bf16>({2, 65, 2, 64}, 4);
    expect_same_as_cpu<bf16>({1, 200, 1, 64}, 5, 2);
}

TEST(Attention, OfOddShapesAndHeadsOf128EqualsTheCpus) {
    expect_same_as_cpu<bf16>({2, 1, 2, 128}, 6);
    expect_same_as_cpu<bf16>({1, 63, 1, 128}, 7);
    expect_same_as_cpu<bf16>({1, 64, 1, 128}, 8);
    expect_same_as_cpu<bf16>({2, 65, 2, 128}, 9);
    expect_same_as_cpu<bf16>({1, 200, 1, 128}, 10, 2);
}

TEST(Attention, OfThreeOfTheLargestTilesEqualsTheCpus) { expect_same_as_cpu<bf16>({1, 257, 1, 64}, 11); }

TEST(AttentionFp32, OfOddShapesEqualsTheCpus) {
    expect_same_as_cpu<float>({2, 1, 3, 64}, 1);
    expect_same_as_cpu<float>({1, 63, 2, 128}, 2);
    expect_same_as_cpu<float>({1, 64, 3, 64}, 3);
    expect_same_as_cpu<float>({2, 65, 1, 128}, 4, 2);
    expect_same_as_cpu<float>({2, 69, 2, 64}, 5, 2);
    expect_same_as_cpu<float>({1, 200, 1, 64}, 6);
}

// Large: one key has all the weight, and the maximum moves from tile to tile. Small: all have the same.
TEST(Attention, OfLargeAndSmallLogitsEqualsTheCpus) {
    expect_same_as_cpu<bf16>({1, 150, 1, 64, 64.0f}, 12);
    expect_same_as_cpu<bf16>({1, 100, 1, 128, 64.0f}, 13);
    expect_same_as_cpu<bf16>({1, 70, 1, 64, 1.0f / 64}, 14);
}
TEST(AttentionFp32, OfLargeAndSmallLogitsEqualsTheCpus) {
    expect_same_as_cpu<float>({1, 100, 1, 64, 64.0f}, 12);
    expect_same_as_cpu<float>({1, 70, 1, 128, 1.0f / 64}, 13);
}

// One key and sixteen scores, many of them so low that their exponentials are 0 in float.
TEST(Attention, OfOneKeyIsItsValueHoweverLowItsScore) { expect_same_as_cpu<bf16>({2, 1, 8, 64, 256.0f}, 16); }
TEST(AttentionFp32, OfOneKeyIsItsValueHoweverLowItsScore) {
    expect_same_as_cpu<float>({2, 1, 8, 64, 256.0f}, 16);
}

template <class T>
void expect_same_bits(const Shape& shape) {
    const Case c(shape, 15);
    const Results first = run<T>(c);
    for_each_order(2, [&] {
        const Results again = run<T>(c);
        EXPECT_EQ(again.out, first.out);
        EXPECT_EQ(again.lse, first.lse);
        EXPECT_EQ(again.dqkv, first.dqkv);
        EXPECT_EQ(again.dqkvb, first.dqkvb);
    });
}

TEST(Attention, HasTheSameBitsInAnyOrderOfBlocksAndThreads) { expect_same_bits<bf16>({1, 140, 1, 64}); }
TEST(AttentionFp32, HasTheSameBitsInAnyOrderOfBlocksAndThreads) { expect_same_bits<float>({1, 75, 1, 64}); }

TEST(Attention, OfAShapeThatTheKernelsDoNotTakeThrows) {
    Stream stream;
    cuda::GradientSums sums;
    auto expect_thrown = [&](int B, int T, int C, int NH) {
        bf16* half = nullptr;
        float* full = nullptr;
        EXPECT_THROW(cuda::attention_forward(half, full, half, B, T, C, NH, stream), std::invalid_argument);
        EXPECT_THROW(cuda::attention_forward(full, full, full, B, T, C, NH, stream), std::invalid_argument);
        EXPECT_THROW(cuda::attention_backward(half, full, half, half, half, full, B, T, C, NH, sums, stream),
                     std::invalid_argument);
        EXPECT_THROW(cuda::attention_backward(full, full, full, full, full, full, B, T, C, NH, sums, stream),
                     std::invalid_argument);
    };
    expect_thrown(1, 5, 96, 1);
    expect_thrown(1, 5, 192, 2);
    expect_thrown(1, 5, 129, 2);
    expect_thrown(1, 5, 64, 0);
    expect_thrown(0, 5, 64, 1);
    expect_thrown(1, 0, 64, 1);
    expect_thrown(1, 5, 0, 1);
}

template <class T>
void expect_any_misaligned_array_refused() {
    Stream stream;
    cuda::GradientSums sums;
    DeviceArray<T> x(4 * 256);
    DeviceArray<float> lse(1);
    for (int wrong = 0; wrong < 4; wrong++) {
        auto array = [&](int i) { return x + 256 * i + (i == wrong ? 1 : 0); };
        EXPECT_THROW(
            cuda::attention_backward(array(0), lse, array(1), array(2), array(3), lse, 1, 1, 64, 1, sums,
                                     stream),
            std::invalid_argument)
            << wrong;
        if (wrong >= 2) { continue; }
        EXPECT_THROW(cuda::attention_forward(array(0), lse, array(1), 1, 1, 64, 1, stream),
                     std::invalid_argument)
            << wrong;
    }
}

TEST(Attention, AnyArrayThatIsNotAlignedIsRefused) { expect_any_misaligned_array_refused<bf16>(); }
TEST(AttentionFp32, AnyArrayThatIsNotAlignedIsRefused) { expect_any_misaligned_array_refused<float>(); }

}  // namespace
