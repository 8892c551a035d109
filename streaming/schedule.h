// The schedule of Streaming DiLoCo (arXiv 2501.18512, 2.2 and 2.3): which blocks form a fragment, and which
// fragment is sent and which is due at step t. Pure functions of the options, so every worker computes the
// same.
//
// Steps count from 1. Fragment p with offset t_p is sent at the steps t >= 1 with (t - t_p) mod H == 0, hence
// once in any H steps, for the first time by step H (at step H itself where t_p is 0). It is due tau steps
// after it was sent.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "llmc/error.h"

enum class FragmentPattern { strided, sequential };

struct Fragment {
    std::vector<int> blocks;  // indices into Layout::blocks, ascending
    long offset = 0;          // t_p, in [0, H)
};

inline FragmentPattern parse_fragment_pattern(const std::string& name) {
    if (name == "strided") { return FragmentPattern::strided; }
    if (name == "sequential") { return FragmentPattern::sequential; }
    throw UserError("unknown fragment pattern '" + name + "': use strided or sequential");
}

// The fragments of a model whose blocks [0, layers) are its layers and [layers, blocks) its embedding:
//     P' = ceil(layers / fragment_layers) fragments of layers;
//     strided: fragment p holds the layers p, p + P', p + 2P', ...;
//     sequential: fragment_layers consecutive ones; then one fragment for each block of the embedding.
// fragment_layers 0: a single fragment with everything (DiLoCo, arXiv 2311.08105). Offsets: floor(p * H / P).
inline std::vector<Fragment> make_fragments(int layers, int blocks, int fragment_layers,
                                            FragmentPattern pattern, long H) {
    if (fragment_layers < 0) {
        throw UserError(format("%d layers in a fragment: use at least 1, or 0 for everything in one fragment",
                               fragment_layers));
    }
    const int layer_fragments = fragment_layers == 0 ? 1 : (layers + fragment_layers - 1) / fragment_layers;
    std::vector<Fragment> fragments(layer_fragments);
    for (int layer = 0; layer < layers; layer++) {
        bool consecutive = fragment_layers > 0 && pattern == FragmentPattern::sequential;
        fragments[consecutive ? layer / fragment_layers : layer % layer_fragments].blocks.push_back(layer);
    }
    for (int block = layers; block < blocks; block++) {
        if (fragment_layers > 0) { fragments.emplace_back(); }
        fragments.back().blocks.push_back(block);
    }
    for (size_t p = 0; p < fragments.size(); p++) {
        fragments[p].offset = long(p) * H / long(fragments.size());
    }
    return fragments;
}

// Replaces the offsets by others, one a fragment, each in [0, H).
inline void set_offsets(std::vector<Fragment>& fragments, const std::vector<long>& offsets, long H) {
    if (offsets.size() != fragments.size()) {
        throw UserError(format("%zu offsets for %zu fragments: give one for each", offsets.size(),
                               fragments.size()));
    }
    for (size_t p = 0; p < fragments.size(); p++) {
        if (offsets[p] < 0 || offsets[p] >= H) {
            throw UserError(format("fragment %zu has offset %ld: use 0 to %ld, below the inner steps", p,
                                   offsets[p], H - 1));
        }
        fragments[p].offset = offsets[p];
    }
}

inline long first_send(const Fragment& fragment, long H) {
    return fragment.offset == 0 ? H : fragment.offset;
}

// How often the fragment has been sent in the steps 1..step.
inline long sends_until(const Fragment& fragment, long step, long H) {
    return (step - first_send(fragment, H) + H) / H;
}

inline bool is_sent(const Fragment& fragment, long step, long H) {
    return step >= first_send(fragment, H) && (step - fragment.offset) % H == 0;
}

// Due at `step` is what was sent `overlap` (tau) steps before.
inline bool is_due(const Fragment& fragment, long step, long H, long overlap) {
    return is_sent(fragment, step - overlap, H);
}

// The number of the exchange of fragment p that is sent at `step`: 0, 1, 2, ... in the order of (send step,
// fragment). It names the exchange on every worker alike, whatever its overlap.
inline long sync_number(const std::vector<Fragment>& fragments, int p, long step, long H) {
    long number = 0;
    for (int q = 0; q < int(fragments.size()); q++) {
        number += sends_until(fragments[q], q < p ? step : step - 1, H);
    }
    return number;
}

// The most exchanges that are under way at the same time. Within a step sends come before receives.
inline int most_in_flight(const std::vector<Fragment>& fragments, long H, long overlap) {
    int most = 0;
    for (const Fragment& last : fragments) {  // the maximum is reached right after a send
        int now = 0;
        for (const Fragment& one : fragments) { now += (last.offset - one.offset + H) % H <= overlap; }
        most = std::max(most, now);
    }
    return most;
}
