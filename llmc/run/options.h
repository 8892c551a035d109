// Options: the one table. --help, the parser, config.toml and the README's table all come from
// define_options(). The letters are llm.c's wherever the meaning is the same; -h is HellaSwag as there, help
// is --help. llm.c's other flags are in llmc_flags.h.
#pragma once
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "llmc/descriptor.h"
#include "llmc/device.h"
#include "llmc/error.h"
#include "llmc/run/llmc_flags.h"
#include "llmc/text/tokenizer.h"
#include "llmc/run/world.h"

struct Options {
    // model and data
    std::string train_data;
    std::string validation_data;
    std::string model = "d12";
    std::string output;
    std::string tokenizer;
    int layers = 0, heads = 0, channels = 0, vocab_size = 0, max_seq_len = 0;
    int shuffle = 1, overfit = 0;
    uint64_t seed = 1337;
    // the step
    int batch = 4;
    int seq_len = 1024;
    long total_batch = 0;
    long max_steps = -1;
    std::string matmul_precision = "medium";
    int recompute = 0;
    int master_weights = 1;
    // the inner optimizer
    float learning_rate = 3e-4f;
    std::string schedule = "cosine";
    long warmup = 0;
    float final_fraction = 1.0f;
    float weight_decay = 0.0f;
    float beta1 = 0.9f, beta2 = 0.95f, epsilon = 1e-8f;
    float clip = 1.0f;
    float skip_loss_zscore = 0.0f, skip_norm_zscore = 0.0f;  // 0: no update is skipped
    // watching it
    long validate_every = 20;
    long validation_batches = 20;
    long sample_every = 20;
    int sample_length = 64;
    float temperature = 0.8f;
    int top_k = 0;
    float top_p = 1.0f;
    std::string prompt;
    std::string evaluate = "global";
    int hellaswag = 0;
    std::string hellaswag_data;
    // another job than training
    bool generate = false;
    // checkpoints
    long save_every = 0;
    long keep_checkpoints = 0, major_checkpoints = 0;
    int resume = 0;
    // processes
    int workers = 1, ranks = 1, worker = -1;
    std::string store, interface, run_name = "diloco";
    double timeout = 600;
    int restarts = 0;
    std::optional<World> world;  // by llm.c's -pn and -pr
    // Streaming DiLoCo
    long inner_steps = 100;
    int fragment_layers = 3;
    std::string fragment_pattern = "strided";
    long overlap = 1;
    float local_weight = 0.5f;
    std::string outer_optimizer;  // empty: none for one worker, nesterov for more
    float outer_learning_rate = 0.4f;
    float outer_momentum = 0.9f;
    std::string outer_format = "fp4_e2m1";
    std::string outer_exchange = "auto";
    std::string outer_rounding = "nearest";
    bool outer_error_feedback = false;
    std::string outer_weights = "equal";
    std::string outer_transport = runs_on_gpu ? "nccl" : "gloo";
    bool outer_offload = false;
    // workers that come and go
    int min_workers = 0;    // 0: more than half of them
    double grace = 10;      // seconds
    long max_lag = -1;      // steps; -1: tau
    long retain = 4;        // syncs of each fragment
    bool join_moments = false;

    bool print_table = false, print_llmc_table = false;
    std::vector<std::string> notes;  // what the user should know of these options, for the banner

    // Tokens that a worker's ranks take in one micro-step, and micro-steps in a step.
    long micro_batch() const { return long(batch) * seq_len * ranks; }
    long micro_steps() const { return total_batch / micro_batch(); }
    // Whether fragments are exchanged: with an outer optimizer.
    bool streams() const { return outer_optimizer != "none"; }
    // Whether a worker's share of a mean is by its tokens; it may then have -b and -d of its own.
    bool weighs_by_tokens() const { return outer_weights == "tokens"; }
    bool has_own_batch() const { return streams() && weighs_by_tokens(); }
    // Whether workers come and go, and know each other through the log in the store alone.
    bool is_independent() const { return outer_transport == "store"; }

    std::string toml;                                           // all options as resolved, for config.toml
    std::vector<std::pair<std::string, std::string>> resolved;  // the same as (name, value)
};

inline void define_options(CLI::App& app, Options& o) {
    app.allow_config_extras(CLI::config_extras_mode::error);
    app.set_help_flag("--help", "Print this text and leave")->group("General");
    app.set_config("--config", "", "Read options from this TOML file; those on the command line win")
        ->group("General");
    app.add_flag("--generate", o.generate, "Write text with the model of -e instead of training")
        ->configurable(false)
        ->group("General");
    app.add_flag("--options-table", o.print_table, "Print this table in Markdown and leave")
        ->configurable(false)
        ->group("");
    app.add_flag("--llmc-flags-table", o.print_llmc_table, "Print llm.c's flags in Markdown and leave")
        ->configurable(false)
        ->group("");
    app.footer("llm.c's -z, -f and flags of two letters are taken as well: see --llmc-flags-table.\n\n"
               "Exit status: 0 the run is complete; 1 it has failed, and -y 1 continues from its last "
               "checkpoint; 2 a mistake to\ncorrect; 75 other processes did not come within --timeout: try "
               "again; 76 another process has taken this worker's\nplace; 143 stopped by request, and nothing "
               "is lost.");
    // A number that `good` accepts; never NaN or infinity.
    auto number = [](const std::string& words, bool (*good)(double)) {
        return CLI::Validator(
            [=](std::string& text) {
                double value;
                bool fine = CLI::detail::lexical_cast(text, value) && std::isfinite(value) && good(value);
                return fine ? std::string() : "'" + text + "' is not a number of " + words;
            },
            words);
    };
    const CLI::Validator not_negative = number("at least 0", [](double x) { return x >= 0; });
    const CLI::Validator least_minus_one = number("at least -1", [](double x) { return x >= -1; });
    const CLI::Validator positive = number("at least 1", [](double x) { return x >= 1; });
    const CLI::Validator above_zero = number("more than 0", [](double x) { return x > 0; });
    const CLI::Validator fraction = number("0 to 1", [](double x) { return x >= 0 && x <= 1; });
    const CLI::Validator share =
        number("more than 0 and at most 1", [](double x) { return x > 0 && x <= 1; });
    const CLI::Validator below_one =
        number("at least 0 and less than 1", [](double x) { return x >= 0 && x < 1; });
    const CLI::Validator only_one(
        [](std::string& text) {
            return text == "1" ? std::string() : "the outer step needs fp32 weights, so that it is always 1";
        },
        "1");
    const CLI::Range size(0, 1 << 20);  // of a model: beyond that products would not fit

    auto add = [&](const std::string& names, auto& variable, const std::string& what) {
        return app.add_option(names, variable, what)->capture_default_str()->take_last();
    };
    auto group = [&](const std::string& name, std::initializer_list<CLI::Option*> options) {
        for (CLI::Option* option : options) { option->group(name); }
    };

    group(
        "Model and data",
        {
            add("-i,--train-data", o.train_data,
                "Token shards to train on (a pattern such as 'data/x/x_train_*.bin')"),
            add("-j,--val-data", o.validation_data, "Token shards to validate on"),
            add("-e,--model", o.model, "Start from a model file, or from new weights: " + descriptor_names()),
            add("-o,--output", o.output, "Folder for logs and models (none: nothing is written)"),
            add("--tokenizer", o.tokenizer,
                "Tokenizer file (default: tokenizer.bin beside the training data, or gpt2_tokenizer.bin "
                "here)"),
            add("--layers", o.layers, "Number of layers (0: as -e says)")->check(size),
            add("--heads", o.heads, "Number of attention heads (0: as -e says, or channels / 64)")
                ->check(size),
            add("--channels", o.channels, "Width of the model (0: as -e says)")->check(size),
            add("--vocab-size", o.vocab_size,
                "Size of the vocabulary (0: the tokenizer file's, else GPT-2's)")
                ->check(CLI::Range(0, 65536)),
            add("--max-seq-len", o.max_seq_len, "Positions of the model (0: as many as -t; GPT-3's: 2048)")
                ->check(size),
            add("--shuffle", o.shuffle,
                "1: draw the order of shards and samples anew each epoch; 0: as they lie")
                ->check(CLI::IsMember({0, 1})),
            add("-a,--overfit", o.overfit, "1: train on one batch again and again; 0: on all of the data")
                ->check(CLI::IsMember({0, 1})),
            add("--seed", o.seed, "Seed of everything random"),
        });
    group("Training step",
          {
              add("-b,--batch", o.batch, "Sequences in a micro-batch of one process")
                  ->check(CLI::Range(1, 1 << 20)),
              add("-t,--seq-len", o.seq_len, "Tokens in a sequence")->check(CLI::Range(1, 1 << 20)),
              add("-d,--total-batch", o.total_batch,
                  "Tokens per step and worker (0: one micro-batch of each of its ranks)")
                  ->check(least_minus_one),
              add("-x,--max-steps", o.max_steps, "Steps to train for (-1: once through the data)")
                  ->check(least_minus_one),
              add("--matmul-precision", o.matmul_precision,
                  "On the CPU: highest (fp32), high or medium (bf16 where the CPU is fast at it)")
                  ->check(CLI::IsMember({"highest", "high", "medium"})),
              add("-w,--master-weights", o.master_weights, "fp32 master weights: always 1")->check(only_one),
              add("-r,--recompute", o.recompute,
                  "Recompute in the backward: 0 nothing, 1 GELU, 2 GELU and LayerNorm")
                  ->check(CLI::Range(0, 2)),
          });
    group("Inner optimizer (AdamW)",
          {
              add("-l,--lr", o.learning_rate, "Learning rate")->check(not_negative),
              add("-k,--lr-schedule", o.schedule, "cosine, linear, constant or wsd")
                  ->check(CLI::IsMember({"cosine", "linear", "constant", "wsd"})),
              add("-u,--warmup", o.warmup, "Steps of linear warm-up")->check(not_negative),
              add("-q,--final-lr-fraction", o.final_fraction, "Learning rate at the end, as a fraction of -l")
                  ->check(fraction),
              add("-c,--weight-decay", o.weight_decay, "Weight decay of the matrices")->check(not_negative),
              add("--beta1", o.beta1, "AdamW's beta 1")->check(below_one),
              add("--beta2", o.beta2, "AdamW's beta 2")->check(below_one),
              add("--epsilon", o.epsilon, "AdamW's epsilon")->check(above_zero),
              add("--clip", o.clip, "Largest gradient norm (0: no clipping)")->check(not_negative),
              add("--skip-loss-zscore", o.skip_loss_zscore,
                  "-sl: skip an update whose loss is more than N standard deviations above the recent mean "
                  "(0: never)")
                  ->check(not_negative),
              add("--skip-norm-zscore", o.skip_norm_zscore,
                  "-sg: the same by the norm of the gradient (0: never)")
                  ->check(not_negative),
          });
    group(
        "Watching",
        {
            add("-v,--val-every", o.validate_every, "Validate every N steps, and at the end (0: never)")
                ->check(not_negative),
            add("-m,--val-batches", o.validation_batches, "Batches in a validation (0: all)")
                ->check(least_minus_one),
            add("-s,--sample-every", o.sample_every,
                "Sample text every N steps, and at the end (0: never)")
                ->check(not_negative),
            add("-g,--sample-length", o.sample_length, "Tokens in a sample")->check(positive),
            add("--prompt", o.prompt, "What samples begin with (default: the end-of-text token alone)"),
            add("--temperature", o.temperature, "Temperature of the samples (0: always the likeliest token)")
                ->check(not_negative),
            add("--top-k", o.top_k, "Sample from the k likeliest tokens (0: from all)")
                ->check(CLI::Range(0, 1 << 20)),
            add("--top-p", o.top_p,
                "Draw from the likeliest tokens that have this probability together (1: from all)")
                ->check(share),
            add("--eval", o.evaluate, "Which parameters are evaluated and saved: global or local")
                ->check(CLI::IsMember({"global", "local"})),
            add("-h,--hellaswag", o.hellaswag, "1: evaluate HellaSwag whenever the model is validated")
                ->check(CLI::IsMember({0, 1})),
            add("--hellaswag-data", o.hellaswag_data,
                "HellaSwag's file (default: data/hellaswag/hellaswag_val.bin, or the same in dev/)"),
        });
    group(
        "Checkpoints",
        {
            add("-n,--save-every", o.save_every,
                "Write a checkpoint (the model, and all that the run is) every N steps, and at the end "
                "(0: only the model, at the end)")
                ->check(not_negative),
            add("--keep-checkpoints", o.keep_checkpoints, "-nk: keep the N newest of them (0: all)")
                ->check(not_negative),
            add("--major-checkpoints", o.major_checkpoints,
                "-nm: keep the first at or after each multiple of N steps for ever (0: none)")
                ->check(not_negative),
            add("-y,--resume", o.resume,
                "1: resume from the newest whole checkpoint in -o, if there is one; 0: start afresh")
                ->check(CLI::IsMember({0, 1})),
        });
    group(
        "Processes",
        {
            add("--workers", o.workers, "Workers in the run (M): they exchange fragments")
                ->check(CLI::Range(1, 4096)),
            add("--ranks", o.ranks, "Ranks in a worker (R): they share gradients every step")
                ->check(CLI::Range(1, 4096)),
            add("--worker", o.worker, "Start only this worker's ranks here; the others are started elsewhere")
                ->configurable(false),
            add("--store", o.store,
                "Where processes meet: file:DIR, redis://[:PASSWORD@]HOST:PORT or rediss:// (TLS; default: "
                "$DILOCO_STORE)")
                ->configurable(false),
            add("--interface", o.interface,
                "Network interface of the outer exchange (default: the one that leads to the store)")
                ->configurable(false),
            add("--run-name", o.run_name,
                "Name of the run in the store; runs that share a store need different ones"),
            add("--timeout", o.timeout, "Seconds to wait for other processes before giving up")
                ->check(CLI::Range(1.0, 1e6)),
            add("--restart", o.restarts,
                "Restart a worker that has failed, up to N times in a row: ten minutes without a failure "
                "start the count again (--outer-transport store)")
                ->check(CLI::Range(0, 1 << 20)),
        });
    group(
        "Streaming DiLoCo",
        {
            add("-H,--inner-steps", o.inner_steps, "H: every fragment is exchanged once in H steps"),
            add("--fragment-layers", o.fragment_layers,
                "Layers in a fragment (0: everything in one: classic DiLoCo)")
                ->check(not_negative),
            add("--fragment-pattern", o.fragment_pattern,
                "strided (every P-th layer), sequential, or balanced: as many fragments, of about equal "
                "bytes")
                ->check(CLI::IsMember({"strided", "sequential", "balanced"})),
            add("--overlap", o.overlap, "tau: steps from the sending of a fragment to the merge of its mean"),
            add("--local-weight", o.local_weight, "alpha: weight of the local parameters in the merge"),
            add("--outer-optimizer", o.outer_optimizer,
                "none, nesterov or average (default: none for one worker, nesterov for more)"),
            add("--outer-lr", o.outer_learning_rate, "Outer learning rate")->check(not_negative),
            add("--outer-momentum", o.outer_momentum, "Outer momentum")->check(fraction),
            add("--outer-dtype", o.outer_format,
                "Number format on the wire: fp4, fp4_e2m1, fp8_e4m3, fp8_e5m2, bf16 or fp32"),
            add("--outer-exchange", o.outer_exchange,
                "all_gather, or in lock-step with three workers and more all_to_all: fewer bytes, and means "
                "rounded once more (auto: the fewer bytes)")
                ->check(CLI::IsMember({"auto", "all_gather", "all_to_all"})),
            add("--outer-rounding", o.outer_rounding, "nearest, or stochastic: right on average")
                ->check(CLI::IsMember({"nearest", "stochastic"})),
            app.add_flag(
                   "--outer-error-feedback", o.outer_error_feedback,
                   "Add what rounding lost of a fragment when it is sent again (4 bytes a value, on the "
                   "device)")
                ->default_str("false"),
            add("--outer-weights", o.outer_weights,
                "Of workers in the mean: equal, or by the tokens they trained on; then each may have its own "
                "-b and -d")
                ->check(CLI::IsMember({"equal", "tokens"})),
            add("--outer-transport", o.outer_transport,
                "What carries the exchange: gloo, or on GPUs also nccl (their default); or store: workers "
                "may be slow, die and join")
                ->check(CLI::IsMember({"gloo", "nccl", "store"})),
            app.add_flag("--outer-offload", o.outer_offload,
                         "On GPUs: outer parameters and momentum in the host's memory, fetched when needed")
                ->default_str("false"),
        });
    group(
        "Workers that come and go (--outer-transport store)",
        {
            add("--min-workers", o.min_workers,
                "Workers that must have sent before any continues (0: more than half of them)")
                ->check(CLI::Range(0, 4096)),
            add("--grace", o.grace, "Seconds that a sync waits at its due step for workers that are alive")
                ->check(CLI::Range(0.0, 1e6)),
            add("--max-lag", o.max_lag,
                "Steps that a worker may be behind the newest sync before it jumps there (-1: tau)")
                ->check(least_minus_one),
            add("--retain", o.retain,
                "Syncs of each fragment whose payloads are kept for workers that come back")
                ->check(positive),
            app.add_flag("--join-moments", o.join_moments,
                         "A worker that joins takes AdamW's moments from another one too, instead of new "
                         "ones")
                ->default_str("false"),
        });
}

// What an option is where nobody gives it.
inline std::string default_of(const std::string& name) {
    CLI::App app;
    Options options;
    define_options(app, options);
    return app.get_option("--" + name)->get_default_str();
}

// The README's table of options.
inline void print_options_table(const CLI::App& app) {
    for (const std::string& group : app.get_groups()) {
        bool first = true;
        for (const CLI::Option* option : app.get_options()) {
            if (option->get_group() != group || group.empty()) { continue; }
            if (first) { printf("\n**%s**\n\n| option | default | |\n|---|---|---|\n", group.c_str()); }
            first = false;
            std::string names = option->get_name(false, true);
            for (size_t at = 0; (at = names.find(',', at)) != std::string::npos; at += 4) {
                names.replace(at, 1, "` `");
            }
            printf("| `%s` | %s | %s |\n", names.c_str(), option->get_default_str().c_str(),
                   option->get_description().c_str());
        }
    }
}

// Gives an option its value, for config.toml, too.
inline void resolve(CLI::App& app, const std::string& name, const std::string& value) {
    CLI::Option* option = app.get_option(name);
    option->clear();
    option->default_str(value);
}

// Processes that another program has started are ranks of as many workers as there are said to be, so that
// llm.c's command lines under mpirun mean here what they mean there.
inline void resolve_ranks(CLI::App& app, Options& o) {
    if (has_launcher() || app.count("--ranks") > 0) { return; }
    const std::optional<World> world = o.world ? o.world : find_world(0);
    if (!world) { return; }
    const long workers = o.worker >= 0 ? 1 : o.workers;  // that have their processes among these
    if (world->size % workers != 0 || world->size / workers > 4096) { return; }
    o.ranks = int(world->size / workers);
    resolve(app, "--ranks", std::to_string(o.ranks));
}

// The first of these files that is there; empty: none is.
inline std::string first_that_exists(const std::vector<std::string>& paths) {
    for (const std::string& path : paths) {
        if (access(path.c_str(), F_OK) == 0) { return path; }
    }
    return "";
}

// llm.c's data, here or in its own folder.
inline void resolve_data(CLI::App& app, Options& o) {
    const std::string shakespeare = "data/tinyshakespeare/tiny_shakespeare_";
    const std::string found =
        first_that_exists({shakespeare + "train.bin", "dev/" + shakespeare + "train.bin"});
    if (o.train_data.empty() && !found.empty() && !o.generate) {
        o.train_data = found;
        resolve(app, "--train-data", found);
        o.notes.push_back("there is no -i: training on " + found);
        const std::string validation = found.substr(0, found.size() - strlen("train.bin")) + "val.bin";
        if (o.validation_data.empty() && access(validation.c_str(), F_OK) == 0) {
            o.validation_data = validation;
            resolve(app, "--val-data", validation);
        }
    }
    if (o.hellaswag == 0 || !o.hellaswag_data.empty()) { return; }
    const std::string hellaswag = "data/hellaswag/hellaswag_val.bin";
    o.hellaswag_data = first_that_exists({hellaswag, "dev/" + hellaswag});
    resolve(app, "--hellaswag-data", o.hellaswag_data);
}

// Fills in what was left to the program, so that config.toml says what is used.
inline void resolve_defaults(CLI::App& app, Options& o) {
    resolve_ranks(app, o);
    if (o.outer_optimizer.empty()) {
        o.outer_optimizer = o.workers > 1 ? "nesterov" : "none";
        resolve(app, "--outer-optimizer", o.outer_optimizer);
    }
    if (o.is_independent() && o.min_workers == 0) {
        o.min_workers = o.workers / 2 + 1;
        resolve(app, "--min-workers", std::to_string(o.min_workers));
    }
    if (o.is_independent() && o.max_lag < 0) {
        o.max_lag = o.overlap;
        resolve(app, "--max-lag", std::to_string(o.max_lag));
    }
    resolve_data(app, o);
    if (o.total_batch <= 0) {
        o.total_batch = o.micro_batch();
        resolve(app, "--total-batch", std::to_string(o.total_batch));
    }
    if (o.validation_batches < 0) {
        o.validation_batches = 0;
        resolve(app, "--val-batches", "0");
    }
}

// What a message quotes of a file, safe for a terminal.
inline std::string in_one_line(const std::string& text) {
    std::string line = printable(text);
    std::replace_if(
        line.begin(), line.end(), [](char c) { return c == '\n' || c == '\t'; }, ' ');
    return line;
}

// The command line as CLI11 takes it, the last word first.
inline std::vector<std::string> translate(const CLI::App& app, int argc, char** argv, LlmcFlags& flags) {
    const std::vector<std::string> line(argv + std::min(argc, 1), argv + argc);
    std::vector<std::string> words = translate_llmc_flags(line, flags, [&](const std::string& word) {
        const CLI::Option* option = app.get_option_no_throw(word);
        return option && option->get_items_expected_min() > 0;
    });
    std::reverse(words.begin(), words.end());
    return words;
}

inline void apply_llmc_flags(const LlmcFlags& flags, Options& o) {
    o.world = llmc_world(flags);
    o.store = llmc_store(flags, o.store);
    const std::string note = llmc_note(flags);
    if (!note.empty()) { o.notes.push_back(note); }
}

// Throws UserError. Prints and leaves for --help and the tables.
inline void parse(CLI::App& app, std::vector<std::string> words, const Options& o) {
    try {
        app.parse(std::move(words));
    } catch (const CLI::CallForHelp&) {
        fputs(app.help().c_str(), stdout);
        exit(0);
    } catch (const CLI::ConfigError& e) {
        const std::string what = in_one_line(e.what());
        throw UserError("the --config file has what is no option (" + what + "): see --help");
    } catch (const CLI::ParseError& e) { throw UserError(in_one_line(e.what()) + ": see --help"); }
    if (o.print_table) { print_options_table(app); }
    if (o.print_llmc_table) { print_llmc_flags_table(); }
    if (o.print_table || o.print_llmc_table) { exit(0); }
}

// A run's prompt must come back from its config.toml, and what CLI11 quotes does not always.
inline void check_prompt(const Options& o) {
    CLI::App app;
    Options read;
    define_options(app, read);
    std::istringstream toml(o.toml);
    try {
        app.parse_from_stream(toml);
    } catch (const CLI::ParseError&) { read.prompt = ""; }
    if (read.prompt == o.prompt) { return; }
    throw UserError(
        "--prompt has what config.toml cannot hold (a line break, a # or both kinds of quotes): "
        "change it, or write with --generate");
}

// Throws UserError. Prints and leaves for --help and the tables.
inline Options parse_options(int argc, char** argv) {
    Options options;
    CLI::App app("Trains a GPT on GPUs (or CPUs) that do not sit next to each other, with Streaming DiLoCo.",
                 argv[0]);
    define_options(app, options);
    LlmcFlags flags;
    parse(app, translate(app, argc, argv, flags), options);
    apply_llmc_flags(flags, options);
    if (wants_exact_matmuls(flags)) {
        options.matmul_precision = "highest";
        resolve(app, "--matmul-precision", options.matmul_precision);
    }
    resolve_defaults(app, options);
    options.toml = app.config_to_str(true, true);
    if (!options.prompt.empty() && !options.generate) { check_prompt(options); }
    for (const CLI::Option* option : app.get_options()) {
        if (!option->get_configurable()) { continue; }
        options.resolved.emplace_back(option->get_single_name(), option->count() > 0
                                                                     ? option->as<std::string>()
                                                                     : option->get_default_str());
    }
    return options;
}
