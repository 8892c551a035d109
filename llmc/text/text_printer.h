// TextPrinter: text as its tokens come, on stdout. A token need not be whole characters: what is incomplete
// waits for the next one.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

#include "llmc/text/tokenizer.h"

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

    // The end of the line, and what is still incomplete.
    void end() {
        fprintf(out, "%s\n", printable(pending).c_str());
        pending.clear();
    }

private:
    FILE* out;
    std::string pending;
};
