// How fast the CPU trainer is, and how near it comes to what oneDNN's matmul alone reaches on this machine.
//
// A GPT-2 of 6 layers, 384 channels, 6 heads, 1024 tokens of vocabulary, on 8 x 256 tokens: one process, two
// threads unless OMP_NUM_THREADS says otherwise. A step is forward, backward, gradient norm and AdamW, by the
// trainer's functions.
//
//     share = tokens/s times the flops of a token, 6 parameters + 6 L C T, over oneDNN's flops a second
//
// The largest matmul is the MLP's, 2048 x 1536 x 384, in layouts that oneDNN chooses and already in its input
// type. Steps and oneDNN take turns, so that a change of clock or load meets both; all figures are medians.
// --quick measures everything once: a trial of this program, whose figures are rough.
#define TESTING
#include "train_gpt.cu"

#include "dev/test/alone.h"
#include "llmc/clock.h"

#include <omp.h>

namespace {

struct Bench {
    const int B = 8, T = 256, N = B * T;
    const GptShape shape = {T, 1024, 1024, 6, 6, 384};
    const Layout layout = gpt_layout(shape, 1, 0);
    Stream main, comm_stream;
    Alone alone;
    Options options;
    std::vector<int> tokens;
    Model model;
    Worker worker;

    explicit Bench(MatmulPrecision precision)
        : model(shape, layout, 0, precision), worker(model, alone, main, comm_stream) {
        allocate_activations(model, B, T);
        Buffer<float> initial(layout.size);
        init_parameters(initial, shape, layout, 1);
        set_parameters(worker, initial);
        for (int i = 0; i <= N; i++) {
            tokens.push_back(
                int(random_bits(1, RandomUse::shuffle, uint64_t(i)).v[0] % uint32_t(shape.vocab_size)));
        }
    }

    double flops_a_token() const {
        return 6.0 * double(layout.values) + 6.0 * shape.layers * shape.channels * T;
    }

    void step() {
        Scalars* scalars = worker.scalars;
        device::set_zero(model.grads.data(), layout.size, main);
        device::set_zero(scalars, 1, main);
        forward(model, tokens.data(), B, T, main);
        classify(model, tokens.data() + 1, B, T, &scalars->loss, 1.0f / float(N), 1.0f / float(N), true,
                 main);
        backward(model, B, T, main, [](int) {});
        device::global_norm_squared(&scalars->norm_squared, worker.shard_gradients(), layout.shard_size(),
                                    main);
        update(worker, options, 1e-4f);
    }
};

inline double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

inline double seconds_of(const std::function<void()>& work) {
    const double start = now_seconds();
    work();
    return now_seconds() - start;
}

// The model's largest matmul by oneDNN alone: out (M,N) = a (M,K) b (K,N), fp32 sums and output.
class LargestMatmul {
public:
    using memory = dnnl::memory;
    static constexpr long M = 2048, N = 1536, K = 384;

    explicit LargestMatmul(memory::data_type type) : engine(dnnl::engine::kind::cpu, 0), stream(engine) {
        const auto any = memory::format_tag::any;
        const memory::desc a({M, K}, type, any), b({K, N}, type, any);
        const memory::desc out({M, N}, memory::data_type::f32, any);
#if DNNL_VERSION_MAJOR >= 3
        dnnl::matmul::primitive_desc chosen(engine, a, b, out);
#else
        dnnl::matmul::primitive_desc chosen({a, b, out}, engine);
#endif
        matmul = dnnl::matmul(chosen);
        arguments = {{DNNL_ARG_SRC, memory(chosen.src_desc(), engine)},
                     {DNNL_ARG_WEIGHTS, memory(chosen.weights_desc(), engine)},
                     {DNNL_ARG_DST, memory(chosen.dst_desc(), engine)}};
        for (auto& argument : arguments) {
            memset(argument.second.get_data_handle(), 0, argument.second.get_desc().get_size());
        }
    }

    // Flops a second, the median of 20.
    double rate() {
        std::vector<double> seconds;
        for (int i = 0; i < 20; i++) {
            seconds.push_back(seconds_of([&] {
                matmul.execute(stream, arguments);
                stream.wait();
            }));
        }
        return 2.0 * M * N * K / median(seconds);
    }

private:
    dnnl::engine engine;
    dnnl::stream stream;
    dnnl::matmul matmul;
    std::unordered_map<int, memory> arguments;
};

// All calls of one kind of layer in a step, on the step's own buffers.
struct Kind {
    const char* name;
    void (*run)(Bench&);
};

inline void run_matmuls_forward(Bench& x) {
    Model& m = x.model;
    Activations& a = m.acts;
    const int N = x.N, C = x.shape.channels;
    for (size_t l = 0; l < a.layers.size(); l++) {
        LayerTensors<floatX>& w = m.weights[l];
        LayerActivations& y = a.layers[l];
        device::matmul_forward(m.matmul, y.qkv, y.ln1, w.qkvw, w.qkvb, N, C, 3 * C, x.main);
        device::matmul_forward(m.matmul, a.projected, y.attention, w.attprojw, w.attprojb, N, C, C, x.main);
        device::matmul_forward(m.matmul, y.fch_gelu, y.ln2, w.fcw, w.fcb, N, C, 4 * C, x.main, y.fch);
        device::matmul_forward(m.matmul, a.projected, y.fch_gelu, w.fcprojw, w.fcprojb, N, 4 * C, C, x.main);
    }
    const floatX* none = nullptr;
    device::matmul_forward(m.matmul, a.logits, a.lnf, m.embedding.wte, none, N, C, x.shape.padded_vocab_size,
                           x.main);
}

inline void run_matmuls_backward(Bench& x) {
    Model& m = x.model;
    Activations& a = m.acts;
    const int N = x.N, C = x.shape.channels;
    floatX* none = nullptr;
    device::matmul_backward(m.matmul, a.dprojected, m.dembedding.wte, none, a.logits, a.lnf, m.embedding.wte,
                            N, C, x.shape.padded_vocab_size, x.main);
    for (size_t l = 0; l < a.layers.size(); l++) {
        LayerTensors<floatX>& w = m.weights[l];
        LayerTensors<float>& dw = m.gradients[l];
        LayerActivations& y = a.layers[l];
        device::matmul_backward(m.matmul, a.dfch, dw.fcprojw, dw.fcprojb, a.dresidual, y.fch_gelu, w.fcprojw,
                                N, 4 * C, C, x.main, y.fch);
        device::matmul_backward(m.matmul, a.dprojected, dw.fcw, dw.fcb, a.dfch, y.ln2, w.fcw, N, C, 4 * C,
                                x.main);
        device::matmul_backward(m.matmul, a.dprojected, dw.attprojw, dw.attprojb, a.dresidual, y.attention,
                                w.attprojw, N, C, C, x.main);
        device::matmul_backward(m.matmul, a.dprojected, dw.qkvw, dw.qkvb, a.dqkv, y.ln1, w.qkvw, N, C, 3 * C,
                                x.main);
    }
}

inline void run_attention_forward(Bench& x) {
    for (LayerActivations& y : x.model.acts.layers) {
        device::attention_forward(y.attention, y.lse, y.qkv, x.B, x.T, x.shape.channels, x.shape.heads,
                                  x.main);
    }
}

inline void run_attention_backward(Bench& x) {
    Activations& a = x.model.acts;
    for (LayerActivations& y : a.layers) {
        device::attention_backward(a.dqkv, a.dprojected, y.attention, y.qkv, y.lse, x.B, x.T,
                                   x.shape.channels, x.shape.heads, x.main);
    }
}

inline void run_layernorms(Bench& x) {
    Activations& a = x.model.acts;
    const int N = x.N, C = x.shape.channels;
    for (size_t i = 0; i < 2 * a.layers.size(); i++) {
        LayerTensors<floatX>& w = x.model.weights[i / 2];
        LayerTensors<float>& dw = x.model.gradients[i / 2];
        LayerActivations& y = a.layers[i / 2];
        device::fused_residual_forward(y.residual3, y.ln2, y.ln2_mean, y.ln2_rstd, y.residual2, a.projected,
                                       w.ln2w, w.ln2b, N, C, x.main);
        device::layernorm_backward(a.dresidual, dw.ln2w, dw.ln2b, a.dprojected, y.residual2, w.ln2w,
                                   y.ln2_mean, y.ln2_rstd, N, C, x.main);
    }
}

inline void run_embedding_and_classifier(Bench& x) {
    Model& m = x.model;
    Activations& a = m.acts;
    const int C = x.shape.channels;
    device::encoder_forward(a.encoded, m.inputs, m.embedding.wte, m.embedding.wpe, x.B, x.T, C, x.main);
    device::fused_classifier(a.logits, a.losses, 1e-3f, m.targets, x.N, x.shape.vocab_size,
                             x.shape.padded_vocab_size, true, x.main);
    device::encoder_backward(m.dembedding.wte, m.dembedding.wpe, a.dresidual, m.inputs, x.B, x.T, C, x.main);
}

inline void run_update(Bench& x) {
    device::set_zero(x.model.grads.data(), x.layout.size, x.main);
    device::global_norm_squared(&x.worker.scalars.data()->norm_squared, x.model.grads, x.layout.size, x.main);
    update(x.worker, x.options, 1e-4f);
}

const Kind kinds[] = {{"matmuls forward, GELU", run_matmuls_forward},
                      {"matmuls backward, GELU", run_matmuls_backward},
                      {"attention forward", run_attention_forward},
                      {"attention backward", run_attention_backward},
                      {"LayerNorm, residual", run_layernorms},
                      {"embedding, classifier", run_embedding_and_classifier},
                      {"zero, norm, AdamW", run_update}};

inline void bench_precision(const char* word, MatmulPrecision precision, bool quick) {
    const int rounds = quick ? 1 : 7, steps = quick ? 1 : 2, times = quick ? 1 : 5;
    Bench x(precision);
    const bool fp32 = x.model.matmul.description() == "fp32";
    LargestMatmul largest(fp32 ? dnnl::memory::data_type::f32 : dnnl::memory::data_type::bf16);
    std::vector<double> step_seconds, rates;
    x.step();
    largest.rate();
    for (int round = 0; round < rounds; round++) {
        rates.push_back(largest.rate());
        for (int i = 0; i < steps; i++) { step_seconds.push_back(seconds_of([&] { x.step(); })); }
    }
    const double step = median(step_seconds), rate = median(rates), tokens = x.N / step;
    printf("%-8s %-19s %8.0f %9.1f %11.3f %11.3f %7.2f\n", word, x.model.matmul.description().c_str(), tokens,
           1e3 * step, tokens * x.flops_a_token() / 1e12, rate / 1e12, tokens * x.flops_a_token() / rate);

    // One kind after the other: they need not add up to the step, where each finds other caches.
    for (const Kind& kind : kinds) {
        std::vector<double> seconds;
        for (int i = 0; i < times; i++) { seconds.push_back(seconds_of([&] { kind.run(x); })); }
        printf("         %-24s %12.1f ms %6.1f%%\n", kind.name, 1e3 * median(seconds),
               100 * median(seconds) / step);
    }
    fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    const bool quick = argc == 2 && std::string(argv[1]) == "--quick";
    if (argc > 1 && !quick) {
        fprintf(stderr, "error: bench_cpu takes --quick or nothing\n");
        return 2;
    }
    if (!getenv("OMP_NUM_THREADS")) { omp_set_num_threads(2); }
    printf("GPT-2 of 6 layers, 384 channels, 6 heads, vocabulary 1024; B = 8, T = 256; %d threads\n\n",
           omp_get_max_threads());
    printf("matmuls  in                  tokens/s   ms/step   TFLOP/s   oneDNN's   share\n");
    bench_precision("highest", MatmulPrecision::highest, quick);
    bench_precision("medium", MatmulPrecision::medium, quick);
    return 0;
}
