// Model files of either version, read into a layout for two ranks.
#include "dev/break/fuzz/fuzz.h"
#include "llmc/checkpoint/model_file.h"

void fuzz(const std::string& bytes) {
    const MemoryFile file(bytes);
    const GptShape shape = read_model_shape(file.path());
    const Layout layout = gpt_layout(shape, 2, 1);
    require(layout.values * 2 <= long(bytes.size()), "a file has at least two bytes a value");
    const std::vector<float> params = read_model(file.path(), layout);
    const std::vector<float> again = read_model(file.path(), layout);
    require(memcmp(params.data(), again.data(), params.size() * sizeof(float)) == 0,
            "every value comes from the file");
}

std::string model(const GptShape& shape) {
    const Layout layout = gpt_layout(shape, 1, 0);
    const std::vector<float> params(size_t(layout.size), 0.5f);
    return written_by([&](const std::string& path) { write_model(path, shape, layout, params.data()); });
}

// The same file in bf16: the upper halves of its values.
std::string in_bf16(const std::string& fp32) {
    std::string bytes = fp32.substr(0, sizeof(FileHeader));
    bytes[4] = char(model_version_bf16);
    for (size_t at = bytes.size(); at < fp32.size(); at += 4) { bytes += fp32.substr(at + 2, 2); }
    return bytes;
}

std::vector<std::string> seeds() {
    const std::string tiny = model({1, 1, 1, 1, 1, 1}), small = model({3, 5, 8, 2, 2, 4});
    return {tiny, in_bf16(tiny), small, in_bf16(small)};
}
