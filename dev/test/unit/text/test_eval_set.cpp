// Eval sets: llm.c's bytes, written here by hand; a one-line message for every defect of a file; and the
// score, which is the same however the sequences are divided among batches and ranks.
#include "llmc/text/eval_set.h"

#include <cmath>
#include <map>
#include <set>

#include "dev/test/files.h"
#include "llmc/text/eval_batches.h"

namespace test_eval_set {

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

// Index, label, number of completions; then count and tokens of the context and of each completion.
const Words first_example = {0, 2, 4, 3, 10, 11, 12, 1, 20, 2, 21, 22, 1, 23, 4, 24, 25, 26, 999};
const Words second_example = {1, 0, 2, 1, 5, 1, 6, 2, 7, 8};

// The message about a file with these bytes.
std::string refusal(const std::string& bytes) {
    TemporaryFolder folder;
    write_bytes(folder / "set.bin", bytes);
    const std::string message = user_error([&] { EvalSet(folder / "set.bin", vocabulary); });
    EXPECT_TRUE(contains(message, folder / "set.bin"));
    EXPECT_EQ(message.find('\n'), std::string::npos);
    return message;
}

// The message about a file whose second example is this one.
std::string refused_second(const Words& example) { return refusal(eval_file({first_example, example})); }

// Changes one 16-bit word at byte `at`.
std::string with_word(std::string bytes, size_t at, uint16_t word) {
    return bytes.replace(at, 2, bytes_of(Words{word}));
}

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

TEST(EvalSet, says_whether_its_longest_sequence_fits) {
    TemporaryFolder folder;
    write_bytes(folder / "set.bin", eval_file({first_example, second_example}));
    const EvalSet set(folder / "set.bin", vocabulary);
    EXPECT_NO_THROW(set.check_fits(7));
    const std::string message = user_error([&] { set.check_fits(6); });
    EXPECT_TRUE(
        contains(message, "set.bin has sequences of 7 tokens (example 0), more than 6 positions: raise -t"));
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

// Three examples for which the numbers below are worked out by hand, of 3, 2 and 4 completions.
const Words by_hand[] = {{0, 1, 3, 2, 10, 11, 1, 20, 2, 21, 22, 3, 23, 24, 25},
                         {1, 0, 2, 1, 5, 2, 30, 31, 1, 32},
                         {2, 3, 4, 3, 1, 2, 3, 1, 40, 1, 41, 1, 42, 2, 43, 44}};

// Fills in losses by target; NaN where a loss does not count and must not matter.   losses: (B,T)
template <typename Loss>
void fill_in(const EvalBatch& batch, float* losses, Loss loss) {
    std::fill_n(losses, batch.targets.size(), std::nanf(""));
    for (size_t r = 0; r < batch.rows.size(); r++) {
        for (int t = batch.rows[r].begin; t < batch.rows[r].end; t++) {
            const size_t i = r * size_t(batch.T) + size_t(t);
            losses[i] = loss(batch.targets[i]);
        }
    }
}

// The batches of one rank.
std::vector<EvalBatch> batches_of(const EvalSet& set, int B, int max_T, int rank, int ranks) {
    std::vector<EvalBatch> all;
    count_right(set, B, max_T, rank, ranks, [&](const EvalBatch& batch, float*) { all.push_back(batch); });
    return all;
}

// {correct, counted} over all ranks.
template <typename Loss>
std::pair<long, long> score_of(const EvalSet& set, int B, int max_T, int ranks, Loss loss) {
    long correct = 0, counted = 0;
    for (int rank = 0; rank < ranks; rank++) {
        correct += count_right(set, B, max_T, rank, ranks, [&](const EvalBatch& batch, float* losses) {
            fill_in(batch, losses, loss);
            for (const EvalBatch::Row& row : batch.rows) { counted += row.is_last; }
        });
    }
    return {correct, counted};
}

class EvalBatchesTest : public ::testing::Test {
protected:
    EvalBatchesTest() { write({by_hand[0], by_hand[1], by_hand[2]}); }

    void write(const std::vector<Words>& examples) { write_bytes(folder / "set.bin", eval_file(examples)); }

    TemporaryFolder folder;
};

TEST_F(EvalBatchesTest, the_score_is_the_same_for_any_batch_and_number_of_ranks) {
    const EvalSet set(folder / "set.bin", vocabulary);
    std::map<int, float> losses = {{20, 3.0f}, {21, 1.0f}, {22, 3.0f}, {23, 2.0f}, {24, 2.0f},
                                   {25, 3.0f}, {30, 5.0f}, {31, 1.0f}, {32, 2.5f}, {40, 1.5f},
                                   {41, 1.5f}, {42, 1.5f}, {43, 1.5f}, {44, 1.0f}};
    // Means of example 0: 3, 2, 7/3; of 1: 3, 2.5; of 2: 1.5, 1.5, 1.5, 1.25. Labels: 1, 0, 3.
    auto loss_of = [&](int token) { return losses.at(token); };
    for (int B : {1, 2, 3, 4, 5, 9, 20}) {
        for (int ranks : {1, 2, 3, 4}) {
            EXPECT_EQ(score_of(set, B, 64, ranks, loss_of), std::make_pair(2L, 3L)) << B << " " << ranks;
        }
    }
}

TEST_F(EvalBatchesTest, the_mean_over_a_completion_s_tokens_counts_and_not_the_sum) {
    const EvalSet set(folder / "set.bin", vocabulary);
    // The sum is lowest for the shorter completions: of the examples' labels it would find none.
    auto falling = [](int token) { return token % 10 == 0 ? 1.0f : token % 10 == 3 ? 0.9f : 0.6f; };
    EXPECT_EQ(score_of(set, 4, 64, 1, falling).first, 1);  // example 0: 1, 0.6, 0.7
}

TEST_F(EvalBatchesTest, of_equal_losses_the_first_completion_is_taken) {
    const EvalSet set(folder / "set.bin", vocabulary);
    EXPECT_EQ(score_of(set, 4, 64, 1, [](int) { return 2.0f; }).first, 1);  // example 1 has label 0
}

TEST_F(EvalBatchesTest, losses_that_are_not_numbers_are_never_right) {
    const EvalSet set(folder / "set.bin", vocabulary);
    EXPECT_EQ(score_of(set, 4, 64, 1, [](int) { return std::nanf(""); }), std::make_pair(0L, 3L));
    EXPECT_EQ(score_of(set, 4, 64, 1, [](int token) { return token == 30 ? std::nanf("") : 1.0f; }).first, 0);
}

TEST_F(EvalBatchesTest, a_row_is_context_and_completion_and_its_targets_are_one_token_ahead) {
    const EvalSet set(folder / "set.bin", vocabulary);
    const std::vector<EvalBatch> batches = batches_of(set, 4, 64, 0, 1);
    ASSERT_EQ(batches.size(), 3u);  // 9 sequences
    const EvalBatch &first = batches[0], &last = batches[2];
    ASSERT_EQ(first.B, 4);
    ASSERT_EQ(first.T, 64);
    ASSERT_EQ(first.rows.size(), 4u);
    auto row = [&](const std::vector<int>& tokens, size_t r) {
        return std::vector<int>(tokens.begin() + long(r) * 64, tokens.begin() + long(r + 1) * 64);
    };
    auto padded = [](std::vector<int> tokens) {
        tokens.resize(64);
        return tokens;
    };
    EXPECT_EQ(row(first.inputs, 2), padded({10, 11, 23, 24}));
    EXPECT_EQ(row(first.targets, 2), padded({11, 23, 24, 25}));
    EXPECT_EQ(first.rows[2].begin, 1);
    EXPECT_EQ(first.rows[2].end, 4);
    EXPECT_EQ(row(first.inputs, 3), padded({5, 30}));
    EXPECT_EQ(row(first.targets, 3), padded({30, 31}));
    EXPECT_EQ(first.rows[3].begin, 0);
    ASSERT_EQ(last.rows.size(), 1u);
    EXPECT_EQ(row(last.targets, 0), padded({2, 3, 43, 44}));
    for (size_t r = 1; r < 4; r++) { EXPECT_EQ(row(last.inputs, r), padded({})); }
}

TEST_F(EvalBatchesTest, each_sequence_is_evaluated_once) {
    std::vector<Words> examples;
    for (uint16_t i = 0; i < 23; i++) {  // example i: contexts of different length, 1 to 4 completions
        Words words = {i, 0, uint16_t(1 + i % 4), uint16_t(1 + i * 7 % 150)};
        words.resize(words.size() + words.back(), i);
        for (uint16_t c = 0; c < words[2]; c++) { words.insert(words.end(), {1, uint16_t(100 + 4 * i + c)}); }
        examples.push_back(words);
    }
    write(examples);
    const EvalSet set(folder / "set.bin", vocabulary);
    for (int B : {1, 3, 4, 7}) {
        for (int ranks : {1, 2, 5}) {
            std::multiset<int> completions;
            for (int rank = 0; rank < ranks; rank++) {
                int T = 150;
                for (const EvalBatch& batch : batches_of(set, B, 150, rank, ranks)) {
                    EXPECT_TRUE(batch.T == 64 || batch.T == 128 || batch.T == 150);
                    EXPECT_LE(batch.T, T);
                    T = batch.T;
                    EXPECT_EQ(batch.inputs.size(), size_t(B * T));
                    std::vector<float> losses(batch.targets.size());
                    fill_in(batch, losses.data(),
                            [&](int token) { return float(*completions.insert(token)); });
                    for (const EvalBatch::Row& row : batch.rows) { EXPECT_LE(row.end, T); }
                }
            }
            EXPECT_EQ(completions.size(), 56u);
            EXPECT_EQ(std::set<int>(completions.begin(), completions.end()).size(), 56u);
        }
    }
}

TEST_F(EvalBatchesTest, a_set_that_does_not_fit_is_refused_and_a_rank_without_examples_has_no_batch) {
    const EvalSet set(folder / "set.bin", vocabulary);
    EXPECT_TRUE(contains(user_error([&] { batches_of(set, 4, 4, 0, 1); }), "raise -t"));
    EXPECT_EQ(batches_of(set, 4, 5, 0, 1)[0].T, 5);
    EXPECT_TRUE(batches_of(set, 4, 64, 3, 4).empty());
}

}  // namespace test_eval_set
