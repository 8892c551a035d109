// Outliers: scores by hand and against long double, which values enter the window, and that a skipped step
// changes nothing.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <vector>

#include "dev/test/random_values.h"
#include "llmc/cpu/adamw.h"
#include "llmc/cpu/memory.h"
#include "llmc/cpu/outlier.h"

namespace test_outlier {

const float infinity = std::numeric_limits<float>::infinity();

// A series after these values.
SeriesWindow window_of(const Floats& values) {
    SeriesWindow window = {};
    for (float value : values) { enter_value(window, value); }
    return window;
}

// `count` values, half of them `low` and half `high`: mean and deviation are those of the pair.
Floats alternating(float low, float high, int count) {
    Floats values;
    for (int i = 0; i < count; i++) { values.push_back(i % 2 == 0 ? low : high); }
    return values;
}

// The scores of a series, and those of the equation in long double with a queue as the window.
Floats scores_of(const Floats& series) {
    SeriesWindow window = {};
    Floats scores;
    for (float value : series) { scores.push_back(enter_value(window, value)); }
    return scores;
}

Floats expected_scores(const Floats& series) {
    std::deque<long double> window;
    Floats scores;
    for (float value : series) {
        window.push_back(value);
        if (window.size() <= 128) {
            scores.push_back(NAN);
            continue;
        }
        window.pop_front();
        long double mean = 0, variance = 0;
        for (long double x : window) { mean += x / 128; }
        for (long double x : window) { variance += (x - mean) * (x - mean) / 128; }
        scores.push_back(variance > 0 ? float((value - mean) / sqrtl(variance)) : 0.0f);
    }
    return scores;
}

void expect_same_scores(const Floats& series) {
    const Floats scores = scores_of(series), expected = expected_scores(series);
    for (size_t i = 0; i < series.size(); i++) {
        ASSERT_EQ(std::isnan(scores[i]), std::isnan(expected[i])) << i;
        if (i >= 128) { ASSERT_NEAR(scores[i], expected[i], 1e-6f * (1 + std::abs(expected[i]))) << i; }
    }
}

bool same_bytes(const SeriesWindow& a, const SeriesWindow& b) { return memcmp(&a, &b, sizeof a) == 0; }

// A step's inputs to skip_outliers(), and its outputs.
struct Step {
    float loss, norm, clip_scale = 1, loss_zscore = 7, norm_zscore = 7;

    bool is_skipped() const { return std::isnan(clip_scale); }
};

Step after_step(OutlierWindow& window, float loss, float norm, OutlierLimits limits) {
    cpu::Stream stream;
    Step step{loss, norm};
    cpu::skip_outliers(&window, &step.loss_zscore, &step.norm_zscore, &step.clip_scale, &step.loss,
                       &step.norm, limits, stream);
    return step;
}

// Losses of 2 and 4, norms of 1 and 3: means 3 and 2, deviations 1.
OutlierWindow full_window() { return {window_of(alternating(2, 4, 128)), window_of(alternating(1, 3, 128))}; }

// 4 replaces a 2, which leaves 63 times 2 and 65 times 4. The mean is 3 + 1 / 64, the variance 1 - 1 / 64^2.
TEST(Outlier, scores_by_hand) {
    SeriesWindow window = window_of(alternating(2, 4, 128));
    EXPECT_FLOAT_EQ(enter_value(window, 4), float((4 - 3.015625) / std::sqrt(1 - 0.015625 * 0.015625)));
    window = window_of(alternating(2, 4, 128));
    EXPECT_FLOAT_EQ(enter_value(window, 2), -1);  // replaces another 2
    EXPECT_EQ(zscore(window_of({2, 4, 4, 2, 4, 2}), 4), 1);
    // 131 replaces a 2: mean 3 + 129 / 128; squares 63 + 64 + 128^2, less 128 of the mean's shift.
    window = window_of(alternating(2, 4, 128));
    const double shift = 129.0 / 128;
    EXPECT_FLOAT_EQ(enter_value(window, 131),
                    float((128 - shift) / std::sqrt((127 + 128.0 * 128) / 128 - shift * shift)));
}

TEST(Outlier, scores_are_those_of_the_last_128_values) {
    expect_same_scores(random_values(1, 1000, 0.5f));
    Floats falling = random_values(2, 1000, 0.1f);
    for (size_t i = 0; i < falling.size(); i++) { falling[i] += 11 - 0.01f * float(i); }
    falling[400] = 90;
    expect_same_scores(falling);
}

TEST(Outlier, there_is_no_score_before_128_values) {
    const Floats scores = scores_of(random_values(3, 200, 1));
    for (size_t i = 0; i < scores.size(); i++) { EXPECT_EQ(std::isnan(scores[i]), i < 128) << i; }
}

TEST(Outlier, values_that_are_all_the_same_score_0) {
    for (float value : {0.0f, 10.7f, 1e-45f, 3e38f, -0.1f}) {
        const Floats scores = scores_of(Floats(300, value));
        for (size_t i = 128; i < scores.size(); i++) { EXPECT_EQ(scores[i], 0.0f) << value; }
    }
}

// After equal values any other value has the largest possible score, even if only one bit differs.
TEST(Outlier, no_score_is_above_the_root_of_127) {
    for (float value : {0.0f, 10.7f, 1e-45f, 1e30f}) {
        for (float other : {std::nextafter(value, infinity), 2 * value + 1, 3e38f}) {
            SeriesWindow window = window_of(Floats(128, value));
            EXPECT_FLOAT_EQ(enter_value(window, other), 11.269428f) << value << " " << other;
            SeriesWindow low = window_of(Floats(128, other));
            EXPECT_FLOAT_EQ(enter_value(low, value), -11.269428f) << value << " " << other;
        }
    }
}

TEST(Outlier, a_small_deviation_does_not_drown_in_a_large_mean) {
    Floats series = random_values(4, 600, 1);
    for (float& value : series) { value = 1e6f + 0.0625f * std::round(4 * value); }
    expect_same_scores(series);
}

TEST(Outlier, values_that_are_not_finite_have_no_score_and_never_enter) {
    SeriesWindow window = window_of(alternating(2, 4, 128));
    const SeriesWindow before = window;
    for (float value : {NAN, infinity, -infinity}) {
        EXPECT_TRUE(std::isnan(enter_value(window, value)));
        EXPECT_TRUE(same_bytes(window, before)) << value;
    }
    EXPECT_FLOAT_EQ(enter_value(window, 2), -1);
}

// The number of steps is a multiple of 128, so that the last values have the same places in both windows.
TEST(Outlier, after_a_million_steps_scores_are_as_fresh_as_at_first) {
    const Floats last = random_values(5, 128, 1e-3f);
    SeriesWindow old = {}, fresh = window_of(last);
    for (uint32_t i = 0; i < 1 << 20; i++) {
        enter_value(old, 100 * uniform(random_bits(6, RandomUse::sampling, i).v[0]));
    }
    for (float value : last) { enter_value(old, value); }
    for (float value : random_values(7, 300, 2e-3f)) {
        const float one = enter_value(old, value), other = enter_value(fresh, value);
        ASSERT_EQ(memcmp(&one, &other, sizeof one), 0) << one << " " << other;
    }
}

TEST(Outlier, a_step_is_skipped_where_either_score_is_above_its_limit) {
    const OutlierLimits both{3, 3};
    const float plain_loss = 4, plain_norm = 1, high = 60;
    OutlierWindow window = full_window();
    EXPECT_FALSE(after_step(window, plain_loss, plain_norm, both).is_skipped());
    EXPECT_TRUE(after_step(window, high, plain_norm, both).is_skipped());
    window = full_window();
    EXPECT_TRUE(after_step(window, plain_loss, high, both).is_skipped());
    window = full_window();
    EXPECT_FALSE(after_step(window, high, plain_norm, {0, 3}).is_skipped());
    EXPECT_FALSE(after_step(window, plain_loss, high, {3, 0}).is_skipped());
    window = full_window();
    EXPECT_FALSE(after_step(window, high, high, {}).is_skipped());
    EXPECT_FALSE(after_step(window, -high, -high, both).is_skipped());  // low is no outlier
}

TEST(Outlier, a_score_that_is_the_limit_is_not_above_it) {
    OutlierWindow window = full_window();
    const float score = after_step(window, 9, 1, {}).loss_zscore;
    ASSERT_GT(score, 3);
    window = full_window();
    EXPECT_FALSE(after_step(window, 9, 1, {score, 0}).is_skipped());
    window = full_window();
    EXPECT_TRUE(after_step(window, 9, 1, {std::nextafter(score, 0.0f), 0}).is_skipped());
}

TEST(Outlier, nothing_is_skipped_before_128_values) {
    OutlierWindow window = {};
    for (int i = 0; i < 128; i++) {
        EXPECT_FALSE(after_step(window, i == 100 ? 1e6f : 1, i == 101 ? 1e6f : 1, {1, 1}).is_skipped()) << i;
    }
    EXPECT_TRUE(after_step(window, 1e7f, 1, {1, 1}).is_skipped());
}

// So a loss that has risen for good is soon no outlier any more.
TEST(Outlier, what_is_skipped_enters_the_window_too) {
    OutlierWindow window = full_window();
    int skipped = 0;
    for (int i = 0; i < 128; i++) { skipped += after_step(window, 60, 2, {3, 3}).is_skipped(); }
    EXPECT_GE(skipped, 5);
    EXPECT_LE(skipped, 20);
    for (float value : window.losses.values) { EXPECT_EQ(value, 60); }
}

TEST(Outlier, losses_and_norms_are_series_of_their_own) {
    OutlierWindow window = full_window();
    const Step step = after_step(window, NAN, 1, {3, 3});
    EXPECT_TRUE(std::isnan(step.loss_zscore));
    EXPECT_FLOAT_EQ(step.norm_zscore, -1);
    EXPECT_EQ(window.losses.entered, 128u);
    EXPECT_EQ(window.norms.entered, 129u);
    EXPECT_FALSE(step.is_skipped());
}

TEST(Outlier, a_clip_scale_that_is_not_finite_stays_so) {
    cpu::Stream stream;
    OutlierWindow window = full_window();
    float loss = 3, norm = infinity, squared = infinity, scale = 1, scores[2];
    cpu::clip_scale(&norm, &scale, &squared, 1.0f, stream);
    cpu::skip_outliers(&window, &scores[0], &scores[1], &scale, &loss, &norm, {3, 3}, stream);
    EXPECT_TRUE(std::isnan(scale));
    EXPECT_TRUE(std::isnan(scores[1]));
    EXPECT_EQ(window.norms.entered, 128u);
}

TEST(Outlier, a_skipped_step_leaves_parameters_and_moments_as_they_are) {
    const long count = 300;
    const Floats grad = random_values(8, count, 1);
    Floats params = random_values(9, count, 1), master = params, m = random_values(10, count, 0.1f);
    Floats v(m.size(), 0.01f);
    const Floats before[] = {params, master, m, v};
    cpu::Stream stream;
    auto update = [&](float clip_scale) {
        cpu::adamw_update(params.data(), master.data(), m.data(), v.data(), grad.data(), count, count / 2,
                          adamw(1e-2f, {0.9f, 0.95f, 1e-8f, 0.1f}, 3), &clip_scale, {1, 3, 0}, stream);
    };
    OutlierWindow window = full_window();
    update(after_step(window, 60, 2, {3, 3}).clip_scale);
    EXPECT_EQ(params, before[0]);
    EXPECT_EQ(master, before[1]);
    EXPECT_EQ(m, before[2]);
    EXPECT_EQ(v, before[3]);
    update(after_step(window, 3, 2, {3, 3}).clip_scale);
    EXPECT_NE(params, before[0]);
    EXPECT_NE(m, before[2]);
}

// Copied as bytes, as in a checkpoint.
TEST(Outlier, a_window_that_was_stored_goes_on_bit_for_bit) {
    for (size_t stop : {0, 1, 127, 128, 129, 400}) {
        const Floats losses = random_values(11, 500, 1), norms = random_values(12, 500, 1);
        OutlierWindow whole = {};
        std::vector<char> bytes(sizeof whole);
        for (size_t i = 0; i < stop; i++) { after_step(whole, losses[i], norms[i], {}); }
        memcpy(bytes.data(), &whole, bytes.size());
        OutlierWindow resumed;
        memset(static_cast<void*>(&resumed), 0xa5, sizeof resumed);
        memcpy(&resumed, bytes.data(), bytes.size());
        for (size_t i = stop; i < losses.size(); i++) {
            const Step one = after_step(whole, losses[i], norms[i], {2, 2});
            const Step other = after_step(resumed, losses[i], norms[i], {2, 2});
            ASSERT_EQ(memcmp(&one, &other, sizeof one), 0) << stop << " " << i;
        }
        EXPECT_EQ(memcmp(&whole, &resumed, sizeof whole), 0) << stop;
    }
}

// `entered` may be any number in a damaged file, and must never lead outside the window.
TEST(Outlier, any_number_of_values_so_far_has_a_place_in_the_window) {
    for (uint64_t entered : {uint64_t(128), uint64_t(1) << 40, ~uint64_t(0)}) {
        SeriesWindow window = window_of(alternating(2, 4, 128));
        window.entered = entered;
        EXPECT_FALSE(std::isnan(enter_value(window, 3)));
        EXPECT_EQ(window.values[entered % 128], 3);
    }
}

}  // namespace test_outlier
