// Rounding of float to fewer bits: to nearest, or stochastically, up or down with probabilities that make the
// result right on average.
#pragma once
#include <cstdint>

#include "llmc/arithmetic.h"
#include "llmc/floatx.h"
#include "llmc/host_device.h"
#include "llmc/random.h"

// -----------------------------------------------------------------------------------------------------------
// To 4 or 8 bits: the wire's formats (streaming/formats.h)

// The nearest number of a format with this exponent bias and these mantissa bits, as a code without sign.
// magnitude: the bits of a non-negative fp32   largest: the largest code to use
template <int bias, int mantissa_bits>
HD inline uint32_t round_to_nearest(uint32_t magnitude, uint32_t largest) {
    const int dropped = 23 - mantissa_bits;
    const int32_t smallest_normal = (127 + 1 - bias) << 23;

    // Normal: add just below half a unit of the last place kept, or half a unit if that place is odd; the
    // carry rounds.
    const uint32_t odd = magnitude >> dropped & 1, below_half = (1u << (dropped - 1)) - 1;
    uint32_t normal = ((magnitude + below_half + odd) >> dropped) - (uint32_t(127 - bias) << mantissa_bits);

    // Subnormal: adding a number whose last bit is worth the format's smallest step rounds to that step.
    const uint32_t adder = uint32_t(127 + 1 - bias - mantissa_bits + 23) << 23;
    uint32_t subnormal = float_to_bits(add_rn(bits_to_float(magnitude), bits_to_float(adder))) - adder;

    uint32_t code = int32_t(magnitude) < smallest_normal ? subnormal : normal;
    return code < largest ? code : largest;
}

// One of a number's two neighbours in such a format, as a code without sign. The probability of the larger
// one is exact for normal numbers; for subnormal ones it is cut to a multiple of 2^(mantissa_bits - 31).
// magnitude: the bits of a non-negative fp32   random: 32 bits
template <int bias, int mantissa_bits>
HD inline uint32_t round_stochastically(uint32_t magnitude, uint32_t random, uint32_t largest) {
    const int dropped = 23 - mantissa_bits;
    const uint32_t smallest_normal = uint32_t(127 + 1 - bias) << 23;
    const bool is_normal = int32_t(magnitude) >= int32_t(smallest_normal);

    // Normal: the sum of the bits to be dropped and as many random bits carries into those that are kept.
    uint32_t normal =
        ((magnitude + (random >> (32 - dropped))) >> dropped) - (uint32_t(127 - bias) << mantissa_bits);

    // Subnormal: the same in fixed point, in units of the format's smallest step, with as many bits after the
    // point as fit into 31.
    const int fraction = 31 - mantissa_bits;
    const float to_fixed = bits_to_float(uint32_t(127 + bias + 30) << 23);  // 2^(bias - 1 + 31)
    const float fixed = multiply_rn(bits_to_float(is_normal ? 0 : magnitude), to_fixed);
    uint32_t subnormal = (uint32_t(int32_t(fixed)) + (random >> (32 - fraction))) >> fraction;

    uint32_t code = is_normal ? normal : subnormal;
    return code < largest ? code : largest;
}

// -----------------------------------------------------------------------------------------------------------
// Parameters, to bf16: stochastically, so that updates smaller than bf16's spacing are not lost in the copy
// that the model computes with. The random numbers are Philox4x32-10 of (seed, step, index of the value in
// the model), so that every process rounds a value alike.

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
