// What a run says of its plan: blocks, bytes and rates.
#include <gtest/gtest.h>

#include "dev/test/unit/toy_layout.h"
#include "llmc/run/report.h"

namespace test_report {

TEST(Report, it_says_blocks_bytes_offsets_average_and_peak) {
    const Layout layout = toy_layout({256, 256, 256, 256, 128}, 4);
    DilocoOptions options;
    options.inner_steps = 10;
    options.overlap = 4;
    std::vector<Fragment> fragments = make_fragments(layout, 2, FragmentPattern::strided, 10);
    // fragments of 512, 512 and 128 values: 64 + 16 + n / 2 bytes to each of two other workers
    EXPECT_EQ(plan(options, fragments, layout, 3),
              "fragment  offset  every      bytes a sync  blocks\n"
              "       0       0     10               672  b0, b2\n"
              "       1       3     10               672  b1, b3\n"
              "       2       6     10               288  b4\n"
              "a process sends 1632 bytes every 10 steps by all_gather, 163 a step on average, 672 in a step at "
              "most; at most 2 in flight at a time\n");
    const auto whole = make_fragments(layout, 0, FragmentPattern::strided, 10);
    EXPECT_NE(plan(options, whole, layout, 3).find("b0..b4\n"), std::string::npos);
    fragments[0].offset = fragments[1].offset = 1;
    EXPECT_NE(plan(options, fragments, layout, 3).find("1344 in a step at most"), std::string::npos);
}

TEST(Report, few_outer_steps_are_said_to_cost_what_was_measured) {
    Options o;
    o.diloco.inner_steps = 30;
    const std::string advice = "% above data-parallel's, or more where outer rates are not tuned; a smaller -H "
                               "or a longer run narrows the gap";
    auto cost = [&](const std::string& optimizer, int workers, long steps) {
        o.optimizer = optimizer, o.workers = workers;
        return outer_steps(o, steps);
    };
    EXPECT_EQ(cost("adamw", 2, 1000), "33 outer steps, H = 30: few, so expect a loss some 6" + advice);
    EXPECT_EQ(cost("adamw", 4, 1000), "33 outer steps, H = 30: few, so expect a loss some 16" + advice);
    EXPECT_EQ(cost("muon", 4, 1000), "33 outer steps, H = 30: few, so expect a loss some 6" + advice);
    EXPECT_EQ(cost("muon", 2, 36 * 30), "36 outer steps, H = 30: few, so expect a loss some 2" + advice);
    EXPECT_EQ(cost("muon", 2, 30), "1 outer step, H = 30: few, so expect a loss more than 3" + advice);
    EXPECT_EQ(cost("muon", 2, 30000), "1000 outer steps, H = 30");
    EXPECT_EQ(cost("adamw", 1, 30), "1 outer step, H = 30");
}

TEST(Report, a_bucket_is_asked_as_often_as_was_counted_and_that_has_its_price) {
    EXPECT_EQ(bucket_requests(2), "about 7 requests a sync and 4 a second from each process: at AWS's prices "
                                  "$0.15 for 10,000 syncs and $0.77 a day");
    EXPECT_EQ(bucket_requests(4), "about 12 requests a sync and 6 a second from each process: at AWS's prices "
                                  "$0.15 for 10,000 syncs and $0.83 a day");
}

TEST(Report, rates_are_the_plan_in_megabits_at_the_measured_step_time) {
    const std::vector<Fragment> fragments = make_fragments(2, 3, 1, FragmentPattern::strided, 30);
    const std::string line = rates(fragments, {1000000, 1000000, 3000000}, 30, 5, 0.5, 1);
    EXPECT_EQ(line, "at 0.5 s a step a process sends 2.667 Mbit/s on average and 48 Mbit/s in the step that "
                    "sends most; with an overlap of 5 a link of 9.6 Mbit/s keeps up");
    EXPECT_EQ(rates(fragments, {1000000, 1000000, 3000000}, 30, 0, 0.5, 1),
              line.substr(0, line.find(';')));
    EXPECT_EQ(rates(fragments, {1000000, 1000000, 3000000}, 30, 5, 0.5, 3),  // an elastic worker of three
              line.substr(0, line.find("9.6")) + "28.8 Mbit/s keeps up");
}

TEST(Report, what_is_sent_in_a_period_is_every_fragment_once_at_its_offset) {
    std::vector<Fragment> fragments = make_fragments(2, 3, 1, FragmentPattern::strided, 4);
    for (int p = 0; p < 3; p++) { fragments[size_t(p)].offset = p == 1 ? 3 : 1; }
    EXPECT_EQ(sent_in_period(fragments, {10, 20, 30}, 4), (std::vector<size_t>{0, 40, 0, 20}));
}

// Whether everything arrives within its overlap over a link that passes `rate` bytes per step, in order.
bool keeps_up(const std::vector<size_t>& sent, long overlap, double rate) {
    const long H = long(sent.size());
    double waiting = 0;  // bytes that have been sent and not received
    for (long step = 0; step < 200 * H; step++) {
        waiting += double(sent[size_t(step % H)]);
        if (waiting > rate * double(overlap)) { return false; }
        waiting = std::max(0.0, waiting - rate);
    }
    return true;
}

TEST(Report, the_slowest_link_without_waits_keeps_up_and_one_that_is_slower_does_not) {
    for (int layers : {1, 2, 3, 6, 7, 12, 24}) {
        for (long H : {1, 2, 7, 10, 30, 100}) {
            const auto fragments = make_fragments(layers, layers + 2, 2, FragmentPattern::strided, H);
            std::vector<size_t> bytes;
            for (size_t p = 0; p < fragments.size(); p++) { bytes.push_back(1000 + 777 * p % 1500); }
            const std::vector<size_t> sent = sent_in_period(fragments, bytes, H);
            for (long overlap : {1L, 3L, H / 2, H - 1}) {
                if (overlap < 1 || overlap >= H) { continue; }
                const double rate = bytes_a_step_without_waits(sent, overlap);
                ASSERT_TRUE(keeps_up(sent, overlap, rate * 1.0001)) << H << " " << overlap;
                ASSERT_FALSE(keeps_up(sent, overlap, rate * 0.99)) << H << " " << overlap;
            }
        }
    }
}

TEST(Report, with_a_large_h_the_link_is_found_at_once) {
    std::vector<size_t> sent(1000000, 0);
    for (size_t step : {0, 1, 500000}) { sent[step] = 1000; }
    EXPECT_EQ(bytes_a_step_without_waits(sent, 1), 1000);
    EXPECT_EQ(bytes_a_step_without_waits(sent, 10), 2000.0 / 11);
}

}  // namespace test_report
