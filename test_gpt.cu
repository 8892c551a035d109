// test_gpt: compares the model of train_gpt.cu with PyTorch's float64 results (dev/reference/reference.py):
// logits, loss, every gradient, ten AdamW steps, ten steps with Muon. Exits with status 1 if any differs.
//
//     test_gpt [REFERENCE]   default: dev/test/data/reference.bin; on a GPU, whose attention takes heads of
//                            64 or 128 values: dev/test/data/reference_head64.bin
#define TESTING
#include "train_gpt.cu"

#include "dev/test/alone.h"
#include "dev/test/reference.h"

// The largest relative errors allowed, ||a - b|| / ||b||: a few times those observed. fp32 rounds to 2^-24,
// bf16 (activations, and parameters as the model reads them) to 2^-8, in some thirty operations in a row.
// Gradients are compared by direction, too. The limit of norms is wide: where a gradient is nearly zero and
// mostly rounding error, AdamW still takes a full step.
struct Limits {
    double logits, loss, gradient, gradient_cosine, norm, muon_matrix;
};
const Limits limits = sizeof(floatX) == 4 ? Limits{2e-6, 5e-6, 5e-6, 1e-10, 2e-5, 5e-6}
                                          : Limits{1.5e-2, 3e-3, 2.5e-2, 2e-4, 5e-4, 1e-2};

struct Comparison {
    int failures = 0;

    // One line: what was compared, how far off it is, how far it may be.
    void check(const std::string& what, double error, double limit) {
        const bool good = error <= limit;  // false for NaN
        failures += !good;
        printf("%-6s %-28s %9.2e  (at most %.0e)\n", good ? "ok" : "FAILED", what.c_str(), error, limit);
    }
};

template <class T>
std::vector<T> to_host(const T* values, long n, Stream& stream) {
    std::vector<T> host(static_cast<size_t>(n));
    device::copy_to_host(host.data(), values, n, stream);
    return host;
}

// ||a - b|| / ||b|| of the logits of the real vocabulary.   logits: (B*T,Vp)   expected: (B*T,V)
inline double logits_error(Model& model, const std::vector<float>& expected, long N, Stream& main) {
    const long V = model.shape.vocab_size, Vp = model.shape.padded_vocab_size;
    const std::vector<floatX> padded = to_host(model.acts.logits.data(), N * Vp, main);
    std::vector<float> logits;
    for (long i = 0; i < N; i++) {
        for (long v = 0; v < V; v++) { logits.push_back(float(padded[i * Vp + v])); }
    }
    return relative_error(logits.data(), expected.data(), N * V);
}

inline void check_gradients(Comparison& result, const Model& model, const Reference& reference,
                            Stream& main) {
    const std::vector<float> grads = to_host(model.grads.data(), model.layout.size, main);
    for (const Tensor& tensor : model.layout.tensors) {
        const ReferenceArray& expected = reference.array("gradient." + tensor.name);
        const float *got = grads.data() + tensor.offset, *wanted = expected.values.data();
        const long count = long(expected.values.size());
        result.check("gradient of " + tensor.name, relative_error(got, wanted, count), limits.gradient);
        result.check("   its angle, 1 - cosine", 1 - cosine(got, wanted, count), limits.gradient_cosine);
    }
}

// Ten steps: the loss before each and all norms at the end, and after Muon the matrices of the last layer.
// prefix: of the arrays in the reference
inline int test_steps(const Reference& reference, int recompute, const std::string& prefix) {
    const int B = reference.B, T = reference.T;
    Layout layout = gpt_layout(reference.shape, 1, 1);  // the embedding in several blocks
    Stream main, comm_stream;
    Alone alone;
    Model model(reference.shape, layout, recompute, MatmulPrecision::highest);
    allocate_activations(model, B, T);
    Worker worker(model, alone, main, comm_stream);
    const bool with_muon = prefix == "muon.";
    if (with_muon) { worker.muon = std::make_unique<ShardedMuon>(model.layout, alone); }
    std::vector<float> initial(static_cast<size_t>(layout.size));
    reference_parameters(initial.data(), reference, layout);
    set_parameters(worker, initial.data());

    const std::vector<int> tokens = reference_tokens(reference);
    const int *inputs = tokens.data(), *targets = tokens.data() + 1;
    Options options;
    options.adamw.clip = 0;
    options.adamw.weight_decay = reference_weight_decay;
    options.adamw.beta1 = reference_beta1;
    options.adamw.beta2 = reference_beta2;
    options.adamw.epsilon = reference_eps;
    const float share = 1.0f / float(B * T);

    Comparison result;
    const std::vector<float>& losses = reference.array(prefix + "losses").values;
    for (int step = 1; step <= reference.steps; step++) {
        Scalars* scalars = worker.scalars;
        device::set_zero(model.grads.data(), layout.size, main);
        device::set_zero(scalars, 1, main);
        forward(model, inputs, B, T, main);
        if (step == 1 && !with_muon) {
            result.check("logits", logits_error(model, reference.array("logits").values, B * T, main),
                         limits.logits);
        }
        classify(model, targets, B, T, &scalars->loss, share, share, true, main);
        const float loss = to_host(&scalars->loss, 1, main)[0];
        result.check(prefix + format("loss of step %d (%.6f)", step, double(loss)),
                     std::abs(double(loss) - losses[step - 1]), limits.loss);
        backward(model, B, T, main, [](int) {});
        if (step == 1 && !with_muon) { check_gradients(result, model, reference, main); }
        device::global_norm_squared(&scalars->norm_squared, worker.shard_gradients(), layout.shard_size(),
                                    main);
        update(worker, options, reference_learning_rate, reference_muon_rate);
    }
    const std::vector<float> master = to_host(worker.master, layout.size, main);
    const std::vector<float>& norms = reference.array(prefix + "norms").values;
    for (size_t i = 0; i < layout.tensors.size(); i++) {
        const Tensor& tensor = layout.tensors[i];
        const double norm = reference_norm(master.data() + tensor.offset, tensor);
        result.check(prefix + "norm at the end of " + tensor.name, std::abs(norm / double(norms[i]) - 1),
                     limits.norm);
        const auto matrix = reference.arrays.find("muon." + tensor.name);
        if (!with_muon || matrix == reference.arrays.end()) { continue; }
        const float *got = master.data() + tensor.offset, *wanted = matrix->second.values.data();
        result.check(prefix + tensor.name, relative_error(got, wanted, tensor.count()), limits.muon_matrix);
    }
    return result.failures;
}

int main(int argc, char** argv) {
    try {
        const char* const usual = runs_on_gpu ? "dev/test/data/reference_head64.bin"
                                              : "dev/test/data/reference.bin";
        const Reference reference = read_reference(argc > 1 ? argv[1] : usual);
        int failures = 0;
        for (int recompute = 0; recompute <= 2; recompute++) {
            printf("--recompute %d\n", recompute);
            failures += test_steps(reference, recompute, "") + test_steps(reference, recompute, "muon.");
        }
        printf(failures ? "%d comparisons failed\n" : "all good\n", failures);
        return failures ? 1 : 0;
    } catch (const std::exception& e) {
        fprintf(stderr, "error: %s\n", e.what());
        return 1;
    }
}
