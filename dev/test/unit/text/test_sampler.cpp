// A token drawn at random has the frequencies of the definition, which sorts all tokens.
#include "llmc/text/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace test_sampler {

const float infinity = std::numeric_limits<float>::infinity(), not_a_number = std::nanf("");
const float largest_coin = 1 - 0x1p-24f;  // the largest value of uniform()

int sampled(const std::vector<float>& logits, const Sampling& sampling, float coin) {
    return sample_token(logits.data(), int(logits.size()), sampling, coin);
}

// The definition: sort all tokens, cut after top_k, cut where the sum reaches top_p of the rest, divide by
// the sum.
std::vector<double> probabilities(const std::vector<float>& logits, const Sampling& sampling) {
    std::vector<int> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return logits[size_t(a)] > logits[size_t(b)]; });
    if (sampling.top_k > 0 && size_t(sampling.top_k) < order.size()) { order.resize(size_t(sampling.top_k)); }
    auto weight = [&](int i) { return std::exp(double(logits[size_t(i)]) / sampling.temperature); };
    double sum = 0, kept = 0;
    for (int i : order) { sum += weight(i); }
    std::vector<double> result(logits.size());
    for (int i : order) {
        if (kept > 0 && kept >= sampling.top_p * sum) { break; }
        result[size_t(i)] = weight(i);
        kept += weight(i);
    }
    for (double& probability : result) { probability /= kept; }
    return result;
}

// How often each token is drawn with evenly spaced coins, which leaves nothing to chance.
std::vector<double> frequencies(const std::vector<float>& logits, const Sampling& sampling, int draws) {
    std::vector<double> result(logits.size());
    for (int i = 0; i < draws; i++) {
        const float coin = (float(i) + 0.5f) / float(draws);
        result[size_t(sampled(logits, sampling, coin))] += 1.0 / draws;
    }
    return result;
}

// The tokens that can be drawn.
std::vector<int> drawn(const std::vector<float>& logits, const Sampling& sampling) {
    std::vector<int> tokens;
    const std::vector<double> often = frequencies(logits, sampling, 1000);
    for (size_t i = 0; i < often.size(); i++) {
        if (often[i] > 0) { tokens.push_back(int(i)); }
    }
    return tokens;
}

using Tokens = std::vector<int>;

TEST(Sampler, draws_every_token_as_often_as_softmax_says) {
    const std::vector<float> logits = {0.5f, -1.0f, 2.0f, 0.0f, 1.5f};
    for (float temperature : {0.5f, 1.0f, 3.0f}) {
        double sum = 0;
        for (float logit : logits) { sum += std::exp(double(logit) / temperature); }
        const std::vector<double> often = frequencies(logits, {temperature}, 100000);
        for (size_t i = 0; i < logits.size(); i++) {
            EXPECT_NEAR(often[i], std::exp(double(logits[i]) / temperature) / sum, 3e-5);
        }
    }
}

TEST(Sampler, top_k_then_top_p_is_what_sorting_everything_gives) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0, 2);
    for (int trial = 0; trial < 200; trial++) {
        std::vector<float> logits(size_t(1 + trial % 40));
        for (float& logit : logits) { logit = normal(random); }
        if (trial % 2 == 0) {  // ties
            for (float& logit : logits) { logit = std::round(logit); }
        }
        Sampling sampling;
        sampling.temperature = std::vector<float>{0.3f, 1.0f, 2.5f}[random() % 3];
        sampling.top_k = int(random() % 45);
        sampling.top_p = std::vector<float>{0.0f, 0.1f, 0.5f, 0.9f, 0.999f, 1.0f}[random() % 6];
        const int draws = 2000;
        const std::vector<double> expected = probabilities(logits, sampling);
        const std::vector<double> often = frequencies(logits, sampling, draws);
        for (size_t i = 0; i < logits.size(); i++) {
            EXPECT_NEAR(often[i], expected[i], 1.01 / draws) << trial << " token " << i;
            if (expected[i] == 0) { EXPECT_EQ(often[i], 0) << trial << " token " << i; }
        }
    }
}

TEST(Sampler, a_large_vocabulary_is_cut_to_exactly_the_tokens_of_the_definition) {
    std::mt19937 random(2);
    std::normal_distribution<float> normal(0, 3);
    std::vector<float> logits(50257);
    for (float& logit : logits) { logit = normal(random); }
    for (const Sampling& sampling : {Sampling{1, 40, 1}, Sampling{1, 0, 0.9f}, Sampling{0.7f, 1000, 0.5f},
                                     Sampling{2, 50256, 0.9999f}}) {
        const std::vector<double> expected = probabilities(logits, sampling);
        std::vector<double> weights =
            sampling_weights(logits.data(), int(logits.size()),
                             *std::max_element(logits.begin(), logits.end()), sampling.temperature);
        if (sampling.top_k > 0) { keep_top_k(weights, logits.data(), sampling.top_k); }
        keep_top_p(weights, logits.data(), sampling.top_p);
        const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
        for (size_t i = 0; i < logits.size(); i++) { ASSERT_NEAR(weights[i] / sum, expected[i], 1e-12) << i; }
    }
}

TEST(Sampler, top_p_takes_no_more_tokens_than_it_takes) {
    // Probabilities of 1/2, 1/4, 1/8, 1/8, exactly.
    const std::vector<float> logits = {0, 2, 1, 0};
    const float temperature = float(1 / std::log(2.0));
    EXPECT_EQ(drawn(logits, {temperature, 0, 0}), Tokens({1}));
    EXPECT_EQ(drawn(logits, {temperature, 0, 0.49f}), Tokens({1}));
    EXPECT_EQ(drawn(logits, {temperature, 0, 0.51f}), Tokens({1, 2}));
    EXPECT_EQ(drawn(logits, {temperature, 0, 0.74f}), Tokens({1, 2}));
    EXPECT_EQ(drawn(logits, {temperature, 0, 0.76f}), Tokens({0, 1, 2}));
    EXPECT_EQ(drawn(logits, {temperature, 0, 0.88f}), Tokens({0, 1, 2, 3}));
    EXPECT_EQ(drawn(logits, {temperature, 0, 1}), Tokens({0, 1, 2, 3}));
    // top_k leaves two tokens, with probabilities of 2/3 and 1/3.
    EXPECT_EQ(drawn(logits, {temperature, 2, 0.66f}), Tokens({1}));
    EXPECT_EQ(drawn(logits, {temperature, 2, 0.67f}), Tokens({1, 2}));
}

TEST(Sampler, of_equal_tokens_the_first_ones_stay) {
    const std::vector<float> equal(8, 1.0f);
    EXPECT_EQ(drawn(equal, {1, 3, 1}), Tokens({0, 1, 2}));
    EXPECT_EQ(drawn(equal, {1, 0, 0.25f}), Tokens({0, 1}));
    EXPECT_EQ(drawn(equal, {0, 3, 1}), Tokens({0}));
    EXPECT_EQ(drawn({0, 2, 2, 1, 2}, {1, 2, 1}), Tokens({1, 2}));
}

TEST(Sampler, a_top_k_of_1_and_a_top_p_of_0_take_the_likeliest) {
    const std::vector<float> logits = {0.5f, 3, -1, 3, 2};
    for (float coin : {0.0f, 0.5f, largest_coin}) {
        EXPECT_EQ(sampled(logits, {1, 1, 1}, coin), 1);
        EXPECT_EQ(sampled(logits, {1, 0, 0}, coin), 1);
        EXPECT_EQ(sampled(logits, {0, 0, 1}, coin), 1);
    }
}

TEST(Sampler, what_keeps_all_tokens_changes_no_draw) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal(0, 2);
    std::vector<float> logits(300);
    for (float& logit : logits) { logit = normal(random); }
    for (int i = 0; i < 1000; i++) {
        const float coin = float(i) / 1000;
        const int token = sampled(logits, {0.8f, 0, 1}, coin);
        EXPECT_EQ(sampled(logits, {0.8f, 300, 1}, coin), token);
        EXPECT_EQ(sampled(logits, {0.8f, 1 << 30, 1}, coin), token);
    }
}

TEST(Sampler, holds_at_the_ends) {
    const std::vector<float> closed = {-infinity, 1.0f, 2.0f, -infinity};
    EXPECT_EQ(sampled(closed, {1}, 0), 1);
    EXPECT_EQ(sampled(closed, {1}, largest_coin), 2);
    EXPECT_EQ(sampled(closed, {1}, 1), 2);
    EXPECT_EQ(sampled(closed, {infinity}, 0), 1);
    EXPECT_EQ(sampled({1e30f, -1e30f, 3e38f, -3e38f}, {1e-30f}, 0.9f), 2);
    EXPECT_EQ(sampled({not_a_number, 1.0f, not_a_number}, {1}, 0), 1);
    EXPECT_EQ(sampled({not_a_number, 1.0f, not_a_number}, {1}, largest_coin), 1);
    EXPECT_EQ(sampled({not_a_number, not_a_number}, {1}, 0.5f), 0);
    EXPECT_EQ(sampled({0, infinity, 1}, {1}, 0), 1);
    EXPECT_EQ(sampled({-infinity, -infinity}, {1}, 0.5f), 0);
    EXPECT_EQ(sampled({-5.0f}, {1}, largest_coin), 0);
    const std::vector<float> equal(50257, 0.0f);
    EXPECT_EQ(sampled(equal, {1}, 0), 0);
    EXPECT_EQ(sampled(equal, {1}, largest_coin), 50256);
}

TEST(Sampler, tokens_that_cannot_be_drawn_are_not_brought_in_by_top_k_or_top_p) {
    for (const Sampling& sampling : {Sampling{1, 3, 1}, Sampling{1, 0, 0.999f}, Sampling{1, 5, 0.999f}}) {
        EXPECT_EQ(drawn({not_a_number, 1, -infinity, 1, not_a_number}, sampling), Tokens({1, 3}));
        EXPECT_EQ(drawn({-infinity, not_a_number}, sampling), Tokens({0}));
    }
    EXPECT_EQ(drawn({0, -1e6f, -2e6f}, {1, 2, 1}), Tokens({0}));
}

}  // namespace test_sampler
