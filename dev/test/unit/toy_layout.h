// Models of a few small blocks, for tests that exchange fragments of them.
#pragma once
#include <string>
#include <vector>

#include "llmc/layout.h"

// Blocks of the given sizes (per rank), the first `layers` of them layers.
inline Layout toy_layout(const std::vector<long>& sizes, int layers, int ranks = 1) {
    Layout layout;
    layout.ranks = ranks;
    layout.layers = layers;
    for (long size : sizes) {
        const std::string name = "b" + std::to_string(layout.blocks.size());
        layout.blocks.push_back({name, layout.size, size * ranks, size * ranks, 0, layout.values});
        layout.size += size * ranks;
        layout.values += size * ranks;
    }
    return layout;
}

inline Layout toy_layout(int ranks) { return toy_layout({128, 256, 128, 128, 384}, 4, ranks); }
