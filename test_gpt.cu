// test_gpt: the model of train_gpt.cu against PyTorch's float64 numbers (dev/reference.py): logits, loss,
// every gradient, ten AdamW steps. Leaves with 1 if anything is off.
#define TESTING
#include "train_gpt.cu"

#include "dev/test/reference.h"

struct Report {
    int failures = 0;

    // One line: what was compared, how far off it is, how far it may be.
    void check(const std::string& what, double error, double limit) {
        const bool good = error <= limit;  // not a number is not good
        failures += !good;
        printf("%-6s %-28s %9.2e  (at most %.0e)\n", good ? "ok" : "FAILED", what.c_str(), error, limit);
    }
};

// ||a - b|| / ||b|| of the logits of the real vocabulary.   logits: (B*T,Vp)   expected: (B*T,V)
inline double logits_error(const Model& model, const std::vector<float>& expected, long N) {
    const long V = model.shape.vocab_size, Vp = model.shape.padded_vocab_size;
    std::vector<float> logits;
    for (long i = 0; i < N; i++) {
        for (long v = 0; v < V; v++) { logits.push_back(float(model.acts.logits[i * Vp + v])); }
    }
    return relative_error(logits.data(), expected.data(), N * V);
}

inline int test_model(const Reference& reference, int recompute) {
    const int B = reference.B, T = reference.T;
    Layout layout = gpt_layout(reference.shape, 1, 1);  // the embedding in several blocks
    Stream main, comm_stream;
    MemoryStore store;
    const std::unique_ptr<Comm> alone = make_comm_gloo(store, "inner", 0, 1, "", 1);
    Model model(reference.shape, layout, recompute, MatmulPrecision::highest);
    allocate_activations(model, B, T);
    Worker worker(model, *alone, main, comm_stream);
    std::vector<float> initial(static_cast<size_t>(layout.size));
    reference_parameters(initial.data(), reference, layout);
    set_parameters(worker, initial.data());

    const std::vector<int> tokens = reference_tokens(reference);
    const int *inputs = tokens.data(), *targets = tokens.data() + 1;
    Options options;
    options.clip = 0;
    options.weight_decay = reference_weight_decay;
    options.beta1 = reference_beta1;
    options.beta2 = reference_beta2;
    options.epsilon = reference_eps;
    const float share = 1.0f / float(B * T);

    Report report;
    const std::vector<float>& losses = reference.array("losses").values;
    for (int step = 1; step <= reference.steps; step++) {
        Scalars* scalars = worker.scalars;
        layers::set_zero(model.grads.data(), layout.size, main);
        layers::set_zero(scalars, 1, main);
        forward(model, inputs, B, T, main);
        if (step == 1) {
            report.check("logits", logits_error(model, reference.array("logits").values, B * T), 1e-5);
        }
        classify(model, targets, B, T, &scalars->loss, share, share, true, main);
        report.check(format("loss of step %d (%.6f)", step, double(scalars->loss)),
                     std::abs(double(scalars->loss) - losses[step - 1]), 1e-5);
        backward(model, B, T, main, [](int) {});
        if (step == 1) {
            for (const Tensor& tensor : layout.tensors) {
                const ReferenceArray& expected = reference.array("gradient." + tensor.name);
                report.check("gradient of " + tensor.name,
                             relative_error(model.grads + tensor.offset, expected.values.data(),
                                            long(expected.values.size())),
                             1e-4);
            }
        }
        layers::global_norm_squared(&scalars->norm_squared, worker.shard_gradients(), layout.shard_size(),
                                    main);
        update(worker, options, reference_learning_rate, step);
    }
    const std::vector<float>& norms = reference.array("norms").values;
    for (size_t i = 0; i < layout.tensors.size(); i++) {
        const Tensor& tensor = layout.tensors[i];
        const double norm = reference_norm(worker.master + tensor.offset, tensor);
        report.check("norm at the end of " + tensor.name, std::abs(norm / double(norms[i]) - 1), 1e-5);
    }
    return report.failures;
}

int main(int argc, char** argv) {
    try {
        const Reference reference = read_reference(argc > 1 ? argv[1] : "dev/test/data/reference.bin");
        int failures = 0;
        for (int recompute = 0; recompute <= 2; recompute++) {
            printf("--recompute %d\n", recompute);
            failures += test_model(reference, recompute);
        }
        printf(failures ? "%d comparisons failed\n" : "all good\n", failures);
        return failures ? 1 : 0;
    } catch (const std::exception& e) {
        fprintf(stderr, "error: %s\n", e.what());
        return 1;
    }
}
