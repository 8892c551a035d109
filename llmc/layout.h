// Layout: where each tensor lies in the flat buffers of parameters and gradients, and in the shards of
// optimizer and outer state.
//
// A block is the unit of everything: it is reduced as soon as its backward is done, sharded over the ranks,
// gathered, and exchanged with other workers. Each transformer layer is a block. The embedding (wte, wpe,
// final LayerNorm) is one more, or several: if it is larger than a fragment of layers, it is cut between
// rows:
//
//     flat buffer  | layer 0 | layer 1 | ... | wte rows 0.. | wte rows k.. | wte rest, wpe, lnf |
//     a block      | matrices (weight decay) | vectors (none) | padding to a multiple of 128 * ranks |
//     its shards   |   rank 0   |   rank 1   | ...            |
//
// A shard buffer (size / ranks values) holds this rank's shard of every block, in the order of the blocks.
#pragma once
#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

// The number of values that share a scale on the wire. A shard is a multiple of it.
const long quantization_block = 128;

struct Tensor {
    std::string name;
    std::vector<long> shape;
    bool decay;       // AdamW's weight decay: matrices only
    long offset = 0;  // in the flat buffer
    long count() const { return std::accumulate(shape.begin(), shape.end(), 1L, std::multiplies<>()); }
};

struct Block {
    std::string name;
    long offset;          // in the flat buffer
    long size;            // with padding: a multiple of quantization_block * ranks
    long values;          // without padding
    long decayed;         // the first `decayed` values have weight decay
    long logical_offset;  // in the model without padding: the same for any number of ranks
};

// A part of a shard: `count` values at `shard` in a shard buffer and at `flat` in a flat buffer.
struct Range {
    long shard, flat, count;
};

struct Layout {
    int ranks = 1;
    std::vector<Tensor> tensors;
    std::vector<Block> blocks;  // each begins where the one before ends
    int layers = 0;             // blocks [0, layers) are transformer layers, the rest is the embedding
    long size = 0;              // with padding
    long values = 0;            // without

    long shard_size() const { return size / ranks; }

    Range shard(int block, int rank) const {
        long count = blocks[block].size / ranks;
        return {blocks[block].offset / ranks, blocks[block].offset + rank * count, count};
    }

    // The number of leading values in a rank's shard of a block that have weight decay.
    long decayed(int block, int rank) const {
        const long count = blocks[block].size / ranks;
        return std::clamp(blocks[block].decayed - rank * count, 0L, count);
    }

    // Where a value of the flat buffer lies in the model without padding.
    long logical_index(long flat) const {
        auto after = std::upper_bound(blocks.begin(), blocks.end(), flat,
                                      [](long at, const Block& block) { return at < block.offset; });
        return std::prev(after)->logical_offset + flat - std::prev(after)->offset;
    }

    const Tensor& tensor(const std::string& name) const {
        return *std::find_if(tensors.begin(), tensors.end(), [&](const Tensor& t) { return t.name == name; });
    }
};

// Whether a micro-step adds to the gradients. (The base of both GradientSums.)
struct MicroStep {
    bool adds = true;  // false: gradients are overwritten

    // Before a micro-step. The first one overwrites the gradients of the step before. Those that it does not
    // overwrite become zero: those of positions (wpe), to which encoder_backward adds, and the padding. Calls
    // the set_zero of the stream's namespace.   grads: (layout.size)
    template <class Stream>
    void begin(float* grads, const Layout& layout, bool first, Stream& stream) {
        adds = !first;
        if (adds) { return; }
        set_zero(grads + layout.tensor("wpe").offset, layout.tensor("wpe").count(), stream);
        for (const Block& b : layout.blocks) {
            if (b.size > b.values) { set_zero(grads + b.offset + b.values, b.size - b.values, stream); }
        }
    }
};

struct GptShape {
    int max_seq_len = 1024;
    int vocab_size = 50257;
    int padded_vocab_size = 50304;  // a multiple of 128: rows of wte beyond vocab_size are zero and stay zero
    int layers = 12;
    int heads = 12;
    int channels = 768;

    // By their names in state files.
    std::vector<std::pair<std::string, int>> sizes() const {
        return {{"layers", layers}, {"heads", heads}, {"channels", channels}, {"vocab_size", vocab_size},
                {"max_seq_len", max_seq_len}, {"padded_vocab_size", padded_vocab_size}};
    }
};

// GPT-2's tensors in blocks. The embedding is cut into blocks that are no larger than `fragment_layers`
// layers (0: it is not cut).
inline Layout gpt_layout(const GptShape& shape, int ranks, int fragment_layers) {
    const long C = shape.channels, unit = quantization_block * ranks;
    Layout layout;
    layout.ranks = ranks;
    layout.layers = shape.layers;

    auto add_tensor = [&](const std::string& name, std::vector<long> tensor_shape, bool decay, long& offset) {
        layout.tensors.push_back({name, std::move(tensor_shape), decay, offset});
        offset += layout.tensors.back().count();
    };
    auto add_block = [&](const std::string& name, long end, long decay_end) {
        Block block{name, layout.size, (end - layout.size + unit - 1) / unit * unit, end - layout.size,
                    std::max(0L, std::min(decay_end, end) - layout.size), layout.values};
        layout.values += block.values;
        layout.size += block.size;
        layout.blocks.push_back(block);
    };

    for (int l = 0; l < shape.layers; l++) {
        const std::string prefix = "h." + std::to_string(l) + ".";
        long offset = layout.size;
        add_tensor(prefix + "qkvw", {3 * C, C}, true, offset);
        add_tensor(prefix + "attprojw", {C, C}, true, offset);
        add_tensor(prefix + "fcw", {4 * C, C}, true, offset);
        add_tensor(prefix + "fcprojw", {C, 4 * C}, true, offset);
        long decay_end = offset;
        for (const auto& [name, size] : {std::pair("ln1w", C), {"ln1b", C}, {"qkvb", 3 * C}, {"attprojb", C},
                                         {"ln2w", C}, {"ln2b", C}, {"fcb", 4 * C}, {"fcprojb", C}}) {
            add_tensor(prefix + name, {size}, false, offset);
        }
        add_block("h." + std::to_string(l), offset, decay_end);
    }

    long begin = layout.size, offset = begin;
    add_tensor("wte", {shape.padded_vocab_size, C}, true, offset);
    add_tensor("wpe", {shape.max_seq_len, C}, true, offset);
    long decay_end = offset;
    add_tensor("lnfw", {C}, false, offset);
    add_tensor("lnfb", {C}, false, offset);
    const long end = offset;

    // The largest cut that consists of whole rows and whole shards, and is no larger than a fragment of
    // layers.
    const long limit = fragment_layers > 0 && shape.layers > 0
                           ? std::min(fragment_layers, shape.layers) * layout.blocks[0].size : end - begin;
    const long step = std::lcm(C, unit);
    const long cut = limit / step * step;
    int piece = 0;
    while (cut > 0 && end - layout.size > limit) {
        add_block("embedding." + std::to_string(piece++), layout.size + cut, decay_end);
    }
    add_block(piece == 0 ? "embedding" : "embedding." + std::to_string(piece), end, decay_end);
    return layout;
}

// -----------------------------------------------------------------------------------------------------------
// Pointers to the tensors in a flat buffer

// The tensors of one transformer layer: pointers into a flat buffer of parameters (floatX) or of gradients.
// Gradients are fp32, so that sums over micro-steps and ranks do not round to bf16.
template <class T>
struct LayerTensors {
    T *qkvw, *attprojw, *fcw, *fcprojw;                              // (3C,C) (C,C) (4C,C) (C,4C)
    T *ln1w, *ln1b, *qkvb, *attprojb, *ln2w, *ln2b, *fcb, *fcprojb;  // (C), except qkvb (3C), fcb (4C)
};

template <class T>
struct EmbeddingTensors {
    T *wte, *wpe;    // (Vp,C) (maxT,C)
    T *lnfw, *lnfb;  // (C) (C)
};

// The tensors of all layers.   flat: (layout.size)
template <class T>
std::vector<LayerTensors<T>> layer_tensors(const Layout& layout, T* flat) {
    std::vector<LayerTensors<T>> layers;
    for (int l = 0; l < layout.layers; l++) {
        auto at = [&](const char* name) {
            return flat + layout.tensor("h." + std::to_string(l) + "." + name).offset;
        };
        layers.push_back({at("qkvw"), at("attprojw"), at("fcw"), at("fcprojw"), at("ln1w"), at("ln1b"),
                          at("qkvb"), at("attprojb"), at("ln2w"), at("ln2b"), at("fcb"), at("fcprojb")});
    }
    return layers;
}

template <class T>
EmbeddingTensors<T> embedding_tensors(const Layout& layout, T* flat) {
    auto at = [&](const char* name) { return flat + layout.tensor(name).offset; };
    return {at("wte"), at("wpe"), at("lnfw"), at("lnfb")};
}
