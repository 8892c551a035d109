// EvalSet: reads questions with several endings, one of which is right, such as HellaSwag's. The model is
// asked which ending it finds likeliest; eval_batches.h makes the batches and counts.
//
// The file has llm.c's format: a header of 256 int32 {20240522, 1, examples, bytes of the longest example},
// then the examples as uint16:
//
//     | 65535 | bytes of the example | its index | label | completions |
//     | n | n tokens of the context | n | n tokens of completion 0 | n | n tokens of completion 1 | ...
//
// The whole file is checked when it is opened. Only the offset of each example stays in memory.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "llmc/error.h"
#include "llmc/file.h"

const int32_t eval_set_magic = 20240522;
const uint16_t eval_example_start = 65535;

struct EvalExample {
    int label = 0;  // the completion that is right
    std::vector<int> context;
    std::vector<std::vector<int>> completions;

    // Tokens of the longest sequence to evaluate: the context and one completion.
    size_t longest_sequence() const {
        size_t longest = 0;
        for (const auto& completion : completions) { longest = std::max(longest, completion.size()); }
        return context.size() + longest;
    }
};

class EvalSet {
public:
    // UserError, naming the file and the example: missing, of another kind, truncated, damaged, or with a
    // token that the vocabulary does not have.
    EvalSet(const std::string& path, int vocab_size)
        : file(path, "give a complete eval set of version 1"), vocab_size(vocab_size) {
        const FileHeader header = file.read_header(eval_set_magic, "multiple-choice eval set");
        if (header[1] != 1) { file.fail(format("is an eval set of version %d, not 1", header[1])); }
        if (header[2] < 1 || header[2] > most_examples) {
            file.fail(format("has a damaged header (%d examples)", header[2]));
        }
        index_examples(header[2], header[3]);
    }

    long size() const { return long(begins.size()) - 1; }

    // UserError if a sequence of this set is longer than T tokens.
    void check_fits(int T) const {
        if (longest <= size_t(T)) { return; }
        throw UserError(format("%s has sequences of %zu tokens (example %ld), more than %d positions: raise "
                               "-t, or give another eval set", file.name().c_str(), longest, longest_at, T));
    }

    // i: at least 0 and less than size()
    EvalExample example(long i) const { return read(i, begins[i], begins[i + 1]); }

private:
    static constexpr int most_examples = 65536;  // an index is a uint16

    // Reads the words of an example one after the other, and fails at its end.
    struct Words {
        const EvalSet& set;
        long number;  // of the example
        std::vector<uint16_t> words;
        size_t at = 0;

        size_t left() const { return words.size() - at; }

        uint16_t next(const char* what) {
            if (left() == 0) { set.fail(number, format("it ends before %s", what)); }
            return words[at++];
        }

        // A count, which must be at least 1, and that many tokens.
        std::vector<int> next_tokens(const char* what) {
            const size_t count = next(what);
            if (count == 0) { set.fail(number, format("%s is empty", what)); }
            if (count > left()) { set.fail(number, format("it ends within %s", what)); }
            const std::vector<int> tokens(words.begin() + long(at), words.begin() + long(at + count));
            at += count;
            for (int token : tokens) {
                if (token < set.vocab_size) { continue; }
                throw UserError(format("%s has token %d in example %ld, beyond the vocabulary of %d: give an "
                                       "eval set that was made with this model's tokenizer",
                                       set.file.name().c_str(), token, number, set.vocab_size));
            }
            return tokens;
        }
    };

    // longest_bytes: according to the header
    void index_examples(int count, int32_t longest_bytes) {
        int64_t at = sizeof(FileHeader), most = 0;
        begins.push_back(at);
        for (long i = 0; i < count; i++) {
            const int64_t bytes = example_bytes(i, at);
            const size_t sequence = read(i, at, at + bytes).longest_sequence();
            if (sequence > longest) {
                longest = sequence;
                longest_at = i;
            }
            most = std::max(most, bytes);
            begins.push_back(at += bytes);
        }
        if (at != file.size()) {
            file.fail(
                format("is too long (%lld bytes after the last example)", (long long)(file.size() - at)));
        }
        if (most != longest_bytes) {
            file.fail(format("has a damaged header (the longest example has %lld bytes, not %d)",
                             (long long)most, longest_bytes));
        }
    }

    // The length of the example at byte `at`. The file holds all of it.
    int64_t example_bytes(long i, int64_t at) const {
        uint16_t start[2];
        if (file.size() - at < int64_t(sizeof start)) {
            file.fail(format("is truncated (at example %ld)", i));
        }
        file.read(start, sizeof start, at);
        if (start[0] != eval_example_start) {
            fail(i, format("it starts with %d, not %d", start[0], eval_example_start));
        }
        if (start[1] % sizeof(uint16_t) != 0 || start[1] < sizeof start) {
            fail(i, format("a length of %d bytes", start[1]));
        }
        if (file.size() - at < start[1]) { file.fail(format("is truncated (in example %ld)", i)); }
        return start[1];
    }

    // The example at the bytes [begin, end).
    EvalExample read(long i, int64_t begin, int64_t end) const {
        const int64_t skipped = 2 * sizeof(uint16_t);  // its start and its length
        Words words{*this, i, std::vector<uint16_t>(size_t(end - begin - skipped) / sizeof(uint16_t))};
        file.read(words.words.data(), words.words.size() * sizeof(uint16_t), begin + skipped);
        const int index = words.next("its index");
        if (index != i) { fail(i, format("its index is %d", index)); }
        EvalExample example;
        example.label = words.next("its label");
        const int completions = words.next("its number of completions");
        if (example.label >= completions) {
            fail(i, format("its label is %d, of %d completions", example.label, completions));
        }
        example.context = words.next_tokens("its context");
        for (int c = 0; c < completions; c++) {
            example.completions.push_back(words.next_tokens("a completion"));
        }
        if (words.left() > 0) { fail(i, format("%zu words after its completions", words.left())); }
        return example;
    }

    [[noreturn]] void fail(long i, const std::string& what) const {
        file.fail(format("is damaged (example %ld: %s)", i, what.c_str()));
    }

    InputFile file;
    int vocab_size;
    std::vector<int64_t> begins;  // (examples + 1): where each example begins in the file; then the end
    size_t longest = 0;           // tokens of the longest sequence
    long longest_at = 0;          // the example that has it
};
