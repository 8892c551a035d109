// The schedule of Streaming DiLoCo (arXiv 2501.18512, 2.2 and 2.3): which blocks form a fragment, and which
// fragment is sent and which is due at step t. Pure functions of the options, so every worker computes the
// same.
//
// Steps are counted from 1. Fragment p with offset t_p is sent at the steps t >= 1 with (t - t_p) mod H == 0:
// once in any H steps, for the first time by step H (at step H itself if t_p is 0). It is due tau steps after
// it was sent.
#pragma once
#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "llmc/error.h"
#include "llmc/layout.h"

enum class FragmentPattern { strided, sequential, balanced };

struct Fragment {
    std::vector<int> blocks;  // indices into Layout::blocks, ascending
    long offset = 0;          // t_p, in [0, H)
};

inline FragmentPattern parse_fragment_pattern(const std::string& name) {
    return FragmentPattern(place_of(name, {"strided", "sequential", "balanced"}, "fragment pattern"));
}

// Distributes the blocks over `count` fragments of about equal size: the largest block first, each to the
// fragment that is smallest so far (Graham 1969: the largest fragment is at most 4/3 of the optimum). Blocks
// of equal size keep their order, so that every worker computes the same fragments.
inline std::vector<Fragment> balanced_fragments(const std::vector<long>& sizes, int count) {
    std::vector<int> order(sizes.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return sizes[a] > sizes[b]; });

    std::vector<Fragment> fragments(count);
    std::vector<long> held(count, 0);
    for (int block : order) {
        const long least = std::min_element(held.begin(), held.end()) - held.begin();
        fragments[least].blocks.push_back(block);
        held[least] += sizes[block];
    }
    for (Fragment& fragment : fragments) { std::sort(fragment.blocks.begin(), fragment.blocks.end()); }
    std::sort(fragments.begin(), fragments.end(),
              [](const Fragment& a, const Fragment& b) { return a.blocks[0] < b.blocks[0]; });
    return fragments;
}

// The fragments of a model whose blocks [0, layers) are its layers and the rest its embedding:
//     P' = ceil(layers / fragment_layers) fragments of layers, and one for each block of the embedding;
//     strided: fragment p holds the layers p, p + P', p + 2P', ...;
//     sequential: fragment_layers consecutive ones;
//     balanced: as many fragments of about equal size, of any blocks.
// fragment_layers 0: a single fragment with everything (DiLoCo, arXiv 2311.08105). Offsets: floor(p * H / P).
// sizes: of all blocks, for balanced
inline std::vector<Fragment> make_fragments(int layers, int blocks, int fragment_layers,
                                            FragmentPattern pattern, long H,
                                            const std::vector<long>& sizes = {}) {
    const int of_layers =
        fragment_layers == 0 ? 1 : int((long(layers) + fragment_layers - 1) / fragment_layers);
    const int count = fragment_layers == 0 ? 1 : of_layers + blocks - layers;
    std::vector<Fragment> fragments(count);
    if (pattern == FragmentPattern::balanced) {
        if (int(sizes.size()) != blocks) { throw std::logic_error("balanced fragments need every size"); }
        fragments = balanced_fragments(sizes, count);
    } else {
        const bool neighbours = fragment_layers > 0 && pattern == FragmentPattern::sequential;
        for (int block = 0; block < blocks; block++) {
            const int p = block >= layers ? of_layers + block - layers
                          : neighbours    ? block / fragment_layers : block % of_layers;
            fragments[std::min(p, count - 1)].blocks.push_back(block);
        }
    }
    for (int p = 0; p < count; p++) { fragments[p].offset = long(p) * H / count; }
    return fragments;
}

inline std::vector<Fragment> make_fragments(const Layout& layout, int fragment_layers,
                                            FragmentPattern pattern, long H) {
    std::vector<long> sizes;
    for (const Block& block : layout.blocks) { sizes.push_back(block.size); }
    return make_fragments(layout.layers, int(layout.blocks.size()), fragment_layers, pattern, H, sizes);
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

// A fragment is due `overlap` (tau) steps after it was sent.
inline bool is_due(const Fragment& fragment, long step, long H, long overlap) {
    return is_sent(fragment, step - overlap, H);
}

inline bool is_used(const Fragment& fragment, long step, long H, long overlap) {
    return is_sent(fragment, step, H) || is_due(fragment, step, H, overlap);
}

// The number of fragment p's exchange that is sent at `step`. Exchanges are numbered from 0 in the order of
// (send step, fragment), so the numbers are the same on all workers, whatever their overlaps.
inline long sync_number(const std::vector<Fragment>& fragments, int p, long step, long H) {
    long number = 0;
    for (int q = 0; q < int(fragments.size()); q++) {
        number += sends_until(fragments[q], q < p ? step : step - 1, H);
    }
    return number;
}

// Whether an exchange may be under way during `step`: a fragment was sent before it, and is due at its end or
// later. Computed from the schedule alone, so that it is the same in a resumed run.
inline bool is_exchanging(const std::vector<Fragment>& fragments, long step, long H, long overlap) {
    return sync_number(fragments, 0, step, H) > sync_number(fragments, 0, step - overlap, H);
}

// The most exchanges in flight at the same time. Within a step sends come before receives.
inline int most_in_flight(const std::vector<Fragment>& fragments, long H, long overlap) {
    int most = 0;
    for (const Fragment& last : fragments) {  // the maximum is reached right after a send
        int now = 0;
        for (const Fragment& one : fragments) { now += (last.offset - one.offset + H) % H <= overlap; }
        most = std::max(most, now);
    }
    return most;
}
