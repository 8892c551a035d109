// A model of five small blocks, for tests that exchange fragments of it.
#pragma once
#include <string>

#include "llmc/layout.h"

// Blocks of the given sizes (per rank). The last one belongs to no layer.
inline Layout toy_layout(int ranks) {
    Layout layout;
    layout.ranks = ranks;
    layout.layers = 4;
    for (long size : {128L, 256L, 128L, 128L, 384L}) {
        const std::string name = "b" + std::to_string(layout.blocks.size());
        layout.blocks.push_back({name, layout.size, size * ranks, size * ranks, 0, layout.values});
        layout.size += size * ranks;
        layout.values += size * ranks;
    }
    return layout;
}
