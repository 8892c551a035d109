// GPT-2's pattern cuts a text into pieces before byte pairs are merged (github.com/openai/gpt-2,
// src/encoder.py). A piece is a contraction such as 's; or letters, digits or other characters, with the
// space before them; or white space, whose last character is left to a word that follows.
//
// PCRE2 knows which characters are letters and numbers in Unicode; characters that are newer than it count as
// neither. A build without PCRE2 defines WITHOUT_PCRE2, which only this file looks at.
#pragma once
#include <stdexcept>
#include <string>
#include <string_view>

#include "llmc/error.h"
#include "llmc/owned_array.h"

#ifdef WITHOUT_PCRE2
class Gpt2Pattern {
public:
    Gpt2Pattern() {
        throw UserError("a prompt for this tokenizer needs PCRE2, which is not in this build: install it "
                        "(libpcre2-dev) and build again, or use a byte tokenizer");
    }
    template <typename Take>
    void cut(std::string_view, Take) const {}
};
#else
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

class Gpt2Pattern {
public:
    Gpt2Pattern() {
        // Unicode's White_Space. PCRE2's \s has one character more, U+180E.
        const std::string space = R"(\t-\r \x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F})"
                                  R"(\x{205F}\x{3000})";
        const std::string pattern = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\p{L}\p{N})" + space +
                                    "]+|[" + space + "]+(?![^" + space + "])|[" + space + "]+";
        int error;
        PCRE2_SIZE at;
        code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), PCRE2_UTF,
                                 &error, &at, nullptr));
        if (!code) { fail("pcre2_compile", error); }
    }

    // Calls take(piece) for each piece, in order; joined they are the text.   text: valid UTF-8
    template <typename Take>
    void cut(std::string_view text, Take take) const {
        const Owned<pcre2_match_data, pcre2_match_data_free> match(pcre2_match_data_create(1, nullptr));
        if (!match) { throw std::bad_alloc(); }
        for (size_t at = 0; at < text.size();) {
            // Without PCRE2's UTF check, which reads the whole rest each time: O(n^2).
            const int found = pcre2_match(code.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                                          at, PCRE2_ANCHORED | PCRE2_NO_UTF_CHECK, match.get(), nullptr);
            if (found < 0) { fail("pcre2_match", found); }  // every character matches something
            const size_t end = pcre2_get_ovector_pointer(match.get())[1];
            take(text.substr(at, end - at));
            at = end;
        }
    }

private:
    [[noreturn]] static void fail(const char* call, int error) {
        PCRE2_UCHAR text[200];
        pcre2_get_error_message(error, text, sizeof text);
        throw std::runtime_error(format("%s: %s", call, reinterpret_cast<const char*>(text)));
    }

    Owned<pcre2_code, pcre2_code_free> code;
};
#endif
