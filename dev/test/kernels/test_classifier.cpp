// The fused classifier on the device, against the CPU's. Padding columns are NaN on the way in: one that is
// read shows. Compiles with nvcc, too (-x cu).
#include <gtest/gtest.h>

#include "dev/emulator/device_array.h"
#include "dev/test/kernels/values.h"
#include "llmc/cpu/classifier.h"
#include "llmc/cuda/classifier.cuh"

namespace {

struct Rows {
    int N, V, Vp;
    std::vector<int> targets;
    Floats logits;  // (N,Vp), exact in floatX, NaN in the padding

    float& at(int n, int v) { return logits[size_t(n) * size_t(Vp) + size_t(v)]; }
};

// Logits in [-8, 8), multiples of 1/16; targets: first and last column, and others in between.
Rows random_rows(int N, int V, int Vp, uint64_t seed) {
    Rows rows = {N, V, Vp, {}, Floats(size_t(N) * size_t(Vp), float(floatX(NAN)))};
    for (int n = 0; n < N; n++) {
        const auto random = [&](int i) {
            return random_bits(seed, RandomUse::sampling, uint64_t(n * Vp + i)).v[0];
        };
        for (int v = 0; v < V; v++) { rows.at(n, v) = float(int(random(v) >> 24) - 128) / 16; }
        rows.targets.push_back(n == 0 ? 0 : n == 1 ? V - 1 : int(random(V) % uint32_t(V)));
    }
    return rows;
}

struct Result {
    Floats logits, losses;
};

Result classified_on_cpu(const Rows& rows, float dloss) {
    Result result = {rows.logits, Floats(size_t(rows.N))};
    cpu::Stream stream;
    cpu::fused_classifier(result.logits.data(), result.losses.data(), dloss, rows.targets.data(), rows.N,
                          rows.V, rows.Vp, true, stream);
    return result;
}

Result classified_on_device(const Rows& rows, float dloss, bool write_dlogits) {
    cuda::Stream stream;
    DeviceArray<floatX> logits(to_floatX(rows.logits));
    DeviceArray<float> losses(Floats(size_t(rows.N) + 1, -7.0f));
    DeviceArray<int> targets(rows.targets);
    cuda::fused_classifier(logits, losses, dloss, targets, rows.N, rows.V, rows.Vp, write_dlogits, stream);
    stream.synchronize();
    Result result = {to_floats(logits.to_host()), losses.to_host()};
    EXPECT_EQ(result.losses.back(), -7.0f);
    result.losses.pop_back();
    return result;
}

// Of a row's sum and probabilities. The CPU adds V floats one by one and rounds by up to 2^-24 each time: 4
// standard deviations if their signs are random; the device's sums are short. An exponential on a GPU adds
// |x| 2^-23, for probabilities within e^-16 of the largest.
float relative_tolerance(int V) { return 4 * sqrtf(float(V)) * 0x1p-24f + 16 * 0x1p-23f; }

void expect_losses_near(const Result& result, const Result& expected, const Rows& rows) {
    for (size_t n = 0; n < expected.losses.size(); n++) {
        // It is a sum of the maximum, the target's logit and a logarithm: each rounded as the largest is.
        const float largest = fabsf(expected.losses[n]) + 32;
        ASSERT_NEAR(result.losses[n], expected.losses[n], relative_tolerance(rows.V) + largest * 0x1p-23f)
            << "row " << n;
    }
}

// Rounded once to floatX: half of bf16's spacing.
void expect_dlogits_near(const Result& result, const Result& expected, const Rows& rows, float dloss) {
    const float rounding = sizeof(floatX) == 2 ? 0x1.02p-8f : 0x1p-23f, relative = relative_tolerance(rows.V);
    for (int n = 0; n < rows.N; n++) {
        for (int v = 0; v < rows.Vp; v++) {
            const size_t i = size_t(n) * size_t(rows.Vp) + size_t(v);
            if (v >= rows.V) {
                ASSERT_EQ(result.logits[i], 0.0f) << "row " << n << ", padding column " << v;
                continue;
            }
            const float of_target = v == rows.targets[size_t(n)] ? dloss : 0.0f;  // it cancels
            const float tolerance =
                (rounding + relative) * fabsf(expected.logits[i]) + relative * fabsf(of_target) + 1e-37f;
            ASSERT_NEAR(result.logits[i], expected.logits[i], tolerance) << "row " << n << ", column " << v;
        }
    }
}

void expect_like_cpu(const Rows& rows, float dloss, int orders = 2) {
    const Result expected = classified_on_cpu(rows, dloss);
    for_each_order(orders, [&] {
        const Result gradient = classified_on_device(rows, dloss, true);
        expect_losses_near(gradient, expected, rows);
        expect_dlogits_near(gradient, expected, rows, dloss);
        const Result loss = classified_on_device(rows, dloss, false);
        EXPECT_EQ(loss.losses, gradient.losses);
        EXPECT_EQ(memcmp(loss.logits.data(), rows.logits.data(), loss.logits.size() * sizeof(float)), 0)
            << "logits were written";
    });
}

TEST(Classifier, OfSmallVocabulariesIsTheCpus) {
    for (auto [V, Vp] : {std::pair<int, int>(500, 512), {512, 512}, {1, 128}, {9, 128}, {2047, 2176}}) {
        expect_like_cpu(random_rows(4, V, Vp, uint64_t(V)), 0.125f);
    }
}

TEST(Classifier, OfMoreColumnsThanABlockLoadsAtOnceIsTheCpus) {
    expect_like_cpu(random_rows(3, 20001, 20096, 7), 0.003f, 1);
}

TEST(Classifier, OfGpt2sVocabularyIsTheCpus) { expect_like_cpu(random_rows(2, 50257, 50304, 8), 1.0f, 1); }

// 48 KiB, which a launch may have without asking for them only if the kernel declares nothing; one pack less
// than a row that shared memory takes, that row, and one that is a pack longer.
TEST(Classifier, OfRowsThatFitSharedMemoryAndThatDoNotIsTheCpus) {
    const int pack = Pack<floatX>::size, largest = int(cuda::largest_row_in_shared_memory / sizeof(floatX));
    const int without_asking = int(48 * 1024 / sizeof(floatX));
    for (int Vp : {without_asking, largest - 8, largest, largest + 8}) {
        ASSERT_EQ(Vp % pack, 0);
        expect_like_cpu(random_rows(2, Vp - 3, Vp, uint64_t(Vp)), 0.01f, 1);
    }
}

// What a thread has summed so far has to be scaled down each time, or never again.
TEST(Classifier, OfRisingAndFallingLogitsIsTheCpus) {
    Rows rows = random_rows(3, 20001, 20096, 9);
    const auto add = [&](int n, int v, int value) {
        rows.at(n, v) = float(floatX(rows.at(n, v) / 4 + float(value)));
    };
    for (int v = 0; v < rows.V; v++) {
        add(0, v, v / 4096);
        add(1, v, -v / 4096);
        add(2, v, abs(v - 10000) / 2048);
    }
    expect_like_cpu(rows, 0.5f, 1);
}

TEST(Classifier, OfHugeLogitsHasNoOverflow) {
    Rows rows = random_rows(6, 500, 512, 10);
    for (int n : {0, 2}) { rows.at(n, 123) = 0x1p15f; }
    rows.targets[2] = 123;
    rows.at(1, 499) = 0x1p100f;
    rows.at(5, 200) = 3e30f;  // log2(e) times as much rounds by more than 2^x takes
    for (int v = 0; v < rows.V; v++) {
        rows.at(3, v) -= 0x1p15f;
        rows.at(4, v) = -0x1p120f;
    }
    for (float& value : rows.logits) { value = float(floatX(value)); }
    const Result result = classified_on_device(rows, 1.0f, true);
    EXPECT_EQ(result.losses[0], 0x1p15f - rows.at(0, 0));
    EXPECT_EQ(result.losses[1], 0.0f);
    EXPECT_EQ(result.losses[2], 0.0f);
    EXPECT_EQ(result.logits[123], 1.0f);
    EXPECT_EQ(result.logits[0], -1.0f);
    expect_dlogits_near(result, classified_on_cpu(rows, 1.0f), rows, 1.0f);
}

// Whole threads see nothing else than -inf, first and later.
TEST(Classifier, OfMaskedLogitsIsTheCpus) {
    Rows rows = random_rows(3, 20001, 20096, 11);
    for (int v = 0; v < rows.V; v++) {
        if (v < 8200) { rows.at(0, v) = -INFINITY; }
        if (v > 4000) { rows.at(1, v) = -INFINITY; }
        if (v % 64 < 40) { rows.at(2, v) = -INFINITY; }
    }
    rows.targets = {20000, 4000, 63};
    expect_like_cpu(rows, 0.5f, 1);
}

// The loss tells of it: AdamW's clip scale is then not finite.
TEST(Classifier, OfALogitThatIsNotANumberIsNotANumber) {
    Rows rows = random_rows(2, 500, 512, 12);
    rows.at(0, 300) = NAN;
    const Result result = classified_on_device(rows, 1.0f, true);
    EXPECT_TRUE(std::isnan(result.losses[0]));
    for (size_t v = 0; v < 500; v++) { ASSERT_TRUE(std::isnan(result.logits[v])) << v; }
    EXPECT_TRUE(std::isfinite(result.losses[1]));
}

TEST(Classifier, HasTheSameBitsInAnyOrder) {
    const Rows rows = random_rows(2, 9001, 9088, 13);
    const Result expected = classified_on_device(rows, 0.003f, true);
    for_each_order(3, [&] {
        const Result result = classified_on_device(rows, 0.003f, true);
        EXPECT_EQ(result.losses, expected.losses);
        EXPECT_EQ(result.logits, expected.logits);
    });
}

TEST(Classifier, RefusesRowsThatItCannotLoadInPacksAndTakesNone) {
    cuda::Stream stream;
    DeviceArray<floatX> logits(256);
    DeviceArray<float> losses(1);
    DeviceArray<int> targets(std::vector<int>{0});
    EXPECT_THROW(cuda::fused_classifier(logits, losses, 1.0f, targets, 1, 100, 132, true, stream),
                 std::invalid_argument);
    EXPECT_THROW(cuda::fused_classifier(logits + 1, losses, 1.0f, targets, 1, 100, 128, true, stream),
                 std::invalid_argument);
    cuda::fused_classifier(logits, losses, 1.0f, targets, 0, 100, 128, true, stream);
}

}  // namespace
