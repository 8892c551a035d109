// diloco.c: trains GPT-2 and GPT-3 models on machines that are far apart.
//
//   worker   R ranks with a fast link: they sum gradients each step; each keeps 1/R of the optimizer state
//   run      M workers with slow links: they exchange one fragment of the model at a time while training
//            continues. This is Streaming DiLoCo (arXiv 2501.18512), implemented in streaming/diloco.h.
//
// From top to bottom: the model; forward and backward; a worker's update; evaluation and sampling (tests
// include the file up to there). Then the life of a run: its state, what happens between steps, the step and
// the loop, main. Functions of device:: are the layers; llmc/cpu/ and llmc/cuda/ define them alike.
#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "llmc/checkpoint/checkpoints.h"
#include "llmc/checkpoint/model_file.h"
#include "llmc/checkpoint/reshape.h"
#include "llmc/clock.h"
#include "llmc/layers.h"
#include "llmc/layout.h"
#include "llmc/muon.h"
#include "llmc/run/addresses.h"
#include "llmc/run/inputs.h"
#include "llmc/run/launch.h"
#include "llmc/run/memory.h"
#include "llmc/run/option_checks.h"
#include "llmc/run/session.h"
#include "llmc/run/stop_vote.h"
#include "llmc/schedulers.h"
#include "llmc/text/eval_batches.h"
#include "llmc/text/sampler.h"
#include "llmc/upload.h"
#include "streaming/diloco.h"
#include "streaming/elastic/elastic_diloco.h"
#include "streaming/elastic/log_stores.h"
#include "streaming/plan.h"
#include "streaming/reshape_outer.h"

// -----------------------------------------------------------------------------------------------------------
// The model

// Activations of one layer that the forward pass keeps for the backward pass.   N = B * T
struct LayerActivations {  // all (N,C), except qkv (N,3C), fch and fch_gelu (N,4C)
    ActivationBuffer ln1, qkv, attention, ln2, fch, fch_gelu;
    Buffer<floatX> residual2, residual3;
    Buffer<float> ln1_mean, ln1_rstd, ln2_mean, ln2_rstd;  // (N)
    Buffer<float> lse;                                     // (B,NH,T)
};

struct Activations {
    Buffer<floatX> encoded, projected, dresidual, dprojected;  // (N,C). projected: without the residual
    ActivationBuffer dqkv, dfch;                               // (N,3C) (N,4C)
    ActivationBuffer lnf, ln_recomputed, gelu_recomputed;      // (N,C) (N,C) (N,4C); two for --recompute
    Buffer<float> lnf_mean, lnf_rstd, losses;
    Buffer<floatX> logits;  // (N,Vp); becomes dlogits
    std::vector<LayerActivations> layers;
};

struct Model {
    GptShape shape;
    Layout layout;
    int recompute = 0;
    device::Matmul matmul;
    device::GradientSums sums;
    Buffer<floatX> params = Buffer<floatX>(layout.size);
    Buffer<float> grads = Buffer<float>(layout.size);  // fp32, so that sums do not round to bf16
    std::vector<LayerTensors<floatX>> weights = layer_tensors(layout, params.data());
    std::vector<LayerTensors<float>> gradients = layer_tensors(layout, grads.data());
    EmbeddingTensors<floatX> embedding = embedding_tensors(layout, params.data());
    EmbeddingTensors<float> dembedding = embedding_tensors(layout, grads.data());
    std::vector<Event> gathered = std::vector<Event>(layout.blocks.size());  // block b has arrived
    Activations acts;
    Buffer<int> inputs, targets;  // (N)
    Upload upload;

    Model(const GptShape& shape, const Layout& layout, int recompute, const MatmulOptions& products)
        : shape(shape), layout(layout), recompute(recompute), matmul(products) {}
};

inline void allocate_activations(Model& model, int B, int T) {
    const GptShape& shape = model.shape;
    const long N = long(B) * T, C = shape.channels;
    Activations& a = model.acts;
    const auto activation = [&](long n) { return ActivationBuffer(n, model.matmul.bf16); };
    for (auto* b : {&a.encoded, &a.projected, &a.dresidual, &a.dprojected}) { *b = Buffer<floatX>(N * C); }
    a.lnf = activation(N * C);
    for (Buffer<float>* b : {&a.lnf_mean, &a.lnf_rstd, &a.losses}) { *b = Buffer<float>(N); }
    a.logits = Buffer<floatX>(N * shape.padded_vocab_size);
    a.dqkv = activation(N * 3 * C), a.dfch = activation(N * 4 * C);
    if (model.recompute >= 1) { a.gelu_recomputed = activation(N * 4 * C); }
    if (model.recompute >= 2) { a.ln_recomputed = activation(N * C); }
    for (int l = 0; l < shape.layers; l++) {
        LayerActivations x;
        for (auto* b : {&x.ln1, &x.ln2}) { *b = activation(model.recompute < 2 ? N * C : 0); }
        x.fch_gelu = activation(model.recompute < 1 ? N * 4 * C : 0);
        for (Buffer<floatX>* b : {&x.residual2, &x.residual3}) { *b = Buffer<floatX>(N * C); }
        x.attention = activation(N * C);
        for (auto* b : {&x.ln1_mean, &x.ln1_rstd, &x.ln2_mean, &x.ln2_rstd}) { *b = Buffer<float>(N); }
        x.qkv = activation(N * 3 * C);
        x.fch = activation(N * 4 * C);
        x.lse = Buffer<float>(N * shape.heads);
        a.layers.push_back(std::move(x));
    }
    for (Buffer<int>* b : {&model.inputs, &model.targets}) { *b = Buffer<int>(N); }
    model.upload = Upload(N);
}

// -----------------------------------------------------------------------------------------------------------
// Forward and backward

// Outputs of LayerNorm and GELU. Normally each layer has its own buffers. With --recompute 1 all layers share
// one for GELU, with 2 also one for LayerNorm, and the backward pass recomputes the contents.
inline Activation ln1_of(Model& model, int l) {
    return model.recompute < 2 ? model.acts.layers[l].ln1 : model.acts.ln_recomputed;
}
inline Activation ln2_of(Model& model, int l) {
    return model.recompute < 2 ? model.acts.layers[l].ln2 : model.acts.ln_recomputed;
}
inline Activation gelu_of(Model& model, int l) {
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
    for (size_t b = size_t(L); b < model.gathered.size(); b++) { main.wait(model.gathered[b]); }  // embedding
    device::encoder_forward(a.encoded, model.inputs, model.embedding.wte, model.embedding.wpe, B, T, C, main);

    main.wait(model.gathered[0]);
    device::layernorm_forward(ln1_of(model, 0), a.layers[0].ln1_mean, a.layers[0].ln1_rstd, a.encoded,
                              model.weights[0].ln1w, model.weights[0].ln1b, N, C, main);

    floatX* residual = a.encoded;
    for (int l = 0; l < L; l++) {
        const LayerTensors<floatX>& w = model.weights[l];
        LayerActivations& x = a.layers[l];
        const Activation ln1 = ln1_of(model, l), ln2 = ln2_of(model, l), fch_gelu = gelu_of(model, l);
        device::matmul_forward(model.matmul, x.qkv, ln1, w.qkvw, w.qkvb, N, C, 3 * C, main);
        device::attention_forward(x.attention, x.lse, x.qkv, B, T, C, NH, main, model.matmul.bf16);
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
    device::matmul_forward(model.matmul, a.logits, a.lnf, model.embedding.wte, nullptr, N, C,
                           shape.padded_vocab_size, main);
}

// Cross entropy of the last forward pass: adds scale * (sum over B * T tokens) to *loss. If `with_gradient`,
// the logits are replaced by their gradients, each token's times dloss.   targets: (B,T), on the host
inline void classify(Model& model, const int* targets, int B, int T, float* loss, float scale, float dloss,
                     bool with_gradient, Stream& main) {
    Activations& a = model.acts;
    model.upload.copy(model.targets, targets, long(B) * T, main);
    device::fused_classifier(a.logits, a.losses, dloss, model.targets, B * T, model.shape.vocab_size,
                             model.shape.padded_vocab_size, with_gradient, main);
    device::add_scaled_sum(loss, a.losses, long(B) * T, scale, main);
}

// Adds the gradients of the last forward() and classify() to model.grads; the first micro-step of a step
// overwrites them. Calls block_done(b) as soon as block b's gradients are final.
inline void backward(Model& model, int B, int T, Stream& main, const std::function<void(int)>& block_done) {
    const Phase phase("backward");
    const int C = model.shape.channels, NH = model.shape.heads, L = model.shape.layers, N = B * T;
    Activations& a = model.acts;
    device::matmul_backward(model.matmul, a.dprojected, model.dembedding.wte, a.logits, a.lnf,
                            model.embedding.wte, N, C, model.shape.padded_vocab_size, model.sums, main);
    device::set_zero(a.dresidual.data(), long(N) * C, main);
    device::layernorm_backward(a.dresidual, model.dembedding.lnfw, model.dembedding.lnfb,
                               model.gradients[L - 1].fcprojb, a.dprojected, a.layers[L - 1].residual3,
                               model.embedding.lnfw, a.lnf_mean, a.lnf_rstd, N, C, model.sums, main);
    for (int l = L - 1; l >= 0; l--) {
        const LayerTensors<floatX>& w = model.weights[l];
        const LayerTensors<float>& dw = model.gradients[l];
        LayerActivations& x = a.layers[l];
        floatX* residual = l == 0 ? a.encoded : a.layers[l - 1].residual3;
        float* fcprojb_before = l == 0 ? nullptr : model.gradients[l - 1].fcprojb;
        const Activation ln1 = ln1_of(model, l), ln2 = ln2_of(model, l), fch_gelu = gelu_of(model, l);

        if (model.recompute >= 1) { device::gelu_forward(fch_gelu, x.fch, long(N) * 4 * C, main); }
        device::matmul_gelu_backward(model.matmul, a.dfch, dw.fcprojw, dw.fcb, a.dresidual, fch_gelu, x.fch,
                                     w.fcprojw, N, 4 * C, C, model.sums, main);
        if (model.recompute >= 2) {
            device::layernorm_forward(ln2, x.ln2_mean, x.ln2_rstd, x.residual2, w.ln2w, w.ln2b, N, C, main);
        }
        device::matmul_backward(model.matmul, a.dprojected, dw.fcw, a.dfch, ln2, w.fcw, N, C, 4 * C,
                                model.sums, main);
        device::layernorm_backward(a.dresidual, dw.ln2w, dw.ln2b, dw.attprojb, a.dprojected, x.residual2,
                                   w.ln2w, x.ln2_mean, x.ln2_rstd, N, C, model.sums, main);
        device::matmul_backward(model.matmul, a.dprojected, dw.attprojw, a.dresidual, x.attention, w.attprojw,
                                N, C, C, model.sums, main);
        device::attention_backward(a.dqkv, dw.qkvb, a.dprojected, x.attention, x.qkv, x.lse, B, T, C, NH,
                                   model.sums, main, model.matmul.bf16);
        if (model.recompute >= 2) {
            device::layernorm_forward(ln1, x.ln1_mean, x.ln1_rstd, residual, w.ln1w, w.ln1b, N, C, main);
        }
        device::matmul_backward(model.matmul, a.dprojected, dw.qkvw, a.dqkv, ln1, w.qkvw, N, C, 3 * C,
                                model.sums, main);
        device::layernorm_backward(a.dresidual, dw.ln1w, dw.ln1b, fcprojb_before, a.dprojected, residual,
                                   w.ln1w, x.ln1_mean, x.ln1_rstd, N, C, model.sums, main);
        model.sums.add_pending(main);
        block_done(l);
    }
    device::encoder_backward(model.dembedding.wte, model.dembedding.wpe, a.dresidual, model.inputs, B, T, C,
                             main);
    for (size_t b = size_t(L); b < model.layout.blocks.size(); b++) { block_done(int(b)); }
}

// -----------------------------------------------------------------------------------------------------------
// One worker: data parallelism over its ranks, optimizer state sharded (ZeRO-1)

struct Worker {
    Model& model;
    Comm& comm;  // joins the ranks of this worker
    Stream& main;
    Stream& comm_stream;
    std::vector<Range> shards;   // this rank's part of each block
    Buffer<float> m, v, copy;    // of this rank's shards: the optimizers' moments, fp32 parameters
    float* master = reinterpret_cast<float*>(model.params.data());  // fp32 parameters: the model's or `copy`
    Buffer<float> reduced;       // this rank's shard of the summed gradients; unused with one rank
    Buffer<Scalars> scalars = Buffer<Scalars>(1);
    Buffer<OutlierWindow> outliers = Buffer<OutlierWindow>(1);  // the same on all ranks
    long adamw_updates = 0;                                     // AdamW's t, skipped updates included
    std::unique_ptr<ShardedMuon> muon;                          // null: AdamW updates matrices, too
    Event to_comm, to_main, to_copies, spare_is_copied, state_is_copied;  // points where streams wait
    Traffic traffic;                                            // of `comm`
    std::function<void()> progress = [] {};  // called for each batch: tells the watchdog that all is well
    StopVote stop{comm, comm_stream};
    Stream copies{};  // copies to snapshots in host memory while `main` continues

    Worker(Model& model, Comm& comm, Stream& main, Stream& comm_stream)
        : model(model), comm(comm), main(main), comm_stream(comm_stream) {
        const long n = model.layout.shard_size();
        for (Buffer<float>* b : {&m, &v}) { *b = Buffer<float>(n); }
        if (comm.size() > 1) { reduced = Buffer<float>(n); }
        if (has_master_copy(comm.size())) { master = copy = Buffer<float>(n); }
        for (int b = 0; b < blocks(); b++) { shards.push_back(model.layout.shard(b, comm.rank())); }
    }

    int blocks() const { return int(model.layout.blocks.size()); }
    const Range& shard(int block) const { return shards[size_t(block)]; }
    float* shard_gradients() { return comm.size() > 1 ? reduced.data() : model.grads.data(); }
    // Scratch memory between steps, when the gradients are no longer needed.   (layout.size)
    float* spare() { return model.grads.data(); }
};

// Communication that is enqueued after this call waits for all of the main stream's work so far.
inline void hand_over(Worker& worker) { order(worker.main, worker.comm_stream, worker.to_comm); }

// Work that is enqueued on the main stream after this call waits for all communication so far.
inline void hand_back(Worker& worker) { order(worker.comm_stream, worker.main, worker.to_main); }

// Starts to sum block b's gradients over the ranks, while the backward pass continues.
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

// Sums `count` scalars over the ranks, after all work enqueued so far and before any that is enqueued later.
inline void sum_over_ranks(Worker& worker, float* values, size_t count) {
    if (worker.comm.size() == 1) { return; }
    hand_over(worker);
    worker.comm.all_reduce(values, count, worker.comm_stream, &worker.traffic);
    hand_back(worker);
}

// Gradients of the mean loss over `micro_steps` batches and all ranks; each rank gets its shard of them. A
// request to stop reaches all ranks with the loss. Returns false if the worker abandons the step.
inline bool compute_gradients(Worker& worker, DataLoader& loader, int B, int T, int micro_steps) {
    Model& model = worker.model;
    Scalars* scalars = worker.scalars;
    const float share = 1.0f / (float(B) * float(T) * float(micro_steps) * float(worker.comm.size()));
    device::set_zero(scalars, 1, worker.main);
    for (int micro_step = 0; micro_step < micro_steps; micro_step++) {
        const bool last = micro_step == micro_steps - 1;
        if (micro_step > 0 && worker.stop.votes_to_leave()) { return false; }
        worker.progress();
        loader.next_batch();
        forward(model, loader.inputs(), B, T, worker.main);
        classify(model, loader.targets(), B, T, &scalars->loss, share, share, true, worker.main);
        worker.main.wait(worker.spare_is_copied);  // it may still hold the last checkpoint's model
        model.sums.begin(model.grads, model.layout, micro_step == 0, worker.main);
        backward(model, B, T, worker.main, [&](int b) { if (last) { reduce_block(worker, b); } });
    }
    hand_back(worker);
    device::global_norm_squared(&scalars->norm_squared, worker.shard_gradients(), model.layout.shard_size(),
                                worker.main);
    worker.stop.tell(&scalars->stop, worker.main);
    sum_over_ranks(worker, &scalars->loss, summed_scalars);
    return true;
}

// The update of this rank's shard: the layers' matrices by Muon if the worker has it, the rest by AdamW. It
// reads the step's scalars on the device, so the host does not wait. A gradient norm that is not finite, or
// an outlier, leaves the parameters as they are.
inline void update(Worker& worker, const Options& options, float learning_rate, float muon_rate = 0) {
    const Phase phase("update");
    const long t = ++worker.adamw_updates;
    Scalars* scalars = worker.scalars;
    worker.main.wait(worker.state_is_copied);
    device::clip_scale(&scalars->norm, &scalars->clip_scale, &scalars->norm_squared, options.adamw.clip,
                       worker.main);
    device::skip_outliers(worker.outliers.data(), &scalars->loss_zscore, &scalars->norm_zscore,
                          &scalars->clip_scale, &scalars->loss, &scalars->norm,
                          options.outliers, worker.main);
    const AdamW adam = adamw(learning_rate, options.adamw, int(t));
    StochasticRounding rounding{options.seed, uint32_t(t), 0};
    for (int b = 0; b < worker.blocks(); b++) {
        const Range& range = worker.shard(b);
        const long decayed = worker.model.layout.decayed(b, worker.comm.rank());
        const long skip = worker.muon && b < worker.model.layout.layers ? decayed : 0;  // Muon's
        const long at = range.shard + skip;
        rounding.first = uint64_t(worker.model.layout.logical_index(range.flat + skip));
        device::adamw_update(worker.model.params + range.flat + skip, worker.master + at, worker.m + at,
                             worker.v + at, worker.shard_gradients() + at, range.count - skip, decayed - skip,
                             adam, &scalars->clip_scale, rounding, worker.main);
    }
    if (!worker.muon) { return; }
    const Muon step = muon(muon_rate, options.muon, options.adamw.weight_decay);
    worker.muon->update({worker.model.params, worker.master, worker.m, worker.shard_gradients()}, step,
                        &scalars->clip_scale, rounding, worker.model.matmul, worker.main, worker.comm_stream,
                        worker.traffic);
}

// A step that changes no parameter but launches every kernel and collective of a real one, so that memory
// allocations and lazy loading of kernels happen before any exchange is under way.
inline void warm_up(Worker& worker, const Options& options) {
    const int B = options.batch, T = options.seq_len;
    Scalars* scalars = worker.scalars;
    const std::vector<int> tokens(size_t(B) * size_t(T));
    const Scalars not_finite{NAN, NAN, NAN, NAN, NAN, NAN, NAN};  // so update() changes nothing
    worker.model.sums.begin(worker.model.grads, worker.model.layout, true, worker.main);
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

// Sets the parameters; the caller may then free `flat`.   flat: (layout.size), on the host
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

// Gathers the shards of all ranks. If `flat` is not empty, starts to copy the whole model to it: only one
// rank passes such a buffer, since a machine may lack the memory for a copy per rank. Between steps only.
// flat: (layout.size) or empty   shard: (layout.shard_size())
inline void gather_flat(Worker& worker, HostBuffer<float>& flat, const float* shard) {
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
    if (flat.count() == 0) { return; }
    order(worker.main, worker.copies, worker.to_copies);
    device::copy_to_host_later(flat.data(), gathered, layout.size, worker.copies);
    worker.copies.record(worker.spare_is_copied);
}

// -----------------------------------------------------------------------------------------------------------
// Evaluation and sampling

// Runs `work` with the parameters of `shard`, then restores the worker's own parameters bit for bit. Between
// steps only.   shard: (layout.shard_size()), or null to keep the worker's own
inline void with_parameters(Worker& worker, const float* shard, const std::function<void()>& work) {
    if (!shard) { return work(); }
    floatX *params = worker.model.params, *displaced = reinterpret_cast<floatX*>(worker.spare());
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

// Fraction of the examples whose correct ending has the lowest loss per token. The ranks share the examples.
inline double eval_accuracy(Worker& worker, const EvalSet& set, int B, int T) {
    Model& model = worker.model;
    Scalars* scalars = worker.scalars;
    auto losses_of = [&](const EvalBatch& batch, float* losses) {
        worker.progress();
        forward(model, batch.inputs.data(), batch.B, batch.T, worker.main);
        classify(model, batch.targets.data(), batch.B, batch.T, &scalars->loss, 0, 0, false, worker.main);
        device::copy_to_host(losses, model.acts.losses.data(), long(batch.B) * batch.T, worker.main);
    };
    float correct = float(count_right(set, B, T, worker.comm.rank(), worker.comm.size(), losses_of));
    device::copy_to_device(&scalars->loss, &correct, 1, worker.main);
    sum_over_ranks(worker, &scalars->loss, 1);
    device::copy_to_host(&correct, &scalars->loss, 1, worker.main);
    return double(correct) / double(set.size());
}

// Samples up to `length` tokens that continue `prompt` (at least one token), and hands each to take(), until
// that returns false. The model sees the last T tokens.
inline void sample(Model& model, const std::vector<int>& prompt, int length, int T, const Sampling& sampling,
                   uint64_t seed, Stream& main, const std::function<bool(int)>& take) {
    const int V = model.shape.vocab_size, Vp = model.shape.padded_vocab_size;
    std::vector<floatX> row(static_cast<size_t>(Vp));
    auto logits_after = [&](const int* window, int rows, int used, float* logits) {
        forward(model, window, 1, rows, main);
        device::copy_to_host(row.data(), model.acts.logits + long(used - 1) * Vp, Vp, main);
        std::copy(row.begin(), row.begin() + V, logits);
    };
    continue_text(prompt, length, T, V, sampling, seed, logits_after, take);
}

#ifndef TESTING  // tests and benchmarks call what is above

// -----------------------------------------------------------------------------------------------------------
// A run

// What the host reads about a step once the device has completed it, which may be a step later.
struct StepResult {
    StepMetrics metrics;            // step 0: there is nothing to read
    long update = 0;                // this worker's updates so far, including this one
    std::vector<SyncReport> syncs;  // merged in this step
    HostBuffer<Scalars> scalars{1};
    Event done;
};

// The newest checkpoint of the run, or nothing. A checkpoint of another shape is converted to this run's.
inline Resumption find_checkpoint(const Options& o, Process& process, const Inputs& in) {
    if (!o.resume) { return {process.run_id}; }
    const std::string folder = checkpoint_folder(o, process);
    const StateIdentity who = state_identity(o, process, 0, "");
    const RunShape shape{in.shape, in.layout, who.worker, who.rank, who.workers, who.ranks};
    const MakeOuterReshape outer = [&](const SavedState& state, const RunShape& old, const RunShape& to) {
        return std::make_unique<DilocoReshape>(state, old, OuterShape(to, o.diloco));
    };
    auto open = [&](const ResumePoint& point, std::vector<std::string>& notes) {
        return open_state({folder, point}, shape, outer, notes);
    };
    return find_checkpoint(process, {folder, who, in.steps, o.max_steps < 0, o.resolved, default_of,
                                     *in.train_loader, open});
}

struct Run {  // everything that a process holds while it trains
    const Options& options;
    Inputs& inputs;
    const std::vector<Fragment>& fragments;  // empty: workers exchange nothing
    Session session;                         // logs, communicators, requests to stop, ...
    Stream main{}, inner_stream{Stream::Kind::communicate}, outer_stream;
    std::unique_ptr<Model> model{};
    std::unique_ptr<Worker> worker{};
    std::unique_ptr<OuterLoop> outer{};           // Streaming DiLoCo; null: workers exchange nothing
    std::optional<Checkpoints> checkpoints{};     // none: nothing is written
    std::string agreed_options{};                 // the options that all workers share
    long step = 0, step_before = 0, saved_step = 0;  // now, before the last update, in the last checkpoint
    StepResult results[2]{};                      // of this update and of the one before
    double last_collected = 0;                    // now_seconds() when the previous step was completed
    Outcome::Course course = Outcome::continues;  // as of the last exchange
    long largest_overlap = 0;                     // the largest tau of all workers

    Run(const Options& o, Process& process, Inputs& in, const std::vector<Fragment>& fragments)
        : options(o), inputs(in), fragments(fragments),
          session(o, process, in, fragments, sync_bytes(o.diloco, fragments, in.layout, o.workers),
                  memory_need(o, in.shape, in.layout, outer_bytes(o.diloco, in.layout, o.workers)),
                  find_checkpoint(o, process, in)),
          outer_stream(outer_stream_kind(o.diloco.transport)) {}

    StepResult& last_result() { return results[session.totals.updates % 2]; }
    StepResult& previous_result() { return results[(session.totals.updates + 1) % 2]; }
    bool stops_together() const { return outer && options.workers > 1 && !options.diloco.is_elastic(); }
    bool has_left() const { return course == Outcome::left; }  // while it waited for others or the store
    bool is_over() const { return course == Outcome::over; }   // the other workers have completed the run
    bool is_stopping() const {
        return stops_together() ? session.stopping.is_last_step_together(step)
                                : has_left() || session.stopping.is_last_update_alone(session.totals.updates);
    }
    // Whether the last update reached or jumped over a multiple of `every`.
    bool passes(long every) const { return every > 0 && step / every > step_before / every; }
    // The parameters that are evaluated and saved; null: the worker's own.
    const float* evaluated() { return outer && options.evaluate == "global" ? outer->global(main) : nullptr; }
};

// Waits until the device has completed a step, and reports it. RunError if its loss is not finite.
inline void collect(Run& run, StepResult& result) {
    Session& session = run.session;
    StepMetrics metrics = result.metrics;
    if (metrics.step == 0) { return; }
    result.done.synchronize();
    const Scalars scalars = result.scalars.data()[0];
    if (scalars.stop > 0) { session.stopping.heard_with_loss(result.update); }
    const double now = now_seconds();
    session.report.step(metrics, scalars, now - run.last_collected);
    run.last_collected = now;
    session.check_loss(scalars.loss, format("the loss of step %ld", metrics.step), metrics.step - 1);
    session.report.syncs(metrics.step, result.syncs);
    session.report.rates(run.inputs.steps - session.resumed.step);
    result.metrics.step = 0;
}

// -----------------------------------------------------------------------------------------------------------
// Between steps: evaluation, samples, checkpoints

inline void print_sample(Run& run, long step) {
    const Options& o = run.options;
    const Watchdog::Alone alone(run.session.watchdog);
    std::string text = o.prompt;
    sample(*run.model, run.inputs.prompt, o.sample_length, o.seq_len, o.sampling, o.seed + uint64_t(step),
           run.main, [&](int token) {
               text += run.inputs.tokenizer->decode(token);
               return true;
           });
    run.session.status.print(format("sample after step %ld:\n---\n", step) + printable(text) + "\n---");
}

// Starts to copy the model to be saved.   flat: (layout.size) on the process that saves it, empty elsewhere
inline void gather_model(Run& run, HostBuffer<float>& flat) {
    if (!run.session.is_first_worker()) { return; }
    const float* shard = run.evaluated();
    gather_flat(*run.worker, flat, shard ? shard : run.worker->master);
}

inline void save_model(Run& run, long step) {
    HostBuffer<float> flat(run.session.is_first() ? run.inputs.layout.size : 0);
    gather_model(run, flat);
    if (!run.session.is_first()) { return; }
    run.worker->copies.synchronize();
    const Watchdog::Alone alone(run.session.watchdog);
    const std::string path = model_path(run.session.folder, step);
    write_model(path, run.inputs.shape, run.inputs.layout, flat.data());
    run.session.status.print("wrote " + path);
}

// After `step` steps: validation, HellaSwag and a sample, each if it is due. After the last step, saves the
// model, unless a checkpoint of this step contains it.
inline void evaluate(Run& run, long step) {
    const Options& o = run.options;
    const Inputs& in = run.inputs;
    Session& session = run.session;
    const bool last = step == in.steps;
    auto is_due = [&](long every) { return run.passes(every) || (every > 0 && (last || step == 0)); };
    const bool validates = in.validation_loader && is_due(o.validate_every);
    const bool answers = in.hellaswag && step > 0 && is_due(o.validate_every);
    const bool samples = in.tokenizer && session.is_first_worker() && step > 0 && is_due(o.sample_every);
    const bool has_checkpoint = o.save_every > 0 && session.resumed.step < step;
    const bool saves = !o.output.empty() && step > 0 && last && !has_checkpoint;
    if (!validates && !answers && !samples && !saves && !last) { return; }
    collect(run, run.last_result());
    if (validates || answers || samples) {
        with_parameters(*run.worker, run.evaluated(), [&] {
            if (validates) {
                session.validated(step, validation_loss(*run.worker, *in.validation_loader, o.batch,
                                                        o.seq_len, in.validation_batches));
            }
            if (answers) {
                const double accuracy = eval_accuracy(*run.worker, *in.hellaswag, o.batch, o.seq_len);
                session.report.hellaswag(step, accuracy, in.hellaswag->size());
            }
            if (samples && session.is_first()) { print_sample(run, step); }
        });
    }
    if (saves) { save_model(run, step); }
    run.last_collected = now_seconds();  // evaluation is not part of a step's time
}

inline TrainingArrays arrays_of(Worker& worker) {
    return {worker.model.layout, worker.comm.rank(),  worker.master,         worker.m,
            worker.v,            worker.model.params, worker.outliers.data()};
}

// Starts to copy the state after `step` steps. The next backward pass waits until the model has been copied,
// the next update until everything has.
inline TrainingSnapshot& take_snapshot(Run& run, long step) {
    Worker& worker = *run.worker;
    const bool last = step == run.inputs.steps;
    collect(run, run.last_result());
    TrainingSnapshot& snapshot = run.checkpoints->next(last || run.is_stopping());
    wait_for_parameters(worker);
    if (!last) { gather_model(run, snapshot.model); }  // adds to the traffic that is saved below
    order(run.main, worker.copies, worker.to_copies);
    snapshot.begin_copies(arrays_of(worker), worker.copies);
    if (run.outer) { run.outer->take_snapshot(worker.copies); }
    worker.copies.record(worker.state_is_copied);
    if (last || run.is_stopping()) { run.main.wait(worker.state_is_copied); }  // no update() follows to wait
    const Progress progress{step, run.inputs.steps, worker.adamw_updates, worker.traffic, run.session.totals};
    snapshot.set_fields(fields_of(progress, run.inputs.shape, *run.inputs.train_loader),
                        fields_of(run.options.resolved));
    return snapshot;
}

// -----------------------------------------------------------------------------------------------------------
// The step and the loop

// Acts on the outcome of an exchange. Its syncs are reported later, when their means have been applied.
inline void follow(Run& run, const Outcome& outcome) {
    Worker& worker = *run.worker;
    const bool is_new = run.session.totals.updates < join_warmup_updates, jumps = outcome.step > run.step;
    run.step = outcome.step;
    run.course = outcome.course;
    worker.model.matmul.leaves_sms = outcome.exchanges;
    run.session.report.events(run.step, outcome.events);
    if (!outcome.joined && !(is_new && jumps)) { return; }
    run.session.totals.joined_after = run.session.totals.updates;
    // The worker may have lost its disk: it skips the rows that it has trained on before.
    if (is_new) { run.inputs.train_loader->skip_to(outcome.step * run.options.micro_steps()); }
    if (!outcome.joined || run.options.elastic.join_moments) { return; }  // moments came with the snapshot
    for (Buffer<float>* b : {&worker.m, &worker.v}) { device::set_zero(b->data(), b->count(), run.main); }
    worker.adamw_updates = 0;
}

// One step: this worker's update, then the exchange between workers. Returns when all of it is enqueued and
// the device has completed the previous step. Reports that step, and this one, too, if it is complete. If the
// worker abandons the step, its state is the one before the step, which a resumed run then repeats.
inline void train_step(Run& run, long step) {
    const Options& o = run.options;
    Worker& worker = *run.worker;
    Totals& totals = run.session.totals;
    Stopping& stopping = run.session.stopping;
    DataLoader& loader = *run.inputs.train_loader;
    const DataPosition begin = loader.position();
    if (o.overfit) { loader.reset(); }
    if (!compute_gradients(worker, loader, o.batch, o.seq_len, int(o.micro_steps()))) {
        loader.seek(begin);
        return stopping.note_step_left();
    }
    totals.tokens += uint64_t(o.total_batch);
    totals.updates++;
    StepResult& result = run.last_result();
    result.update = totals.updates;
    const long steps = run.inputs.steps;
    LearningRateSchedule of_muon = o.schedule;
    of_muon.peak = o.muon.learning_rate;
    const float warmup = join_warmup(totals), lr = learning_rate(o.schedule, steps, step - 1) * warmup;
    const Traffic inner = worker.traffic;  // compute_gradients() joined the streams: nothing writes it now
    update(worker, o, lr, learning_rate(of_muon, steps, step - 1) * warmup);
    run.step = step;
    collect(run, run.previous_result());  // before an exchange, whose waits are no part of that step
    if (run.outer) {
        const Phase phase("exchange");
        if (stopping.should_tell_workers(totals.updates)) { run.outer->request_stop(); }
        Outcome outcome =
            run.outer->after_inner_step(step, totals.tokens, worker.master, worker.model.params, run.main);
        follow(run, outcome);
        if (run.is_over()) { return; }
        result.syncs = std::move(outcome.syncs);
        stopping.heard_with(result.syncs, run.largest_overlap);
    }
    gather_parameters(worker);
    result.metrics = {step, 0, lr, 0, 0, totals.tokens, 0, inner.bytes_sent, inner.bytes_received};
    device::copy_to_host_later(result.scalars.data(), worker.scalars.data(), 1, run.main);
    run.main.record(result.done);
    if (result.done.query()) { collect(run, result); }
}

// After the last step: merges what is in flight, and evaluates. If a request to stop ends the wait for other
// workers, the run resumes from the checkpoint of this step.
inline void finish(Run& run, long step) {
    if (run.has_left()) { return; }
    if (run.outer) {
        Worker& worker = *run.worker;
        collect(run, run.last_result());
        const double start = now_seconds();
        wait_for_parameters(worker);  // the merge writes what is being gathered
        const Outcome outcome = run.outer->finish(step, worker.master, worker.model.params, run.main);
        follow(run, outcome);
        if (run.is_over()) { return; }
        gather_parameters(worker);
        run.main.synchronize();
        run.session.report.syncs(step, outcome.syncs);
        run.session.totals.train_seconds += now_seconds() - start;
    }
    if (!run.has_left()) { evaluate(run, step); }
}

// After each step: evaluation and a checkpoint, each if it is due; after the last step, the last merges.
inline void end_step(Run& run, long step) {
    const bool last = step == run.inputs.steps;
    const long every = run.options.save_every;
    const bool saves = run.checkpoints && step != run.saved_step &&
                       (run.is_stopping() || run.passes(every) || (every > 0 && last));
    if (!last && step > run.step_before) { evaluate(run, step); }
    const double start = now_seconds();
    TrainingSnapshot* snapshot = saves ? &take_snapshot(run, step) : nullptr;
    if (last) { finish(run, step); }
    if (!last && run.outer && run.is_stopping()) { run.outer->collect_in_flight(run.main); }
    if (run.is_over()) { return; }
    if (run.has_left() && run.checkpoints && !snapshot) { snapshot = &take_snapshot(run, step); }
    if (!snapshot) { return; }
    // The state after the last step lacks the last merges, which a resumed run repeats; the model has them.
    if (last) { gather_model(run, snapshot->model); }
    run.checkpoints->write(step, last, run.worker->copies);
    run.saved_step = step;
    run.session.logger.checkpoint(step, now_seconds() - start);
    run.last_collected = now_seconds();
}

// Trains until the last step or a request to stop.
inline void training_loop(Run& run) {
    Watchdog& watchdog = run.session.watchdog;
    run.last_collected = now_seconds();
    if (run.step == run.inputs.steps && run.session.resumed.step < run.step) {  // an elastic worker jumped
        const Watchdog::Watch watch(watchdog, "the last evaluation");
        end_step(run, run.step);
    }
    while (run.step < run.inputs.steps && !run.is_stopping()) {
        run.step_before = run.step;
        {
            const Watchdog::Watch watch(watchdog, format("step %ld", run.step + 1));
            train_step(run, run.step + 1);
        }
        if (run.is_over()) { return; }
        const Watchdog::Watch watch(watchdog, format("the work after step %ld", run.step));
        end_step(run, run.step);
        if (run.checkpoints) { run.checkpoints->print_messages(); }
    }
    if (run.session.resumed.step == run.inputs.steps && run.step > 0) {  // resumed after the last step
        const Watchdog::Watch watch(watchdog, "the last evaluation");
        finish(run, run.step);
    }
}

// -----------------------------------------------------------------------------------------------------------
// From options to a run

// Before the first step: the first evaluation, a resumed run's state, the meeting with the other workers.
inline void begin_training(Run& run) {
    Session& session = run.session;
    Worker& worker = *run.worker;
    if (session.resumed.step == 0) {
        const Watchdog::Watch watch(session.watchdog, "the evaluation before step 1");
        evaluate(run, 0);
    }
    if (run.checkpoints) {  // without checkpoints a stop would save nothing
        run.largest_overlap = session.process.largest("overlap", run.options.diloco.overlap);
        if (run.stops_together()) { session.report.stop_overlap = run.largest_overlap; }
        worker.stop.may_leave_steps = !run.stops_together();
        session.stopping.accept_requests();
    }
    run.step = run.step_before = run.saved_step = session.resumed.step;
    if (run.outer) {
        const Watchdog::Watch watch(session.watchdog, "the first exchange");
        const Outcome outcome = run.outer->begin(run.step, session.totals.tokens, worker.master,
                                                 worker.model.params, run.main);
        if (!run.outer->warning().empty()) { session.report.say("warning: " + run.outer->warning()); }
        follow(run, outcome);
        if (run.course != Outcome::continues) { return; }
        if (run.options.diloco.is_elastic()) { gather_parameters(worker); }
    }
    if (run.options.save_every > 0 && run.checkpoints) { run.checkpoints->allocate(); }
}

// Trains. Returns true if the run is complete, and false if a request has stopped it.
inline bool train_to_the_end(Run& run) {
    Session& session = run.session;
    begin_training(run);
    if (run.has_left()) { return session.left_while_waiting(run.outer->gave_up()); }
    if (!run.is_over()) { training_loop(run); }
    if (run.is_over()) { return session.ended_without_this_worker(); }
    const Watchdog::Watch watch(session.watchdog, "the end of the run");
    if (run.checkpoints) { run.checkpoints->finish(); }
    wait_for_parameters(*run.worker);  // a process that left amid a collective would leave its peers hanging
    run.main.synchronize();
    const long steps = run.inputs.steps;
    const std::string gave_up = run.outer ? run.outer->gave_up() : "";
    if (run.step < steps || run.has_left()) { return session.stopped_after(run.step, steps, gave_up); }
    return session.completed(steps, run.worker->traffic, run.outer ? run.outer->costs() : OuterCosts());
}

// The model and the worker that trains it, with the initial parameters or those of a checkpoint.
inline void make_worker(Run& run) {
    const Options& o = run.options;
    Inputs& in = run.inputs;
    Session& session = run.session;
    const MatmulOptions products(matmul_precision(o.matmul_precision), o.fuse_gelu,
                                 session.outer ? session.outer->sms() : 0);
    run.model = std::make_unique<Model>(in.shape, in.layout, o.recompute, products);
    allocate_activations(*run.model, o.batch, o.seq_len);
    run.worker = std::make_unique<Worker>(*run.model, *session.inner, run.main, run.inner_stream);
    Worker& worker = *run.worker;
    worker.progress = [&session] { session.watchdog.progress(); };
    worker.stop.is_asked = [&session] { return session.stopping.is_requested(); };
    if (o.uses_muon()) { worker.muon = std::make_unique<ShardedMuon>(run.model->layout, *session.inner); }
    set_parameters(worker, std::exchange(in.initial, {}).data());
    if (runs_on_gpu) {
        const Watchdog::Watch watch(session.watchdog, "the first collectives");
        for (bool leaves : {true, false}) { run.model->matmul.leaves_sms = leaves, warm_up(worker, o); }
    }
    if (!session.resumed.state) { return; }
    restore(arrays_of(worker), *session.resumed.state, run.main);
    const Watchdog::Watch watch(session.watchdog, "the parameters of the checkpoint");
    gather_parameters(worker);
    wait_for_parameters(worker);
    run.main.synchronize();
    const Progress progress = progress_of(session.resumed.fields);
    session.totals = progress.totals;
    worker.adamw_updates = progress.adamw_updates;
    worker.traffic = progress.inner;
}

// Streaming DiLoCo between the workers: in lock-step, or elastic.
inline std::unique_ptr<OuterLoop> make_outer_loop(Run& run) {
    const Options& o = run.options;
    Session& session = run.session;
    const Process& process = session.process;
    if (!o.diloco.is_elastic()) {
        return std::make_unique<Diloco>(o.diloco, run.fragments, run.inputs.layout, process.rank,
                                        *session.outer, run.outer_stream);
    }
    auto while_waiting = [&run, &session](const std::vector<OuterEvent>& events) {
        session.watchdog.progress();
        session.report.events(run.step, events);
        return !session.stopping.is_requested();  // false ends the wait
    };
    auto refuse = [&run](const std::string& theirs) {
        compare_options(run.agreed_options, theirs, rows_of_options);
    };
    auto open_store = [&o, &process] { return open_log_store(process.store_url, o.run_name, o.timeout); };
    SyncLogOptions of_log = {o.elastic, process.rank, o.workers, o.diloco.overlap, run.inputs.steps,
                             o.timeout, o.save_every > 0, session.folder};
    suit_store(of_log, process.store_url);
    return std::make_unique<ElasticDiloco>(
        o.diloco, of_log, process.worker, run.fragments, run.inputs.layout, *session.inner, run.inner_stream,
        LogStart{random_hex(16), run.agreed_options, "", {}, false}, open_store,
        ElasticCallbacks{while_waiting, refuse, [&session] { device::use_in_this_thread(session.device); }},
        InnerMoments{run.worker->m, run.worker->v, &run.worker->adamw_updates});
}

// Everything that training needs, from communicators to checkpoints.
inline void set_up(Run& run) {
    const Options& o = run.options;
    Resumption& resumed = run.session.resumed;
    run.session.connect();
    make_worker(run);
    std::string exchanges;
    if (o.diloco.streams()) {
        run.outer = make_outer_loop(run);
        run.outer->start(run.worker->master, run.main);
        if (resumed.state) { run.outer->restore(*resumed.state, resumed.fields, run.main); }
        exchanges = plan(o.diloco, run.fragments, run.inputs.layout, o.workers);
    }
    resumed.state.reset();
    auto snapshot = [&run] { return run.outer ? &run.outer->snapshot() : nullptr; };
    auto when_whole = [&run] { if (run.outer) { run.outer->checkpointed(); } };
    if (!o.output.empty()) { run.checkpoints.emplace(run.session, run.inputs, snapshot, when_whole); }
    run.session.announce(run.inputs, offsets(run.fragments), run.model->matmul.description(), exchanges);
}

// Trains one process of a run. Returns its exit status.
inline int train(const Options& o, Process& process) {
    Inputs in = open_inputs(o, process);
    if (o.diloco.streams()) { validate(o.diloco, in.steps, o.workers); }
    const std::vector<Fragment> fragments = make_fragments(in.layout, o.diloco);
    if (o.diloco.transport == "tcp" && !o.interface.empty()) { interface_address(o.interface); }  // it exists
    process.meet();
    std::unique_ptr<Run> run;  // outlives an error: on a GPU, freeing it may wait for a peer that has died
    bool is_complete = false;
    try {
        const std::string agreed = text_of(fingerprint_of_run(o, in)) + log_version(process.store_url);
        agree(o, process, in, [&] {
            if (o.diloco.streams()) { validate(o.diloco, in.steps, o.workers); }
            if (!o.diloco.is_elastic()) { return; }
            const auto log = open_log_store(process.store_url, o.run_name, o.timeout);
            compare_options(agreed, options_in(*log).value_or(agreed), rows_of_options);
        });
        run = std::make_unique<Run>(o, process, in, fragments);
        run->agreed_options = agreed;
        set_up(*run);
        is_complete = train_to_the_end(*run);
        process.leave();
    } catch (const std::exception& error) {  // the other processes learn of it from the store
        if (run) { run->session.status.clear(); }  // the message takes its line
        if (run && run->checkpoints) { run->checkpoints->abandon(); }
        process.leave_with(error);
    }
    return is_complete ? 0 : stopped_status;
}

// --generate: writes text with a trained model, on one device. Returns the program's exit status.
inline int generate(const Options& o) {
    const Inputs in = open_text_inputs(o);
    device::use_device(0, "");
    Stream main;
    Model model(in.shape, in.layout, 2, matmul_precision(o.matmul_precision));  // 2: takes the least memory
    set_parameters(model, read_model(o.model, in.layout).data(), main);
    allocate_activations(model, 1, in.shape.max_seq_len);
    TextPrinter printer;
    printer.print(o.prompt);
    sample(model, in.prompt, o.sample_length, in.shape.max_seq_len, o.sampling, o.seed, main, [&](int token) {
        if (token == in.tokenizer->end_of_text()) { return false; }
        printer.print(in.tokenizer->decode(token));
        return true;
    });
    printer.end();
    return 0;
}

int main(int argc, char** argv) {
    try {
        Options options = parse_options(argc, argv);
        if (options.generate) { return generate(options); }
        check_options(options);
        validate(options.diloco, options.diloco.streams() ? options.max_steps : -1, options.workers);
        check_memory(options, outer_bytes);
        Process process = launch(options, options.resume && has_begun(options), argv);
        const SignalThread signals(!has_launcher() && !options.output.empty());
        if (process.restart > 0 && !options.output.empty()) { options.resume = 1; }
        return train(options, process);
    } catch (const std::exception& e) {
        fprintf(stderr, "error: %s\n", message_of(e).c_str());
        return exit_status(e);
    }
}
#endif
