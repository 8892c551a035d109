// The schedule: which blocks form a fragment, when it is sent and due, and the numbers of the exchanges.
#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "streaming/schedule.h"

namespace test_schedule {

const FragmentPattern all_patterns[] = {FragmentPattern::strided, FragmentPattern::sequential,
                                        FragmentPattern::balanced};

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
                for (FragmentPattern pattern : all_patterns) {
                    for (long H : {1, 2, 7, 10, 30, 100}) {
                        cases.push_back({layers, embedding, fragment_layers, pattern, H});
                    }
                }
            }
        }
    }
    return cases;
}

// Block sizes of a model as layout.h cuts it: layers of one size, and pieces of the embedding that are no
// larger than a fragment of layers and, except for the last one, almost as large.
std::vector<long> sizes_of(const Case& c) {
    const long layer = 1000;
    const long limit = c.fragment_layers == 0 ? 5000 : layer * std::min(c.layers, c.fragment_layers);
    std::vector<long> sizes(c.layers, layer);
    for (int piece = 1; piece < c.embedding; piece++) { sizes.push_back(limit - 10); }
    sizes.push_back(limit * (1 + c.layers % 5) / 5);
    return sizes;
}

std::vector<Fragment> fragments_of(const Case& c, const std::vector<long>& sizes) {
    return make_fragments(c.layers, c.layers + c.embedding, c.fragment_layers, c.pattern, c.H, sizes);
}

std::vector<Fragment> fragments_of(const Case& c) { return fragments_of(c, sizes_of(c)); }

long largest_fragment(const std::vector<Fragment>& fragments, const std::vector<long>& sizes) {
    long largest = 0;
    for (const Fragment& fragment : fragments) {
        long sum = 0;
        for (int block : fragment.blocks) { sum += sizes[size_t(block)]; }
        largest = std::max(largest, sum);
    }
    return largest;
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
        if (c.pattern == FragmentPattern::balanced) { continue; }
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

TEST(Schedule, balanced_has_as_many_fragments_as_strided_and_its_largest_is_no_larger) {
    int smaller = 0;
    for (Case c : many_cases()) {
        if (c.pattern != FragmentPattern::balanced) { continue; }
        const std::vector<long> sizes = sizes_of(c);
        const std::vector<Fragment> balanced = fragments_of(c, sizes);
        c.pattern = FragmentPattern::strided;
        const std::vector<Fragment> strided = fragments_of(c, sizes);
        ASSERT_EQ(balanced.size(), strided.size());
        const long largest = largest_fragment(balanced, sizes), before = largest_fragment(strided, sizes);
        ASSERT_LE(largest, before) << c.layers << " " << c.embedding << " " << c.fragment_layers;
        smaller += largest < before;
    }
    EXPECT_GT(smaller, 50);
}

// The size of the largest fragment in the best cut, found by trying all cuts.
long smallest_possible(const std::vector<long>& sizes, std::vector<long>& held, size_t block, long best) {
    if (block == sizes.size()) { return *std::max_element(held.begin(), held.end()); }
    for (size_t p = 0; p < held.size(); p++) {
        if (held[p] + sizes[block] < best) {
            held[p] += sizes[block];
            best = std::min(best, smallest_possible(sizes, held, block + 1, best));
            held[p] -= sizes[block];
        }
        if (held[p] == 0) { break; }  // other empty fragments would give the same
    }
    return best;
}

TEST(Schedule, balanced_is_within_a_third_of_the_best_for_blocks_of_any_sizes) {
    for (uint32_t seed = 1; seed <= 500; seed++) {
        uint32_t state = seed * 2654435761u;
        auto random = [&] { return (state = state * 1664525u + 1013904223u) >> 16; };
        std::vector<long> sizes(1 + random() % 9);
        for (long& size : sizes) { size = 128 * (1 + random() % 40); }
        const int count = 1 + int(random() % sizes.size());
        const std::vector<Fragment> fragments = balanced_fragments(sizes, count);

        std::multiset<int> seen;
        for (const Fragment& fragment : fragments) {
            ASSERT_FALSE(fragment.blocks.empty());
            seen.insert(fragment.blocks.begin(), fragment.blocks.end());
        }
        ASSERT_EQ(seen.size(), sizes.size());
        ASSERT_EQ(std::set<int>(seen.begin(), seen.end()).size(), sizes.size());
        std::vector<long> held(size_t(count), 0);
        const double best = double(smallest_possible(sizes, held, 0, 1L << 40));
        ASSERT_LE(double(largest_fragment(fragments, sizes)), best * (4.0 / 3 - 1.0 / (3 * count)) + 0.5);
    }
}

TEST(Schedule, balanced_is_the_same_on_every_worker_and_numbers_fragments_by_their_first_block) {
    auto blocks = [](std::vector<long> sizes, int count) {
        std::vector<std::vector<int>> result;
        for (const Fragment& one : balanced_fragments(sizes, count)) { result.push_back(one.blocks); }
        return result;
    };
    using Blocks = std::vector<std::vector<int>>;
    EXPECT_EQ(blocks({7, 7, 7, 7, 20, 10}, 3), (Blocks{{0, 1, 3}, {2, 5}, {4}}));
    EXPECT_EQ(blocks({5, 5, 5, 5}, 2), (Blocks{{0, 2}, {1, 3}}));
    EXPECT_EQ(blocks({1, 2, 3}, 1), (Blocks{{0, 1, 2}}));
}

TEST(Schedule, a_layout_is_balanced_by_the_sizes_of_its_blocks) {
    const Layout layout = gpt_layout({256, 1000, 1024, 6, 2, 128}, 1, 4);
    std::vector<long> sizes;
    for (const Block& block : layout.blocks) { sizes.push_back(block.size); }
    const auto balanced = make_fragments(layout, 4, FragmentPattern::balanced, 30);
    const auto strided = make_fragments(layout, 4, FragmentPattern::strided, 30);
    ASSERT_EQ(balanced.size(), strided.size());
    EXPECT_EQ(largest_fragment(strided, sizes), 3 * sizes[0]);
    EXPECT_LT(largest_fragment(balanced, sizes), 3 * sizes[0]);
    EXPECT_THROW(make_fragments(6, 7, 4, FragmentPattern::balanced, 30), std::logic_error);
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

TEST(Schedule, an_exchange_is_under_way_from_the_step_after_its_send_to_its_due_step) {
    for (const Case& c : many_cases()) {
        const std::vector<Fragment> fragments = fragments_of(c);
        for (long overlap : {0L, 1L, 3L, c.H / 2, c.H - 1}) {
            if (overlap >= c.H) { continue; }
            int now = 0;
            for (long step = 1; step <= 3 * c.H; step++) {
                ASSERT_EQ(is_exchanging(fragments, step, c.H, overlap), now > 0) << step << " " << overlap;
                for (const Fragment& fragment : fragments) {
                    now += is_sent(fragment, step, c.H) - is_due(fragment, step, c.H, overlap);
                }
            }
        }
    }
}

TEST(Schedule, a_wrong_pattern_is_the_users_mistake) {
    EXPECT_EQ(parse_fragment_pattern("strided"), FragmentPattern::strided);
    EXPECT_EQ(parse_fragment_pattern("balanced"), FragmentPattern::balanced);
    EXPECT_EQ(parse_fragment_pattern("sequential"), FragmentPattern::sequential);
    EXPECT_THROW(parse_fragment_pattern("random"), UserError);
}

}  // namespace test_schedule
