// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a function from a
// counter and a key to 128 random bits. No state: any thread, CPU or GPU, draws number i by itself and gets
// the same bits.
#pragma once
#include <cstdint>

#include "llmc/host_device.h"

struct Philox4 {
    uint32_t v[4];
};

HD inline Philox4 philox4x32_10(Philox4 counter, uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; round++) {
        uint64_t a = uint64_t(0xD2511F53u) * counter.v[0];
        uint64_t b = uint64_t(0xCD9E8D57u) * counter.v[2];
        counter = {{uint32_t(b >> 32) ^ counter.v[1] ^ key0, uint32_t(b),
                    uint32_t(a >> 32) ^ counter.v[3] ^ key1, uint32_t(a)}};
        key0 += 0x9E3779B9u;  // the golden ratio
        key1 += 0xBB67AE85u;  // sqrt(3) - 1
    }
    return counter;
}

// The use of random numbers is word 3 of the counter, so that no two uses share numbers. send_rounding and
// owner_rounding are for payloads; the upper bits hold the worker's number (streaming/rounding.h).
enum class RandomUse : uint32_t {
    parameters = 1, shuffle = 2, sampling = 3, rounding = 4, send_rounding = 5, owner_rounding = 6
};

HD inline Philox4 random_bits(uint64_t seed, RandomUse use, uint64_t index, uint32_t draw = 0) {
    return philox4x32_10({{uint32_t(index), uint32_t(index >> 32), draw, uint32_t(use)}}, uint32_t(seed),
                         uint32_t(seed >> 32));
}

// The image of `index` under a random permutation of 0, 1, ... count - 1; each `number` is another
// permutation. It takes no memory: a Feistel network of eight rounds permutes 0 ... 4^bits - 1, and is
// applied again while the result is not below count (cycle walking: Black & Rogaway, "Ciphers with arbitrary
// finite domains", CT-RSA 2002), fewer than four times on average.   count: at most 2^62
inline uint64_t permuted(uint64_t index, uint64_t count, uint64_t seed, RandomUse use, uint32_t number) {
    int bits = 1;
    while (uint64_t(1) << (2 * bits) < count) { bits++; }
    const uint64_t mask = (uint64_t(1) << bits) - 1;
    do {
        uint64_t left = index >> bits, right = index & mask;
        for (uint32_t round = 0; round < 8; round++) {
            const Philox4 random = random_bits(seed, use, uint64_t(number) << 32 | right, round);
            const uint64_t mixed = left ^ (random.v[0] & mask);
            left = right;
            right = mixed;
        }
        index = left << bits | right;
    } while (index >= count);
    return index;
}

// Uniform in [0, 1): 24 bits, exact in float.
HD inline float uniform(uint32_t bits) { return float(bits >> 8) * 0x1p-24f; }

// Standard normal number `index` of `seed`: the sum of twelve uniforms minus six (Irwin-Hall; variance 1,
// within 6 sigma, excess kurtosis -0.1). Sums of 24-bit integers are exact and need no libm, so that every
// machine gets the same bits.
HD inline float standard_normal(uint64_t seed, RandomUse use, uint64_t index) {
    uint32_t sum = 0;  // at most 12 * 2^24 < 2^28
    for (uint32_t draw = 0; draw < 3; draw++) {
        Philox4 bits = random_bits(seed, use, index, draw);
        for (uint32_t word : bits.v) { sum += word >> 8; }
    }
    return float(int32_t(sum) - 6 * (1 << 24)) * 0x1p-24f;
}
