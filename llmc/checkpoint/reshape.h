// Reshape: the state of a run goes on in one of another shape: other ranks, other workers, other fragments,
// with or without an outer optimizer. reshape_state() reads what the old processes have written, and writes
// the state of one process of the new run into a file without a name; a run resumes from that as from any.
//
//     ranks      values are found by their place in the model without padding, and cut anew
//     in flight  means that nobody had applied yet are merged at once, as at the end of a run
//     workers    as many as before: each goes on with its own parameters. Another number: all start from the
//                global parameters, worker w with AdamW's moments and residuals of old worker w mod M, and
//                with the losses and norms that its outliers are found among
//
// A process reads one old shard at a time, and only those that have some of its new one.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "streaming/diloco.h"
#include "llmc/error.h"
#include "llmc/floatx.h"
#include "llmc/layout.h"
#include "llmc/checkpoint/state_file.h"
#include "streaming/outer.h"
#include "streaming/schedule.h"
#include "streaming/snapshot.h"

// A process of a run, as far as its state depends on it.
struct StateShape {
    GptShape model;
    Layout layout;
    std::vector<Fragment> fragments;  // none without an outer optimizer
    long inner_steps = 0;             // H
    WireOptions wire;
    int worker = 0, rank = 0, workers = 1, ranks = 1;
    long sample_tokens = 0;  // in a sample of the data, of all processes

    bool streams() const { return !fragments.empty(); }
    bool has_residuals() const { return streams() && wire.error_feedback; }
    bool has_owner_residuals() const {
        return has_residuals() &&
               choose_exchange(wire, shard_values(fragments, layout), workers) == ExchangeKind::all_to_all;
    }
};

// The checkpoint that is resumed from: of which step, and of how many processes.
struct StoredRun {
    std::string folder;
    long step = 0;
    int workers = 1, ranks = 1;
    std::string lineage;
    bool elastic = false;  // it is of one elastic worker, which alone resumes from it

    std::string path(int worker, int rank) const {
        return state_path(folder, step, elastic ? rank : worker * ranks + rank);
    }
};

// -----------------------------------------------------------------------------------------------------------
// What the old run has written

// The state of one process of a stored run.
class StoredState {
public:
    // UserError where it is missing, damaged or of another run.
    StoredState(const StoredRun& run, int worker, int rank)
        : path(run.path(worker, rank)), reader(found(path)),
          fields(Fields::parse(reader.text("fields"), path)),
          options(Fields::parse(reader.text("options"), path)) {
        const StateIdentity& id = reader.identity();
        if (id.lineage != run.lineage) {
            fail("is the state of another run (" + id.lineage + ", not " + run.lineage + ")",
                 "give a folder with the files of one run");
        }
        if (id.step != run.step || id.worker != worker || id.rank != rank || id.workers != run.workers ||
            id.ranks != run.ranks) {
            fail(format("is the state of worker %d rank %d of %d x %d processes at step %ld, not of what its "
                        "name says", id.worker, id.rank, id.workers, id.ranks, id.step),
                 "put the files back under the names that they were written with");
        }
    }

    // An option as it was typed, read as the parser of options reads it: 0x14 is 20.
    long whole_option(const std::string& name, long least, long most) const {
        const std::string& text = options.word(name);
        char* end = nullptr;
        errno = 0;
        const long value = strtol(text.c_str(), &end, 0);
        if (text.empty() || *end || errno || value < least || value > most) { fail_option(name); }
        return value;
    }

    // By way of long double, as there: the same bits.
    float real_option(const std::string& name) const {
        const std::string& text = options.word(name);
        char* end = nullptr;
        const float value = float(strtold(text.c_str(), &end));
        if (text.empty() || *end) { fail_option(name); }
        return value;
    }

    std::vector<float> floats(const std::string& section, long count) const {
        std::vector<float> values(static_cast<size_t>(count));
        reader.read(section, values.data(), values.size() * sizeof(float));
        return values;
    }

    [[noreturn]] void fail(const std::string& what, const std::string& hint) const {
        throw UserError(path + " " + what + ": " + hint);
    }

    const std::string path;
    const StateReader reader;
    const Fields fields, options;

private:
    [[noreturn]] void fail_option(const std::string& name) const {
        fail("has '" + options.word(name) + "' for the option --" + name, checkpoint_hint());
    }

    static const std::string& found(const std::string& path) {
        if (access(path.c_str(), F_OK) != 0) {
            throw UserError(path + " is missing: a run of another shape needs the old processes' states, so "
                            "put all of them into this folder, or resume with the old shape");
        }
        return path;
    }
};

// A model of other sizes cannot go on from this state.
inline void check_model(const StoredState& state, const GptShape& model) {
    const std::pair<const char*, int> sizes[] = {
        {"layers", model.layers},           {"heads", model.heads},
        {"channels", model.channels},       {"vocab_size", model.vocab_size},
        {"max_seq_len", model.max_seq_len}, {"padded_vocab_size", model.padded_vocab_size}};
    for (const auto& [name, size] : sizes) {
        const long stored = state.fields.integer(std::string("shape.") + name);
        if (stored != size) {
            state.fail(format("is of another model (%s: %ld, not %d)", name, stored, size),
                       "give the options of the model that it was written by");
        }
    }
}

// The shape of the run that a state is of; its layout is made as the trainer makes it.
inline StateShape shape_of(const StoredState& state, const GptShape& model) {
    check_model(state, model);
    const StateIdentity& id = state.reader.identity();
    StateShape shape;
    shape.model = model;
    shape.worker = id.worker;
    shape.rank = id.rank;
    shape.workers = id.workers;
    shape.ranks = id.ranks;
    shape.sample_tokens = state.fields.integer("data.sample_tokens");
    if (shape.sample_tokens < 1) { state.fail("has no tokens in a sample", checkpoint_hint()); }
    if (state.options.word("outer-optimizer") == "none") {
        shape.layout = gpt_layout(model, id.ranks, 0);
        return shape;
    }
    const int fragment_layers = int(state.whole_option("fragment-layers", 0, 1 << 20));
    shape.inner_steps = state.whole_option("inner-steps", 1, 1L << 40);
    shape.layout = gpt_layout(model, id.ranks, fragment_layers);
    shape.fragments = make_fragments(shape.layout, fragment_layers,
                                     parse_fragment_pattern(state.options.word("fragment-pattern")),
                                     shape.inner_steps);
    if (state.options.has("fragment-offsets") && !state.options.word("fragment-offsets").empty()) {
        state.fail("is of a run with --fragment-offsets, an option of earlier versions", checkpoint_hint());
    }
    shape.wire.format = parse_format(state.options.word("outer-dtype"));
    shape.wire.exchange = parse_exchange(state.options.word("outer-exchange"));
    shape.wire.error_feedback = state.options.word("outer-error-feedback") == "true";
    return shape;
}

// The outer step of the run that wrote the state.
inline OuterStep outer_step_of(const StoredState& state) {
    return make_outer_step(state.options.word("outer-optimizer"), state.real_option("outer-lr"),
                           state.real_option("outer-momentum"), state.real_option("local-weight"));
}

// Whether both have the same values in fragment p, whatever the number of ranks; not: at which steps.
inline bool have_same_fragments(const StateShape& a, const StateShape& b) {
    auto same_block = [&](int x, int y) {
        const Block &one = a.layout.blocks[size_t(x)], &other = b.layout.blocks[size_t(y)];
        return one.logical_offset == other.logical_offset && one.values == other.values;
    };
    return std::equal(a.fragments.begin(), a.fragments.end(), b.fragments.begin(), b.fragments.end(),
                      [&](const Fragment& x, const Fragment& y) {
                          return std::equal(x.blocks.begin(), x.blocks.end(), y.blocks.begin(),
                                            y.blocks.end(), same_block);
                      });
}

// Without fragments there is none, whatever H is.
inline bool have_same_schedule(const StateShape& a, const StateShape& b) {
    return (!a.streams() || a.inner_steps == b.inner_steps) &&
           std::equal(a.fragments.begin(), a.fragments.end(), b.fragments.begin(), b.fragments.end(),
                      [](const Fragment& x, const Fragment& y) { return x.offset == y.offset; });
}

// Whether parameters are stored as this build has them, so that their bits can be taken.
inline bool has_parameters_as_here(const StoredState& state) {
    return state.fields.integer("float_bytes") == long(sizeof(floatX));
}

// Whether process `to` can resume from its own file of the stored run as it is: else from reshape_state().
inline bool has_shape(const StoredRun& run, const StateShape& to) {
    if (run.workers != to.workers || run.ranks != to.ranks) { return false; }
    const StoredState state(run, to.worker, to.rank);
    const StateShape from = shape_of(state, to.model);
    return from.sample_tokens == to.sample_tokens && have_same_fragments(from, to) &&
           have_same_schedule(from, to) && from.has_residuals() == to.has_residuals() &&
           from.has_owner_residuals() == to.has_owner_residuals() && has_parameters_as_here(state);
}

// -----------------------------------------------------------------------------------------------------------
// Shards of the old run to a shard of the new one

// Values that lie side by side in a shard of the old run and in one of the new.
struct Cut {
    long from, to, count;
};

// What a shard has of the model: `count` values at `index` in the model without padding, and at `at` in the
// shard.
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

// What the new shard has of the old one.
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

// A rank's values, in the order of Layout::shard. What a run does not have is empty.
struct ShardState {
    std::vector<float> master, m, v, global, momentum, residuals;
    std::vector<floatX> params;
};

// Rounded as a new run rounds its initial parameters: to nearest.
inline std::vector<floatX> rounded_parameters(const std::vector<float>& master) {
    std::vector<floatX> params(master.size());
    std::transform(master.begin(), master.end(), params.begin(), [](float x) { return floatX(x); });
    return params;
}

// Calls work(shard, first, count) for each block of the fragments: where it lies in the shard, and where in
// what lies fragment by fragment.
template <class Work>
inline void for_fragment_blocks(const StateShape& shape, int rank, Work work) {
    long first = 0;
    for (const Fragment& fragment : shape.fragments) {
        for (int block : fragment.blocks) {
            const Range range = shape.layout.shard(block, rank);
            work(range.shard, first, range.count);
            first += range.count;
        }
    }
}

// Values of the whole shard, fragment by fragment, in the shard's order; and the way back.
inline std::vector<float> in_shard_order(const std::vector<float>& by_fragment, const StateShape& shape,
                                         int rank) {
    std::vector<float> values(by_fragment.size());
    for_fragment_blocks(shape, rank, [&](long shard, long first, long count) {
        std::copy_n(&by_fragment[size_t(first)], count, &values[size_t(shard)]);
    });
    return values;
}

inline std::vector<float> in_fragment_order(const std::vector<float>& by_shard, const StateShape& shape,
                                            int rank) {
    std::vector<float> values(by_shard.size());
    for_fragment_blocks(shape, rank, [&](long shard, long first, long count) {
        std::copy_n(&by_shard[size_t(shard)], count, &values[size_t(first)]);
    });
    return values;
}

// A sync in flight, as it is stored.
struct StoredSync {
    std::string mean;  // the section with its mean
    int fragment;
    long values;
    bool applied;  // else its mean was not finite: there is none
};

inline std::vector<StoredSync> stored_syncs(const StoredState& state, const StateShape& old) {
    std::vector<StoredSync> syncs;
    if (!old.streams()) { return syncs; }
    const long count = state.fields.integer("in_flight");
    if (count < 0 || count > long(old.fragments.size())) {
        state.fail(format("has %ld of %zu fragments in flight", count, old.fragments.size()),
                   checkpoint_hint());
    }
    for (long i = 0; i < count; i++) {
        const std::string prefix = name_in_flight(size_t(i));
        const long fragment = state.fields.integer(prefix + "fragment");
        if (fragment < 0 || fragment >= long(old.fragments.size())) {
            state.fail(format("has fragment %ld of %zu in flight", fragment, old.fragments.size()),
                       checkpoint_hint());
        }
        syncs.push_back({prefix + "mean", int(fragment),
                         shard_values(old.fragments[size_t(fragment)], old.layout),
                         state.reader.has(prefix + "mean")});
    }
    return syncs;
}

// Takes all means in flight, as Diloco::finish() does. Without local parameters: the global ones alone.
inline void merge_in_flight(ShardState& shard, const StoredState& state, const StateShape& old, int rank) {
    OuterStep step = outer_step_of(state);
    const bool has_local = !shard.master.empty();
    if (!has_local) { step.local_weight = 1; }  // which leaves them alone
    for (const StoredSync& sync : stored_syncs(state, old)) {
        if (!sync.applied) { continue; }
        const std::vector<float> mean = state.floats(sync.mean, sync.values);
        const float* next = mean.data();
        for (int block : old.fragments[size_t(sync.fragment)].blocks) {
            const Range range = old.layout.shard(block, rank);
            cpu::outer_step_loop(&shard.global[size_t(range.shard)], &shard.momentum[size_t(range.shard)],
                                 has_local ? &shard.master[size_t(range.shard)] : nullptr,
                                 has_local ? &shard.params[size_t(range.shard)] : nullptr, next, range.count,
                                 step);
            next += range.count;
        }
    }
}

inline void read_outer_state(ShardState& shard, const StoredState& state, const StateShape& old, int rank) {
    shard.global = state.floats("global", old.layout.shard_size());
    shard.momentum = state.floats("momentum", old.layout.shard_size());
    merge_in_flight(shard, state, old, rank);
}

// The shard of an old process, with nothing in flight any more.
inline ShardState read_shard(const StoredState& state, const StateShape& old, int rank) {
    const long n = old.layout.shard_size();
    ShardState shard;
    shard.master = state.floats("master", n);
    shard.m = state.floats("m", n);
    shard.v = state.floats("v", n);
    if (has_parameters_as_here(state)) {
        shard.params.resize(size_t(n));
        state.reader.read("params", shard.params.data(), shard.params.size() * sizeof(floatX));
    } else {
        shard.params = rounded_parameters(shard.master);
    }
    if (old.streams()) { read_outer_state(shard, state, old, rank); }
    if (old.has_residuals()) { shard.residuals = in_shard_order(state.floats("residuals", n), old, rank); }
    return shard;
}

// All workers have the same global parameters once nothing is in flight: a folder of which that is not so
// holds files that do not belong together.
inline void check_agreement(const ShardState& shard, const StoredRun& run, int worker, int other_worker,
                            const StateShape& old, int rank) {
    const StoredState other(run, other_worker, rank);
    ShardState expected;
    read_outer_state(expected, other, old, rank);
    auto differ = [](const std::vector<float>& a, const std::vector<float>& b) {
        return memcmp(a.data(), b.data(), a.size() * sizeof(float)) != 0;
    };
    if (differ(shard.global, expected.global) || differ(shard.momentum, expected.momentum)) {
        other.fail(format("holds other global parameters than worker %d's state", worker),
                   checkpoint_hint());
    }
}

// All that a process of the old run has, as large as in the new one, and zero: padding stays so.
inline ShardState empty_shard(const StateShape& old, const StateShape& to) {
    const size_t n = size_t(to.layout.shard_size());
    ShardState shard;
    shard.params.resize(n);
    for (auto* values : {&shard.master, &shard.m, &shard.v}) { values->resize(n); }
    for (auto* values : {&shard.global, &shard.momentum}) { values->resize(old.streams() ? n : 0); }
    shard.residuals.resize(old.has_residuals() ? n : 0);
    return shard;
}

// The new shard, from `worker`'s old ones.
inline ShardState recut_shard(const StoredRun& run, int worker, const StateShape& old, const StateShape& to) {
    ShardState now = empty_shard(old, to);
    for (int rank = 0; rank < old.ranks; rank++) {
        const std::vector<Cut> cuts = recut(old.layout, rank, to.layout, to.rank);
        if (cuts.empty()) { continue; }
        const StoredState state(run, worker, rank);
        state.reader.verify();
        const ShardState shard = read_shard(state, old, rank);
        if (old.workers != to.workers && old.workers > 1) {
            check_agreement(shard, run, worker, (worker + 1) % old.workers, old, rank);
        }
        auto copy = [&](auto& out, const auto& inp) {
            if (inp.empty()) { return; }
            for (const Cut& cut : cuts) {
                std::copy_n(&inp[size_t(cut.from)], cut.count, &out[size_t(cut.to)]);
            }
        };
        copy(now.master, shard.master);
        copy(now.m, shard.m);
        copy(now.v, shard.v);
        copy(now.params, shard.params);
        copy(now.global, shard.global);
        copy(now.momentum, shard.momentum);
        copy(now.residuals, shard.residuals);
    }
    return now;
}

// -----------------------------------------------------------------------------------------------------------
// The new state

// Whether all begin where the old run's global parameters are, whatever a worker's own were.
inline bool starts_from_global(const StateShape& old, const StateShape& to) {
    return old.workers != to.workers || (old.streams() && !to.streams());
}

// Gives the shard what the new run has, and takes away what it does not have.
inline void adapt_to(ShardState& shard, const StateShape& old, const StateShape& to) {
    const size_t n = shard.master.size();
    if (to.streams() && !old.streams()) {
        shard.global = shard.master;
        shard.momentum.resize(n);
    }
    if (starts_from_global(old, to)) {
        shard.master = shard.global;
        shard.params = rounded_parameters(shard.master);
    }
    if (!to.streams()) { shard.global = shard.momentum = {}; }
    if (to.has_residuals()) {
        shard.residuals.resize(n);
        shard.residuals = in_fragment_order(shard.residuals, to, to.rank);
    } else {
        shard.residuals = {};
    }
}

// What an owner's rounding has lost belongs to the part of a fragment that it owns.
inline bool keeps_owner_residuals(const StateShape& old, const StateShape& to) {
    return old.workers == to.workers && old.ranks == to.ranks && have_same_fragments(old, to) &&
           old.has_owner_residuals() && to.has_owner_residuals();
}

// source: this process's own old state, where they are kept
inline std::vector<float> owner_residuals(const StoredState& source, const StateShape& old,
                                          const StateShape& to) {
    if (!to.has_owner_residuals()) { return {}; }
    long count = 0;
    for (long values : shard_values(to.fragments, to.layout)) {
        count += payload_layout(to.wire.format, values, to.workers).values_of(to.worker);
    }
    const bool keeps = count > 0 && keeps_owner_residuals(old, to);
    return keeps ? source.floats("owner_residuals", count) : std::vector<float>(size_t(count));
}

// The worker's window (llmc/outlier.h), the same on all its ranks. Runs of earlier versions have none.
inline std::vector<char> outliers_of(const StoredState& source) {
    return source.reader.has("outliers") ? source.reader.values<char>("outliers") : std::vector<char>();
}

// The old fields but for those of fragments.
inline Fields fields_that_stay(const StoredState& source) {
    const std::string text = source.fields.text();
    std::string kept;
    for (size_t at = 0; at < text.size();) {
        const std::string line = text.substr(at, text.find('\n', at) + 1 - at);
        const bool goes = line.rfind("in_flight", 0) == 0 || line.rfind("tokens_at_send.", 0) == 0 ||
                          line.rfind("fragments ", 0) == 0;
        if (!goes) { kept += line; }
        at += line.size();
    }
    return Fields::parse(kept, source.path);
}

// What was in flight and is merged now counts as any other sync does.
inline void count_merged(Fields& totals, const StoredState& source, const StateShape& old) {
    auto add = [&](const std::string& name, uint64_t more) { totals.set(name, totals.count(name) + more); };
    const size_t syncs = stored_syncs(source, old).size();
    for (size_t i = 0; i < syncs; i++) {
        const std::string prefix = name_in_flight(i);
        add("total.syncs", 1);
        add("total.outer_bytes_sent", source.fields.count(prefix + "bytes_sent"));
        add("total.outer_bytes_received", source.fields.count(prefix + "bytes_received"));
        totals.set("total.next_sync", source.fields.count(prefix + "sync") + 1);
    }
}

inline Fields new_fields(const StoredState& source, const StateShape& old, const StateShape& to) {
    Fields fields = fields_that_stay(source);
    count_merged(fields, source, old);
    fields.set("float_bytes", long(sizeof(floatX)));
    // About the same place, in samples of another size.
    const uint64_t sample = fields.count("data.sample");
    fields.set("data.sample", sample * uint64_t(old.sample_tokens) / uint64_t(to.sample_tokens));
    fields.set("data.sample_tokens", to.sample_tokens);
    if (!to.streams()) { return fields; }
    fields.set("fragments", long(to.fragments.size()));
    fields.set("in_flight", 0L);
    const bool keeps_tokens = have_same_fragments(old, to);
    for (size_t p = 0; p < to.fragments.size(); p++) {
        const std::string name = "tokens_at_send." + std::to_string(p);
        fields.set(name, source.fields.count(keeps_tokens ? name : "tokens"));
    }
    return fields;
}

// -----------------------------------------------------------------------------------------------------------
// In words

inline std::string carried_over(const StoredState& source, const StateShape& old, const StateShape& to) {
    const bool from_global = starts_from_global(old, to);
    const bool global = old.streams() && to.streams();
    std::vector<std::string> names;
    if (!from_global) { names.push_back("parameters"); }
    if (global) { names.push_back("global parameters"); }
    if (global) { names.push_back("outer momentum"); }
    names.push_back("AdamW's moments");
    if (old.has_residuals() && to.has_residuals()) { names.push_back("residuals of error feedback"); }
    if (keeps_owner_residuals(old, to)) { names.push_back("those of owners"); }
    if (!outliers_of(source).empty()) { names.push_back("the last losses and norms"); }
    std::string text = "carried over: " + list_in_words(names);
    if (from_global) { text += "; every worker starts from the global parameters"; }
    if (old.workers != to.workers && old.workers > 1 && to.workers > 1) {
        text += format("; what is a worker's own is that of old worker w mod %d for worker w", old.workers);
    }
    return text;
}

// Empty where nothing was lost.
inline std::string not_carried_over(const StateShape& old, const StateShape& to) {
    std::vector<std::string> names;
    if (starts_from_global(old, to) && old.streams()) { names.push_back("workers' own parameters"); }
    if (old.workers > to.workers) {
        const std::string first = std::to_string(to.workers), last = std::to_string(old.workers - 1);
        names.push_back("AdamW's moments of " +
                        (first == last ? "worker " + first : "workers " + first + " to " + last));
    }
    if (old.streams() && !to.streams()) { names.push_back("outer momentum"); }
    if (old.has_residuals() && !to.has_residuals()) { names.push_back("residuals of error feedback"); }
    if (old.has_owner_residuals() && !keeps_owner_residuals(old, to)) {
        names.push_back("owners' residuals of error feedback");
    }
    if (old.streams() && to.streams() && !have_same_fragments(old, to)) {
        names.push_back("counts of tokens since the last exchange");
    }
    return names.empty() ? "" : "not carried over: " + list_in_words(names);
}

inline std::string starting_anew(const StateShape& old, const StateShape& to) {
    std::vector<std::string> names;
    if (!old.streams() && to.streams()) { names.push_back("outer momentum"); }
    if (!old.has_residuals() && to.has_residuals()) { names.push_back("residuals of error feedback"); }
    if (to.has_owner_residuals() && !keeps_owner_residuals(old, to)) {
        names.push_back("owners' residuals of error feedback");
    }
    return names.empty() ? "" : "zero at first: " + list_in_words(names);
}

inline std::string merged_at_once(const StoredState& source, const StateShape& old) {
    const std::vector<StoredSync> syncs = stored_syncs(source, old);
    const long lost = std::count_if(syncs.begin(), syncs.end(), [](const auto& one) { return !one.applied; });
    if (syncs.empty()) { return ""; }
    std::string text = format("fragments in flight at the checkpoint, whose means were merged at once: %zu",
                              syncs.size() - size_t(lost));
    if (lost > 0) { text += format("; %ld not, for they were not finite", lost); }
    return text;
}

inline std::string data_in_words(const StateShape& old, const StateShape& to) {
    if (old.sample_tokens == to.sample_tokens) { return ""; }
    return format("all processes together take %ld tokens at a time, not %ld: the position in the data is "
                  "about the same, and some of it may be read again or passed over",
                  to.sample_tokens, old.sample_tokens);
}

inline std::string parameters_in_words(const StoredState& source, const StateShape& old,
                                       const StateShape& to) {
    if (has_parameters_as_here(source) || starts_from_global(old, to)) { return ""; }
    return format("parameters of %ld bytes became %zu: rounded from the master weights",
                  source.fields.integer("float_bytes"), sizeof(floatX));
}

// -----------------------------------------------------------------------------------------------------------

// A file without a name, in memory, as long as somebody has it open.
class NamelessFile {
public:
    NamelessFile() : descriptor(memfd_create("state", MFD_CLOEXEC)) {
        if (descriptor < 0) { throw RunError(std::string("no file in memory: ") + strerror(errno)); }
    }
    NamelessFile(const NamelessFile&) = delete;
    NamelessFile& operator=(const NamelessFile&) = delete;
    ~NamelessFile() { close(descriptor); }

    // By which this process can open it.
    std::string path() const { return "/proc/self/fd/" + std::to_string(descriptor); }

private:
    int descriptor;
};

inline std::vector<StateSection> sections_of(const ShardState& shard, const std::vector<float>& owner,
                                             const std::vector<char>& outliers, const std::string& fields,
                                             const std::string& options) {
    std::vector<StateSection> sections = {{"fields", fields.data(), fields.size()},
                                          {"options", options.data(), options.size()}};
    auto add = [&](const char* name, const auto& values) {
        if (!values.empty()) { sections.push_back({name, values.data(), values.size() * sizeof(values[0])}); }
    };
    add("master", shard.master);
    add("m", shard.m);
    add("v", shard.v);
    add("params", shard.params);
    add("global", shard.global);
    add("momentum", shard.momentum);
    add("residuals", shard.residuals);
    add("owner_residuals", owner);
    add("outliers", outliers);
    return sections;
}

// The state from which process `to` goes on with the stored run. notes: for people, what was carried over.
// Throws a UserError, naming the file: where one is missing, damaged, of another run or of another model.
inline std::unique_ptr<StateReader> reshape_state(const StoredRun& run, const StateShape& to,
                                                  std::vector<std::string>& notes) {
    const int worker = to.worker % run.workers;
    const StoredState source(run, worker, run.ranks == to.ranks ? to.rank : 0);
    const StateShape old = shape_of(source, to.model);
    ShardState shard = recut_shard(run, worker, old, to);
    adapt_to(shard, old, to);
    const std::vector<float> owner = owner_residuals(source, old, to);
    const std::vector<char> outliers = outliers_of(source);
    const std::string fields = new_fields(source, old, to).text(), options = source.options.text();

    NamelessFile file;
    {
        OutputFile out(file.path());
        write_state(out, {run.step, to.worker, to.rank, to.workers, to.ranks, run.lineage},
                    sections_of(shard, owner, outliers, fields, options));
    }
    notes.push_back(format("the state of %d x %d processes (workers x ranks) goes on in %d x %d", old.workers,
                           old.ranks, to.workers, to.ranks));
    for (const std::string& note :
         {carried_over(source, old, to), not_carried_over(old, to), starting_anew(old, to),
          merged_at_once(source, old), data_in_words(old, to), parameters_in_words(source, old, to)}) {
        if (!note.empty()) { notes.push_back(note); }
    }
    return std::make_unique<StateReader>(file.path());
}
