// DilocoOptions: the options of Streaming DiLoCo with their defaults. Words are as on the command line.
#pragma once
#include <cstdint>
#include <string>

#include "llmc/device.h"

struct DilocoOptions {
    long inner_steps = 0;                     // H; 0: usual_inner_steps()
    int fragment_layers = 3;                  // 0: all blocks in one fragment (classic DiLoCo)
    std::string fragment_pattern = "strided";
    long overlap = 1;                         // tau, in [0, H)
    float local_weight = 0.5f;                // alpha
    std::string outer_optimizer;              // empty: none for one worker, nesterov for more
    float outer_lr = 0.4f;
    float outer_momentum = 0.9f;              // mu
    std::string outer_format = "fp4_e2m1";    // of payloads
    std::string outer_exchange = "auto";
    std::string outer_rounding = "nearest";
    bool outer_error_feedback = false;
    std::string outer_weights = "equal";      // of the workers in a mean
    std::string transport = runs_on_gpu ? "nccl" : "tcp";
    bool offload = false;                     // outer state in the host's memory (outer_state.h)
    uint64_t seed = 1337;                     // of stochastic rounding: the run's

    // Whether fragments are exchanged at all.
    bool streams() const { return outer_optimizer != "none"; }
    // Whether a worker's weight in a mean is the number of tokens that it has trained on.
    bool weighs_by_tokens() const { return outer_weights == "tokens"; }
    // Whether workers may be slow, die and join: they meet only in the sync log of the store.
    bool is_elastic() const { return transport == "store"; }
};
