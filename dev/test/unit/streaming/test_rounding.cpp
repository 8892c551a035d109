// Philox; stochastic rounding of parameters to bf16: which random bits a value gets, and how they round it;
// and the random bits of values on the wire.
#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "llmc/rounding.h"
#include "streaming/rounding.h"

namespace test_rounding {

using Halves = std::vector<uint32_t>;

// The random bits, 16 each, of the 8 values in the pack of `index`.
Halves halves_of_pack(const StochasticRounding& rounding, uint64_t index) {
    const Philox4 bits = rounding_bits(rounding, index);
    Halves halves;
    for (uint64_t i = index / 8 * 8; i < index / 8 * 8 + 8; i++) {
        halves.push_back(rounding_bits_of(bits, i));
    }
    return halves;
}

uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

float rounded(float x, uint32_t random) {
    return from_bits(uint32_t(bf16_rounded_stochastically(x, random)) << 16);
}

// Expected: random_bits(seed, 4, [index // 8], step) of dev/reference/reference.py, the words' lower halves first.
TEST(Rounding, values_of_a_pack_get_the_halves_of_philoxs_words_in_order) {
    const Halves of_first = {0x396f, 0x5e19, 0x8b4b, 0x13e4, 0xd625, 0x1f81, 0x25e4, 0xf3bc};
    EXPECT_EQ(halves_of_pack({42, 3, 0}, 0), of_first);
    EXPECT_EQ(halves_of_pack({42, 3, 0}, 7), of_first);
    // The seed and the pack's number have more than 32 bits.
    const Halves far = {0x8816, 0x2bb9, 0xaf0f, 0x2e0f, 0x5824, 0x4beb, 0x7a40, 0xa7f4};
    EXPECT_EQ(halves_of_pack({0x123456789abcdef0, 7, 0}, 0x5000000058), far);
}

// The index is already that in the model: the caller adds `first`, where a shard begins.
TEST(Rounding, bits_depend_on_the_index_in_the_model_alone) {
    EXPECT_EQ(halves_of_pack({42, 3, 4096}, 640), halves_of_pack({42, 3, 0}, 640));
}

TEST(Rounding, steps_seeds_and_packs_get_other_bits_each) {
    std::vector<Halves> all;
    for (uint64_t seed : {uint64_t(42), uint64_t(43), 42 | uint64_t(1) << 32}) {
        for (uint32_t step : {3u, 4u, 3u | 1u << 31}) {
            for (uint64_t index : {uint64_t(0), uint64_t(8), uint64_t(16), uint64_t(8) << 32}) {
                all.push_back(halves_of_pack({seed, step, 0}, index));
            }
        }
    }
    for (size_t i = 0; i < all.size(); i++) {
        for (size_t j = 0; j < 8; j++) {
            for (size_t k = 0; k < j; k++) { EXPECT_NE(all[i][j], all[i][k]) << i; }
            // There are only 2^16 numbers, so two may be equal; these are not.
            for (size_t other = 0; other < i; other++) { EXPECT_NE(all[i][j], all[other][j]) << i; }
        }
    }
}

// Initial values of parameters, for example, use other random numbers.
TEST(Rounding, bits_are_of_a_use_of_their_own) {
    const Philox4 own = rounding_bits({42, 3, 0}, 80);
    for (RandomUse use : {RandomUse::parameters, RandomUse::shuffle, RandomUse::sampling}) {
        EXPECT_NE(own.v[0], random_bits(42, use, 10, 3).v[0]);
    }
}

// bf16's spacing is 2^-7 above 1 and 2^-8 below it.
TEST(Rounding, the_bits_that_are_cut_off_carry_if_they_and_the_random_ones_reach_the_next_value) {
    const float x = from_bits(0x3f800000 | 0x0180);
    EXPECT_EQ(rounded(x, 0), 1.0f);
    EXPECT_EQ(rounded(x, 0x10000 - 0x0180 - 1), 1.0f);
    EXPECT_EQ(rounded(x, 0x10000 - 0x0180), 1.0f + 0x1p-7f);
    EXPECT_EQ(rounded(x, 0xffff), 1.0f + 0x1p-7f);
    const float below = from_bits(0x3f7f0001);
    EXPECT_EQ(rounded(below, 0xfffe), 1.0f - 0x1p-8f);
    EXPECT_EQ(rounded(below, 0xffff), 1.0f);
}

// Random bits move a value away from 0, whatever its sign.
TEST(Rounding, negative_values_are_rounded_as_their_magnitudes) {
    for (uint32_t random : {0u, 1u, 0x7fffu, 0x8000u, 0xfedcu, 0xffffu}) {
        for (float x : {1.0f + 0x1p-9f, 3.14159f, 1e-30f, 1e30f, FLT_TRUE_MIN, 0.0f}) {
            EXPECT_EQ(bits_of(rounded(-x, random)), bits_of(-rounded(x, random))) << x << ", " << random;
        }
    }
}

TEST(Rounding, without_random_bits_it_truncates_and_with_all_it_rounds_up) {
    for (uint32_t high : {0u, 1u, 0x80u, 0x3f80u, 0x3fffu, 0x4049u, 0x7f7eu}) {
        for (uint32_t low : {1u, 0x7fffu, 0x8000u, 0xffffu}) {
            const float x = from_bits(high << 16 | low);
            EXPECT_EQ(bf16_rounded_stochastically(x, 0), high) << x;
            EXPECT_EQ(bf16_rounded_stochastically(x, 0xffff), high + 1) << x;
        }
    }
}

TEST(Rounding, what_bf16_holds_stays_as_it_is) {
    for (uint32_t high = 0; high < 0x10000; high++) {
        if ((high & 0x7fff) > 0x7f80) { continue; }  // NaN
        for (uint32_t random : {0u, 1u, 0x8000u, 0xffffu}) {
            ASSERT_EQ(bf16_rounded_stochastically(from_bits(high << 16), random), high);
        }
    }
}

TEST(Rounding, infinities_stay_infinite_and_nans_nan) {
    for (uint32_t random : {0u, 1u, 0x8000u, 0xffffu}) {
        EXPECT_EQ(rounded(INFINITY, random), INFINITY);
        EXPECT_EQ(rounded(-INFINITY, random), -INFINITY);
        // bf16 keeps the upper 7 bits of a NaN's payload: they are 0, or only they are set, or all bits are.
        for (uint32_t bits : {0x7f800001u, 0x7f80ffffu, 0x7f810000u, 0x7fc00000u, 0x7fffffffu}) {
            EXPECT_TRUE(std::isnan(rounded(from_bits(bits), random))) << std::hex << bits;
            const float negative = rounded(from_bits(bits | 0x80000000), random);
            EXPECT_TRUE(std::isnan(negative) && std::signbit(negative)) << std::hex << bits;
        }
    }
}

// Above the largest value the next one is infinity, with the probability that its distance gives.
TEST(Rounding, the_largest_floats_may_become_infinite) {
    EXPECT_EQ(rounded(FLT_MAX, 0), from_bits(0x7f7f0000));
    EXPECT_EQ(rounded(FLT_MAX, 1), INFINITY);
    EXPECT_EQ(rounded(from_bits(0x7f7f0000), 0xffff), from_bits(0x7f7f0000));
}

// Over all 2^16 random numbers a value is rounded up as often as its discarded bits say: the mean is exact.
TEST(Rounding, the_mean_over_all_random_numbers_is_the_value) {
    for (float x : {1.0f + 0x1p-23f, 1.2345678f, -2.7182817f, 1e-20f, -1e20f, from_bits(0x00012345)}) {
        double sum = 0;
        for (uint32_t random = 0; random < 0x10000; random++) { sum += double(rounded(x, random)); }
        EXPECT_EQ(sum / 0x10000, double(x));
    }
}

// The same for the numbers that one step draws for equal values: within four standard deviations, for each
// place in a pack and for all together.
TEST(Rounding, the_mean_over_a_models_values_is_the_value) {
    const long packs = 1 << 14;
    for (double fraction : {0.0625, 0.5, 0.875}) {
        const float x = float(1 + fraction * 0x1p-7);
        long up[8] = {};
        for (long pack = 0; pack < packs; pack++) {
            const Philox4 bits = rounding_bits({1, 9, 0}, uint64_t(pack * 8));
            for (uint64_t i = 0; i < 8; i++) { up[i] += rounded(x, rounding_bits_of(bits, i)) > 1; }
        }
        long all = 0;
        const double deviation = std::sqrt(fraction * (1 - fraction) / packs);
        for (long count : up) {
            EXPECT_NEAR(double(count) / packs, fraction, 4 * deviation);
            all += count;
        }
        EXPECT_NEAR(double(all) / (8 * packs), fraction, 4 * deviation / std::sqrt(8));
    }
}

// Random123's kat_vectors, "philox4x32 10": counter, key, result.
TEST(Philox, the_published_answers_come_out) {
    const struct {
        Philox4 counter;
        uint32_t key[2];
        Philox4 answer;
    } vectors[] = {
        {{{0, 0, 0, 0}}, {0, 0}, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
        {{{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}},
         {0xffffffff, 0xffffffff},
         {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
        {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
         {0xa4093822, 0x299f31d0},
         {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}},
    };
    for (const auto& vector : vectors) {
        const Philox4 got = philox4x32_10(vector.counter, vector.key[0], vector.key[1]);
        for (int i = 0; i < 4; i++) { EXPECT_EQ(got.v[i], vector.answer.v[i]); }
    }
}

Halves words_of(const Rounding& rounding, uint64_t quad) {
    const Philox4 drawn = random_quad(rounding, quad);
    return Halves(drawn.v, drawn.v + 4);
}

// Expected: random_bits(seed, use + 256 worker, [quad], sync) of dev/reference/reference.py.
TEST(WireRounding, four_values_get_philoxs_words_of_seed_worker_sync_stage_and_index) {
    const Rounding send = stochastic_rounding(42, 3, 17, RandomUse::send_rounding);
    EXPECT_EQ(words_of(send, 10), (Halves{0x1b642393, 0xa258c38e, 0x768a5428, 0xce4b6ac3}));
    const Rounding owner =
        stochastic_rounding(0x123456789abcdef0, 1 << 23, 0x89abcdef, RandomUse::owner_rounding);
    EXPECT_EQ(words_of(owner, 0x5000000058 / 4), (Halves{0x9a4088ea, 0xa9fb1d88, 0xf3ed62ab, 0x0415645d}));
}

TEST(WireRounding, seeds_workers_syncs_stages_and_quads_get_other_words_each) {
    std::vector<uint32_t> all;
    for (uint64_t seed : {uint64_t(42), uint64_t(43), 42 | uint64_t(1) << 32}) {
        for (int worker : {0, 1, 256, 1 << 23}) {
            for (uint64_t sync : {0, 1, 256}) {
                for (RandomUse use : {RandomUse::send_rounding, RandomUse::owner_rounding}) {
                    for (uint64_t quad : {uint64_t(0), uint64_t(1), uint64_t(1) << 32}) {
                        const Halves words = words_of(stochastic_rounding(seed, worker, sync, use), quad);
                        all.insert(all.end(), words.begin(), words.end());
                    }
                }
            }
        }
    }
    std::sort(all.begin(), all.end());  // two of these 864 could be equal, among 2^32 numbers; they are not
    EXPECT_EQ(std::adjacent_find(all.begin(), all.end()), all.end());
}

TEST(Rounding, fp32_parameters_are_not_rounded) {
    EXPECT_EQ(rounded_parameter(1.2345678f, 0xffff), 1.2345678f);
}

}  // namespace test_rounding
