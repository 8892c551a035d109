// Training state: everything a process needs so that training continues after a step as if it had never
// stopped. A state file (state_file.h) has these sections:
//
//     fields        Progress, the model's shape, the position in the data; the outer optimizer's numbers
//     options       all options with their values, so that a resume can say which ones changed
//     master, m, v  this rank's shard of the weights and of the optimizer's moments, fp32. For matrices that
//                   Muon updates, m is Muon's momentum and v is zero
//     params        the same shard as the layers read it (floatX)
//     outliers      the windows of losses and norms that outliers are found in (llmc/outlier.h)
//     and those of the outer optimizer, if there is one (OuterSnapshot)
//
// TrainingSnapshot copies all of it into the host's memory while training continues; find_checkpoint() and
// restore() bring it back.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "llmc/buffer.h"
#include "llmc/checkpoint/resume.h"
#include "llmc/checkpoint/state_file.h"
#include "llmc/comm.h"
#include "llmc/error.h"
#include "llmc/floatx.h"
#include "llmc/layout.h"
#include "llmc/outlier.h"
#include "llmc/state.h"
#include "llmc/run/process.h"
#include "llmc/stream.h"
#include "llmc/text/dataloader.h"

// -----------------------------------------------------------------------------------------------------------
// How far the run has come

// What this process has done since the run began. A checkpoint keeps it.
struct Totals {
    double train_seconds = 0;
    uint64_t tokens = 0;     // that this worker has trained on
    long updates = 0;        // inner updates by this worker: its steps without those that it jumped over
    long joined_after = -1;  // value of `updates` when it last joined an elastic run in its middle; -1: never
    long syncs = 0, next_sync = 0;  // syncs merged, and the number of the next one
    Traffic outer;
    double waited_seconds = 0;
};

// Updates over which a worker's learning rate rises again after it has taken another worker's parameters.
constexpr long join_warmup_updates = 10;

// Factor of the learning rate for the update that `totals` counts last.
inline float join_warmup(const Totals& totals) {
    if (totals.joined_after < 0) { return 1; }
    return std::min(1.0f, float(totals.updates - totals.joined_after) / float(join_warmup_updates));
}

struct Progress {
    long step = 0, steps = 0;  // steps done, and steps of the whole run
    long adamw_updates = 0;    // AdamW's t, skipped updates included
    Traffic inner;
    Totals totals;
};

// Calls field(name, value) for each number that a state has of the progress, to write it or to read it back.
template <class ProgressT, class Field>
void for_fields(ProgressT& progress, Field field) {
    auto& t = progress.totals;
    field("step", progress.step);
    field("steps", progress.steps);
    field("tokens", t.tokens);
    field("updates", t.updates);
    field("adamw_updates", progress.adamw_updates);
    field("joined_after", t.joined_after);
    field("total.train_seconds", t.train_seconds);
    field("total.syncs", t.syncs);
    field("total.next_sync", t.next_sync);
    field("total.inner_bytes_sent", progress.inner.bytes_sent);
    field("total.inner_bytes_received", progress.inner.bytes_received);
    field("total.outer_bytes_sent", t.outer.bytes_sent);
    field("total.outer_bytes_received", t.outer.bytes_received);
    field("total.waited_seconds", t.waited_seconds);
}

inline Fields fields_of(const Progress& progress, const GptShape& shape, const DataLoader& data) {
    const DataPosition position = data.position();
    Fields fields;
    for_fields(progress, [&](const char* name, const auto& value) { fields.set(name, value); });
    fields.set("float_bytes", long(sizeof(floatX)));
    for (const auto& [name, size] : shape.sizes()) { fields.set("shape." + name, size); }
    fields.set("data.epoch", position.epoch);
    fields.set("data.row", position.row);
    fields.set("data.row_tokens", long(data.tokens_of_a_row()));
    fields.set("data.rows", data.num_rows());
    fields.set("data.shards", data.num_shards());
    fields.set("data.tokens", data.num_tokens());
    fields.set("data.shards_hash", data.shards_hash());
    return fields;
}

inline Progress progress_of(const Fields& fields) {
    Progress progress;
    progress.totals.updates = progress.adamw_updates = fields.integer("step");
    for_fields(progress, [&](const char* name, auto& value) {
        const std::set<std::string> newer = {"steps", "updates", "adamw_updates", "joined_after"};
        if (newer.count(name) && !fields.has(name)) { return; }  // the first versions did not write these
        fields.read(name, value);
    });
    return progress;
}

using NamedValues = std::vector<std::pair<std::string, std::string>>;

inline Fields fields_of(const NamedValues& options) {
    Fields fields;
    for (const auto& [name, value] : options) { fields.set(name, value); }
    return fields;
}

// -----------------------------------------------------------------------------------------------------------
// What the device holds: copied to the host, and back

// The arrays of a worker's rank that a checkpoint holds.
struct TrainingArrays {
    const Layout& layout;
    int rank;
    float *master, *m, *v;    // (layout.shard_size()) each
    floatX* params;           // (layout.size), of which this rank's shards are saved
    OutlierWindow* outliers;  // (1)

    // Calls work(params of a block's shard, where these lie in a shard buffer, count) for each block.
    template <class Work>
    void for_shards(Work work) const {
        for (int b = 0; b < int(layout.blocks.size()); b++) {
            const Range range = layout.shard(b, rank);
            work(params + range.flat, range.shard, range.count);
        }
    }
};

// The state of one process after one step, in the host's memory. It is allocated once and used for all
// checkpoints of a run: call begin_copies() only when the writer has finished the previous one.
class TrainingSnapshot {
public:
    // outer: null without an outer optimizer   model_size: layout.size where the model is written, else 0
    TrainingSnapshot(long shard_size, OuterSnapshot* outer, long model_size)
        : model(model_size), outer(outer), master(shard_size), m(shard_size), v(shard_size),
          params(shard_size) {}

    // Starts to copy the arrays. The outer optimizer fills its own snapshot. end_copies() follows all copies.
    void begin_copies(const TrainingArrays& from, Stream& copies) {
        const long n = from.layout.shard_size();
        device::copy_to_host_later(master.data(), from.master, n, copies);
        device::copy_to_host_later(m.data(), from.m, n, copies);
        device::copy_to_host_later(v.data(), from.v, n, copies);
        from.for_shards([&](const floatX* shard, long at, long count) {
            device::copy_to_host_later(params + at, shard, count, copies);
        });
        device::copy_to_host_later(outliers.data(), from.outliers, 1, copies);
    }
    void set_fields(const Fields& fields_, const Fields& options) {
        fields = fields_;
        options_text = options.text();
    }

    void end_copies(Stream& copies) { copies.record(copied); }

    // On any thread: returns when the host has everything. RunError if the state is not worth keeping: a run
    // whose parameters are no longer finite does not recover, and needs the checkpoints that it has.
    void wait() const {
        copied.synchronize();
        const float* begin = master.data();
        if (!std::all_of(begin, begin + master.count(), [](float value) { return std::isfinite(value); })) {
            throw RunError("the parameters are not finite");
        }
        if (outer) { outer->wait(); }
    }

    // After wait().
    std::vector<StateSection> sections() {
        Fields all = fields;
        if (outer) { outer->add_fields(all); }
        fields_text = all.text();
        auto values = [](const char* name, auto& buffer) {
            return StateSection{name, buffer.data(), size_t(buffer.count()) * sizeof(*buffer.data())};
        };
        std::vector<StateSection> sections = {{"fields", fields_text.data(), fields_text.size()},
                                              {"options", options_text.data(), options_text.size()},
                                              values("master", master),
                                              values("m", m),
                                              values("v", v),
                                              values("params", params),
                                              values("outliers", outliers)};
        if (outer) {
            for (StateSection& section : outer->sections()) { sections.push_back(std::move(section)); }
        }
        return sections;
    }

    // Gives up what has not arrived: a thread in wait() gets a RunError.
    void abandon() {
        if (outer) { outer->abandon(); }
    }

    HostBuffer<float> model;  // (layout.size), on the process that writes the model file

private:
    OuterSnapshot* const outer;
    HostBuffer<float> master, m, v;  // this rank's shard
    HostBuffer<floatX> params;       // (layout.shard_size())
    HostBuffer<OutlierWindow> outliers{1};
    Fields fields;
    std::string fields_text, options_text;
    Event copied;
};

// Fills the arrays from a state file, and returns when the device has them.
inline void restore(const TrainingArrays& to, const StateReader& state, Stream& main) {
    std::vector<float> values(size_t(to.layout.shard_size()));
    for (auto [name, array] : {std::pair("master", to.master), std::pair("m", to.m), std::pair("v", to.v)}) {
        state.read(name, values.data(), values.size() * sizeof(float));
        device::copy_to_device(array, values.data(), long(values.size()), main);
        main.synchronize();  // before `values` is reused
    }
    std::vector<floatX> params(values.size());
    state.read("params", params.data(), params.size() * sizeof(floatX));
    to.for_shards([&](floatX* shard, long at, long count) {
        device::copy_to_device(shard, params.data() + at, count, main);
    });
    OutlierWindow outliers;
    if (state.has("outliers")) {  // the first version of the format did not have them
        state.read("outliers", &outliers, sizeof outliers);
        device::copy_to_device(to.outliers, &outliers, 1, main);
    }
    main.synchronize();
}

// -----------------------------------------------------------------------------------------------------------
// Resuming

// The state to resume from.
struct Resumption {
    std::string lineage;                 // of the run: see state_file.h
    long step = 0;                       // steps done; 0: the run begins
    std::unique_ptr<StateReader> state{};  // null: the run begins
    Fields fields{};
    std::vector<std::string> notes{};      // for people, a line each
};

// The run that resumes.
struct ResumedRun {
    std::string folder;                 // of this process's checkpoints
    StateIdentity who;                  // this process in its state files; its step and lineage mean nothing
    long steps;                         // of the whole run
    bool steps_follow_from_data;        // else a user has said how many
    const NamedValues& options;         // all of them
    std::function<std::string(const std::string& option)> default_of;
    DataLoader& data;
    // Opens this process's state at a checkpoint; notes: what a user should know about it, a line each.
    std::function<std::unique_ptr<StateReader>(const ResumePoint&, std::vector<std::string>& notes)> open;
};

// "lr 0.0003 -> 0.0001, ...": options whose values differ from those that the state of `step` was written
// with. UserError for a state of the other optimizer: m and v mean something else there.
inline std::string changed_options(const Fields& before, const ResumedRun& run, long step) {
    std::string text;
    for (const auto& [name, value] : run.options) {
        // A state without the option was written by a version that did not have it.
        const std::string old = before.has(name) ? before.word(name) : run.default_of(name);
        if (name == "resume" || old == value) { continue; }
        if (name == "optimizer") {
            throw UserError(format("the checkpoint in %s was made with --optimizer %s: resume it with "
                                   "that, or start from its model (-e %s)", run.folder.c_str(), old.c_str(),
                                   model_path(run.folder, step).c_str()));
        }
        text += (text.empty() ? "" : ", ") + name + " " + old + " -> " + value;
    }
    return text;
}

// How the training data differ from those of the state, and the number of steps if it follows from them.
inline std::string changed_data(const Fields& before, const ResumedRun& run) {
    if (!before.has("data.shards_hash")) { return ""; }  // the first version did not note it
    const DataLoader& data = run.data;
    const long shards = before.integer("data.shards"), tokens = before.integer("data.tokens");
    const long steps = before.integer("steps");
    std::string text;
    if (before.word("data.shards_hash") != data.shards_hash()) {
        text = shards == data.num_shards() && tokens == data.num_tokens()
                   ? "other training data: shards of other names or lengths"
                   : format("other training data: %ld -> %ld shards, %ld -> %ld tokens", shards,
                            data.num_shards(), tokens, data.num_tokens());
    }
    if (run.steps_follow_from_data && steps != run.steps) {
        text += text.empty() ? format("another number of steps: %ld -> %ld", steps, run.steps)
                             : format("; %ld -> %ld steps", steps, run.steps);
    }
    return text;
}

// Puts the data where the run stopped. Returns what a user should know about that, or nothing.
inline std::string seek_data(const Fields& before, DataLoader& data) {
    const uint64_t epoch = before.count("data.epoch");
    if (!before.has("data.row")) {  // of a version that counted batches of all processes, "samples"
        const uint64_t tokens = before.count("data.sample") * before.count("data.sample_tokens");
        if (data.seek_in_shard(epoch, before.count("data.shard"), tokens)) { return ""; }
        return format("epoch %lu of the data starts over: the checkpoint is from a version that shuffled "
                      "batches, not sequences", epoch + 1);
    }
    const uint64_t row_tokens = before.count("data.row_tokens");
    data.seek({epoch, before.count("data.row") * row_tokens / uint64_t(data.tokens_of_a_row())});
    const bool is_same = before.integer("data.rows") == data.num_rows();
    if (is_same && row_tokens == uint64_t(data.tokens_of_a_row())) { return ""; }
    return format("an epoch has %ld sequences of %d tokens, not %ld of %lu: the position in the data is "
                  "about the same, and some sequences may be read again or skipped",
                  data.num_rows(), data.tokens_of_a_row(), before.integer("data.rows"), row_tokens);
}

// Opens this process's state, compares it with the run, and puts the data where it was.
inline void open_checkpoint(const ResumedRun& run, const ResumePoint& point, Resumption& r) {
    if (point.step > run.steps) {
        throw UserError(format("the checkpoint in %s is of step %ld, and this run ends after step %ld: give "
                               "a larger -x", run.folder.c_str(), point.step, run.steps));
    }
    r.step = point.step;
    r.lineage = point.lineage;
    r.state = run.open(point, r.notes);
    r.fields = Fields::parse(r.state->text("fields"), r.state->path());
    const Fields saved_options = Fields::parse(r.state->text("options"), r.state->path());
    const std::string options = changed_options(saved_options, run, point.step);
    if (!options.empty()) { r.notes.push_back("resumed with changed options: " + options); }
    const std::string data = changed_data(r.fields, run);
    if (!data.empty()) { r.notes.push_back("resumed with " + data); }
    const std::string position = seek_data(r.fields, run.data);
    if (!position.empty()) { r.notes.push_back(position); }
}

// The checkpoint to resume from: the newest checkpoint that all processes have, or nothing. Collective; all
// processes get the same answer or throw the same UserError.
inline Resumption find_checkpoint(Process& process, const ResumedRun& run) {
    Resumption r{process.run_id};
    const std::optional<ResumePoint> point = agree_on_checkpoint(process, run.folder, run.who, r.notes);
    if (point) { process.check_together("resume/opened", [&] { open_checkpoint(run, *point, r); }); }
    return r;
}
