// EvalBatches: turns the examples of an eval set into batches of token sequences, and scores a model's
// losses. A sequence is the context of an example and one of its completions. Its loss is the mean cross
// entropy of the completion's tokens. The model is right if the completion with the lowest loss is the
// labelled one, as in llm.c (the acc_norm of its dev/data/hellaswag.py).
//
//     EvalBatches batches(set, B, max_T, rank, ranks);
//     batches.score_all([&](const EvalBatch& batch, float* losses) { ... the loss of each target: (B,T) });
//
// Rank i mod R takes example i. The accuracy is the sum of all ranks' right answers over the number of
// examples.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "llmc/text/eval_set.h"

struct EvalBatch {
    // One sequence. The targets at the positions [begin, end) are the completion's tokens.
    struct Row {
        int label, completion;  // the right completion of the example, and this one
        bool is_last;           // the example has no further completion
        int begin, end;
    };

    int B, T;
    std::vector<int> inputs, targets;  // (B,T), token 0 after a sequence and in rows without one
    std::vector<Row> rows;             // (at most B)
};

class EvalBatches {
public:
    // Batches of B sequences and at most max_T positions. `set` is read again for each batch. UserError if a
    // sequence is too long.
    EvalBatches(const EvalSet& set, int B, int max_T, int rank, int ranks) : set(set), B(B) {
        set.check_fits(max_T);
        for (long i = rank; i < set.size(); i += ranks) {
            const EvalExample example = set.example(i);
            const int positions = int(example.longest_sequence()) - 1;  // the last token is a target alone
            order.push_back({i, std::min((positions + T_step - 1) / T_step * T_step, max_T)});
        }
        // Sequences of similar length share a batch. The longest come first: if memory is too small, it is
        // now.
        std::stable_sort(order.begin(), order.end(),
                         [](const Place& a, const Place& b) { return a.T > b.T; });
    }

    // Scores all batches; losses_of(batch, losses) fills the losses (B,T) of one. Returns how many of this
    // rank's examples the model got right. To be called once.
    template <class LossesOf>
    float score_all(LossesOf losses_of) {
        std::vector<float> losses;
        while (next_place < order.size()) {
            const EvalBatch batch = next();
            losses.resize(batch.targets.size());
            losses_of(batch, losses.data());
            score(batch, losses.data());
        }
        return float(correct);
    }

private:
    static constexpr int T_step = 64;

    struct Place {
        long example;
        int T;
    };

    // The next batch. T differs between batches, but is a multiple of T_step: few matmul shapes occur.
    EvalBatch next() {
        const int T = order.at(next_place).T;
        const size_t count = size_t(B) * size_t(T);
        EvalBatch batch{B, T, std::vector<int>(count), std::vector<int>(count), {}};
        while (int(batch.rows.size()) < B && next_place < order.size()) {
            if (next_completion == 0) { current = set.example(order[next_place].example); }
            add_row(batch);
            if (++next_completion == current.completions.size()) {
                next_completion = 0;
                next_place++;
            }
        }
        return batch;
    }

    // losses: (B,T) of the batch
    void score(const EvalBatch& batch, const float* losses) {
        for (const EvalBatch::Row& row : batch.rows) {
            double sum = 0;
            for (int t = row.begin; t < row.end; t++) { sum += losses[t]; }
            losses += batch.T;
            choose(row, sum / (row.end - row.begin));
        }
    }

    // Adds the next completion.
    void add_row(EvalBatch& batch) const {
        std::vector<int> tokens = current.context;
        const std::vector<int>& completion = current.completions[next_completion];
        tokens.insert(tokens.end(), completion.begin(), completion.end());
        const long row = long(batch.rows.size()) * batch.T;
        std::copy(tokens.begin(), tokens.end() - 1, batch.inputs.begin() + row);
        std::copy(tokens.begin() + 1, tokens.end(), batch.targets.begin() + row);
        const bool is_last = next_completion + 1 == current.completions.size();
        batch.rows.push_back({current.label, int(next_completion), is_last, int(current.context.size()) - 1,
                              int(tokens.size()) - 1});
    }

    // Of equal losses the first one counts. NaN is never the lowest, so a model that has diverged gets
    // nothing right.
    void choose(const EvalBatch::Row& row, double loss) {
        if (row.completion == 0) {
            lowest = std::numeric_limits<double>::infinity();
            chosen = -1;
        }
        if (loss < lowest) {
            lowest = loss;
            chosen = row.completion;
        }
        correct += row.is_last && chosen == row.label;
    }

    const EvalSet& set;
    int B;
    std::vector<Place> order;  // this rank's examples
    size_t next_place = 0, next_completion = 0;
    EvalExample current;  // the example at next_place, unless next_completion is 0
    double lowest = 0;    // loss of the current example's completions so far
    int chosen = -1;
    long correct = 0;  // examples that the model got right
};
