// State files: what is written comes back bit for bit, and nothing that is damaged, cut, foreign or made up
// on purpose gets past StateReader and verify(). Fields and DONE_ files likewise.
#include "llmc/checkpoint/state_file.h"

#include <cmath>
#include <limits>
#include <random>

#include "dev/test/files.h"

namespace test_state_file {

const char* const lineage = "0123456789abcdef";

StateIdentity someone() { return {40, 1, 1, 2, 3, lineage}; }

// Three sections, the middle one empty; neither end at 64 bytes.
void write_small(const std::string& path) {
    const std::string words = "seed 42\n";
    const float values[5] = {1, -0.0f, std::numeric_limits<float>::infinity(), 0x1p-149f, 5};
    write_state(path, someone(),
                {{"fields", words.data(), words.size()}, {"v", nullptr, 0}, {"m", values, sizeof values}});
}

// The message of the UserError with which the file is refused.
std::string refusal(const std::string& path) {
    return user_error([&] { StateReader(path).verify(); });
}

void put_byte(const std::string& path, size_t at, char byte) {
    std::fstream(path, std::ios::binary | std::ios::in | std::ios::out).seekp(std::streamoff(at)).put(byte);
}

struct Entry {
    std::string name;
    int64_t offset, bytes;
};

// A file with a correct checksum but a header and table of any content.
struct Forgery {
    std::vector<Entry> table = {{"a", 1152, 10}, {"b", 1216, 64}};
    int32_t sections = 2, worker = 1, workers = 2;
    int64_t step = 40, promised_bytes = 1288, length = 1280;

    std::string bytes() const {
        std::string file = header_bytes({20261121, 1, 0, 0, worker, 0, workers, 1, 0, 0, 0, 0, sections});
        file.replace(8, 8, reinterpret_cast<const char*>(&step), 8);
        file.replace(32, 16, lineage);
        file.replace(56, 8, reinterpret_cast<const char*>(&promised_bytes), 8);
        for (const Entry& entry : table) {
            std::string name = entry.name;
            name.resize(48);
            file += name + std::string(reinterpret_cast<const char*>(&entry.offset), 8) +
                    std::string(reinterpret_cast<const char*>(&entry.bytes), 8);
        }
        file.resize(size_t(length), 'x');
        const uint64_t sum = XXH3_64bits(file.data(), file.size());
        return file + std::string(reinterpret_cast<const char*>(&sum), 8);
    }
};

TEST(StateFile, what_is_written_comes_back) {
    TemporaryFolder folder;
    const std::string path = state_path(folder.name(), 40, 4);
    EXPECT_EQ(path, folder / "state_00000040_00004.bin");
    EXPECT_EQ(model_path(folder.name(), 40), folder / "model_00000040.bin");
    EXPECT_EQ(done_path(folder.name(), 40), folder / "DONE_00000040");
    std::vector<float> values(3'000'001);  // more than is written or read at once
    for (size_t i = 0; i < values.size(); i++) { values[i] = float(i) * 0.37f; }
    const std::vector<uint16_t> halves = {1, 2, 65535};
    write_state(path, someone(),
                {{"values", values.data(), values.size() * sizeof(float)},
                 {"halves", halves.data(), halves.size() * sizeof(uint16_t)},
                 {"in_flight.0.owner_residual", nullptr, 0}});
    const StateReader state(path);
    state.verify();
    EXPECT_EQ(state.identity().step, 40);
    EXPECT_EQ(state.identity().worker, 1);
    EXPECT_EQ(state.identity().rank, 1);
    EXPECT_EQ(state.identity().workers, 2);
    EXPECT_EQ(state.identity().ranks, 3);
    EXPECT_EQ(state.identity().lineage, lineage);
    EXPECT_EQ(saved_values<float>(state, "values"), values);
    EXPECT_EQ(saved_values<uint16_t>(state, "halves"), halves);
    EXPECT_TRUE(state.has("in_flight.0.owner_residual"));
    EXPECT_FALSE(state.has("in_flight.0"));
    EXPECT_EQ(state.bytes("halves"), 6u);
    EXPECT_EQ(state.text("in_flight.0.owner_residual"), "");
}

TEST(StateFile, its_bytes_are_what_the_format_says) {
    TemporaryFolder folder;
    write_small(folder / "s.bin");
    const std::string bytes = read_bytes(folder / "s.bin");
    std::string expected = header_bytes({20261121, 1, 40, 0, 1, 1, 2, 3, 0, 0, 0, 0, 3, 0, 1352, 0});
    expected.replace(32, 16, lineage);
    auto entry = [](const std::string& name, int64_t offset, int64_t size) {
        return name + std::string(48 - name.size(), '\0') +
               std::string(reinterpret_cast<const char*>(&offset), 8) +
               std::string(reinterpret_cast<const char*>(&size), 8);
    };
    expected += entry("fields", 1216, 8) + entry("v", 1280, 0) + entry("m", 1280, 20);
    ASSERT_EQ(expected.size(), 1216u);
    expected += "seed 42\n";
    expected.resize(1280);
    EXPECT_TRUE(bytes.substr(0, 1280) == expected);
    ASSERT_EQ(bytes.size(), 1352u);
    const uint64_t sum = XXH3_64bits(bytes.data(), 1344);
    EXPECT_EQ(bytes.substr(1344), std::string(reinterpret_cast<const char*>(&sum), 8));
}

TEST(StateFile, every_damaged_byte_is_noticed) {
    TemporaryFolder folder;
    const std::string path = folder / "s.bin";
    write_small(path);
    const std::string good = read_bytes(path);
    std::mt19937 random(1);
    StateReader(path).verify();
    for (size_t at = 0; at < good.size(); at++) {
        put_byte(path, at, char(good[at] ^ (1 << random() % 8)));
        EXPECT_TRUE(contains(refusal(path), path)) << "byte " << at;
        put_byte(path, at, good[at]);
    }
}

TEST(StateFile, a_file_that_is_cut_anywhere_or_goes_on_is_noticed) {
    TemporaryFolder folder;
    const std::string path = folder / "s.bin";
    write_small(path);
    const std::string good = read_bytes(path);
    for (size_t length = good.size(); length-- > 0;) {
        std::filesystem::resize_file(path, length);
        EXPECT_TRUE(contains(user_error([&] { StateReader reader(path); }), "is truncated")) << length;
    }
    write_bytes(path, good + '\0');
    EXPECT_TRUE(contains(refusal(path), "too long"));
    write_bytes(path, good);
    StateReader(path).verify();
}

TEST(StateFile, a_file_of_another_kind_is_refused_by_name) {
    TemporaryFolder folder;
    const std::string path = folder / "s.bin";
    EXPECT_TRUE(contains(refusal(path), path + " cannot be opened (No such file or directory): move this step's"));
    EXPECT_TRUE(contains(refusal(folder.name()), "is not a file"));
    write_small(path);
    std::string other = read_bytes(path);
    other[4] = 2;
    write_bytes(path, other);
    EXPECT_TRUE(contains(refusal(path), "is a state file of version 2"));
    write_bytes(path, header_bytes({20240326, 3}));
    EXPECT_TRUE(contains(refusal(path), "is not a state file (magic 20240326, not 20261121)"));
    write_bytes(path, header_bytes({20240527, 1}));
    EXPECT_TRUE(contains(refusal(path), "of llm.c, not of this program: start from its model (-e model_"));
}

TEST(StateFile, a_header_or_table_that_was_made_up_is_refused_though_its_checksum_is_right) {
    TemporaryFolder folder;
    const std::string path = folder / "s.bin";
    write_bytes(path, Forgery().bytes());
    StateReader(path).verify();

    const int64_t most = std::numeric_limits<int64_t>::max();
    const std::vector<std::vector<Entry>> tables = {
        {{"a", 1152, 10}, {"a", 1216, 64}},                     // twice the same name
        {{"a", 1152, 10}, {"", 1216, 64}},                      // no name
        {{"a", 1152, 10}, {"a b", 1216, 64}},                   // a space in it
        {{"a", 1152, 10}, {"b\n", 1216, 64}},                   // a character that does not print
        {{"a", 1152, 10}, {std::string("b\0c", 3), 1216, 64}},  // something after it
        {{"a", 1152, 10}, {"b", 1152, 128}},                    // overlaps the first
        {{"a", 1152, 10}, {"b", 1217, 63}},                     // not aligned
        {{"a", 1216, 64}, {"b", 1152, 10}},                     // not in order
        {{"a", 0, 1162}, {"b", 1216, 64}},                      // the header as data
        {{"a", 1152, 10}, {"b", 1216, 65}},                     // reaches the checksum
        {{"a", 1152, 10}, {"b", 1216, 0}},                      // leaves a gap
        {{"a", 1152, 10}, {"b", 1216, -1}},                     // a negative size
        {{"a", 1152, -64}, {"b", 1152, 128}},
        {{"a", 1152, most}, {"b", 1216, 64}},  // offset + bytes overflows
        {{"a", 1152, most - 1152}, {"b", -64, 64}},
        {{"a", 1152, 10}, {"b", most, 64}},
        {{"a", -most, most}, {"b", 1216, 64}},
    };
    for (const auto& table : tables) {
        Forgery forgery;
        forgery.table = table;
        write_bytes(path, forgery.bytes());
        EXPECT_TRUE(contains(refusal(path), "damaged table")) << table[0].bytes << " " << table[1].offset;
    }
    auto expect_bad_header = [&](auto change) {
        Forgery forgery;
        change(forgery);
        write_bytes(path, forgery.bytes());
        EXPECT_TRUE(contains(refusal(path), "damaged header"));
    };
    expect_bad_header([](Forgery& f) { f.sections = -1; });
    expect_bad_header([](Forgery& f) { f.sections = 5; });
    expect_bad_header([](Forgery& f) { f.sections = std::numeric_limits<int32_t>::max(); });
    expect_bad_header([](Forgery& f) { f.step = -1; });
    expect_bad_header([](Forgery& f) { f.worker = 2; });
    expect_bad_header([](Forgery& f) { f.worker = -1; });
    expect_bad_header([](Forgery& f) { f.workers = 0; });
    expect_bad_header([](Forgery& f) { f.length = 1024, f.promised_bytes = 1032; });
    Forgery forgery;
    forgery.promised_bytes = most;
    write_bytes(path, forgery.bytes());
    EXPECT_TRUE(contains(refusal(path), "is truncated"));
}

TEST(StateFile, a_section_that_is_missing_or_of_another_size_is_named) {
    TemporaryFolder folder;
    const std::string path = folder / "s.bin";
    write_small(path);
    const StateReader state(path);
    float values[6];
    EXPECT_TRUE(
        contains(user_error([&] { state.read("momentum", values, 4); }), path + " has no 'momentum'"));
    EXPECT_TRUE(contains(user_error([&] { state.read("m", values, 24); }),
                         path + " has 20 bytes of 'm', not the 24 that belong there"));
    EXPECT_TRUE(contains(user_error([&] { state.floats("m", 4); }), "not the 16 that belong there"));
}

TEST(StateFile, a_write_that_fails_or_is_given_up_leaves_the_old_file_and_no_rest) {
    TemporaryFolder folder;
    const std::string path = folder / "s.bin";
    write_small(path);
    const std::string before = read_bytes(path);
    const std::string large(10'000'000, 'x');
    int calls = 0;
    auto give_up = [&] {
        if (++calls == 4) { throw RunError("given up"); }  // header, table, and then within the section
    };
    EXPECT_THROW(write_state(path, someone(), {{"large", large.data(), large.size()}}, give_up), RunError);
    EXPECT_EQ(read_bytes(path), before);
    EXPECT_FALSE(std::filesystem::exists(path + ".tmp"));
    EXPECT_THROW(write_state(folder / "none/s.bin", someone(), {}), RunError);
}

TEST(StateFile, a_state_that_could_not_be_read_is_not_written) {
    TemporaryFolder folder;
    const std::string path = folder / "s.bin";
    StateIdentity nobody = someone();
    nobody.lineage = "not hex digits..";
    EXPECT_THROW(write_state(path, nobody, {}), std::logic_error);
    EXPECT_THROW(write_state(path, someone(), {{"a", "x", 1}, {"a", "y", 1}}), std::logic_error);
    EXPECT_THROW(write_state(path, someone(), {{std::string(49, 'a'), "x", 1}}), std::logic_error);
    EXPECT_THROW(write_state(path, someone(), {{"a b", "x", 1}}), std::logic_error);
    EXPECT_FALSE(std::filesystem::exists(path));
    write_state(path, someone(), {{std::string(48, 'a'), "x", 1}});
    EXPECT_EQ(StateReader(path).text(std::string(48, 'a')), "x");
}

TEST(StateFile, a_header_alone_says_whose_it_is) {
    TemporaryFolder folder;
    const std::string path = folder / "s.bin";
    EXPECT_FALSE(peek_identity(path));
    write_small(path);
    const std::string good = read_bytes(path);
    write_bytes(path, good.substr(0, 1024));
    ASSERT_TRUE(peek_identity(path));
    EXPECT_EQ(peek_identity(path)->lineage, lineage);
    EXPECT_EQ(peek_identity(path)->step, 40);
    write_bytes(path, good.substr(0, 1023));
    EXPECT_FALSE(peek_identity(path));
    write_bytes(path, header_bytes({20261121, 1}));
    EXPECT_FALSE(peek_identity(path));
}

TEST(Fields, keep_every_bit_of_every_value) {
    Fields fields;
    const long smallest = std::numeric_limits<long>::min();
    const uint64_t largest = std::numeric_limits<uint64_t>::max();
    uint64_t nan_bits = 0x7ff4'0000'dead'beef;  // a signalling one, with a payload
    double nan;
    memcpy(&nan, &nan_bits, sizeof nan);
    const std::vector<double> reals = {
        0.1, -0.0, 0x1p-1074, std::numeric_limits<double>::max(), -std::numeric_limits<double>::infinity(),
        nan};
    std::string every_byte = "\\n\\\\";
    for (int c = 0; c < 256; c++) { every_byte += char(c); }
    fields.set("smallest", smallest);
    fields.set("largest", largest);
    fields.set("int", -7);
    fields.set("yes", true);
    fields.set("word", every_byte);
    fields.set("empty", "");
    for (size_t i = 0; i < reals.size(); i++) { fields.set("real." + std::to_string(i), reals[i]); }

    const Fields read = Fields::parse(fields.text(), "file");
    EXPECT_EQ(read.integer("smallest"), smallest);
    EXPECT_EQ(read.count("largest"), largest);
    EXPECT_EQ(read.integer("int"), -7);
    EXPECT_EQ(read.integer("yes"), 1);
    EXPECT_EQ(read.word("word"), every_byte);
    EXPECT_TRUE(read.has("empty"));
    EXPECT_EQ(read.word("empty"), "");
    EXPECT_FALSE(read.has("other"));
    for (size_t i = 0; i < reals.size(); i++) {
        const double value = read.real("real." + std::to_string(i));
        EXPECT_EQ(memcmp(&value, &reals[i], sizeof value), 0) << i;
    }
    EXPECT_EQ(read.text(), fields.text());
}

TEST(Fields, what_is_no_number_overflows_or_is_missing_is_an_error_that_names_the_file) {
    const Fields fields = Fields::parse(
        "a 12x\nb \nc 9223372036854775808\nd -1\ne 1.5\nf  1\ng 0x10\nh 12\n"
        "i 18446744073709551616\nj 3ff000000000000g\nk 3ff000000000000\n",
        "/x/state");
    for (const char* name : {"a", "b", "c", "e", "f", "g", "other"}) {
        EXPECT_TRUE(contains(user_error([&] { fields.integer(name); }), "/x/state ")) << name;
    }
    for (const char* name : {"a", "b", "d", "e", "f", "g", "i", "other"}) {
        EXPECT_TRUE(contains(user_error([&] { fields.count(name); }), "/x/state ")) << name;
    }
    for (const char* name : {"a", "b", "h", "j", "k", "other"}) {
        EXPECT_TRUE(contains(user_error([&] { fields.real(name); }), "/x/state ")) << name;
    }
    EXPECT_TRUE(contains(user_error([&] { fields.word("other"); }), "/x/state lacks 'other'"));
    EXPECT_EQ(fields.integer("d"), -1);
    EXPECT_EQ(fields.integer("h"), 12);
}

TEST(Fields, text_that_is_not_lines_of_names_and_values_is_refused) {
    for (const char* text : {"a", "a\n", "a 1", " 1\n", "\n", "a 1\nb", "a 1\na 2\n", "a\tb 1\n", "a x\\\n",
                             "a \\x\n", "\xff 1\n", "a 1\n\nb 1\n"}) {
        EXPECT_TRUE(contains(user_error([&] { Fields::parse(text, "/x/state"); }), "/x/state ")) << text;
    }
    EXPECT_EQ(Fields::parse("", "/x/state").text(), "");
    EXPECT_THROW(Fields().set("a b", 1), std::logic_error);
    EXPECT_THROW(Fields().set("", 1), std::logic_error);
}

TEST(DoneFile, says_whose_the_checkpoint_is_and_is_refused_when_damaged) {
    TemporaryFolder folder;
    write_done(folder.name(), someone());
    const StateIdentity who = read_done(folder.name(), 40);
    EXPECT_EQ(who.workers, 2);
    EXPECT_EQ(who.ranks, 3);
    EXPECT_EQ(who.lineage, lineage);
    const std::string path = done_path(folder.name(), 40), good = read_bytes(path);
    for (size_t length = 0; length < good.size(); length++) {
        write_bytes(path, good.substr(0, length));
        EXPECT_TRUE(contains(user_error([&] { read_done(folder.name(), 40); }), path)) << length;
    }
    write_bytes(path, good + std::string(5000, 'x'));
    EXPECT_TRUE(contains(user_error([&] { read_done(folder.name(), 40); }), "is too long"));
    write_bytes(done_path(folder.name(), 50), good);
    EXPECT_TRUE(contains(user_error([&] { read_done(folder.name(), 50); }), "is damaged"));
    EXPECT_TRUE(contains(user_error([&] { read_done(folder.name(), 60); }), "cannot be opened"));
}

}  // namespace test_state_file
