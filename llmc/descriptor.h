// Models by name, with llm.c's names:
//     d12, gpt2:d12   GPT-2 with 12 layers, and as many positions as a sequence has tokens
//     gpt3:c768       GPT-3 with 768 channels and 2048 positions. Its attention is dense here, as in llm.c
// The sizes are from the papers of GPT-2 and GPT-3 (arXiv 2005.14165, table 2.1) and from llm.c. GPT-3 13B is
// missing, since its 5140 channels are not divisible by its 40 heads. d72, d84, c1536, c2560 and c12288 run
// on CPUs alone: they have heads of 80 or 96 channels, or more than 8192 channels.
#pragma once
#include <string>

#include "llmc/error.h"
#include "llmc/layout.h"

struct Descriptor {
    const char* name;
    int layers, channels, heads;
    int max_seq_len;  // 0: as many as the sequences have
};

constexpr Descriptor descriptors[] = {{"d6", 6, 384, 6, 0},
                                      {"d12", 12, 768, 12, 0},
                                      {"d24", 24, 1024, 16, 0},
                                      {"d36", 36, 1280, 20, 0},
                                      {"d48", 48, 1600, 25, 0},
                                      {"d60", 60, 1920, 30, 0},
                                      {"d72", 72, 2880, 30, 0},
                                      {"d84", 84, 3456, 36, 0},
                                      {"gpt3:c384", 6, 384, 6, 2048},
                                      {"gpt3:c768", 12, 768, 12, 2048},
                                      {"gpt3:c1024", 24, 1024, 16, 2048},
                                      {"gpt3:c1536", 24, 1536, 16, 2048},
                                      {"gpt3:c2048", 24, 2048, 16, 2048},
                                      {"gpt3:c2560", 32, 2560, 32, 2048},
                                      {"gpt3:c4096", 32, 4096, 32, 2048},
                                      {"gpt3:c12288", 96, 12288, 96, 2048}};

// "d6, d12, ..."
inline std::string descriptor_names() {
    std::string names;
    for (const Descriptor& d : descriptors) { names += (names.empty() ? "" : ", ") + std::string(d.name); }
    return names;
}

// Layers, heads, channels and, if the name determines them, positions; the rest is zero. UserError for an
// unknown name. One of llm.c's scripts uses "gpt2:12".
inline GptShape parse_descriptor(const std::string& name) {
    std::string known = name;
    if (name.rfind("gpt2:", 0) == 0) { known = (name[5] == 'd' ? "" : "d") + name.substr(5); }
    for (const Descriptor& d : descriptors) {
        if (known == d.name) { return {d.max_seq_len, 0, 0, d.layers, d.heads, d.channels}; }
    }
    throw UserError("-e " + name + " is neither a model file (.bin) nor one of " + descriptor_names() +
                    ": for other sizes start from one of them and give --layers, --heads and --channels");
}
