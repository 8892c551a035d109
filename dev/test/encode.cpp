// build/encode TOKENIZER: texts to tokens by BytePairEncoder, for test_encode.py, which compares them with
// other libraries' tokens. Standard input: for each text an int32, its bytes, and the text. Standard output:
// for each an int32, its tokens, and these as int32.
#include <cstdio>

#include "llmc/text/byte_pair_encoder.h"

static int encode_all(const char* path) {
    const Tokenizer tokenizer(path);
    const BytePairEncoder encoder(tokenizer);
    int32_t bytes;
    while (fread(&bytes, sizeof bytes, 1, stdin) == 1) {
        std::string text(static_cast<size_t>(bytes), '\0');
        if (fread(&text[0], 1, text.size(), stdin) != text.size()) { throw RunError("the input is cut off"); }
        const std::vector<int> tokens = encoder.encode(text);
        const int32_t count = int32_t(tokens.size());
        fwrite(&count, sizeof count, 1, stdout);
        fwrite(tokens.data(), sizeof(int), tokens.size(), stdout);
    }
    return fflush(stdout) == 0 ? 0 : 1;
}

int main(int count, char** words) {
    if (count != 2) {
        fprintf(stderr, "error: no tokenizer: build/encode TOKENIZER\n");
        return 2;
    }
    try {
        return encode_all(words[1]);
    } catch (const UserError& error) {
        fprintf(stderr, "error: %s\n", error.what());
        return 2;
    } catch (const std::exception& error) {
        fprintf(stderr, "error: %s\n", error.what());
        return 1;
    }
}
