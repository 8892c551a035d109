// Where a GPU's time goes in the trainer's own functions, by the GPU's timestamps. bench_gpu.py runs this,
// puts PyTorch beside it and prints the table; each part can be run alone:
//
//   bench_gpu steps MODEL B T RECOMPUTE           a server: for every number n on stdin it does n training
//                                                 steps and prints their milliseconds; B 0: as many as fit
//   bench_gpu layers MODEL B T RECOMPUTE ROUNDS   a step by phase, and each kind of kernel alone, against the
//                                                 rates of a large matmul and of a copy
//   bench_gpu matmuls MODEL B T RECOMPUTE ROUNDS  a step with each --fuse-gelu, and with products that leave
//                                                 an SM to NCCL
//   bench_gpu streaming VALUES ROUNDS MEGABYTES   the kernels of an exchange and of its statistics on a
//                                                 fragment of so many values, against copies that move as
//                                                 many bytes. Launches take turns over arrays of MEGABYTES in
//                                                 all: more than the caches hold
//
// MODEL: d12, d48 or tiny. Tokens are random. Figures are medians. Rates count the bytes or flops that the
// equations need, causal attention's half; not what a kernel does besides.
#define TESTING
#include "train_gpt.cu"

#include "dev/test/one_part.h"
#include "dev/test/alone.h"
#include "llmc/mfu.h"

#include <iostream>

namespace {

// ---- time on the GPU

// A point in a stream that knows when it was reached.
class Timestamp {
public:
    Timestamp() { cudaCheck(cudaEventCreate(&event)); }
    Timestamp(const Timestamp&) = delete;
    Timestamp& operator=(const Timestamp&) = delete;
    ~Timestamp() { cudaEventDestroy(event); }

    void record(Stream& stream) { cudaCheck(cudaEventRecord(event, stream)); }

    // Milliseconds from `earlier` to here. Waits for both.
    double since(const Timestamp& earlier) const {
        float milliseconds = 0;
        cudaCheck(cudaEventSynchronize(event));
        cudaCheck(cudaEventElapsedTime(&milliseconds, earlier.event, event));
        return double(milliseconds);
    }

private:
    cudaEvent_t event = nullptr;
};

inline double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

// What `work` takes on the GPU, in milliseconds.
inline double milliseconds_of(const std::function<void()>& work, Stream& stream) {
    Timestamp begin, end;
    begin.record(stream);
    work();
    end.record(stream);
    return end.since(begin);
}

// The median of several rounds, after one that does not count.
inline double median_of(int rounds, const std::function<void()>& work, Stream& stream) {
    work();
    std::vector<double> milliseconds;
    for (int i = 0; i < rounds; i++) { milliseconds.push_back(milliseconds_of(work, stream)); }
    return median(milliseconds);
}

inline void copy_on_device(void* to, const void* from, size_t bytes, Stream& stream) {
    cudaCheck(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
}

// A vector of random numbers from -1 to 1, on the GPU: what a chip draws of power, and so its clock, depends
// on the data.
template <class T>
Buffer<T> random_values(long count, Stream& stream) {
    const long period = std::min(count, 1L << 20);
    Buffer<float> some(period);
    std::vector<float> values(static_cast<size_t>(period));
    for (long i = 0; i < period; i++) {
        values[size_t(i)] = 2 * uniform(random_bits(1, RandomUse::parameters, uint64_t(i)).v[0]) - 1;
    }
    device::copy_to_device(some.data(), values.data(), period, stream);
    Buffer<T> all(count);
    for (long first = 0; first < count; first += period) {
        device::cast(all + first, some.data(), std::min(period, count - first), stream);
    }
    stream.synchronize();
    return all;
}

// ---- the model

inline GptShape shape_of(const std::string& model, int T) {
    if (model == "d12") { return {T, 50257, 50304, 12, 12, 768}; }
    if (model == "d48") { return {T, 50257, 50304, 48, 25, 1600}; }
    if (model == "tiny") { return {T, 250, 256, 2, 1, 64}; }
    throw UserError("there is no model '" + model + "' to measure: give d12, d48 or tiny");
}

// The phases of a step, between which step() marks the time.
const std::vector<const char*> phases = {"zero gradients", "forward", "classifier", "backward",
                                         "gradient norm", "AdamW"};

struct Bench {
    const int B, T, N = B * T;
    const GptShape shape;
    const Layout layout = gpt_layout(shape, 1, 0);
    Stream main, comm_stream;
    Alone alone;
    Options options;
    std::vector<int> tokens;
    Model model;
    Worker worker;

    Bench(const GptShape& shape, int B, int T, int recompute,
          const MatmulOptions& products = MatmulPrecision::medium)
        : B(B),
          T(T),
          shape(shape),
          model(shape, layout, recompute, products),
          worker(model, alone, main, comm_stream) {
        allocate_activations(model, B, T);
        for (int i = 0; i <= N; i++) {
            const uint32_t bits = random_bits(1, RandomUse::shuffle, uint64_t(i)).v[0];
            tokens.push_back(int(bits % uint32_t(shape.vocab_size)));
        }
    }

    // The initial weights of a training run.
    void initialize() {
        std::vector<float> initial(static_cast<size_t>(layout.size));
        init_parameters(initial.data(), shape, layout, 1);
        set_parameters(worker, initial.data());
        main.synchronize();
    }

    void step() {
        step([] {}, [](int) {});
    }

    // A training step, in the order of the trainer's.   mark: called after each of the phases
    // block_done: called where the gradients of a block are final
    void step(const std::function<void()>& mark, const std::function<void(int)>& block_done) {
        Scalars* scalars = worker.scalars;
        const float share = 1.0f / float(N);
        model.sums.begin(model.grads, layout, true, main);
        device::set_zero(scalars, 1, main);
        mark();
        forward(model, tokens.data(), B, T, main);
        mark();
        classify(model, tokens.data() + 1, B, T, &scalars->loss, share, share, true, main);
        mark();
        backward(model, B, T, main, block_done);
        mark();
        device::global_norm_squared(&scalars->norm_squared, worker.shard_gradients(), layout.shard_size(),
                                    main);
        mark();
        update(worker, options, 1e-4f);
        mark();
    }
};

// Of B or, where that is 0, of the most sequences that fit beside a sixty-fourth of the GPU's memory, which
// libraries and the context may want.
inline std::unique_ptr<Bench> make_bench(const GptShape& shape, int B, int T, int recompute) {
    const std::vector<int> sizes = B > 0 ? std::vector<int>{B}
                                         : std::vector<int>{96, 88, 80, 72, 64, 56, 48, 40, 32, 24, 16, 8, 4};
    for (int size : sizes) {
        try {
            auto bench = std::make_unique<Bench>(shape, size, T, recompute);
            size_t free_bytes = 0, bytes = 0;
            cudaCheck(cudaMemGetInfo(&free_bytes, &bytes));
            if (free_bytes < bytes / 64) { continue; }
            bench->initialize();
            bench->step();
            bench->main.synchronize();
            return bench;
        } catch (const std::bad_alloc&) {}  // a smaller one then
    }
    throw UserError("no batch of this model fits into the GPU's memory: give a smaller B or T");
}

// ---- steps

inline std::string gpu_name() {
    cudaDeviceProp properties;
    cudaCheck(cudaGetDeviceProperties(&properties, 0));
    return properties.name;
}

// Milliseconds of `steps` steps. The host runs ahead as it does in training: nothing waits in between.
inline std::vector<double> step_milliseconds(Bench& x, int steps) {
    std::vector<Timestamp> ends(size_t(steps) + 1);
    ends[0].record(x.main);
    for (int i = 1; i <= steps; i++) {
        x.step();
        ends[size_t(i)].record(x.main);
    }
    std::vector<double> milliseconds;
    for (int i = 1; i <= steps; i++) {
        milliseconds.push_back(ends[size_t(i)].since(ends[size_t(i) - 1]));
    }
    return milliseconds;
}

inline void serve_steps(Bench& x) {
    const std::string gpu = gpu_name();
    JsonLine about;
    about.field("device", gpu).field("batch", x.B).field("seq_len", x.T).field("recompute", x.model.recompute)
        .field("flops_per_token", model_flops_per_token(x.shape, x.layout.values, x.T))
        .field("peak_flops", peak_flops(gpu, sizeof(floatX) == 2).value_or(NAN));
    printf("%s\n", about.str().c_str());
    fflush(stdout);
    for (int steps; std::cin >> steps;) {
        std::string line;
        for (double milliseconds : step_milliseconds(x, steps)) {
            line += format("%s%.6f", line.empty() ? "" : " ", milliseconds);
        }
        printf("%s\n", line.c_str());
        fflush(stdout);
    }
}

// ---- how products are made

inline void print_matmuls(const GptShape& shape, int B, int T, int recompute, int rounds) {
    printf("%-42s  %9s\n", "a step", "ms");
    const MatmulPrecision medium = MatmulPrecision::medium;
    const std::pair<const char*, MatmulOptions> ways[] = {{"--fuse-gelu 0", {medium, 0}},
                                                          {"--fuse-gelu 1", {medium, 1}},
                                                          {"--fuse-gelu 2", {medium, 2}},
                                                          {"one SM left to NCCL", {medium, -1, 1}}};
    for (const auto& [way, products] : ways) {
        Bench x(shape, B, T, recompute, products);
        x.initialize();
        printf("  %-40s  %9.3f\n", way, median_of(rounds, [&] { x.step(); }, x.main));
        fflush(stdout);
    }
}

// ---- layers

// All calls of one kind in a step, on the step's own buffers.
struct Kind {
    std::string name;
    int calls;
    double flops, bytes;  // of all calls; one of them is 0
    std::function<void()> run;
};

// What one product of a layer reads and writes, forward and backward.
//     out = gelu(pre_gelu = inp weight^T + bias);   dinp, dweight from dout     pre_gelu null: no GELU
// inp_pre_gelu: what inp is the GELU of, or null
struct Product {
    floatX *out, *inp, *weight, *bias, *pre_gelu, *dinp, *dout, *inp_pre_gelu;
    float* dweight;
};

struct ProductKind {
    const char* name;
    int calls, in, out;
    std::function<Product(int)> of_layer;
};

inline std::vector<ProductKind> product_kinds(Bench& x) {
    Model& m = x.model;
    Activations& a = m.acts;
    const int C = x.shape.channels, L = x.shape.layers;
    floatX* none = nullptr;
    return {{"qkv", L, C, 3 * C, [&m, &a, none](int l) -> Product {
                 const LayerTensors<floatX>& w = m.weights[l];
                 return {a.layers[l].qkv, ln1_of(m, l), w.qkvw, w.qkvb, none, a.dprojected, a.dqkv, none,
                         m.gradients[l].qkvw};
             }},
            {"attproj", L, C, C, [&m, &a, none](int l) -> Product {
                 const LayerTensors<floatX>& w = m.weights[l];
                 return {a.projected, a.layers[l].attention, w.attprojw, w.attprojb, none, a.dprojected,
                         a.dresidual, none, m.gradients[l].attprojw};
             }},
            {"fc", L, C, 4 * C, [&m, &a, none](int l) -> Product {
                 const LayerTensors<floatX>& w = m.weights[l];
                 return {gelu_of(m, l), ln2_of(m, l), w.fcw, w.fcb, a.layers[l].fch, a.dprojected, a.dfch,
                         none, m.gradients[l].fcw};
             }},
            {"fcproj", L, 4 * C, C, [&m, &a, none](int l) -> Product {
                 const LayerTensors<floatX>& w = m.weights[l];
                 return {a.projected, gelu_of(m, l), w.fcprojw, w.fcprojb, none, a.dfch, a.dresidual,
                         a.layers[l].fch, m.gradients[l].fcprojw};
             }},
            {"classifier", 1, C, x.shape.padded_vocab_size, [&m, &a, none](int) -> Product {
                 return {a.logits, a.lnf, m.embedding.wte, none, none, a.dprojected, a.logits, none,
                         m.dembedding.wte};
             }}};
}

inline void add_matmuls(std::vector<Kind>& kinds, Bench& x) {
    using cuda::Matmul;
    Matmul& matmul = x.model.matmul;
    const int N = x.N;
    for (const ProductKind& p : product_kinds(x)) {
        const double flops = 2.0 * N * p.in * p.out * p.calls;
        auto add = [&](const char* what, const std::function<void(const Product&)>& one) {
            kinds.push_back({format("matmul %s: %s", p.name, what), p.calls, flops, 0, [p, one] {
                                 for (int l = 0; l < p.calls; l++) { one(p.of_layer(l)); }
                             }});
        };
        add("forward", [&matmul, &x, N, p](const Product& y) {
            cuda::matmul_forward(matmul, y.out, y.inp, y.weight, y.bias, N, p.in, p.out, x.main, y.pre_gelu);
        });
        add("dweight", [&matmul, &x, N, p](const Product& y) {
            const floatX* none = nullptr;
            matmul.multiply<Matmul::Kind::backward_weight>(y.dweight, y.inp, y.dout, none, none, N, p.in,
                                                           p.out, x.main, true);
        });
        add("dinp", [&matmul, &x, N, p](const Product& y) {
            const floatX* aux = matmul.fuses_gelu_backward ? y.inp_pre_gelu : nullptr;
            const floatX* sum = aux ? x.main.scratch<floatX>(p.in) : nullptr;
            matmul.multiply<Matmul::Kind::backward_inp>(y.dinp, y.weight, y.dout, sum, aux, N, p.in, p.out,
                                                        x.main);
        });
    }
}

inline void add_attention(std::vector<Kind>& kinds, Bench& x) {
    Activations& a = x.model.acts;
    const int C = x.shape.channels, L = x.shape.layers, NH = x.shape.heads;
    const double product = double(x.B) * x.T * x.T * C * L;  // one of two causal (T,T) x hs, all heads
    kinds.push_back({"attention forward", L, 2 * product, 0, [&a, &x, C, NH] {
                         for (LayerActivations& y : a.layers) {
                             device::attention_forward(y.attention, y.lse, y.qkv, x.B, x.T, C, NH, x.main);
                         }
                     }});
    kinds.push_back({"attention backward (5 products)", L, 5 * product, 0, [&a, &x, C, NH] {
                         for (size_t l = 0; l < a.layers.size(); l++) {
                             LayerActivations& y = a.layers[l];
                             device::attention_backward(a.dqkv, x.model.gradients[l].qkvb, a.dprojected,
                                                        y.attention, y.qkv, y.lse, x.B, x.T, C, NH,
                                                        x.model.sums, x.main);
                             x.model.sums.add_pending(x.main);
                         }
                     }});
}

inline void add_layernorm(std::vector<Kind>& kinds, Bench& x) {
    Model& m = x.model;
    Activations& a = m.acts;
    const int C = x.shape.channels, L = x.shape.layers, N = x.N;
    const double all = 2.0 * L * N * C;  // values of one tensor in all calls
    kinds.push_back({"residual, LayerNorm forward", 2 * L, 0, 8 * all, [&m, &a, &x, C, N] {
                         for (size_t i = 0; i < 2 * a.layers.size(); i++) {
                             LayerActivations& y = a.layers[i / 2];
                             const LayerTensors<floatX>& w = m.weights[i / 2];
                             device::fused_residual_forward(i % 2 ? y.residual3 : y.residual2,
                                                            ln2_of(m, int(i / 2)), y.ln2_mean, y.ln2_rstd,
                                                            a.encoded, a.projected, w.ln2w, w.ln2b, N, C,
                                                            x.main);
                         }
                     }});
    kinds.push_back({"LayerNorm backward", 2 * L, 0, 8 * all, [&m, &a, &x, C, N] {
                         for (size_t i = 0; i < 2 * a.layers.size(); i++) {
                             LayerActivations& y = a.layers[i / 2];
                             const LayerTensors<float>& dw = m.gradients[i / 2];
                             device::layernorm_backward(a.dresidual, dw.ln2w, dw.ln2b, dw.attprojb,
                                                        a.dprojected, i % 2 ? y.residual3 : y.residual2,
                                                        m.weights[i / 2].ln2w, y.ln2_mean, y.ln2_rstd, N, C,
                                                        m.sums, x.main);
                             if (i % 2) { m.sums.add_pending(x.main); }
                         }
                     }});
}

inline void add_elementwise(std::vector<Kind>& kinds, Bench& x) {
    Model& m = x.model;
    Activations& a = m.acts;
    const int C = x.shape.channels, L = x.shape.layers, N = x.N, Vp = x.shape.padded_vocab_size;
    const int gelus = (m.matmul.fuses_gelu ? 0 : L) + (m.recompute >= 1 ? L : 0);
    if (gelus > 0) {
        kinds.push_back({"GELU", gelus, 0, 16.0 * N * C * gelus, [&m, &a, &x, C, N, gelus, L] {
                             for (int i = 0; i < gelus; i++) {
                                 device::gelu_forward(gelu_of(m, i % L), a.layers[i % L].fch,
                                                      long(N) * 4 * C, x.main);
                             }
                         }});
    }
    if (!m.matmul.fuses_gelu_backward) {
        kinds.push_back({"GELU's derivative", L, 0, 24.0 * N * C * L, [&m, &a, &x, C, N] {
                             for (int l = 0; l < x.shape.layers; l++) {
                                 cuda::multiply_by_gelu_derivative(a.dfch, m.gradients[l].fcb,
                                                                   a.layers[l].fch, N, 4 * C, m.sums, x.main);
                                 m.sums.add_pending(x.main);
                             }
                         }});
    }
    kinds.push_back({"classifier, loss and gradient", 1, 0, 4.0 * N * Vp, [&m, &a, &x, N, Vp] {
                         device::fused_classifier(a.logits, a.losses, 1.0f / float(N), m.targets, N,
                                                  x.shape.vocab_size, Vp, true, x.main);
                     }});
    kinds.push_back({"embedding forward", 1, 0, 4.0 * N * C, [&m, &a, &x, C] {
                         device::encoder_forward(a.encoded, m.inputs, m.embedding.wte, m.embedding.wpe, x.B,
                                                 x.T, C, x.main);
                     }});
    const double rows = std::min(N, x.shape.vocab_size);  // of wte in use, nearly
    kinds.push_back({"embedding backward", 1, 0, 4.0 * N * C + 8.0 * rows * C, [&m, &a, &x, C] {
                         device::encoder_backward(m.dembedding.wte, m.dembedding.wpe, a.dresidual, m.inputs,
                                                  x.B, x.T, C, x.main);
                     }});
}

inline void add_update(std::vector<Kind>& kinds, Bench& x) {
    const long size = x.layout.size;
    kinds.push_back({"gradient norm", 1, 0, 4.0 * double(size), [&x, size] {
                         device::global_norm_squared(&x.worker.scalars.data()->norm_squared,
                                                     x.model.grads.data(), size, x.main);
                     }});
    kinds.push_back({"AdamW", int(x.layout.blocks.size()), 0, 30.0 * double(size), [&x] {
                         update(x.worker, x.options, 1e-4f);
                     }});
}

// Flops a second of a product of three square matrices.
inline double matmul_rate(int size, int rounds, Stream& stream) {
    cuda::Matmul matmul(MatmulPrecision::medium);
    const long count = long(size) * size;
    const Buffer<floatX> a = random_values<floatX>(count, stream), b = random_values<floatX>(count, stream);
    Buffer<floatX> out(count);
    const floatX* none = nullptr;
    auto product = [&] {
        cuda::matmul_forward(matmul, out.data(), a.data(), b.data(), none, size, size, size, stream);
    };
    const double milliseconds = median_of(rounds, product, stream);
    return 2.0 * double(count) * size / milliseconds * 1e3;
}

// Bytes a second, read and written, of a copy on the device.
inline double copy_rate(size_t bytes, int rounds, Stream& stream) {
    const Buffer<float> from = random_values<float>(long(bytes / 4), stream);
    Buffer<float> to(long(bytes / 4));
    const double milliseconds =
        median_of(rounds, [&] { copy_on_device(to.data(), from.data(), bytes, stream); }, stream);
    return 2.0 * double(bytes) / milliseconds * 1e3;
}

// A step's phases, from timestamps within whole steps.   returns the milliseconds of a step
inline double print_phases(Bench& x, int rounds) {
    std::vector<std::vector<double>> of_phase(phases.size());
    std::vector<double> whole, layer;
    for (int round = 0; round <= rounds; round++) {  // the first does not count
        std::vector<Timestamp> marks(phases.size() + 1), blocks(x.layout.blocks.size());
        size_t next = 0;
        marks[next++].record(x.main);
        x.step([&] { marks[next++].record(x.main); }, [&](int b) { blocks[size_t(b)].record(x.main); });
        if (round == 0) { continue; }
        for (size_t i = 0; i < phases.size(); i++) { of_phase[i].push_back(marks[i + 1].since(marks[i])); }
        whole.push_back(marks[phases.size()].since(marks[0]));
        if (x.shape.layers > 1) {
            layer.push_back(blocks[0].since(blocks[size_t(x.shape.layers) - 1]) / (x.shape.layers - 1));
        }
    }
    const double step = median(whole);
    printf("a step by phase %28s %9s %7s\n", "", "ms", "share");
    for (size_t i = 0; i < phases.size(); i++) {
        const double milliseconds = median(of_phase[i]);
        printf("  %-40s  %9.3f %6.1f%%\n", phases[i], milliseconds, 100 * milliseconds / step);
    }
    if (!layer.empty()) { printf("    %-38s  %9.3f\n", "backward of one layer", median(layer)); }
    printf("  %-40s  %9.3f\n\n", "step", step);
    return step;
}

inline void print_layers(Bench& x, int rounds) {
    const bool tiny = x.shape.channels < 128;
    const double matmul = matmul_rate(tiny ? 64 : 8192, rounds, x.main);
    const double copy = copy_rate(size_t(tiny ? 64 : 1 << 20) << 10, rounds, x.main);
    printf("limits measured here: a matmul of %d^3 reaches %.1f TFLOP/s, a copy %.1f GB/s\n\n",
           tiny ? 64 : 8192, matmul / 1e12, copy / 1e9);
    const double step = print_phases(x, rounds);

    std::vector<Kind> kinds;
    add_matmuls(kinds, x);
    add_attention(kinds, x);
    add_layernorm(kinds, x);
    add_elementwise(kinds, x);
    add_update(kinds, x);
    printf("each kind alone, all calls of a step %7s %9s %7s %14s %7s\n", "calls", "ms", "of step", "rate",
           "limit");
    double sum = 0;
    for (const Kind& kind : kinds) {
        x.step();  // what the kernels read is then a step's
        const double milliseconds = median_of(rounds, kind.run, x.main);
        const double rate = (kind.flops + kind.bytes) / milliseconds * 1e3;
        sum += milliseconds;
        printf("  %-34s %7d %9.3f %6.1f%% %9.1f %s %6.1f%%\n", kind.name.c_str(), kind.calls, milliseconds,
               100 * milliseconds / step, rate / (kind.flops > 0 ? 1e12 : 1e9),
               kind.flops > 0 ? "TF/s" : "GB/s", 100 * rate / (kind.flops > 0 ? matmul : copy));
        fflush(stdout);
    }
    printf("  %-34s %7s %9.3f %6.1f%%\n", "sum", "", sum, 100 * sum / step);
    if (x.model.matmul.fuses_gelu) { printf("GELU is in fc's forward\n"); }
    if (x.model.matmul.fuses_gelu_backward) { printf("GELU's derivative is in fcproj's dinp\n"); }
}

// ---- streaming

// The arrays of one exchange of a fragment of n values by up to most_pairwise + 1 workers. The most sums are
// those of most_pairwise workers (statistics.h).
struct FragmentArrays {
    static constexpr int most_workers = most_pairwise + 1;
    Buffer<float> global, momentum, local, mean, residual;
    Buffer<floatX> params;
    Buffer<float> random_bytes;
    Buffer<double> sums, partial;

    FragmentArrays(long n, Stream& stream)
        : global(random_values<float>(n, stream)),
          momentum(n),
          local(n),
          mean(n),
          residual(n),
          params(n),
          random_bytes(random_values<float>(most_workers * long(payload_bytes(Format::fp32, n)) / 4,
                                            stream)),
          sums(row_sums(most_pairwise)),
          partial(partial_sums(most_pairwise)) {}

    uint8_t* payloads() { return reinterpret_cast<uint8_t*>(random_bytes.data()); }
};

// One kernel, on one set of arrays.
struct StreamingKernel {
    std::string name;
    double bytes;  // that a call reads and writes
    std::function<void(FragmentArrays&)> run;
};

struct NamedFormat {
    const char* name;
    Format format;
};
const NamedFormat formats[] = {{"fp4", Format::fp4},           {"fp4_e2m1", Format::fp4_e2m1},
                               {"fp8_e4m3", Format::fp8_e4m3}, {"fp8_e5m2", Format::fp8_e5m2},
                               {"bf16", Format::bf16},         {"fp32", Format::fp32}};

// how: follows the format's name   bytes: moved per value, besides those of a payload
inline void add_quantize(std::vector<StreamingKernel>& kernels, const NamedFormat& f, const char* how,
                         const Rounding& rounding, bool feedback, double bytes, long n, Stream& stream) {
    const Format format = f.format;
    kernels.push_back({std::string("quantize ") + f.name + how,
                       bytes * double(n) + double(payload_bytes(format, n)),
                       [=, &stream](FragmentArrays& a) {
                           const Source source{a.global, a.local, feedback ? a.residual.data() : nullptr};
                           device::quantize(a.payloads(), format, rounding, n, 0, source, n, stream);
                       }});
}

inline void add_dequantize(std::vector<StreamingKernel>& kernels, const NamedFormat& f, int workers, long n,
                           Stream& stream) {
    const Format format = f.format;
    const size_t payload = payload_bytes(format, n);
    kernels.push_back({::format("dequantize_mean %s, M = %d", f.name, workers),
                       double(payload) * workers + 4.0 * double(n), [=, &stream](FragmentArrays& a) {
                           device::dequantize_mean(a.mean, a.payloads(), payload, workers, format, n, stream);
                       }});
}

inline void add_sum_encoding(std::vector<StreamingKernel>& kernels, const NamedFormat& f, const char* how,
                             bool feedback, long n, Stream& stream) {
    const PayloadLayout layout = payload_layout(f.format, n);
    kernels.push_back({std::string("sum_encoding ") + f.name + how,
                       (feedback ? 4.0 : 8.0) * double(n) + double(layout.bytes),
                       [=, &stream](FragmentArrays& a) {
                           const Source source{a.global, a.local, feedback ? a.residual.data() : nullptr};
                           device::sum_encoding(a.sums, a.partial, a.payloads(), layout, 0, source, n,
                                                stream);
                       }});
}

// Bytes are the kernel's bound: a payload for each square, two for each product of a pair. With eight workers
// most of them come from a cache, where payloads fit into one, and the rate may exceed a copy's.
inline void add_sum_rows(std::vector<StreamingKernel>& kernels, const NamedFormat& f, int workers, long n,
                         Stream& stream) {
    const PayloadLayout layout = payload_layout(f.format, n);
    const double payload = double(layout.bytes), M = workers;
    const double bytes = has_mean_row(workers) ? 2 * M * payload + (M + 1) * 4 * double(n) : M * M * payload;
    kernels.push_back({::format("sum_rows %s, M = %d", f.name, workers), bytes,
                       [=, &stream](FragmentArrays& a) {
                           device::sum_rows(a.sums, a.partial, a.payloads(), layout.bytes, workers, layout,
                                            a.mean, stream);
                       }});
}

// The kernels of a format: of those with four bits in all variants, of the others in the main ones.
inline void add_format(std::vector<StreamingKernel>& kernels, const NamedFormat& f, long n, Stream& stream) {
    const bool has_four_bits = f.format == Format::fp4 || f.format == Format::fp4_e2m1;
    Rounding stochastic;
    stochastic.stochastic = true;
    add_quantize(kernels, f, "", Rounding(), false, 8, n, stream);
    if (has_four_bits) {
        add_quantize(kernels, f, ", stochastic", stochastic, false, 8, n, stream);
        add_quantize(kernels, f, ", error feedback", Rounding(), true, 16, n, stream);
    }
    for (int workers : {2, 4, 8}) { add_dequantize(kernels, f, workers, n, stream); }
    add_sum_encoding(kernels, f, "", false, n, stream);
    add_sum_rows(kernels, f, 2, n, stream);
    if (has_four_bits) {
        add_sum_encoding(kernels, f, ", error feedback", true, n, stream);
        add_sum_rows(kernels, f, most_pairwise, n, stream);
        add_sum_rows(kernels, f, most_pairwise + 1, n, stream);
    }
}

inline std::vector<StreamingKernel> streaming_kernels(long n, Stream& stream) {
    std::vector<StreamingKernel> kernels;
    kernels.push_back({"add_hash", 4.0 * double(n), [n, &stream](FragmentArrays& a) {
                           device::add_hash(a.payloads(), 0, a.global, n, stream);
                       }});
    const OuterStep step = {0.4f, 0.9f, 0.5f};
    kernels.push_back({"outer_step", (28.0 + sizeof(floatX)) * double(n),
                       [n, step, &stream](FragmentArrays& a) {
                           device::outer_step(a.global, a.momentum, a.local, a.params, a.mean, n, step,
                                              stream);
                       }});
    for (const NamedFormat& f : formats) { add_format(kernels, f, n, stream); }
    return kernels;
}

// Kernel and copy take turns. Both go through as many arrays as are needed for `bytes_in_turn`.
inline void print_streaming(long n, int rounds, double bytes_in_turn) {
    Stream stream;
    const std::vector<StreamingKernel> kernels = streaming_kernels(n, stream);
    auto launches_of = [&](const StreamingKernel& kernel) {
        return std::max(1L, long(std::ceil(bytes_in_turn / kernel.bytes)));
    };
    long sets = 1, most_bytes = 0;
    for (const StreamingKernel& kernel : kernels) {
        sets = std::max(sets, launches_of(kernel));
        most_bytes = std::max(most_bytes, launches_of(kernel) * (long(kernel.bytes) / 32 * 16));
    }
    std::vector<std::unique_ptr<FragmentArrays>> arrays;
    for (long i = 0; i < sets; i++) { arrays.push_back(std::make_unique<FragmentArrays>(n, stream)); }
    const Buffer<uint8_t> from(most_bytes);
    Buffer<uint8_t> to(most_bytes);

    printf("a fragment of %ld values %17s %9s %9s %9s %7s\n", n, "MB", "us", "GB/s", "a copy's", "share");
    for (const StreamingKernel& kernel : kernels) {
        const long launches = launches_of(kernel), half = long(kernel.bytes) / 32 * 16;
        auto kernels_in_turn = [&] {
            for (long i = 0; i < launches; i++) { kernel.run(*arrays[size_t(i)]); }
        };
        auto copies_in_turn = [&] {
            for (long i = 0; i < launches; i++) {
                copy_on_device(to + i * half, from + i * half, size_t(half), stream);
            }
        };
        kernels_in_turn();
        copies_in_turn();
        std::vector<double> own, copies;
        for (int round = 0; round < rounds; round++) {
            own.push_back(milliseconds_of(kernels_in_turn, stream) / double(launches));
            copies.push_back(milliseconds_of(copies_in_turn, stream) / double(launches));
        }
        const double rate = kernel.bytes / median(own) * 1e3;
        const double copy = 2.0 * double(half) / median(copies) * 1e3;
        printf("  %-34s %8.3f %9.1f %9.1f %9.1f %6.1f%%\n", kernel.name.c_str(), kernel.bytes / 1e6,
               1e3 * median(own), rate / 1e9, copy / 1e9, 100 * rate / copy);
        fflush(stdout);
    }
}

// ---- the command line

inline long number(const char* text, const char* what, long least) {
    char* end = nullptr;
    const long value = strtol(text, &end, 10);
    if (end == text || *end != 0 || value < least || value > 1L << 40) {
        throw UserError(format("'%s' is no %s: give a whole number, at least %ld", text, what, least));
    }
    return value;
}

inline void run(const std::vector<const char*>& words) {
    const std::string part = words.empty() ? "" : words[0];
    const bool steps = part == "steps" && words.size() == 5, layers = part == "layers" && words.size() == 6;
    const bool matmuls = part == "matmuls" && words.size() == 6;
    if (part == "streaming" && words.size() == 4) {
        const long n = number(words[1], "number of values", 128), megabytes = number(words[3], "size", 0);
        device::use_device(0, "");
        print_streaming(n / 128 * 128, int(number(words[2], "number of rounds", 1)), 1e6 * double(megabytes));
    } else if (steps || layers || matmuls) {
        const int B = int(number(words[2], "batch", matmuls ? 1 : 0));
        const int T = int(number(words[3], "sequence length", 1));
        const int recompute = int(number(words[4], "--recompute", 0));
        const int rounds = steps ? 0 : int(number(words[5], "number of rounds", 1));
        const GptShape shape = shape_of(words[1], T);  // refuses what is no model
        device::use_device(0, "");
        if (matmuls) {
            print_matmuls(shape, B, T, recompute, rounds);
            return;
        }
        const std::unique_ptr<Bench> bench = make_bench(shape, B, T, recompute);
        if (layers) {
            print_layers(*bench, rounds);
        } else {
            serve_steps(*bench);
        }
    } else {
        throw UserError("not a part of the benchmark: give steps MODEL B T RECOMPUTE, layers or matmuls "
                        "MODEL B T RECOMPUTE ROUNDS, or streaming VALUES ROUNDS MEGABYTES");
    }
}

}  // namespace

int main(int argc, char** argv) {
    try {
        run(std::vector<const char*>(argv + 1, argv + argc));
    } catch (const UserError& error) {
        fprintf(stderr, "error: %s\n", error.what());
        return 2;
    } catch (const std::exception& error) {
        fprintf(stderr, "error: %s\n", error.what());
        return 1;
    }
    return 0;
}
