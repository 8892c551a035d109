// Muon on the device: the CPU's bits in its elementwise passes, and Newton-Schulz on cuBLASLt (the emulated
// one, where there is no GPU) against double precision. Compiles with nvcc, too (-x cu).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "dev/emulator/device_array.h"
#include "dev/test/newton_schulz.h"
#include "dev/test/kernels/values.h"
#include "llmc/cpu/muon.h"
#include "llmc/muon.h"

namespace {

using newton_schulz_test::Doubles;
using newton_schulz_test::exact_newton_schulz;

constexpr bool bf16 = sizeof(floatX) == 2;
const Muon step = muon(1e-2f, {0.01f, 0.95f}, 0.1f);

// The CPU's results, rounded to floatX once.
void expect_rounded(const std::vector<floatX>& values, const Floats& expected) {
    expect_same_bits(values, to_floatX(expected));
}

TEST(Muon, DirectionHasTheCpusBitsAndLeavesWhatLiesBehind) {
    for (long count : {4, 8, 128, 1028, 6528}) {
        const size_t n = size_t(count), all = n + guard;
        const Floats m = random_floats(all, 1, 0.5f), grad = random_floats(all, 2, 1.0f);
        for (float scale : {0.37f, NAN, INFINITY}) {
            Floats expected_m = m, expected(n, -7.0f);
            cpu::Stream host;
            cpu::muon_direction(expected.data(), expected_m.data(), grad.data(), count, step, &scale, host);
            std::vector<floatX> direction(all, floatX(-7.0f));
            std::copy_n(to_floatX(expected).begin(), n, direction.begin());
            for_each_order(2, [&] {
                cuda::Stream stream;
                DeviceArray<floatX> device_direction(std::vector<floatX>(all, floatX(-7.0f)));
                DeviceArray<float> device_m(m), device_grad(grad), device_scale(Floats{scale});
                cuda::muon_direction(device_direction, device_m, device_grad, count, step, device_scale,
                                     stream);
                stream.synchronize();
                expect_same_bits(device_direction.to_host(), direction, "direction");
                expect_same_bits(device_m.to_host(), expected_m, "m");
            });
        }
    }
}

TEST(Muon, UpdateHasTheCpusBitsAtEveryStepAndPlaceInTheModel) {
    for (long count : {4, 128, 1028, 2176}) {
        const size_t all = size_t(count) + guard;
        const Floats master = random_floats(all, 3, 2.0f), direction = random_floats(all, 4, 1.0f);
        for (float scale : {0.5f, NAN}) {
            const StochasticRounding rounding = {uint64_t(count) << 33 | 5, 3, (uint64_t(5) << 35) + 4};
            const Floats exact = to_floats(to_floatX(direction));  // what the device reads
            Floats expected = master;
            std::vector<floatX> params(all, floatX(-7.0f));
            cpu::Stream host;
            cpu::muon_update(params.data(), expected.data(), exact.data(), count, step, &scale, rounding, host);
            for_each_order(2, [&] {
                cuda::Stream stream;
                DeviceArray<floatX> device_params(std::vector<floatX>(all, floatX(-7.0f))),
                    device_direction(to_floatX(direction));
                DeviceArray<float> device_master(master), device_scale(Floats{scale});
                cuda::muon_update(device_params, device_master, device_direction, count, step, device_scale,
                                  rounding, stream);
                stream.synchronize();
                expect_same_bits(device_master.to_host(), expected, "master");
                expect_same_bits(device_params.to_host(), params, "params");
            });
        }
    }
}

// Several blocks, and chunks of the norm.
TEST(Muon, NormalizeMakesTheNormOneAndLeavesZeros) {
    for (long count : {4, 1000, 40000}) {
        const Floats values = to_floats(to_floatX(random_floats(size_t(count), 5, 3.0f)));
        Floats expected(values.size());
        float norm = NAN;
        cpu::Stream host;
        cpu::muon_normalize(expected.data(), &norm, values.data(), count, host);
        for_each_order(2, [&] {
            cuda::Stream stream;
            DeviceArray<floatX> inp(to_floatX(values)), out(values.size());
            DeviceArray<floatX> zeros(to_floatX(Floats(8))), still(8);
            DeviceArray<float> norm_squared(1);
            cuda::muon_normalize(out, norm_squared, inp, count, stream);
            stream.synchronize();
            expect_rounded(out.to_host(), expected);
            cuda::muon_normalize(still, norm_squared, zeros, 8, stream);
            stream.synchronize();
            expect_rounded(still.to_host(), Floats(8));
        });
    }
}

TEST(Muon, PolynomialHasTheCpusBits) {
    for (int side : {8, 40, 72}) {
        const size_t n = size_t(side) * size_t(side);
        const Floats gram = to_floats(to_floatX(random_floats(n, 6, 1.0f)));
        const Floats square = to_floats(to_floatX(random_floats(n, 7, 1.0f)));
        Floats expected(n);
        cpu::Stream host;
        cpu::newton_schulz_polynomial(expected.data(), gram.data(), square.data(), side, 2.5f, host);
        for_each_order(2, [&] {
            cuda::Stream stream;
            DeviceArray<floatX> device_gram(to_floatX(gram)), device_square(to_floatX(square)), out(n);
            cuda::newton_schulz_polynomial(out, device_gram, device_square, side, 2.5f, stream);
            stream.synchronize();
            expect_rounded(out.to_host(), expected);
        });
    }
}

// A matrix whose singular values bf16 can tell from its rounding: a multiple of I, and noise.
Floats matrix(int rows, int columns) {
    Floats values = random_floats(size_t(rows * columns), uint64_t(rows + columns), 0.3f);
    for (int i = 0; i < std::min(rows, columns); i++) { values[size_t(i * columns + i)] += 1.0f; }
    return values;
}

TEST(Muon, NewtonSchulzMatchesDoublePrecisionForAnyShape) {
    for (const auto& [rows, columns] : {std::pair<int, int>{24, 24}, {16, 64}, {64, 16}, {40, 48}}) {
        SCOPED_TRACE(testing::Message() << rows << " x " << columns);
        const Floats values = to_floats(to_floatX(matrix(rows, columns)));
        const Doubles exact = exact_newton_schulz(Doubles(values.begin(), values.end()), rows, columns, 2.5);
        Stream stream;
        device::Matmul matmul(MatmulPrecision::highest);
        NewtonSchulz scratch(long(rows) * columns, std::min(rows, columns));
        DeviceArray<floatX> x(to_floatX(values));
        newton_schulz(scratch, matmul, x, rows, columns, 2.5f, stream);
        stream.synchronize();
        const Floats result = to_floats(x.to_host());
        double difference = 0, norm = 0;
        for (size_t i = 0; i < result.size(); i++) {
            difference += (result[i] - exact[i]) * (result[i] - exact[i]);
            norm += exact[i] * exact[i];
        }
        EXPECT_LT(std::sqrt(difference / norm), bf16 ? 2e-2 : 1e-5);
    }
}

TEST(Muon, ABatchHasTheBitsOfItsMatrices) {
    const int side = 24, batch = 4;
    Floats all;
    for (int i = 0; i < batch; i++) {
        for (float v : matrix(side, side)) { all.push_back(v * float(i + 1) + 0.01f * float(i) * float(all.size() % 7)); }
    }
    Stream stream;
    device::Matmul matmul(MatmulPrecision::highest);
    NewtonSchulz scratch(long(batch) * side * side, side, batch);
    DeviceArray<floatX> x(to_floatX(all)), y(to_floatX(all));
    newton_schulz(scratch, matmul, x, side, side, 2.5f, stream, batch);
    for (int i = 0; i < batch; i++) { newton_schulz(scratch, matmul, y + i * side * side, side, side, 2.5f, stream); }
    stream.synchronize();
    expect_same_bits(x.to_host(), y.to_host(), "batch");
}

TEST(Muon, RefusesWhatItCannotLoadInPacksOrDrawsNoBitsFor) {
    cuda::Stream stream;
    DeviceArray<floatX> x(Floats(64, 1.0f).size()), y(64);
    DeviceArray<float> a(Floats(64, 1.0f)), b(Floats(64, 1.0f)), scale(Floats{1.0f});
    expect_refused("muon_direction: count", [&] { cuda::muon_direction(x, a, b, 6, step, scale, stream); });
    expect_refused("muon_normalize: count", [&] { cuda::muon_normalize(x, scale, y, 6, stream); });
    expect_refused("newton_schulz_polynomial: count",
                   [&] { cuda::newton_schulz_polynomial(x, y, y, 6, 1.0f, stream); });
    expect_refused("muon_update: count",
                   [&] { cuda::muon_update(x, a, y, 6, step, scale, {1, 1, 0}, stream); });
    expect_refused("muon_update: rounding.first",
                   [&] { cuda::muon_update(x, a, y, 8, step, scale, {1, 1, 2}, stream); });
    EXPECT_THROW(cuda::muon_direction(x + 1, a, b, 8, step, scale, stream), std::invalid_argument);
    EXPECT_THROW(cuda::muon_direction(x, a + 1, b, 8, step, scale, stream), std::invalid_argument);
    EXPECT_THROW(cuda::muon_direction(x, a, b + 1, 8, step, scale, stream), std::invalid_argument);
    EXPECT_THROW(cuda::muon_normalize(x + 1, scale, y, 8, stream), std::invalid_argument);
    EXPECT_THROW(cuda::muon_normalize(x, scale, y + 1, 8, stream), std::invalid_argument);
    EXPECT_THROW(cuda::newton_schulz_polynomial(x + 1, y, y, 4, 1.0f, stream), std::invalid_argument);
    EXPECT_THROW(cuda::muon_update(x + 1, a, y, 8, step, scale, {1, 1, 0}, stream), std::invalid_argument);
    EXPECT_THROW(cuda::muon_update(x, a + 1, y, 8, step, scale, {1, 1, 0}, stream), std::invalid_argument);
    EXPECT_THROW(cuda::muon_update(x, a, y + 1, 8, step, scale, {1, 1, 0}, stream), std::invalid_argument);
}

}  // namespace
