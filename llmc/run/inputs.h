// Inputs: everything a process reads before it meets the other processes. Training data, validation data,
// tokenizer, HellaSwag and the shape of the model are opened here and checked against each other, so that a
// user's mistake ends the run before any process waits for another.
#pragma once
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "llmc/checkpoint/model_file.h"
#include "llmc/descriptor.h"
#include "llmc/device.h"
#include "llmc/error.h"
#include "llmc/init.h"
#include "llmc/layout.h"
#include "llmc/run/options.h"
#include "llmc/run/process.h"
#include "llmc/text/byte_pair_encoder.h"
#include "llmc/text/dataloader.h"
#include "llmc/text/eval_set.h"
#include "llmc/text/tokenizer.h"

inline bool is_model_file(const std::string& model) {
    return model.size() > 4 && model.substr(model.size() - 4) == ".bin";
}

// The shape of the model that the options describe. The tokenizer, unless null, gives the vocabulary's size.
inline GptShape resolve_shape(const Options& o, const Tokenizer* tokenizer) {
    if (is_model_file(o.model)) {
        if (o.layers || o.heads || o.channels || o.vocab_size || o.max_seq_len) {
            throw UserError("--layers, --heads, --channels, --vocab-size, --max-seq-len describe a new "
                            "model, but -e " + o.model + " is an existing one: leave them out");
        }
        return read_model_shape(o.model);
    }
    GptShape shape = parse_descriptor(o.model);
    if (o.layers) { shape.layers = o.layers; }
    if (o.channels) {
        shape.channels = o.channels;
        shape.heads = std::max(1, o.channels / 64);
    }
    if (o.heads) { shape.heads = o.heads; }
    if (o.max_seq_len || shape.max_seq_len == 0) {
        shape.max_seq_len = o.max_seq_len ? o.max_seq_len : o.seq_len;
    }
    shape.vocab_size = o.vocab_size ? o.vocab_size : tokenizer ? tokenizer->vocab_size() : 50257;
    shape.padded_vocab_size = (shape.vocab_size + 127) / 128 * 128;
    return shape;
}

inline void check_gpu_shape(const GptShape& shape) {
    if (!runs_on_gpu) { return; }
    const int head = shape.channels / shape.heads;
    if (head != 64 && head != 128) {
        throw UserError(format("heads of %d values: attention on GPUs takes 64 or 128, so change --channels "
                               "or --heads", head));
    }
    if (shape.channels > 8192) {
        throw UserError(format("%d channels: LayerNorm on GPUs takes at most 8192, so lower --channels",
                               shape.channels));
    }
    if (shape.padded_vocab_size % 8 != 0) {
        throw UserError(format("the model pads its vocabulary to %d rows: GPUs take a multiple of 8",
                               shape.padded_vocab_size));
    }
}

inline void check_shape(const GptShape& shape, const Options& o) {
    if (shape.channels % shape.heads != 0) {
        throw UserError(format("%d channels are not divisible by %d heads: change --channels or --heads",
                               shape.channels, shape.heads));
    }
    check_gpu_shape(shape);
    if (o.seq_len > shape.max_seq_len) {
        throw UserError(
            format("-t %d is more than the model's %d positions: lower -t", o.seq_len, shape.max_seq_len));
    }
}

// The tokenizer of --tokenizer; else tokenizer.bin beside `path` (training data, or a model); else llm.c's
// gpt2_tokenizer.bin, unless the model's vocabulary is known to be smaller; else null.
inline std::unique_ptr<Tokenizer> find_tokenizer(const Options& o, const std::string& path) {
    if (!o.tokenizer.empty()) { return std::make_unique<Tokenizer>(o.tokenizer); }
    const std::string beside = std::filesystem::path(path).replace_filename("tokenizer.bin");
    const std::string llmc = "gpt2_tokenizer.bin", file = first_that_exists({beside, llmc});
    if (file.empty()) { return nullptr; }
    auto tokenizer = std::make_unique<Tokenizer>(file);
    const int known = is_model_file(o.model) ? read_model_shape(o.model).vocab_size : o.vocab_size;
    if (file == llmc && known > 0 && tokenizer->vocab_size() > known) { return nullptr; }
    return tokenizer;
}

struct Inputs {
    std::unique_ptr<Tokenizer> tokenizer;  // null if no tokenizer was found
    GptShape shape;
    Layout layout;
    std::unique_ptr<DataLoader> train_loader;
    std::unique_ptr<DataLoader> validation_loader;  // null without -j
    long validation_batches = 0;                    // of one validation
    std::unique_ptr<EvalSet> hellaswag;             // null without -h 1
    std::vector<int> prompt;     // a sample begins with these tokens: an end of text, then --prompt
    long steps;                  // of the whole run
    std::vector<float> initial;  // parameters that training starts from: (layout.size)
};

inline void check_tokenizer(const Tokenizer& tokenizer, const GptShape& shape) {
    if (tokenizer.vocab_size() > shape.vocab_size) {
        throw UserError(format("the tokenizer has %d tokens and the model's vocabulary %d: give the "
                               "tokenizer that the model was trained with (--tokenizer)",
                               tokenizer.vocab_size(), shape.vocab_size));
    }
}

// The tokens of an end of text, followed by those of the prompt.
inline std::vector<int> prompt_tokens(const Tokenizer& tokenizer, const std::string& prompt) {
    std::vector<int> tokens = {tokenizer.end_of_text()};
    if (prompt.empty()) { return tokens; }
    for (int token : BytePairEncoder(tokenizer).encode(prompt)) { tokens.push_back(token); }
    return tokens;
}

// Sets in.steps: -x, or one epoch.   tokens_a_step: of all workers together
inline void set_steps(const Options& o, long tokens_a_step, Inputs& in) {
    in.steps = o.max_steps >= 0 ? o.max_steps : in.train_loader->num_tokens() / tokens_a_step;
    if (o.max_steps < 0 && in.steps == 0) {
        throw UserError(format("the training data has %ld tokens, less than one step takes (%ld): lower -d "
                               "or -b", in.train_loader->num_tokens(), tokens_a_step));
    }
}

// This process's number among those of all workers, of elastic ones too: for data and logs.
inline int number_among_all(const Options& o, const Process& process) {
    return process.worker * o.ranks + process.rank;
}

// Opens and checks all files that the options name. Throws a UserError for any that does not fit. The initial
// parameters, which take memory, are not read yet.
inline Inputs open_files(const Options& o, const Process& process) {
    Inputs in;
    in.tokenizer = find_tokenizer(o, o.train_data);
    in.shape = resolve_shape(o, in.tokenizer.get());
    check_shape(in.shape, o);
    if (in.tokenizer) { check_tokenizer(*in.tokenizer, in.shape); }
    const int sharers = o.has_own_batch() ? 1 : o.workers * o.ranks;  // else share_data() divides the data
    in.train_loader =
        std::make_unique<DataLoader>(o.train_data, o.batch, o.seq_len, number_among_all(o, process) % sharers,
                                     sharers, in.shape.vocab_size, o.seed, o.shuffle != 0);
    if (!o.validation_data.empty()) {
        in.validation_loader =
            std::make_unique<DataLoader>(o.validation_data, o.batch, o.seq_len, process.rank, process.ranks,
                                         in.shape.vocab_size, o.seed, false);
        const long all = in.validation_loader->num_batches();
        in.validation_batches = o.validation_batches > 0 ? std::min(o.validation_batches, all) : all;
    }
    if (o.hellaswag) {
        in.hellaswag = std::make_unique<EvalSet>(o.hellaswag_data, in.shape.vocab_size);
        in.hellaswag->check_fits(o.seq_len);
    }
    if (in.tokenizer) { in.prompt = prompt_tokens(*in.tokenizer, o.prompt); }
    if (!in.tokenizer && !o.prompt.empty()) {
        throw UserError("--prompt needs the tokenizer that the data was made with: give --tokenizer");
    }
    set_steps(o, o.has_own_batch() ? o.total_batch : o.total_batch * o.workers, in);
    in.layout = gpt_layout(in.shape, o.ranks, o.diloco.streams() ? o.diloco.fragment_layers : 0);
    return in;
}

inline Inputs open_inputs(const Options& o, const Process& process) {
    Inputs in = open_files(o, process);
    if (is_model_file(o.model)) {
        in.initial = read_model(o.model, in.layout);
    } else {
        in.initial.resize(size_t(in.layout.size));
        init_parameters(in.initial.data(), in.shape, in.layout, o.seed);
    }
    return in;
}

// What --generate reads: a trained model's shape, its tokenizer and the prompt's tokens.
inline Inputs open_text_inputs(const Options& o) {
    if (!is_model_file(o.model)) {
        throw UserError("--generate writes with a trained model: give its file (-e log/model_00001000.bin)");
    }
    Inputs in;
    in.shape = resolve_shape(o, nullptr);
    in.layout = gpt_layout(in.shape, 1, 0);
    in.tokenizer = find_tokenizer(o, o.train_data.empty() ? o.model : o.train_data);
    if (!in.tokenizer) {
        throw UserError("there is no tokenizer.bin beside " + o.model +
                        ": name the one that the model was trained with (--tokenizer)");
    }
    check_tokenizer(*in.tokenizer, in.shape);
    check_gpu_shape(in.shape);
    in.prompt = prompt_tokens(*in.tokenizer, o.prompt);
    return in;
}

// The ranks of a worker divide its rows among them, so all must have the same shards (workers need not).
inline void check_shards(Process& process, const DataLoader& loader) {
    const std::vector<std::string> hashes = process.gather("shards", loader.shards_hash());
    for (int i = 0; i < process.size(); i++) {
        if (hashes[size_t(i)] == hashes[size_t(i - i % process.ranks)]) { continue; }
        throw UserError(process.member(i) + " has other training data (-i) than rank 0 of its worker: give all "
                        "ranks of a worker the same files");
    }
}

// Divides the data among workers whose batches differ in size (--outer-weights tokens, or elastic workers):
// each process reads sequences that no other process reads, and an epoch is what all of them read together.
inline void share_data(const Options& o, Process& process, Inputs& in) {
    if (o.diloco.is_elastic()) {  // an elastic worker does not know the other workers' batches
        return in.train_loader->take_part(process.worker, o.workers, process.rank, o.ranks);
    }
    long tokens_a_step = 0, first = 0, sequences = 0;
    const std::vector<std::string> all = process.gather("batch", format("%d %ld", o.batch, o.total_batch));
    for (int i = 0; i < process.size(); i++) {
        const int worker = i / o.ranks;
        if (all[size_t(i)] != all[size_t(worker * o.ranks)]) {
            throw UserError(format("the ranks of worker %d differ in -b or -d: give them the same", worker));
        }
        long total_batch = 0;
        sscanf(all[size_t(i)].c_str(), "%*d %ld", &total_batch);
        if (i == process.index()) { first = sequences; }
        sequences += total_batch / o.seq_len / o.ranks;  // in a step: micro-steps may differ in number
        if (i % o.ranks == 0) { tokens_a_step += total_batch; }
    }
    in.train_loader->share(first, sequences, int(o.micro_steps()));
    set_steps(o, tokens_a_step, in);
}
