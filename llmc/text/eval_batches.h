// count_right: turns the examples of an eval set into batches of token sequences, and scores a model's
// losses. A sequence is the context of an example and one of its completions. Its loss is the mean cross
// entropy of the completion's tokens. The model is right if the completion with the lowest loss is the
// labelled one, as in llm.c (the acc_norm of its dev/data/hellaswag.py).
//
// Rank i mod R takes example i. The accuracy is the sum of all ranks' right answers over the number of
// examples.
#pragma once
#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "llmc/text/eval_set.h"

struct EvalBatch {
    // One sequence. The targets at the positions [begin, end) are the completion's tokens.
    struct Row {
        bool is_first, is_last, is_right;  // among the completions of its example
        int begin, end;
    };

    int B, T;
    std::vector<int> inputs, targets;  // (B,T), token 0 after a sequence and in rows without one
    std::vector<Row> rows;             // (at most B)
};

// How many of this rank's examples the model gets right. losses_of(batch, losses) fills in the loss of each
// target: (B,T). T differs between batches, but is a multiple of 64 or max_T: few matmul shapes occur.
// UserError if a sequence is too long for max_T. An example is read again for its batch.
template <class LossesOf>
long count_right(const EvalSet& set, int B, int max_T, int rank, int ranks, LossesOf losses_of) {
    set.check_fits(max_T);
    std::vector<std::pair<int, long>> order;  // T, the number of an example
    for (long i = rank; i < set.size(); i += ranks) {
        const int positions = int(set.example(i).longest_sequence()) - 1;  // the last token is a target alone
        order.push_back({std::min((positions + 63) / 64 * 64, max_T), i});
    }
    // Sequences of similar length share a batch. The longest come first: too little memory shows at once.
    std::stable_sort(order.begin(), order.end(), [](auto& a, auto& b) { return a.first > b.first; });

    EvalBatch batch{};
    std::vector<float> losses;
    double lowest = 0;      // loss of the example's completions so far, which may lie in several batches
    bool is_right = false;  // that completion
    long right = 0;
    auto score = [&] {
        losses.resize(batch.targets.size());
        losses_of(batch, losses.data());
        const float* of_row = losses.data();
        for (const EvalBatch::Row& row : batch.rows) {
            double sum = 0;
            for (int t = row.begin; t < row.end; t++) { sum += of_row[t]; }
            of_row += batch.T;
            const double loss = sum / (row.end - row.begin);
            if (row.is_first) { lowest = std::numeric_limits<double>::infinity(), is_right = false; }
            // Of equal losses the first one counts. NaN is never the lowest, so a model that has diverged
            // gets nothing right.
            if (loss < lowest) { lowest = loss, is_right = row.is_right; }
            right += row.is_last && is_right;
        }
        batch.rows.clear();
    };
    for (const auto& [T, i] : order) {
        const auto [label, context, completions] = set.example(i);
        for (size_t c = 0; c < completions.size(); c++) {
            if (batch.rows.empty()) {
                const std::vector<int> zeros(size_t(B) * size_t(T));
                batch = {B, T, zeros, zeros, {}};
            }
            std::vector<int> tokens = context;
            tokens.insert(tokens.end(), completions[c].begin(), completions[c].end());
            const long row = long(batch.rows.size()) * batch.T;
            std::copy(tokens.begin(), tokens.end() - 1, batch.inputs.begin() + row);
            std::copy(tokens.begin() + 1, tokens.end(), batch.targets.begin() + row);
            batch.rows.push_back({c == 0, c + 1 == completions.size(), int(c) == label,
                                  int(context.size()) - 1, int(tokens.size()) - 1});
            if (int(batch.rows.size()) == B) { score(); }
        }
    }
    if (!batch.rows.empty()) { score(); }
    return right;
}
