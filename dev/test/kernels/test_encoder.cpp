// The embedding's kernels against the CPU's functions of the same names. Gradients are small integers: sums
// are exact in any order, so every comparison is of bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "dev/emulator/device_array.h"
#include "dev/test/kernels/values.h"
#include "llmc/cpu/encoder.h"
#include "llmc/cuda/encoder.cuh"

namespace {

struct Shape {
    int B, T, C;
};

std::vector<float> integers(size_t count, int size, unsigned seed) {
    std::mt19937 random(seed);
    std::uniform_int_distribution<int> integer(-size, size);
    std::vector<float> values(count);
    for (float& value : values) { value = float(integer(random)); }
    return values;
}

// Tokens below V, the last one among them, about half of them few and frequent ones, as in text.
std::vector<int> text(size_t count, int V, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<int> tokens(count);
    for (int& token : tokens) { token = int(random() % (random() % 2 ? unsigned(V) : 3u)) % V; }
    tokens[random() % count] = V - 1;
    return tokens;
}

// ---- forward

void expect_forward_of_the_cpu(const Shape& shape, int V, unsigned seed) {
    const auto [B, T, C] = shape;
    const std::vector<int> inp = text(size_t(B) * T, V, seed);
    // 8 bits and 8 bits: bf16 does not hold every sum.
    std::vector<float> wte = integers(size_t(V) * C, 255, seed + 1);
    std::vector<float> wpe = integers(size_t(T + 1) * C, 255, seed + 2);
    for (float& value : wpe) { value /= 64; }
    std::vector<float> expected(inp.size() * C);
    cpu::Stream cpu_stream;
    cpu::encoder_forward(expected.data(), inp.data(), wte.data(), wpe.data(), B, T, C, cpu_stream);
    for (float& value : expected) { value = float(floatX(value)); }

    Stream stream;
    DeviceArray<int> device_inp(inp);
    DeviceArray<floatX> device_wte(to_floatX(wte)), device_wpe(to_floatX(wpe)), out(expected.size());
    cuda::encoder_forward(out, device_inp, device_wte, device_wpe, B, T, C, stream);
    stream.synchronize();
    EXPECT_EQ(to_floats(out.to_host()), expected);
}

// 2056 channels of bf16 are one pack more than a block has threads.
TEST(Encoder, ForwardIsTheCpusRoundedOnce) {
    for_each_order(3, [] {
        expect_forward_of_the_cpu({1, 1, 8}, 1, 1);
        expect_forward_of_the_cpu({3, 37, 72}, 91, 2);
        expect_forward_of_the_cpu({2, 5, 776}, 17, 3);
        expect_forward_of_the_cpu({2, 3, 2056}, 5, 4);
    });
}

// ---- backward

struct Gradients {
    std::vector<float> dwte, dwpe;
};

Gradients cuda_gradients(const Gradients& before, const std::vector<float>& dout, const std::vector<int>& inp,
                         const Shape& shape, bool zeroed_scratch = false) {
    Stream stream;
    if (zeroed_scratch) {
        const long bytes = 1 << 16;
        cudaCheck(cudaMemset(stream.scratch<char>(bytes), 0, bytes));
        cudaCheck(cudaDeviceSynchronize());
    }
    DeviceArray<int> device_inp(inp);
    DeviceArray<floatX> device_dout(to_floatX(dout));
    DeviceArray<float> dwte(before.dwte), dwpe(before.dwpe);
    cuda::encoder_backward(dwte, dwpe, device_dout, device_inp, shape.B, shape.T, shape.C, stream);
    stream.synchronize();
    return {dwte.to_host(), dwpe.to_host()};
}

// Tokens that do not occur and positions beyond T keep what they had: they are part of the comparison.
void expect_backward_of_the_cpu(const Shape& shape, const std::vector<int>& inp, int V, unsigned seed) {
    const auto [B, T, C] = shape;
    const std::vector<float> dout = integers(inp.size() * C, 100, seed);
    const Gradients before{integers(size_t(V) * C, 9, seed + 1), integers(size_t(T + 2) * C, 9, seed + 2)};
    Gradients expected = before;
    cpu::Stream cpu_stream;
    cpu::encoder_backward(expected.dwte.data(), expected.dwpe.data(), dout.data(), inp.data(), B, T, C,
                          cpu_stream);
    const Gradients actual = cuda_gradients(before, dout, inp, shape);
    EXPECT_EQ(actual.dwte, expected.dwte);
    EXPECT_EQ(actual.dwpe, expected.dwpe);
}

TEST(Encoder, BackwardIsTheCpus) {
    for_each_order(2, [] {
        expect_backward_of_the_cpu({1, 1, 8}, {0}, 1, 1);
        expect_backward_of_the_cpu({3, 37, 72}, text(111, 91, 2), 91, 2);
        expect_backward_of_the_cpu({5, 41, 264}, text(205, 150, 3), 150, 3);
        expect_backward_of_the_cpu({9, 149, 8}, text(1341, 5000, 4), 5000, 4);
    });
}

// More channels than a block has: 1032 are two threads more than 256.
TEST(Encoder, BackwardOfManyChannelsIsTheCpus) {
    for_each_order(2, [] {
        expect_backward_of_the_cpu({3, 23, 1032}, text(69, 20, 1), 20, 1);
        expect_backward_of_the_cpu({2, 5, 2056}, text(10, 20, 2), 20, 2);
    });
}

// Runs of equal tokens that begin and end before, at and after the end of a chunk of 32 and fill one, two and
// many chunks, and runs that are one token shorter or longer.
TEST(Encoder, RunsOfAnyLengthMeetChunksAnywhere) {
    for_each_order(1, [] {
        std::mt19937 random(5);
        const int lengths[] = {1, 1, 2, 3, 29, 30, 31, 32, 33, 34, 61, 63, 64, 65, 96, 97, 250};
        for (int N : {1536, 1537, 1567}) {
            std::vector<int> inp;
            for (int token = 0; int(inp.size()) < N; token++) {
                inp.insert(inp.end(), size_t(lengths[random() % 17]), token);
            }
            inp.resize(size_t(N));
            const int V = inp.back() + 2;
            std::shuffle(inp.begin(), inp.end(), random);
            expect_backward_of_the_cpu({1, N, 16}, inp, V, unsigned(N));
        }
        expect_backward_of_the_cpu({4, 128, 16}, std::vector<int>(512, 3), 5, 99);
    });
}

// The first chunk has none before it, though a token 0 seems to stand there.
TEST(Encoder, WhatScratchMemoryHeldDoesNotMatter) {
    const Shape shape{1, 40, 8};
    std::vector<int> inp(40);
    for (int i = 0; i < 40; i++) { inp[i] = i / 2; }
    const std::vector<float> dout = integers(inp.size() * shape.C, 100, 1);
    const Gradients before{integers(20 * 8, 9, 2), integers(40 * 8, 9, 3)};
    const Gradients expected = cuda_gradients(before, dout, inp, shape);
    EXPECT_EQ(cuda_gradients(before, dout, inp, shape, true).dwte, expected.dwte);
}

TEST(Encoder, BackwardGivesTheSameBitsInAnyOrder) {
    const Shape shape{4, 301, 40};
    const std::vector<int> inp = text(1204, 150, 6);
    std::vector<float> dout = integers(inp.size() * shape.C, 255, 7);
    for (size_t i = 0; i < dout.size(); i++) { dout[i] = ldexpf(dout[i], -int(i * 7 % 19)); }
    const Gradients before{integers(size_t(150) * shape.C, 9, 8), integers(size_t(301) * shape.C, 9, 9)};
    const Gradients first = cuda_gradients(before, dout, inp, shape);
    for_each_order(3, [&] {
        const Gradients again = cuda_gradients(before, dout, inp, shape);
        EXPECT_EQ(again.dwte, first.dwte);
        EXPECT_EQ(again.dwpe, first.dwpe);
    });
}

// ---- the sort

void expect_sorted(const std::vector<int>& inp) {
    const int N = int(inp.size());
    std::vector<int> expected(inp.size());
    for (int i = 0; i < N; i++) { expected[i] = i; }
    std::stable_sort(expected.begin(), expected.end(), [&](int a, int b) { return inp[a] < inp[b]; });
    Stream stream;
    DeviceArray<int> device_inp(inp);
    DeviceArray<int2> pairs(inp.size()), spare(inp.size());
    cuda::sort_tokens(pairs, spare, device_inp, N, stream);
    stream.synchronize();
    const std::vector<int2> sorted = pairs.to_host();
    for (int i = 0; i < N; i++) {
        ASSERT_EQ(sorted[i].y, expected[i]) << "pair " << i << " of " << N;
        ASSERT_EQ(sorted[i].x, inp[expected[i]]) << "pair " << i << " of " << N;
    }
}

// Of 0 to 31 bits, so that every number of passes occurs. A warp takes 32 pairs at a time, 1024 are a turn of
// all warps: as many, one less and one more; some warps have fewer pairs than others, or none.
TEST(Encoder, TokensOfAnySizeAreSortedAndEqualOnesKeepTheirOrder) {
    for_each_order(1, [] {
        std::mt19937 random(7);
        const std::pair<int, int> bits_and_counts[] = {{0, 131},   {1, 33},  {5, 1024},  {8, 1025}, {13, 32},
                                                       {17, 1300}, {24, 31}, {28, 2071}, {31, 1023}};
        for (const auto& [bits, N] : bits_and_counts) {
            std::vector<int> inp(N);
            const int base = int(random() & ((1u << bits) - 1));
            for (int& token : inp) {
                const unsigned mask = random() % 2 ? (1u << bits) - 1 : 1u << random() % 32;
                token = int((unsigned(base) ^ (random() & mask)) & ((1u << bits) - 1));
            }
            expect_sorted(inp);
        }
    });
}

// Every lane of every warp has the same digit in every pass.
TEST(Encoder, EqualTokensKeepTheirOrder) {
    for_each_order(1, [] { expect_sorted(std::vector<int>(1025, 0x7FFEFDFC)); });
}

TEST(Encoder, TokensAreSortedUnderAnyOrderOfThreads) {
    for_each_order(3, [] {
        std::mt19937 random(8);
        std::vector<int> inp(1300);
        for (int& token : inp) { token = int(random() >> (1 + random() % 2 * 16)); }
        expect_sorted(inp);
    });
}

TEST(Encoder, ChannelsThatItCannotTakeAreRefused) {
    Stream stream;
    DeviceArray<floatX> x(64);
    DeviceArray<float> f(64);
    DeviceArray<int> inp(std::vector<int>{0});
    for (int C : {-8, 0, 12}) {
        EXPECT_THROW(cuda::encoder_forward(x, inp, x, x, 1, 1, C, stream), std::invalid_argument);
        EXPECT_THROW(cuda::encoder_backward(f, f, x, inp, 1, 1, C, stream), std::invalid_argument);
    }
}

TEST(Encoder, AnyArrayThatIsNotAlignedIsRefused) {
    Stream stream;
    DeviceArray<floatX> x(64);
    DeviceArray<float> f(64);
    DeviceArray<int> inp(std::vector<int>{0});
    for (int wrong = 0; wrong < 3; wrong++) {
        auto at = [&](int i) { return i == wrong ? 1 : 0; };
        EXPECT_THROW(cuda::encoder_forward(x + at(0), inp, x + 16 + at(1), x + 32 + at(2), 1, 1, 8, stream),
                     std::invalid_argument)
            << wrong;
        EXPECT_THROW(cuda::encoder_backward(f + at(0), f + 16 + at(1), x + at(2), inp, 1, 1, 8, stream),
                     std::invalid_argument)
            << wrong;
    }
}

}  // namespace
