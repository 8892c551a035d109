// The outer step of a fragment, from the mean of outer gradients (arXiv 2501.18512, algorithm 2 and 2.3).
//
//     momentum = mu * momentum + mean
//     global   = global - lr * (mean + mu * momentum)      Nesterov, as torch.optim.SGD(nesterov=True) has it
//     local    = alpha * local + (1 - alpha) * global      the merge: exact for alpha = 0 and alpha = 1
//
// A worker whose own outer gradient is not in the mean follows global instead, and so keeps its progress for
// its next outer gradient:
//
//     local    = local + (new global - old global)
//
// The optimizer `average` is lr = 1, mu = 0: global becomes the mean of the workers' parameters at the send.
#pragma once
#include <string>

#include "llmc/arithmetic.h"
#include "llmc/buffer.h"
#include "llmc/error.h"
#include "llmc/floatx.h"
#include "llmc/stream.h"
#include "streaming/options.h"

enum class LocalMove { merge, follow };

struct OuterStep {
    float learning_rate;
    float momentum;      // mu
    float local_weight;  // alpha
    LocalMove move = LocalMove::merge;

    // Whether local moves at all.
    HD bool moves_local() const { return local_weight < 1 || move == LocalMove::follow; }
};

inline OuterStep make_outer_step(const DilocoOptions& o, LocalMove move = LocalMove::merge) {
    const std::string& name = o.outer_optimizer;
    if (name == "average") { return {1.0f, 0.0f, o.local_weight, move}; }
    if (name == "nesterov" || name.empty()) { return {o.outer_lr, o.outer_momentum, o.local_weight, move}; }
    throw UserError("unknown outer optimizer '" + name + "': use none, nesterov or average");
}

// New momentum of a value; then its new global parameter, from that.
HD inline float outer_momentum(float momentum, float mean, OuterStep step) {
    return fma_rn(step.momentum, momentum, mean);
}

HD inline float outer_parameter(float global, float new_momentum, float mean, OuterStep step) {
    return fma_rn(-step.learning_rate, fma_rn(step.momentum, new_momentum, mean), global);
}

// For alpha < 1; with alpha = 1 local stays. alpha = 0 is a case of its own, since 0 * local may be NaN.
HD inline float merge(float local, float global, float alpha) {
    float mixed = fma_rn(alpha, local, multiply_rn(subtract_rn(1.0f, alpha), global));
    return alpha == 0 ? global : mixed;
}

// The new local parameter of a value, if local moves at all.
HD inline float moved_local(float local, float old_global, float new_global, OuterStep step) {
    if (step.move == LocalMove::follow) { return add_rn(local, subtract_rn(new_global, old_global)); }
    return merge(local, new_global, step.local_weight);
}

namespace cpu {

const long parallel_values = 1 << 16;  // with fewer values one thread is faster than a team

inline void outer_step_loop(float* global, float* momentum, float* local, floatX* params, const float* mean,
                            long n, OuterStep step) {
    const bool moves_local = step.moves_local();
    #pragma omp parallel for simd if (n >= parallel_values)
    for (long i = 0; i < n; i++) {
        const float old_global = global[i];
        const float new_momentum = outer_momentum(momentum[i], mean[i], step);
        const float new_global = outer_parameter(old_global, new_momentum, mean[i], step);
        momentum[i] = new_momentum;
        global[i] = new_global;
        if (moves_local) {
            const float new_local = moved_local(local[i], old_global, new_global, step);
            local[i] = new_local;
            params[i] = floatX(new_local);
        }
    }
}

// One pass over a range: momentum, global, local and the copy of local that the model computes with.
// With alpha = 1 local and params stay as they are, unless local follows.
// all: (n); local and params may be the same array
inline void outer_step(float* global, float* momentum, float* local, floatX* params, const float* mean,
                       long n, OuterStep step, Stream& stream) {
    stream.enqueue([=] { outer_step_loop(global, momentum, local, params, mean, n, step); });
}

}  // namespace cpu

#ifdef USE_CUDA
#include "streaming/outer.cuh"
#endif
