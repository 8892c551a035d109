// State files: the state of one process of a run after a step, from which the run can resume.
//
//     header      256 int32, as llm.c's files have:   state_magic, state_version, then
//                 [2] step (int64)  [4] worker  [5] rank  [6] workers  [7] ranks  [8] lineage (16 characters)
//                 [12] number of sections  [13] 1: of an elastic worker, else 0
//                 [14] bytes of the whole file (int64)  [16...] 0
//     table       64 bytes a section: name (48 characters, the rest 0), offset (int64), bytes (int64)
//     sections    in that order, each at the next multiple of 64 bytes; 0 in between
//     checksum    XXH3_64 of all before it, at the next multiple of 64 bytes, where the file ends
//
// The same sections give the same bytes, and a reader knows where everything must lie before it reads any
// section. training_state.h says what the sections are. A section that earlier versions did not write
// ("outliers") is looked for with has(). The checksum tells whether a file is whole; the file DONE_STEP
// (write_done) tells that all processes have theirs.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/state.h"

const int32_t state_magic = 20261121, state_version = 1;

// Whose state it is, and after which step.
struct StateIdentity {
    long step = 0;
    int worker = 0, rank = 0, workers = 1, ranks = 1;
    std::string lineage;  // 16 hex digits: drawn when a run begins at step 1, and kept when it resumes
    bool elastic = false;  // the ranks of its worker alone make up a checkpoint, not those of all workers

    // The number of this process in file names: its place among those that make up the checkpoint.
    long process() const { return elastic ? rank : long(worker) * ranks + rank; }
};

inline std::string state_path(const std::string& folder, long step, int process) {
    return folder + format("/state_%08ld_%05d.bin", step, process);
}
inline std::string model_path(const std::string& folder, long step) {
    return folder + format("/model_%08ld.bin", step);
}
inline std::string done_path(const std::string& folder, long step) {
    return folder + format("/DONE_%08ld", step);
}

// The step and the process of a file that is named as by state_path(), and the step of one that is named as
// by done_path(); nothing for any other name.   name: without the folder
inline std::optional<std::pair<long, int>> state_named(const std::string& name) {
    long step = -1;
    int process = -1;
    const bool is_one = sscanf(name.c_str(), "state_%ld_%d", &step, &process) == 2 && step >= 0 &&
                        process >= 0 && "/" + name == state_path("", step, process);
    return is_one ? std::optional<std::pair<long, int>>({step, process}) : std::nullopt;
}
inline std::optional<long> done_named(const std::string& name) {
    long step = -1;
    const bool is_one =
        sscanf(name.c_str(), "DONE_%ld", &step) == 1 && step >= 0 && "/" + name == done_path("", step);
    return is_one ? std::optional<long>(step) : std::nullopt;
}

// The names of all files in a folder. If it cannot be read to its end, `error` says so, and some may be
// missing.
inline std::vector<std::string> names_in(const std::string& folder, std::error_code& error) {
    std::vector<std::string> names;
    std::filesystem::directory_iterator entry(folder, error);
    for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
        names.push_back(entry->path().filename());
    }
    return names;
}

// -----------------------------------------------------------------------------------------------------------
// The format, both ways

namespace state_format {
struct Entry {
    char name[48];
    int64_t offset, bytes;
};
static_assert(sizeof(Entry) == 64);

const size_t most_sections = 1 << 16, chunk_bytes = 1 << 22;

inline int64_t aligned(int64_t offset) { return (offset + 63) / 64 * 64; }

inline bool is_lineage(const std::string& text) {
    return text.size() == 16 && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

inline bool is_plausible(const StateIdentity& who) {
    return who.step >= 0 && who.workers >= 1 && who.ranks >= 1 && who.worker >= 0 && who.rank >= 0 &&
           who.worker < who.workers && who.rank < who.ranks && is_lineage(who.lineage);
}

inline FileHeader pack(const StateIdentity& who, size_t sections, int64_t file_bytes) {
    FileHeader header{state_magic, state_version, 0, 0, who.worker, who.rank, who.workers, who.ranks};
    memcpy(&header[2], &who.step, sizeof(int64_t));
    memcpy(&header[8], who.lineage.data(), 16);
    header[12] = int32_t(sections);
    header[13] = who.elastic;
    memcpy(&header[14], &file_bytes, sizeof file_bytes);
    return header;
}

inline StateIdentity unpack(const FileHeader& header) {
    StateIdentity who;
    memcpy(&who.step, &header[2], sizeof(int64_t));
    who.worker = header[4], who.rank = header[5], who.workers = header[6], who.ranks = header[7];
    who.lineage.assign(reinterpret_cast<const char*>(&header[8]), 16);
    who.elastic = header[13] == 1;
    return who;
}

// The table of sections, and the checksum's offset.
inline std::pair<std::vector<Entry>, int64_t> lay_out(const std::vector<StateSection>& sections) {
    std::vector<Entry> table;
    std::set<std::string> names;
    int64_t end = int64_t(sizeof(FileHeader) + sections.size() * sizeof(Entry));
    for (const StateSection& section : sections) {
        Entry entry{};
        if (!Fields::is_name(section.name) || section.name.size() > sizeof entry.name ||
            !names.insert(section.name).second) {
            throw std::logic_error("'" + section.name + "' cannot be the name of another section");
        }
        memcpy(entry.name, section.name.data(), section.name.size());
        entry.offset = aligned(end);
        entry.bytes = int64_t(section.bytes);
        end = entry.offset + entry.bytes;
        table.push_back(entry);
    }
    return {table, aligned(end)};
}
}  // namespace state_format

// Writes a state into an open, empty file. Calls `check`, which may throw, every few megabytes.
inline void write_state(OutputFile& file, const StateIdentity& who, const std::vector<StateSection>& sections,
                        const std::function<void()>& check = [] {}) {
    using namespace state_format;
    if (!is_plausible(who) || sections.size() > most_sections) { throw std::logic_error("no such state"); }
    const auto [table, checksum_offset] = lay_out(sections);
    const FileHeader header = pack(who, table.size(), checksum_offset + int64_t(sizeof(uint64_t)));
    Checksum checksum;
    int64_t at = 0;
    auto write = [&](const void* data, size_t bytes) {
        for (size_t done = 0; done < bytes;) {
            const size_t count = std::min(bytes - done, chunk_bytes);
            check();
            file.write(static_cast<const char*>(data) + done, count);
            checksum.add(static_cast<const char*>(data) + done, count);
            done += count;
        }
        at += int64_t(bytes);
    };
    const char padding[64] = {};
    write(header.data(), sizeof header);
    write(table.data(), table.size() * sizeof(Entry));
    for (size_t i = 0; i < table.size(); i++) {
        write(padding, size_t(table[i].offset - at));
        write(sections[i].data, sections[i].bytes);
    }
    write(padding, size_t(checksum_offset - at));
    const uint64_t sum = checksum.value();
    file.write(&sum, sizeof sum);
}

// Writes the state file `path`. Throws a RunError if the disk fails. If it, `check` or `before_named` throws,
// `path` is unchanged, unless only the folder's sync failed.   before_named: see write_file
inline void write_state(const std::string& path, const StateIdentity& who,
                        const std::vector<StateSection>& sections,
                        const std::function<void()>& check = [] {},
                        const std::function<void()>& before_named = [] {}) {
    write_file(path, [&](OutputFile& file) { write_state(file, who, sections, check); }, "", before_named);
}

// Whose state a file holds, by its header; the rest may be missing. Nothing for a file of another kind.
inline std::optional<StateIdentity> peek_identity(const std::string& path) {
    try {
        const FileHeader header = InputFile(path, checkpoint_hint()).read_header(state_magic, "state file");
        const StateIdentity who = state_format::unpack(header);
        if (header[1] == state_version && state_format::is_plausible(who)) { return who; }
    } catch (const std::runtime_error&) {}
    return std::nullopt;
}

// Reads a state file. The constructor checks header, table and size, verify() the whole file. A file that
// cannot be read, is damaged or is of another kind is a UserError that names it; a disk or a system that
// cannot open it for now, a RunError.
class StateReader : public SavedState {
public:
    explicit StateReader(const std::string& path) : file(path, checkpoint_hint()) {
        const int32_t llmc_magic = 20240527;
        FileHeader header{};
        read_at(header.data(), std::min<size_t>(sizeof header, size_t(file.size())), 0);
        if (header[0] == llmc_magic) {
            throw UserError(path + " is a state file of llm.c, not of this program: start from its "
                                   "model (-e model_STEP.bin of the same step)");
        }
        header = file.read_header(state_magic, "state file");
        if (header[1] != state_version) { file.fail(format("is a state file of version %d", header[1])); }
        who = state_format::unpack(header);
        check_header(header);
        read_table(size_t(header[12]));
    }

    // Reads the whole file and compares its checksum.
    void verify() const {
        Checksum checksum;
        std::vector<char> buffer(size_t(std::min<int64_t>(checksum_offset, state_format::chunk_bytes)));
        for (int64_t at = 0; at < checksum_offset;) {
            const size_t count = size_t(std::min<int64_t>(checksum_offset - at, int64_t(buffer.size())));
            read_at(buffer.data(), count, at);
            checksum.add(buffer.data(), count);
            at += int64_t(count);
        }
        uint64_t expected;
        read_at(&expected, sizeof expected, checksum_offset);
        if (checksum.value() != expected) { file.fail("is damaged (its checksum does not match)"); }
    }

    const StateIdentity& identity() const { return who; }
    long step() const override { return who.step; }
    const std::string& path() const override { return file.name(); }
    bool has(const std::string& name) const override { return sections.count(name) != 0; }
    size_t bytes(const std::string& name) const override { return size_t(find(name).bytes); }

    void read(const std::string& name, void* out, size_t count) const override {
        const Place& place = find(name);
        if (size_t(place.bytes) != count) {
            file.fail(format("has %lld bytes of '%s', not the %zu that belong there", (long long)place.bytes,
                             name.c_str(), count));
        }
        read_at(out, count, place.offset);
    }

private:
    struct Place {
        int64_t offset, bytes;
    };

    void check_header(const FileHeader& header) {
        int64_t file_bytes;
        memcpy(&file_bytes, &header[14], sizeof file_bytes);
        if (header[12] < 0 || size_t(header[12]) > state_format::most_sections || header[13] < 0 ||
            header[13] > 1 ||
            std::any_of(header.begin() + 16, header.end(), [](int32_t word) { return word != 0; }) ||
            !state_format::is_plausible(who)) {
            file.fail("has a damaged header");
        }
        file.check_size(file_bytes - int64_t(sizeof header));
        checksum_offset = file_bytes - int64_t(sizeof(uint64_t));
        const int64_t table_bytes = header[12] * int64_t(sizeof(state_format::Entry));
        if (checksum_offset < int64_t(sizeof header) + table_bytes) { file.fail("has a damaged header"); }
    }

    // Each section must follow the one before it, and the checksum must follow the last.
    void read_table(size_t count) {
        std::vector<state_format::Entry> table(count);
        read_at(table.data(), count * sizeof(state_format::Entry), sizeof(FileHeader));
        int64_t end = int64_t(sizeof(FileHeader) + count * sizeof(state_format::Entry));
        for (const state_format::Entry& entry : table) {
            const std::string name(entry.name, strnlen(entry.name, sizeof entry.name));
            const bool is_padded = std::all_of(entry.name + name.size(), std::end(entry.name),
                                               [](char c) { return c == 0; });
            if (!Fields::is_name(name) || !is_padded || entry.offset != state_format::aligned(end) ||
                entry.bytes < 0 || entry.bytes > checksum_offset - entry.offset ||
                !sections.emplace(name, Place{entry.offset, entry.bytes}).second) {
                file.fail("has a damaged table of sections");
            }
            end = entry.offset + entry.bytes;
        }
        if (state_format::aligned(end) != checksum_offset) { file.fail("has a damaged table of sections"); }
    }

    const Place& find(const std::string& name) const {
        const auto found = sections.find(name);
        if (found == sections.end()) { file.fail("has no '" + name + "'"); }
        return found->second;
    }

    // A sector that cannot be read is a UserError here: the user may have another checkpoint. (After an error
    // that may pass, a resume must not take an older checkpoint and delete this one.)
    void read_at(void* out, size_t count, int64_t offset) const {
        try {
            file.read(out, count, offset);
        } catch (const RunError& error) {
            if (error.status == retry_status) { throw; }
            throw UserError(std::string(error.what()) + ": " + checkpoint_hint());
        }
    }

    InputFile file;
    StateIdentity who;
    std::map<std::string, Place> sections;
    int64_t checksum_offset = 0;
};

// -----------------------------------------------------------------------------------------------------------
// DONE_STEP: written by rank 0 of each worker when all processes (of an elastic worker: all its ranks) have
// written their states

inline void write_done(const std::string& folder, const StateIdentity& who) {
    Fields fields;
    fields.set("step", who.step);
    fields.set("workers", who.workers);
    fields.set("ranks", who.ranks);
    fields.set("lineage", who.lineage);
    if (who.elastic) { fields.set("worker", who.worker); }
    const std::string text = fields.text();
    // Several workers may write this file in the same folder: each uses a temporary name of its own.
    write_file(done_path(folder, who.step), [&](OutputFile& file) { file.write(text.data(), text.size()); },
               "." + std::to_string(who.process()));
}

// The run that wrote DONE_STEP, and its number of processes. `rank` is meaningless, and so is `worker` unless
// the run is elastic. UserError, naming the file.
inline StateIdentity read_done(const std::string& folder, long step) {
    const std::string path = done_path(folder, step);
    const InputFile file(path, checkpoint_hint());
    if (file.size() > 4096) { file.fail("is too long"); }
    std::string text(size_t(file.size()), '\0');
    file.read(&text[0], text.size(), 0);
    const Fields fields = Fields::parse(text, path);
    StateIdentity who;
    who.step = fields.integer("step");
    const long workers = fields.integer("workers"), ranks = fields.integer("ranks");
    who.lineage = fields.word("lineage");
    who.elastic = fields.has("worker");
    const long worker = who.elastic ? fields.integer("worker") : 0;
    const long most = 1 << 20;
    if (who.step != step || workers < 1 || ranks < 1 || workers > most || ranks > most || worker < 0 ||
        worker >= workers || !state_format::is_lineage(who.lineage)) {
        file.fail("is damaged");
    }
    who.worker = int(worker), who.workers = int(workers), who.ranks = int(ranks);
    return who;
}

// The same; nothing if the file is damaged or missing. RunError if the disk fails.
inline std::optional<StateIdentity> peek_done(const std::string& folder, long step) {
    try {
        return read_done(folder, step);
    } catch (const UserError&) { return std::nullopt; }
}
