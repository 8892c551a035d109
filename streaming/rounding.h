// Rounding of what is sent: to nearest, or stochastic, and with which random bits.
//
// Value i of the model without padding (layout.h: logical_index) is rounded with word i % 4 of
//
//     Philox4x32-10, key: seed, counter: {i / 4 in two words, sync, use + 256 worker}
//
// which is number i of cuRAND's subsequence 2^32 (use + 256 worker) + sync. The index is the value's place
// in the model, so that the bits do not depend on how a fragment is cut into blocks and shards. Each value
// has all 32 bits of a word, with which the probabilities of normal numbers are exact (formats.h).
#pragma once
#include <cstdint>

#include "llmc/host_device.h"
#include "llmc/random.h"

// Rounding() is to nearest.
struct Rounding {
    bool stochastic = false;
    uint64_t seed = 0;
    uint32_t sync = 0;   // number of the exchange
    uint32_t use = 0;    // RandomUse and worker
    uint64_t first = 0;  // index in the model of the first value that a call rounds

    // The same for values that begin at `index` in the model.
    Rounding at(uint64_t index) const {
        Rounding moved = *this;
        moved.first = index;
        return moved;
    }
};

// worker: the one that encodes, less than 2^24   sync: counted mod 2^32
// use: send_rounding, by the sender of a delta, or owner_rounding, by the owner of a mean
inline Rounding stochastic_rounding(uint64_t seed, int worker, uint64_t sync, RandomUse use) {
    return {true, seed, uint32_t(sync), uint32_t(use) | uint32_t(worker) << 8, 0};
}

// The random bits of values [4 quad, 4 quad + 4) of the model.
HD inline Philox4 random_quad(const Rounding& rounding, uint64_t quad) {
    return philox4x32_10({{uint32_t(quad), uint32_t(quad >> 32), rounding.sync, rounding.use}},
                         uint32_t(rounding.seed), uint32_t(rounding.seed >> 32));
}
