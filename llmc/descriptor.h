// Models by name, in llm.c's words:
//     d12, gpt2:d12   GPT-2 of 12 layers; as many positions as a sequence has tokens
//     gpt3:c768       GPT-3 of 768 channels; 2048 positions. Its attention is dense here, as in llm.c
// Sizes: GPT-2's and GPT-3's papers (arXiv 2005.14165, table 2.1) and those that llm.c adds. GPT-3 13B is not
// among them: its 5140 channels do not divide by its 40 heads.
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

// Layers, heads, channels and, where the name says them, positions; the rest is zero. UserError for a name
// that is not known. "gpt2:12" stands in one of llm.c's scripts.
inline GptShape parse_descriptor(const std::string& name) {
    std::string known = name;
    if (name.rfind("gpt2:", 0) == 0) { known = (name[5] == 'd' ? "" : "d") + name.substr(5); }
    for (const Descriptor& d : descriptors) {
        if (known == d.name) { return {d.max_seq_len, 0, 0, d.layers, d.heads, d.channels}; }
    }
    throw UserError("-e " + name + " is neither a model file (.bin) nor one of " + descriptor_names() +
                    ": for other sizes start from one of them and give --layers, --heads and --channels");
}
