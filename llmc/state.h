// What a part of a run saves in a checkpoint and reads back from it, without knowledge of files: numbers and
// words by name (Fields), arrays by name (StateSection, SavedState), and the outer optimizer's part of both
// (OuterSnapshot, OuterReshape). The files are written and read in llmc/checkpoint/.
#pragma once
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "llmc/buffer.h"
#include "llmc/error.h"
#include "llmc/floatx.h"
#include "llmc/layout.h"
#include "llmc/stream.h"

// What a user can do when a file of a checkpoint cannot be used.
inline const char* checkpoint_hint() {
    return "move this step's files away to resume from another, or start from a model (-e model_STEP.bin)";
}

// Named numbers and words, and their text: one line "name value" for each. The text is exact: a real number
// is written as the hexadecimal digits of its bits (so a NaN keeps its payload), and a word may hold any
// bytes (a backslash and a line's end are escaped as in C). Reading a field that is absent, or of another
// kind, throws a UserError that names the file.
class Fields {
public:
    void set(const std::string& name, const std::string& value) {
        if (!is_name(name)) { throw std::logic_error("'" + name + "' cannot be the name of a field"); }
        values[name] = value;
    }
    void set(const std::string& name, int value) { set(name, std::to_string(value)); }
    void set(const std::string& name, long value) { set(name, std::to_string(value)); }
    void set(const std::string& name, uint64_t value) { set(name, std::to_string(value)); }
    void set(const std::string& name, double value) {
        uint64_t bits;
        memcpy(&bits, &value, sizeof bits);
        set(name, format("%016llx", (unsigned long long)bits));
    }
    // A list: how many there are, and NAME.0, NAME.1, ...
    template <class T>
    void set(const std::string& name, const std::vector<T>& list) {
        set(name, long(list.size()));
        for (size_t i = 0; i < list.size(); i++) { set(name + "." + std::to_string(i), list[i]); }
    }
    void add(const Fields& more) {
        for (const auto& [name, value] : more.values) { values[name] = value; }
    }

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
    // An integer from 0 to `most`.
    long count_up_to(long most, const std::string& name) const {
        const long count = integer(name);
        if (count < 0 || count > most) {
            fail(format("has %ld of '%s', but at most %ld are possible", count, name.c_str(), most));
        }
        return count;
    }
    void read(const std::string& name, int& value) const { value = int(integer(name)); }
    void read(const std::string& name, long& value) const { value = integer(name); }
    void read(const std::string& name, uint64_t& value) const { value = count(name); }
    void read(const std::string& name, double& value) const { value = real(name); }
    // A list of at most `most`.
    template <class T>
    void read(const std::string& name, std::vector<T>& list, long most) const {
        list.resize(size_t(count_up_to(most, name)));
        for (size_t i = 0; i < list.size(); i++) { read(name + "." + std::to_string(i), list[i]); }
    }
    const std::string& word(const std::string& name) const {
        const auto found = values.find(name);
        if (found == values.end()) { fail("lacks '" + name + "'"); }
        return found->second;
    }

    // Numbers of options are saved as the user typed them, and read as the command line's parser reads them:
    // 0x14 is 20, and real numbers pass through long double, to get the same bits.
    long typed_integer(const std::string& name, long least, long most) const {
        errno = 0;
        char* end = nullptr;
        const long value = strtol(word(name).c_str(), &end, 0);
        check_typed(name, !word(name).empty() && !*end && !errno && value >= least && value <= most);
        return value;
    }
    float typed_real(const std::string& name) const {
        char* end = nullptr;
        const float value = float(strtold(word(name).c_str(), &end));
        check_typed(name, !word(name).empty() && !*end);
        return value;
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
        const std::string after = prefix + '\x7f';  // all characters of names are smaller
        values.erase(values.lower_bound(prefix), values.lower_bound(after));
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

    void check_typed(const std::string& name, bool is_number) const {
        if (!is_number) { fail("has '" + word(name) + "' for the option --" + name); }
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

// The outer optimizer's part of a checkpoint: fields, and named arrays in the host's pinned memory, which
// streams fill while training continues. Means that are still in flight at the checkpoint's step are copied
// when they arrive, and the writer's thread waits for the last copy.
class OuterSnapshot {
public:
    virtual ~OuterSnapshot() = default;

    // On any thread: returns when the copies are complete. Throws a RunError if the snapshot was abandoned.
    void wait() const {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return abandoned || missing == 0; });
        if (abandoned) { throw RunError("the snapshot was abandoned before all of its means had arrived"); }
        const Event all = last_copy;
        lock.unlock();
        all.synchronize();
    }

    // On any thread: stops waiting for what has not arrived yet; wait() then throws.
    void abandon() {
        std::lock_guard<std::mutex> lock(mutex);
        abandoned = missing > 0;
        changed.notify_all();
    }

    // What to save, once wait() has returned.
    std::vector<StateSection> sections() const {
        std::vector<StateSection> all;
        for (const Array& one : arrays) {
            const size_t bytes = size_t(one.count) * sizeof(float);
            if (bytes > 0) { all.push_back({one.name, one.values.data(), bytes}); }
        }
        return all;
    }
    void add_fields(Fields& all) const { all.add(fields); }

protected:
    // The first `count` values are saved; 0: the array is left out.
    struct Array {
        std::string name;
        HostBuffer<float> values;
        long count;
    };

    // Takes memory for an array of at most `most` values.
    Array& add_array(const std::string& name, long most) {
        return arrays.emplace_back(Array{name, HostBuffer<float>(most), most});
    }

    // Starts a snapshot that awaits `awaited` arrivals. The previous one must have been written or abandoned.
    void begin(size_t awaited) {
        std::lock_guard<std::mutex> lock(mutex);
        if (missing > 0 && !abandoned) {
            throw std::logic_error("a snapshot is taken while one is not complete");
        }
        missing = awaited;
        abandoned = false;
        fields = Fields();
    }

    bool is_awaited() const {
        std::lock_guard<std::mutex> lock(mutex);
        return missing > 0 && !abandoned;
    }

    // The copies that have been enqueued on the stream so far belong to the snapshot.
    void end_copies(Stream& stream) {
        std::lock_guard<std::mutex> lock(mutex);
        stream.record(last_copy);
    }

    // An awaited arrival is complete: the snapshot includes the copies so far.
    void end_arrival(Stream& stream) {
        end_copies(stream);
        std::lock_guard<std::mutex> lock(mutex);
        missing--;
        changed.notify_all();
    }

    Fields fields;  // filled until the last arrival

private:
    std::deque<Array> arrays;
    Event last_copy;
    size_t missing = 0;  // arrivals still awaited
    bool abandoned = false;
    mutable std::mutex mutex;  // guards the three members above
    mutable std::condition_variable changed;
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
    return std::vector<floatX>(master.begin(), master.end());
}

// A part of the outer optimizer's state: whether the old run had it, whether the new run has it, and whether
// it is carried over. A part that the new run has but that is not carried over starts at zero.
struct OuterPart {
    std::string name;  // for people
    bool had, has, is_kept;
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

    // What becomes of each part, and anything else that a user should know, a line each.
    virtual std::vector<OuterPart> parts() const = 0;
    virtual std::vector<std::string> notes() const = 0;
};
