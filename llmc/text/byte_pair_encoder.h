// BytePairEncoder: from text to tokens, with nothing but the vocabulary of tokenizer.bin (byte-level BPE:
// Sennrich et al. 2016, arXiv 1508.07909; Radford et al. 2019). GPT-2's pattern cuts a text into pieces. A
// piece begins as single bytes; as long as two neighbours together are a token, the pair that makes the token
// with the lowest number is joined, the leftmost first.
//
// This needs a vocabulary whose token numbers are the ranks of the merges, as GPT-2's and those of
// data/prepare.py (bytes, bpe:N). The file does not say from which two parts a token was merged, so any two
// that make its bytes are joined, as in tiktoken. With another vocabulary the tokens still spell the text.
#pragma once
#include <algorithm>
#include <memory>
#include <queue>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "llmc/error.h"
#include "llmc/text/gpt2_pattern.h"
#include "llmc/text/tokenizer.h"

class BytePairEncoder {
public:
    // tokenizer: must outlive this. UserError if its vocabulary needs a library that this build lacks.
    explicit BytePairEncoder(const Tokenizer& tokenizer) : end_of_text(tokenizer.end_of_text()) {
        end_of_text_bytes = tokenizer.decode(end_of_text);
        for (int token = 0; token < tokenizer.vocab_size(); token++) {
            if (token == end_of_text) { continue; }
            numbers.emplace(tokenizer.decode(token), token);  // of equal tokens, the first
            longest = std::max(longest, tokenizer.decode(token).size());
        }
        if (longest > 1) { pattern = std::make_unique<Gpt2Pattern>(); }
    }

    // The tokens of a text. The bytes of the end-of-text token (GPT-2's <|endoftext|>) become that token.
    // UserError if the text is not UTF-8, or has a byte that no token has.
    std::vector<int> encode(std::string_view text) const {
        check_utf8(text);
        std::vector<int> tokens;
        auto encode_one = [&](std::string_view piece) { encode_piece(piece, tokens); };
        for (size_t at = 0;;) {
            const size_t end = text.find(end_of_text_bytes, at);
            const std::string_view document = text.substr(at, end - at);
            pattern ? pattern->cut(document, encode_one) : encode_one(document);  // without: nothing to merge
            if (end == text.npos) { return tokens; }
            tokens.push_back(end_of_text);
            at = end + end_of_text_bytes.size();
        }
    }

private:
    // Two neighbours in a piece that can be joined: [begin, middle) and [middle, end).
    struct Pair {
        int token;
        size_t begin, middle, end;

        // A priority queue returns the largest first: the lowest token, then the leftmost.
        bool operator<(const Pair& other) const {
            return token != other.token ? token > other.token : begin > other.begin;
        }
    };

    // The parts of a piece: the part that begins at byte i ends at end[i] (0: no part begins there), and the
    // part before it begins at before[i].
    struct Parts {
        std::vector<size_t> end, before;
        std::priority_queue<Pair> pairs;  // may hold pairs whose parts have been joined to others

        bool has(const Pair& pair) const {
            return end[pair.begin] == pair.middle && end[pair.middle] == pair.end;
        }
    };

    static void check_utf8(std::string_view text) {
        for (size_t at = 0, length; at < text.size(); at += length) {
            length = utf8_length(text, at);
            if (length == 0) {
                throw UserError(format("the prompt is not UTF-8 (byte %zu): convert it with iconv", at));
            }
        }
    }

    // O(n log n), since a prompt may be one long word.
    void encode_piece(std::string_view piece, std::vector<int>& tokens) const {
        Parts parts;
        for (size_t i = 0; i < piece.size(); i++) {
            parts.end.push_back(i + 1);
            parts.before.push_back(i - 1);
        }
        for (size_t i = 0; i + 1 < piece.size(); i++) { add_pair(piece, i, parts); }
        while (!parts.pairs.empty()) {
            const Pair pair = parts.pairs.top();
            parts.pairs.pop();
            if (parts.has(pair)) { join(piece, pair, parts); }
        }
        for (size_t i = 0; i < piece.size(); i = parts.end[i]) {
            tokens.push_back(number_of_part(piece.substr(i, parts.end[i] - i)));
        }
    }

    void join(std::string_view piece, const Pair& pair, Parts& parts) const {
        parts.end[pair.begin] = pair.end;
        parts.end[pair.middle] = 0;
        if (pair.end < piece.size()) {
            parts.before[pair.end] = pair.begin;
            add_pair(piece, pair.begin, parts);
        }
        if (pair.begin > 0) { add_pair(piece, parts.before[pair.begin], parts); }
    }

    // Queues the part that begins at `begin` and the next one as a pair, if they make a token.
    void add_pair(std::string_view piece, size_t begin, Parts& parts) const {
        const size_t middle = parts.end[begin], end = parts.end[middle];
        if (end - begin > longest) { return; }
        const auto found = numbers.find(piece.substr(begin, end - begin));
        if (found != numbers.end()) { parts.pairs.push({found->second, begin, middle, end}); }
    }

    int number_of_part(std::string_view part) const {
        const auto found = numbers.find(part);
        if (found != numbers.end()) { return found->second; }
        const unsigned byte = uint8_t(part[0]);
        throw UserError(format("the tokenizer has no token for byte 0x%02X of the prompt: use characters of "
                               "the text that it was made from", byte));
    }

    int end_of_text;
    std::string_view end_of_text_bytes;
    std::unordered_map<std::string_view, int> numbers;  // tokens by their bytes
    size_t longest = 0;                                 // bytes of the longest token
    std::unique_ptr<Gpt2Pattern> pattern;               // null if there is nothing to merge
};
