// Gives DilocoOptions the words for a WireOptions.
#pragma once
#include "dev/test/formats.h"
#include "streaming/exchange.h"
#include "streaming/options.h"

inline void set_wire(DilocoOptions& options, const WireOptions& wire) {
    options.outer_format = name_of(wire.format);
    options.outer_exchange = name_of(wire.exchange);
    options.outer_rounding = wire.stochastic ? "stochastic" : "nearest";
    options.seed = wire.seed;
    options.outer_error_feedback = wire.error_feedback;
    options.outer_weights = wire.token_weights ? "tokens" : "equal";
}
