// Fingerprint: what the processes of a run must agree on, as (name, value) rows that they compare before they
// train. Most rows are options, by their scope (option_table.h). The others are computed here: what an option
// leads to (the model's shape, the initial parameters), or whether something is given at all.
#pragma once
#include <xxhash.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "llmc/error.h"
#include "llmc/run/inputs.h"
#include "llmc/run/options.h"

using Fingerprint = OptionValues;

inline void append(Fingerprint& rows, const Fingerprint& more) {
    rows.insert(rows.end(), more.begin(), more.end());
}

// All workers must agree on these rows.
inline Fingerprint fingerprint_of_run(Options o, const Inputs& inputs) {
    const GptShape& shape = inputs.shape;
    const uint64_t initial_hash = XXH3_64bits(inputs.initial.data(), inputs.initial.size() * sizeof(float));
    Fingerprint rows = values_of(option_table(o), Scope::run);
    append(rows, {{"--layers", std::to_string(shape.layers)},
                  {"--heads", std::to_string(shape.heads)},
                  {"--channels", std::to_string(shape.channels)},
                  {"--vocab-size", std::to_string(shape.vocab_size)},
                  {"--max-seq-len", std::to_string(shape.max_seq_len)},
                  {"initial parameters (-e, --seed)", format("%016llx", (unsigned long long)initial_hash)},
                  {"--outer-optimizer", o.diloco.outer_optimizer}});
    if (!o.has_own_batch()) {
        append(rows, {{"--batch", std::to_string(o.batch)},
                      {"--total-batch", std::to_string(o.total_batch)},
                      {"--max-steps", std::to_string(inputs.steps)}});
    } else {
        append(rows, {{"--max-steps", std::to_string(o.max_steps)}});
        // Once through the data: share_data() computes the steps from the tokens and all workers' batches.
        if (o.max_steps < 0) {
            append(rows, {{"--train-data (tokens)", std::to_string(inputs.train_loader->num_tokens())}});
        }
    }
    if (o.diloco.is_elastic()) {
        append(rows, {{"--save-every (checkpoints)", o.save_every > 0 ? "yes" : "no"}});
    }
    return rows;
}

// Processes that take each step together must agree on these rows: all, or the ranks of an elastic worker.
inline Fingerprint fingerprint(Options o, const Inputs& inputs) {
    const auto given = [](bool is_given) { return is_given ? "given" : "none"; };
    const DataLoader* validation = inputs.validation_loader.get();
    Fingerprint rows = fingerprint_of_run(o, inputs);
    append(rows, values_of(option_table(o), Scope::lockstep));
    const long examples = inputs.hellaswag ? long(inputs.hellaswag->size()) : 0;
    append(rows, {{"--hellaswag-data (examples)", std::to_string(examples)},
                  {"--val-data", given(validation)},
                  {"--tokenizer", given(bool(inputs.tokenizer))},
                  {"--output", given(!o.output.empty())}});
    if (!o.has_own_batch()) {
        const long batches = validation ? long(validation->num_batches()) : 0;
        append(rows, {{"--val-data (batches)", std::to_string(batches)}});
    } else if (o.diloco.is_elastic()) {
        append(rows, {{"--batch", std::to_string(o.batch)},
                      {"--total-batch", std::to_string(o.total_batch)}});
    }
    return rows;
}

// One line for each row, as the sync log keeps them.
inline std::string text_of(const Fingerprint& rows) {
    std::string text;
    for (const auto& [name, value] : rows) { text += name + " " + value + "\n"; }
    return text;
}

// Throws a UserError that names the rows in which this worker and the run differ.
// ours, theirs: text_of()   rows_of: the set of a text's rows, without those that need not agree
template <class RowsOf>
void compare_options(const std::string& ours, const std::string& theirs, RowsOf rows_of) {
    auto only_in_first = [&](const std::string& first, const std::string& second) {
        const std::set<std::string> a = rows_of(first), b = rows_of(second);
        std::vector<std::string> rows;
        std::set_difference(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(rows));
        return rows.empty() ? std::string("nothing") : list_in_words(rows);
    };
    if (rows_of(ours) == rows_of(theirs)) { return; }
    throw UserError("this worker has " + only_in_first(ours, theirs) + ", the run has " +
                    only_in_first(theirs, ours) +
                    ": give all workers the same, or this run another --run-name");
}
