// State files, once as they are and once with the right checksum, which no input that libFuzzer makes up
// would have.
#include "dev/break/fuzz/fuzz.h"
#include "llmc/checkpoint/state_file.h"

const char* const names[] = {"fields", "options", "master", "m", "in_flight.0.mean", "odd"};

void read_sections(const StateReader& state, const std::string& path) {
    size_t sum = 0;
    for (const char* name : names) {
        if (!state.has(name)) { continue; }
        const std::string text = state.text(name);
        require(text.size() == state.bytes(name), "a section is as long as the table says");
        sum += text.size();
        const size_t count = text.size() / 4;
        may_refuse([&] {
            state.floats(name, long(count));
            require(count * 4 == text.size(), "values are whole");
        });
        may_refuse([&] {
            std::vector<char> another_size(text.size() + 1);
            state.read(name, another_size.data(), another_size.size());
            require(false, "a section of another size is refused");
        });
    }
    require(sum <= whole_file(path).size(), "sections do not overlap");
}

void read_fields(const Fields& fields) {
    for (const char* name : {"step", "loss", "seed", "word", "missing"}) {
        may_refuse([&] { fields.integer(name); });
        may_refuse([&] { fields.count(name); });
        may_refuse([&] { fields.real(name); });
        may_refuse([&] { fields.word(name); });
    }
    require(Fields::parse(fields.text(), "").text() == fields.text(), "written fields are read back");
}

void read_state(const StateReader& state) {
    const StateIdentity& who = state.identity();
    require(who.step >= 0 && who.lineage.size() == 16, "the identity is possible");
    require(who.worker >= 0 && who.worker < who.workers, "the worker belongs to the run");
    require(who.rank >= 0 && who.rank < who.ranks, "the rank belongs to the worker");
    read_sections(state, state.path());
    if (state.has("fields")) { read_fields(Fields::parse(state.text("fields"), state.path())); }
}

bool is_whole(const StateReader& state) {
    try {
        state.verify();
    } catch (const UserError&) { return false; }
    return true;
}

void fuzz(const std::string& bytes) {
    const MemoryFile file(bytes);
    const StateReader state(file.path());
    std::string mended = bytes;
    const uint64_t sum = XXH3_64bits(bytes.data(), bytes.size() - sizeof sum);
    memcpy(&mended[bytes.size() - sizeof sum], &sum, sizeof sum);
    require(is_whole(state) == (bytes == mended), "a file is whole if and only if its checksum is right");
    const MemoryFile mended_file(mended);
    const StateReader mended_state(mended_file.path());
    require(is_whole(mended_state), "a file with the right checksum is whole");
    read_state(mended_state);
}

// A state file with the first `count` sections.
std::string state(size_t count) {
    Fields fields;
    fields.set("step", 12L);
    fields.set("loss", 3.25);
    fields.set("seed", uint64_t(1) << 63);
    fields.set("word", std::string("a\\b\nc"));
    const std::string text = fields.text(), options = "--inner-steps 10\n";
    const std::vector<float> values(24, 1.5f);
    std::vector<StateSection> sections{
        {names[0], text.data(), text.size()}, {names[1], options.data(), options.size()},
        {names[2], values.data(), 96},        {names[3], values.data(), 0},
        {names[4], values.data(), 64},        {names[5], values.data(), 7}};
    sections.resize(count);
    const StateIdentity who{12, 1, 0, 2, 1, "0123456789abcdef"};
    return written_by([&](const std::string& path) { write_state(path, who, sections); });
}

std::vector<std::string> seeds() { return {state(0), state(1), state(4), state(6)}; }
