// The learning rate at every step, against numbers worked out by hand.
#include "llmc/schedulers.h"

#include "dev/test/files.h"

namespace test_schedulers {

// The learning rate as a function of the step.
auto schedule(const std::string& name, long warmup, long total, float final_fraction) {
    const LearningRateSchedule schedule{name, 1e-3f, warmup, final_fraction};
    return [=](long step) { return learning_rate(schedule, total, step); };
}

TEST(Schedulers, every_schedule_warms_up_in_a_straight_line_to_the_peak) {
    for (const char* name : {"cosine", "linear", "constant", "wsd"}) {
        const auto s = schedule(name, 10, 100, 0.1f);
        for (long step = 0; step < 10; step++) {
            EXPECT_FLOAT_EQ(s(step), 1e-4f * float(step + 1)) << name << " at step " << step;
        }
        EXPECT_FLOAT_EQ(s(10), 1e-3f) << name;
    }
}

TEST(Schedulers, cosine_is_halfway_in_the_middle_and_at_the_final_fraction_at_the_end) {
    const auto s = schedule("cosine", 20, 100, 0.1f);
    EXPECT_FLOAT_EQ(s(20), 1e-3f);
    EXPECT_FLOAT_EQ(s(40), 1e-3f * (0.1f + 0.9f * 0.85355339f));  // (1 + cos 45 degrees) / 2
    EXPECT_FLOAT_EQ(s(60), 1e-3f * 0.55f);
    EXPECT_FLOAT_EQ(s(80), 1e-3f * (0.1f + 0.9f * 0.14644661f));
    EXPECT_FLOAT_EQ(s(100), 1e-4f);
    EXPECT_FLOAT_EQ(s(1000), 1e-4f);
}

TEST(Schedulers, linear_is_a_straight_line) {
    const auto s = schedule("linear", 0, 80, 0.0f);
    for (long step = 0; step <= 80; step++) {
        EXPECT_NEAR(s(step), 1e-3f * float(80 - step) / 80.0f, 1e-9f);
    }
}

TEST(Schedulers, constant_stays_to_the_end) {
    const auto s = schedule("constant", 0, 50, 0.1f);
    for (long step : {0L, 1L, 49L, 50L}) { EXPECT_EQ(s(step), 1e-3f); }
}

TEST(Schedulers, wsd_decays_in_the_last_fifth_as_one_minus_the_root) {
    const auto s = schedule("wsd", 10, 500, 0.1f);
    for (long step : {10L, 200L, 399L, 400L}) { EXPECT_FLOAT_EQ(s(step), 1e-3f) << step; }
    EXPECT_FLOAT_EQ(s(401), 1e-3f * (0.1f + 0.9f * 0.9f));
    EXPECT_FLOAT_EQ(s(425), 1e-3f * (0.1f + 0.9f * 0.5f));
    EXPECT_FLOAT_EQ(s(481), 1e-3f * (0.1f + 0.9f * 0.1f));
    EXPECT_FLOAT_EQ(s(500), 1e-4f);
}

TEST(Schedulers, a_warm_up_as_long_as_the_run_never_decays) {
    for (const char* name : {"cosine", "linear", "constant", "wsd"}) {
        const auto s = schedule(name, 5, 5, 0.0f);
        for (long step = 0; step < 5; step++) {
            EXPECT_FLOAT_EQ(s(step), 2e-4f * float(step + 1)) << name;
        }
    }
}

TEST(Schedulers, an_unknown_name_is_an_error_that_lists_the_known_ones) {
    const std::string message = user_error([] { schedule_kind("cosin"); });
    EXPECT_TRUE(contains(message, "'cosin'"));
    EXPECT_TRUE(contains(message, "cosine, linear, constant and wsd"));
}

}  // namespace test_schedulers
