// DilocoReshape: the saved state of Streaming DiLoCo becomes that of a run with other workers, ranks or
// fragments, or without an outer optimizer (llmc/checkpoint/reshape.h).
//
//     means in flight    are merged at once, as at the end of a run
//     global parameters  are kept; a run that had no outer optimizer begins with its own parameters
//     residuals          of error feedback are kept value by value; those of owners only if the same worker
//                        still owns the same part of each fragment
//     token counts       since a fragment was last sent are kept if the fragments hold the same values
//
// The options in its state files tell what the old run was.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "llmc/error.h"
#include "llmc/layout.h"
#include "llmc/state.h"
#include "streaming/exchange.h"
#include "streaming/options.h"
#include "streaming/outer.h"
#include "streaming/plan.h"
#include "streaming/schedule.h"
#include "streaming/snapshot.h"

// A process of a run, with the options that its outer state depends on.
struct OuterShape : RunShape {
    DilocoOptions options;
    std::vector<Fragment> fragments;  // none without an outer optimizer

    // Makes the layout and the fragments.
    OuterShape(const RunShape& run, const DilocoOptions& o) : RunShape(run), options(o) {
        layout = gpt_layout(model, ranks, o.streams() ? o.fragment_layers : 0);
        fragments = make_fragments(layout, o);
    }

    bool streams() const { return !fragments.empty(); }
    bool has_residuals() const { return streams() && options.outer_error_feedback; }
    bool has_owner_residuals() const {
        return has_residuals() && choose_exchange(wire_options(options), shard_values(fragments, layout),
                                                  workers) == ExchangeKind::all_to_all;
    }
};

// -----------------------------------------------------------------------------------------------------------
// The old run

// The options of the run that wrote the state, as far as its outer state depends on them.
inline DilocoOptions saved_options(const SavedState& state) {
    const Fields saved = Fields::parse(state.text("options"), state.path());
    DilocoOptions o;
    o.outer_optimizer = saved.word("outer-optimizer");
    if (!o.streams()) { return o; }
    o.inner_steps = saved.typed_integer("inner-steps", 1, 1L << 40);
    o.fragment_layers = int(saved.typed_integer("fragment-layers", 0, 1 << 20));
    o.fragment_pattern = saved.word("fragment-pattern");
    o.local_weight = saved.typed_real("local-weight");
    o.outer_lr = saved.typed_real("outer-lr");
    o.outer_momentum = saved.typed_real("outer-momentum");
    o.outer_format = saved.word("outer-dtype");
    o.outer_exchange = saved.word("outer-exchange");
    const std::string feedback = saved.word("outer-error-feedback");  // earlier versions saved what was typed
    o.outer_error_feedback = feedback != "false" && feedback != "0" && feedback != "off";
    return o;
}

// Whether fragments were sent at other steps than today: earlier versions had an option for that.
inline bool has_own_offsets(const SavedState& state) {
    const Fields saved = Fields::parse(state.text("options"), state.path());
    return saved.has("fragment-offsets") && !saved.word("fragment-offsets").empty();
}

// Whether fragment p holds the same values in both runs, for all p and any number of ranks.
inline bool have_same_fragments(const OuterShape& a, const OuterShape& b) {
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

inline std::vector<SavedSync> saved_syncs(const SavedState& state, const OuterShape& old) {
    if (!old.streams()) { return {}; }
    return saved_syncs(Fields::parse(state.text("fields"), state.path()), long(old.fragments.size()),
                       old.workers);
}

// -----------------------------------------------------------------------------------------------------------
// Values

// The values of a whole shard, moved from the shard's order to that of the fragments or, with to_shard, from
// the fragments' order to that of the shard.
inline std::vector<float> reordered(const std::vector<float>& values, const OuterShape& shape, int rank,
                                    bool to_shard) {
    std::vector<float> out(values.size());
    long first = 0;
    for (const Fragment& fragment : shape.fragments) {
        for (int block : fragment.blocks) {
            const Range range = shape.layout.shard(block, rank);
            const long from = to_shard ? first : range.shard, to = to_shard ? range.shard : first;
            std::copy_n(&values[size_t(from)], range.count, &out[size_t(to)]);
            first += range.count;
        }
    }
    return out;
}

class DilocoReshape : public OuterReshape {
public:
    // source: a state of the old run; must live as long   old: without its layout
    DilocoReshape(const SavedState& source, const RunShape& old, const OuterShape& to)
        : source(source), old(old, saved_options(source)), to(to) {}

    const RunShape& old_run() const override { return old; }

    bool is_same() const override {
        const bool has_same_schedule =
            !old.streams() || (old.options.inner_steps == to.options.inner_steps && !has_own_offsets(source));
        return have_same_fragments(old, to) && has_same_schedule &&
               old.has_residuals() == to.has_residuals() &&
               old.has_owner_residuals() == to.has_owner_residuals();
    }

    bool starts_from_global() const override {
        return old.workers != to.workers || (old.streams() && !to.streams());
    }

    void read(const SavedState& state, int rank, ShardValues& shard) const override {
        if (!old.streams()) { return; }
        const long n = old.layout.shard_size();
        shard.arrays["global"] = state.floats("global", n);
        shard.arrays["momentum"] = state.floats("momentum", n);
        merge_in_flight(state, rank, shard);
        if (old.has_residuals() && shard.arrays.count("master")) {
            shard.arrays["residuals"] = reordered(state.floats("residuals", n), old, rank, true);
        }
    }

    void adapt(ShardValues& shard) const override {
        std::vector<float> &master = shard.arrays["master"], &global = shard.arrays["global"];
        const size_t n = master.size();
        global.resize(n);
        shard.arrays["momentum"].resize(n);
        shard.arrays["residuals"].resize(n);
        if (!old.streams()) { global = master; }
        if (starts_from_global()) {
            master = global;
            shard.params = rounded_parameters(master);
        }
        std::vector<float>& residuals = shard.arrays["residuals"];
        residuals = reordered(residuals, to, to.rank, false);
        if (!to.has_residuals()) { shard.arrays.erase("residuals"); }
        if (to.has_owner_residuals()) { shard.arrays["owner_residuals"] = owner_residuals(); }
        if (!to.streams()) {
            shard.arrays.erase("global");
            shard.arrays.erase("momentum");
        }
    }

    void adapt(Fields& fields) const override {
        const Fields before = fields;
        for (const char* prefix : {"in_flight", "tokens_at_send.", "fragments"}) { fields.remove(prefix); }
        auto add = [&](const char* name, uint64_t more) { fields.set(name, fields.count(name) + more); };
        for (const SavedSync& one : saved_syncs(source, old)) {  // merged now, it counts as any other sync
            add("total.syncs", 1);
            add("total.outer_bytes_sent", one.report.traffic.bytes_sent);
            add("total.outer_bytes_received", one.report.traffic.bytes_received);
            fields.set("total.next_sync", one.sync.number + 1);
        }
        if (!to.streams()) { return; }
        fields.set("fragments", long(to.fragments.size()));
        fields.set("in_flight", 0L);
        const bool keeps_tokens = have_same_fragments(old, to);
        for (size_t p = 0; p < to.fragments.size(); p++) {
            const std::string name = "tokens_at_send." + std::to_string(p);
            fields.set(name, before.count(keeps_tokens ? name : "tokens"));
        }
    }

    std::vector<OuterPart> parts() const override {
        const bool both = old.streams() && to.streams(), same = have_same_fragments(old, to);
        const bool had_residuals = old.has_residuals(), has_residuals = to.has_residuals();
        return {{"workers' own parameters", starts_from_global() && old.streams(), false, false},
                {"global parameters", both, both, both},
                {"outer momentum", old.streams(), to.streams(), both},
                {"residuals of error feedback", had_residuals, has_residuals, had_residuals && has_residuals},
                {"owners' residuals of error feedback", old.has_owner_residuals(), to.has_owner_residuals(),
                 keeps_owner_residuals()},
                {"counts of tokens since the last exchange", both && !same, false, false}};
    }

    std::vector<std::string> notes() const override {
        const std::vector<SavedSync> syncs = saved_syncs(source, old);
        const long merged =
            std::count_if(syncs.begin(), syncs.end(), [](const auto& one) { return one.report.applied(); });
        const long lost = long(syncs.size()) - merged;
        if (syncs.empty()) { return {}; }
        return {"fragments in flight at the checkpoint, whose means were merged at once: " +
                std::to_string(merged) +
                (lost > 0 ? format("; discarded, because not finite: %ld", lost) : "")};
    }

private:
    // Applies all means in flight as Diloco::finish() does. Without "master", to the global parameters alone.
    void merge_in_flight(const SavedState& state, int rank, ShardValues& shard) const {
        OuterStep step = make_outer_step(old.options);
        const bool has_local = shard.arrays.count("master") != 0;
        if (!has_local) { step.local_weight = 1; }  // local parameters do not move
        const std::vector<SavedSync> syncs = saved_syncs(state, old);
        for (size_t i = 0; i < syncs.size(); i++) {
            if (!syncs[i].report.applied()) { continue; }
            const Fragment& fragment = old.fragments[size_t(syncs[i].sync.fragment)];
            const std::vector<float> mean =
                state.floats(name_in_flight(i) + "mean", shard_values(fragment, old.layout));
            const float* next = mean.data();
            for (int block : fragment.blocks) {
                const Range range = old.layout.shard(block, rank);
                auto at = [&](const char* name) { return &shard.arrays[name][size_t(range.shard)]; };
                cpu::outer_step_loop(at("global"), at("momentum"), has_local ? at("master") : nullptr,
                                     has_local ? &shard.params[size_t(range.shard)] : nullptr, next,
                                     range.count, step);
                next += range.count;
            }
        }
    }

    // An owner's residuals belong to the part of a fragment that it owns.
    bool keeps_owner_residuals() const {
        return old.workers == to.workers && old.ranks == to.ranks &&
               have_same_fragments(old, to) && old.has_owner_residuals() && to.has_owner_residuals();
    }

    std::vector<float> owner_residuals() const {
        long count = 0;
        for (long values : shard_values(to.fragments, to.layout)) {
            const Format format = parse_format(to.options.outer_format);
            count += payload_layout(format, values, to.workers).values_of(to.worker);
        }
        const bool keeps = count > 0 && keeps_owner_residuals();  // then the source is this process's own
        return keeps ? source.floats("owner_residuals", count) : std::vector<float>(size_t(count));
    }

    const SavedState& source;
    const OuterShape old, to;
};
