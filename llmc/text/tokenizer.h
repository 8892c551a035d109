// Tokenizer: from tokens back to text; TextPrinter: prints it as the tokens come. byte_pair_encoder.h goes
// the other way.
//
// The file has llm.c's format: a header of 256 int32 {20240328, 2, vocabulary size, end-of-text token}, then
// for every token a byte with its length and that many bytes. Version 1 has no end-of-text field: it is
// GPT-2's, where that token is 50256. A token need not be whole characters: join the bytes first, then make
// them `printable`.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/error.h"
#include "llmc/file.h"

const int32_t tokenizer_magic = 20240328;

class Tokenizer {
public:
    // UserError, naming the file: missing, of another kind, truncated or damaged.
    explicit Tokenizer(const std::string& path) {
        const InputFile file(path, "make it again with data/prepare.py");
        const FileHeader header = file.read_header(tokenizer_magic, "tokenizer");
        if (header[1] != 1 && header[1] != 2) {
            file.fail(format("is a tokenizer of version %d, not 1 or 2", header[1]));
        }
        const int64_t size = file.size() - int64_t(sizeof header);
        const int vocab_size = header[2];
        eot = header[1] == 1 ? 50256 : header[3];
        if (vocab_size <= 0 || eot < 0 || eot >= vocab_size) {
            file.fail(format("has a damaged header (vocabulary of %d, end of text %d)", vocab_size, eot));
        }
        // A token takes 2 to 256 bytes.
        if (size < int64_t(vocab_size) * 2) { file.fail(format("is truncated (no %d tokens)", vocab_size)); }
        if (size > int64_t(vocab_size) * 256) { file.fail(format("is too long for %d tokens", vocab_size)); }
        data.resize(size_t(size));
        file.read(&data[0], data.size(), sizeof header);
        index(file, vocab_size);
    }

    int vocab_size() const { return int(begins.size()) - 1; }
    int end_of_text() const { return eot; }

    // The token's bytes. Empty for a token beyond the vocabulary: an untrained model may sample padding.
    std::string_view decode(int token) const {
        if (token < 0 || token >= vocab_size()) { return {}; }
        return std::string_view(data).substr(begins[token] + 1, uint8_t(data[begins[token]]));
    }

private:
    void index(const InputFile& file, int vocab_size) {
        size_t at = 0;
        for (int token = 0; token < vocab_size; token++) {
            const size_t length = at < data.size() ? uint8_t(data[at]) : 1;
            if (at + 1 + length > data.size()) { file.fail(format("is truncated (at token %d)", token)); }
            if (length == 0) { file.fail(format("is damaged (token %d is empty)", token)); }
            begins.push_back(at);
            at += 1 + length;
        }
        if (at != data.size()) {
            file.fail(format("is too long (%zu bytes after the last token)", data.size() - at));
        }
        begins.push_back(at);
    }

    std::string data;            // length byte and bytes of token 0, of token 1, ...
    std::vector<size_t> begins;  // (vocab_size + 1): where each token's length byte lies
    int eot = 0;
};

// The length of the character that starts at text[at]; 0 if it is not valid UTF-8 (RFC 3629: no overlong
// forms, surrogates or values beyond U+10FFFF).
inline size_t utf8_length(std::string_view text, size_t at) {
    const uint8_t first = uint8_t(text[at]);
    if (first < 0x80) { return 1; }
    const size_t length = first >= 0xC2 && first < 0xE0 ? 2 : (first & 0xF0) == 0xE0 ? 3
                          : first >= 0xF0 && first < 0xF5 ? 4 : 0;
    if (length == 0 || at + length > text.size()) { return 0; }
    for (size_t i = 1; i < length; i++) {
        if ((uint8_t(text[at + i]) & 0xC0) != 0x80) { return 0; }
    }
    const uint8_t second = uint8_t(text[at + 1]);
    const bool wrong = (first == 0xE0 && second < 0xA0) || (first == 0xED && second >= 0xA0) ||
                       (first == 0xF0 && second < 0x90) || (first == 0xF4 && second >= 0x90);
    return wrong ? 0 : length;
}

// Text that is safe for a terminal: bytes that are not UTF-8 become U+FFFD, and control characters other than
// newline and tab are removed.
inline std::string printable(std::string_view text) {
    std::string result;
    for (size_t at = 0; at < text.size();) {
        const size_t length = utf8_length(text, at);
        const uint8_t first = uint8_t(text[at]);
        const bool c0 = length == 1 && (first < 0x20 || first == 0x7F) && first != '\n' && first != '\t';
        const bool c1 = length == 2 && first == 0xC2 && uint8_t(text[at + 1]) < 0xA0;
        if (length == 0) {
            result += "\xEF\xBF\xBD";
        } else if (!c0 && !c1) {
            result += text.substr(at, length);
        }
        at += std::max<size_t>(length, 1);
    }
    return result;
}

// The length of `text` without a last character that still lacks bytes (UTF-8).
inline size_t whole_characters(std::string_view text) {
    for (size_t back = 1; back <= std::min<size_t>(3, text.size()); back++) {
        const uint8_t byte = uint8_t(text[text.size() - back]);
        if ((byte & 0xC0) == 0x80) { continue; }  // not a first byte
        const size_t length = byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : byte >= 0xC0 ? 2 : 1;
        return length > back ? text.size() - back : text.size();
    }
    return text.size();
}

// Prints tokens on stdout as they come. A character that is incomplete waits for the next token.
class TextPrinter {
public:
    explicit TextPrinter(FILE* out = stdout) : out(out) {}

    void print(std::string_view bytes) {
        pending += bytes;
        const size_t whole = whole_characters(pending);
        fputs(printable(std::string_view(pending).substr(0, whole)).c_str(), out);
        fflush(out);
        pending.erase(0, whole);
    }

    // Prints what is still incomplete, and ends the line.
    void end() {
        fprintf(out, "%s\n", printable(pending).c_str());
        pending.clear();
    }

private:
    FILE* out;
    std::string pending;
};
