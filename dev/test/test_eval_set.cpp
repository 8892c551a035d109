// Eval sets: llm.c's bytes, written here by hand; and one line for whatever is wrong with a file.
#include "llmc/eval_set.h"

#include "dev/test/files.h"

namespace {

const int vocabulary = 1000;

using Words = std::vector<uint16_t>;

// The file of `examples`, each without its first two words: the start marker, and its length in bytes.
std::string eval_file(const std::vector<Words>& examples) {
    std::string data;
    size_t longest = 0;
    for (const Words& example : examples) {
        const size_t bytes = 2 * (2 + example.size());
        longest = std::max(longest, bytes);
        data += bytes_of(Words{65535, uint16_t(bytes)}) + bytes_of(example);
    }
    return header_bytes({20240522, 1, int32_t(examples.size()), int32_t(longest)}) + data;
}

// index, label, completions, then counts and tokens: of the context, of each completion.
const Words first_example = {0, 2, 4, 3, 10, 11, 12, 1, 20, 2, 21, 22, 1, 23, 4, 24, 25, 26, 999};
const Words second_example = {1, 0, 2, 1, 5, 1, 6, 2, 7, 8};

// The message about the file of these bytes.
std::string refusal(const std::string& bytes) {
    TemporaryFolder folder;
    write_bytes(folder / "set.bin", bytes);
    const std::string message = user_error([&] { EvalSet(folder / "set.bin", vocabulary); });
    EXPECT_TRUE(contains(message, folder / "set.bin"));
    EXPECT_EQ(message.find('\n'), std::string::npos);
    return message;
}

// About the file whose second example is this one.
std::string refused_second(const Words& example) { return refusal(eval_file({first_example, example})); }

// Changes one 16-bit word at byte `at`.
std::string with_word(std::string bytes, size_t at, uint16_t word) {
    return bytes.replace(at, 2, bytes_of(Words{word}));
}

}  // namespace

TEST(EvalSet, reads_llmcs_bytes_in_any_order) {
    // Two examples in bytes, as llm.c's Python would write them: the first has 14 words.
    std::string bytes = header_bytes({20240522, 1, 2, 28});
    bytes += std::string("\xff\xff\x1c\0\0\0\1\0\2\0\2\0\x0a\0\x0b\1\1\0\x0c\0\3\0\x0d\0\x0e\0\x0f\0", 28);
    bytes += std::string("\xff\xff\x16\0\1\0\0\0\2\0\1\0\5\0\1\0\6\0\1\0\7\0", 22);
    TemporaryFolder folder;
    write_bytes(folder / "set.bin", bytes);
    const EvalSet set(folder / "set.bin", vocabulary);
    ASSERT_EQ(set.size(), 2);
    for (int again = 0; again < 2; again++) {
        const EvalExample last = set.example(1);
        EXPECT_EQ(last.label, 0);
        EXPECT_EQ(last.context, std::vector<int>({5}));
        EXPECT_EQ(last.completions, std::vector<std::vector<int>>({{6}, {7}}));
        const EvalExample first = set.example(0);
        EXPECT_EQ(first.label, 1);
        EXPECT_EQ(first.context, std::vector<int>({10, 267}));
        EXPECT_EQ(first.completions, std::vector<std::vector<int>>({{12}, {13, 14, 15}}));
    }
}

TEST(EvalSet, says_whether_its_longest_sequence_fits_the_model) {
    TemporaryFolder folder;
    write_bytes(folder / "set.bin", eval_file({first_example, second_example}));
    const EvalSet set(folder / "set.bin", vocabulary);
    EXPECT_EQ(set.longest_sequence(), 3 + 4);
    EXPECT_NO_THROW(set.check_fits(7));
    const std::string message = user_error([&] { set.check_fits(6); });
    EXPECT_TRUE(contains(message, "set.bin has sequences of 7 tokens (example 0), more than the model's 6"));
}

TEST(EvalSet, a_token_beyond_the_vocabulary_is_named) {
    TemporaryFolder folder;
    write_bytes(folder / "set.bin", eval_file({first_example, second_example}));
    const std::string message = user_error([&] { EvalSet(folder / "set.bin", 999); });
    EXPECT_TRUE(contains(message, "set.bin has token 999 in example 0, beyond the vocabulary of 999"));
    EXPECT_TRUE(contains(refused_second({1, 0, 1, 1, 1000, 1, 5}), "token 1000 in example 1"));
}

TEST(EvalSet, a_file_of_another_kind_is_refused) {
    const std::string good = eval_file({first_example, second_example});
    const int32_t bytes = int32_t(4 + 2 * first_example.size());
    const std::string data = good.substr(1024);
    EXPECT_TRUE(contains(refusal("short"), "is truncated (no whole header of a multiple-choice eval set)"));
    EXPECT_TRUE(
        contains(refusal(header_bytes({20240520, 1, 2, bytes}) + data), "is not a multiple-choice eval set"));
    EXPECT_TRUE(contains(refusal(header_bytes({20240522, 2, 2, bytes}) + data), "of version 2, not 1"));
    for (int count : {0, -1, 65537, 1 << 30}) {
        EXPECT_TRUE(contains(refusal(header_bytes({20240522, 1, count, bytes}) + data),
                             format("damaged header (%d examples)", count)));
    }
    for (int longest : {bytes - 2, bytes + 2, 0, -1}) {
        EXPECT_TRUE(contains(refusal(header_bytes({20240522, 1, 2, longest}) + data),
                             format("the longest example has %d bytes, not %d", bytes, longest)));
    }
    EXPECT_TRUE(contains(refusal(header_bytes({20240522, 1, 1, bytes}) + data),
                         format("is too long (%zu bytes after", 4 + 2 * second_example.size())));
    EXPECT_TRUE(contains(refusal(header_bytes({20240522, 1, 3, bytes}) + data), "truncated (at example 2)"));
}

TEST(EvalSet, a_file_cut_at_any_byte_is_refused) {
    const std::string good = eval_file({first_example, second_example});
    TemporaryFolder folder;
    write_bytes(folder / "set.bin", good);
    for (size_t size = good.size(); size-- > 0;) {
        std::filesystem::resize_file(folder / "set.bin", size);
        const std::string message = user_error([&] { EvalSet(folder / "set.bin", vocabulary); });
        EXPECT_TRUE(contains(message, "set.bin is truncated (")) << size;
    }
    EXPECT_TRUE(contains(refusal(good + 'x'), "is too long (1 bytes after the last example)"));
}

TEST(EvalSet, an_example_that_contradicts_itself_is_refused) {
    const std::string good = eval_file({first_example, second_example});
    const size_t second = 1024 + 4 + 2 * first_example.size(), bytes = 4 + 2 * second_example.size();
    auto second_with = [&](size_t word, size_t value) {
        return refusal(with_word(good, second + 2 * word, uint16_t(value)));
    };
    EXPECT_TRUE(contains(second_with(0, 0), "is damaged (example 1: it starts with 0, not 65535)"));
    EXPECT_TRUE(contains(second_with(1, bytes - 1), format("example 1: a length of %zu bytes", bytes - 1)));
    EXPECT_TRUE(contains(second_with(1, 0), "example 1: a length of 0 bytes"));
    EXPECT_TRUE(contains(second_with(1, 2), "example 1: a length of 2 bytes"));
    EXPECT_TRUE(contains(second_with(1, 4), "example 1: it ends before its index"));
    EXPECT_TRUE(contains(second_with(1, bytes + 2), "is truncated (in example 1)"));
    EXPECT_TRUE(contains(second_with(1, bytes - 2), "example 1: it ends within a completion"));

    EXPECT_TRUE(contains(refused_second({1}), "example 1: it ends before its label"));
    EXPECT_TRUE(contains(refused_second({1, 0}), "example 1: it ends before its number of completions"));
    EXPECT_TRUE(contains(refused_second({1, 0, 1}), "example 1: it ends before its context"));
    EXPECT_TRUE(contains(refused_second({1, 0, 1, 1, 5}), "example 1: it ends before a completion"));
    EXPECT_TRUE(contains(refused_second({1, 0, 1, 2, 5}), "example 1: it ends within its context"));
    EXPECT_TRUE(contains(refused_second({1, 0, 1, 0, 1, 5}), "example 1: its context is empty"));
    EXPECT_TRUE(contains(refused_second({1, 0, 1, 1, 5, 0}), "example 1: a completion is empty"));
    EXPECT_TRUE(contains(refused_second({1, 0, 1, 1, 5, 1, 6, 7}), "1 words after its completions"));
    EXPECT_TRUE(contains(refused_second({0, 0, 1, 1, 5, 1, 6}), "example 1: its index is 0"));
    EXPECT_TRUE(contains(refused_second({1, 1, 1, 1, 5, 1, 6}), "its label is 1, of 1 completions"));
    EXPECT_TRUE(contains(refused_second({1, 0, 0, 1, 5}), "its label is 0, of 0 completions"));
}
