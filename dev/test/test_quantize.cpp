// Payloads: their layout, their error, what is flagged, the mean, and the hash of the parameters.
#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <utility>
#include <vector>

#include "llmc/buffer.h"
#include "llmc/random.h"
#include "streaming/quantize.h"

namespace {

std::vector<float> random_values(long n, uint64_t seed, float deviation = 1e-3f) {
    std::vector<float> values(static_cast<size_t>(n));
    for (size_t i = 0; i < values.size(); i++) {
        values[i] = deviation * standard_normal(seed, RandomUse::parameters, i);
    }
    return values;
}

// The payload of `delta`: global = delta, local = 0.
Buffer<uint8_t> payload_of(Format format, const std::vector<float>& delta) {
    const long n = long(delta.size());
    Buffer<uint8_t> payload(long(payload_bytes(format, n)));
    std::vector<float> zeros(delta.size());
    Stream stream;
    device::write_header(payload, PayloadHeader(), stream);
    device::quantize(payload, format, Rounding(), n, 0, {delta.data(), zeros.data()}, n, stream);
    return payload;
}

uint64_t flags_of(Format format, const std::vector<float>& delta) {
    Buffer<uint8_t> payload = payload_of(format, delta);
    return header_of(payload).flags;
}

std::vector<float> decoded(Format format, const std::vector<float>& delta) {
    std::vector<float> mean(delta.size());
    Stream stream;
    device::dequantize_mean(mean.data(), payload_of(format, delta), 0, 1, format, long(delta.size()), stream);
    return mean;
}

float scale_of(const uint8_t* payload, long block) {
    uint16_t bits;
    memcpy(&bits, payload + sizeof(PayloadHeader) + block * 2, 2);
    return bits_to_float(uint32_t(bits) << 16);
}

const long many_blocks = cpu::parallel_blocks + 13;  // more than one thread does

const Format scaled_formats[] = {Format::fp4, Format::fp4_e2m1, Format::fp8_e4m3, Format::fp8_e5m2};

float largest_of(Format format) {
    return format == Format::fp4        ? 1.0f
           : format == Format::fp4_e2m1 ? 6.0f
           : format == Format::fp8_e4m3 ? 448.0f
                                        : 57344.0f;
}

TEST(Quantize, a_payload_has_the_bytes_that_the_format_promises_and_whole_sections) {
    EXPECT_EQ(payload_bytes(Format::fp4, 128), 64u + 16 + 64);
    EXPECT_EQ(payload_bytes(Format::fp4, 1 << 20), 64u + (1 << 20) / 8 * 33 / 8);  // 4.125 bits a value
    EXPECT_EQ(payload_bytes(Format::fp4_e2m1, 128 * 9), 64u + 32 + 64 * 9);
    EXPECT_EQ(payload_bytes(Format::fp8_e4m3, 128), 64u + 16 + 128);
    EXPECT_EQ(payload_bytes(Format::fp8_e5m2, 128 * 8), 64u + 16 + 1024);
    EXPECT_EQ(payload_bytes(Format::bf16, 128 * 3), 64u + 768);
    EXPECT_EQ(payload_bytes(Format::fp32, 128), 64u + 512);
    for (Format format : all_formats) {
        for (long n = 128; n < 128 * 40; n += 128) { ASSERT_EQ(payload_bytes(format, n) % 16, 0u); }
    }
}

TEST(Quantize, the_bytes_of_an_fp4_payload_are_those_of_the_wire) {
    std::vector<float> delta(128);
    delta[0] = 0.75f;        // the largest: scale 0.75, code 2^0: 7
    delta[1] = -0.1875f;     // -2^-2: 8 + 5
    delta[2] = 0.75f / 128;  // exactly half of the smallest code: away from zero, 1
    delta[3] = -1e-6f;       // 0, and its sign
    delta[127] = 0.5625f;    // 0.75 of the scale, the middle of 2^-1 and 2^0: away from zero, 7
    Buffer<uint8_t> payload = payload_of(Format::fp4, delta);
    EXPECT_EQ(payload[64], 0x40);  // 0.75 = 0x3f40
    EXPECT_EQ(payload[65], 0x3f);
    EXPECT_EQ(payload[80], 0xd7);
    EXPECT_EQ(payload[81], 0x81);
    EXPECT_EQ(payload[82], 0x00);
    EXPECT_EQ(payload[143], 0x70);
    const uint8_t header[] = {'D', 'L', 'C', 'O', 1, 0, 0, 0};
    EXPECT_EQ(memcmp(payload, header, sizeof(header)), 0);
}

TEST(Quantize, the_error_of_every_value_is_bounded_by_its_format) {
    for (float deviation : {1e-30f, 1e-3f, 1e30f}) {
        const std::vector<float> delta = random_values(128 * 300, 1, deviation);
        for (Format format : scaled_formats) {
            // relative error of normal numbers, absolute error of the others in scales
            const double relative = format == Format::fp4 ? 1 / 3.0 : format == Format::fp4_e2m1 ? 1 / 5.0
                                    : format == Format::fp8_e4m3 ? 1 / 17.0 : 1 / 9.0;
            const double absolute = format == Format::fp4 ? 0x1p-7 : format == Format::fp4_e2m1 ? 0.25
                                    : format == Format::fp8_e4m3 ? 0x1p-10 : 0x1p-17;
            Buffer<uint8_t> payload = payload_of(format, delta);
            const std::vector<float> result = decoded(format, delta);
            for (size_t i = 0; i < delta.size(); i++) {
                const double scale = scale_of(payload, long(i / 128));
                const double error = std::fabs(double(result[i]) - delta[i]);
                const double bound = std::max(relative * std::fabs(delta[i]), absolute * scale);
                ASSERT_LE(error, bound * (1 + 1e-6)) << name_of(format) << " " << delta[i];
            }
        }
        const std::vector<float> result = decoded(Format::bf16, delta);
        for (size_t i = 0; i < delta.size(); i++) {
            ASSERT_LE(std::fabs(double(result[i]) - delta[i]), std::fabs(delta[i]) / 257);
        }
        EXPECT_EQ(decoded(Format::fp32, delta), delta);
    }
}

TEST(Quantize, a_scale_never_clips_and_is_the_smallest_bf16_that_does_not) {
    for (Format format : scaled_formats) {
        const float largest = largest_of(format);
        for (int i = 0; i < 20000; i++) {
            Philox4 bits = random_bits(2, RandomUse::parameters, uint64_t(i));
            float absmax = std::ldexp(1 + float(bits.v[0] >> 8) * 0x1p-24f, int(bits.v[1] % 230) - 132);
            const float at_a_scale = largest * Bf16::decode(Bf16::encode(absmax));
            if (i % 4 == 0) { absmax = at_a_scale; }
            if (i % 4 == 1) { absmax = std::nextafterf(at_a_scale, INFINITY); }
            const uint32_t scale = with_format(format, [=](auto f) {
                if constexpr (decltype(f)::scaled) { return block_scale<decltype(f)>(float_to_bits(absmax)); }
                return 0u;
            });
            ASSERT_GE(double(bits_to_float(scale << 16)) * largest, double(absmax)) << name_of(format);
            ASSERT_LT(double(bits_to_float((scale - 1) << 16)) * largest, double(absmax)) << name_of(format);
        }
    }
}

TEST(Quantize, a_block_of_zeros_has_scale_zero_and_stays_zero) {
    for (Format format : scaled_formats) {
        std::vector<float> delta(256);
        delta[200] = 1;
        delta[5] = -0.0f;
        Buffer<uint8_t> payload = payload_of(format, delta);
        EXPECT_EQ(scale_of(payload, 0), 0);
        EXPECT_GT(scale_of(payload, 1), 0);
        EXPECT_EQ(header_of(payload).flags, 0u);
        const std::vector<float> result = decoded(format, delta);
        for (size_t i = 0; i < 256; i++) { ASSERT_EQ(result[i] != 0, i == 200) << name_of(format); }
    }
}

TEST(Quantize, denormals_are_kept_within_the_error_of_the_smallest_scale) {
    for (Format format : scaled_formats) {
        std::vector<float> delta(128);
        for (size_t i = 0; i < 128; i++) { delta[i] = float(i) * 0x1p-140f; }
        Buffer<uint8_t> payload = payload_of(format, delta);
        EXPECT_EQ(header_of(payload).flags, 0u);
        EXPECT_GE(scale_of(payload, 0) * largest_of(format), delta[127]);
        const std::vector<float> result = decoded(format, delta);
        const float bound = std::max(delta[127] / 3, scale_of(payload, 0) / 2);
        for (size_t i = 0; i < 128; i++) { ASSERT_LE(std::fabs(result[i] - delta[i]), bound); }
    }
    const std::vector<float> smallest(128, FLT_TRUE_MIN);
    EXPECT_EQ(flags_of(Format::fp4, smallest), 0u);
    EXPECT_EQ(scale_of(payload_of(Format::fp4, smallest), 0), 0x1p-133f);
}

TEST(Quantize, what_is_not_finite_or_beyond_bf16_is_flagged_wherever_it_stands) {
    const float largest_bf16 = Bf16::decode(0x7f7f);
    const long n = 128 * 80;
    std::vector<float> large = random_values(n, 1);
    for (Format format : all_formats) {
        EXPECT_EQ(flags_of(format, large), 0u);
        for (long position : {0L, 1L, 127L, 128L, 5000L, n - 1}) {
            for (float bad : {INFINITY, -INFINITY, NAN, -NAN, FLT_MAX, -FLT_MAX}) {
                const float good = std::exchange(large[position], bad);
                const bool sendable = format == Format::fp32 && std::isfinite(bad);
                ASSERT_EQ(flags_of(format, large), sendable ? 0u : delta_not_finite) << name_of(format);
                large[position] = good;
            }
        }
        std::vector<float> delta(128);
        delta[3] = std::nextafterf(largest_bf16, INFINITY);
        EXPECT_EQ(flags_of(format, delta), format == Format::fp32 ? 0u : delta_not_finite);
        for (float good : {largest_bf16 / 2, largest_bf16}) {
            delta[3] = good;
            const bool flagged = flags_of(format, delta) != 0;
            const bool finite = std::isfinite(decoded(format, delta)[3]);
            EXPECT_NE(flagged, finite) << name_of(format) << good;
            if (good < largest_bf16 || format == Format::fp4) { EXPECT_FALSE(flagged); }
        }
    }
    std::vector<float> by_many_threads = random_values(128 * many_blocks, 1);
    EXPECT_EQ(flags_of(Format::fp4, by_many_threads), 0u);
    by_many_threads.back() = NAN;
    EXPECT_EQ(flags_of(Format::fp4, by_many_threads), delta_not_finite);
}

TEST(Quantize, pieces_make_the_same_payload_as_the_whole) {
    const long n = 128 * (many_blocks + 100), pieces[] = {128, 128 * 99, 128 * many_blocks};
    const std::vector<float> global = random_values(n, 1, 1), local = random_values(n, 2, 1);
    for (Format format : all_formats) {
        Buffer<uint8_t> whole(long(payload_bytes(format, n))), parts(long(payload_bytes(format, n)));
        Stream stream;
        device::write_header(whole, PayloadHeader(), stream);
        device::write_header(parts, PayloadHeader(), stream);
        device::add_hash(whole, 0, global.data(), n, stream);
        device::quantize(whole, format, Rounding(), n, 0, {global.data(), local.data()}, n, stream);
        long first = 0;
        for (long count : pieces) {
            device::add_hash(parts, first, &global[first], count, stream);
            device::quantize(parts, format, Rounding(), n, first, {&global[first], &local[first]}, count,
                             stream);
            first += count;
        }
        ASSERT_EQ(first, n);
        ASSERT_EQ(memcmp(whole, parts, size_t(whole.count())), 0) << name_of(format);
    }
}

void expect_mean(Format format, int workers, long n) {
    const size_t stride = payload_bytes(format, n);
    Buffer<uint8_t> payloads(long(stride) * workers);
    std::vector<float> sum(static_cast<size_t>(n)), mean(static_cast<size_t>(n));
    for (int worker = 0; worker < workers; worker++) {
        const std::vector<float> delta = random_values(n, uint64_t(worker), worker % 2 ? 1e-3f : 1.0f);
        memcpy(payloads + size_t(worker) * stride, payload_of(format, delta), stride);
        const std::vector<float> one = decoded(format, delta);
        for (size_t i = 0; i < sum.size(); i++) { sum[i] = sum[i] + one[i]; }
    }
    for (float& value : sum) { value = value / float(workers); }
    Stream stream;
    device::dequantize_mean(mean.data(), payloads, stride, workers, format, n, stream);
    ASSERT_EQ(memcmp(mean.data(), sum.data(), size_t(n) * sizeof(float)), 0) << name_of(format) << workers;
}

TEST(Quantize, the_mean_is_the_sum_in_ascending_order_of_workers_divided_by_their_number) {
    for (Format format : all_formats) {
        for (int workers : {1, 2, 3, 4, 7}) { expect_mean(format, workers, 128 * 17); }
    }
    expect_mean(Format::fp4, 3, 128 * many_blocks);
}

uint64_t hash_of(const std::vector<float>& values, long first = 0) {
    Buffer<uint8_t> payload(64);
    Stream stream;
    device::write_header(payload, PayloadHeader(), stream);
    device::add_hash(payload, first, values.data(), long(values.size()), stream);
    return header_of(payload).hash;
}

TEST(Hash, any_flipped_bit_and_any_swap_changes_it) {
    std::vector<float> values = random_values(128 * 3, 1);
    const uint64_t hash = hash_of(values);
    for (size_t i = 0; i < values.size(); i++) {
        for (int bit = 0; bit < 32; bit++) {
            const float before = values[i];
            values[i] = bits_to_float(float_to_bits(before) ^ 1u << bit);
            ASSERT_NE(hash_of(values), hash) << i << " " << bit;
            values[i] = before;
        }
        const size_t other = (i + 1) % values.size();
        std::swap(values[i], values[other]);
        ASSERT_NE(hash_of(values), hash) << i;
        std::swap(values[i], values[other]);
    }
    EXPECT_EQ(hash_of(values), hash);
    EXPECT_NE(hash_of(std::vector<float>(128, 0.0f)), hash_of(std::vector<float>(128, -0.0f)));
}

TEST(Hash, it_is_a_sum_so_that_many_threads_and_pieces_give_the_same) {
    const std::vector<float> values = random_values(128 * many_blocks, 1);
    uint64_t sum = 0;
    for (size_t i = 0; i < values.size(); i++) { sum += hash_value(i, values[i]); }
    EXPECT_EQ(hash_of(values), sum);
    const std::vector<float> left(values.begin(), values.begin() + 1000);
    const std::vector<float> right(values.begin() + 1000, values.end());
    EXPECT_EQ(hash_of(left) + hash_of(right, 1000), sum);
}

}  // namespace
