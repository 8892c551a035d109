// Model files: llm.c's bytes, both ways, for any layout of the flat buffer; and nothing half-written.
#include "llmc/checkpoint/model_file.h"

#include <sys/resource.h>

#include <csignal>

#include "dev/test/files.h"

namespace test_checkpoint {

GptShape small_shape() { return {12, 250, 256, 3, 2, 16}; }

// Each value encodes its tensor and index; padding and wte's rows beyond the vocabulary are 0.
std::vector<float> telling_values(const GptShape& shape, const Layout& layout) {
    std::vector<float> flat(size_t(layout.size), 0.0f);
    float tensor_number = 1;
    for (const Tensor& tensor : layout.tensors) {
        const long count = tensor.name == "wte" ? long(shape.vocab_size) * shape.channels : tensor.count();
        for (long i = 0; i < count; i++) {
            flat[size_t(tensor.offset + i)] = tensor_number + float(i) * 0x1p-14f;
        }
        tensor_number++;
    }
    return flat;
}

float telling_value(const Layout& layout, const std::string& name, long index) {
    const float tensor_number = float(&layout.tensor(name) - layout.tensors.data() + 1);
    return tensor_number + float(index) * 0x1p-14f;
}

// Offsets of llm.c's tensors in values, computed anew: V padded rows, T positions, L layers, C channels.
struct LlmcOffsets {
    explicit LlmcOffsets(long V, long T, long L, long C) {
        long at = 0;
        auto next = [&](long count) { return std::exchange(at, at + count); };
        wte = next(V * C), wpe = next(T * C), ln1w = next(L * C), ln1b = next(L * C);
        qkvw = next(L * 3 * C * C), qkvb = next(L * 3 * C), attprojw = next(L * C * C);
        attprojb = next(L * C), ln2w = next(L * C);
        ln2b = next(L * C), fcw = next(L * 4 * C * C), fcb = next(L * 4 * C), fcprojw = next(L * C * 4 * C);
        fcprojb = next(L * C), lnfw = next(C), lnfb = next(C), end = at;
    }
    long wte, wpe, ln1w, ln1b, qkvw, qkvb, attprojw, attprojb, ln2w, ln2b, fcw, fcb, fcprojw, fcprojb, lnfw,
        lnfb, end;
};

float value_at(const std::string& bytes, long index) {
    float value;
    memcpy(&value, bytes.data() + 1024 + index * 4, 4);
    return value;
}

TEST(Checkpoint, a_model_file_has_llmcs_header_and_order) {
    TemporaryFolder folder;
    const GptShape shape = small_shape();
    const Layout layout = gpt_layout(shape, 2, 1);
    const std::string path = folder / "model_00000010.bin";
    write_model(path, shape, layout, telling_values(shape, layout).data());

    const std::string bytes = read_bytes(path);
    EXPECT_EQ(bytes.substr(0, 1024), header_bytes({20240326, 3, 12, 250, 3, 2, 16, 256}));
    const long C = 16, L = 3;
    const LlmcOffsets at(256, 12, L, C);
    ASSERT_EQ(bytes.size(), size_t(1024 + 4 * at.end));
    EXPECT_EQ(value_at(bytes, at.wte + 5), telling_value(layout, "wte", 5));
    EXPECT_EQ(value_at(bytes, at.wte + 250 * C - 1), telling_value(layout, "wte", 250 * C - 1));
    EXPECT_EQ(value_at(bytes, at.wte + 250 * C), 0.0f);
    EXPECT_EQ(value_at(bytes, at.wpe + 12 * C - 1), telling_value(layout, "wpe", 12 * C - 1));
    for (long l = 0; l < L; l++) {
        auto expect = [&](long offset, const char* name, long count) {
            const std::string tensor = "h." + std::to_string(l) + "." + name;
            for (long i : {0L, count / 2, count - 1}) {
                EXPECT_EQ(value_at(bytes, offset + l * count + i), telling_value(layout, tensor, i))
                    << tensor;
            }
        };
        expect(at.ln1w, "ln1w", C), expect(at.ln1b, "ln1b", C);
        expect(at.qkvw, "qkvw", 3 * C * C), expect(at.qkvb, "qkvb", 3 * C);
        expect(at.attprojw, "attprojw", C * C), expect(at.attprojb, "attprojb", C);
        expect(at.ln2w, "ln2w", C), expect(at.ln2b, "ln2b", C);
        expect(at.fcw, "fcw", 4 * C * C), expect(at.fcb, "fcb", 4 * C);
        expect(at.fcprojw, "fcprojw", 4 * C * C), expect(at.fcprojb, "fcprojb", C);
    }
    EXPECT_EQ(value_at(bytes, at.lnfw + 3), telling_value(layout, "lnfw", 3));
    EXPECT_EQ(value_at(bytes, at.lnfb + C - 1), telling_value(layout, "lnfb", C - 1));
}

TEST(Checkpoint, a_model_reads_back_bit_for_bit_into_any_layout) {
    TemporaryFolder folder;
    const GptShape shape = small_shape();
    const std::string path = folder / "m.bin";
    const Layout written = gpt_layout(shape, 1, 0);
    write_model(path, shape, written, telling_values(shape, written).data());

    const GptShape found = read_model_shape(path);
    EXPECT_EQ(found.max_seq_len, 12);
    EXPECT_EQ(found.vocab_size, 250);
    EXPECT_EQ(found.padded_vocab_size, 256);
    EXPECT_EQ(found.layers, 3);
    EXPECT_EQ(found.heads, 2);
    EXPECT_EQ(found.channels, 16);
    for (int ranks : {1, 2, 3}) {
        const Layout layout = gpt_layout(shape, ranks, 1);
        EXPECT_EQ(read_model(path, layout), telling_values(shape, layout)) << ranks << " ranks";
    }
}

TEST(Checkpoint, a_bf16_file_is_widened_and_its_padded_rows_become_zero) {
    TemporaryFolder folder;
    const GptShape shape = small_shape();
    const Layout layout = gpt_layout(shape, 1, 0);
    const LlmcOffsets at(256, 12, 3, 16);
    std::vector<uint16_t> halves(size_t(at.end), 0x3F80);  // 1
    halves[size_t(at.wte)] = 0xC049;                       // -3.140625
    halves[size_t(at.lnfb) + 15] = 0x0001;                 // the smallest denormal
    write_bytes(folder / "m.bin", header_bytes({20240326, 5, 12, 250, 3, 2, 16, 256}) + bytes_of(halves));
    const std::vector<float> flat = read_model(folder / "m.bin", layout);
    EXPECT_EQ(flat[size_t(layout.tensor("wte").offset)], -3.140625f);
    EXPECT_EQ(flat[size_t(layout.tensor("lnfb").offset) + 15], 0x1p-133f);
    EXPECT_EQ(flat[size_t(layout.tensor("h.2.fcprojw").offset)], 1.0f);
    EXPECT_EQ(flat[size_t(layout.tensor("wte").offset) + 250 * 16 - 1], 1.0f);
    EXPECT_EQ(flat[size_t(layout.tensor("wte").offset) + 250 * 16], 0.0f);
}

TEST(Checkpoint, a_damaged_model_file_is_an_error_that_names_it) {
    TemporaryFolder folder;
    const std::string path = folder / "m.bin";
    const std::string data(size_t(LlmcOffsets(256, 12, 3, 16).end) * 4, '\0');
    const std::string good = header_bytes({20240326, 3, 12, 250, 3, 2, 16, 256});
    auto message = [&](const std::string& bytes) {
        write_bytes(path, bytes);
        std::string text = user_error([&] { read_model_shape(path); });
        EXPECT_TRUE(contains(text, path));
        return text;
    };
    EXPECT_TRUE(contains(user_error([&] { read_model_shape(path); }), "cannot be opened"));
    EXPECT_TRUE(contains(message("short"), "truncated"));
    EXPECT_TRUE(contains(message(header_bytes({20240520, 3}) + data), "is not a model file"));
    EXPECT_TRUE(contains(message(header_bytes({20240326, 2}) + data), "version 2"));
    const int large = 1 << 24;
    const std::string damaged[] = {header_bytes({20240326, 3, 12, 250, 0, 2, 16, 256}),  // no layer
                                   header_bytes({20240326, 3, 12, 257, 3, 2, 16, 256}),  // 257 of 256 rows
                                   header_bytes({20240326, 3, 12, 250, 3, 3, 16, 256}),  // 16 / 3 a head
                                   header_bytes({20240326, 3, large, 250, large, 1, large, large})};
    for (const std::string& header : damaged) {
        EXPECT_TRUE(contains(message(header + data), "damaged header"));
    }
    EXPECT_TRUE(contains(message(good + data.substr(4)), "truncated"));
    EXPECT_TRUE(contains(message(good + data + "x"), "too long"));
    EXPECT_TRUE(contains(message(header_bytes({20240326, 5, 12, 250, 3, 2, 16, 256}) + data), "too long"));
}

TEST(Checkpoint, a_file_of_another_model_is_refused) {
    TemporaryFolder folder;
    const GptShape shape = small_shape();
    GptShape other = shape;
    other.max_seq_len = 24;
    const Layout layout = gpt_layout(shape, 1, 0), other_layout = gpt_layout(other, 1, 0);
    write_model(folder / "m.bin", shape, layout, telling_values(shape, layout).data());
    EXPECT_TRUE(contains(user_error([&] { read_model(folder / "m.bin", other_layout); }),
                         "holds another model (3 layers, 16 channels, 12 positions"));
}

TEST(Checkpoint, a_write_that_fails_leaves_the_old_file_and_no_rest) {
    TemporaryFolder folder;
    const GptShape shape = small_shape();
    const Layout layout = gpt_layout(shape, 1, 0);
    const std::vector<float> flat(size_t(layout.size), 1.0f);
    write_bytes(folder / "m.bin", "the old one");

    rlimit limit, before;  // a disk that is full after 4096 bytes
    ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
    auto handler = signal(SIGXFSZ, SIG_IGN);
    limit = {4096, before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
    EXPECT_THROW(write_model(folder / "m.bin", shape, layout, flat.data()), RunError);
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
    signal(SIGXFSZ, handler);

    EXPECT_EQ(read_bytes(folder / "m.bin"), "the old one");
    EXPECT_FALSE(std::filesystem::exists(folder / "m.bin.tmp"));
    EXPECT_THROW(write_model(folder / "none/m.bin", shape, layout, flat.data()), RunError);
}

}  // namespace test_checkpoint
