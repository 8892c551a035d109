// Reads dev/test/data/reference.bin, the numbers of dev/reference/reference.py (its head documents the format), and
// draws the parameters and tokens that they were computed from.
//
//     Reference reference = read_reference("dev/test/data/reference.bin");
//     reference_parameters(params, reference, layout);   // flat buffer of gpt_layout(reference.shape, ...)
//     std::vector<int> tokens = reference_tokens(reference);   // inputs [0, B*T), targets [1, B*T + 1)
//     double error = relative_error(logits, reference.array("logits").values.data(), count);
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "llmc/error.h"
#include "llmc/layout.h"
#include "llmc/random.h"

struct ReferenceArray {
    std::vector<long> shape;
    std::vector<float> values;
};

struct Reference {
    GptShape shape;
    int B = 0, T = 0;
    uint64_t seed = 0;
    int steps = 0;  // the number of updates that gave "losses" and "norms"
    std::map<std::string, ReferenceArray> arrays;

    const ReferenceArray& array(const std::string& name) const {
        auto found = arrays.find(name);
        if (found == arrays.end()) { throw RunError("the reference has no array " + name); }
        return found->second;
    }
};

// The optimizers that gave "losses" and "norms", and "muon.losses" and "muon.norms", without clipping.
const float reference_learning_rate = 1e-3f, reference_beta1 = 0.9f, reference_beta2 = 0.95f,
            reference_eps = 1e-8f, reference_weight_decay = 0.1f, reference_muon_rate = 2e-3f;

inline Reference read_reference(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    auto refuse = [&](const char* what) { throw RunError(path + " " + what + ": run dev/reference/reference.py"); };
    if (bytes.size() < 64) { refuse("is missing or truncated"); }

    int32_t head[16];
    std::memcpy(head, bytes.data(), sizeof(head));
    if (head[0] != 20250130 || head[1] != 1) { refuse("is no reference file of version 1"); }
    Reference reference;
    reference.shape.layers = head[2];
    reference.shape.heads = head[3];
    reference.shape.channels = head[4];
    reference.shape.max_seq_len = head[5];
    reference.shape.vocab_size = head[6];
    reference.shape.padded_vocab_size = head[7];
    reference.B = head[8];
    reference.T = head[9];
    reference.seed = uint64_t(head[10]);
    reference.steps = head[11];

    struct Entry {
        char name[32];
        int32_t dimensions, shape[4], zero;
        int64_t offset;
    };
    static_assert(sizeof(Entry) == 64, "as in the file");
    for (int i = 0; i < head[12]; i++) {
        Entry entry;
        if (bytes.size() < 64 + (size_t(i) + 1) * sizeof(entry)) { refuse("is truncated"); }
        std::memcpy(&entry, bytes.data() + 64 + size_t(i) * sizeof(entry), sizeof(entry));
        ReferenceArray array;
        size_t count = 1;
        for (int d = 0; d < entry.dimensions; d++) {
            array.shape.push_back(entry.shape[d]);
            count *= size_t(entry.shape[d]);
        }
        if (bytes.size() < size_t(entry.offset) + 4 * count) { refuse("is truncated"); }
        array.values.resize(count);
        std::memcpy(array.values.data(), bytes.data() + entry.offset, 4 * count);
        reference.arrays[std::string(entry.name, strnlen(entry.name, sizeof(entry.name)))] = std::move(array);
    }
    return reference;
}

// params: flat buffer of `layout`; value i of the unpadded model is 0.05 * standard_normal(seed,
// parameters, i), plus 1 in LayerNorm's weights; padding and wte's rows beyond the vocabulary are zero.
inline void reference_parameters(float* params, const Reference& reference, const Layout& layout) {
    std::fill(params, params + layout.size, 0.0f);
    for (const Tensor& tensor : layout.tensors) {
        const std::string kind = tensor.name.substr(tensor.name.rfind('.') + 1);
        const float mean = kind == "ln1w" || kind == "ln2w" || kind == "lnfw" ? 1.0f : 0.0f;
        const long count = tensor.name == "wte" ? long(reference.shape.vocab_size) * reference.shape.channels
                                                : tensor.count();
        const long first = layout.logical_index(tensor.offset);
        for (long i = 0; i < count; i++) {
            float normal = standard_normal(reference.seed, RandomUse::parameters, uint64_t(first + i));
            params[tensor.offset + i] = 0.05f * normal + mean;
        }
    }
}

// B * T + 1 tokens: the targets are the inputs one later.
inline std::vector<int> reference_tokens(const Reference& reference) {
    std::vector<int> tokens;
    for (int i = 0; i <= reference.B * reference.T; i++) {
        uint32_t word = random_bits(reference.seed, RandomUse::shuffle, uint64_t(i)).v[0];
        tokens.push_back(int(word % uint32_t(reference.shape.vocab_size)));
    }
    return tokens;
}

// ||a - b|| / ||b||
inline double relative_error(const float* a, const float* b, long count) {
    double difference = 0, norm = 0;
    for (long i = 0; i < count; i++) {
        difference += (double(a[i]) - b[i]) * (double(a[i]) - b[i]);
        norm += double(b[i]) * b[i];
    }
    return std::sqrt(difference / norm);
}

// a b / (||a|| ||b||)
inline double cosine(const float* a, const float* b, long count) {
    double product = 0, a_norm = 0, b_norm = 0;
    for (long i = 0; i < count; i++) {
        product += double(a[i]) * b[i];
        a_norm += double(a[i]) * a[i];
        b_norm += double(b[i]) * b[i];
    }
    return product / std::sqrt(a_norm * b_norm);
}

// The norm that "norms" holds for a tensor: qkvb's middle third, the key bias, is left out.
inline double reference_norm(const float* values, const Tensor& tensor) {
    const bool is_qkvb = tensor.name.size() > 5 && tensor.name.substr(tensor.name.size() - 5) == ".qkvb";
    const long C = tensor.count() / 3;
    double sum = 0;
    for (long i = 0; i < tensor.count(); i++) {
        if (is_qkvb && i / C == 1) { continue; }
        sum += double(values[i]) * values[i];
    }
    return std::sqrt(sum);
}
