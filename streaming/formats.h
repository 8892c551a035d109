// The number formats of the wire: encode and decode one value.
//
//     fp4       E3M0 (arXiv 2501.18512, 2.4): sign, 3 exponent bits e; 0 for e = 0, 2^(e - 7) for e = 1..7
//     fp4_e2m1  sign, 2 exponent bits, 1 mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6   (as CUDA's cuda_fp4.h)
//     fp8_e4m3  sign, 4 exponent bits, 3 mantissa bits, largest 448, no infinity    (as CUDA's cuda_fp8.h)
//     fp8_e5m2  sign, 5 exponent bits, 2 mantissa bits, largest 57344               (as CUDA's cuda_fp8.h)
//     bf16      the upper half of an fp32
//     fp32
//
// In the 4-bit and 8-bit formats the values of a block share a scale (quantize.h); the others need none.
// Each format is a struct with the same members, so that loops and kernels are written once. encode(x)
// rounds to nearest, ties to even; E3M0 has no mantissa bit that could be even, so its ties go away from
// zero. encode(x, random) rounds stochastically: up with probability (x - lower neighbour) / (distance
// between the neighbours), so that the expected result is x. Both are branchless, so that loops over them
// vectorize. A magnitude beyond the largest code becomes the largest code. The 4-bit and 8-bit formats do
// not keep NaN: a flag in the payload's header reports it.
#pragma once
#include <string>
#include <vector>

#include "llmc/arithmetic.h"
#include "llmc/error.h"
#include "llmc/rounding.h"

enum class Format { fp4, fp4_e2m1, fp8_e4m3, fp8_e5m2, bf16, fp32 };
inline const std::vector<std::string> format_names = {"fp4",      "fp4_e2m1", "fp8_e4m3",
                                                      "fp8_e5m2", "bf16",     "fp32"};

// What the formats of 4 and 8 bits share.   bias: of the exponent   largest_code: without sign
template <int width, int bias, int mantissa_bits, uint32_t largest_code>
struct ScaledFormat {
    static constexpr int bits = width;
    static constexpr bool scaled = true;

    HD static uint32_t encode(float x) {
        const uint32_t word = float_to_bits(x);
        return sign(word) | round_to_nearest<bias, mantissa_bits>(word & 0x7fffffff, largest_code);
    }

    HD static uint32_t encode(float x, uint32_t random) {
        const uint32_t word = float_to_bits(x);
        const uint32_t magnitude = word & 0x7fffffff;
        return sign(word) | round_stochastically<bias, mantissa_bits>(magnitude, random, largest_code);
    }

    HD static uint32_t sign(uint32_t word) { return word >> (32 - width) & (1u << (width - 1)); }
};

struct E3M0 : ScaledFormat<4, 7, 0, 7> {
    static constexpr float largest = 1;
    using ScaledFormat::encode;

    // Adds half of the exponent's last place and cuts off the mantissa: ties are rounded away from zero.
    HD static uint32_t encode(float x) {
        const int32_t magnitude = int32_t(float_to_bits(x) & 0x7fffffff);
        const uint32_t half = 0x00400000;
        int32_t exponent = int32_t((uint32_t(magnitude) + half) >> 23) - 120;
        exponent = exponent > 7 ? 7 : exponent < 1 ? 1 : exponent;
        return sign(float_to_bits(x)) | uint32_t(magnitude < half_of_smallest ? 0 : exponent);
    }

    // In fp32's exponent field, the code's exponent gives the value times 2^(7 - 127); 0 stays 0.
    HD static float decode(uint32_t code) {
        return multiply_rn(bits_to_float((code & 8) << 28 | (code & 7) << 23), 0x1p120f);
    }

    static constexpr int32_t half_of_smallest = (127 - 7) << 23;  // 2^-7, halfway from 0 to 2^-6
};

struct E2M1 : ScaledFormat<4, 1, 1, 7> {
    static constexpr float largest = 6;

    // Exponent and mantissa are moved to their places in fp32. For the codes with exponent 0, which are 0 and
    // 0.5, that gives x = 0.5 and 0.75, and their value is 2 x - 1; for all others that is at least x. A GPU
    // needs one product, as in E3M0. On a CPU that is 20 times as slow, since 0.5 becomes a subnormal factor.
    HD static float decode(uint32_t code) {
#ifdef USE_CUDA
        return multiply_rn(bits_to_float((code & 8) << 28 | (code & 7) << 22), 0x1p126f);
#else
        const float normal = bits_to_float(((code & 7) << 22) + (uint32_t(127 - 1) << 23));
        const float subnormal = subtract_rn(add_rn(normal, normal), 1.0f);
        return bits_to_float((code & 8) << 28 | float_to_bits(normal < subnormal ? normal : subnormal));
#endif
    }
};

struct E4M3 : ScaledFormat<8, 7, 3, 0x7e> {
    static constexpr float largest = 448;

    // As in E3M0, but with a mantissa: a subnormal code becomes a subnormal fp32, and the product is exact.
    HD static float decode(uint32_t code) {
        const float value = multiply_rn(bits_to_float((code & 0x7f) << 20), 0x1p120f);
        return bits_to_float((code & 0x80) << 24 | (value > largest ? 0x7fc00000 : float_to_bits(value)));
    }
};

struct E5M2 : ScaledFormat<8, 15, 2, 0x7b> {
    static constexpr float largest = 57344;

    HD static float decode(uint32_t code) {
        const float value = multiply_rn(bits_to_float((code & 0x7f) << 21), 0x1p112f);
        const uint32_t beyond = value > largest ? 0x7f800000 : 0;  // infinity, and NaN with its mantissa
        return bits_to_float((code & 0x80) << 24 | float_to_bits(value) | beyond);
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

    HD static uint32_t encode(float x, uint32_t random) {
        return bf16_rounded_stochastically(x, random >> 16);
    }

    HD static float decode(uint32_t code) { return bits_to_float(code << 16); }
};

struct Fp32 {
    static constexpr int bits = 32;
    static constexpr bool scaled = false;

    HD static uint32_t encode(float x, uint32_t /*random*/ = 0) { return float_to_bits(x); }
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

inline Format parse_format(const std::string& name) {
    return Format(place_of(name, format_names, "number format"));
}
