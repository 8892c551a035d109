// The number formats, exhaustively: every code and every rounding boundary.
#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "dev/test/formats.h"
#include "llmc/random.h"

namespace test_formats {

// The non-negative finite values of a format in ascending order, by its definition; the index is the code.
std::vector<double> values_of(Format format) {
    std::vector<double> values;
    auto add_all = [&](int codes, int mantissa_bits, int bias) {
        for (int code = 0; code < codes; code++) {
            int exponent = code >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
            double fraction = double(mantissa) / (1 << mantissa_bits);
            values.push_back(exponent == 0 ? std::ldexp(fraction, 1 - bias)
                                           : std::ldexp(1 + fraction, exponent - bias));
        }
    };
    switch (format) {
        case Format::fp4: values = {0, 1 / 64., 1 / 32., 1 / 16., 1 / 8., 1 / 4., 1 / 2., 1}; break;
        case Format::fp4_e2m1: values = {0, 0.5, 1, 1.5, 2, 3, 4, 6}; break;
        case Format::fp8_e4m3: add_all(0x7f, 3, 7); break;
        case Format::fp8_e5m2: add_all(0x7c, 2, 15); break;
        case Format::bf16: add_all(0x7f80, 7, 127); break;
        case Format::fp32: break;
    }
    return values;
}

const Format enumerable[] = {Format::fp4, Format::fp4_e2m1, Format::fp8_e4m3, Format::fp8_e5m2, Format::bf16};

uint32_t encode(Format format, float x) {
    return with_format(format, [=](auto f) { return decltype(f)::encode(x); });
}

float decode(Format format, uint32_t code) {
    return with_format(format, [=](auto f) { return decltype(f)::decode(code); });
}

uint32_t sign_bit(Format format) {
    return 1u << with_format(format, [](auto f) { return decltype(f)::bits - 1; });
}

TEST(Formats, every_code_decodes_to_its_value) {
    for (Format format : enumerable) {
        const std::vector<double> values = values_of(format);
        for (uint32_t code = 0; code < values.size(); code++) {
            ASSERT_EQ(double(decode(format, code)), values[code]) << name_of(format) << " " << code;
            ASSERT_EQ(double(decode(format, code | sign_bit(format))), -values[code]);
            ASSERT_TRUE(std::signbit(decode(format, code | sign_bit(format))));
        }
    }
    EXPECT_EQ(E3M0::largest, values_of(Format::fp4).back());
    EXPECT_EQ(E2M1::largest, values_of(Format::fp4_e2m1).back());
    EXPECT_EQ(E4M3::largest, values_of(Format::fp8_e4m3).back());
    EXPECT_EQ(E5M2::largest, values_of(Format::fp8_e5m2).back());
}

TEST(Formats, codes_beyond_the_finite_ones_decode_as_the_formats_say) {
    for (uint32_t sign : {0x00u, 0x80u}) {
        EXPECT_TRUE(std::isnan(E4M3::decode(0x7f | sign)));
        EXPECT_EQ(E5M2::decode(0x7c | sign), sign ? -INFINITY : INFINITY);
        for (uint32_t code : {0x7du, 0x7eu, 0x7fu}) { EXPECT_TRUE(std::isnan(E5M2::decode(code | sign))); }
    }
    EXPECT_EQ(Bf16::decode(0x7f80), INFINITY);
    EXPECT_TRUE(std::isnan(Bf16::decode(0x7fc0)));
}

TEST(Formats, every_code_round_trips) {
    for (Format format : enumerable) {
        const uint32_t codes = uint32_t(values_of(format).size());
        for (uint32_t code = 0; code < codes; code++) {
            for (uint32_t signed_code : {code, code | sign_bit(format)}) {
                ASSERT_EQ(encode(format, decode(format, signed_code)), signed_code) << name_of(format);
            }
        }
    }
}

TEST(Formats, every_rounding_boundary_lies_exactly_in_the_middle) {
    for (Format format : enumerable) {
        const std::vector<double> values = values_of(format);
        for (uint32_t code = 0; code + 1 < values.size(); code++) {
            const float middle = float((values[code] + values[code + 1]) / 2);
            const bool away = format == Format::fp4;  // the others: to the even code
            const uint32_t tie = away || code % 2 == 1 ? code + 1 : code;
            for (uint32_t sign : {0u, sign_bit(format)}) {
                const float s = sign ? -1.0f : 1.0f;
                ASSERT_EQ(encode(format, s * std::nextafterf(middle, 0)), code | sign) << name_of(format);
                ASSERT_EQ(encode(format, s * middle), tie | sign) << name_of(format) << code;
                ASSERT_EQ(encode(format, s * std::nextafterf(middle, INFINITY)), (code + 1) | sign);
            }
        }
    }
}

TEST(Formats, what_is_too_large_becomes_the_largest) {
    for (Format format : {Format::fp4, Format::fp4_e2m1, Format::fp8_e4m3, Format::fp8_e5m2}) {
        const uint32_t largest = uint32_t(values_of(format).size()) - 1;
        const float value = decode(format, largest);
        for (float x : {std::nextafterf(value, INFINITY), 1.3f * value, 1e6f * value, FLT_MAX, INFINITY}) {
            EXPECT_EQ(encode(format, x), largest) << name_of(format) << " " << x;
            EXPECT_EQ(encode(format, -x), largest | sign_bit(format));
        }
    }
}

TEST(Formats, any_number_becomes_the_nearest_one) {
    for (Format format : {Format::fp4, Format::fp4_e2m1, Format::fp8_e4m3, Format::fp8_e5m2}) {
        const std::vector<double> values = values_of(format);
        for (uint64_t i = 0; i < 20000; i++) {
            Philox4 bits = random_bits(1, RandomUse::parameters, i);
            const float fraction = float(int32_t(bits.v[0])) * 0x1p-31f;
            const float x = std::ldexp(fraction, int(bits.v[1] % 40) - 25) * float(values.back());
            double error = INFINITY, magnitude = std::min<double>(std::fabs(x), values.back());
            for (double value : values) { error = std::min(error, std::fabs(value - magnitude)); }
            const double decoded = decode(format, encode(format, x));
            ASSERT_EQ(std::fabs(std::fabs(decoded) - magnitude), error) << name_of(format) << " " << x;
            ASSERT_EQ(std::signbit(decoded), std::signbit(x));
        }
    }
}

TEST(Formats, denormals_infinities_and_nan_survive_where_the_format_has_them) {
    const float smallest = std::numeric_limits<float>::denorm_min();
    for (Format format : enumerable) { EXPECT_EQ(decode(format, encode(format, smallest)), 0); }
    EXPECT_EQ(Bf16::decode(Bf16::encode(0x1p-133f)), 0x1p-133f);
    EXPECT_EQ(Bf16::decode(Bf16::encode(INFINITY)), INFINITY);
    EXPECT_EQ(Bf16::decode(Bf16::encode(FLT_MAX)), INFINITY);
    EXPECT_TRUE(std::isnan(Bf16::decode(Bf16::encode(NAN))));
    EXPECT_TRUE(std::isnan(Bf16::decode(Bf16::encode(-NAN))));
    for (uint32_t bits : {0u, 1u, 0x80000000u, 0x3f800001u, 0x7f7fffffu, 0x7f800000u, 0x7fc00001u}) {
        EXPECT_EQ(Fp32::encode(Fp32::decode(bits)), bits);
    }
}

uint32_t encode(Format format, float x, uint32_t random) {
    return with_format(format, [=](auto f) { return decltype(f)::encode(x, random); });
}

// For how many of all 2^32 random words x, a non-negative number, gets a code above `code`. Larger words give
// larger codes.
uint64_t words_that_go_up(Format format, float x, uint32_t code) {
    uint64_t first = 0, end = uint64_t(1) << 32;  // the first word that goes up is in [first, end]
    while (first < end) {
        const uint64_t middle = (first + end) / 2;
        if (encode(format, x, uint32_t(middle)) > code) {
            end = middle;
        } else {
            first = middle + 1;
        }
    }
    return (uint64_t(1) << 32) - first;
}

// Numbers between two neighbours: close to both, close to the middle and elsewhere. The first is `low`.
std::vector<float> between(float low, float high) {
    const float middle = float((double(low) + high) / 2);
    std::vector<float> points = {low, std::nextafterf(low, high), std::nextafterf(middle, low), middle,
                                 std::nextafterf(middle, high), std::nextafterf(high, low)};
    for (double part : {1e-6, 0.1, 1 / 3., 0.7, 0.999}) {
        points.push_back(float(low + part * (double(high) - low)));
    }
    return points;
}

// Below the smallest normal number the probability has fewer bits; above, it is exact.
TEST(StochasticFormats, the_larger_neighbour_is_as_likely_as_the_way_to_it_is_done) {
    for (Format format : enumerable) {
        const std::vector<double> values = values_of(format);
        const int mantissa_bits = format == Format::fp4        ? 0
                                  : format == Format::fp4_e2m1 ? 1
                                  : format == Format::fp8_e4m3 ? 3
                                                               : 2;
        const bool all_exact = format == Format::bf16;
        for (uint32_t code = 0; code + 1 < values.size(); code++) {
            const double low = values[code], high = values[code + 1];
            const bool is_normal = all_exact || code >= 1u << mantissa_bits;
            for (float x : between(float(low), float(high))) {
                const double exact = std::ldexp((double(x) - low) / (high - low), 32);
                const double step = is_normal ? 1 : std::ldexp(1, 1 + mantissa_bits);
                const double expected = std::floor(exact / step) * step;
                ASSERT_EQ(double(words_that_go_up(format, x, code)), expected) << name_of(format) << " " << x;
                if (is_normal) { ASSERT_EQ(expected, exact) << name_of(format) << " " << x; }
            }
        }
    }
}

// This does not assume, as the search above does, that larger words give larger codes.
TEST(StochasticFormats, the_mean_over_all_random_words_is_the_number) {
    const double parts[] = {0x1p-10, 0.25, 0.5, 0.578125, 1 - 0x1p-10};
    for (Format format : enumerable) {
        const std::vector<double> values = values_of(format);
        for (uint32_t code : {0u, 1u, 2u, 3u, 6u, uint32_t(values.size()) - 2}) {
            const double low = values[code], high = values[code + 1];
            for (double part : parts) {
                const float x = float(low + part * (high - low));
                double sum = 0;
                for (uint32_t word = 0; word < 1024; word++) {  // the other 22 bits decide nothing here
                    const uint32_t got = encode(format, -x, word << 22 | (word * 0x9e3779b1 >> 10));
                    ASSERT_TRUE(got == (code | sign_bit(format)) || got == (code + 1) + sign_bit(format));
                    sum += double(decode(format, got));
                }
                if (double(x) == low + part * (high - low)) { ASSERT_EQ(sum / 1024, -double(x)); }
            }
        }
    }
}

TEST(StochasticFormats, what_a_format_holds_stays_as_it_is) {
    for (Format format : enumerable) {
        const uint32_t codes = uint32_t(values_of(format).size());
        for (uint32_t code = 0; code < codes; code++) {
            for (uint32_t signed_code : {code, code | sign_bit(format)}) {
                for (uint32_t random : {0u, 1u, 0x80000000u, 0xfffffffeu, 0xffffffffu}) {
                    ASSERT_EQ(encode(format, decode(format, signed_code), random), signed_code);
                }
            }
        }
    }
    for (uint32_t bits : {0u, 1u, 0x80000000u, 0x3f800001u, 0x7f7fffffu}) {
        EXPECT_EQ(Fp32::encode(bits_to_float(bits), 0xffffffff), bits);
    }
}

TEST(StochasticFormats, any_number_becomes_one_of_its_neighbours_with_its_sign) {
    for (Format format : {Format::fp4, Format::fp4_e2m1, Format::fp8_e4m3, Format::fp8_e5m2}) {
        const std::vector<double> values = values_of(format);
        for (uint64_t i = 0; i < 20000; i++) {
            const Philox4 bits = random_bits(2, RandomUse::parameters, i);
            const float fraction = float(int32_t(bits.v[0])) * 0x1p-31f;
            const float x = std::ldexp(fraction, int(bits.v[1] % 40) - 25) * float(values.back());
            const double magnitude = std::min<double>(std::fabs(x), values.back());
            const double decoded = decode(format, encode(format, x, bits.v[2]));
            const auto above = std::lower_bound(values.begin(), values.end(), magnitude);
            const double below = *above == magnitude ? magnitude : *std::prev(above);
            ASSERT_TRUE(std::fabs(decoded) == *above || std::fabs(decoded) == below) << x << " " << decoded;
            ASSERT_EQ(std::signbit(decoded), std::signbit(x));
        }
    }
}

TEST(StochasticFormats, what_is_too_large_becomes_the_largest_and_denormals_hardly_ever_more_than_zero) {
    for (Format format : {Format::fp4, Format::fp4_e2m1, Format::fp8_e4m3, Format::fp8_e5m2}) {
        const uint32_t largest = uint32_t(values_of(format).size()) - 1;
        const float value = decode(format, largest);
        for (uint32_t random : {0u, 0x80000000u, 0xffffffffu}) {
            for (float x : {std::nextafterf(value, INFINITY), 1.3f * value, FLT_MAX, INFINITY}) {
                EXPECT_EQ(encode(format, x, random), largest) << name_of(format) << " " << x;
                EXPECT_EQ(encode(format, -x, random), largest | sign_bit(format));
            }
            for (float x : {0.0f, FLT_TRUE_MIN, FLT_MIN}) {
                EXPECT_EQ(encode(format, x, random), 0u);
                EXPECT_EQ(encode(format, -x, random), sign_bit(format));
            }
        }
    }
}

TEST(Formats, names_are_parsed_and_an_unknown_one_lists_those_there_are) {
    for (Format format : all_formats) { EXPECT_EQ(parse_format(name_of(format)), format); }
    EXPECT_EQ(name_of(Format::fp4), "fp4");
    EXPECT_EQ(parse_format("fp8_e5m2"), Format::fp8_e5m2);
    try {
        parse_format("int8");
        FAIL();
    } catch (const UserError& error) {
        EXPECT_STREQ(error.what(), "unknown number format 'int8': use one of fp4, fp4_e2m1, fp8_e4m3, "
                                   "fp8_e5m2, bf16 and fp32");
    }
}

}  // namespace test_formats
