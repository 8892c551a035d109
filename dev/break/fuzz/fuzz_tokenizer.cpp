// Tokenizer files, and the text that is printed for their tokens.
#include "dev/break/fuzz/fuzz.h"
#include "llmc/text/tokenizer.h"

void fuzz(const std::string& bytes) {
    const MemoryFile file(bytes);
    const Tokenizer tokenizer(file.path());
    std::string text;
    for (int token = 0; token < tokenizer.vocab_size(); token++) {
        require(!tokenizer.decode(token).empty(), "every token has bytes");
        text += tokenizer.decode(token);
    }
    require(!tokenizer.decode(tokenizer.end_of_text()).empty(), "the end of text is a token");
    require(tokenizer.decode(-1).empty() && tokenizer.decode(tokenizer.vocab_size()).empty(),
            "only numbers of the vocabulary are tokens");
    const std::string shown = printable(text);
    for (size_t at = 0; at < shown.size();) {
        const size_t length = utf8_length(shown, at);
        require(length > 0, "printed text is UTF-8");
        const uint8_t first = uint8_t(shown[at]);
        require(first >= 0x20 || first == '\n' || first == '\t', "no control characters are printed");
        at += length;
    }
}

std::vector<std::string> seeds() {
    std::string one_byte_tokens, words;
    for (int c = 0; c < 256; c++) { one_byte_tokens += std::string({1, char(c)}); }
    for (const char* word :
         {"the", " quick", "br\xc3\xb6wn", " f\xe2\x82\xac", "\xf0\x9f\xa6\x8a", "\x1b[2J"}) {
        words += char(strlen(word));
        words += word;
    }
    const std::string long_token = '\xff' + std::string(255, 'x');
    return {header_bytes({tokenizer_magic, 2, 257, 256}) + one_byte_tokens + "\3end",
            header_bytes({tokenizer_magic, 2, 7, 6}) + words + long_token};
}
