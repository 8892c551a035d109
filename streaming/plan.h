// The plan of a run, before it starts: whether its options are valid, and its fragments. The bytes that it
// sends are in llmc/run/report.h.
#pragma once
#include <cmath>
#include <vector>

#include "streaming/exchange.h"
#include "llmc/layout.h"
#include "streaming/outer.h"
#include "streaming/schedule.h"

// Throws a UserError for options that are not valid for a run of `steps` steps (-1: not known yet).
inline void validate(const DilocoOptions& options, long steps, int workers) {
    const long H = options.inner_steps;
    if (H < 1) { throw UserError(format("%ld inner steps (H): use at least 1", H)); }
    if (options.overlap < 0 || options.overlap >= H) {
        throw UserError(format("an overlap (tau) of %ld steps with %ld inner steps (H): use 0 to %ld, so "
                               "that a fragment has arrived before it is sent again",
                               options.overlap, H, H - 1));
    }
    if (!(options.local_weight >= 0 && options.local_weight <= 1)) {
        throw UserError(format("a local weight (alpha) of %g: use 0 to 1", options.local_weight));
    }
    if (!(options.outer_lr >= 0 && std::isfinite(options.outer_lr))) {
        throw UserError(format("an outer learning rate of %g: use 0 or more", options.outer_lr));
    }
    if (!(options.outer_momentum >= 0 && options.outer_momentum <= 1)) {
        throw UserError(format("an outer momentum of %g: use 0 to 1", options.outer_momentum));
    }
    wire_options(options);  // refuses unknown words
    if (options.streams()) { make_outer_step(options.outer_optimizer, 0, 0, 0); }
    if (workers > 1 && !options.streams()) {
        throw UserError(format("%d workers without an outer optimizer would never meet: use nesterov or "
                               "average, or one worker with more ranks", workers));
    }
    if (steps >= 0 && steps < H) {
        throw UserError(format("%ld steps with %ld inner steps (H): train for at least that many, or not all "
                               "fragments are exchanged", steps, H));
    }
}

// The fragments that workers exchange; none without an outer optimizer.
inline std::vector<Fragment> make_fragments(const Layout& layout, const DilocoOptions& options) {
    if (!options.streams()) { return {}; }
    return make_fragments(layout, options.fragment_layers, parse_fragment_pattern(options.fragment_pattern),
                          options.inner_steps);
}
