// Reshape: the saved state of a run becomes that of a run of another shape: another number of ranks or
// workers, other fragments, with or without an outer optimizer. reshape_state() reads the states of the old
// processes and makes the state of one process of the new run, which resumes from it as from any other.
//
//     ranks      values are found by their place in the model without padding, and cut anew
//     workers    the same number: each resumes with its own parameters. Another number: all start from the
//                global parameters, and worker w takes the moments, the residuals, and the windows of
//                losses and norms of old worker w mod M
//     outer      the outer optimizer's state: see OuterReshape (llmc/state.h)
//
// A process holds one old shard in memory at a time, and reads only those that overlap its new one.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "llmc/checkpoint/resume.h"
#include "llmc/checkpoint/state_file.h"
#include "llmc/error.h"
#include "llmc/floatx.h"
#include "llmc/layout.h"
#include "llmc/state.h"

// -----------------------------------------------------------------------------------------------------------
// What the old run has saved

// A checkpoint in a folder.
struct StoredRun {
    std::string folder;
    ResumePoint point;

    std::string path(int worker, int rank) const {
        return state_path(folder, point.step, point.is_of_one_worker() ? rank : worker * point.ranks + rank);
    }
};

// The state of one process of a stored run.
class StoredState {
public:
    // UserError if the file is missing, damaged or belongs to another run.
    StoredState(const StoredRun& run, int worker, int rank)
        : reader(found(run.path(worker, rank))), fields(Fields::parse(reader.text("fields"), reader.path())) {
        const StateIdentity& id = reader.identity();
        const ResumePoint& point = run.point;
        if (id.lineage != point.lineage) {
            fail("is the state of another run (" + id.lineage + ", not " + point.lineage + ")",
                 "give a folder with the files of one run");
        }
        if (id.step != point.step || id.worker != worker || id.rank != rank || id.workers != point.workers ||
            id.ranks != point.ranks) {
            fail(format("is the state of worker %d rank %d of %d x %d processes at step %ld, which does not "
                        "match its name", id.worker, id.rank, id.workers, id.ranks, id.step),
                 "restore the names that the files were written with");
        }
    }

    // Whether its parameters have this build's type, so that their bits can be taken.
    bool has_parameters_as_here() const { return fields.integer("float_bytes") == long(sizeof(floatX)); }

    [[noreturn]] void fail(const std::string& what, const std::string& hint) const {
        throw UserError(reader.path() + " " + what + ": " + hint);
    }

    const StateReader reader;
    const Fields fields;

private:
    static const std::string& found(const std::string& path) {
        if (access(path.c_str(), F_OK) != 0) {
            throw UserError(path + " is missing: other --workers or --ranks need all old processes' states: "
                            "put them into this folder, or resume with the old numbers");
        }
        return path;
    }
};

// Refuses the state of a model of other sizes.
inline void check_model(const StoredState& state, const GptShape& model) {
    for (const auto& [name, size] : model.sizes()) {
        const long stored = state.fields.integer("shape." + name);
        if (stored != size) {
            state.fail(format("is of another model (%s: %ld, not %d)", name.c_str(), stored, size),
                       "give the model options of the run that wrote it");
        }
    }
}

// Makes the outer optimizer's part of a reshape from one of the old states. `old` has no layout yet.
using MakeOuterReshape = std::function<std::unique_ptr<OuterReshape>(
    const SavedState& state, const RunShape& old, const RunShape& to)>;

inline std::unique_ptr<OuterReshape> outer_reshape(const StoredState& state, const RunShape& to,
                                                   const MakeOuterReshape& make) {
    check_model(state, to.model);
    const StateIdentity& id = state.reader.identity();
    const RunShape old{to.model, {}, id.worker, id.rank, id.workers, id.ranks};
    return make(state.reader, old, to);
}

// Whether process `to` can resume from its own file of the stored run as it is.
inline bool has_shape(const StoredRun& run, const RunShape& to, const MakeOuterReshape& make) {
    if (run.point.workers != to.workers || run.point.ranks != to.ranks) { return false; }
    const StoredState state(run, to.worker, to.rank);
    const std::unique_ptr<OuterReshape> outer = outer_reshape(state, to, make);
    return outer->is_same() && state.has_parameters_as_here();
}

// -----------------------------------------------------------------------------------------------------------
// Shards of the old run to a shard of the new one

// Values that are contiguous in a shard of the old run and in one of the new run.
struct Cut {
    long from, to, count;
};

// A part of a shard: `count` values at `at` in the shard, and at `index` in the model without padding.
struct Stretch {
    long index, at, count;
};

inline std::vector<Stretch> stretches(const Layout& layout, int rank) {
    std::vector<Stretch> all;
    for (int b = 0; b < int(layout.blocks.size()); b++) {
        const Block& block = layout.blocks[size_t(b)];
        const Range range = layout.shard(b, rank);
        const long first = range.flat - block.offset;
        const long count = std::min(range.count, block.values - first);  // the rest is padding
        if (count > 0) { all.push_back({block.logical_offset + first, range.shard, count}); }
    }
    return all;
}

// The values that the old shard and the new one share.
inline std::vector<Cut> recut(const Layout& from, int from_rank, const Layout& to, int to_rank) {
    std::vector<Cut> cuts;
    for (const Stretch& old : stretches(from, from_rank)) {
        for (const Stretch& now : stretches(to, to_rank)) {
            const long begin = std::max(old.index, now.index);
            const long end = std::min(old.index + old.count, now.index + now.count);
            if (begin < end) {
                cuts.push_back({old.at + begin - old.index, now.at + begin - now.index, end - begin});
            }
        }
    }
    return cuts;
}

inline ShardValues read_shard(const StoredState& state, int rank, const OuterReshape& outer) {
    const long n = outer.old_run().layout.shard_size();
    ShardValues shard;
    for (const char* name : {"master", "m", "v"}) { shard.arrays[name] = state.reader.floats(name, n); }
    if (state.has_parameters_as_here()) {
        shard.params.resize(size_t(n));
        state.reader.read("params", shard.params.data(), shard.params.size() * sizeof(floatX));
    } else {
        shard.params = rounded_parameters(shard.arrays["master"]);
    }
    outer.read(state.reader, rank, shard);
    return shard;
}

// All workers have the same global parameters once nothing is in flight. If two do not, the folder's files do
// not belong together.
inline void check_agreement(const ShardValues& shard, const StoredRun& run, int worker, int other_worker,
                            int rank, const OuterReshape& outer) {
    const StoredState other(run, other_worker, rank);
    ShardValues expected;
    outer.read(other.reader, rank, expected);
    for (const auto& [name, values] : expected.arrays) {
        if (memcmp(shard.arrays.at(name).data(), values.data(), values.size() * sizeof(float)) != 0) {
            other.fail(format("has different global parameters from worker %d's state", worker),
                       checkpoint_hint());
        }
    }
}

// The new shard, from all old shards of `worker`. Padding is zero, and so is all of a shard that is only
// padding.
inline ShardValues recut_shard(const StoredRun& run, int worker, const RunShape& to,
                               const OuterReshape& outer) {
    const RunShape& old = outer.old_run();
    const size_t n = size_t(to.layout.shard_size());
    ShardValues now;
    now.params.resize(n);
    for (const char* name : {"master", "m", "v"}) { now.arrays[name].resize(n); }
    for (int rank = 0; rank < old.ranks; rank++) {
        const std::vector<Cut> cuts = recut(old.layout, rank, to.layout, to.rank);
        if (cuts.empty()) { continue; }
        const StoredState state(run, worker, rank);
        state.reader.verify();
        const ShardValues shard = read_shard(state, rank, outer);
        if (old.workers != to.workers && old.workers > 1) {
            check_agreement(shard, run, worker, (worker + 1) % old.workers, rank, outer);
        }
        auto copy = [&](auto& out, const auto& inp) {
            out.resize(n);
            for (const Cut& cut : cuts) {
                std::copy_n(&inp[size_t(cut.from)], cut.count, &out[size_t(cut.to)]);
            }
        };
        copy(now.params, shard.params);
        for (const auto& [name, values] : shard.arrays) { copy(now.arrays[name], values); }
    }
    return now;
}

// -----------------------------------------------------------------------------------------------------------
// The new state

// In words, a line each.
inline std::vector<std::string> describe(const StoredState& source, const RunShape& to,
                                         const OuterReshape& outer) {
    const RunShape& old = outer.old_run();
    std::vector<std::string> carried_over, left_behind, zeroed, others;
    if (!outer.starts_from_global()) { carried_over.push_back("parameters"); }
    for (const OuterPart& part : outer.parts()) {
        if (part.had) { (part.is_kept ? carried_over : left_behind).push_back(part.name); }
        if (part.has && !part.is_kept) { zeroed.push_back(part.name); }
    }
    carried_over.push_back("the inner optimizer's moments");
    if (source.reader.has("outliers")) { carried_over.push_back("the last losses and norms"); }
    if (old.workers > to.workers) {
        const std::string first = std::to_string(to.workers), last = std::to_string(old.workers - 1);
        left_behind.push_back("the inner optimizer's moments of " +
                              (first == last ? "worker " + first : "workers " + first + " to " + last));
    }
    if (outer.starts_from_global()) { others.push_back("every worker starts from the global parameters"); }
    if (old.workers != to.workers && old.workers > 1 && to.workers > 1) {
        others.push_back(
            format("worker w takes over the per-worker state of old worker w mod %d", old.workers));
    }
    for (const std::string& note : outer.notes()) { others.push_back(note); }
    if (!source.has_parameters_as_here() && !outer.starts_from_global()) {
        others.push_back(format("parameters change from %ld to %zu bytes: rounded from the master weights",
                                source.fields.integer("float_bytes"), sizeof(floatX)));
    }
    std::vector<std::string> lines = {
        format("the state of %d x %d processes (workers x ranks) is resumed by %d x %d", old.workers,
               old.ranks, to.workers, to.ranks)};
    auto add = [&](const char* what, const std::vector<std::string>& names) {
        if (!names.empty()) { lines.push_back(what + list_in_words(names)); }
    };
    add("carried over: ", carried_over);
    add("not carried over: ", left_behind);
    add("starting at zero: ", zeroed);
    lines.insert(lines.end(), others.begin(), others.end());
    return lines;
}

// The state from which process `to` resumes the stored run. notes: what a user should know about it
// Throws a UserError that names the file if one is missing, damaged, of another run or of another model.
inline std::unique_ptr<StateReader> reshape_state(const StoredRun& run, const RunShape& to,
                                                  const MakeOuterReshape& make,
                                                  std::vector<std::string>& notes) {
    const int worker = to.worker % run.point.workers;
    const StoredState source(run, worker, run.point.ranks == to.ranks ? to.rank : 0);
    const std::unique_ptr<OuterReshape> outer = outer_reshape(source, to, make);
    ShardValues shard = recut_shard(run, worker, to, *outer);
    outer->adapt(shard);
    Fields new_fields = source.fields;
    new_fields.set("float_bytes", long(sizeof(floatX)));
    outer->adapt(new_fields);

    const std::string fields = new_fields.text(), options = source.reader.text("options");
    std::string outliers;  // the same on all ranks of a worker; the first version did not have them
    if (source.reader.has("outliers")) { outliers = source.reader.text("outliers"); }
    std::vector<StateSection> sections = {
        {"fields", fields.data(), fields.size()},
        {"options", options.data(), options.size()},
        {"params", shard.params.data(), shard.params.size() * sizeof(floatX)}};
    if (!outliers.empty()) { sections.push_back({"outliers", outliers.data(), outliers.size()}); }
    for (const auto& [name, values] : shard.arrays) {
        sections.push_back({name, values.data(), values.size() * sizeof(float)});
    }
    // A file without a name, in memory; it lasts as long as somebody has it open.
    const FileDescriptor descriptor(memfd_create("state", MFD_CLOEXEC));
    if (descriptor < 0) { throw RunError(std::string("no file in memory: ") + strerror(errno)); }
    const std::string path = "/proc/self/fd/" + std::to_string(descriptor);
    {
        OutputFile out(path);
        write_state(out, {run.point.step, to.worker, to.rank, to.workers, to.ranks, run.point.lineage},
                    sections);
    }
    for (std::string& line : describe(source, to, *outer)) { notes.push_back(std::move(line)); }
    return std::make_unique<StateReader>(path);
}

// The state from which process `to` resumes: its own file as it is, or one that is made from the old run's.
inline std::unique_ptr<StateReader> open_state(const StoredRun& run, const RunShape& to,
                                               const MakeOuterReshape& make,
                                               std::vector<std::string>& notes) {
    if (has_shape(run, to, make)) { return std::make_unique<StateReader>(run.path(to.worker, to.rank)); }
    if (run.point.is_of_one_worker()) {
        throw UserError(run.folder + " was saved with other fragments, -H or error feedback, or a build with "
                        "other parameters (fp32, bf16): an elastic worker resumes with its old options");
    }
    return reshape_state(run, to, make, notes);
}
