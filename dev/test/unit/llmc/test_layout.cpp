// Layout, random numbers and initial parameters' order: every value has exactly one place.
#include "llmc/layout.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "llmc/random.h"

namespace test_layout {

const GptShape tiny{32, 257, 384, 3, 2, 48};

class Layouts : public testing::TestWithParam<std::tuple<int, int>> {
protected:
    Layout layout = gpt_layout(tiny, std::get<0>(GetParam()), std::get<1>(GetParam()));
};

TEST_P(Layouts, blocks_follow_each_other_and_are_whole_shards_of_whole_quantization_blocks) {
    long offset = 0;
    for (const Block& block : layout.blocks) {
        EXPECT_EQ(block.offset, offset);
        EXPECT_EQ(block.size % (quantization_block * layout.ranks), 0);
        EXPECT_LE(block.values, block.size);
        EXPECT_LE(block.decayed, block.values);
        offset += block.size;
    }
    EXPECT_EQ(offset, layout.size);
}

TEST_P(Layouts, tensors_do_not_overlap_and_fill_all_but_the_padding) {
    std::vector<int> owners(static_cast<size_t>(layout.size), 0);
    long values = 0;
    for (const Tensor& tensor : layout.tensors) {
        for (long i = 0; i < tensor.count(); i++) { owners[tensor.offset + i]++; }
        values += tensor.count();
    }
    EXPECT_EQ(values, layout.values);
    for (const Block& block : layout.blocks) {
        for (long i = 0; i < block.size; i++) {
            EXPECT_EQ(owners[block.offset + i], i < block.values ? 1 : 0);
        }
    }
}

TEST_P(Layouts, decay_covers_exactly_the_matrices) {
    for (const Tensor& tensor : layout.tensors) {
        for (long i = tensor.offset; i < tensor.offset + tensor.count(); i++) {
            for (const Block& block : layout.blocks) {
                if (i >= block.offset && i < block.offset + block.size) {
                    ASSERT_EQ(i - block.offset < block.decayed, tensor.decay) << tensor.name;
                }
            }
        }
    }
}

TEST_P(Layouts, shards_of_all_ranks_are_the_model) {
    std::set<long> seen;
    for (int rank = 0; rank < layout.ranks; rank++) {
        long shard = 0;
        for (size_t b = 0; b < layout.blocks.size(); b++) {
            const Range range = layout.shard(int(b), rank);
            EXPECT_EQ(range.shard, shard);
            shard += range.count;
            for (long i = 0; i < range.count; i++) { EXPECT_TRUE(seen.insert(range.flat + i).second); }
        }
        EXPECT_EQ(shard, layout.shard_size());
    }
    EXPECT_EQ(long(seen.size()), layout.size);
}

TEST_P(Layouts, logical_indices_do_not_depend_on_the_number_of_ranks) {
    const Layout one = gpt_layout(tiny, 1, 0);
    for (size_t i = 0; i < layout.tensors.size(); i++) {
        EXPECT_EQ(layout.logical_index(layout.tensors[i].offset), one.logical_index(one.tensors[i].offset));
    }
}

TEST_P(Layouts, no_embedding_block_is_larger_than_a_fragment_of_layers) {
    const int fragment_layers = std::get<1>(GetParam());
    if (fragment_layers == 0) {
        EXPECT_EQ(layout.blocks.size(), size_t(layout.layers) + 1);
        return;
    }
    for (size_t b = size_t(layout.layers); b < layout.blocks.size(); b++) {
        EXPECT_LE(layout.blocks[b].size, std::min(fragment_layers, tiny.layers) * layout.blocks[0].size);
    }
}

INSTANTIATE_TEST_SUITE_P(ranks_and_fragments, Layouts,
                         testing::Combine(testing::Values(1, 2, 3, 8), testing::Values(0, 1, 3)));

TEST(Layout, gpt2_124m_is_cut_so_that_its_largest_exchange_is_three_layers) {
    const Layout layout = gpt_layout(GptShape{}, 8, 3);
    EXPECT_EQ(layout.values, 124475904);
    EXPECT_EQ(layout.blocks.size(), 14u);
    for (size_t b = 12; b < 14; b++) { EXPECT_LE(layout.blocks[b].size, 3 * layout.blocks[0].size); }
}

// The known answers of Random123 1.09, kat_vectors: philox4x32 10.
TEST(Random, philox_gives_the_published_numbers) {
    auto words = [](Philox4 p) { return std::vector<uint32_t>(p.v, p.v + 4); };
    EXPECT_EQ(words(philox4x32_10({{0, 0, 0, 0}}, 0, 0)),
              (std::vector<uint32_t>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
    EXPECT_EQ(words(philox4x32_10({{~0u, ~0u, ~0u, ~0u}}, ~0u, ~0u)),
              (std::vector<uint32_t>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
    EXPECT_EQ(
        words(philox4x32_10({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0)),
        (std::vector<uint32_t>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Random, normals_have_mean_zero_variance_one_and_stay_within_six) {
    double sum = 0, squares = 0;
    const int n = 200000;
    for (int i = 0; i < n; i++) {
        const double x = standard_normal(7, RandomUse::parameters, uint64_t(i));
        ASSERT_LE(std::abs(x), 6.0);
        sum += x;
        squares += x * x;
    }
    EXPECT_NEAR(sum / n, 0, 5.0 / std::sqrt(n));
    EXPECT_NEAR(squares / n, 1, 0.02);
}

}  // namespace test_layout
