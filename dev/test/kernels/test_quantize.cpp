// Payloads on the device: quantize, the mean over workers, the hash and the headers give the bytes that the
// CPU's functions of the same names give, whatever the values. There are no tolerances here: workers with and
// without a GPU hold the same bits. Compiles with nvcc, too (-x cu).
#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <string>
#include <vector>

#include "dev/test/one_part.h"
#include "dev/emulator/device_array.h"
#include "dev/test/kernels/values.h"
#include "llmc/buffer.h"
#include "streaming/quantize.h"

namespace {

using Bytes = std::vector<uint8_t>;

// Random numbers of `deviation` (a power of two).
Floats random_values(long n, uint64_t seed, float deviation) {
    Floats values(static_cast<size_t>(n));
    for (size_t i = 0; i < values.size(); i++) {
        values[i] = deviation * standard_normal(seed, RandomUse::sampling, i);
    }
    return values;
}

uint32_t random_word(uint64_t seed, uint64_t i) { return random_bits(seed, RandomUse::sampling, i).v[0]; }

// No two fields are alike, and none is zero.
PayloadHeader some_header(uint16_t format) {
    PayloadHeader header;
    header.format = uint16_t(0x1100 + format);
    header.sync = 0x2122232425262728;
    header.fragment = 0x31323334;
    header.worker = 0x41424344;
    header.send_step = 0x5152535455565758;
    header.values = 0x6162636465666768;
    header.tokens = 0x7172737475767778;
    header.flags = 0x81828386;  // the flag of a bad delta is not among them
    header.part = 0x9192;
    header.parts = 0xa1a2;
    header.hash = 0xf192939495969798;   // a sum that begins here will overflow
    return header;
}

// A header and, for all that is to be written, bytes that are easy to know again.
Bytes new_payload(Format format, long n) {
    Bytes payload(payload_bytes(format, n) + guard, 0xa5);
    const PayloadHeader header = some_header(uint16_t(format));
    memcpy(payload.data(), &header, sizeof(header));
    return payload;
}

PayloadHeader header_in(const Bytes& payload) {
    PayloadHeader header;
    memcpy(&header, payload.data(), sizeof(header));
    return header;
}

// ---- quantize

struct Part {
    long first, count;
};

// Seeds, syncs and indices of more than 32 bits where they may be.
const Rounding stochastic =
    stochastic_rounding(0x123456789abcdef0, 3, 17, RandomUse::send_rounding).at(uint64_t(5) << 33 | 12);

// Quantizes parts of a fragment, each array an allocation of its own, and compares the whole payload after
// each part. With residuals: a part of the values' size, some of them 0.
void expect_same_payload(Format format, const Floats& global, const Floats& local, std::vector<Part> parts,
                         const Rounding& rounding = Rounding(), bool with_residual = false) {
    const long n = long(global.size());
    Bytes expected = new_payload(format, n);
    DeviceArray<uint8_t> payload(expected);
    cpu::Stream cpu_stream;
    Stream stream;
    for (const Part& part : parts) {
        const Floats part_global(global.begin() + part.first, global.begin() + part.first + part.count);
        const Floats part_local(local.begin() + part.first, local.begin() + part.first + part.count);
        Floats residual;
        for (float value : part_global) { residual.push_back(residual.size() % 5 ? value * 0x1p-6f : 0.0f); }
        DeviceArray<float> device_global(part_global), device_local(part_local), device_residual(residual);
        const Rounding own = rounding.at(rounding.first + uint64_t(part.first));
        float* cpu_residual = with_residual ? residual.data() : nullptr;
        float* cuda_residual = device_residual;
        cpu::quantize(expected.data(), format, own, n, part.first,
                      {part_global.data(), part_local.data(), cpu_residual}, part.count, cpu_stream);
        cuda::quantize(payload, format, own, n, part.first,
                       {device_global, device_local, with_residual ? cuda_residual : nullptr}, part.count,
                       stream);
        stream.synchronize();
        expect_same_bits(payload.to_host(), expected, name_of(format));
        expect_same_bits(device_global.to_host(), part_global, "global");
        expect_same_bits(device_local.to_host(), part_local, "local");
        expect_same_bits(device_residual.to_host(), residual, "residual");
    }
}

// To nearest and stochastically, with and without residuals.
void expect_same_payload(Format format, const Floats& global, const Floats& local) {
    for (const Rounding& rounding : {Rounding(), stochastic}) {
        for (bool with_residual : {false, true}) {
            expect_same_payload(format, global, local, {{0, long(global.size())}}, rounding, with_residual);
        }
    }
}

// One, three and 17 quantization blocks: the last makes two blocks of threads and one warp of a third.
TEST(QuantizeKernel, RandomDeltasOfAllMagnitudesGiveTheCpusBytes) {
    for_each_order(2, [] {
        for (Format format : all_formats) {
            for (long n : {128L, 128 * 3L, 128 * 17L}) {
                for (float deviation : {0x1p-140f, 0x1p-126f, 0x1p-10f, 1.0f, 0x1p100f}) {
                    const Floats global = random_values(n, uint64_t(n), deviation);
                    expect_same_payload(format, global, random_values(n, uint64_t(n) + 1, deviation / 4));
                }
            }
        }
    });
}

// n rounded up to whole quantization blocks, with zeros.
Floats in_whole_blocks(Floats values) {
    values.resize((values.size() + 127) / 128 * 128);
    return values;
}

// Every exponent of fp32 with mantissas around those where bf16 rounds, in both signs and in ascending order:
// blocks' scales run from the smallest denormal to beyond what bf16 can hold.
Floats patterns() {
    Floats values;
    for (uint32_t exponent = 0; exponent < 255; exponent++) {
        for (uint32_t mantissa : {0x0u, 0x1u, 0x7fffu, 0x8000u, 0x8001u, 0x18000u, 0x3fffffu, 0x400000u,
                                  0x7f0000u, 0x7f8000u, 0x7fffffu}) {
            const uint32_t sign = values.size() % 2 << 31;
            values.push_back(bits_to_float(sign | exponent << 23 | mantissa));
        }
    }
    return in_whole_blocks(values);
}

TEST(QuantizeKernel, EveryExponentAndTheTiesOfBf16GiveTheCpusBytes) {
    const Floats values = patterns(), zeros(values.size());
    for (Format format : all_formats) {
        expect_same_payload(format, values, zeros);
        expect_same_payload(format, zeros, values);
    }
}

// The values of all codes and those halfway between them, with the neighbours of both in fp32, in both signs
// and times `scale`. Each block begins with the largest, so that this is its scale.
template <class F>
Floats boundaries(float scale) {
    const uint32_t codes = 1u << (F::bits - 1);
    Floats values;
    auto add = [&](float x) {
        for (float value : {std::nextafterf(x, 0.0f), x, std::nextafterf(x, INFINITY)}) {
            for (float sign : {1.0f, -1.0f}) {
                if (values.size() % 128 == 0) { values.push_back(F::largest * scale); }
                values.push_back(sign * value * scale);
            }
        }
    };
    for (uint32_t code = 0; code + 1 < codes && F::decode(code + 1) <= F::largest; code++) {
        add(F::decode(code));
        add((F::decode(code) + F::decode(code + 1)) / 2);
    }
    return in_whole_blocks(values);
}

TEST(QuantizeKernel, EveryCodeAndEveryTieBetweenCodesGivesTheCpusBytes) {
    for (Format format : {Format::fp4, Format::fp4_e2m1, Format::fp8_e4m3, Format::fp8_e5m2}) {
        with_format(format, [=](auto f) {
            if constexpr (decltype(f)::scaled) {
                for (float scale : {1.0f, 0x1.82p-3f, 0x1p-130f, 0x1p100f}) {
                    const Floats values = boundaries<decltype(f)>(scale);
                    expect_same_payload(format, values, Floats(values.size()));
                }
            }
        });
    }
}

// Blocks of zeros with one number between them, -0 and denormals that only a machine without flushing keeps.
TEST(QuantizeKernel, ZerosOfBothSignsAndDenormalsGiveTheCpusBytes) {
    for (Format format : all_formats) {
        Floats global(128 * 9), local(128 * 9);
        global[128] = -0.0f;
        global[128 * 2 + 127] = FLT_TRUE_MIN;
        global[128 * 3 + 64] = -FLT_TRUE_MIN;
        for (size_t i = 128 * 4; i < 128 * 5; i++) { global[i] = float(i) * FLT_TRUE_MIN; }
        for (size_t i = 128 * 5; i < 128 * 6; i++) {  // normal numbers with a denormal difference
            global[i] = FLT_MIN * (1 + float(i) * FLT_EPSILON);
            local[i] = FLT_MIN;
        }
        local[128 * 7 + 5] = 1.0f;
        expect_same_payload(format, global, local);
    }
}

uint64_t flags_of(Format format, const Floats& global, const Floats& local) {
    DeviceArray<uint8_t> payload(new_payload(format, long(global.size())));
    DeviceArray<float> device_global(global), device_local(local);
    Stream stream;
    cuda::quantize(payload, format, Rounding(), long(global.size()), 0, {device_global, device_local},
                   long(global.size()), stream);
    stream.synchronize();
    return header_in(payload.to_host()).flags;
}

TEST(QuantizeKernel, ABadDeltaIsFlaggedWhereverItStandsAndItsBlockIsZeros) {
    const Floats global = random_values(128 * 3, 1, 1.0f), zeros(global.size());
    const uint64_t before = some_header(0).flags;
    const float beyond_bf16 = std::nextafterf(Bf16::decode(0x7f7f), INFINITY);
    for (Format format : all_formats) {
        ASSERT_EQ(flags_of(format, global, zeros), before);
        for (float bad : {INFINITY, -INFINITY, NAN, -NAN, FLT_MAX, beyond_bf16}) {
            const bool sendable = format == Format::fp32 && std::isfinite(bad);
            for (size_t position : {0, 1, 2, 3, 127, 128 + 62, 128 * 2 + 124}) {
                Floats values = global;
                values[position] = bad;
                ASSERT_EQ(flags_of(format, values, zeros), before | (sendable ? 0 : delta_not_finite))
                    << name_of(format) << " " << bad;
                expect_same_payload(format, zeros, values);
            }
        }
        const Floats infinity(128, INFINITY);  // less itself is NaN
        ASSERT_EQ(flags_of(format, infinity, infinity), before | delta_not_finite);
        expect_same_payload(format, infinity, infinity);
    }
}

TEST(QuantizeKernel, TheLargestThatBf16HoldsIsSentWhereItCanBeDecoded) {
    for (Format format : all_formats) {
        for (uint32_t bits : {0x7f7f0000u, 0x7f7e8000u, 0x7f000000u, 0x7e800000u}) {
            Floats global(128 * 3);
            global[128 + 17] = bits_to_float(bits);
            expect_same_payload(format, global, Floats(global.size()));
        }
    }
}

TEST(QuantizeKernel, ManyBadBlocksSetTheFlagTogether) {
    for_each_order(3, [] {
        const Floats bad(128 * 17, NAN), zeros(bad.size());
        for (Format format : {Format::fp4, Format::bf16}) { expect_same_payload(format, bad, zeros); }
    });
}

TEST(QuantizeKernel, RangesWriteTheirOwnPartOfAPayloadAndNothingElse) {
    const long n = 128 * 20;
    const Floats global = random_values(n, 1, 1.0f), local = random_values(n, 2, 1.0f);
    for_each_order(3, [&] {
        for (Format format : all_formats) {
            expect_same_payload(format, global, local,
                                {{128, 128 * 2}, {128 * 19, 128}, {128 * 3, 128 * 16}, {0, 128}}, stochastic,
                                true);
        }
    });
}

// What an owner sends: a mean, without anything to subtract.
TEST(QuantizeKernel, ValuesAsTheyAreGiveTheCpusBytes) {
    const long n = 128 * 11;
    const Floats mean = random_values(n, 3, 0x1p-8f), before = random_values(n, 4, 0x1p-12f);
    const Rounding owner = stochastic_rounding(7, 1, 2, RandomUse::owner_rounding).at(1024);
    for (Format format : all_formats) {
        for (const Rounding& rounding : {Rounding(), owner}) {
            Bytes expected = new_payload(format, n);
            Floats residual = before;
            cpu::Stream cpu_stream;
            cpu::quantize(expected.data(), format, rounding, n, 0, {mean.data(), nullptr, residual.data()}, n,
                          cpu_stream);
            DeviceArray<uint8_t> payload(new_payload(format, n));
            DeviceArray<float> device_mean(mean), device_residual(before);
            Stream stream;
            cuda::quantize(payload, format, rounding, n, 0, {device_mean, nullptr, device_residual}, n,
                           stream);
            stream.synchronize();
            expect_same_bits(payload.to_host(), expected, name_of(format));
            expect_same_bits(device_residual.to_host(), residual, name_of(format));
        }
    }
}

// Equal values over a warp, whose four words of a call go to the four values of a lane, in order: had two of
// them changed places, other values would go up.
TEST(QuantizeKernel, EachValueIsRoundedWithTheWordOfItsIndex) {
    Floats values(128 * 9, 0.6f);  // between 0.5 and 1 in E3M0, and 1 is the scale
    for (size_t i = 0; i < values.size(); i += 128) { values[i] = 1.0f; }
    DeviceArray<uint8_t> payload(new_payload(Format::fp4, long(values.size())));
    DeviceArray<float> device_values(values);
    Stream stream;
    cuda::quantize(payload, Format::fp4, stochastic, long(values.size()), 0, {device_values},
                   long(values.size()), stream);
    stream.synchronize();
    const Bytes bytes = payload.to_host();
    const uint8_t* codes = bytes.data() + sizeof(PayloadHeader) + scale_bytes(Format::fp4, 128 * 9);
    for (size_t i = 0; i < values.size(); i++) {
        const uint64_t index = stochastic.first + i;
        const Philox4 words = philox4x32_10(
            {{uint32_t(index / 4), uint32_t(index / 4 >> 32), 17, 5 + 256 * 3}}, 0x9abcdef0, 0x12345678);
        const bool up = uint64_t(words.v[index % 4]) + uint64_t(double(0.6f) / 0.5 * 0x1p32) >= 2ull << 32;
        ASSERT_EQ(codes[i / 2] >> i % 2 * 4 & 15, i % 128 == 0 || up ? 7 : 6) << i;
    }
}

// ---- the mean

// Random codes, all of the format's but infinities and NaN, whose bits differ between machines. Those of bf16
// and fp32 are below 2, with denormals among them.
template <class F>
void write_random_codes(uint8_t* codes, size_t bytes, uint64_t seed) {
    for (size_t i = 0; i < bytes; i++) {
        codes[i] = uint8_t(random_word(seed, i));
        if (F::bits == 8 && !std::isfinite(F::decode(codes[i]))) { codes[i] ^= 0x40; }
        if (F::bits > 8 && (i + 1) * 8 % size_t(F::bits) == 0) { codes[i] &= 0xbf; }
    }
}

Bytes random_payloads(Format format, long n, size_t stride, int workers, uint64_t seed) {
    Bytes payloads(stride * size_t(workers), 0xff);  // a NaN where nothing is to be read
    for (uint64_t worker = 0; worker < uint64_t(workers); worker++) {
        uint8_t* scales = payloads.data() + worker * stride + sizeof(PayloadHeader);
        uint8_t* codes = scales + scale_bytes(format, n);
        for (long b = 0; b < n / 128 && codes > scales; b++) {
            // From denormals on; small enough for the largest code to be finite.
            const uint16_t scale = uint16_t(random_word(seed + worker, uint64_t(b)) % 0x6000);
            memcpy(scales + 2 * b, &scale, 2);
        }
        with_format(format, [=](auto f) {
            write_random_codes<decltype(f)>(codes, code_bytes(format, n), seed + 100 + worker);
        });
    }
    return payloads;
}

void expect_same_mean(Format format, long n, int workers, size_t between, uint64_t seed) {
    const size_t stride = payload_bytes(format, n) + between;
    const Bytes payloads = random_payloads(format, n, stride, workers, seed);
    Floats expected(size_t(n) + guard, 7.0f);
    cpu::Stream cpu_stream;
    cpu::dequantize_mean(expected.data(), payloads.data(), stride, workers, format, n, cpu_stream);

    DeviceArray<uint8_t> device_payloads(payloads);
    DeviceArray<float> mean(Floats(size_t(n) + guard, 7.0f));
    Stream stream;
    cuda::dequantize_mean(mean, device_payloads, stride, workers, format, n, stream);
    stream.synchronize();
    expect_same_bits(mean.to_host(), expected, name_of(format) + " of " + std::to_string(workers));
    expect_same_bits(device_payloads.to_host(), payloads, "payloads");
}

// 1024 values are a block of threads.
TEST(DequantizeMeanKernel, TheMeanOverWorkersHasTheCpusBits) {
    for_each_order(2, [] {
        for (Format format : all_formats) {
            for (int workers : {1, 2, 3, 5}) {
                for (long n : {128L, 128 * 3L, 128 * 25L}) {
                    expect_same_mean(format, n, workers, n % 384 == 0 ? 0 : 48, uint64_t(n + workers));
                }
            }
        }
    });
}

TEST(DequantizeMeanKernel, WorkersAreAddedInAscendingOrder) {
    const Format format = Format::fp32;
    const size_t stride = payload_bytes(format, 128);
    Bytes payloads(stride * 3);
    const float says[] = {1.0f, 0x1p-24f, 0x1p-24f};  // 1 + 2^-24 is 1; from the other end the sum is more
    for (size_t worker = 0; worker < 3; worker++) {
        for (size_t i = 0; i < 128; i++) {
            memcpy(&payloads[worker * stride + sizeof(PayloadHeader) + 4 * i], &says[worker], 4);
        }
    }
    DeviceArray<uint8_t> device_payloads(payloads);
    DeviceArray<float> mean(128);
    Stream stream;
    cuda::dequantize_mean(mean, device_payloads, stride, 3, format, 128, stream);
    stream.synchronize();
    expect_same_bits(mean.to_host(), Floats(128, 1.0f / 3), "mean");
}

// What every worker does with its own delta.
TEST(DequantizeMeanKernel, WhatTheDeviceQuantizedIsDecodedAsTheCpuWould) {
    const long n = 128 * 11;
    const Floats global = random_values(n, 3, 0x1p-8f), local = random_values(n, 4, 0x1p-8f);
    for (Format format : all_formats) {
        Bytes cpu_payload = new_payload(format, n);
        Floats expected(global.size());
        cpu::Stream cpu_stream;
        cpu::quantize(cpu_payload.data(), format, Rounding(), n, 0, {global.data(), local.data()}, n,
                      cpu_stream);
        cpu::dequantize_mean(expected.data(), cpu_payload.data(), 0, 1, format, n, cpu_stream);

        DeviceArray<uint8_t> payload(new_payload(format, n));
        DeviceArray<float> device_global(global), device_local(local), mean(global.size());
        Stream stream;
        cuda::quantize(payload, format, Rounding(), n, 0, {device_global, device_local}, n, stream);
        cuda::dequantize_mean(mean, payload, 0, 1, format, n, stream);
        stream.synchronize();
        expect_same_bits(mean.to_host(), expected, name_of(format));
    }
}

// ---- the hash

// The payload's header after the hash of parts of `values`, which begin at `first` in the fragment.
PayloadHeader device_hash(const Floats& values, long first, const std::vector<long>& counts) {
    DeviceArray<uint8_t> payload(new_payload(Format::fp4, 128));
    Stream stream;
    auto begin = values.begin();
    for (long count : counts) {
        DeviceArray<float> part(Floats(begin, begin + count));
        cuda::add_hash(payload, first + (begin - values.begin()), part, count, stream);
        stream.synchronize();
        begin += count;
    }
    EXPECT_EQ(begin, values.end());
    const Bytes bytes = payload.to_host();
    const Bytes untouched = new_payload(Format::fp4, 128);
    EXPECT_TRUE(std::equal(bytes.begin() + sizeof(PayloadHeader), bytes.end(),
                           untouched.begin() + sizeof(PayloadHeader)));
    return header_in(bytes);
}

PayloadHeader cpu_hash(const Floats& values, long first) {
    Bytes payload = new_payload(Format::fp4, 128);
    cpu::Stream stream;
    cpu::add_hash(payload.data(), first, values.data(), long(values.size()), stream);
    return header_in(payload);
}

void expect_same_header(const PayloadHeader& header, const PayloadHeader& expected) {
    EXPECT_EQ(header.hash, expected.hash);
    EXPECT_EQ(memcmp(&header, &expected, sizeof(header)), 0);
}

// 4096 values are a block of threads. Indices beyond 2^32 occur: fragments of large models.
TEST(AddHashKernel, TheHashIsTheCpusForAnySplitIntoRanges) {
    const Floats values = random_values(4096 * 3 + 128 * 5, 1, 1.0f);
    const long n = long(values.size());
    for_each_order(4, [&] {
        for (long first : {0L, 128 * 3L, 128L << 30}) {
            const PayloadHeader expected = cpu_hash(values, first);
            const long rest = n - 128 - 4096 - 1024;
            expect_same_header(device_hash(values, first, {n}), expected);
            expect_same_header(device_hash(values, first, {128, 4096, 1024, rest}), expected);
        }
    });
    for (long count : {128L, 1024L, 4096L - 128, 4096L, 4096L + 128}) {
        const Floats part(values.begin(), values.begin() + count);
        expect_same_header(device_hash(part, 0, {count}), cpu_hash(part, 0));
    }
}

TEST(AddHashKernel, EveryBitPatternCounts) {
    Floats values = patterns();
    for (float special : {INFINITY, -INFINITY, bits_to_float(0x7fc12345), bits_to_float(0xffc54321)}) {
        values.insert(values.end(), 32, special);
    }
    expect_same_header(device_hash(values, 128, {long(values.size())}), cpu_hash(values, 128));
}

// ---- headers

TEST(HeaderKernels, AHeaderIsWrittenWholeAndAlone) {
    Bytes expected = new_payload(Format::fp4, 128);
    DeviceArray<uint8_t> payload(Bytes(expected.size(), 0xa5));
    Stream stream;
    cuda::write_header(payload, some_header(uint16_t(Format::fp4)), stream);
    stream.synchronize();
    expect_same_bits(payload.to_host(), expected, "payload");
}

// `count` payloads that begin with `each` headers, all of them different.
Bytes payloads_with_headers(int count, int each, size_t stride) {
    Bytes payloads(stride * size_t(count), 0xa5);
    for (int i = 0; i < count * each; i++) {
        PayloadHeader header = some_header(uint16_t(i));
        header.tokens = random_word(5, uint64_t(i)) % 1000;
        memcpy(&payloads[size_t(i / each) * stride + size_t(i % each) * sizeof(header)], &header,
               sizeof(header));
    }
    return payloads;
}

TEST(HeaderKernels, HeadersOfAllPayloadsAreRead) {
    const int workers = 3;
    for (int each : {1, 4}) {
        const size_t stride = sizeof(PayloadHeader) * size_t(each) + 48;
        const Bytes payloads = payloads_with_headers(workers, each, stride);
        DeviceArray<uint8_t> device_payloads(payloads);
        std::vector<PayloadHeader> headers(size_t(workers * each + 1)), expected(headers.size());
        Stream stream;
        cpu::Stream cpu_stream;
        cuda::read_groups(headers.data(), device_payloads, stride, workers, each, stream);
        cpu::read_groups(expected.data(), payloads.data(), stride, workers, each, cpu_stream);
        stream.synchronize();
        for (size_t i = 0; i < headers.size(); i++) { expect_same_header(headers[i], expected[i]); }
        expect_same_header(headers.back(), PayloadHeader());
        EXPECT_EQ(headers[size_t(each)].format, some_header(uint16_t(each)).format);
    }
}

// 33 headers are more packs of 16 bytes than a block has threads, and more workers than a warp has.
TEST(HeaderKernels, AMeanBeginsWithItsOwnHeaderAndThoseOfWhatItIsAMeanOf) {
    for (int workers : {1, 3, 33}) {
        const size_t stride = sizeof(PayloadHeader) + 80, bytes = sizeof(PayloadHeader) * size_t(1 + workers);
        const Bytes payloads = payloads_with_headers(workers, 1, stride);
        Bytes expected(bytes + guard, 0x5a);
        DeviceArray<uint8_t> out(expected), device_payloads(payloads);
        Stream stream;
        cpu::Stream cpu_stream;
        cuda::write_mean_headers(out, some_header(77), device_payloads, stride, workers, stream);
        cpu::write_mean_headers(expected.data(), some_header(77), payloads.data(), stride, workers,
                                cpu_stream);
        stream.synchronize();
        expect_same_bits(out.to_host(), expected, "headers");
        EXPECT_EQ(memcmp(&expected[bytes - sizeof(PayloadHeader)], &payloads[stride * size_t(workers - 1)],
                         sizeof(PayloadHeader)), 0);
    }
}

TEST(TokenWeightsKernel, TheWeightsHaveTheCpusBits) {
    for (int workers : {1, 3, 33}) {
        const size_t stride = sizeof(PayloadHeader) + 80;
        Bytes payloads = payloads_with_headers(workers, 1, stride);
        auto tokens_of = [&](int worker) -> uint64_t& {
            return reinterpret_cast<PayloadHeader*>(&payloads[stride * size_t(worker)])->tokens;
        };
        for (int round = 0; round < 3; round++) {
            if (round == 1) { tokens_of(0) = (uint64_t(1) << 53) + 1; }  // not a float, nor a double
            for (int worker = 0; round == 2 && worker < workers; worker++) { tokens_of(worker) = 0; }
            Floats expected(size_t(workers) + guard, 7.0f);
            DeviceArray<float> weights(expected);
            DeviceArray<uint8_t> device_payloads(payloads);
            Stream stream;
            cpu::Stream cpu_stream;
            cuda::token_weights(weights, device_payloads, stride, workers, stream);
            cpu::token_weights(expected.data(), payloads.data(), stride, workers, cpu_stream);
            stream.synchronize();
            expect_same_bits(weights.to_host(), expected, "weights");
            if (round == 2) { EXPECT_EQ(expected[0], 1.0f / float(workers)); }
        }
    }
}

// ---- fragments in parts

// Headers and, for all that is to be written, bytes that are easy to know again.
Bytes new_parts(const PayloadLayout& layout) {
    Bytes payload(layout.bytes * size_t(layout.parts) + guard, 0xa5);
    for (int part = 0; part < layout.parts; part++) {
        PayloadHeader header = some_header(uint16_t(layout.format));
        header.part = uint16_t(part);
        memcpy(&payload[layout.bytes * size_t(part)], &header, sizeof(header));
    }
    return payload;
}

// Fewer blocks than parts, as many, and numbers that do not divide; ranges that end within parts.
TEST(PartsOfAFragment, QuantizedInOneLaunchTheyAreTheCpusBytes) {
    for_each_order(2, [] {
        for (Format format : all_formats) {
            for (int parts : {2, 3, 4, 8}) {
                for (long blocks : {1L, 3L, 8L, 13L}) {
                    const long n = 128 * blocks, cut = blocks / 3 * 128;
                    const PayloadLayout layout = payload_layout(format, n, parts, parts % 2 ? 1 : 1 + parts);
                    Floats global = random_values(n, uint64_t(n), 1.0f);
                    if (blocks == 13) { global[size_t(n - 1)] = NAN; }
                    Floats residual = random_values(n, 9, 0x1p-9f);
                    Bytes expected = new_parts(layout);
                    DeviceArray<uint8_t> payload(expected);
                    DeviceArray<float> device_global(global), device_residual(residual);
                    Stream stream;
                    cpu::Stream cpu_stream;
                    cuda::clear_padding(payload, layout, stream);
                    cpu::clear_padding(expected.data(), layout, cpu_stream);
                    for (auto [first, count] : {Part{cut, n - cut}, Part{0, cut}}) {
                        const Rounding own = stochastic.at(stochastic.first + uint64_t(first));
                        cuda::quantize(payload, layout, own, first,
                                       Source{device_global, nullptr, device_residual}.from(first), count,
                                       stream);
                        cpu::quantize(expected.data(), layout, own, first,
                                      Source{global.data(), nullptr, residual.data()}.from(first), count,
                                      cpu_stream);
                    }
                    stream.synchronize();
                    expect_same_bits(payload.to_host(), expected, name_of(format));
                    expect_same_bits(device_residual.to_host(), residual, name_of(format));
                }
            }
        }
    });
}

TEST(PartsOfAFragment, TheirMeansWithAndWithoutWeightsHaveTheCpusBits) {
    for (Format format : all_formats) {
        for (int parts : {1, 3, 8}) {
            for (long blocks : {1L, 8L, 13L}) {
                const int workers = 3;
                const PayloadLayout layout = payload_layout(format, 128 * blocks, parts, 1 + parts);
                const size_t stride = layout.bytes * size_t(parts);
                Bytes payloads;
                for (uint64_t worker = 0; worker < workers; worker++) {
                    Bytes one = new_parts(layout);
                    const Floats values = random_values(128 * blocks, worker, worker == 1 ? 0x1p-135f : 1.0f);
                    cpu::Stream cpu_stream;
                    cpu::quantize(one.data(), layout, Rounding(), 0, {values.data()}, 128 * blocks,
                                  cpu_stream);
                    payloads.insert(payloads.end(), one.begin(), one.begin() + long(stride));
                }
                const Floats weights = {0.3f, 0.6f, 0.1f};
                DeviceArray<uint8_t> device_payloads(payloads);
                DeviceArray<float> device_weights(weights);
                for (bool weighted : {false, true}) {
                    Floats expected(size_t(128 * blocks + guard), 7.0f);
                    DeviceArray<float> mean(expected);
                    Stream stream;
                    cpu::Stream cpu_stream;
                    float* const on_device = device_weights;
                    cuda::dequantize_mean(mean, device_payloads, stride, workers, layout,
                                          weighted ? on_device : nullptr, stream);
                    cpu::dequantize_mean(expected.data(), payloads.data(), stride, workers, layout,
                                         weighted ? weights.data() : nullptr, cpu_stream);
                    stream.synchronize();
                    expect_same_bits(mean.to_host(), expected, name_of(format));
                }
            }
        }
    }
}

TEST(CopyValues, AllAreCopiedAndNothingElse) {
    const Floats values = random_values(1000, 3, 1.0f);
    DeviceArray<float> inp(values), out(Floats(values.size(), 7.0f));
    Stream stream;
    cuda::copy_values(out, inp, 999, stream);
    stream.synchronize();
    Floats expected = values;
    expected.back() = 7.0f;
    expect_same_bits(out.to_host(), expected, "out");
}

// ---- what is refused

TEST(QuantizeKernel, WhatTheKernelsCannotTakeIsRefusedBeforeTheLaunch) {
    const Format format = Format::fp4;
    DeviceArray<uint8_t> payload(1024);
    DeviceArray<float> array(512);
    uint8_t* p = payload;
    float* a = array;
    Stream stream;
    expect_refused("the payload",
                   [&] { cuda::quantize(p + 8, format, Rounding(), 128, 0, {a, a}, 128, stream); });
    expect_refused("the array to quantize",
                   [&] { cuda::quantize(p, format, Rounding(), 128, 0, {a + 1, a}, 128, stream); });
    expect_refused("the array to subtract",
                   [&] { cuda::quantize(p, format, Rounding(), 128, 0, {a, a + 2}, 128, stream); });
    expect_refused("the array of residuals",
                   [&] { cuda::quantize(p, format, Rounding(), 128, 0, {a, a, a + 1}, 128, stream); });
    expect_refused("the range to round stochastically begins at no multiple of 4",
                   [&] { cuda::quantize(p, format, stochastic.at(6), 128, 0, {a, a}, 128, stream); });
    expect_refused("the fragment is 192 values",
                   [&] { cuda::quantize(p, format, Rounding(), 192, 0, {a, a}, 128, stream); });
    expect_refused("what lies before the range to quantize is 64 values",
                   [&] { cuda::quantize(p, format, Rounding(), 256, 64, {a, a}, 128, stream); });
    expect_refused("the range to quantize is 96 values",
                   [&] { cuda::quantize(p, format, Rounding(), 128, 0, {a, a}, 96, stream); });
    expect_refused("the range to quantize is -128 values",
                   [&] { cuda::quantize(p, format, Rounding(), 128, 0, {a, a}, -128, stream); });
    expect_refused("the mean", [&] { cuda::dequantize_mean(a + 1, p, 256, 1, format, 128, stream); });
    expect_refused("the first payload",
                   [&] { cuda::dequantize_mean(a, p + 4, 256, 1, format, 128, stream); });
    expect_refused("the second payload", [&] { cuda::dequantize_mean(a, p, 250, 2, format, 128, stream); });
    expect_refused("the fragment is 127 values",
                   [&] { cuda::dequantize_mean(a, p, 256, 1, format, 127, stream); });
    expect_refused("the payload", [&] { cuda::add_hash(p + 8, 0, a, 128, stream); });
    expect_refused("the array to hash", [&] { cuda::add_hash(p, 0, a + 3, 128, stream); });
    expect_refused("the array to hash is 100 values", [&] { cuda::add_hash(p, 0, a, 100, stream); });
    const PayloadHeader header;
    expect_refused("the payload", [&] { cuda::write_header(p + 8, header, stream); });
    expect_refused("a mean's own", [&] { cuda::write_mean_headers(p + 8, header, p, 256, 2, stream); });
    expect_refused("a mean's first", [&] { cuda::write_mean_headers(p, header, p + 4, 252, 2, stream); });
    expect_refused("a mean's second", [&] { cuda::write_mean_headers(p, header, p, 250, 2, stream); });
    expect_refused("the first payload to weigh", [&] { cuda::token_weights(a, p + 4, 252, 2, stream); });
    expect_refused("the second payload to weigh", [&] { cuda::token_weights(a, p, 250, 2, stream); });
}

TEST(QuantizeKernel, NoValuesAreNoWork) {
    const Bytes before = new_payload(Format::fp4, 128);
    DeviceArray<uint8_t> payload(before);
    DeviceArray<float> array(Floats(128, 3.0f));
    Stream stream;
    cuda::add_hash(payload, 0, array, 0, stream);
    cuda::quantize(payload, Format::fp4, Rounding(), 128, 0, {array, array}, 0, stream);
    cuda::dequantize_mean(array, payload, 0, 1, Format::fp4, 0, stream);
    stream.synchronize();
    expect_same_bits(payload.to_host(), before, "payload");
    expect_same_bits(array.to_host(), Floats(128, 3.0f), "array");
}

}  // namespace
