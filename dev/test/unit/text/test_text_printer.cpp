#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "llmc/text/tokenizer.h"

namespace test_text_printer {

// The text printed after each piece, and at the end.
static std::vector<std::string> printed(const std::vector<std::string>& pieces) {
    char* text = nullptr;
    size_t size = 0;
    FILE* out = open_memstream(&text, &size);
    TextPrinter printer(out);
    std::vector<std::string> all;
    for (const std::string& piece : pieces) {
        printer.print(piece);
        all.emplace_back(text, size);
    }
    printer.end();
    fflush(out);
    all.emplace_back(text, size);
    fclose(out);
    free(text);
    return all;
}

TEST(TextPrinter, a_character_appears_when_its_last_byte_does) {
    using All = std::vector<std::string>;
    EXPECT_EQ(printed({"a\xC3", "\xA9", "b"}), (All{"a", "a\xC3\xA9", "a\xC3\xA9" "b", "a\xC3\xA9" "b\n"}));
    EXPECT_EQ(printed({"\xF0\x9F", "\x98", "\x80"}), (All{"", "", "\xF0\x9F\x98\x80", "\xF0\x9F\x98\x80\n"}));
    EXPECT_EQ(printed({"\xE4\xB8", "\xAD!"}), (All{"", "\xE4\xB8\xAD!", "\xE4\xB8\xAD!\n"}));
}

TEST(TextPrinter, what_stays_incomplete_or_is_no_text_is_shown_as_such) {
    EXPECT_EQ(printed({"a\xE4\xB8"}).back(), "a\xEF\xBF\xBD\xEF\xBF\xBD\n");
    EXPECT_EQ(printed({"\xC3", "b"}).back(), "\xEF\xBF\xBD" "b\n");
    EXPECT_EQ(printed({"\x80\x80\x80\x80", "c\x1B[2J"}).back(),
              "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD" "c[2J\n");
    EXPECT_EQ(printed({""}).back(), "\n");
}

}  // namespace test_text_printer
