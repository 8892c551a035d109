// Model files, byte for byte as llm.c writes them: a header of 256 int32 {20240326, version, max_seq_len,
// vocab_size, layers, heads, channels, padded_vocab_size}, then the sixteen tensors of GPT-2; those of the
// layers are one (L, ...) tensor each. Version 3 is fp32, version 5 bf16. In memory the tensors of a layer
// lie together (layout.h), so reading and writing reorders them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "llmc/arithmetic.h"
#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/layout.h"

const int32_t model_magic = 20240326;
const int32_t model_version_fp32 = 3, model_version_bf16 = 5;

// The tensors of the layout in the order of a model file.
inline std::vector<Tensor> model_file_order(const Layout& layout) {
    std::vector<Tensor> order{layout.tensor("wte"), layout.tensor("wpe")};
    for (const char* name : {"ln1w", "ln1b", "qkvw", "qkvb", "attprojw", "attprojb", "ln2w", "ln2b", "fcw",
                             "fcb", "fcprojw", "fcprojb"}) {
        for (int l = 0; l < layout.layers; l++) {
            order.push_back(layout.tensor("h." + std::to_string(l) + "." + name));
        }
    }
    order.push_back(layout.tensor("lnfw"));
    order.push_back(layout.tensor("lnfb"));
    return order;
}

// params: (layout.size), the flat buffer. Throws a RunError if the disk fails; `path` is then unchanged.
inline void write_model(const std::string& path, const GptShape& shape, const Layout& layout,
                        const float* params) {
    FileHeader header{model_magic, model_version_fp32, shape.max_seq_len, shape.vocab_size, shape.layers,
                      shape.heads, shape.channels, shape.padded_vocab_size};
    write_file(path, [&](OutputFile& file) {
        file.write(header.data(), sizeof header);
        for (const Tensor& tensor : model_file_order(layout)) {
            file.write(params + tensor.offset, size_t(tensor.count()) * sizeof(float));
        }
    });
}

// A model file whose header and size have been checked.
struct ModelFile {
    explicit ModelFile(const std::string& path) : file(path, "give a complete model file of version 3 or 5") {
        const FileHeader header = file.read_header(model_magic, "model file");
        version = header[1];
        if (version != model_version_fp32 && version != model_version_bf16) {
            file.fail(format("is a model file of version %d", version));
        }
        shape = {header[2], header[3], header[7], header[4], header[5], header[6]};
        const int most = 1 << 24;  // far above any model
        for (int value : {shape.max_seq_len, shape.vocab_size, shape.padded_vocab_size, shape.layers,
                          shape.heads, shape.channels}) {
            if (value <= 0 || value > most) {
                file.fail(format("has a damaged header (a size of %d)", value));
            }
        }
        if (shape.vocab_size > shape.padded_vocab_size || shape.channels % shape.heads != 0) {
            file.fail("has a damaged header (its sizes do not fit together)");
        }
        check_size();
    }

    size_t value_bytes() const { return version == model_version_fp32 ? sizeof(float) : sizeof(uint16_t); }

    InputFile file;
    int version = 0;
    GptShape shape;

private:
    // A layer has 12 C^2 + 13 C values. Computed in double, as sizes from a damaged header must not overflow.
    void check_size() const {
        const double C = shape.channels, rows = double(shape.padded_vocab_size) + shape.max_seq_len;
        const double values = rows * C + shape.layers * (12 * C * C + 13 * C) + 2 * C;
        if (values > 1e15) { file.fail("has a damaged header (more parameters than any disk holds)"); }
        file.check_size(int64_t(values) * int64_t(value_bytes()));
    }
};

// UserError, naming the file: missing, of another kind or version, truncated or damaged.
inline GptShape read_model_shape(const std::string& path) { return ModelFile(path).shape; }

// Reads `count` values at `offset` as fp32. bf16 is the upper half of an fp32: widening is exact.
inline void read_model_values(const ModelFile& model, float* out, long count, int64_t offset) {
    if (model.version == model_version_fp32) {
        return model.file.read(out, size_t(count) * sizeof(float), offset);
    }
    std::vector<uint16_t> halves(static_cast<size_t>(count));
    model.file.read(halves.data(), halves.size() * sizeof(uint16_t), offset);
    for (long i = 0; i < count; i++) { out[i] = bits_to_float(uint32_t(halves[size_t(i)]) << 16); }
}

// The values of a model file of either version, as a flat buffer: (layout.size)
// Padding, and the rows of wte beyond the vocabulary, are 0, as training expects of them.
// Throws the UserErrors above, and one if the layout is that of another model.
inline std::vector<float> read_model(const std::string& path, const Layout& layout) {
    const ModelFile model(path);
    const GptShape& shape = model.shape;
    const Layout expected = gpt_layout(shape, 1, 0);
    auto same = [](const Tensor& a, const Tensor& b) { return a.name == b.name && a.shape == b.shape; };
    if (!std::equal(layout.tensors.begin(), layout.tensors.end(), expected.tensors.begin(),
                    expected.tensors.end(), same)) {
        throw UserError(format("%s holds another model (%d layers, %d channels, %d positions, vocabulary %d "
                               "padded to %d): give the sizes of that model, or another file",
                               path.c_str(), shape.layers, shape.channels, shape.max_seq_len,
                               shape.vocab_size, shape.padded_vocab_size));
    }
    std::vector<float> params(size_t(layout.size), 0.0f);
    int64_t offset = sizeof(FileHeader);
    for (const Tensor& tensor : model_file_order(layout)) {
        read_model_values(model, params.data() + tensor.offset, tensor.count(), offset);
        offset += tensor.count() * int64_t(model.value_bytes());
    }
    const Tensor& wte = layout.tensor("wte");
    float* rows = params.data() + wte.offset;
    std::fill(rows + long(shape.vocab_size) * shape.channels, rows + wte.count(), 0.0f);
    return params;
}
