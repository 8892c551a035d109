// Options: everything that a user can choose, in one table. Modules declare their own options as structs with
// defaults (AdamWOptions, Sampling, DilocoOptions, ...); Options contains those structs, and option_table()
// has a row for each field. The letters are llm.c's wherever the meaning is the same; -h is HellaSwag as
// there, and help is --help. The rest of llm.c's flags are in llmc_flags.h.
#pragma once
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "llmc/optimizers.h"
#include "llmc/descriptor.h"
#include "llmc/device.h"
#include "llmc/error.h"
#include "llmc/outlier.h"
#include "llmc/run/llmc_flags.h"
#include "llmc/run/option_table.h"
#include "llmc/run/world.h"
#include "llmc/schedulers.h"
#include "llmc/text/dataloader.h"
#include "llmc/text/sampler.h"
#include "llmc/text/tokenizer.h"
#include "streaming/elastic/options.h"
#include "streaming/options.h"

struct Options {
    // model and data
    std::string train_data, validation_data, model = "d12", output, tokenizer;
    int layers = 0, heads = 0, channels = 0, vocab_size = 0, max_seq_len = 0;
    int shuffle = 1, overfit = 0;
    uint64_t seed = 1337;
    // the step
    int batch = 4, seq_len = 1024;
    long total_batch = 0, max_steps = -1;
    std::string matmul_precision = "medium";
    int recompute = 0, fuse_gelu = -1;
    // the inner optimizer
    LearningRateSchedule schedule;
    AdamWOptions adamw;
    std::string optimizer = "adamw";
    MuonOptions muon;
    OutlierLimits outliers;
    // evaluation and samples
    long validate_every = 20, validation_batches = 20;
    std::string evaluate = "global";
    int hellaswag = 0;
    std::string hellaswag_data;
    long sample_every = 20;
    int sample_length = 64;
    Sampling sampling;
    std::string prompt;
    // checkpoints
    long save_every = 0, keep_checkpoints = 0, major_checkpoints = 0;
    int resume = 0;
    // processes
    int workers = 1, ranks = 1, worker = -1;
    std::string store, interface, run_name = "diloco";
    double timeout = 600;
    std::optional<World> world;  // by llm.c's -pn and -pr
    DilocoOptions diloco;
    ElasticOptions elastic;

    // what else the command line can ask for
    bool generate = false, print_table = false, print_llmc_table = false;

    // what parsing found out
    std::vector<std::string> notes;  // for the banner: what the user should know about these options
    OptionValues resolved;           // all options that are saved, as the run uses them
    std::string toml;                // the same, as config.toml

    // Tokens that a worker's ranks take in one micro-step, and micro-steps in a step.
    long micro_batch() const { return long(batch) * seq_len * ranks; }
    long micro_steps() const { return total_batch / micro_batch(); }
    // Whether each worker may have its own -b and -d.
    bool has_own_batch() const { return diloco.streams() && diloco.weighs_by_tokens(); }
    bool uses_muon() const { return optimizer == "muon"; }
};

inline const char* const muon_section = "Inner optimizer (Muon)";
inline const char* const elastic_section = "Elastic workers (--outer-transport store)";

// One row per option; rows point into `o`.
inline OptionTable option_table(Options& o) {
    const CLI::Range size(0, 1 << 20);  // beyond that, products of a model's sizes would overflow
    const CLI::Range positive_int(1, 1 << 20);
    const bool saved = true;
    OptionTable table;
    add_section(table, "Model and data", true, {
        {"-i,--train-data", &o.train_data,
         "Token shards to train on (a pattern such as 'data/x/x_train_*.bin')", Scope::worker},
        {"-j,--val-data", &o.validation_data, "Token shards to validate on", Scope::derived},
        {"-e,--model", &o.model, "Start from a model file, or from new weights: " + descriptor_names(),
         Scope::derived},
        {"-o,--output", &o.output, "Folder for logs and models (none: nothing is written)", Scope::derived},
        {"--tokenizer", &o.tokenizer,
         "Tokenizer file (default: tokenizer.bin beside the training data, or ./gpt2_tokenizer.bin)",
         Scope::derived},
        {"--layers", &o.layers, "Number of layers (0: as -e says)", Scope::derived, size},
        {"--heads", &o.heads, "Number of attention heads (0: as -e says, or channels / 64)", Scope::derived,
         size},
        {"--channels", &o.channels, "Width of the model (0: as -e says)", Scope::derived, size},
        {"--vocab-size", &o.vocab_size, "Size of the vocabulary (0: the tokenizer file's, else GPT-2's)",
         Scope::derived, CLI::Range(0, 65536)},
        {"--max-seq-len", &o.max_seq_len, "Positions of the model (0: as many as -t; GPT-3's: 2048)",
         Scope::derived, size},
        {"--shuffle", &o.shuffle, "1: shuffle the sequences anew each epoch; 0: keep their order",
         Scope::run, zero_or_one},
        {"-a,--overfit", &o.overfit, "1: train on one batch again and again; 0: on all of the data",
         Scope::run, zero_or_one},
        {"--seed", &o.seed, "Seed of all random numbers", Scope::run},
    });
    add_section(table, "Training step", true, {
        {"-b,--batch", &o.batch, "Sequences in a micro-batch of one process", Scope::derived,
         CLI::Range(1, runs_on_gpu ? 65535 : 1 << 20)},  // a grid on GPUs has no more in z
        {"-t,--seq-len", &o.seq_len, "Tokens in a sequence", Scope::run, positive_int},
        {"-d,--total-batch", &o.total_batch,
         "Tokens per step and worker (0: one micro-batch of each of its ranks)", Scope::derived,
         at_least_minus_one},
        {"-x,--max-steps", &o.max_steps, "Steps to train for (-1: once through the data)", Scope::derived,
         at_least_minus_one},
        {"--matmul-precision", &o.matmul_precision,
         "highest: fp32; high or medium: bf16 on CPUs fast at it, TF32 on GPUs in fp32 builds", Scope::worker,
         one_of({"highest", "high", "medium"})},
        {"-r,--recompute", &o.recompute, "Recompute in the backward pass: 0 nothing, 1 GELU, 2 GELU and "
         "LayerNorm", Scope::worker, CLI::Range(0, 2)},
        {"--fuse-gelu", &o.fuse_gelu,
         "Fuse GELU into GPU matmuls: 0 no, 1 forward, 2 forward and backward (-1: 1 on Hopper and server "
         "Blackwell, else 0)", Scope::worker, CLI::Range(-1, 2)},
    });
    add_section(table, "Inner optimizer", true, {
        {"-l,--lr", &o.schedule.peak, "Learning rate", Scope::run, at_least_0},
        {"-k,--lr-schedule", &o.schedule.kind, "cosine, linear, constant or wsd", Scope::run,
         one_of({"cosine", "linear", "constant", "wsd"})},
        {"-u,--warmup", &o.schedule.warmup_steps, "Steps of linear warm-up", Scope::run, at_least_0},
        {"-q,--final-lr-fraction", &o.schedule.final_fraction,
         "Learning rate at the end, as a fraction of -l", Scope::run, from_0_to_1},
        {"-c,--weight-decay", &o.adamw.weight_decay, "Weight decay of the matrices", Scope::run, at_least_0},
        {"--beta1", &o.adamw.beta1, "AdamW's beta 1", Scope::run, from_0_below_1},
        {"--beta2", &o.adamw.beta2, "AdamW's beta 2", Scope::run, from_0_below_1},
        {"--epsilon", &o.adamw.epsilon, "AdamW's epsilon", Scope::run, above_0},
        {"--clip", &o.adamw.clip, "Largest gradient norm (0: no clipping)", Scope::run, at_least_0},
        {"--skip-loss-zscore", &o.outliers.loss_zscore,
         "-sl: skip an update whose loss is more than N standard deviations above the recent mean (0: never)",
         Scope::run, at_least_0},
        {"--skip-norm-zscore", &o.outliers.norm_zscore,
         "-sg: the same for the norm of the gradient (0: never)", Scope::run, at_least_0},
    });
    add_section(table, muon_section, o.uses_muon(), {
        {"--optimizer", &o.optimizer,
         "adamw, or muon: the layers' matrices by Muon, the rest by AdamW", Scope::run,
         one_of({"adamw", "muon"})},
        {"--muon-lr", &o.muon.learning_rate,
         "Muon's learning rate, on the schedule of -l; its weight decay is -c", Scope::run, at_least_0},
        {"--muon-momentum", &o.muon.momentum, "Muon's momentum (Nesterov's)", Scope::run, from_0_below_1},
    });
    add_section(table, "Evaluation and samples", true, {
        {"-v,--val-every", &o.validate_every, "Validate every N steps, and at the end (0: never)",
         Scope::lockstep, at_least_0},
        {"-m,--val-batches", &o.validation_batches, "Batches in a validation (0: all)", Scope::lockstep,
         at_least_minus_one},
        {"-s,--sample-every", &o.sample_every, "Sample text every N steps, and at the end (0: never)",
         Scope::lockstep, at_least_0},
        {"-g,--sample-length", &o.sample_length, "Tokens in a sample", Scope::worker, at_least_1},
        {"--prompt", &o.prompt, "Beginning of each sample (default: the end-of-text token alone)",
         Scope::worker},
        {"--temperature", &o.sampling.temperature,
         "Temperature of the samples (0: always the likeliest token)", Scope::worker, at_least_0},
        {"--top-k", &o.sampling.top_k, "Sample from the k likeliest tokens (0: from all)", Scope::worker,
         size},
        {"--top-p", &o.sampling.top_p,
         "Sample from the likeliest tokens that together have this probability (1: from all)", Scope::worker,
         above_0_to_1},
        {"--eval", &o.evaluate, "Which parameters are evaluated and saved: global or local", Scope::lockstep,
         one_of({"global", "local"})},
        {"-h,--hellaswag", &o.hellaswag, "1: evaluate HellaSwag whenever the model is validated",
         Scope::lockstep, zero_or_one},
        {"--hellaswag-data", &o.hellaswag_data,
         "HellaSwag's file (default: data/hellaswag/hellaswag_val.bin, or the same in dev/)", Scope::derived},
    });
    add_section(table, "Checkpoints", true, {
        {"-n,--save-every", &o.save_every,
         "Write a checkpoint (the model and the whole state of the run) every N steps, and at the end (0: "
         "only the model, at the end)", Scope::lockstep, at_least_0},
        {"--keep-checkpoints", &o.keep_checkpoints, "-nk: keep the N newest checkpoints (0: all)",
         Scope::lockstep, at_least_0},
        {"--major-checkpoints", &o.major_checkpoints,
         "-nm: keep for ever the first checkpoint at or after each multiple of N steps (0: none)",
         Scope::lockstep, at_least_0},
        {"-y,--resume", &o.resume,
         "1: resume from the newest whole checkpoint in -o, if there is one; 0: start afresh",
         Scope::lockstep, zero_or_one},
    });
    add_section(table, "Processes", true, {
        {"--workers", &o.workers, "Workers in the run (M): they exchange fragments", Scope::run,
         CLI::Range(1, 4096)},
        {"--ranks", &o.ranks, "Ranks in a worker (R): they share gradients every step", Scope::run,
         CLI::Range(1, 4096)},
        {"--worker", &o.worker, "Start only this worker's ranks here; the others are started elsewhere",
         Scope::worker, anything, !saved},
        {"--store", &o.store,
         "Where processes meet: file:DIR, redis://[:PASSWORD@]HOST:PORT, rediss:// (TLS) or "
         "s3://BUCKET/PREFIX (default: $DILOCO_STORE)", Scope::worker, anything, !saved},
        {"--interface", &o.interface,
         "Network interface of the outer exchange (default: the one that leads to the store)", Scope::worker,
         anything, !saved},
        {"--run-name", &o.run_name,
         "Name of the run in the store; runs that share a store need different names", Scope::worker},
        {"--timeout", &o.timeout,
         "Seconds to wait for other processes or the store before giving up (an elastic worker waits for the "
         "run to begin without a limit)", Scope::worker, CLI::Range(1.0, 1e6)},
    });
    add_section(table, "Streaming DiLoCo", o.diloco.streams(), {
        {"-H,--inner-steps", &o.diloco.inner_steps,
         "H: exchange every fragment once every H steps (0: 100 in runs of 100000 or more steps, else 30, "
         "or a tenth of the steps if fewer, but at least 10; a resumed run keeps its own)", Scope::run},
        {"--fragment-layers", &o.diloco.fragment_layers,
         "Layers in a fragment (0: everything in one: classic DiLoCo)", Scope::run, at_least_0},
        {"--fragment-pattern", &o.diloco.fragment_pattern,
         "strided (of n fragments, each takes every n-th layer), sequential, or balanced: as many, of about "
         "equal size", Scope::run, one_of({"strided", "sequential", "balanced"})},
        {"--overlap", &o.diloco.overlap, "tau: steps from the sending of a fragment to the merge of its mean",
         Scope::worker},
        {"--local-weight", &o.diloco.local_weight, "alpha: weight of the local parameters in the merge",
         Scope::run, from_0_to_1},
        {"--outer-optimizer", &o.diloco.outer_optimizer,
         "none, nesterov or average (rate 1, momentum 0); default: none for one worker, nesterov for more",
         Scope::derived},
        {"--outer-lr", &o.diloco.outer_lr, "Outer learning rate", Scope::run, at_least_0},
        {"--outer-momentum", &o.diloco.outer_momentum, "Outer momentum", Scope::run, from_0_to_1},
        {"--outer-dtype", &o.diloco.outer_format,
         "Number format on the wire: fp4, fp4_e2m1, fp8_e4m3, fp8_e5m2, bf16 or fp32", Scope::run},
        {"--outer-exchange", &o.diloco.outer_exchange,
         "all_gather; all_to_all (only in lock-step; fewer bytes from three workers on, but rounds means "
         "once more); auto: the one that sends less", Scope::run,
         one_of({"auto", "all_gather", "all_to_all"})},
        {"--outer-rounding", &o.diloco.outer_rounding, "nearest, or stochastic (unbiased)", Scope::run,
         one_of({"nearest", "stochastic"})},
        {"--outer-error-feedback", &o.diloco.outer_error_feedback,
         "Add a fragment's rounding error the next time it is sent (4 bytes a value, on the device)",
         Scope::run},
        {"--outer-weights", &o.diloco.outer_weights,
         "Weights of workers in the mean: equal, or tokens (how many each trained on; each may then have "
         "its own -b and -d)", Scope::run, one_of({"equal", "tokens"})},
        {"--outer-transport", &o.diloco.transport,
         "What carries the exchange: tcp (formerly gloo); nccl (GPUs only, their default); or store, which "
         "makes workers elastic: they may be slow, die or join", Scope::run,
         one_of({"tcp", "nccl", "store", "gloo"})},
        {"--outer-offload", &o.diloco.offload,
         "On GPUs: keep outer parameters and momentum in host memory; fetch them when needed", Scope::worker},
    });
    add_section(table, elastic_section, o.diloco.is_elastic(), {
        {"--restart", &o.elastic.restarts,
         "Restart a worker that has failed, up to N times in a row: ten minutes without a failure reset the "
         "count", Scope::worker, size},
        {"--min-workers", &o.elastic.min_workers,
         "Workers that must have sent before any continues (0: more than half, or one of two)", Scope::run,
         CLI::Range(0, 4096)},
        {"--grace", &o.elastic.grace, "Seconds that a sync waits at its due step for live workers",
         Scope::worker, CLI::Range(0.0, 1e6)},
        {"--max-lag", &o.elastic.max_lag,
         "Steps that a worker may lag behind the newest sync before it jumps there (-1: tau)", Scope::worker,
         at_least_minus_one},
        {"--retain", &o.elastic.retain,
         "Syncs of each fragment whose payloads are kept for workers that come back", Scope::worker,
         at_least_1},
        {"--join-moments", &o.elastic.join_moments,
         "A worker that joins takes another worker's moments, too, instead of starting with new ones",
         Scope::run},
    });
    return table;
}

// config.toml. Files of earlier versions may set options that no longer exist; they are still read if the
// value is what every run does now.
class ConfigFile : public CLI::ConfigTOML {
public:
    std::vector<CLI::ConfigItem> from_config(std::istream& in) const override {
        std::vector<CLI::ConfigItem> items = CLI::ConfigTOML::from_config(in);
        auto sets_what_is_fixed = [](const CLI::ConfigItem& item) {
            return (item.name == "master-weights" && item.inputs == std::vector<std::string>{"1"}) ||
                   (item.name == "fragment-offsets" && item.inputs == std::vector<std::string>{""});
        };
        items.erase(std::remove_if(items.begin(), items.end(), sets_what_is_fixed), items.end());
        return items;
    }
};

// The options that are not part of the table: they choose what the program does, and no run keeps them.
inline void add_other_options(CLI::App& app, Options& o) {
    app.allow_config_extras(CLI::config_extras_mode::error);
    app.config_formatter(std::make_shared<ConfigFile>());
    app.set_help_flag("--help", "Print this text and exit")->group("General");
    app.set_config("--config", "", "Read options from this TOML file; those on the command line win")
        ->group("General");
    auto add = [&](const char* name, bool& field, const char* help, const char* group) {
        app.add_flag(name, field, help)->configurable(false)->group(group);
    };
    add("--generate", o.generate, "Write text with the model of -e instead of training", "General");
    add("--options-table", o.print_table, "Print the table of options in Markdown and exit", "");
    add("--llmc-flags-table", o.print_llmc_table, "Print llm.c's flags in Markdown and exit", "");
    app.footer("If an option is given several times, the last value counts.\n"
               "llm.c's -z, -f and two-letter flags are accepted as well: see --llmc-flags-table.\n\n"
               "Exit status: 0 the run is complete; 1 it has failed, and -y 1 continues from its last "
               "checkpoint; 2 you must act:\na mistake, a last checkpoint that a disk refuses, a loss that stays "
               "infinite; 75 try again: others did not join,\nthe store is unreachable, an earlier start "
               "still runs, or no worker can give a snapshot; 76 another process has\ntaken this worker's "
               "place; 143 stopped by request, with a checkpoint (without -o, or at a second signal, there\n"
               "is none).");
}

// An option's default value.   name: without dashes
inline std::string default_of(const std::string& name) {
    Options usual;
    CLI::App app;
    add_options(app, option_table(usual));
    return app.get_option("--" + name)->get_default_str();
}

// The options of a section that were changed from their defaults.
inline std::vector<std::string> changed_in_section(Options o, const std::string& section) {
    Options usual;
    const OptionTable table = option_table(o), defaults = option_table(usual);
    std::vector<std::string> names;
    for (size_t i = 0; i < table.size(); i++) {
        const bool is_changed = value_of(table[i]) != value_of(defaults[i]);
        if (table[i].section == section && is_changed) { names.push_back(table[i].name()); }
    }
    return names;
}

// -----------------------------------------------------------------------------------------------------------
// From the command line to Options

// Processes that another program has started are divided among the workers: llm.c's command lines under
// mpirun, which name no ranks, then mean what they mean there.
inline void resolve_ranks(const CLI::App& app, Options& o) {
    if (has_launcher() || app.count("--ranks") > 0) { return; }
    const std::optional<World> world = o.world ? o.world : find_world(0);
    if (!world) { return; }
    const long workers = o.worker >= 0 ? 1 : o.workers;  // whose processes are among these
    if (world->size % workers != 0 || world->size / workers > 4096) { return; }
    o.ranks = int(world->size / workers);
}

// The first of these files that exists; empty if none does.
inline std::string first_that_exists(const std::vector<std::string>& paths) {
    for (const std::string& path : paths) {
        if (access(path.c_str(), F_OK) == 0) { return path; }
    }
    return "";
}

// Without -i and --hellaswag-data: llm.c's data, in data/ or in llm.c's own dev/data/.
inline void resolve_data(Options& o) {
    const std::string shakespeare = "data/tinyshakespeare/tiny_shakespeare_";
    const std::string found =
        first_that_exists({shakespeare + "train.bin", "dev/" + shakespeare + "train.bin"});
    if (o.train_data.empty() && !found.empty() && !o.generate) {
        o.train_data = found;
        o.notes.push_back("-i is not given: training on " + found);
        const std::string validation = found.substr(0, found.size() - strlen("train.bin")) + "val.bin";
        if (o.validation_data.empty()) { o.validation_data = first_that_exists({validation}); }
    }
    if (o.hellaswag && o.hellaswag_data.empty()) {
        const std::string hellaswag = "data/hellaswag/hellaswag_val.bin";
        o.hellaswag_data = first_that_exists({hellaswag, "dev/" + hellaswag});
    }
}

// The options of a config.toml; the defaults if it cannot be read.
inline Options read_config(std::istream& toml) {
    CLI::App app;
    Options read;
    add_options(app, option_table(read));
    try {
        app.parse_from_stream(toml);
    } catch (const CLI::ParseError&) { return Options(); }
    return read;
}

// H if -H is not given: the paper's 100 if the run then has 1000 outer steps, since a run with few of them
// ends at a higher loss (report.h); else the paper's 30, or a tenth of the steps if that is less and known,
// but at least 10.
inline long usual_inner_steps(long steps) {
    return steps >= 100'000 ? 100 : std::clamp(steps / 10, 10L, 30L);
}

// A resumed run keeps its H. A new one's depends only on what all workers agree on.
inline void resolve_inner_steps(Options& o) {
    long& H = o.diloco.inner_steps;
    if (H != 0) { return; }
    std::string why;
    for (const std::string& folder : {std::string(), format("/worker_%d", std::max(o.worker, 0))}) {
        const std::string path = o.resume && !o.output.empty() ? o.output + folder + "/config.toml" : "";
        std::ifstream config(path);
        const DilocoOptions before = read_config(config).diloco;
        if (H == 0 && before.streams()) { H = before.inner_steps, why = ", as in " + path; }
    }
    if (H < 1) {
        const bool counts = o.max_steps < 0 && o.diloco.streams() && !o.train_data.empty() &&
                            !o.diloco.weighs_by_tokens();  // workers may have their own batches then
        const long steps =
            counts ? DataLoader::tokens_in(o.train_data) / (o.total_batch * o.workers) : o.max_steps;
        H = !o.diloco.streams() ? 100 : steps < 0 ? 30 : usual_inner_steps(steps);
        why = steps < 0 ? "" : format(" for %ld steps (100 from 100000 steps on)", steps);
    }
    if (o.diloco.streams()) { o.notes.push_back(format("-H is not given: H = %ld", H) + why); }
}

// Fills in what the user left to the program.
inline void resolve_defaults(const CLI::App& app, Options& o) {
    resolve_ranks(app, o);
    if (o.diloco.transport == "gloo") { o.diloco.transport = "tcp"; }
    if (o.diloco.outer_optimizer.empty()) { o.diloco.outer_optimizer = o.workers > 1 ? "nesterov" : "none"; }
    if (o.diloco.is_elastic() && o.elastic.min_workers == 0) {
        o.elastic.least_to_begin = o.workers / 2 + 1;
        o.elastic.min_workers = o.workers == 2 ? 1 : o.workers / 2 + 1;
    }
    if (o.diloco.is_elastic() && o.elastic.max_lag < 0) { o.elastic.max_lag = o.diloco.overlap; }
    o.diloco.seed = o.seed;
    resolve_data(o);
    if (o.total_batch <= 0) { o.total_batch = o.micro_batch(); }
    resolve_inner_steps(o);
    o.validation_batches = std::max(o.validation_batches, 0L);
    if (o.save_every <= 0 && (o.keep_checkpoints > 0 || o.major_checkpoints > 0)) {
        o.notes.push_back("-nk and -nm do nothing without -n: no checkpoints are saved on the way");
    }
}

inline void apply_llmc_flags(const LlmcFlags& flags, Options& o) {
    o.world = llmc_world(flags);
    o.store = llmc_store(flags, o.store);
    if (wants_exact_matmuls(flags)) { o.matmul_precision = "highest"; }
    const std::string note = llmc_note(flags);
    if (!note.empty()) { o.notes.push_back(note); }
}

// Text of a file as a message may quote it: one line, safe for a terminal.
inline std::string in_one_line(const std::string& text) {
    std::string line = printable(text);
    std::replace_if(
        line.begin(), line.end(), [](char c) { return c == '\n' || c == '\t'; }, ' ');
    return line;
}

// The command line as CLI11 takes it: the last word first.
inline std::vector<std::string> translate(const CLI::App& app, int argc, char** argv, LlmcFlags& flags) {
    const std::vector<std::string> line(argv + std::min(argc, 1), argv + argc);
    std::vector<std::string> words = translate_llmc_flags(line, flags, [&](const std::string& word) {
        const CLI::Option* option = app.get_option_no_throw(word);
        return option && option->get_items_expected_min() > 0;
    });
    std::reverse(words.begin(), words.end());
    return words;
}

// Throws a UserError. Prints and exits for --help and the tables.
inline void parse(CLI::App& app, std::vector<std::string> words, const Options& o) {
    try {
        app.parse(std::move(words));
    } catch (const CLI::CallForHelp&) {
        fputs(app.help().c_str(), stdout);
        exit(0);
    } catch (const CLI::ConfigError& e) {
        const std::string what = in_one_line(e.what());
        throw UserError("the --config file names an option that does not exist (" + what + "): see --help");
    } catch (const CLI::ParseError& e) { throw UserError(in_one_line(e.what()) + ": see --help"); }
    if (o.print_table) { print_options_table(app); }
    if (o.print_llmc_table) { print_llmc_flags_table(); }
    if (o.print_table || o.print_llmc_table) { exit(0); }
}

// Options that were given more than once with different values, for the banner.
inline std::vector<std::string> notes_on_repetitions(const CLI::App& app, const OptionTable& table) {
    std::vector<std::string> notes;
    for (const OptionRow& row : table) {
        const std::vector<std::string> values = app.get_option(row.name())->results();
        const std::set<std::string> different(values.begin(), values.end());
        if (different.size() < 2 || !row.is_saved) { continue; }  // --store may have a password
        notes.push_back(row.name() + " was given " + list_in_words(values) + ": the last one counts");
    }
    return notes;
}

// A run's prompt must survive in its config.toml, where CLI11 does not quote everything correctly.
inline void check_prompt(const Options& o) {
    std::istringstream toml(o.toml);
    if (read_config(toml).prompt == o.prompt) { return; }
    throw UserError("--prompt contains what config.toml cannot hold (a line break, a # or both kinds of "
                    "quotes): change it, or write with --generate");
}

// Throws a UserError. Prints and exits for --help and the tables.
inline Options parse_options(int argc, char** argv) {
    Options o;
    const OptionTable table = option_table(o);
    CLI::App app("Trains a GPT on GPUs (or CPUs) that do not sit next to each other, with Streaming DiLoCo.",
                 argv[0]);
    add_other_options(app, o);
    add_options(app, table);
    LlmcFlags flags;
    parse(app, translate(app, argc, argv, flags), o);
    o.notes = notes_on_repetitions(app, table);
    const OptionValues parsed = values_of(table);
    apply_llmc_flags(flags, o);
    resolve_defaults(app, o);
    adopt_changes(app, table, parsed);
    o.toml = app.config_to_str(true, true);
    o.resolved = saved_values(app, table);
    if (!o.prompt.empty() && !o.generate) { check_prompt(o); }
    return o;
}
