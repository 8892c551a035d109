// Texts and vocabularies: the tokens of a text spell it. An input has a byte, whose lowest bit says whether
// the vocabulary begins with all single bytes; a number of tokens; the tokens, each a length and that many
// bytes; and the text.
#include "dev/break/fuzz/fuzz.h"
#include "llmc/text/byte_pair_encoder.h"

const std::string end_of_text = "\x0d<|endoftext|>";

// The tokenizer file that `bytes` describe, and where the text begins.
std::string tokenizer_file(const std::string& bytes, size_t& at) {
    std::string entries;
    int count = 0;
    if (!bytes.empty() && bytes[0] % 2 != 0) {
        for (; count < 256; count++) { entries += std::string({1, char(count)}); }
    }
    int more = bytes.size() > 1 ? uint8_t(bytes[1]) : 0;
    for (at = std::min<size_t>(bytes.size(), 2); more > 0 && at < bytes.size(); more--, count++) {
        const size_t length = uint8_t(bytes[at]);
        if (length == 0 || at + 1 + length > bytes.size()) { break; }
        entries += bytes.substr(at, 1 + length);
        at += 1 + length;
    }
    return header_bytes({tokenizer_magic, 2, count + 1, count}) + entries + end_of_text;
}

void fuzz(const std::string& bytes) {
    size_t at;
    const MemoryFile file(tokenizer_file(bytes, at));
    const Tokenizer tokenizer(file.path());
    const std::string text = bytes.substr(at);
    std::string spelled;
    for (int token : BytePairEncoder(tokenizer).encode(text)) {
        require(token >= 0 && token < tokenizer.vocab_size(), "a token is in the vocabulary");
        spelled += tokenizer.decode(token);
    }
    require(spelled == text, "the tokens spell the text");
}

std::vector<std::string> seeds() {
    const std::string words = "\x07\2th\3the\4 the\2aa\4aaaa\2\xc3\xa9\3\xe2\x82\xac";
    const std::string text =
        "the theme's aaaaaaa  br\xc3\xbbl\xc3\xa9\xe2\x82\xac 123<|endoftext|>\n\n the end don't";
    const std::string few = std::string("\0\3\1a\1b\2ab", 9) + "abaabb<|endoftext|>ab";
    return {"\1" + words + text, std::string("\1\0", 2) + text, few};
}
