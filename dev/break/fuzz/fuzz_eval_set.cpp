// Eval sets. A file that the reader accepts has the format of its header comment; every example is evaluated
// once.
#include "dev/break/fuzz/fuzz.h"
#include "llmc/text/eval_batches.h"

const int vocabulary = 1000;

void check_tokens(const std::vector<int>& tokens) {
    require(!tokens.empty(), "no text is empty");
    for (int token : tokens) { require(token >= 0 && token < vocabulary, "a token is in the vocabulary"); }
}

// If all losses are 0, the first completion counts as the likeliest.
void check_batches(const EvalSet& set, size_t longest, long labelled_first) {
    long examples = 0;
    auto all_zero = [&](const EvalBatch& batch, float* losses) {
        for (int token : batch.inputs) { require(token >= 0 && token < vocabulary, "an input is a token"); }
        for (int token : batch.targets) { require(token >= 0 && token < vocabulary, "a target is a token"); }
        for (const EvalBatch::Row& row : batch.rows) { examples += row.is_last; }
        std::fill_n(losses, batch.targets.size(), 0.0f);
    };
    const long right = count_right(set, 3, int(longest), 0, 1, all_zero);
    require(examples == set.size(), "every example counts once");
    require(right == labelled_first, "the model is right where the first completion is labelled");
}

bool fits(const EvalSet& set, size_t T) {
    try {
        set.check_fits(int(T));
        return true;
    } catch (const UserError&) { return false; }
}

void fuzz(const std::string& bytes) {
    const MemoryFile file(bytes);
    const EvalSet set(file.path(), vocabulary);
    size_t longest = 0;
    long labelled_first = 0;
    for (long i = 0; i < set.size(); i++) {
        const EvalExample example = set.example(i);
        require(example.label >= 0 && size_t(example.label) < example.completions.size(),
                "the label is the number of a completion");
        check_tokens(example.context);
        for (const std::vector<int>& completion : example.completions) { check_tokens(completion); }
        longest = std::max(longest, example.longest_sequence());
        labelled_first += example.label == 0;
    }
    check_batches(set, longest, labelled_first);
    require(set.size() == 0 || (fits(set, longest) && !fits(set, longest - 1)), "the longest sequence");
    set.check_fits(64);
}

// A file of examples with these numbers of completions, whose lengths differ.
std::string eval_file(const std::vector<int>& completions) {
    std::string data;
    int32_t longest = 0;
    for (size_t i = 0; i < completions.size(); i++) {
        const uint16_t count = uint16_t(completions[i]);
        std::vector<uint16_t> words{eval_example_start, 0, uint16_t(i), uint16_t(count - 1), count, 2, 5, 6};
        for (uint16_t c = 0; c < count; c++) {
            words.push_back(uint16_t(c + 1));
            for (uint16_t k = 0; k <= c; k++) { words.push_back(uint16_t(100 * c + k)); }
        }
        words[1] = uint16_t(2 * words.size());
        longest = std::max(longest, int32_t(words[1]));
        data += bytes_of(words);
    }
    return header_bytes({eval_set_magic, 1, int32_t(completions.size()), longest}) + data;
}

std::vector<std::string> seeds() {
    return {eval_file({4}), eval_file({4, 1, 2}), eval_file({9, 4, 4, 4, 4})};
}
