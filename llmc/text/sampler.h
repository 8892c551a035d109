// Sampling: draws a token with probability softmax(logits / temperature). Only the top_k likeliest tokens can
// be drawn (Fan et al. 2018, arXiv 1805.04833), and of these only the likeliest ones that together reach the
// probability top_p (nucleus sampling: Holtzman et al. 2019, arXiv 1904.09751). Of two equally likely tokens
// the one with the lower number counts as likelier, so that the same logits and coin always give the same
// token.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "llmc/random.h"

struct Sampling {
    float temperature = 0.8f;  // 0: always the likeliest
    int top_k = 0;          // 0: all
    float top_p = 1;        // at least one token stays
};

// The index of the largest logit; of equal ones, the first. NaN counts only if all logits are NaN.
inline int likeliest_token(const float* logits, int n) {
    auto is_less = [](float a, float b) { return a < b || (std::isnan(a) && !std::isnan(b)); };
    return int(std::max_element(logits, logits + n, is_less) - logits);
}

// exp((logit - the largest) / temperature): probabilities before they are divided by their sum. 0 for a logit
// that is -infinity or NaN. In double, so that the sum's rounding stays far below the probability of a rare
// token.
inline std::vector<double> sampling_weights(const float* logits, int n, float largest, float temperature) {
    std::vector<double> weights(static_cast<size_t>(n));
    for (int i = 0; i < n; i++) {
        if (logits[i] > -std::numeric_limits<float>::infinity()) {
            weights[size_t(i)] = std::exp((double(logits[i]) - largest) / temperature);
        }
    }
    return weights;
}

inline std::vector<int> drawable_tokens(const std::vector<double>& weights) {
    std::vector<int> tokens;
    for (size_t i = 0; i < weights.size(); i++) {
        if (weights[i] > 0) { tokens.push_back(int(i)); }
    }
    return tokens;
}

// Whether token a is likelier than b. Compares logits, since exp() may give both the same weight.
inline bool is_likelier(const float* logits, int a, int b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

// Sets the weights of all but the k likeliest tokens to 0. O(n).
inline void keep_top_k(std::vector<double>& weights, const float* logits, int k) {
    std::vector<int> tokens = drawable_tokens(weights);
    if (size_t(k) >= tokens.size()) { return; }
    std::nth_element(tokens.begin(), tokens.begin() + k, tokens.end(),
                     [&](int a, int b) { return is_likelier(logits, a, b); });
    std::for_each(tokens.begin() + k, tokens.end(), [&](int token) { weights[size_t(token)] = 0; });
}

// Sets all weights to 0 but those of the fewest likeliest tokens that together have at least the probability
// p. O(n + m log n) for m tokens that stay, which are few in most distributions.
inline void keep_top_p(std::vector<double>& weights, const float* logits, float p) {
    std::vector<int> tokens = drawable_tokens(weights);
    auto is_less_likely = [&](int a, int b) { return is_likelier(logits, b, a); };
    std::make_heap(tokens.begin(), tokens.end(), is_less_likely);
    const double enough = p * std::accumulate(weights.begin(), weights.end(), 0.0);
    double kept = 0;
    auto end = tokens.end();  // of the heap: the tokens that have not been kept
    do {
        std::pop_heap(tokens.begin(), end, is_less_likely);
        kept += weights[size_t(*--end)];
    } while (end != tokens.begin() && kept < enough);
    std::for_each(tokens.begin(), end, [&](int token) { weights[size_t(token)] = 0; });
}

// An index with probability weights[i] / sum, by inverting the cumulative sum; never one of weight 0.
inline int draw(const std::vector<double>& weights, float coin) {
    const double threshold = coin * std::accumulate(weights.begin(), weights.end(), 0.0);
    double cumulative = 0;
    int last = 0;  // the last one that can be drawn, for a coin that rounding has made 1
    for (size_t i = 0; i < weights.size(); i++) {
        cumulative += weights[i];
        if (weights[i] > 0) { last = int(i); }
        if (threshold < cumulative) { break; }
    }
    return last;
}

// Draws a token with `coin`, uniform in [0, 1).   logits: (n), n at least 1
// Returns the likeliest if the largest logit is not finite: then there is no distribution.
inline int sample_token(const float* logits, int n, const Sampling& sampling, float coin) {
    const int likeliest = likeliest_token(logits, n);
    if (!(sampling.temperature > 0) || !std::isfinite(logits[likeliest])) { return likeliest; }
    std::vector<double> weights = sampling_weights(logits, n, logits[likeliest], sampling.temperature);
    if (sampling.top_k > 0) { keep_top_k(weights, logits, sampling.top_k); }
    if (sampling.top_p < 1) { keep_top_p(weights, logits, sampling.top_p); }
    return draw(weights, coin);
}

// Draws up to `length` tokens that continue `prompt` (at least one token), and hands each to take(), until
// that returns false. The model sees the last T tokens.
// logits_after(window, rows, used, logits): fills the logits (V) of the token after the first `used` of the
// window's `rows` tokens
template <class LogitsAfter, class Take>
void continue_text(const std::vector<int>& prompt, int length, int T, int V, const Sampling& sampling,
                   uint64_t seed, LogitsAfter logits_after, Take take) {
    const int window_step = 64;  // windows grow by this many tokens, so that few matmul shapes occur
    std::vector<int> tokens = prompt, window(size_t(T), prompt[0]);
    std::vector<float> logits(static_cast<size_t>(V));
    for (int i = 1; i <= length; i++) {
        const int begin = std::max(0, int(tokens.size()) - T), used = int(tokens.size()) - begin;
        std::copy(tokens.begin() + begin, tokens.end(), window.begin());
        logits_after(window.data(), std::min(T, (used + window_step - 1) / window_step * window_step), used,
                     logits.data());
        const float coin = uniform(random_bits(seed, RandomUse::sampling, uint64_t(i)).v[0]);
        tokens.push_back(sample_token(logits.data(), V, sampling, coin));
        if (!take(tokens.back())) { return; }
    }
}
