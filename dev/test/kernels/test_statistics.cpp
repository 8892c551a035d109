// Sums of products of payloads on the device: what the CPU's functions of the same names give, up to the
// order of additions in double, and the same bits in every order of blocks and threads. Compiles with nvcc,
// too (-x cu).
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "dev/test/one_part.h"
#include "dev/emulator/device_array.h"
#include "dev/test/kernels/values.h"
#include "streaming/statistics.h"

namespace {

using Bytes = std::vector<uint8_t>;
using Doubles = std::vector<double>;

// Sums, all of whose terms' magnitudes add up to `size` at most.
void expect_same_sums(const Doubles& sums, const Doubles& expected, double size, const std::string& what) {
    ASSERT_EQ(sums.size(), expected.size()) << what;
    for (size_t i = 0; i < sums.size(); i++) {
        ASSERT_NEAR(sums[i], expected[i], 1e-13 * size) << what << " sum " << i;
    }
}

// Payloads of several workers, each of values of another magnitude, `stride` bytes apart.
Bytes payloads_of(Format format, long n, int workers, size_t stride) {
    Bytes payloads(stride * size_t(workers));
    cpu::Stream stream;
    for (int w = 0; w < workers; w++) {
        const Floats delta = random_floats(size_t(n), uint64_t(w), float(w + 1), 0.2f);
        cpu::quantize(&payloads[size_t(w) * stride], format, Rounding(), n, 0, {delta.data()}, n, stream);
    }
    return payloads;
}

// Values after the sums are left alone, and partial sums need no more memory than partial_sums() says.
void expect_same_row_sums(Format format, long blocks, int workers) {
    const long n = 128 * blocks;
    const PayloadLayout layout = payload_layout(format, n);
    const size_t stride = layout.bytes + 32;
    const Bytes payloads = payloads_of(format, n, workers, stride);
    const Floats mean = random_floats(size_t(n), 77, 1.0f);
    Doubles expected(size_t(row_sums(workers)) + guard, 7.0), partial(size_t(partial_sums(workers)));
    cpu::Stream cpu_stream;
    cpu::sum_rows(expected.data(), partial.data(), payloads.data(), stride, workers, layout, mean.data(),
                  cpu_stream);

    Stream stream;
    DeviceArray<uint8_t> device_payloads(payloads);
    DeviceArray<float> device_mean(mean);
    DeviceArray<double> device_partial(size_t(row_sums(workers)) * size_t(chunks_of(n)));
    DeviceArray<double> sums(Doubles(expected.size(), 7.0));
    const float* given = has_mean_row(workers) ? static_cast<float*>(device_mean) : nullptr;
    cuda::sum_rows(sums, device_partial, device_payloads, stride, workers, layout, given, stream);
    stream.synchronize();
    const double size = double(n) * 1.44 * workers * workers;
    expect_same_sums(sums.to_host(), expected, size, name_of(format) + " " + std::to_string(workers));
}

// Eight blocks are one chunk; 9 have a second of one block.
TEST(StatisticsKernel, RowsOfEveryFormatGiveTheCpusSums) {
    for_each_order(2, [] {
        for (Format format : all_formats) {
            for (auto [workers, blocks] : {std::pair{1, 1L}, {2, 9L}, {3, 8L}, {9, 3L}}) {
                expect_same_row_sums(format, blocks, workers);
            }
        }
        expect_same_row_sums(Format::fp4, 2, 8);
    });
}

// As many chunks as there are at most, and then one block more, which is the first chunk's: its threads' second
// pack, or the first that they do not load at once.
TEST(StatisticsKernel, MoreValuesThanAllChunksHaveAtOnce) {
    expect_same_row_sums(Format::fp4, 8 * 256 + 1, 1);
    expect_same_row_sums(Format::fp4, 8 * 256 * cuda::statistics_at_once + 1, 2);
}

TEST(StatisticsKernel, TheSameBitsInEveryOrder) {
    const PayloadLayout layout = payload_layout(Format::fp4, 128 * 40);
    const Bytes payloads = payloads_of(Format::fp4, 128 * 40, 2, layout.bytes);
    Doubles first;
    for_each_order(4, [&] {
        Stream stream;
        DeviceArray<uint8_t> device_payloads(payloads);
        DeviceArray<double> partial(size_t(partial_sums(2))), sums(3);
        cuda::sum_rows(sums, partial, device_payloads, layout.bytes, 2, layout, nullptr, stream);
        stream.synchronize();
        if (first.empty()) { first = sums.to_host(); }
        EXPECT_EQ(sums.to_host(), first);
    });
}

// Quantizes two ranges of a fragment and adds up what was lost, on the CPU and on the device.
void expect_same_encoding(Format format, long blocks, int parts, bool with_residual) {
    const long n = 128 * blocks, cut = blocks / 3 * 128;
    const Floats global = random_floats(size_t(n), 1, 1.0f), local = random_floats(size_t(n), 2, 1.0f);
    Floats residual = random_floats(size_t(n), 3, 0.25f);
    const PayloadLayout layout = payload_layout(format, n, parts);
    Bytes payload(layout.bytes * size_t(parts));
    Doubles expected(encoding_sums + guard), partial(size_t(partial_sums(1)));
    DeviceArray<double> sums(expected), device_partial(size_t(partial_sums(1)));
    DeviceArray<float> device_global(global), device_local(local);
    cpu::Stream cpu_stream;
    Stream stream;
    for (auto [first, count] : {std::pair{0L, cut}, {cut, n - cut}}) {
        const Source source =
            Source{global.data(), local.data(), with_residual ? residual.data() : nullptr}.from(first);
        cpu::quantize(payload.data(), layout, Rounding(), first, source, count, cpu_stream);
        cpu::sum_encoding(expected.data(), partial.data(), payload.data(), layout, first, source, count,
                          cpu_stream);
        DeviceArray<uint8_t> device_payload(payload);
        DeviceArray<float> device_residual(residual);
        float* lost = with_residual ? static_cast<float*>(device_residual) : nullptr;
        cuda::sum_encoding(sums, device_partial, device_payload, layout, first,
                           Source{device_global, device_local, lost}.from(first), count, stream);
        stream.synchronize();
    }
    expect_same_sums(sums.to_host(), expected, double(n) * 4, name_of(format));
    EXPECT_GT(expected[0], double(n) / 10);
}

TEST(StatisticsKernel, WhatEncodingLosesIsTheCpusSums) {
    for_each_order(2, [] {
        for (Format format : all_formats) {
            for (bool with_residual : {false, true}) {
                expect_same_encoding(format, 1, 1, with_residual);
                expect_same_encoding(format, 29, 3, with_residual);
            }
        }
    });
    // The second range has 256 chunks and two blocks more.
    expect_same_encoding(Format::fp4, 8 * 256 * 3 / 2 + 3, 2, false);
}

TEST(StatisticsKernel, SumsOfNothingAreZeroAndAreNotAddedTo) {
    Stream stream;
    DeviceArray<double> sums(Doubles{5, 6}), partial(size_t(partial_sums(1)));
    DeviceArray<uint8_t> payload(Bytes(64));
    const PayloadLayout none = payload_layout(Format::fp4, 0);
    cuda::sum_encoding(sums, partial, payload, none, 0, {nullptr}, 0, stream);
    EXPECT_EQ(sums.to_host(), (Doubles{5, 6}));
    cuda::sum_rows(sums, partial, payload, 0, 1, none, nullptr, stream);
    stream.synchronize();
    EXPECT_EQ(sums.to_host(), (Doubles{0, 6}));
}

TEST(StatisticsKernel, SumsAreReadFromWhereTheyLie) {
    const Doubles groups = {1, 2, 3, 4, 5, 6, 7, 8};
    DeviceArray<double> device_groups(groups);
    Doubles read(6, 9.0);
    Stream stream;
    const uint8_t* from = reinterpret_cast<const uint8_t*>(static_cast<double*>(device_groups));
    cuda::read_groups(read.data(), from + 8, 24, 2, 2, stream);
    stream.synchronize();
    EXPECT_EQ(read, (Doubles{2, 3, 5, 6, 9, 9}));
}

TEST(StatisticsKernel, WhatItCannotWorkOnIsRefused) {
    Stream stream;
    DeviceArray<double> sums(19), partial(size_t(partial_sums(9)));
    DeviceArray<uint8_t> payload(Bytes(4096));
    DeviceArray<float> values(128);
    const PayloadLayout layout = payload_layout(Format::fp4, 128);
    expect_refused("no mean to compare 9 workers with", [&] {
        cuda::sum_rows(sums, partial, payload, layout.bytes, 9, layout, nullptr, stream);
    });
    PayloadLayout odd = layout;
    odd.values = 192;
    expect_refused("a fragment of 192 values", [&] {
        cuda::sum_rows(sums, partial, payload, layout.bytes, 1, odd, nullptr, stream);
    });
    expect_refused("the first payload", [&] {
        cuda::sum_rows(sums, partial, payload + 8, layout.bytes, 1, layout, nullptr, stream);
    });
    expect_refused("the second payload", [&] {
        cuda::sum_rows(sums, partial, payload, 8, 2, layout, nullptr, stream);
    });
    expect_refused("the mean", [&] {
        cuda::sum_rows(sums, partial, payload, layout.bytes, 9, layout, values + 1, stream);
    });
    expect_refused("the array that was quantized", [&] {
        cuda::sum_encoding(sums, partial, payload, layout, 0, {values + 1, values}, 128, stream);
    });
    expect_refused("what lies before the range is 64 values", [&] {
        cuda::sum_encoding(sums, partial, payload, layout, 64, {values, values}, 128, stream);
    });
    expect_refused("the range is 64 values", [&] {
        cuda::sum_encoding(sums, partial, payload, layout, 0, {values, values}, 64, stream);
    });
}

}  // namespace
