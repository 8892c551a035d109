// Tokens back to text.
#include "llmc/tokenizer.h"

#include "dev/test/files.h"

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
