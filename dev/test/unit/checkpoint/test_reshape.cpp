// Change of shape: a run is resumed with other ranks, workers or fragments. States of made-up runs are
// written as each process would write its own, and the results are compared tensor by tensor.
#include "dev/test/unit/wire.h"
#include "llmc/checkpoint/reshape.h"
#include "streaming/diloco.h"
#include "streaming/reshape_outer.h"

#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <random>

#include "dev/test/files.h"
#include "dev/test/unit/local_comm.h"
#include "dev/test/random_values.h"

namespace test_reshape {

const std::string lineage = "0123456789abcdef";
const long step = 40;
const GptShape tiny{12, 250, 256, 3, 2, 16};

// The options of a run on which its state depends.
struct MadeUpRun {
    int workers = 1, ranks = 1;
    std::string outer_optimizer = "nesterov";
    int fragment_layers = 1;
    std::string pattern = "strided";
    std::string offsets;  // of a run of an earlier version
    long inner_steps = 20;
    std::string typed_inner_steps;  // empty: as a plain number
    bool error_feedback = false;
    std::string exchange = "all_gather";

    // The shape as the trainer makes it from its options.
    OuterShape shape(int worker, int rank) const {
        DilocoOptions o;
        o.outer_optimizer = outer_optimizer;
        o.fragment_layers = fragment_layers;
        o.fragment_pattern = pattern;
        o.inner_steps = inner_steps;
        o.outer_exchange = exchange;
        o.outer_error_feedback = error_feedback;
        return {{tiny, {}, worker, rank, workers, ranks}, o};
    }

    std::string options() const {
        const std::string H = typed_inner_steps.empty() ? std::to_string(inner_steps) : typed_inner_steps;
        return "train-data a b.bin\nranks 9\nfragment-layers " + std::to_string(fragment_layers) +
               "\nfragment-pattern " + pattern + "\nfragment-offsets " + offsets + "\ninner-steps " + H +
               "\nouter-optimizer " + outer_optimizer +
               "\nouter-lr 0.4\nouter-momentum 0.9\nlocal-weight 0.25\nouter-dtype fp4\nouter-exchange " +
               exchange + "\nouter-error-feedback " + (error_feedback ? "true" : "false") + "\n";
    }

    StoredRun stored(const std::string& folder) const { return {folder, {step, lineage, workers, ranks}}; }

    // The outer part of a reshape into this run.
    MakeOuterReshape outer() const {
        return [this](const SavedState& state, const RunShape& old, const RunShape& to) {
            return std::make_unique<DilocoReshape>(state, old, OuterShape(to, shape(0, 0).options));
        };
    }

    bool takes(const StoredRun& run, int worker, int rank) const {
        return has_shape(run, shape(worker, rank), outer());
    }
};

// Values as parameters hold them.
Floats rounded(Floats values) {
    for (float& value : values) { value = float(floatX(value)); }
    return values;
}

std::vector<floatX> as_parameters(const Floats& values) { return {values.begin(), values.end()}; }

// The values of a section of either type.
Floats floats_in(const std::string& section, const void* data, size_t bytes) {
    if (section == "params") {
        const floatX* values = static_cast<const floatX*>(data);
        return Floats(values, values + bytes / sizeof(floatX));
    }
    const float* values = static_cast<const float*>(data);
    return Floats(values, values + bytes / sizeof(float));
}

Floats floats_in(const StateReader& state, const std::string& section) {
    const std::string bytes = state.text(section);
    return floats_in(section, bytes.data(), bytes.size());
}

// Values of a kind ("master", "global", ...) of the whole model, tensor by tensor, without padding. Those
// that all workers share do not depend on the worker.
Floats model_values(const std::string& kind, int worker) {
    const bool shared = kind == "global" || kind == "momentum" || kind.rfind("mean", 0) == 0;
    uint32_t seed = shared ? 0 : uint32_t(worker) + 1;
    for (char c : kind) { seed = seed * 131 + uint32_t(c); }
    std::mt19937 random(seed);
    Floats values(size_t(gpt_layout(tiny, 1, 0).values));
    for (float& value : values) { value = float(int32_t(random())) * 0x1p-31f; }
    return kind == "params" ? rounded(values) : values;
}

// Copies a model, tensor by tensor, to the flat buffer of a layout, and back.
Floats to_flat(const Layout& layout, const Floats& model) {
    Floats flat(size_t(layout.size), 0.0f);
    auto next = model.begin();
    for (const Tensor& tensor : layout.tensors) {
        std::copy_n(next, tensor.count(), flat.begin() + tensor.offset);
        next += tensor.count();
    }
    return flat;
}

Floats from_flat(const Layout& layout, Floats flat) {
    Floats model;
    for (const Tensor& tensor : layout.tensors) {
        const auto begin = flat.begin() + tensor.offset;
        model.insert(model.end(), begin, begin + tensor.count());
        std::fill(begin, begin + tensor.count(), 0.0f);
    }
    for (float left : flat) { EXPECT_EQ(float_to_bits(left), 0u) << "padding is not zero"; }
    return model;
}

// A rank's shards of some blocks of the flat buffer, one after another.
Floats shard_of(const Layout& layout, const Floats& flat, const std::vector<int>& blocks, int rank) {
    Floats shard;
    for (int block : blocks) {
        const Range range = layout.shard(block, rank);
        shard.insert(shard.end(), flat.begin() + range.flat, flat.begin() + range.flat + range.count);
    }
    return shard;
}

std::vector<int> blocks_in_order(const Layout& layout) {
    std::vector<int> blocks(layout.blocks.size());
    std::iota(blocks.begin(), blocks.end(), 0);
    return blocks;
}

std::vector<int> blocks_by_fragment(const OuterShape& shape) {
    std::vector<int> blocks;
    for (const Fragment& fragment : shape.fragments) {
        blocks.insert(blocks.end(), fragment.blocks.begin(), fragment.blocks.end());
    }
    return blocks;
}

// A fragment that was in flight at the checkpoint. It has no mean if that was not finite.
struct Flying {
    int fragment;
    bool has_mean = true;
};

Fields fields_of(const OuterShape& shape, const std::vector<Flying>& flying) {
    Fields fields;
    const std::pair<const char*, int> sizes[] = {
        {"layers", tiny.layers},           {"heads", tiny.heads},
        {"channels", tiny.channels},       {"vocab_size", tiny.vocab_size},
        {"max_seq_len", tiny.max_seq_len}, {"padded_vocab_size", tiny.padded_vocab_size}};
    for (const auto& [name, size] : sizes) { fields.set(std::string("shape.") + name, size); }
    fields.set("step", step);
    fields.set("tokens", uint64_t(1000 + shape.worker));
    fields.set("float_bytes", long(sizeof(floatX)));
    fields.set("data.epoch", uint64_t(2));
    fields.set("data.row", uint64_t(7));
    fields.set("total.waited_seconds", 0.5 + shape.worker + 0.01 * shape.rank);
    fields.set("total.syncs", 5L);
    fields.set("total.next_sync", 5L);
    fields.set("total.outer_bytes_sent", uint64_t(5000));
    fields.set("total.outer_bytes_received", uint64_t(6000));
    if (!shape.streams()) { return fields; }
    fields.set("fragments", long(shape.fragments.size()));
    for (size_t p = 0; p < shape.fragments.size(); p++) {
        fields.set("tokens_at_send." + std::to_string(p), uint64_t(100 * shape.worker + int(p)));
    }
    fields.set("in_flight", long(flying.size()));
    for (size_t i = 0; i < flying.size(); i++) {
        const Fragment& fragment = shape.fragments[size_t(flying[i].fragment)];
        fields.set(name_in_flight(i) + "sync", long(i) + 5);
        fields.set(name_in_flight(i) + "fragment", flying[i].fragment);
        fields.set(name_in_flight(i) + "send_step", step);
        fields.set(name_in_flight(i) + "values", shard_values(fragment, shape.layout));
        SyncReport report{};
        report.traffic.bytes_sent = 100 + i;
        report.traffic.bytes_received = 200 + i;
        if (!flying[i].has_mean) { report.not_finite = {0}; }
        add_report(fields, name_in_flight(i), report);
    }
    return fields;
}

// One process's sections that hold values.
std::map<std::string, Floats> floats_of(const OuterShape& shape, const std::vector<Flying>& flying) {
    std::map<std::string, Floats> floats;
    auto add = [&](const std::string& section, const std::string& kind, const std::vector<int>& blocks) {
        const Floats flat = to_flat(shape.layout, model_values(kind, shape.worker));
        floats[section] = shard_of(shape.layout, flat, blocks, shape.rank);
    };
    const std::vector<int> all = blocks_in_order(shape.layout);
    for (const char* kind : {"master", "m", "v", "params"}) { add(kind, kind, all); }
    if (!shape.streams()) { return floats; }
    for (const char* kind : {"global", "momentum"}) { add(kind, kind, all); }
    if (shape.has_residuals()) { add("residuals", "residuals", blocks_by_fragment(shape)); }
    if (shape.has_owner_residuals()) {
        const long n = shape.layout.shard_size() / shape.workers;
        floats["owner_residuals"] = random_values(uint64_t(10 * shape.worker + shape.rank), n, 1.0f);
    }
    for (size_t i = 0; i < flying.size(); i++) {
        if (!flying[i].has_mean) { continue; }
        add(name_in_flight(i) + "mean", "mean", shape.fragments[size_t(flying[i].fragment)].blocks);
    }
    return floats;
}

void write_process(const std::string& folder, const MadeUpRun& run, const OuterShape& shape,
                   const Fields& fields, const std::map<std::string, Floats>& floats) {
    const std::string text = fields.text(), options = run.options();
    const std::vector<floatX> params = as_parameters(floats.at("params"));
    std::vector<StateSection> sections = {{"fields", text.data(), text.size()},
                                          {"options", options.data(), options.size()},
                                          {"params", params.data(), params.size() * sizeof(floatX)}};
    for (const auto& [name, values] : floats) {
        if (name == "params") { continue; }
        sections.push_back({name, values.data(), values.size() * sizeof(float)});
    }
    write_state(state_path(folder, step, shape.worker * shape.ranks + shape.rank),
                {step, shape.worker, shape.rank, shape.workers, shape.ranks, lineage}, sections);
}

void write_run(const std::string& folder, const MadeUpRun& run, const std::vector<Flying>& flying = {}) {
    for (int worker = 0; worker < run.workers; worker++) {
        for (int rank = 0; rank < run.ranks; rank++) {
            const OuterShape shape = run.shape(worker, rank);
            write_process(folder, run, shape, fields_of(shape, flying), floats_of(shape, flying));
        }
    }
}

// A worker of the new run: its ranks' states.
struct NewWorker {
    OuterShape shape;  // of rank 0
    std::vector<std::unique_ptr<StateReader>> states;
    std::vector<std::string> notes;  // of rank 0

    bool has(const std::string& section) const { return states[0]->has(section); }

    // A section of the whole model, tensor by tensor.
    Floats model(const std::string& section) const {
        const std::vector<int> blocks =
            section == "residuals" ? blocks_by_fragment(shape) : blocks_in_order(shape.layout);
        Floats flat(size_t(shape.layout.size));
        for (int rank = 0; rank < shape.ranks; rank++) {
            const Floats values = floats_in(*states[size_t(rank)], section);
            EXPECT_EQ(long(values.size()), shape.layout.shard_size());
            auto next = values.begin();
            for (int block : blocks) {
                const Range range = shape.layout.shard(block, rank);
                std::copy_n(next, range.count, flat.begin() + range.flat);
                next += range.count;
            }
        }
        return from_flat(shape.layout, flat);
    }

    Fields fields(int rank = 0) const {
        return Fields::parse(states[size_t(rank)]->text("fields"), "the new state");
    }

    std::string all_notes() const {
        std::string all;
        for (const std::string& note : notes) { all += note + "\n"; }
        return all;
    }
};

NewWorker reshape(const std::string& folder, const MadeUpRun& from, const MadeUpRun& to, int worker = 0) {
    NewWorker result{to.shape(worker, 0), {}, {}};
    for (int rank = 0; rank < to.ranks; rank++) {
        std::vector<std::string> notes;
        result.states.push_back(reshape_state(from.stored(folder), to.shape(worker, rank), to.outer(), notes));
        result.states.back()->verify();
        if (rank == 0) { result.notes = notes; }
    }
    return result;
}

testing::AssertionResult same_bits(const Floats& a, const Floats& b) {
    if (a.size() != b.size()) {
        return testing::AssertionFailure() << a.size() << " values, not " << b.size();
    }
    for (size_t i = 0; i < a.size(); i++) {
        if (float_to_bits(a[i]) != float_to_bits(b[i])) {
            return testing::AssertionFailure() << "value " << i << " is " << a[i] << ", not " << b[i];
        }
    }
    return testing::AssertionSuccess();
}

// Writes the states of the new worker to a folder, as the resumed run would do.
void write_again(const std::string& folder, const MadeUpRun& run, const NewWorker& worker) {
    for (int rank = 0; rank < run.ranks; rank++) {
        const StateReader& state = *worker.states[size_t(rank)];
        std::map<std::string, Floats> floats;
        for (const char* name : {"master", "m", "v", "params", "global", "momentum", "residuals"}) {
            if (state.has(name)) { floats[name] = floats_in(state, name); }
        }
        write_process(folder, run, run.shape(worker.shape.worker, rank), worker.fields(rank), floats);
    }
}

MadeUpRun with_ranks(MadeUpRun run, int ranks) {
    run.ranks = ranks;
    return run;
}

MadeUpRun with_workers(MadeUpRun run, int workers) {
    run.workers = workers;
    return run;
}

// A worker of one rank with a real Diloco, up to the step of the checkpoint.
class RealWorker {
public:
    RealWorker(const MadeUpRun& run, long overlap, Comm& comm)
        : run(run), shape(run.shape(comm.rank(), 0)), outer_stream(Stream::Kind::communicate),
          diloco(options(overlap), shape.fragments, shape.layout, 0, comm, outer_stream),
          local(to_flat(shape.layout, model_values("global", 0))), params(as_parameters(local)) {}

    // Worker 1's delta at the last step is not finite.
    void train() {
        diloco.start(local.data(), main);
        for (long t = 1; t <= step; t++) {
            const Floats moves = random_values(uint64_t(2 * t + shape.worker), shape.layout.values, 0.01f);
            const Floats flat = to_flat(shape.layout, moves);
            for (size_t i = 0; i < local.size(); i++) { local[i] -= flat[i]; }
            if (t == step && shape.worker == 1) { local[3] = NAN; }  // of fragment 0
            params = as_parameters(local);
            diloco.after_inner_step(t, uint64_t(t), local.data(), params.data(), main);
        }
    }

    // Writes the checkpoint, and continues as at the end of training.
    void checkpoint_and_finish(const std::string& folder) {
        diloco.take_snapshot(main);
        std::map<std::string, Floats> floats = own_values();
        diloco.finish(0, local.data(), params.data(), main);
        diloco.snapshot().wait();
        Fields fields = fields_of(shape, {});
        diloco.snapshot().add_fields(fields);
        add(floats, diloco.snapshot());
        floats["m"] = floats["v"] = local;
        write_process(folder, run, shape, fields, floats);
    }

    // All sections, when nothing is in flight.
    std::map<std::string, Floats> values() {
        diloco.take_snapshot(main);
        diloco.snapshot().wait();
        std::map<std::string, Floats> floats = own_values();
        add(floats, diloco.snapshot());
        return floats;
    }

private:
    // The same options as in MadeUpRun::options().
    DilocoOptions options(long overlap) const {
        DilocoOptions options;
        options.inner_steps = run.inner_steps;
        options.overlap = overlap;
        options.local_weight = 0.25f;
        options.outer_lr = 0.4f;
        options.outer_momentum = 0.9f;
        set_wire(options, wire_options(shape.options));
        return options;
    }

    std::map<std::string, Floats> own_values() const {
        return {{"master", local}, {"params", Floats(params.begin(), params.end())}};
    }

    static void add(std::map<std::string, Floats>& floats, const OuterSnapshot& snapshot) {
        for (const StateSection& section : snapshot.sections()) {
            floats[section.name] = floats_in(section.name, section.data, section.bytes);
        }
    }

    MadeUpRun run;
    OuterShape shape;
    Stream main, outer_stream;
    Diloco diloco;
    Floats local;                // of one rank: the shard is the flat buffer
    std::vector<floatX> params;
};

// Calls `work` with the place of each of a fragment's values in the model without padding.
void for_fragment_values(const OuterShape& shape, int fragment, const std::function<void(size_t)>& work) {
    for (int b : shape.fragments[size_t(fragment)].blocks) {
        const Block& block = shape.layout.blocks[size_t(b)];
        for (long i = 0; i < block.values; i++) { work(size_t(block.logical_offset + i)); }
    }
}

const std::vector<std::string> always_there{"master", "m", "v", "params"};

TEST(Reshape, ranks_1_2_4_1_keep_every_tensor_bit_for_bit) {
    MadeUpRun streaming, plain;
    streaming.error_feedback = true;
    plain.outer_optimizer = "none";
    for (const MadeUpRun& run : {streaming, plain}) {
        std::vector<std::string> kinds = always_there;
        if (run.error_feedback) { kinds.insert(kinds.end(), {"global", "momentum", "residuals"}); }
        TemporaryFolder folders[4];
        write_run(folders[0].name(), run);
        const int ranks[] = {1, 2, 4, 1};
        for (int i = 1; i < 4; i++) {
            const MadeUpRun to = with_ranks(run, ranks[i]);
            const NewWorker now = reshape(folders[i - 1].name(), with_ranks(run, ranks[i - 1]), to);
            EXPECT_EQ(now.has("global"), run.error_feedback);
            for (const std::string& kind : kinds) {
                EXPECT_TRUE(same_bits(now.model(kind), model_values(kind, 0))) << kind << ", " << ranks[i];
            }
            write_again(folders[i].name(), to, now);
        }
        const StateReader first(state_path(folders[0].name(), step, 0));
        const StateReader last(state_path(folders[3].name(), step, 0));
        for (const std::string& kind : kinds) {
            EXPECT_TRUE(same_bits(floats_in(last, kind), floats_in(first, kind))) << kind;
        }
        if (!run.error_feedback) { EXPECT_EQ(last.text("fields"), first.text("fields")); }
    }
}

TEST(Reshape, a_rank_that_has_nothing_but_padding_gets_zeros) {
    TemporaryFolder folder;
    MadeUpRun run;
    run.error_feedback = true;
    write_run(folder.name(), run);
    const NewWorker now = reshape(folder.name(), run, with_ranks(run, 48));
    EXPECT_TRUE(same_bits(now.model("master"), model_values("master", 0)));
    EXPECT_TRUE(same_bits(now.model("residuals"), model_values("residuals", 0)));
    const Floats last = saved_values<float>(*now.states[47], "momentum");
    EXPECT_TRUE(same_bits(last, Floats(last.size(), 0.0f)));
    EXPECT_EQ(stretches(now.shape.layout, 47).size(), 0u);
}

TEST(Reshape, with_as_many_workers_each_goes_on_with_what_was_its_own) {
    TemporaryFolder folder;
    MadeUpRun from;
    from.workers = 2;
    from.ranks = 2;
    from.error_feedback = true;
    write_run(folder.name(), from);
    for (int worker = 0; worker < 2; worker++) {
        const NewWorker now = reshape(folder.name(), from, with_ranks(from, 1), worker);
        for (const char* kind : {"master", "m", "v", "params", "global", "momentum", "residuals"}) {
            EXPECT_TRUE(same_bits(now.model(kind), model_values(kind, worker))) << kind;
        }
        EXPECT_EQ(now.states[0]->identity().worker, worker);
        EXPECT_EQ(now.states[0]->identity().ranks, 1);
        EXPECT_EQ(now.states[0]->identity().lineage, lineage);
        EXPECT_EQ(now.states[0]->identity().step, step);
        EXPECT_EQ(now.fields().count("tokens"), uint64_t(1000 + worker));
        EXPECT_EQ(now.fields().count("data.row"), 7u);
        EXPECT_EQ(now.fields().real("total.waited_seconds"), 0.5 + worker);
        EXPECT_TRUE(contains(now.all_notes(), "2 x 2 processes (workers x ranks) is resumed by 2 x 1\n"
                                              "carried over: parameters, global parameters, outer momentum, "
                                              "residuals of error feedback and the inner optimizer's moments\n"));
    }
}

TEST(Reshape, another_number_of_workers_starts_from_the_global_parameters) {
    const std::pair<int, int> changes[] = {{1, 2}, {2, 1}, {2, 4}, {4, 2}};
    for (const auto& [before, after] : changes) {
        for (int ranks : {1, 2}) {
            TemporaryFolder folder;
            MadeUpRun from;
            from.workers = before;
            from.error_feedback = true;
            const MadeUpRun to = with_ranks(with_workers(from, after), ranks);
            write_run(folder.name(), from);
            for (int worker = 0; worker < after; worker++) {
                const NewWorker now = reshape(folder.name(), from, to, worker);
                const int old_worker = worker % before;
                for (const char* kind : {"master", "global"}) {
                    EXPECT_TRUE(same_bits(now.model(kind), model_values("global", 0))) << kind;
                }
                EXPECT_TRUE(same_bits(now.model("params"), rounded(model_values("global", 0))));
                for (const char* kind : {"momentum", "m", "v", "residuals"}) {
                    EXPECT_TRUE(same_bits(now.model(kind), model_values(kind, old_worker))) << kind;
                }
                EXPECT_EQ(now.fields().count("tokens"), uint64_t(1000 + old_worker));
                EXPECT_TRUE(contains(now.all_notes(), "every worker starts from the global parameters"));
                const char* lost = before < after ? "not carried over: workers' own parameters\n"
                                   : before == 2  ? " and the inner optimizer's moments of worker 1\n"
                                                  : " and the inner optimizer's moments of workers 2 to 3\n";
                EXPECT_TRUE(contains(now.all_notes(), lost));
            }
        }
    }
}

TEST(Reshape, other_fragments_keep_every_value_and_count_tokens_anew) {
    MadeUpRun from, larger, sequential, slower;
    for (MadeUpRun* run : {&from, &larger, &sequential, &slower}) {
        run->ranks = 2;
        run->error_feedback = true;
        run->fragment_layers = 2;
    }
    larger.fragment_layers = 0;
    sequential.pattern = "sequential";
    slower.inner_steps = 30;
    TemporaryFolder folder;
    write_run(folder.name(), from);
    for (const MadeUpRun& to : {larger, sequential, slower}) {
        const NewWorker now = reshape(folder.name(), from, to);
        for (const char* kind : {"master", "m", "v", "params", "global", "momentum", "residuals"}) {
            EXPECT_TRUE(same_bits(now.model(kind), model_values(kind, 0))) << kind;
        }
        EXPECT_EQ(now.fields(1).real("total.waited_seconds"), 0.51);
        const bool same = to.inner_steps == 30;
        const long fragments = now.fields().integer("fragments");
        EXPECT_EQ(fragments, long(now.shape.fragments.size()));
        for (long p = 0; p < fragments; p++) {
            const uint64_t tokens = now.fields().count("tokens_at_send." + std::to_string(p));
            EXPECT_EQ(tokens, same ? uint64_t(p) : 1000u);
        }
        EXPECT_FALSE(now.fields().has("tokens_at_send." + std::to_string(fragments)));
        EXPECT_EQ(now.all_notes().find("tokens since the last exchange") == std::string::npos, same);
    }
}

TEST(Reshape, means_in_flight_are_merged_at_once) {
    for (int ranks : {1, 2, 4}) {
        for (const char* optimizer : {"nesterov", "average"}) {
            TemporaryFolder folder;
            MadeUpRun from;
            from.ranks = ranks;
            from.outer_optimizer = optimizer;
            from.fragment_layers = 2;  // fragment 0 is layers 0 and 2, fragment 2 the embedding
            write_run(folder.name(), from, {{2}, {0}});
            const NewWorker now = reshape(folder.name(), from, with_ranks(from, 3));

            Floats local = model_values("master", 0), params = model_values("params", 0);
            Floats global = model_values("global", 0), momentum = model_values("momentum", 0);
            const Floats mean = model_values("mean", 0);
            const bool nesterov = optimizer == std::string("nesterov");
            const float lr = nesterov ? 0.4f : 1.0f, mu = nesterov ? 0.9f : 0.0f;
            for (int fragment : {0, 2}) {
                for_fragment_values(from.shape(0, 0), fragment, [&](size_t i) {
                    momentum[i] = std::fma(mu, momentum[i], mean[i]);
                    global[i] = std::fma(-lr, std::fma(mu, momentum[i], mean[i]), global[i]);
                    local[i] = std::fma(0.25f, local[i], 0.75f * global[i]);
                    params[i] = float(floatX(local[i]));
                });
            }
            EXPECT_TRUE(same_bits(now.model("momentum"), momentum));
            EXPECT_TRUE(same_bits(now.model("global"), global));
            EXPECT_TRUE(same_bits(now.model("master"), local));
            EXPECT_TRUE(same_bits(now.model("params"), params));
            EXPECT_EQ(now.fields().integer("in_flight"), 0);
            EXPECT_FALSE(now.fields().has("in_flight.0.sync"));
            EXPECT_EQ(now.fields().integer("total.syncs"), 7);
            EXPECT_EQ(now.fields().integer("total.next_sync"), 7);
            EXPECT_EQ(now.fields().count("total.outer_bytes_sent"), 5201u);
            EXPECT_EQ(now.fields().count("total.outer_bytes_received"), 6401u);
            EXPECT_TRUE(contains(now.all_notes(), "means were merged at once: 2\n"));
        }
    }
}

// Real workers: after the checkpoint a worker receives at once what is in flight, as at the end of training.
// The reshaped state must be the result of that, and the same on all workers, whatever their overlaps.
TEST(Reshape, a_snapshot_in_mid_exchange_becomes_what_the_run_would_have_ended_with) {
    MadeUpRun from;
    from.workers = 2;
    from.error_feedback = true;
    MadeUpRun slower = from;
    slower.inner_steps = 30;
    TemporaryFolder folder;
    LocalGroup group(2);
    std::map<std::string, Floats> ends[2];
    for (const std::string& error : run_members(2, [&](int worker) {
             LocalComm comm(group, worker);
             RealWorker real(from, worker == 0 ? 10 : 1, comm);
             real.train();
             real.checkpoint_and_finish(folder.name());
             ends[worker] = real.values();
         })) {
        ASSERT_EQ(error, "");
    }
    const char* merged[] = {"merged at once: 2; discarded, because not finite: 1",
                            "merged at once: 0; discarded, because not finite: 1"};
    for (int worker = 0; worker < 2; worker++) {
        const NewWorker now = reshape(folder.name(), from, slower, worker);
        EXPECT_EQ(ends[worker].size(), 5u);
        for (const auto& [section, values] : ends[worker]) {
            EXPECT_TRUE(same_bits(floats_in(*now.states[0], section), values)) << worker << " " << section;
        }
        EXPECT_TRUE(contains(now.all_notes(), merged[worker]));
    }
    const NewWorker alone = reshape(folder.name(), from, with_workers(from, 1));
    EXPECT_TRUE(same_bits(floats_in(*alone.states[0], "master"), ends[1]["global"]));
    EXPECT_TRUE(same_bits(floats_in(*alone.states[0], "momentum"), ends[1]["momentum"]));
}

TEST(Reshape, what_was_in_flight_and_not_finite_is_left_out) {
    TemporaryFolder folder;
    MadeUpRun from;
    from.workers = 2;
    write_run(folder.name(), from, {{1, false}});
    const NewWorker now = reshape(folder.name(), from, with_ranks(from, 2), 1);
    for (const char* kind : {"master", "params", "global", "momentum"}) {
        EXPECT_TRUE(same_bits(now.model(kind), model_values(kind, 1))) << kind;
    }
    EXPECT_TRUE(contains(now.all_notes(), "merged at once: 0; discarded, because not finite: 1"));
}

TEST(Reshape, owners_residuals_stay_only_where_owners_own_what_they_did) {
    MadeUpRun from;
    from.workers = 3;
    from.error_feedback = true;
    from.exchange = "all_to_all";
    MadeUpRun slower = from, cut = from, gathering = from;
    slower.inner_steps = 50;
    cut.fragment_layers = 3;
    gathering.exchange = "all_gather";
    TemporaryFolder folder;
    // A layout in which an owner's parts are all equally long, as write_run() takes them to be.
    const OuterShape shape = from.shape(2, 0);
    long owned = 0;
    for (long n : shard_values(shape.fragments, shape.layout)) {
        owned += payload_layout(Format::fp4, n, 3).values_of(2);
    }
    for (int worker = 0; worker < 3; worker++) {
        const OuterShape one = from.shape(worker, 0);
        auto floats = floats_of(one, {});
        floats["owner_residuals"] = random_values(uint64_t(worker), worker == 2 ? owned : 1, 1.0f);
        write_process(folder.name(), from, one, fields_of(one, {}), floats);
    }
    const NewWorker same = reshape(folder.name(), from, slower, 2);
    EXPECT_TRUE(same_bits(saved_values<float>(*same.states[0], "owner_residuals"),
                          random_values(2, owned, 1.0f)));
    const NewWorker other = reshape(folder.name(), from, cut, 2);
    const Floats residuals = saved_values<float>(*other.states[0], "owner_residuals");
    EXPECT_TRUE(same_bits(residuals, Floats(residuals.size(), 0.0f)));
    EXPECT_TRUE(contains(other.all_notes(), "starting at zero: owners' residuals of error feedback\n"));
    EXPECT_FALSE(reshape(folder.name(), from, gathering, 2).has("owner_residuals"));
    EXPECT_TRUE(contains(reshape(folder.name(), from, with_ranks(from, 2), 2).all_notes(),
                         "not carried over: owners' residuals of error feedback"));
}

TEST(Reshape, a_run_takes_up_and_gives_up_an_outer_optimizer) {
    MadeUpRun plain, streaming;
    plain.outer_optimizer = "none";
    plain.ranks = 2;
    TemporaryFolder folder, other;
    write_run(folder.name(), plain);
    write_run(other.name(), streaming, {{1}});
    for (int workers : {1, 2}) {
        const NewWorker now = reshape(folder.name(), plain, with_workers(streaming, workers), workers - 1);
        EXPECT_TRUE(same_bits(now.model("master"), model_values("master", 0)));
        EXPECT_TRUE(same_bits(now.model("global"), model_values("master", 0)));
        const Floats params = rounded(model_values(workers == 1 ? "params" : "master", 0));
        EXPECT_TRUE(same_bits(now.model("params"), params));
        EXPECT_TRUE(same_bits(now.model("m"), model_values("m", 0)));
        const Floats momentum = now.model("momentum");
        EXPECT_TRUE(same_bits(momentum, Floats(momentum.size(), 0.0f)));
        EXPECT_EQ(now.fields().count("tokens_at_send.0"), 1000u);
        EXPECT_TRUE(contains(now.all_notes(), "starting at zero: outer momentum"));
    }
    const NewWorker before = reshape(other.name(), streaming, with_ranks(streaming, 2));
    const NewWorker now = reshape(other.name(), streaming, plain);
    EXPECT_TRUE(same_bits(now.model("master"), before.model("global")));
    EXPECT_TRUE(same_bits(now.model("params"), rounded(before.model("global"))));
    EXPECT_FALSE(now.has("global") || now.has("momentum") || now.has("residuals"));
    EXPECT_TRUE(contains(now.all_notes(), "not carried over: workers' own parameters and outer momentum"));
}

TEST(Reshape, error_feedback_that_is_new_starts_from_zero) {
    MadeUpRun without, with;
    with.error_feedback = true;
    TemporaryFolder folder, other;
    write_run(folder.name(), without);
    write_run(other.name(), with);
    const NewWorker now = reshape(folder.name(), without, with);
    const Floats residuals = now.model("residuals");
    EXPECT_TRUE(same_bits(residuals, Floats(residuals.size(), 0.0f)));
    EXPECT_TRUE(contains(now.all_notes(), "starting at zero: residuals of error feedback"));
    EXPECT_FALSE(reshape(other.name(), with, without).has("residuals"));
}

// All ranks of a worker have the same window, which may hold any bytes.
TEST(Reshape, all_ranks_of_a_worker_go_on_with_its_window_of_outliers) {
    MadeUpRun from;
    from.workers = 2;
    from.ranks = 2;
    TemporaryFolder folder;
    auto window = [](int worker) { return random_values(uint64_t(70 + worker), 260, 1.0f); };
    for (int worker = 0; worker < 2; worker++) {
        for (int rank = 0; rank < 2; rank++) {
            const OuterShape shape = from.shape(worker, rank);
            auto floats = floats_of(shape, {});
            floats["outliers"] = window(worker);
            write_process(folder.name(), from, shape, fields_of(shape, {}), floats);
        }
    }
    for (const auto& [workers, ranks] : {std::pair{2, 1}, {2, 4}, {1, 2}, {4, 2}}) {
        const MadeUpRun to = with_ranks(with_workers(from, workers), ranks);
        for (int worker = 0; worker < workers; worker++) {
            const NewWorker now = reshape(folder.name(), from, to, worker);
            for (const auto& state : now.states) {
                EXPECT_TRUE(same_bits(floats_in(*state, "outliers"), window(worker % 2))) << worker;
            }
            EXPECT_TRUE(contains(now.all_notes(), " and the last losses and norms"));
        }
    }
}

TEST(Reshape, a_run_of_an_earlier_version_has_no_window_of_outliers) {
    MadeUpRun run;
    TemporaryFolder folder;
    write_run(folder.name(), run);
    const NewWorker now = reshape(folder.name(), run, with_ranks(run, 2));
    EXPECT_FALSE(now.has("outliers"));
    EXPECT_FALSE(contains(now.all_notes(), "losses"));
}

TEST(Reshape, parameters_of_another_type_are_made_from_the_master_weights) {
    MadeUpRun run;
    const OuterShape shape = run.shape(0, 0);
    Fields fields = fields_of(shape, {});
    fields.set("float_bytes", long(6 - sizeof(floatX)));
    TemporaryFolder folder;
    write_process(folder.name(), run, shape, fields, floats_of(shape, {}));
    const NewWorker now = reshape(folder.name(), run, run);
    EXPECT_TRUE(same_bits(now.model("params"), rounded(model_values("master", 0))));
    EXPECT_EQ(now.fields().integer("float_bytes"), long(sizeof(floatX)));
    EXPECT_TRUE(contains(now.all_notes(), "rounded from the master weights"));
}

TEST(Reshape, only_what_a_state_depends_on_makes_it_one_of_another_shape) {
    MadeUpRun run;
    run.workers = 3;
    run.exchange = "auto";
    run.error_feedback = true;
    TemporaryFolder folder;
    write_run(folder.name(), run);
    auto fits = [&](auto change) {
        MadeUpRun other = run;
        change(other);
        return other.takes(run.stored(folder.name()), 1, 0);
    };
    EXPECT_TRUE(fits([](MadeUpRun&) {}));
    EXPECT_TRUE(fits([](MadeUpRun& r) { r.pattern = "sequential"; }));      // of one layer each
    EXPECT_TRUE(fits([](MadeUpRun& r) { r.outer_optimizer = "average"; }));
    EXPECT_TRUE(fits([](MadeUpRun& r) { r.exchange = "all_to_all"; }));
    EXPECT_FALSE(fits([](MadeUpRun& r) { r.exchange = "all_gather"; }));
    EXPECT_FALSE(fits([](MadeUpRun& r) { r.error_feedback = false; }));
    EXPECT_FALSE(fits([](MadeUpRun& r) { r.workers = 2; }));
    EXPECT_FALSE(fits([](MadeUpRun& r) { r.ranks = 2; }));
    EXPECT_FALSE(fits([](MadeUpRun& r) { r.inner_steps = 21; }));
    EXPECT_FALSE(fits([](MadeUpRun& r) { r.fragment_layers = 2; }));
    EXPECT_FALSE(fits([](MadeUpRun& r) { r.outer_optimizer = "none"; }));
}

TEST(Reshape, without_an_outer_optimizer_no_option_of_one_makes_another_shape) {
    MadeUpRun plain;
    plain.outer_optimizer = "none";
    plain.ranks = 2;
    TemporaryFolder folder;
    write_run(folder.name(), plain);
    EXPECT_TRUE(plain.takes(plain.stored(folder.name()), 0, 1));
    MadeUpRun other = plain;
    other.inner_steps = 7;
    other.fragment_layers = 2;
    other.error_feedback = true;
    EXPECT_TRUE(other.takes(plain.stored(folder.name()), 0, 1));
    EXPECT_FALSE(MadeUpRun().takes(plain.stored(folder.name()), 0, 0));
}

TEST(Reshape, options_are_read_as_the_trainer_read_them) {
    MadeUpRun run;
    run.typed_inner_steps = "0x14";
    TemporaryFolder folder;
    write_run(folder.name(), run);
    EXPECT_TRUE(run.takes(run.stored(folder.name()), 0, 0));
    run.typed_inner_steps = "20x";
    write_run(folder.name(), run);
    EXPECT_TRUE(contains(user_error([&] { run.takes(run.stored(folder.name()), 0, 0); }),
                         "has '20x' for the option --inner-steps"));
}

TEST(Reshape, a_run_with_offsets_of_its_own_from_an_earlier_version_resumes_with_nothing_in_flight) {
    MadeUpRun run;
    TemporaryFolder folder;
    run.offsets = "0,4,8,12,17";
    write_run(folder.name(), run, {{1}});
    EXPECT_FALSE(run.takes(run.stored(folder.name()), 0, 0));
    const NewWorker now = reshape(folder.name(), run, run);
    EXPECT_EQ(now.fields().integer("in_flight"), 0);
    EXPECT_TRUE(contains(now.all_notes(), "means were merged at once: 1"));
}

TEST(Reshape, files_that_do_not_belong_together_are_refused_by_name) {
    MadeUpRun from;
    from.workers = 2;
    from.ranks = 2;
    const MadeUpRun to = with_ranks(from, 1);
    TemporaryFolder folder;
    const std::string path = state_path(folder.name(), step, 1);
    write_run(folder.name(), from);
    const std::string good = read_bytes(path);
    auto message = [&](const MadeUpRun& now) {
        const std::string text = user_error([&] { reshape(folder.name(), from, now); });
        EXPECT_TRUE(contains(text, path));
        EXPECT_EQ(text.find('\n'), std::string::npos);
        return text;
    };
    std::filesystem::remove(path);
    EXPECT_TRUE(contains(message(to), "is missing: "));

    std::string damaged = good;
    damaged[good.size() / 2] = char(damaged[good.size() / 2] ^ 1);
    write_bytes(path, damaged);
    EXPECT_TRUE(contains(message(to), "checksum"));

    write_bytes(path, read_bytes(state_path(folder.name(), step, 0)));
    EXPECT_TRUE(contains(message(to), "is the state of worker 0 rank 0 of 2 x 2 processes"));

    // Another run's, with the same name.
    const OuterShape shape = from.shape(0, 1);
    const std::string text = fields_of(shape, {}).text();
    write_state(path, {step, 0, 1, 2, 2, "fedcba9876543210"},
                {{"fields", text.data(), text.size()}, {"options", text.data(), text.size()}});
    EXPECT_TRUE(contains(message(to), "is the state of another run (fedcba9876543210, not " + lineage + ")"));

    // Another worker's outer state, so that global parameters differ.
    auto floats = floats_of(shape, {});
    floats["global"][5] += 1;
    write_process(folder.name(), from, shape, fields_of(shape, {}), floats);
    const std::string differ = user_error([&] { reshape(folder.name(), from, with_workers(to, 1)); });
    EXPECT_TRUE(contains(differ, state_path(folder.name(), step, 3) +
                                     " has different global parameters from worker 0's state"));
}

TEST(Reshape, a_state_of_another_model_is_refused) {
    TemporaryFolder folder;
    MadeUpRun run;
    write_run(folder.name(), run);
    OuterShape other = run.shape(0, 0);
    other.model.layers = 4;
    std::vector<std::string> notes;
    const std::string text = user_error([&] { reshape_state(run.stored(folder.name()), other, run.outer(), notes); });
    EXPECT_TRUE(contains(text, state_path(folder.name(), step, 0) +
                                   " is of another model (layers: 3, not 4)"));
}

TEST(Reshape, a_state_with_impossible_words_is_refused) {
    MadeUpRun run;
    const OuterShape shape = run.shape(0, 0);
    TemporaryFolder folder;
    auto message = [&](auto change) {
        MadeUpRun stored = run;
        Fields fields = fields_of(shape, {{0}});
        change(stored, fields);
        write_process(folder.name(), stored, shape, fields, floats_of(shape, {{0}}));
        const std::string text = user_error([&] { reshape(folder.name(), run, with_ranks(run, 2)); });
        EXPECT_TRUE(contains(text, state_path(folder.name(), step, 0)));
        return text;
    };
    EXPECT_TRUE(contains(message([](MadeUpRun& r, Fields&) { r.inner_steps = 0; }),
                         "has '0' for the option --inner-steps"));
    EXPECT_TRUE(contains(message([](MadeUpRun& r, Fields&) { r.fragment_layers = -1; }),
                         "has '-1' for the option --fragment-layers"));
    EXPECT_TRUE(contains(message([](MadeUpRun&, Fields& f) { f.set("in_flight.0.fragment", 5L); }),
                         "has 5 of 'in_flight.0.fragment', but at most 4"));
    EXPECT_TRUE(contains(message([](MadeUpRun&, Fields& f) { f.set("in_flight", 2L); }), "in_flight.1"));
    for (long count : {-1L, 6L}) {
        EXPECT_TRUE(contains(message([&](MadeUpRun&, Fields& f) { f.set("in_flight", count); }),
                             format("has %ld of 'in_flight', but at most 5", count)));
    }
    EXPECT_TRUE(contains(message([](MadeUpRun&, Fields& f) { f.set("in_flight.0.fragment", 4L); }),
                         "in_flight.0.mean"));
}

}  // namespace test_reshape
