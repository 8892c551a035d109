// The schedule: which blocks form a fragment, when it is sent and due, and the numbers of the exchanges.
#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "streaming/schedule.h"

namespace {

struct Case {
    int layers, embedding, fragment_layers;
    FragmentPattern pattern;
    long H;
};

std::vector<Case> many_cases() {
    std::vector<Case> cases;
    for (int layers : {1, 2, 3, 6, 7, 12, 24}) {
        for (int embedding : {1, 2, 5}) {
            for (int fragment_layers : {0, 1, 2, 3, 5, 30}) {
                for (FragmentPattern pattern : {FragmentPattern::strided, FragmentPattern::sequential}) {
                    for (long H : {1, 2, 7, 10, 30, 100}) {
                        cases.push_back({layers, embedding, fragment_layers, pattern, H});
                    }
                }
            }
        }
    }
    return cases;
}

std::vector<Fragment> fragments_of(const Case& c) {
    return make_fragments(c.layers, c.layers + c.embedding, c.fragment_layers, c.pattern, c.H);
}

TEST(Schedule, every_block_is_in_exactly_one_fragment) {
    for (const Case& c : many_cases()) {
        std::multiset<int> seen;
        for (const Fragment& fragment : fragments_of(c)) {
            EXPECT_FALSE(fragment.blocks.empty());
            EXPECT_TRUE(std::is_sorted(fragment.blocks.begin(), fragment.blocks.end()));
            seen.insert(fragment.blocks.begin(), fragment.blocks.end());
        }
        ASSERT_EQ(seen.size(), size_t(c.layers + c.embedding));
        for (int block = 0; block < c.layers + c.embedding; block++) { ASSERT_EQ(seen.count(block), 1u); }
    }
}

TEST(Schedule, no_fragment_holds_more_layers_than_asked_for_and_none_mixes_layers_and_embedding) {
    for (const Case& c : many_cases()) {
        const std::vector<Fragment> fragments = fragments_of(c);
        if (c.fragment_layers == 0) {
            ASSERT_EQ(fragments.size(), 1u);
            continue;
        }
        const int layer_fragments = (c.layers + c.fragment_layers - 1) / c.fragment_layers;
        ASSERT_EQ(fragments.size(), size_t(layer_fragments + c.embedding));
        for (const Fragment& fragment : fragments) {
            bool embedding = fragment.blocks[0] >= c.layers;
            ASSERT_LE(fragment.blocks.size(), embedding ? 1u : size_t(c.fragment_layers));
            ASSERT_EQ(fragment.blocks.back() >= c.layers, embedding);
        }
    }
}

TEST(Schedule, strided_interleaves_layers_and_sequential_keeps_neighbours_together) {
    auto blocks = [](FragmentPattern pattern) {
        std::vector<std::vector<int>> result;
        for (const Fragment& one : make_fragments(7, 9, 3, pattern, 10)) { result.push_back(one.blocks); }
        return result;
    };
    EXPECT_EQ(blocks(FragmentPattern::strided),
              (std::vector<std::vector<int>>{{0, 3, 6}, {1, 4}, {2, 5}, {7}, {8}}));
    EXPECT_EQ(blocks(FragmentPattern::sequential),
              (std::vector<std::vector<int>>{{0, 1, 2}, {3, 4, 5}, {6}, {7}, {8}}));
}

TEST(Schedule, every_fragment_is_sent_exactly_once_in_any_H_steps_after_its_first_and_once_by_step_H) {
    for (const Case& c : many_cases()) {
        for (const Fragment& fragment : fragments_of(c)) {
            ASSERT_GE(fragment.offset, 0);
            ASSERT_LT(fragment.offset, c.H);
            std::vector<int> sent(size_t(4 * c.H + 1));
            for (long step = 1; step <= 4 * c.H; step++) { sent[step] = is_sent(fragment, step, c.H); }
            ASSERT_FALSE(is_sent(fragment, 0, c.H));
            ASSERT_EQ(std::accumulate(sent.begin() + 1, sent.begin() + 1 + c.H, 0), 1) << "by step H";
            for (long first = 1; first <= 3 * c.H; first++) {
                ASSERT_EQ(std::accumulate(sent.begin() + first, sent.begin() + first + c.H, 0), 1);
            }
            ASSERT_TRUE(is_sent(fragment, first_send(fragment, c.H), c.H));
        }
    }
}

TEST(Schedule, offsets_spread_the_fragments_evenly_even_where_H_is_no_multiple_of_P_or_smaller) {
    auto offsets = [](long H, int P) {
        std::vector<long> result;
        for (const Fragment& f : make_fragments(P - 1, P, 1, FragmentPattern::strided, H)) {
            result.push_back(f.offset);
        }
        return result;
    };
    EXPECT_EQ(offsets(100, 5), (std::vector<long>{0, 20, 40, 60, 80}));
    EXPECT_EQ(offsets(10, 4), (std::vector<long>{0, 2, 5, 7}));
    EXPECT_EQ(offsets(3, 7), (std::vector<long>{0, 0, 0, 1, 1, 2, 2}));
    EXPECT_EQ(offsets(1, 3), (std::vector<long>{0, 0, 0}));
}

TEST(Schedule, a_fragment_is_due_overlap_steps_after_it_was_sent) {
    const Fragment fragment{{0}, 4};
    for (long overlap = 0; overlap < 10; overlap++) {
        for (long step = 1; step <= 40; step++) {
            bool expected = step - overlap >= 4 && (step - overlap) % 10 == 4;
            ASSERT_EQ(is_due(fragment, step, 10, overlap), expected) << step << " " << overlap;
        }
    }
}

TEST(Schedule, sync_numbers_count_the_exchanges_in_the_order_of_step_and_fragment) {
    for (const Case& c : many_cases()) {
        const std::vector<Fragment> fragments = fragments_of(c);
        long expected = 0;
        for (long step = 1; step <= 3 * c.H; step++) {
            for (int p = 0; p < int(fragments.size()); p++) {
                if (is_sent(fragments[p], step, c.H)) {
                    ASSERT_EQ(sync_number(fragments, p, step, c.H), expected);
                    expected++;
                }
            }
        }
        ASSERT_EQ(expected, 3 * long(fragments.size()));
    }
}

TEST(Schedule, most_in_flight_is_the_largest_number_of_fragments_between_send_and_receive) {
    for (const Case& c : many_cases()) {
        const std::vector<Fragment> fragments = fragments_of(c);
        for (long overlap : {0L, 1L, 3L, c.H / 2, c.H - 1}) {
            if (overlap >= c.H) { continue; }
            int now = 0, most = 0;
            for (long step = 1; step <= 3 * c.H; step++) {
                for (const Fragment& fragment : fragments) { now += is_sent(fragment, step, c.H); }
                most = std::max(most, now);
                for (const Fragment& fragment : fragments) { now -= is_due(fragment, step, c.H, overlap); }
            }
            ASSERT_EQ(most_in_flight(fragments, c.H, overlap), most) << c.H << " " << overlap;
        }
    }
}

TEST(Schedule, offsets_can_be_set_freely_below_H) {
    std::vector<Fragment> fragments = make_fragments(2, 3, 1, FragmentPattern::strided, 6);
    set_offsets(fragments, {5, 0, 5}, 6);
    EXPECT_EQ(first_send(fragments[0], 6), 5);
    EXPECT_EQ(first_send(fragments[1], 6), 6);
    EXPECT_TRUE(is_sent(fragments[2], 11, 6));
    EXPECT_EQ(sync_number(fragments, 2, 5, 6), 1);
    EXPECT_EQ(sync_number(fragments, 1, 6, 6), 2);
    EXPECT_THROW(set_offsets(fragments, {0, 1, 6}, 6), UserError);
    EXPECT_THROW(set_offsets(fragments, {0, 1, -1}, 6), UserError);
    EXPECT_THROW(set_offsets(fragments, {0, 1}, 6), UserError);
}

TEST(Schedule, a_wrong_pattern_or_a_negative_fragment_size_is_the_users_mistake) {
    EXPECT_EQ(parse_fragment_pattern("strided"), FragmentPattern::strided);
    EXPECT_EQ(parse_fragment_pattern("sequential"), FragmentPattern::sequential);
    EXPECT_THROW(parse_fragment_pattern("random"), UserError);
    EXPECT_THROW(make_fragments(6, 7, -1, FragmentPattern::strided, 10), UserError);
}

}  // namespace
