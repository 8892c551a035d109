// diloco.c: trains a GPT-2 on processes that do not sit next to each other.
//
//   worker   R ranks with a fast link: they share gradients every step, and each keeps 1/R of the optimizer
//            state
//   run      M workers with slow links: they exchange one fragment of the model at a time, while training
//            goes on (Streaming DiLoCo, arXiv 2501.18512; all of it is in streaming/)
//
// From top to bottom: the model; forward and backward; the update inside a worker; evaluation and sampling; then
// what tests leave out: from options to a run; what a run keeps and reports; checkpoints; the step and the loop.
// The layers are llmc/cpu/ or llmc/cuda/: same names, same signatures, and this file does not know which.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "llmc/run/accelerator.h"
#include "llmc/buffer.h"
#include "llmc/text/byte_pair_encoder.h"
#include "llmc/checkpoint/model_file.h"
#include "llmc/checkpoint/checkpointer.h"
#include "llmc/clock.h"
#include "llmc/comm.h"
#include "llmc/run/comms.h"
#include "llmc/text/dataloader.h"
#include "llmc/descriptor.h"
#include "llmc/error.h"
#include "llmc/text/eval_batches.h"
#include "llmc/text/eval_set.h"
#include "llmc/floatx.h"
#include "llmc/run/inputs.h"
#include "llmc/run/launch.h"
#include "llmc/layers.h"
#include "llmc/layout.h"
#include "llmc/run/logger.h"
#include "llmc/matmul_precision.h"
#include "llmc/mfu.h"
#include "llmc/run/fingerprint.h"
#include "llmc/run/option_checks.h"
#include "llmc/run/options.h"
#include "llmc/run/report.h"
#include "llmc/outlier.h"
#include "llmc/random.h"
#include "llmc/checkpoint/resume.h"
#include "llmc/text/sampler.h"
#include "llmc/schedulers.h"
#include "llmc/checkpoint/state_file.h"
#include "llmc/checkpoint/training_state.h"
#include "llmc/run/stop.h"
#include "llmc/run/store.h"
#include "llmc/stream.h"
#include "llmc/text/text_printer.h"
#include "llmc/text/tokenizer.h"
#include "llmc/upload.h"
#include "llmc/run/watchdog.h"
#include "streaming/diloco.h"
#include "streaming/elastic/log_stores.h"
#include "streaming/elastic/elastic_diloco.h"
#include "streaming/outer_loop.h"
#include "llmc/checkpoint/reshape.h"
#include "streaming/reshape_outer.h"
#include "streaming/snapshot.h"

// -----------------------------------------------------------------------------------------------------------
// The model

// The tensors of one transformer layer: pointers into a flat buffer of parameters (floatX) or of gradients.
// Gradients are fp32, so that sums over micro-steps and ranks do not round to bf16.
template <class T>
struct LayerTensors {
    T *qkvw, *attprojw, *fcw, *fcprojw;                              // (3C,C) (C,C) (4C,C) (C,4C)
    T *ln1w, *ln1b, *qkvb, *attprojb, *ln2w, *ln2b, *fcb, *fcprojb;  // (C) but qkvb (3C), fcb (4C)
};

template <class T>
struct EmbeddingTensors {
    T *wte, *wpe;    // (Vp,C) (maxT,C)
    T *lnfw, *lnfb;  // (C) (C)
};

template <class T>
LayerTensors<T> layer_tensors(const Layout& layout, T* flat, int layer) {
    auto at = [&](const char* name) {
        return flat + layout.tensor("h." + std::to_string(layer) + "." + name).offset;
    };
    return {at("qkvw"), at("attprojw"), at("fcw"),  at("fcprojw"), at("ln1w"), at("ln1b"),
            at("qkvb"), at("attprojb"), at("ln2w"), at("ln2b"),    at("fcb"),  at("fcprojb")};
}

template <class T>
EmbeddingTensors<T> embedding_tensors(const Layout& layout, T* flat) {
    auto at = [&](const char* name) { return flat + layout.tensor(name).offset; };
    return {at("wte"), at("wpe"), at("lnfw"), at("lnfb")};
}

// Activations of one layer that the forward pass keeps for the backward pass.   N = B * T
struct LayerActivations {
    Buffer<floatX> ln1, qkv, attention, residual2, ln2, fch, fch_gelu,
        residual3;                                         // (N,C) but qkv (N,3C), fch* (N,4C)
    Buffer<float> ln1_mean, ln1_rstd, ln2_mean, ln2_rstd;  // (N)
    Buffer<float> lse;                                     // (B,NH,T)
};

struct Activations {
    Buffer<floatX> encoded, lnf;  // (N,C)
    Buffer<float> lnf_mean, lnf_rstd, losses;
    Buffer<floatX> logits;  // (N,Vp); becomes dlogits
    std::vector<LayerActivations> layers;
    Buffer<floatX> projected;                          // (N,C): output of a projection before its residual
    Buffer<floatX> ln_recomputed, gelu_recomputed;     // (N,C) (N,4C): with recompute
    Buffer<floatX> dresidual, dprojected, dqkv, dfch;  // (N,C) (N,C) (N,3C) (N,4C)
};

struct Model {
    GptShape shape;
    Layout layout;
    int recompute = 0;
    device::Matmul matmul;
    Buffer<floatX> params;  // flat
    Buffer<float> grads;    // flat
    std::vector<LayerTensors<floatX>> weights;
    std::vector<LayerTensors<float>> gradients;
    EmbeddingTensors<floatX> embedding;
    EmbeddingTensors<float> dembedding;
    std::vector<Event> gathered;  // per block: all of its parameters have arrived
    Activations acts;
    Buffer<int> inputs, targets;  // (N)
    Upload upload;

    Model(const GptShape& shape, const Layout& layout, int recompute, MatmulPrecision precision)
        : shape(shape),
          layout(layout),
          recompute(recompute),
          matmul(precision),
          params(layout.size),
          grads(layout.size),
          embedding(embedding_tensors(layout, params.data())),
          dembedding(embedding_tensors(layout, grads.data())),
          gathered(layout.blocks.size()) {
        for (int l = 0; l < shape.layers; l++) {
            weights.push_back(layer_tensors(layout, params.data(), l));
            gradients.push_back(layer_tensors(layout, grads.data(), l));
        }
    }
};

inline void allocate_activations(Model& model, int B, int T) {
    const GptShape& shape = model.shape;
    const long N = long(B) * T, C = shape.channels;
    Activations& a = model.acts;
    a.encoded = Buffer<floatX>(N * C);
    a.lnf = Buffer<floatX>(N * C);
    a.lnf_mean = Buffer<float>(N);
    a.lnf_rstd = Buffer<float>(N);
    a.losses = Buffer<float>(N);
    a.logits = Buffer<floatX>(N * shape.padded_vocab_size);
    a.projected = Buffer<floatX>(N * C);
    a.dresidual = Buffer<floatX>(N * C);
    a.dprojected = Buffer<floatX>(N * C);
    a.dqkv = Buffer<floatX>(N * 3 * C);
    a.dfch = Buffer<floatX>(N * 4 * C);
    if (model.recompute >= 1) { a.gelu_recomputed = Buffer<floatX>(N * 4 * C); }
    if (model.recompute >= 2) { a.ln_recomputed = Buffer<floatX>(N * C); }
    for (int l = 0; l < shape.layers; l++) {
        LayerActivations layer;
        if (model.recompute < 2) {
            layer.ln1 = Buffer<floatX>(N * C);
            layer.ln2 = Buffer<floatX>(N * C);
        }
        if (model.recompute < 1) { layer.fch_gelu = Buffer<floatX>(N * 4 * C); }
        for (Buffer<floatX>* b : {&layer.attention, &layer.residual2, &layer.residual3}) {
            *b = Buffer<floatX>(N * C);
        }
        layer.qkv = Buffer<floatX>(N * 3 * C);
        layer.fch = Buffer<floatX>(N * 4 * C);
        for (Buffer<float>* b : {&layer.ln1_mean, &layer.ln1_rstd, &layer.ln2_mean, &layer.ln2_rstd}) {
            *b = Buffer<float>(N);
        }
        layer.lse = Buffer<float>(N * shape.heads);
        a.layers.push_back(std::move(layer));
    }
    model.inputs = Buffer<int>(N);
    model.targets = Buffer<int>(N);
    model.upload = Upload(N);
}

// GPT-2's initial parameters: weights N(0, 0.02), projections into the residual stream divided by sqrt(2 L),
// LayerNorm weights 1, biases 0. Every machine computes the same bits.   flat: (layout.size), all written
inline void init_parameters(float* flat, const GptShape& shape, const Layout& layout, uint64_t seed) {
    const float residual_scale = 1.0f / sqrtf(2.0f * float(std::max(1, shape.layers)));
    std::fill(flat, flat + layout.size, 0.0f);
    for (const Tensor& tensor : layout.tensors) {
        const std::string& name = tensor.name;
        const std::string last = name.substr(name.rfind('.') + 1);
        if (last == "ln1w" || last == "ln2w" || last == "lnfw") {
            std::fill(flat + tensor.offset, flat + tensor.offset + tensor.count(), 1.0f);
        }
        if (!tensor.decay) { continue; }
        const float std = last == "attprojw" || last == "fcprojw" ? 0.02f * residual_scale : 0.02f;
        const long count = last == "wte" ? long(shape.vocab_size) * shape.channels : tensor.count();
        const long logical = layout.logical_index(tensor.offset);
        #pragma omp parallel for
        for (long i = 0; i < count; i++) {
            flat[tensor.offset + i] =
                std * standard_normal(seed, RandomUse::parameters, uint64_t(logical + i));
        }
    }
}

// -----------------------------------------------------------------------------------------------------------
// Forward and backward

// Outputs of LayerNorm and GELU: in a buffer per layer, or, with --recompute, in one buffer that all layers
// share and that the backward pass computes again.
inline floatX* ln1_of(Model& model, int l) {
    return model.recompute < 2 ? model.acts.layers[l].ln1 : model.acts.ln_recomputed;
}
inline floatX* ln2_of(Model& model, int l) {
    return model.recompute < 2 ? model.acts.layers[l].ln2 : model.acts.ln_recomputed;
}
inline floatX* gelu_of(Model& model, int l) {
    return model.recompute < 1 ? model.acts.layers[l].fch_gelu : model.acts.gelu_recomputed;
}

// Computes activations and logits. Parameters may still be arriving from other ranks: each block is awaited
// just before its first use.   inputs: (B,T), on the host
inline void forward(Model& model, const int* inputs, int B, int T, Stream& main) {
    const Phase phase("forward");
    const GptShape& shape = model.shape;
    const int C = shape.channels, NH = shape.heads, L = shape.layers, N = B * T;
    Activations& a = model.acts;
    model.upload.copy(model.inputs, inputs, N, main);
    for (size_t b = size_t(L); b < model.gathered.size(); b++) { main.wait(model.gathered[b]); }
    device::encoder_forward(a.encoded, model.inputs, model.embedding.wte, model.embedding.wpe, B, T, C, main);

    main.wait(model.gathered[0]);
    device::layernorm_forward(ln1_of(model, 0), a.layers[0].ln1_mean, a.layers[0].ln1_rstd, a.encoded,
                              model.weights[0].ln1w, model.weights[0].ln1b, N, C, main);

    floatX* residual = a.encoded;
    for (int l = 0; l < L; l++) {
        const LayerTensors<floatX>& w = model.weights[l];
        LayerActivations& x = a.layers[l];
        floatX *ln1 = ln1_of(model, l), *ln2 = ln2_of(model, l), *fch_gelu = gelu_of(model, l);
        device::matmul_forward(model.matmul, x.qkv, ln1, w.qkvw, w.qkvb, N, C, 3 * C, main);
        device::attention_forward(x.attention, x.lse, x.qkv, B, T, C, NH, main);
        device::matmul_forward(model.matmul, a.projected, x.attention, w.attprojw, w.attprojb, N, C, C, main);
        device::fused_residual_forward(x.residual2, ln2, x.ln2_mean, x.ln2_rstd, residual, a.projected,
                                       w.ln2w, w.ln2b, N, C, main);
        device::matmul_forward(model.matmul, fch_gelu, ln2, w.fcw, w.fcb, N, C, 4 * C, main, x.fch);
        device::matmul_forward(model.matmul, a.projected, fch_gelu, w.fcprojw, w.fcprojb, N, 4 * C, C, main);
        if (l + 1 < L) {  // the second residual, fused with the next layer's first LayerNorm
            main.wait(model.gathered[l + 1]);
            LayerActivations& next = a.layers[l + 1];
            device::fused_residual_forward(x.residual3, ln1_of(model, l + 1), next.ln1_mean, next.ln1_rstd,
                                           x.residual2, a.projected, model.weights[l + 1].ln1w,
                                           model.weights[l + 1].ln1b, N, C, main);
        } else {
            device::fused_residual_forward(x.residual3, a.lnf, a.lnf_mean, a.lnf_rstd, x.residual2,
                                           a.projected, model.embedding.lnfw, model.embedding.lnfb, N, C,
                                           main);
        }
        residual = x.residual3;
    }
    device::matmul_forward(model.matmul, a.logits, a.lnf, model.embedding.wte, static_cast<floatX*>(nullptr),
                           N, C, shape.padded_vocab_size, main);
}

// Cross entropy of the last forward pass: adds scale * (sum over B * T tokens) to *loss. If `with_gradient`,
// the logits become their gradients, each token's times dloss.   targets: (B,T), on the host
inline void classify(Model& model, const int* targets, int B, int T, float* loss, float scale, float dloss,
                     bool with_gradient, Stream& main) {
    Activations& a = model.acts;
    model.upload.copy(model.targets, targets, long(B) * T, main);
    device::fused_classifier(a.logits, a.losses, dloss, model.targets, B * T, model.shape.vocab_size,
                             model.shape.padded_vocab_size, with_gradient, main);
    device::add_scaled_sum(loss, a.losses, long(B) * T, scale, main);
}

// Adds the gradients of the last forward() and classify() to model.grads. Calls block_done(b) as soon as
// block b's gradients are final.
inline void backward(Model& model, int B, int T, Stream& main, const std::function<void(int)>& block_done) {
    const Phase phase("backward");
    const GptShape& shape = model.shape;
    const int C = shape.channels, NH = shape.heads, L = shape.layers, N = B * T, Vp = shape.padded_vocab_size;
    Activations& a = model.acts;
    float* none = nullptr;
    device::matmul_backward(model.matmul, a.dprojected, model.dembedding.wte, none, a.logits, a.lnf,
                            model.embedding.wte, N, C, Vp, main);
    device::set_zero(a.dresidual.data(), long(N) * C, main);
    device::layernorm_backward(a.dresidual, model.dembedding.lnfw, model.dembedding.lnfb, a.dprojected,
                               a.layers[L - 1].residual3, model.embedding.lnfw, a.lnf_mean, a.lnf_rstd, N, C,
                               main);
    for (int l = L - 1; l >= 0; l--) {
        const LayerTensors<floatX>& w = model.weights[l];
        const LayerTensors<float>& dw = model.gradients[l];
        LayerActivations& x = a.layers[l];
        floatX* residual = l == 0 ? a.encoded : a.layers[l - 1].residual3;
        floatX *ln1 = ln1_of(model, l), *ln2 = ln2_of(model, l), *fch_gelu = gelu_of(model, l);

        if (model.recompute >= 1) { device::gelu_forward(fch_gelu, x.fch, long(N) * 4 * C, main); }
        device::matmul_backward(model.matmul, a.dfch, dw.fcprojw, dw.fcprojb, a.dresidual, fch_gelu,
                                w.fcprojw, N, 4 * C, C, main, x.fch);
        if (model.recompute >= 2) {
            device::layernorm_forward(ln2, x.ln2_mean, x.ln2_rstd, x.residual2, w.ln2w, w.ln2b, N, C, main);
        }
        device::matmul_backward(model.matmul, a.dprojected, dw.fcw, dw.fcb, a.dfch, ln2, w.fcw, N, C, 4 * C,
                                main);
        device::layernorm_backward(a.dresidual, dw.ln2w, dw.ln2b, a.dprojected, x.residual2, w.ln2w,
                                   x.ln2_mean, x.ln2_rstd, N, C, main);
        device::matmul_backward(model.matmul, a.dprojected, dw.attprojw, dw.attprojb, a.dresidual,
                                x.attention, w.attprojw, N, C, C, main);
        device::attention_backward(a.dqkv, a.dprojected, x.attention, x.qkv, x.lse, B, T, C, NH, main);
        if (model.recompute >= 2) {
            device::layernorm_forward(ln1, x.ln1_mean, x.ln1_rstd, residual, w.ln1w, w.ln1b, N, C, main);
        }
        device::matmul_backward(model.matmul, a.dprojected, dw.qkvw, dw.qkvb, a.dqkv, ln1, w.qkvw, N, C,
                                3 * C, main);
        device::layernorm_backward(a.dresidual, dw.ln1w, dw.ln1b, a.dprojected, residual, w.ln1w, x.ln1_mean,
                                   x.ln1_rstd, N, C, main);
        block_done(l);
    }
    device::encoder_backward(model.dembedding.wte, model.dembedding.wpe, a.dresidual, model.inputs, B, T, C,
                             main);
    for (size_t b = size_t(L); b < model.layout.blocks.size(); b++) { block_done(int(b)); }
}

// -----------------------------------------------------------------------------------------------------------
// One worker: data parallelism over its ranks, optimizer state sharded (ZeRO-1)

struct Scalars {  // a step's results on the device: AdamW reads them there, the host receives a copy
    float loss, norm_squared, stop;  // summed over the ranks; stop: number of ranks with a request to stop
    float norm, clip_scale;          // clip_scale: NaN if the update is skipped
    float loss_zscore, norm_zscore;

    bool is_skipped() const { return !std::isfinite(clip_scale); }
};
const size_t summed_scalars = 3;
static_assert(offsetof(Scalars, norm) == summed_scalars * sizeof(float), "they are summed in one call");

struct Worker {
    Model& model;
    Comm& comm;  // joins the ranks of this worker
    Stream& main;
    Stream& comm_stream;
    std::vector<Range> shards;   // this rank's part of each block
    Buffer<float> master, m, v;  // of this rank's shards
    Buffer<float> reduced;       // this rank's shard of the summed gradients; unused with one rank
    Buffer<Scalars> scalars;
    Buffer<OutlierWindow> outliers;  // the same on all ranks
    HostBuffer<float> one{1};        // holds 1
    long adamw_updates = 0;          // updates that m and v have seen
    Event to_comm, to_main;          // used by hand_over() and hand_back()
    Traffic traffic;                 // of `comm`
    std::function<void()> progress = [] {};  // called once per batch: tells the watchdog that work goes on

    Worker(Model& model, Comm& comm, Stream& main, Stream& comm_stream)
        : model(model),
          comm(comm),
          main(main),
          comm_stream(comm_stream),
          master(model.layout.shard_size()),
          m(model.layout.shard_size()),
          v(model.layout.shard_size()),
          reduced(comm.size() > 1 ? model.layout.shard_size() : 0),
          scalars(1),
          outliers(1) {
        for (int b = 0; b < blocks(); b++) { shards.push_back(model.layout.shard(b, comm.rank())); }
        one.data()[0] = 1;
    }

    int blocks() const { return int(model.layout.blocks.size()); }
    const Range& shard(int block) const { return shards[size_t(block)]; }
    float* shard_gradients() { return comm.size() > 1 ? reduced.data() : model.grads.data(); }
    // Scratch memory between steps, when the gradients are no longer needed.   (layout.size)
    float* spare() { return model.grads.data(); }
};

// Communication that is enqueued after this call waits for all of the main stream's work so far.
inline void hand_over(Worker& worker) {
    worker.main.record(worker.to_comm);
    worker.comm_stream.wait(worker.to_comm);
}

// Work that is enqueued on the main stream after this call waits for all communication so far.
inline void hand_back(Worker& worker) {
    worker.comm_stream.record(worker.to_main);
    worker.main.wait(worker.to_main);
}

// Starts to sum block b's gradients over the ranks, while the backward pass goes on.
inline void reduce_block(Worker& worker, int b) {
    if (worker.comm.size() == 1) { return; }
    const Range& range = worker.shard(b);
    hand_over(worker);
    worker.comm.reduce_scatter(worker.reduced + range.shard,
                               worker.model.grads + worker.model.layout.blocks[b].offset, size_t(range.count),
                               worker.comm_stream, &worker.traffic);
}

// Starts to gather all parameters on all ranks, in the order in which the next forward pass needs them.
inline void gather_parameters(Worker& worker) {
    if (worker.comm.size() == 1) { return; }
    const Layout& layout = worker.model.layout;
    hand_over(worker);
    for (int i = 0; i < worker.blocks(); i++) {
        const int b = (layout.layers + i) % worker.blocks();  // the embedding first
        const Range& range = worker.shard(b);
        worker.comm.all_gather(worker.model.params + layout.blocks[b].offset,
                               worker.model.params + range.flat, size_t(range.count) * sizeof(floatX),
                               worker.comm_stream, &worker.traffic);
        worker.comm_stream.record(worker.model.gathered[b]);
    }
}

inline void wait_for_parameters(Worker& worker) {
    for (const Event& event : worker.model.gathered) { worker.main.wait(event); }
}

// Sums `count` of the scalars over the ranks, after the work enqueued so far and before any enqueued later.
inline void sum_over_ranks(Worker& worker, float* values, size_t count) {
    if (worker.comm.size() == 1) { return; }
    hand_over(worker);
    worker.comm.all_reduce(values, count, Reduction::sum, worker.comm_stream, &worker.traffic);
    hand_back(worker);
}

// Gradients of the mean loss over `micro_steps` batches and all ranks; each rank ends with its shard of them.
// stop: this rank was asked to stop; the worker's other ranks learn it together with the loss
inline void compute_gradients(Worker& worker, DataLoader& loader, int B, int T, int micro_steps,
                              bool stop = false) {
    Model& model = worker.model;
    Scalars* scalars = worker.scalars;
    const float share = 1.0f / (float(B) * float(T) * float(micro_steps) * float(worker.comm.size()));
    device::set_zero(model.grads.data(), model.layout.size, worker.main);
    device::set_zero(scalars, 1, worker.main);
    for (int micro_step = 0; micro_step < micro_steps; micro_step++) {
        const bool last = micro_step == micro_steps - 1;
        worker.progress();
        loader.next_batch();
        forward(model, loader.inputs(), B, T, worker.main);
        classify(model, loader.targets(), B, T, &scalars->loss, share, share, true, worker.main);
        backward(model, B, T, worker.main, [&](int b) {
            if (last) { reduce_block(worker, b); }
        });
    }
    hand_back(worker);
    device::global_norm_squared(&scalars->norm_squared, worker.shard_gradients(), model.layout.shard_size(),
                                worker.main);
    if (stop) { device::copy_to_device(&scalars->stop, worker.one.data(), 1, worker.main); }
    sum_over_ranks(worker, &scalars->loss, summed_scalars);
}

// AdamW's update of this rank's shard. It reads the step's scalars on the device, so the host does not wait.
// A gradient norm that is not finite, or an outlier, leaves the parameters as they are.
inline void update(Worker& worker, const Options& options, float learning_rate) {
    const Phase phase("AdamW");
    const long t = ++worker.adamw_updates;
    Scalars* scalars = worker.scalars;
    device::clip_scale(&scalars->norm, &scalars->clip_scale, &scalars->norm_squared, options.adamw.clip,
                       worker.main);
    device::skip_outliers(worker.outliers.data(), &scalars->loss_zscore, &scalars->norm_zscore,
                          &scalars->clip_scale, &scalars->loss, &scalars->norm,
                          options.outliers, worker.main);
    const AdamW adam = adamw(learning_rate, options.adamw, int(t));
    for (int b = 0; b < worker.blocks(); b++) {
        const Range& range = worker.shard(b);
        const Layout& layout = worker.model.layout;
        const long decayed = layout.blocks[b].decayed - worker.comm.rank() * range.count;
        const StochasticRounding rounding{uint64_t(options.seed), uint32_t(t),
                                          uint64_t(layout.logical_index(range.flat))};
        device::adamw_update(worker.model.params + range.flat, worker.master + range.shard,
                             worker.m + range.shard, worker.v + range.shard,
                             worker.shard_gradients() + range.shard, range.count,
                             std::clamp(decayed, 0L, range.count), adam, &scalars->clip_scale, rounding,
                             worker.main);
    }
}

// A step that changes no parameter but launches every kernel and collective of a real one, so that memory
// allocations and lazy loading of kernels happen before any exchange is under way.
inline void warm_up(Worker& worker, const Options& options) {
    const int B = options.batch, T = options.seq_len;
    Scalars* scalars = worker.scalars;
    const std::vector<int> tokens(size_t(B) * size_t(T));
    const Scalars not_finite{NAN, NAN, NAN, NAN, NAN, NAN, NAN};  // so AdamW changes nothing
    forward(worker.model, tokens.data(), B, T, worker.main);
    classify(worker.model, tokens.data(), B, T, &scalars->loss, 0.0f, 0.0f, true, worker.main);
    backward(worker.model, B, T, worker.main, [&](int b) { reduce_block(worker, b); });
    hand_back(worker);
    device::global_norm_squared(&scalars->norm_squared, worker.shard_gradients(),
                                worker.model.layout.shard_size(), worker.main);
    device::copy_to_device(scalars, &not_finite, 1, worker.main);
    sum_over_ranks(worker, &scalars->loss, summed_scalars);
    update(worker, options, 0.0f);
    gather_parameters(worker);
    wait_for_parameters(worker);
    worker.main.synchronize();
    worker.adamw_updates = 0;
    worker.traffic = Traffic();
}

// Sets the parameters, and waits for the copy, so that the caller may free `flat`.
// flat: (layout.size), on the host
inline void set_parameters(Model& model, const float* flat, Stream& main) {
    device::copy_to_device(model.grads.data(), flat, model.layout.size, main);
    device::cast(model.params.data(), model.grads.data(), model.layout.size, main);
    main.synchronize();
}

// Sets the parameters and this rank's shard of the master weights.
inline void set_parameters(Worker& worker, const float* flat) {
    set_parameters(worker.model, flat, worker.main);
    for (const Range& range : worker.shards) {
        device::copy_to_device(worker.master + range.shard, flat + range.flat, range.count, worker.main);
    }
    worker.main.synchronize();
}

// Gathers the shards of all ranks into one flat model, on the hosts of those ranks where `wanted`: one machine
// may lack the memory for a copy per rank. Between steps only.
// shard: (layout.shard_size())   returns (layout.size), or an empty vector if not wanted
inline std::vector<float> gather_flat(Worker& worker, const float* shard, bool wanted) {
    const Layout& layout = worker.model.layout;
    float* gathered = worker.spare();
    for (const Range& range : worker.shards) {
        device::cast(gathered + range.flat, shard + range.shard, range.count, worker.main);
    }
    hand_over(worker);
    for (int b = 0; b < worker.blocks(); b++) {
        const Range& range = worker.shard(b);
        worker.comm.all_gather(gathered + layout.blocks[b].offset, gathered + range.flat,
                               size_t(range.count) * sizeof(float), worker.comm_stream, &worker.traffic);
    }
    hand_back(worker);
    if (!wanted) { return {}; }
    std::vector<float> flat(static_cast<size_t>(layout.size));
    device::copy_to_host(flat.data(), gathered, layout.size, worker.main);
    return flat;
}

// -----------------------------------------------------------------------------------------------------------
// Evaluation and sampling

// Runs `work` with the parameters of `shard` in place of the worker's own, then restores the worker's to the
// bit. Between steps only.   shard: (layout.shard_size()), or null to keep the worker's own
inline void with_parameters(Worker& worker, const float* shard, const std::function<void()>& work) {
    if (!shard) {
        work();
        return;
    }
    floatX* params = worker.model.params;
    floatX* displaced = reinterpret_cast<floatX*>(worker.spare());
    wait_for_parameters(worker);
    for (const Range& range : worker.shards) {
        device::cast(displaced + range.shard, params + range.flat, range.count, worker.main);
        device::cast(params + range.flat, shard + range.shard, range.count, worker.main);
    }
    gather_parameters(worker);
    work();
    wait_for_parameters(worker);
    for (const Range& range : worker.shards) {
        device::cast(params + range.flat, displaced + range.shard, range.count, worker.main);
    }
    gather_parameters(worker);
}

// Mean loss over the first `batches` batches of the validation data, divided among the ranks.
inline float validation_loss(Worker& worker, DataLoader& loader, int B, int T, long batches) {
    Scalars* scalars = worker.scalars;
    const float share = 1.0f / (float(B) * float(T) * float(batches) * float(worker.comm.size()));
    device::set_zero(scalars, 1, worker.main);
    loader.reset();
    for (long i = 0; i < batches; i++) {
        worker.progress();
        loader.next_batch();
        forward(worker.model, loader.inputs(), B, T, worker.main);
        classify(worker.model, loader.targets(), B, T, &scalars->loss, share, 0.0f, false, worker.main);
    }
    sum_over_ranks(worker, &scalars->loss, 1);
    float loss;
    device::copy_to_host(&loss, &scalars->loss, 1, worker.main);
    return loss;
}

// Fraction of the examples whose correct ending is the likeliest one. The ranks divide the examples.
inline double eval_accuracy(Worker& worker, const EvalSet& set, int B, int T) {
    Model& model = worker.model;
    Scalars* scalars = worker.scalars;
    EvalBatches batches(set, B, T, worker.comm.rank(), worker.comm.size());
    std::vector<float> losses(size_t(B) * size_t(T));
    for (long i = 0; i < batches.size(); i++) {
        worker.progress();
        const EvalBatch batch = batches.next();
        forward(model, batch.inputs.data(), batch.B, batch.T, worker.main);
        classify(model, batch.targets.data(), batch.B, batch.T, &scalars->loss, 0.0f, 0.0f, false,
                 worker.main);
        device::copy_to_host(losses.data(), model.acts.losses.data(), long(batch.B) * batch.T, worker.main);
        batches.score(batch, losses.data());
    }
    const float correct = float(batches.correct());
    float all;
    device::copy_to_device(&scalars->loss, &correct, 1, worker.main);
    sum_over_ranks(worker, &scalars->loss, 1);
    device::copy_to_host(&all, &scalars->loss, 1, worker.main);
    return double(all) / double(set.size());
}

// Samples up to `length` tokens that continue `prompt` (at least one token), and hands each to take(), until
// that returns false. The model sees the last T tokens.
inline void sample(Model& model, const std::vector<int>& prompt, int length, int T, const Sampling& sampling,
                   uint64_t seed, Stream& main, const std::function<bool(int)>& take) {
    const int window_step = 64;  // windows grow by this many tokens, so that few matmul shapes occur
    const int V = model.shape.vocab_size, Vp = model.shape.padded_vocab_size;
    std::vector<int> tokens = prompt, window(size_t(T), prompt[0]);
    std::vector<floatX> row(static_cast<size_t>(Vp));
    std::vector<float> logits(static_cast<size_t>(V));
    for (int i = 1; i <= length; i++) {
        const int begin = std::max(0, int(tokens.size()) - T), used = int(tokens.size()) - begin;
        std::copy(tokens.begin() + begin, tokens.end(), window.begin());
        const int rows = std::min(T, (used + window_step - 1) / window_step * window_step);
        forward(model, window.data(), 1, rows, main);
        device::copy_to_host(row.data(), model.acts.logits + long(used - 1) * Vp, Vp, main);
        for (int v = 0; v < V; v++) { logits[size_t(v)] = float(row[size_t(v)]); }
        const float coin = uniform(random_bits(seed, RandomUse::sampling, uint64_t(i)).v[0]);
        tokens.push_back(sample_token(logits.data(), V, sampling, coin));
        if (!take(tokens.back())) { return; }
    }
}

#ifndef TESTING  // tests and benchmarks call what is above

// -----------------------------------------------------------------------------------------------------------
// From options to a run

// To how many a process sends what it has to say in a sync, and itself: a payload goes to the store once.
inline int exchange_members(const Options& o) { return o.diloco.is_elastic() ? 2 : o.workers; }

inline LogOptions log_options(const Options& o, const Process& process) {
    LogOptions log;
    log.worker = process.worker;
    log.join_moments = o.elastic.join_moments;
    log.protocol.workers = o.workers;
    log.protocol.min_workers = o.elastic.min_workers;
    log.protocol.max_lag = o.elastic.max_lag;
    log.protocol.retain = o.elastic.retain;
    log.protocol.grace = o.elastic.grace;
    log.protocol.checkpoints = o.save_every > 0;
    return log;
}

inline void write_text(const std::string& path, const std::string& text) {
    write_file(path, [&](OutputFile& file) { file.write(text.data(), text.size()); });
}

// The parameters that training starts from: a model file's, or GPT-2's random ones.   returns (layout.size)
inline std::vector<float> initial_parameters(const Options& o, const GptShape& shape, const Layout& layout) {
    std::vector<float> flat(static_cast<size_t>(layout.size));
    if (is_model_file(o.model)) {
        read_model(o.model, layout, flat.data());
    } else {
        init_parameters(flat.data(), shape, layout, o.seed);
    }
    return flat;
}

// What is exchanged when: nothing without an outer optimizer.
inline std::vector<Fragment> make_fragments(const Options& o, const Layout& layout) {
    if (!o.diloco.streams()) { return {}; }
    return make_fragments(layout, o.diloco.fragment_layers, parse_fragment_pattern(o.diloco.fragment_pattern),
                          o.diloco.inner_steps);
}

// Where workers come and go, before anything is written: whether the store can be used, and whether a run that
// is there already has these options. A later start of another one is seen when this one begins.
inline void check_log(const Options& o, const Process& process, const std::string& ours) {
    if (!o.diloco.is_elastic()) { return; }
    const std::unique_ptr<LogStore> store = open_log_store(process.store_url, o.run_name, o.timeout);
    const StoreAnswer generation = store->perform({StoreRequest::get, "run", "generation", ""});
    if (!generation.found) { return; }
    const StoreAnswer run = store->perform({StoreRequest::get, generation.value + "/run", "fingerprint", ""});
    if (run.found && rows_of_options(run.value) != rows_of_options(ours)) { refuse_options(ours, run.value); }
}

// -----------------------------------------------------------------------------------------------------------
// What a run keeps and reports

// Whose state a process writes.
inline StateIdentity state_identity(const Options& o, const Process& process, long step,
                                    const std::string& lineage) {
    return {step, process.worker, process.rank, o.workers, o.ranks, lineage, o.diloco.is_elastic()};
}

// Each elastic worker has its own checkpoints, and resumes from these.
inline std::string checkpoint_folder(const Options& o, const Process& process) {
    return o.diloco.is_elastic() ? o.output + format("/worker_%d", process.worker) : o.output;
}

inline void make_folder(const std::string& folder) {
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error) { throw UserError("cannot write into " + folder + " (" + error.message() + "): correct -o"); }
}

// What the host learns of a step when the device is through with it, which may be a step later.
struct StepResult {
    long step = 0;  // 0: nothing to learn
    long update = 0;
    float learning_rate = 0;
    uint64_t tokens = 0;  // of this worker up to here
    Traffic inner;
    std::vector<SyncReport> syncs;  // whose means were merged in it
    HostBuffer<Scalars> scalars{1};
    Event done;
};

// A request to stop: every rank of a worker knows of it when it comes with the loss, all workers in lock-step
// when it has travelled with a sync. They stop at the same step, which the slowest of them reaches knowing of
// it; a worker that is alone, or comes and goes, after the update behind that which brought it, or where it
// stands and waits for other workers.
struct Stopping {
    std::optional<StopRequest> request;  // of this process; none where nothing is written
    long largest_overlap = 0;            // tau, of all workers
    long asked_in = 0;                   // update whose loss brought it; 0: none did
    long at = 0;                         // step after which the run stops; 0: not known
};

// Updates over which the learning rate of a worker rises that has taken over another one's parameters.
constexpr long join_warmup = 10;

// Everything a process holds while it trains.
struct Run {
    const Options& options;
    const Process& process;
    Inputs& inputs;
    const std::vector<Fragment>& fragments;  // none without an outer optimizer
    Worker& worker;
    Totals& totals;
    Report& report;
    Logger& logger;
    StatusLine& status;
    Watchdog& watchdog;
    const device::Device& device;
    Resumption& resumed;
    OuterLoop* outer = nullptr;            // null without an outer optimizer
    Checkpointer* checkpointer = nullptr;  // null where nothing is written
    Stopping stopping{};
    std::unique_ptr<TrainingSnapshot> snapshot{};  // made before the loop, or without -n when the run is stopped
    long step = 0;                         // that the run has come to
    long step_before = 0;                  // where it came from: more than one step behind after a jump
    StepResult results[2]{};               // of this update and of the one before
    double last_collected = 0;             // now_seconds() when the step before this one was through
    Outcome::Course course = Outcome::continues;  // as the exchange between workers last said

    // The process that saves and samples: rank 0 of worker 0, or of each elastic worker.
    bool is_first() const { return process.rank == 0 && is_first_worker(); }
    bool is_first_worker() const { return process.worker == process.first_worker; }
    StepResult& last_result() { return results[totals.updates % 2]; }
    StepResult& result_before() { return results[(totals.updates + 1) % 2]; }
    // Whether workers stop together, as a sync says that carries the request.
    bool stops_together() const { return outer && !options.diloco.is_elastic(); }
    // Whether it was asked to stop while it waited for other workers, and waits no longer.
    bool has_left() const { return course == Outcome::left; }
    // Whether the other workers have reached the end of the run without this one.
    bool is_over() const { return course == Outcome::over; }
    bool is_stopping() const {
        if (stops_together()) { return stopping.at > 0 && step == stopping.at; }
        return has_left() || (stopping.asked_in > 0 && totals.updates > stopping.asked_in);
    }
    // Whether, in coming here, it has come to a step that `every` divides.
    bool passes(long every) const { return every > 0 && step / every > step_before / every; }
    // What is evaluated and saved: null means the worker's own parameters.
    const float* evaluated() const {
        return outer && options.evaluate == "global" ? outer->global(worker.main) : nullptr;
    }
};

// Over a store every worker reads all payloads.
inline DilocoOptions planned_options(const Options& o) {
    DilocoOptions d = o.diloco;
    if (o.diloco.is_elastic()) { d.outer_exchange = "all_gather"; }
    return d;
}

inline StepMetrics step_metrics(const StepResult& result, const Scalars& scalars) {
    StepMetrics metrics;
    metrics.step = result.step;
    metrics.loss = scalars.loss;
    metrics.learning_rate = result.learning_rate;
    metrics.norm = scalars.norm;
    metrics.loss_zscore = scalars.loss_zscore;
    metrics.norm_zscore = scalars.norm_zscore;
    metrics.skipped = scalars.is_skipped();
    metrics.tokens = result.tokens;
    metrics.inner_bytes_sent = result.inner.bytes_sent;
    metrics.inner_bytes_received = result.inner.bytes_received;
    return metrics;
}

inline void check_loss(const Run& run, float loss, const std::string& name, long step) {
    check_loss(loss, name, step, checkpoint_folder(run.options, run.process), run.process, run.resumed.lineage,
               run.checkpointer != nullptr);
}

// Waits until the device has completed a step, and reports it. RunError if its loss is not finite.
inline void collect(Run& run, StepResult& result) {
    if (result.step == 0) { return; }
    result.done.synchronize();
    const Scalars scalars = result.scalars.data()[0];
    if (scalars.stop > 0 && run.stopping.asked_in == 0) { run.stopping.asked_in = result.update; }
    const double now = now_seconds();
    run.report.step(step_metrics(result, scalars), now - run.last_collected);
    run.last_collected = now;
    check_loss(run, scalars.loss, format("the loss of step %ld", result.step), result.step - 1);
    run.report.syncs(result.step, result.syncs);
    run.report.rates(run.inputs.steps - run.resumed.step);
    result.step = 0;
}

inline void evaluate(Run& run, long step) {
    const Options& o = run.options;
    DataLoader& loader = *run.inputs.validation_loader;
    const long batches = o.validation_batches > 0 ? std::min(o.validation_batches, loader.num_batches())
                                                  : loader.num_batches();
    const float loss = validation_loss(run.worker, loader, o.batch, o.seq_len, batches);
    run.report.validation(step, loss);
    check_loss(run, loss, format("the validation loss after step %ld", step), step);
}

inline void evaluate_hellaswag(Run& run, long step) {
    const Options& o = run.options;
    const EvalSet& set = *run.inputs.hellaswag;
    const double accuracy = eval_accuracy(run.worker, set, o.batch, o.seq_len);
    run.report.hellaswag(step, accuracy, set.size());
}

inline void print_sample(Run& run, long step) {
    const Options& o = run.options;
    const Tokenizer& tokenizer = *run.inputs.tokenizer;
    const Watchdog::Alone alone(run.watchdog);
    std::string text = o.prompt;
    sample(run.worker.model, run.inputs.prompt, o.sample_length, o.seq_len, o.sampling,
           o.seed + uint64_t(step), run.worker.main, [&](int token) {
               text += tokenizer.decode(token);
               return true;
           });
    run.status.print("sample after step " + std::to_string(step) + ":\n---\n" + printable(text) + "\n---");
}

// Of what is evaluated, on the first process of a worker that saves, else nothing.   returns (layout.size)
inline std::vector<float> gather_model(Run& run) {
    if (!run.is_first_worker()) { return {}; }
    const float* evaluated = run.evaluated();
    return gather_flat(run.worker, evaluated ? evaluated : run.worker.master.data(), run.is_first());
}

inline void save_model(Run& run, long step) {
    const std::vector<float> flat = gather_model(run);
    if (!run.is_first()) { return; }
    const Watchdog::Alone alone(run.watchdog);
    const std::string path = model_path(checkpoint_folder(run.options, run.process), step);
    write_model(path, run.inputs.shape, run.worker.model.layout, flat.data());
    run.status.print("wrote " + path);
}

// What happens after `step` steps and before the next: validation and samples; after the last one, the model,
// where no checkpoint has it.
inline void between_steps(Run& run, long step) {
    const Options& o = run.options;
    const bool last = step == run.inputs.steps;
    auto is_time = [&](long every) { return run.passes(every) || (every > 0 && (last || step == 0)); };
    const bool validates = run.inputs.validation_loader && is_time(o.validate_every);
    const bool answers = run.inputs.hellaswag && step > 0 && is_time(o.validate_every);
    const bool samples =  // the others would only change parameters to and fro
        run.inputs.tokenizer && run.is_first_worker() && step > 0 && is_time(o.sample_every);
    const bool has_checkpoint = o.save_every > 0 && run.resumed.step < step;
    const bool saves = !o.output.empty() && step > 0 && last && !has_checkpoint;
    if (!validates && !answers && !samples && !saves && !last) { return; }

    collect(run, run.last_result());
    if (validates || answers || samples) {
        with_parameters(run.worker, run.evaluated(), [&] {
            if (validates) { evaluate(run, step); }
            if (answers) { evaluate_hellaswag(run, step); }
            if (samples && run.is_first()) { print_sample(run, step); }
        });
    }
    if (saves) { save_model(run, step); }
    run.last_collected = now_seconds();  // what was done here is no part of a step
}

// -----------------------------------------------------------------------------------------------------------
// Checkpoints

inline bool is_checkpoint_due(const Run& run, long step) {
    const long every = run.options.save_every;
    if (!run.checkpointer) { return false; }
    return run.is_stopping() || run.passes(every) || (every > 0 && step == run.inputs.steps);
}

inline TrainingArrays arrays_of(Worker& worker) {
    return {worker.model.layout, worker.comm.rank(), worker.master,          worker.m,
            worker.v,            worker.model.params, worker.outliers.data()};
}

inline std::unique_ptr<TrainingSnapshot> make_snapshot(const Run& run) {
    return std::make_unique<TrainingSnapshot>(run.worker.model.layout.shard_size(),
                                              run.outer ? &run.outer->snapshot() : nullptr);
}

// Waits until the writer no longer needs the snapshot's memory. At the end of a run it would wait for means
// that are no longer due: the checkpoint that lacks them is given up, for the next one has everything.
inline void wait_for_writer(Run& run, long step) {
    if (run.checkpointer->is_idle()) { return; }
    if (run.is_stopping() || step == run.inputs.steps) { run.snapshot->abandon(); }
    const Watchdog::Alone alone(run.watchdog);
    run.checkpointer->wait();
}

// Starts to copy the state after `step` steps. The model file of the last step is made later, from the
// parameters after the last merges.
inline void take_snapshot(Run& run, long step) {
    Worker& worker = run.worker;
    collect(run, run.last_result());
    wait_for_writer(run, step);
    if (!run.snapshot) { run.snapshot = make_snapshot(run); }
    TrainingSnapshot& snapshot = *run.snapshot;
    wait_for_parameters(worker);
    snapshot.begin_copies(arrays_of(worker), worker.main);
    if (run.outer) { run.outer->take_snapshot(worker.main); }
    const Progress progress{step, run.inputs.steps, worker.adamw_updates, worker.traffic, run.totals};
    snapshot.finish_copies(fields_of(progress, run.inputs.shape, *run.inputs.train_loader),
                           fields_of(run.options.resolved), worker.main);
    if (step < run.inputs.steps) { snapshot.model = gather_model(run); }
}

// Has the snapshot of `step` written, on a thread of the checkpointer.
inline void write_checkpoint(Run& run, long step) {
    TrainingSnapshot& snapshot = *run.snapshot;
    const bool is_last = step == run.inputs.steps;
    if (is_last) { snapshot.model = gather_model(run); }
    CheckpointJob job;
    job.identity = state_identity(run.options, run.process, step, run.resumed.lineage);
    job.is_last = is_last;
    job.ready = [&run, &snapshot] {
        device::use_in_this_thread(run.device);
        snapshot.wait();
        run.logger.sync();  // the log that a resumed run goes on with lacks nothing, whatever the power does
    };
    job.sections = [&snapshot] { return snapshot.sections(); };
    if (run.is_first()) {
        job.write_model = [&run, &snapshot](const std::string& path) {
            write_model(path, run.inputs.shape, run.worker.model.layout, snapshot.model.data());
        };
    }
    if (run.outer) { job.when_whole = [&run] { run.outer->checkpointed(); }; }
    run.checkpointer->begin(std::move(job));
}

inline void finish_checkpoints(Run& run) {
    if (!run.checkpointer) { return; }
    const Watchdog::Alone alone(run.watchdog);
    run.checkpointer->finish([&run](const std::string& message) { run.status.print(message); });
}

// The newest checkpoint of the run, or nothing. A checkpoint of another shape is recut for this process.
inline Resumption find_checkpoint(const Options& o, Process& process, const Inputs& in) {
    const std::string folder = checkpoint_folder(o, process);
    const StateIdentity who = state_identity(o, process, 0, "");
    const RunShape shape{in.shape, in.layout, who.worker, who.rank, who.workers, who.ranks,
                         in.train_loader->tokens_of_a_sample()};
    const MakeOuterReshape outer = [&](const SavedState& state, const RunShape& old, const RunShape& to) {
        return std::make_unique<DilocoReshape>(state, old, OuterShape(to, o.diloco));
    };
    return find_checkpoint(process, {folder, who, in.steps, o.max_steps < 0, o.resolved, default_of,
                                     *in.train_loader,
                                     [&](const ResumePoint& point, std::vector<std::string>& notes) {
                                         return open_state({folder, point}, shape, outer, notes);
                                     }});
}

inline void restore(Worker& worker, const StateReader& state) {
    restore(arrays_of(worker), state, worker.main);
    gather_parameters(worker);
    wait_for_parameters(worker);
    worker.main.synchronize();
}

inline void restore(Run& run, const Fields& fields) {
    const Progress progress = progress_of(fields);
    run.totals = progress.totals;
    run.worker.adamw_updates = progress.adamw_updates;
    run.worker.traffic = progress.inner;
}

// The logs without what the run does again. A worker that comes back without a checkpoint does none of it
// again: it goes on where the others are.
inline std::optional<LogCut> log_cut(const Options& o, const Resumption& r, const Inputs& in) {
    if (!r.state && o.diloco.is_elastic() && o.resume) { return LogCut{in.steps, LONG_MAX, true}; }
    return log_cut(r, in.steps);
}

// -----------------------------------------------------------------------------------------------------------
// The step and the loop

// tau of the worker that merges last.
inline long largest_overlap(const Options& o, Process& process) {
    long largest = 0;
    for (const std::string& text : process.gather("overlap", std::to_string(o.diloco.overlap))) {
        largest = std::max(largest, atol(text.c_str()));
    }
    return largest;
}

// The first sync that carries a request says when the run stops: all workers get to see it by then.
inline void plan_stop(Run& run, const std::vector<SyncReport>& syncs) {
    for (const SyncReport& sync : syncs) {
        if (sync.stops && run.stopping.at == 0) {
            run.stopping.at = sync.send_step + run.stopping.largest_overlap;
        }
    }
}

// Of `step`; a worker that has just taken over another one's parameters warms up.
inline float learning_rate_of(const Run& run, long step) {
    const float lr = learning_rate(run.options.schedule, run.inputs.steps, step - 1);
    const Totals& t = run.totals;
    if (t.joined_after < 0) { return lr; }
    return lr * std::min(1.0f, float(t.updates - t.joined_after) / float(join_warmup));
}

// This worker's parameters are those of a snapshot now. AdamW's moments came with it, or begin anew.
inline void note_snapshot(Run& run) {
    run.totals.joined_after = run.totals.updates;
    if (run.options.elastic.join_moments) { return; }
    Worker& worker = run.worker;
    device::set_zero(worker.m.data(), worker.m.count(), worker.main);
    device::set_zero(worker.v.data(), worker.v.count(), worker.main);
    worker.adamw_updates = 0;
}

inline void report_events(Run& run, const std::vector<OuterEvent>& events) {
    for (const OuterEvent& event : events) {
        run.logger.event({run.step, event.kind, event.sync, event.worker, event.text});
        const bool is_own = event.worker == run.process.worker;
        if (event.is_routine || run.process.rank > 0 || !(is_own || run.report.speaks())) { continue; }
        run.status.print((is_own ? format("worker %d ", event.worker) : "") + event.text);
    }
}

// While this worker waits for others. False: it was asked to stop.
inline bool while_waiting(Run& run, const std::vector<OuterEvent>& events) {
    run.watchdog.progress();
    report_events(run, events);
    return !(run.stopping.request && run.stopping.request->is_set());
}

// Takes note of what the exchange between workers did: all but its syncs, whose means are still being applied.
inline void note_outcome(Run& run, const Outcome& outcome) {
    run.step = outcome.step;
    run.course = outcome.course;
    if (outcome.took_snapshot) { note_snapshot(run); }
    report_events(run, outcome.events);
}

// Enqueues a step, and reports the one before it; this one too, if the device is through with it already. A
// worker that is far behind the others is at a later step then.
inline void train_step(Run& run, long step) {
    const Options& o = run.options;
    Worker& worker = run.worker;
    run.totals.updates++;
    const float lr = learning_rate_of(run, step);
    if (o.overfit) { run.inputs.train_loader->reset(); }
    compute_gradients(worker, *run.inputs.train_loader, o.batch, o.seq_len, int(o.micro_steps()),
                      run.stopping.request && run.stopping.request->is_set());
    const Traffic inner = worker.traffic;  // the streams have met: nobody is writing it
    update(worker, o, lr);
    run.totals.tokens += uint64_t(o.total_batch);
    StepResult& result = run.last_result();
    run.step = step;
    if (run.outer) {
        const Phase phase("exchange");
        // Two updates later, so that all ranks know of it: the loss of the one before may not be here yet.
        const long asked_in = run.stopping.asked_in;
        if (asked_in > 0 && asked_in + 2 <= run.totals.updates) { run.outer->request_stop(); }
        Outcome outcome = run.outer->after_inner_step(step, run.totals.tokens, worker.master,
                                                      worker.model.params, worker.main);
        note_outcome(run, outcome);
        if (run.is_over()) { return; }
        result.syncs = std::move(outcome.syncs);
    }
    gather_parameters(worker);
    plan_stop(run, result.syncs);
    result.step = step;
    result.update = run.totals.updates;
    result.tokens = run.totals.tokens;
    result.learning_rate = lr;
    result.inner = inner;
    device::copy_to_host_later(result.scalars.data(), worker.scalars.data(), 1, worker.main);
    worker.main.record(result.done);

    collect(run, run.result_before());
    if (result.done.query()) { collect(run, result); }
}

// Nobody says that it is through while the device still works on what others take part in: one that dies
// after that would leave it hanging.
inline void finish_collectives(Run& run) {
    const Watchdog::Watch watch(run.watchdog, "the last collectives");
    wait_for_parameters(run.worker);
    run.worker.main.synchronize();
}

// Receives and merges what is in flight, after the last step. Not all, where it waits no longer: then the
// checkpoint of this step goes on there.
inline void end_exchanges(Run& run, long step) {
    if (!run.outer) { return; }
    collect(run, run.last_result());
    const double start = now_seconds();
    wait_for_parameters(run.worker);  // the merge writes what is being gathered
    const Outcome outcome =
        run.outer->finish(step, run.worker.master, run.worker.model.params, run.worker.main);
    note_outcome(run, outcome);
    if (run.is_over()) { return; }
    gather_parameters(run.worker);
    run.worker.main.synchronize();
    run.report.syncs(step, outcome.syncs);
    run.totals.train_seconds += now_seconds() - start;
}

// What is left to do behind the last step, or as much of it as can be done without waiting for who is asked
// to stop meanwhile.
inline void end_run(Run& run, long step) {
    if (run.has_left()) { return; }
    end_exchanges(run, step);
    if (!run.has_left() && !run.is_over()) { between_steps(run, step); }
}

// A checkpoint is of the run as it is before the last merges, as after any other step; its model is not.
inline void end_step(Run& run, long step) {
    const bool last = step == run.inputs.steps;
    bool saves = is_checkpoint_due(run, step);
    if (!last) { between_steps(run, step); }
    const double start = now_seconds();
    if (saves) { take_snapshot(run, step); }
    if (last) {
        end_run(run, step);
    } else if (run.outer && run.is_stopping()) {
        run.outer->collect_in_flight(run.worker.main);
    }
    if (run.is_over()) { return; }
    if (run.has_left() && !saves) {
        take_snapshot(run, step);
        saves = true;
    }
    if (!saves) { return; }
    write_checkpoint(run, step);
    run.logger.checkpoint(step, now_seconds() - start);
    run.last_collected = now_seconds();
}

// Returns whether the run has come to its end: it may have been asked to stop.
inline bool training_loop(Run& run) {
    run.last_collected = now_seconds();
    if (run.step == run.inputs.steps && run.resumed.step < run.step) {  // all others had sent all there is
        const Watchdog::Watch watch(run.watchdog, "the end");
        end_step(run, run.step);
    }
    while (run.step < run.inputs.steps && !run.is_stopping()) {
        run.step_before = run.step;
        {
            const Watchdog::Watch watch(run.watchdog, format("step %ld", run.step + 1));
            train_step(run, run.step + 1);
        }
        if (run.is_over()) { return true; }
        const Watchdog::Watch watch(run.watchdog, format("step %ld's end", run.step));
        end_step(run, run.step);
        if (!run.checkpointer) { continue; }
        for (const std::string& message : run.checkpointer->take_messages()) { run.status.print(message); }
    }
    const long step = run.step;
    const Watchdog::Watch watch(run.watchdog, "the end");
    if (run.resumed.step == run.inputs.steps && step > 0) {  // resumed where nothing is left but the end
        end_run(run, step);
    }
    if (run.is_over()) { return true; }
    finish_checkpoints(run);
    finish_collectives(run);
    if (step < run.inputs.steps || run.has_left()) {
        if (run.report.speaks()) {
            run.status.print(format("stopped by request after step %ld of %ld: -y 1 goes on from there", step,
                                    run.inputs.steps));
        }
        return false;
    }
    EndMetrics end{run.inputs.steps, run.totals.train_seconds, run.worker.traffic.bytes_sent,
                   run.totals.outer.bytes_sent, run.totals.waited_seconds};
    if (run.outer) {
        const OuterCosts costs = run.outer->costs();
        end.log_turn_seconds = costs.turns;
        end.log_thread_seconds = costs.threads;
    }
    run.report.end(end);
    return true;
}

// Does `work`. If it throws, this process leaves at once with one line, and the others learn why from the
// store: here, while everything that they may be waiting for still exists.
inline void or_leave(const Process& process, const std::function<void()>& work) {
    try {
        work();
    } catch (const std::bad_alloc&) {
        process.leave_with(
            RunError("not enough memory for this model and batch: lower -b, -t or the model's sizes"));
    } catch (const std::exception& error) { process.leave_with(error); }
}

// Watched, because NCCL's blocking calls wait for a process that has died for as long as it takes.
inline void make_comms(const Options& o, const Process& process, Watchdog& watchdog,
                       std::unique_ptr<Comm>& inner, std::unique_ptr<Comm>& outer) {
    const Watchdog::Watch watch(watchdog, "the joining of the processes");
    inner = device::make_inner_comm(process.inner_group());
    watchdog.guard(*inner);
    if (!o.diloco.streams() || o.diloco.is_elastic()) { return; }
    watchdog.progress();
    outer = device::make_outer_comm(process.outer_group(), o.diloco.transport);
    watchdog.guard(*outer);
}

// A worker with the parameters that the run begins with.
inline std::unique_ptr<Worker> make_worker(const Options& o, Inputs& in, Model& model, Comm& inner,
                                           Stream& main, Stream& inner_stream, Watchdog& watchdog) {
    allocate_activations(model, o.batch, o.seq_len);
    auto worker = std::make_unique<Worker>(model, inner, main, inner_stream);
    worker->progress = [&watchdog] { watchdog.progress(); };
    set_parameters(*worker, in.initial.data());
    in.initial = std::vector<float>();
    if (runs_on_gpu) {
        const Watchdog::Watch watch(watchdog, "the first collectives");
        warm_up(*worker, o);
    }
    return worker;
}

// What comes before the loop.
inline void begin_training(Run& run, Process& process) {
    Resumption& resumed = run.resumed;
    if (resumed.step == 0) {
        const Watchdog::Watch watch(run.watchdog, "what comes before step 1");
        between_steps(run, 0);
    }
    if (run.checkpointer) {
        run.stopping.largest_overlap = largest_overlap(run.options, process);
        if (run.stops_together()) { run.report.stop_overlap = run.stopping.largest_overlap; }
        run.stopping.request.emplace();  // until here one ends the process at once: there is nothing to write
    }
    if (resumed.state) {
        restore(run, resumed.fields);
        if (run.outer) { run.outer->restore(*resumed.state, resumed.fields, run.worker.main); }
        resumed.state.reset();
    }
    run.step = run.step_before = resumed.step;
    if (run.outer) {  // in lock-step no worker begins before the others, to wait for them at its first merge
        const Watchdog::Watch watch(run.watchdog, "the first exchange");
        const Outcome outcome = run.outer->begin(run.step, run.totals.tokens, run.worker.master,
                                                 run.worker.model.params, run.worker.main);
        const std::string warning = run.outer->warning();
        if (run.report.speaks() && !warning.empty()) { run.status.print("warning: " + warning); }
        note_outcome(run, outcome);
        if (run.course != Outcome::continues) { return; }
        if (run.options.diloco.is_elastic()) { gather_parameters(run.worker); }
    }
    if (run.options.save_every > 0 && run.checkpointer) { run.snapshot = make_snapshot(run); }
}

// Trains, and says what ends that early if the run is elastic.
// Returns whether the run has come to its end.
inline bool train_to_the_end(Run& run, Process& process) {
    begin_training(run, process);
    if (run.has_left()) {
        if (run.report.speaks()) {
            run.status.print(
                "stopped by request while it waited for other workers: -y 1 goes on from the last "
                "checkpoint");
        }
        return false;
    }
    const bool is_complete = run.is_over() || training_loop(run);
    if (run.is_over() && run.report.speaks()) {
        run.status.print(
            "the other workers have come to the end of this run: a new one needs another --run-name");
    }
    return is_complete;
}

// Before it leaves: what is half written would keep its space on the disk until the run goes on. Others may
// wait so long, some seconds at most, to hear of it.
inline void abandon_checkpoint(Run& run) {
    if (run.snapshot) { run.snapshot->abandon(); }
    if (run.checkpointer) { run.checkpointer->abandon(); }
}

// From the meeting of all processes to the end of the run.
// Returns whether it has come to its end: it may have been asked to stop.
inline bool train_together(const Options& o, Process& process, Inputs& in,
                           const std::vector<Fragment>& fragments) {
    process.check_fingerprint(fingerprint(o, in));
    if (o.has_own_batch()) { share_data(o, process, in); }
    if (o.diloco.streams()) { validate(o.diloco, in.steps, o.workers); }
    const std::string options_of_run = text_of(fingerprint_of_run(o, in));
    process.check_together("log", [&] { check_log(o, process, options_of_run); });
    process.check_together("output", [&] {
        if (!o.output.empty() && !o.resume) { refuse_models(checkpoint_folder(o, process)); }
    });
    Resumption resumed{process.run_id};
    if (o.resume) { resumed = find_checkpoint(o, process, in); }
    const device::Device device = choose_device(process, o.diloco.streams() && o.diloco.transport == "nccl");
    check_outer_interface(o.diloco.transport, o.interface);
    Logger logger(o.output, number_among_all(o, process), o.workers * o.ranks, o.resume != 0,
                  log_cut(o, resumed, in));
    if (!o.output.empty()) { make_folder(checkpoint_folder(o, process)); }
    StatusLine status(stdout, process.terminal, process.terminal ? 0.1 : 5.0);
    // Where something throws from here on, the process leaves before any of these is given back: on a GPU
    // that might wait for a dead peer.
    std::unique_ptr<Comm> inner, outer;
    Stream main, inner_stream(Stream::Kind::communicate), outer_stream(outer_stream_kind(o.diloco.transport));
    std::unique_ptr<Model> model;
    std::unique_ptr<Worker> worker;
    std::unique_ptr<OuterLoop> outer_loop;
    std::unique_ptr<Checkpointer> checkpointer;
    std::string exchanges;
    std::vector<size_t> bytes;
    Watchdog watchdog(process);
    Run* running = nullptr;
    or_leave(process, [&] {
        make_comms(o, process, watchdog, inner, outer);
        model = std::make_unique<Model>(in.shape, in.layout, o.recompute,
                                        matmul_precision(o.matmul_precision));
        worker = make_worker(o, in, *model, *inner, main, inner_stream, watchdog);
        if (resumed.state) { restore(*worker, *resumed.state); }
        if (!o.output.empty()) {
            checkpointer = std::make_unique<Checkpointer>(checkpoint_folder(o, process), process,
                                                          o.keep_checkpoints, o.major_checkpoints);
            checkpointer->forget_later(resumed.step, resumed.lineage);
        }
        if (!o.diloco.streams()) { return; }
        if (o.diloco.is_elastic()) {
            const ElasticCallbacks callbacks{
                [&running](const std::vector<OuterEvent>& events) { return while_waiting(*running, events); },
                [&options_of_run](const std::string& theirs) { refuse_options(options_of_run, theirs); },
                [&device] { device::use_in_this_thread(device); }};
            const LogStart start{random_hex(16), options_of_run, "", {}, false};
            outer_loop = std::make_unique<ElasticDiloco>(
                o.diloco, log_options(o, process), fragments, in.layout, process.rank, *inner, inner_stream,
                start, [&] { return open_log_store(process.store_url, o.run_name, o.timeout); },
                callbacks, InnerMoments{worker->m, worker->v, &worker->adamw_updates});
        } else {
            outer_loop = std::make_unique<Diloco>(o.diloco, fragments, in.layout, process.rank, *outer,
                                                  outer_stream);
        }
        outer_loop->start(worker->master, main);
        const DilocoOptions planned = planned_options(o);
        exchanges = plan(planned, fragments, in.layout, exchange_members(o));
        bytes = sync_bytes(planned, fragments, in.layout, exchange_members(o));
    });
    if (process.index() == 0 && !o.output.empty()) {
        write_text(checkpoint_folder(o, process) + "/config.toml", o.toml);
    }
    logger.run({process.worker, process.rank, o.workers, o.ranks, in.layout.values, o.resolved,
                in.steps, offsets(fragments)},
               resumed.step);
    Totals totals;
    Report report(o, process, in, fragments, device.name, std::move(bytes), totals, logger, status);
    Run run{o, process, in, fragments, *worker, totals, report, logger, status, watchdog, device, resumed};
    running = &run;
    run.outer = outer_loop.get();
    run.checkpointer = checkpointer.get();
    report.banner(model->matmul.description(), exchanges, resumed.notes, resumed.step);
    bool is_complete = false;
    or_leave(process, [&] {
        try {
            is_complete = train_to_the_end(run, process);
            process.leave();
        } catch (...) {
            status.clear();  // for the one line that says why
            abandon_checkpoint(run);
            throw;
        }
    });
    return is_complete;
}

// One process, from its options to the end of its run, or until it is asked to stop. Returns its status.
inline int train(const Options& o, Process& process) {
    Inputs in = open_inputs(o, process);
    if (o.diloco.streams()) { validate(o.diloco, in.steps, o.workers); }
    in.initial = initial_parameters(o, in.shape, in.layout);
    const std::vector<Fragment> fragments = make_fragments(o, in.layout);
    process.meet();
    bool is_complete = false;
    or_leave(process, [&] { is_complete = train_together(o, process, in, fragments); });
    return is_complete ? 0 : stopped_status;
}

// The memory of the file's values goes before that of activations is taken.
inline void read_parameters(Model& model, const std::string& path, Stream& main) {
    std::vector<float> flat(static_cast<size_t>(model.layout.size));
    read_model(path, model.layout, flat.data());
    set_parameters(model, flat.data(), main);
}

// Writes text with a trained model, on one device: --generate.
inline void generate(const Options& o) {
    if (!is_model_file(o.model)) {
        throw UserError("--generate writes with a trained model: give its file (-e log/model_00001000.bin)");
    }
    const GptShape shape = resolve_shape(o, nullptr);
    const std::unique_ptr<Tokenizer> tokenizer =
        find_tokenizer(o, o.train_data.empty() ? o.model : o.train_data);
    if (!tokenizer) {
        throw UserError("there is no tokenizer.bin beside " + o.model +
                        ": name the one that the model was trained with (--tokenizer)");
    }
    check_tokenizer(*tokenizer, shape);
    check_heads(shape);
    const std::vector<int> prompt = prompt_tokens(*tokenizer, o.prompt);
    device::use_device(0, "");
    const Layout layout = gpt_layout(shape, 1, 0);
    Stream main;
    Model model(shape, layout, 2, matmul_precision(o.matmul_precision));  // 2: the least memory
    read_parameters(model, o.model, main);
    allocate_activations(model, 1, shape.max_seq_len);
    TextPrinter printer;
    printer.print(o.prompt);
    sample(model, prompt, o.sample_length, shape.max_seq_len, o.sampling, o.seed, main, [&](int token) {
        if (token == tokenizer->end_of_text()) { return false; }
        printer.print(tokenizer->decode(token));
        return true;
    });
    printer.end();
}

int main(int argc, char** argv) {
    try {
        Options options = parse_options(argc, argv);
        if (options.generate) {
            generate(options);
            return 0;
        }
        check_options(options);
        check_outer_transport(options.diloco.transport);
        validate(options.diloco, options.diloco.streams() ? options.max_steps : -1, options.workers);
        Process process = launch({options.workers, options.ranks, options.worker, options.store,
                                  options.interface, options.run_name, options.timeout,
                                  !options.output.empty(), options.world, options.diloco.is_elastic(),
                                  options.elastic.restarts},
                                 argv);
        if (!has_launcher() && !options.output.empty()) { leave_at_stop_signals(); }
        if (process.restart > 0 && !options.output.empty()) { options.resume = 1; }
        return train(options, process);
    } catch (const std::bad_alloc&) {
        fprintf(stderr, "error: not enough memory for this model: take a smaller one\n");
        return 1;
    } catch (const std::exception& e) {
        fprintf(stderr, "error: %s\n", e.what());
        return exit_status(e);
    }
}
#endif
