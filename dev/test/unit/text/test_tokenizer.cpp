// Tokens to text, and text to tokens. test_encode.py compares the tokens with other libraries'.
#include "llmc/text/tokenizer.h"

#include <random>

#include "dev/test/files.h"
#include "llmc/text/byte_pair_encoder.h"

namespace test_tokenizer {

TEST(Tokenizer, decodes_the_bytes_of_a_version_2_file) {
    TemporaryFolder folder;
    const std::string longest(255, 'z');
    const std::string entries = std::string("\1a\2\xC3\xA9\1\0", 7) + "\xFF" + longest + "\5<end>";
    write_bytes(folder / "t.bin", header_bytes({20240328, 2, 5, 4}) + entries);
    const Tokenizer tokenizer(folder / "t.bin");
    EXPECT_EQ(tokenizer.vocab_size(), 5);
    EXPECT_EQ(tokenizer.end_of_text(), 4);
    EXPECT_EQ(tokenizer.decode(0), "a");
    EXPECT_EQ(tokenizer.decode(1), "\xC3\xA9");
    EXPECT_EQ(tokenizer.decode(2), std::string_view("\0", 1));
    EXPECT_EQ(tokenizer.decode(3), longest);
    EXPECT_EQ(tokenizer.decode(4), "<end>");
    for (int outside : {-1, 5, 100000}) { EXPECT_EQ(tokenizer.decode(outside), ""); }
}

TEST(Tokenizer, a_version_1_file_is_gpt2s) {
    TemporaryFolder folder;
    std::string entries;
    for (int token = 0; token < 50257; token++) { entries += std::string("\2a") + char(token % 128); }
    write_bytes(folder / "t.bin", header_bytes({20240328, 1, 50257}) + entries);
    const Tokenizer tokenizer(folder / "t.bin");
    EXPECT_EQ(tokenizer.end_of_text(), 50256);
    EXPECT_EQ(tokenizer.decode(50255), std::string("a") + char(50255 % 128));
}

TEST(Tokenizer, a_damaged_file_is_an_error_that_names_it) {
    TemporaryFolder folder;
    const std::string path = folder / "t.bin", entries = "\1a\2bc\3def";
    auto message = [&](const std::string& bytes) {
        write_bytes(path, bytes);
        std::string text = user_error([&] { Tokenizer t(path); });
        EXPECT_TRUE(contains(text, path));
        return text;
    };
    EXPECT_TRUE(contains(user_error([&] { Tokenizer t(path); }), "cannot be opened"));
    EXPECT_TRUE(contains(message(header_bytes({20240328, 2, 3, 0}).substr(0, 1023)), "truncated"));
    EXPECT_TRUE(contains(message(header_bytes({20240520, 2, 3, 0}) + entries), "is not a tokenizer"));
    EXPECT_TRUE(contains(message(header_bytes({20240328, 3, 3, 0}) + entries), "version 3"));
    EXPECT_TRUE(contains(message(header_bytes({20240328, 2, 0, 0}) + entries), "damaged header"));
    EXPECT_TRUE(contains(message(header_bytes({20240328, 2, 3, 3}) + entries), "end of text 3"));
    EXPECT_TRUE(contains(message(header_bytes({20240328, 1, 3}) + entries), "end of text 50256"));
    EXPECT_TRUE(contains(message(header_bytes({20240328, 2, 2000000000, 0}) + entries), "truncated"));
    EXPECT_TRUE(contains(message(header_bytes({20240328, 2, 4, 0}) + entries), "truncated (at token 3)"));
    EXPECT_TRUE(contains(message(header_bytes({20240328, 2, 3, 0}) + entries.substr(0, 8)), "(at token 2)"));
    EXPECT_TRUE(contains(message(header_bytes({20240328, 2, 2, 0}) + entries), "too long"));
    const std::string empty_token("\1a\0\1bxx", 7);
    EXPECT_TRUE(contains(message(header_bytes({20240328, 2, 3, 0}) + empty_token), "token 1 is empty"));
}

TEST(Tokenizer, printable_text_is_utf8_without_control_characters) {
    const std::string replacement = "\xEF\xBF\xBD";
    EXPECT_EQ(printable("God said,\n\tLet there be: d\xC3\xA9j\xC3\xA0 \xE2\x82\xAC \xF0\x9F\x8C\x8D"),
              "God said,\n\tLet there be: d\xC3\xA9j\xC3\xA0 \xE2\x82\xAC \xF0\x9F\x8C\x8D");
    EXPECT_EQ(printable(std::string_view("a\0b\x1B[2Jc\x7F\r", 10)), "ab[2Jc");
    EXPECT_EQ(printable("x\xC2\x9By\xC2\xA0"), "xy\xC2\xA0");           // C1 control (CSI); no-break space
    EXPECT_EQ(printable("\x80"), replacement);                          // continuation without a start
    EXPECT_EQ(printable("\xE2\x82"), replacement + replacement);        // cut off
    EXPECT_EQ(printable("\xE2\x82z"), replacement + replacement + "z");
    EXPECT_EQ(printable("\xC0\xAF"), replacement + replacement);        // overlong
    EXPECT_EQ(printable("\xE0\x9F\xBF"), replacement + replacement + replacement);
    EXPECT_EQ(printable("\xED\xA0\x80"), replacement + replacement + replacement);  // surrogate
    EXPECT_EQ(printable("\xF4\x90\x80\x80").size(), 12u);               // beyond U+10FFFF
    EXPECT_EQ(printable("\xF4\x8F\xBF\xBF"), "\xF4\x8F\xBF\xBF");
    EXPECT_EQ(printable("\xF0\x8F\xBF\xBF").size(), 12u);
    EXPECT_EQ(printable("\xFF"), replacement);
}

using Tokens = std::vector<int>;

// The file of these tokens. The last one is the end of text.
void write_tokenizer(const std::string& path, const std::vector<std::string>& tokens) {
    std::string entries;
    for (const std::string& token : tokens) { entries += char(token.size()) + token; }
    const int count = int(tokens.size());
    write_bytes(path, header_bytes({20240328, 2, count, count - 1}) + entries);
}

Tokens encode(const std::vector<std::string>& vocabulary, std::string_view text) {
    TemporaryFolder folder;
    write_tokenizer(folder / "t.bin", vocabulary);
    const Tokenizer tokenizer(folder / "t.bin");
    return BytePairEncoder(tokenizer).encode(text);
}

// All bytes, then the merged ones, then the end of text.
std::vector<std::string> bytes_and(const std::vector<std::string>& merged) {
    std::vector<std::string> tokens;
    for (int byte = 0; byte < 256; byte++) { tokens.push_back(std::string(1, char(byte))); }
    tokens.insert(tokens.end(), merged.begin(), merged.end());
    tokens.push_back("<|endoftext|>");
    return tokens;
}

// Encodes a word: joins the neighbours that make the token with the lowest number, the leftmost first, and
// repeats this from the start.
Tokens by_definition(const std::vector<std::string>& vocabulary, const std::string& word) {
    auto number = [&](const std::string& token) {
        return int(std::find(vocabulary.begin(), vocabulary.end(), token) - vocabulary.begin());
    };
    const int none = int(vocabulary.size());
    std::vector<std::string> parts;
    for (char c : word) { parts.push_back({c}); }
    while (true) {
        int lowest = none;
        size_t at = 0;
        for (size_t i = 0; i + 1 < parts.size(); i++) {
            const int joined = number(parts[i] + parts[i + 1]);
            if (joined < lowest) {
                lowest = joined;
                at = i;
            }
        }
        if (lowest == none) { break; }
        parts[at] += parts[at + 1];
        parts.erase(parts.begin() + long(at) + 1);
    }
    Tokens tokens;
    for (const std::string& part : parts) { tokens.push_back(number(part)); }
    return tokens;
}

class MergedTokens : public ::testing::Test {
#ifdef WITHOUT_PCRE2
    void SetUp() override { GTEST_SKIP() << "PCRE2 is not in this build"; }
#endif
};

TEST(BytePairEncoder, in_a_vocabulary_of_bytes_each_byte_is_its_token) {
    std::string text;
    Tokens expected;
    for (int c = 0; c < 0x80; c++) {
        text += char(c);
        expected.push_back(c);
    }
    for (int byte : {0xC3, 0xA9, 0xF0, 0x9F, 0x8C, 0x8D}) {
        text += char(byte);
        expected.push_back(byte);
    }
    EXPECT_EQ(encode(bytes_and({}), text), expected);
    EXPECT_EQ(encode(bytes_and({}), ""), Tokens());
}

TEST(BytePairEncoder, the_end_of_text_is_one_token_wherever_it_stands) {
    EXPECT_EQ(encode(bytes_and({}), "<|endoftext|>"), Tokens({256}));
    EXPECT_EQ(encode(bytes_and({}), "a<|endoftext|><|endoftext|>b"), Tokens({'a', 256, 256, 'b'}));
    EXPECT_EQ(encode(bytes_and({}), "<|endoftext").size(), 11u);
    EXPECT_EQ(encode({"a", "b", "<end>"}, "a<end>b<end>"), Tokens({0, 2, 1, 2}));
}

TEST(BytePairEncoder, what_cannot_be_encoded_is_one_line) {
    for (const char* wrong : {"ab\x80", "ab\xC3", "ab\xED\xA0\x80", "ab\xC0\xAF", "ab\xFF"}) {
        const std::string message = user_error([&] { encode(bytes_and({}), wrong); });
        EXPECT_TRUE(contains(message, "the prompt is not UTF-8 (byte 2): convert it"));
    }
    const std::string message = user_error([&] { encode({"a", "b", "<|endoftext|>"}, "abc"); });
    EXPECT_TRUE(contains(message, "no token for byte 0x63 of the prompt"));
}

TEST_F(MergedTokens, pairs_are_joined_lowest_number_first_and_of_one_number_leftmost_first) {
    EXPECT_EQ(encode(bytes_and({"bc", "ab"}), "abc"), Tokens({'a', 256}));
    EXPECT_EQ(encode(bytes_and({"ab", "bc"}), "abc"), Tokens({256, 'c'}));
    EXPECT_EQ(encode(bytes_and({"aa"}), "aaaaa"), Tokens({256, 256, 'a'}));
    EXPECT_EQ(encode(bytes_and({"aa", "aaa"}), "aaaaa"), Tokens({256, 257}));
    // A token is not made if its parts are never neighbours.
    EXPECT_EQ(encode(bytes_and({"abcd"}), "abcd"), Tokens({'a', 'b', 'c', 'd'}));
    EXPECT_EQ(encode(bytes_and({"ab", "cd", "abcd"}), "abcdcdab"), Tokens({258, 257, 256}));
}

TEST_F(MergedTokens, nothing_is_joined_across_the_pieces_of_gpt2s_pattern) {
    const std::vector<std::string> vocabulary =
        bytes_and({"a ", " a", "ab", "a1", "1a", "a.", "'s", "  ", "\n\n", "n'", "'t", "\xC3\xA9",
                   "a\xC3\xA9", "\xE2\x80", "\xE2\x80\x83", "  a"});
    auto text = [&](std::string_view prompt) {
        std::string result;
        for (int token : encode(vocabulary, prompt)) { result += vocabulary[size_t(token)] + "|"; }
        return result;
    };
    EXPECT_EQ(text("a a"), "a| a|");
    EXPECT_EQ(text("a  a"), "a| | a|");  // the last space goes with the word
    EXPECT_EQ(text("a   "), "a|  | |");
    EXPECT_EQ(text("a1a."), "a|1|a|.|");
    EXPECT_EQ(text("ban't's"), "b|a|n|'t|'s|");
    EXPECT_EQ(text("a\n\na"), "a|\n|\n|a|");
    EXPECT_EQ(text("a\n\n"), "a|\n\n|");
    EXPECT_EQ(text("a\xC3\xA9"), "a\xC3\xA9|");  // a letter
    EXPECT_EQ(text("a\xE2\x80\x83\xE2\x80\x83"), "a|\xE2\x80\x83|\xE2\x80\x83|");  // em space
    EXPECT_EQ(text("a<|endoftext|>b"), "a|<|endoftext|>|b|");
}

TEST_F(MergedTokens, a_character_may_be_a_token_where_its_bytes_are_none) {
    EXPECT_EQ(encode({"a", "\xC3\xA9", "<|endoftext|>"}, "a\xC3\xA9"), Tokens({0, 1}));
    const std::string message = user_error([&] { encode({"a", "\xC3\xA9", "<|endoftext|>"}, "\xC3\xA8"); });
    EXPECT_TRUE(contains(message, "byte 0xC3"));
}

// With a time that is quadratic in the length this test would not end.
TEST_F(MergedTokens, a_word_of_a_quarter_of_a_million_letters_is_joined_to_the_end) {
    std::vector<std::string> merged;
    for (size_t length = 2; length <= 128; length *= 2) { merged.push_back(std::string(length, 'a')); }
    EXPECT_EQ(encode(bytes_and(merged), std::string(1 << 18, 'a')), Tokens((1 << 18) / 128, 256 + 6));
}

TEST_F(MergedTokens, any_word_becomes_what_the_definition_says) {
    std::mt19937 random(1);
    auto letters = [&](size_t count) {
        std::string text;
        while (text.size() < count) { text += char('a' + random() % 3); }
        return text;
    };
    for (int trial = 0; trial < 300; trial++) {
        std::vector<std::string> merged;
        while (merged.size() < 12) {
            const std::string token = letters(2 + random() % 4);
            if (std::find(merged.begin(), merged.end(), token) == merged.end()) { merged.push_back(token); }
        }
        const std::string text = letters(random() % 60);
        EXPECT_EQ(encode(bytes_and(merged), text), by_definition(bytes_and(merged), text)) << text;
    }
}

}  // namespace test_tokenizer
