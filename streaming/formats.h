// The number formats of the wire: encode and decode one value.
//
//     fp4       E3M0 (arXiv 2501.18512, 2.4): sign, 3 exponent bits e; 0 for e = 0, 2^(e - 7) for e = 1..7
//     fp4_e2m1  sign, 2 exponent bits, 1 mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6   (as CUDA's cuda_fp4.h)
//     fp8_e4m3  sign, 4 exponent bits, 3 mantissa bits, largest 448, no infinity    (as CUDA's cuda_fp8.h)
//     fp8_e5m2  sign, 5 exponent bits, 2 mantissa bits, largest 57344               (as CUDA's cuda_fp8.h)
//     bf16      the upper half of an fp32
//     fp32
//
// Formats of 4 and 8 bits share a scale between the values of a block (quantize.h); the others need none.
// Each format is a struct of the same members, so that loops and kernels are written once. encode() rounds to
// nearest, ties to even, but in E3M0, where the two neighbours have no even one, away from zero. It is
// branchless: loops over it vectorise. What is larger than the largest code becomes the largest; a NaN is not
// kept (the header's flag tells).
#pragma once
#include <string>

#include "arithmetic.h"
#include "llmc/error.h"

enum class Format { fp4, fp4_e2m1, fp8_e4m3, fp8_e5m2, bf16, fp32 };

// The nearest number of a format with `exponent_bits` and `mantissa_bits`, as a code without sign.
// magnitude: the bits of a non-negative fp32.   largest: the largest code to use.
template <int exponent_bits, int mantissa_bits>
HD inline uint32_t round_magnitude(uint32_t magnitude, uint32_t largest) {
    const int dropped = 23 - mantissa_bits;
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int32_t smallest_normal = (127 + 1 - bias) << 23;

    // Normal: add just below half a unit of the last place kept, one more where that is odd; the carry does
    // the rest.
    const uint32_t odd = magnitude >> dropped & 1, below_half = (1u << (dropped - 1)) - 1;
    uint32_t normal = ((magnitude + below_half + odd) >> dropped) - (uint32_t(127 - bias) << mantissa_bits);

    // Subnormal: adding a number whose last place is the format's smallest step makes the sum round to it.
    const uint32_t adder = uint32_t(127 + 1 - bias - mantissa_bits + 23) << 23;
    uint32_t subnormal = float_to_bits(add_rn(bits_to_float(magnitude), bits_to_float(adder))) - adder;

    uint32_t code = int32_t(magnitude) < smallest_normal ? subnormal : normal;
    return code < largest ? code : largest;
}

struct E3M0 {
    static constexpr int bits = 4;
    static constexpr bool scaled = true;
    static constexpr float largest = 1;

    HD static uint32_t encode(float x) {
        const uint32_t sign = float_to_bits(x) >> 28 & 8;
        const int32_t magnitude = int32_t(float_to_bits(x) & 0x7fffffff);
        const uint32_t half = 0x00400000;  // of the last place, the exponent's: ties go away from zero
        int32_t exponent = int32_t((uint32_t(magnitude) + half) >> 23) - 120;
        exponent = exponent > 7 ? 7 : exponent < 1 ? 1 : exponent;
        return sign | uint32_t(magnitude < half_of_smallest ? 0 : exponent);
    }

    // The code's exponent, moved to where fp32 has its own, is the value times 2^(7 - 127); 0 is 0 there too.
    HD static float decode(uint32_t code) {
        return multiply_rn(bits_to_float((code & 8) << 28 | (code & 7) << 23), 0x1p120f);
    }

    static constexpr int32_t half_of_smallest = (127 - 7) << 23;  // 2^-7, halfway from 0 to 2^-6
};

struct E2M1 {
    static constexpr int bits = 4;
    static constexpr bool scaled = true;
    static constexpr float largest = 6;

    HD static uint32_t encode(float x) {
        return (float_to_bits(x) >> 28 & 8) | round_magnitude<2, 1>(float_to_bits(x) & 0x7fffffff, 7);
    }

    // Exponent and mantissa go to where fp32 has them. The one subnormal, 0.5, and 0 stand apart.
    HD static float decode(uint32_t code) {
        const uint32_t normal = ((code & 7) << 22) + (uint32_t(127 - 1) << 23);
        const uint32_t subnormal = code & 1 ? 0x3f000000 : 0;
        return bits_to_float((code & 8) << 28 | (code & 6 ? normal : subnormal));
    }
};

struct E4M3 {
    static constexpr int bits = 8;
    static constexpr bool scaled = true;
    static constexpr float largest = 448;

    HD static uint32_t encode(float x) {
        return (float_to_bits(x) >> 24 & 0x80) | round_magnitude<4, 3>(float_to_bits(x) & 0x7fffffff, 0x7e);
    }

    HD static float decode(uint32_t code) {
        // As E3M0's, with the mantissa behind: a subnormal becomes one of fp32's, and the product is exact.
        float value = multiply_rn(bits_to_float((code & 0x80) << 24 | (code & 0x7f) << 20), 0x1p120f);
        return (code & 0x7f) == 0x7f ? bits_to_float(0x7fc00000 | (code & 0x80) << 24) : value;
    }
};

struct E5M2 {
    static constexpr int bits = 8;
    static constexpr bool scaled = true;
    static constexpr float largest = 57344;

    HD static uint32_t encode(float x) {
        return (float_to_bits(x) >> 24 & 0x80) | round_magnitude<5, 2>(float_to_bits(x) & 0x7fffffff, 0x7b);
    }

    HD static float decode(uint32_t code) {
        uint32_t shifted = (code & 0x80) << 24 | (code & 0x7f) << 21;
        float value = multiply_rn(bits_to_float(shifted), 0x1p112f);
        return (code & 0x7f) >= 0x7c ? bits_to_float(shifted | 0x7f800000) : value;  // infinity and NaN
    }
};

struct Bf16 {
    static constexpr int bits = 16;
    static constexpr bool scaled = false;

    HD static uint32_t encode(float x) {
        uint32_t word = float_to_bits(x);
        uint32_t rounded = (word + 0x7fff + (word >> 16 & 1)) >> 16;
        return (word & 0x7fffffff) < 0x7f800000 ? rounded : word >> 16;  // rounded, a NaN could become a zero
    }

    HD static float decode(uint32_t code) { return bits_to_float(code << 16); }
};

struct Fp32 {
    static constexpr int bits = 32;
    static constexpr bool scaled = false;

    HD static uint32_t encode(float x) { return float_to_bits(x); }
    HD static float decode(uint32_t code) { return bits_to_float(code); }
};

// Calls use(E3M0()), use(E2M1()), ... : from a format chosen at run time to code that was compiled for it.
template <class Use>
auto with_format(Format format, Use use) {
    switch (format) {
        case Format::fp4: return use(E3M0());
        case Format::fp4_e2m1: return use(E2M1());
        case Format::fp8_e4m3: return use(E4M3());
        case Format::fp8_e5m2: return use(E5M2());
        case Format::bf16: return use(Bf16());
        case Format::fp32: break;
    }
    return use(Fp32());
}

const Format all_formats[] = {Format::fp4,      Format::fp4_e2m1, Format::fp8_e4m3,
                              Format::fp8_e5m2, Format::bf16,     Format::fp32};

inline std::string name_of(Format format) {
    switch (format) {
        case Format::fp4: return "fp4";
        case Format::fp4_e2m1: return "fp4_e2m1";
        case Format::fp8_e4m3: return "fp8_e4m3";
        case Format::fp8_e5m2: return "fp8_e5m2";
        case Format::bf16: return "bf16";
        case Format::fp32: break;
    }
    return "fp32";
}

inline Format parse_format(const std::string& name) {
    std::string known;
    for (Format one : all_formats) {
        if (name == name_of(one)) { return one; }
        known += (known.empty() ? "" : ", ") + name_of(one);
    }
    throw UserError("unknown number format '" + name + "': use one of " + known);
}
