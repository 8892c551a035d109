// Values for tests of what is exchanged.
#pragma once
#include <vector>

#include "llmc/random.h"

using Floats = std::vector<float>;

// (n) normally distributed, the same for the same seed.
inline Floats random_values(uint64_t seed, long n, float deviation) {
    Floats values(static_cast<size_t>(n));
    for (size_t i = 0; i < values.size(); i++) {
        values[i] = deviation * standard_normal(seed, RandomUse::sampling, i);
    }
    return values;
}
