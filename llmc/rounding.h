// Stochastic rounding of float to bf16: up or down with probabilities that make the result right on average,
// so that updates smaller than bf16's spacing are not lost in the copy that the model computes with.
//
// The random numbers are Philox4x32-10 of (seed, step, index of the value in the model), so that every
// process rounds a value alike.
#pragma once
#include <cstdint>

#include "llmc/arithmetic.h"
#include "llmc/floatx.h"
#include "llmc/host_device.h"
#include "llmc/random.h"

struct StochasticRounding {
    uint64_t seed;
    uint32_t step;
    uint64_t first;  // index of value 0 in the model without padding; on a GPU a multiple of 4
};

// The random bits of 8 values: value index % 8 takes 16 of them.   index: in the model
HD inline Philox4 rounding_bits(const StochasticRounding& rounding, uint64_t index) {
    return random_bits(rounding.seed, RandomUse::rounding, index / 8, rounding.step);
}

HD inline uint32_t rounding_bits_of(const Philox4& bits, uint64_t index) {
    return bits.v[index % 8 / 2] >> index % 2 * 16 & 0xffff;
}

// x as the bits of a bf16: the 16 bits that are cut off carry into the rest if their sum with `random` (16
// bits) reaches 2^16. Infinities and NaN stay what they are.
HD inline uint16_t bf16_rounded_stochastically(float x, uint32_t random) {
    const uint32_t bits = float_to_bits(x);
    const bool finite = (bits & 0x7fffffff) < 0x7f800000;
    const uint32_t quiet = (bits & 0x7fffffff) > 0x7f800000 ? 0x400000 : 0;
    return uint16_t((finite ? bits + random : bits | quiet) >> 16);
}

// x as a parameter: rounded stochastically to bf16, or unchanged if parameters are fp32.
HD inline floatX rounded_parameter(float x, [[maybe_unused]] uint32_t random) {
#if defined(USE_CUDA) && !defined(ENABLE_FP32)
    __nv_bfloat16_raw raw;
    raw.x = bf16_rounded_stochastically(x, random);
    return floatX(raw);
#else
    return x;
#endif
}
