// Sampling: token i with probability softmax(logits / temperature)[i], by inverting the cumulative sum.
#pragma once
#include <algorithm>
#include <cmath>

// Draws an index from softmax(logits / temperature) with `coin`, uniform in [0, 1). Temperature 0 takes the
// largest. An index whose probability is 0 (logit -infinity, or not a number) is never drawn unless there is
// no other.
// logits: (n)
inline int sample_softmax(const float* logits, int n, float temperature, float coin) {
    int largest = 0;
    for (int i = 1; i < n; i++) {
        const bool first_number = std::isnan(logits[largest]) && !std::isnan(logits[i]);
        if (logits[i] > logits[largest] || first_number) { largest = i; }
    }
    if (!(temperature > 0) || !std::isfinite(logits[largest])) { return largest; }
    // In double: rounding over a large vocabulary stays far below the probability of a rare token.
    auto weight = [&](int i) {
        return std::isnan(logits[i]) ? 0.0 : std::exp((double(logits[i]) - logits[largest]) / temperature);
    };
    double sum = 0;
    for (int i = 0; i < n; i++) { sum += weight(i); }
    const double threshold = coin * sum;
    double cumulative = 0;
    int last = largest;  // the last with a probability above 0: where a coin of 1 ends
    for (int i = 0; i < n; i++) {
        const double w = weight(i);
        cumulative += w;
        if (w > 0) { last = i; }
        if (threshold < cumulative) { return i; }
    }
    return last;
}
