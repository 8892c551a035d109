// What a part of a run saves in a checkpoint and reads back from it, without knowledge of files: numbers and
// words by name (Fields), arrays by name (StateSection, SavedState), and the outer optimizer's part of both
// (OuterSnapshot, OuterReshape). The files are written and read in llmc/checkpoint/.
#pragma once
#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "llmc/error.h"
#include "llmc/floatx.h"
#include "llmc/layout.h"

// What a user can do when a file of a checkpoint cannot be used.
inline const char* checkpoint_hint() {
    return "resume from another step, or start from a model file (-e model_STEP.bin)";
}

// Named numbers and words, and their text: one line "name value" for each. The text is exact: a real number
// is written as the hexadecimal digits of its bits (so a NaN keeps its payload), and a word may hold any
// bytes (a backslash and a line's end are escaped as in C). Reading a field that is absent, or of another
// kind, throws a UserError that names the file.
class Fields {
public:
    void set(const std::string& name, int value) { put(name, std::to_string(value)); }
    void set(const std::string& name, long value) { put(name, std::to_string(value)); }
    void set(const std::string& name, uint64_t value) { put(name, std::to_string(value)); }
    void set(const std::string& name, double value) {
        uint64_t bits;
        memcpy(&bits, &value, sizeof bits);
        put(name, format("%016llx", (unsigned long long)bits));
    }
    void set(const std::string& name, const std::string& value) { put(name, value); }
    void set(const std::string& name, const char* value) { put(name, value); }

    bool has(const std::string& name) const { return values.count(name) != 0; }
    long integer(const std::string& name) const { return number<long>(name, 10, "a whole number"); }
    uint64_t count(const std::string& name) const { return number<uint64_t>(name, 10, "a count"); }
    double real(const std::string& name) const {
        if (word(name).size() != 16) { fail("'" + name + "' is not the 16 digits of a real number"); }
        const uint64_t bits = number<uint64_t>(name, 16, "a real number");
        double value;
        memcpy(&value, &bits, sizeof value);
        return value;
    }
    const std::string& word(const std::string& name) const {
        const auto found = values.find(name);
        if (found == values.end()) { fail("does not say '" + name + "'"); }
        return found->second;
    }

    std::string text() const {
        std::string all;
        for (const auto& [name, value] : values) {
            all += name + " ";
            for (char c : value) { all += c == '\\' ? "\\\\" : c == '\n' ? "\\n" : std::string(1, c); }
            all += "\n";
        }
        return all;
    }

    // Removes all fields whose names begin like this.
    void remove(const std::string& prefix) {
        const auto begin = values.lower_bound(prefix);
        auto end = begin;
        while (end != values.end() && end->first.rfind(prefix, 0) == 0) { ++end; }
        values.erase(begin, end);
    }

    // file: its name, for messages
    static Fields parse(const std::string& text, const std::string& file) {
        Fields fields;
        fields.file = file;
        for (size_t at = 0; at < text.size();) {
            const size_t end = text.find('\n', at), space = text.find(' ', at);
            if (end == std::string::npos) { fields.fail("has fields that end within a line"); }
            if (space >= end || !is_name(text.substr(at, space - at))) {
                fields.fail("has a line of fields that is not 'name value'");
            }
            const std::string name = text.substr(at, space - at);
            if (fields.has(name)) { fields.fail("says '" + name + "' twice"); }
            fields.values[name] = fields.unescape(text.substr(space + 1, end - space - 1));
            at = end + 1;
        }
        return fields;
    }

    // Printable characters other than a space, and at least one.
    static bool is_name(const std::string& name) {
        auto is_printable = [](char c) { return c > ' ' && c < 127; };
        return !name.empty() && std::all_of(name.begin(), name.end(), is_printable);
    }

private:
    [[noreturn]] void fail(const std::string& what) const {
        throw UserError((file.empty() ? "the state" : file) + " " + what + ": " + checkpoint_hint());
    }

    void put(const std::string& name, const std::string& value) {
        if (!is_name(name)) { throw std::logic_error("'" + name + "' cannot be the name of a field"); }
        values[name] = value;
    }

    template <class T>
    T number(const std::string& name, int base, const char* kind) const {
        const std::string& digits = word(name);
        T value{};
        const char* end = digits.data() + digits.size();
        const auto [stop, error] = std::from_chars(digits.data(), end, value, base);
        if (error != std::errc() || stop != end) { fail("has a '" + name + "' that is not " + kind); }
        return value;
    }

    std::string unescape(const std::string& line) const {
        std::string value;
        for (size_t i = 0; i < line.size(); i++) {
            if (line[i] != '\\') { value += line[i]; continue; }
            i++;
            if (i == line.size() || (line[i] != '\\' && line[i] != 'n')) { fail("has a damaged word"); }
            value += line[i] == 'n' ? '\n' : '\\';
        }
        return value;
    }

    std::map<std::string, std::string> values;
    std::string file;
};

// An array to be saved. The memory belongs to whoever made the section.
struct StateSection {
    std::string name;
    const void* data;
    size_t bytes;
};

// The saved sections of one process. A section that is absent, or has another size, is a UserError.
class SavedState {
public:
    virtual ~SavedState() = default;

    virtual long step() const = 0;               // training steps that were done when it was saved
    virtual const std::string& path() const = 0;  // for messages
    virtual bool has(const std::string& name) const = 0;
    virtual size_t bytes(const std::string& name) const = 0;
    virtual void read(const std::string& name, void* out, size_t bytes) const = 0;

    std::string text(const std::string& name) const {
        std::string all(bytes(name), '\0');
        read(name, &all[0], all.size());
        return all;
    }

    std::vector<float> floats(const std::string& name, long count) const {
        std::vector<float> values(static_cast<size_t>(count));
        read(name, values.data(), values.size() * sizeof(float));
        return values;
    }
};

// The outer optimizer's part of a checkpoint: copies in host memory, which the main stream fills while
// training goes on.
class OuterSnapshot {
public:
    virtual ~OuterSnapshot() = default;

    // On any thread: returns when the copies are complete. Throws a RunError if the snapshot was abandoned.
    virtual void wait() const = 0;

    // On any thread: gives up what has not arrived yet, which ends wait().
    virtual void abandon() = 0;

    // What to save, once wait() has returned.
    virtual std::vector<StateSection> sections() const = 0;
    virtual void add_fields(Fields& fields) const = 0;
};

// -----------------------------------------------------------------------------------------------------------
// A run of another shape that resumes

// One process of a run, as far as its saved state depends on it.
struct RunShape {
    GptShape model;
    Layout layout;
    int worker = 0, rank = 0, workers = 1, ranks = 1;
};

// The saved values of one rank's shard, in the order of Layout::shard: fp32 arrays by name, and the
// parameters as the layers read them.
struct ShardValues {
    std::map<std::string, std::vector<float>> arrays;  // "master", "m", "v", and the outer optimizer's
    std::vector<floatX> params;
};

// Rounded to nearest, as a new run rounds its initial parameters.
inline std::vector<floatX> rounded_parameters(const std::vector<float>& master) {
    std::vector<floatX> params(master.size());
    std::transform(master.begin(), master.end(), params.begin(), [](float x) { return floatX(x); });
    return params;
}

// What a user is told about a state that was made for a run of another shape.
struct ReshapeNotes {
    std::vector<std::string> carried_over, left_behind, zeroed;  // parts of the state
    std::vector<std::string> others;                             // a line each
};

// What becomes of the outer optimizer's state. Either run may be without an outer optimizer.
class OuterReshape {
public:
    virtual ~OuterReshape() = default;

    // The run that wrote the state, with its layout, which depends on the fragments.
    virtual const RunShape& old_run() const = 0;

    // Whether the new run can take the outer state as it is.
    virtual bool is_same() const = 0;

    // Whether the new run's workers begin with the global parameters instead of their own.
    virtual bool starts_from_global() const = 0;

    // Adds the outer arrays of an old rank's shard. Means in flight are merged into them at once, and into
    // master and params. A shard without "master" gets only the arrays that are the same on all workers.
    virtual void read(const SavedState& state, int rank, ShardValues& shard) const = 0;

    // Turns the old run's values and fields, cut for the new rank, into those of the new run.
    virtual void adapt(ShardValues& shard) const = 0;
    virtual void adapt(Fields& fields) const = 0;

    virtual void describe(ReshapeNotes& notes) const = 0;
};
