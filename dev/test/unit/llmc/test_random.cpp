// permuted(): a permutation for any count, another one for each number and seed, and random enough that a
// chi-squared test sees nothing.
#include "llmc/random.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <set>
#include <vector>

namespace test_random {

std::vector<uint64_t> permutation(uint64_t count, uint64_t seed, uint32_t number) {
    std::vector<uint64_t> all;
    for (uint64_t i = 0; i < count; i++) {
        all.push_back(permuted(i, count, seed, RandomUse::shuffle, number));
    }
    return all;
}

TEST(Permuted, every_number_comes_once) {
    for (uint64_t count : {1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 1000, 4096, 4097}) {
        const std::vector<uint64_t> all = permutation(count, 7, 3);
        const std::set<uint64_t> found(all.begin(), all.end());
        EXPECT_EQ(found.size(), count);
        EXPECT_EQ(*found.rbegin(), count - 1);
    }
    const uint64_t huge = uint64_t(1) << 62;
    EXPECT_LT(permuted(huge - 1, huge, 7, RandomUse::shuffle, 0), huge);
}

TEST(Permuted, each_number_and_seed_has_a_permutation_of_its_own) {
    std::set<std::vector<uint64_t>> found;
    for (uint64_t seed : {1, 2}) {
        for (uint32_t number = 0; number < 50; number++) { found.insert(permutation(100, seed, number)); }
    }
    EXPECT_EQ(found.size(), 100u);
}

// As an independent program draws them: dev/test/tools/test_peer_losses.py has the same numbers.
TEST(Permuted, known_permutations) {
    EXPECT_EQ(permutation(10, 1337, 0), std::vector<uint64_t>({4, 8, 1, 7, 0, 2, 9, 5, 6, 3}));
    EXPECT_EQ(permutation(17, (uint64_t(1) << 40) + 5, 3),
              std::vector<uint64_t>({13, 3, 2, 11, 15, 14, 4, 7, 8, 16, 10, 12, 6, 0, 9, 1, 5}));
}

// For numbers that are equally likely, chi-squared is about the degrees of freedom, give or take their root.
double excess(const std::vector<long>& counts) {
    double total = 0, squares = 0;
    for (long count : counts) { total += double(count); }
    const double expected = total / double(counts.size()), freedom = double(counts.size() - 1);
    for (long count : counts) { squares += std::pow(double(count) - expected, 2) / expected; }
    return (squares - freedom) / std::sqrt(2 * freedom);
}

TEST(Permuted, places_and_neighbours_are_equally_likely) {
    const uint64_t n = 20, trials = 20000;
    std::vector<long> places(n * n), steps(n - 1);
    for (uint32_t number = 0; number < trials; number++) {
        const std::vector<uint64_t> all = permutation(n, 1, number);
        for (uint64_t i = 0; i < n; i++) { places[i * n + all[i]]++; }
        const uint64_t i = number % (n - 1);  // one of each permutation: all of one are not independent
        steps[(all[i + 1] + n - all[i]) % n - 1]++;
    }
    EXPECT_LT(std::abs(excess(places)), 5);
    EXPECT_LT(std::abs(excess(steps)), 5);
}

}  // namespace test_random
