// Payloads: their layout, their error, what is flagged, the mean, and the hash of the parameters.
#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <utility>
#include <vector>

#include "dev/test/one_part.h"
#include "llmc/buffer.h"
#include "llmc/random.h"
#include "streaming/quantize.h"

namespace test_quantize {

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

// ---- stochastic rounding

const Rounding stochastic = stochastic_rounding(7, 1, 5, RandomUse::send_rounding);

Buffer<uint8_t> payload_of(Format format, const Rounding& rounding, const Source& source, long n) {
    Buffer<uint8_t> payload(long(payload_bytes(format, n)));
    Stream stream;
    device::write_header(payload, PayloadHeader(), stream);
    device::quantize(payload, format, rounding, n, 0, source, n, stream);
    return payload;
}

std::vector<float> decoded(Format format, const Buffer<uint8_t>& payload, long n) {
    std::vector<float> mean(static_cast<size_t>(n));
    Stream stream;
    device::dequantize_mean(mean.data(), payload, 0, 1, format, n, stream);
    return mean;
}

bool same(const Buffer<uint8_t>& a, const Buffer<uint8_t>& b) {
    return a.count() == b.count() && memcmp(a.data(), b.data(), size_t(a.count())) == 0;
}

template <class F>
std::vector<float> rounded_one_by_one(const std::vector<float>& values, const Buffer<uint8_t>& payload,
                                      const Rounding& rounding) {
    std::vector<float> result;
    for (size_t i = 0; i < values.size(); i++) {
        const uint64_t index = rounding.first + i;
        const uint32_t random = random_quad(rounding, index / 4).v[index % 4];
        const float scale = F::scaled ? scale_of(payload, long(i / 128)) : 1.0f;
        result.push_back(F::decode(F::encode(values[i] / scale, random)) * scale);
    }
    return result;
}

// Blocks begin anywhere in the model: its tensors may have any size.
TEST(QuantizeStochastically, a_value_is_rounded_with_the_word_of_its_index_in_the_model) {
    const std::vector<float> values = random_values(128 * 5, 1);
    for (Format format : all_formats) {
        for (uint64_t first : {uint64_t(0), uint64_t(1), uint64_t(130), uint64_t(3) << 33 | 7}) {
            const Rounding rounding = stochastic.at(first);
            const Buffer<uint8_t> payload = payload_of(format, rounding, {values.data()}, 128 * 5);
            const std::vector<float> expected = with_format(format, [&](auto f) {
                return rounded_one_by_one<decltype(f)>(values, payload, rounding);
            });
            ASSERT_EQ(decoded(format, payload, 128 * 5), expected) << name_of(format) << " " << first;
        }
    }
}

// Rounding depends on a value's place in the model, not on its payload or its place there.
TEST(QuantizeStochastically, a_cut_into_ranges_and_shards_changes_nothing) {
    const long n = 128 * (many_blocks + 100), pieces[] = {128, 128 * 99, 128 * many_blocks};
    const std::vector<float> values = random_values(n, 1, 1);
    for (Format format : all_formats) {
        const Rounding rounding = stochastic.at(12);
        const Buffer<uint8_t> whole = payload_of(format, rounding, {values.data()}, n);
        const std::vector<float> expected = decoded(format, whole, n);
        Buffer<uint8_t> ranges(long(payload_bytes(format, n)));
        Stream stream;
        device::write_header(ranges, PayloadHeader(), stream);
        long first = 0;
        for (long count : pieces) {
            device::quantize(ranges, format, rounding.at(12 + uint64_t(first)), n, first, {&values[first]},
                             count, stream);
            const Buffer<uint8_t> shard =
                payload_of(format, rounding.at(12 + uint64_t(first)), {&values[first]}, count);
            const std::vector<float> of_shard = decoded(format, shard, count);
            ASSERT_TRUE(std::equal(of_shard.begin(), of_shard.end(), expected.begin() + first));
            first += count;
        }
        ASSERT_EQ(first, n);
        ASSERT_TRUE(same(ranges, whole)) << name_of(format);
    }
}

TEST(QuantizeStochastically, it_repeats_itself_but_not_for_another_seed_worker_sync_stage_or_place) {
    const std::vector<float> values = random_values(128 * 3, 1);
    const auto send = RandomUse::send_rounding;
    const Rounding others[] = {
        Rounding(), stochastic_rounding(8, 1, 5, send), stochastic_rounding(7, 2, 5, send),
        stochastic_rounding(7, 1, 6, send), stochastic_rounding(7, 1, 5, RandomUse::owner_rounding),
        stochastic.at(128)};
    for (Format format : all_formats) {
        const Buffer<uint8_t> payload = payload_of(format, stochastic, {values.data()}, 128 * 3);
        ASSERT_TRUE(same(payload_of(format, stochastic, {values.data()}, 128 * 3), payload));
        for (const Rounding& other : others) {
            const bool equal = same(payload_of(format, other, {values.data()}, 128 * 3), payload);
            ASSERT_EQ(equal, format == Format::fp32) << name_of(format);
        }
    }
}

// The variance of a value that is rounded to one of two neighbours: the product of its distances to them.
template <class F>
double variance(float value, float scale) {
    const float quotient = std::fabs(value) / scale;
    const double low = F::decode(F::encode(quotient, 0)), high = F::decode(F::encode(quotient, 0xffffffff));
    return (double(quotient) - low) * (high - double(quotient)) * scale * scale;
}

// Each value within five standard deviations of its mean, and the sum of all within five of its own, so that
// small values are not biased either.
TEST(QuantizeStochastically, the_mean_over_many_syncs_is_the_value) {
    const long n = 256;
    const int syncs = 4000;
    const std::vector<float> values = random_values(n, 3);
    for (Format format : {Format::fp4, Format::fp4_e2m1, Format::fp8_e4m3, Format::fp8_e5m2, Format::bf16}) {
        std::vector<double> sum(size_t(n), 0);
        for (int sync = 0; sync < syncs; sync++) {
            const Rounding rounding = stochastic_rounding(1, 0, uint64_t(sync), RandomUse::send_rounding);
            const Buffer<uint8_t> payload = payload_of(format, rounding, {values.data()}, n);
            const std::vector<float> got = decoded(format, payload, n);
            for (size_t i = 0; i < got.size(); i++) { sum[i] += double(got[i]) - double(values[i]); }
        }
        const Buffer<uint8_t> payload = payload_of(format, stochastic, {values.data()}, n);
        double all = 0, all_variances = 0;
        for (size_t i = 0; i < sum.size(); i++) {
            const double of_one = syncs * with_format(format, [&](auto f) {
                return variance<decltype(f)>(values[i], f.scaled ? scale_of(payload, long(i / 128)) : 1.0f);
            });
            ASSERT_LE(std::fabs(sum[i]), 5 * std::sqrt(of_one)) << name_of(format) << " " << values[i];
            all += sum[i] * (values[i] > 0 ? 1 : -1);  // away from zero and towards it
            all_variances += of_one;
        }
        EXPECT_GT(all_variances, 0);
        EXPECT_LE(std::fabs(all), 5 * std::sqrt(all_variances)) << name_of(format);
    }
}

// ---- error feedback

// Two syncs: the second one's delta contains the first one's residual.
TEST(ErrorFeedback, the_residual_is_what_receivers_did_not_get_and_is_added_to_the_next_delta) {
    const long n = 128 * many_blocks;
    const std::vector<float> global = random_values(n, 1), local = random_values(n, 2);
    for (const Rounding& rounding : {Rounding(), stochastic}) {
        for (Format format : all_formats) {
            std::vector<float> residual(static_cast<size_t>(n)), delta(static_cast<size_t>(n));
            for (int sync = 0; sync < 2; sync++) {
                for (size_t i = 0; i < delta.size(); i++) { delta[i] = global[i] - local[i] + residual[i]; }
                const Source source{global.data(), local.data(), residual.data()};
                const Buffer<uint8_t> payload = payload_of(format, rounding, source, n);
                const Buffer<uint8_t> expected = payload_of(format, rounding, {delta.data()}, n);
                ASSERT_TRUE(same(payload, expected)) << name_of(format);
                const std::vector<float> got = decoded(format, payload, n);
                for (size_t i = 0; i < delta.size(); i++) { ASSERT_EQ(residual[i], delta[i] - got[i]); }
            }
            const std::vector<float> nothing(static_cast<size_t>(n));
            EXPECT_EQ(residual == nothing, format == Format::fp32);
        }
    }
}

TEST(ErrorFeedback, values_as_they_are_such_as_a_mean_have_it_too) {
    const std::vector<float> mean = random_values(256, 1), zeros(256);
    for (Format format : all_formats) {
        std::vector<float> of_values = random_values(256, 2, 1e-4f), of_difference = of_values;
        const Buffer<uint8_t> values =
            payload_of(format, stochastic, {mean.data(), nullptr, of_values.data()}, 256);
        const Buffer<uint8_t> difference =
            payload_of(format, stochastic, {mean.data(), zeros.data(), of_difference.data()}, 256);
        ASSERT_TRUE(same(values, difference)) << name_of(format);
        ASSERT_EQ(of_values, of_difference);
    }
}

// If the delta stays the same, all that is sent in many syncs is wrong by one residual in total.
TEST(ErrorFeedback, nothing_is_lost_for_good) {
    const long n = 128;
    const std::vector<float> delta = random_values(n, 1);
    for (Format format : scaled_formats) {
        std::vector<float> residual(static_cast<size_t>(n));
        std::vector<double> sent(static_cast<size_t>(n));
        const int syncs = 200;
        for (int sync = 0; sync < syncs; sync++) {
            const Source source{delta.data(), nullptr, residual.data()};
            const std::vector<float> got = decoded(format, payload_of(format, Rounding(), source, n), n);
            for (size_t i = 0; i < sent.size(); i++) { sent[i] += double(got[i]); }
        }
        for (size_t i = 0; i < sent.size(); i++) {
            const double missing = syncs * double(delta[i]) - sent[i];
            ASSERT_NEAR(missing, double(residual[i]), 1e-7) << name_of(format);  // 200 roundings of fp32
            ASSERT_LE(std::fabs(missing), 0.01) << name_of(format);              // of 200 deltas of 0.001
        }
    }
}

TEST(ErrorFeedback, the_residual_of_a_block_that_cannot_be_sent_stays_as_it_was) {
    const std::vector<float> before = random_values(128 * 3, 2, 1e-4f);
    for (Format format : all_formats) {
        for (float bad : {INFINITY, NAN}) {
            std::vector<float> delta = random_values(128 * 3, 1), residual = before;
            delta[128 + 77] = bad;
            Buffer<uint8_t> payload =
                payload_of(format, stochastic, {delta.data(), nullptr, residual.data()}, 128 * 3);
            EXPECT_EQ(header_of(payload).flags, delta_not_finite);
            for (size_t i = 0; i < residual.size(); i++) {
                ASSERT_EQ(residual[i] == before[i], i / 128 == 1) << name_of(format) << " " << i;
            }
        }
        std::vector<float> delta = random_values(128, 1), residual(128);
        residual[5] = NAN;  // in the sum
        Buffer<uint8_t> payload =
            payload_of(format, Rounding(), {delta.data(), nullptr, residual.data()}, 128);
        EXPECT_EQ(header_of(payload).flags, delta_not_finite);
    }
}

// ---- the hash

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

}  // namespace test_quantize
