// AdamW on the device: the CPU's bits in master weights, moments and stochastically rounded parameters.
// Compiles with nvcc, too (-x cu).
#include <gtest/gtest.h>

#include "dev/emulator/device_array.h"
#include "dev/test/kernels/values.h"
#include "llmc/cpu/adamw.h"
#include "llmc/cuda/adamw.cuh"

namespace {

// What an update reads and writes, on the host.
struct Shard {
    std::vector<floatX> params;
    Floats master, m, v, grad;

    explicit Shard(size_t count, uint64_t seed = 1)
        : params(count, floatX(-7.0f)),
          master(random_floats(count, seed, 2.0f)),
          m(random_floats(count, seed + 1, 0.1f)),
          v(random_floats(count, seed + 2, 0.01f, 0.01f)),
          grad(random_floats(count, seed + 3, 1.0f)) {}

    void expect_same(const Shard& expected) const {
        expect_same_bits(master, expected.master, "master");
        expect_same_bits(m, expected.m, "m");
        expect_same_bits(v, expected.v, "v");
        expect_same_bits(params, expected.params, "params");
        expect_same_bits(grad, expected.grad, "grad");
    }
};

struct Update {
    long count, decayed;
    AdamW step = adamw(1e-2f, {0.9f, 0.95f, 1e-8f, 0.1f}, 3);
    float grad_scale = 0.37f;
    StochasticRounding rounding = {42, 3, 0};
};

void update_on_cpu(Shard& shard, const Update& update) {
    cpu::Stream stream;
    cpu::adamw_update(shard.params.data(), shard.master.data(), shard.m.data(), shard.v.data(),
                      shard.grad.data(), update.count, update.decayed, update.step, &update.grad_scale,
                      update.rounding, stream);
}

// The values from `first` on.
Shard updated_on_device(const Shard& before, const Update& update, long first = 0) {
    cuda::Stream stream;
    DeviceArray<floatX> params(before.params);
    DeviceArray<float> master(before.master), m(before.m), v(before.v), grad(before.grad),
        grad_scale(Floats{update.grad_scale});
    cuda::adamw_update(params + first, master + first, m + first, v + first, grad + first, update.count,
                       update.decayed, update.step, grad_scale, update.rounding, stream);
    stream.synchronize();
    Shard after(0);
    after.params = params.to_host();
    after.master = master.to_host();
    after.m = m.to_host();
    after.v = v.to_host();
    after.grad = grad.to_host();
    return after;
}

// The arrays continue after the values to be updated.
void expect_cpus_bits(const Update& update, uint64_t seed) {
    const Shard before(size_t(update.count) + 16, seed);
    Shard expected = before;
    update_on_cpu(expected, update);
    for_each_order(2, [&] { updated_on_device(before, update).expect_same(expected); });
}

TEST(AdamW, HasTheCpusBitsForEveryCountOfDecayedValues) {
    for (long decayed : {0, 1, 77, 2048, 2051, 6527, 6528}) {
        expect_cpus_bits({6528, decayed}, uint64_t(decayed));
    }
    for (long count : {4, 8, 128, 1024, 1028, 2176}) {
        expect_cpus_bits({count, std::min(count, count / 2 + 3)}, uint64_t(count));
    }
}

TEST(AdamW, HasTheCpusBitsAtEveryStepAndPlaceInTheModel) {
    for (uint32_t t = 1; t <= 5; t++) {
        Update update = {2176, 1000};
        update.step = adamw(3e-4f, {0.9f, 0.999f, 1e-8f, 0.01f}, int(t));
        // Beyond 2^35 the number of 8 values needs more than 32 bits.
        update.rounding = {uint64_t(t) << 33 | 5, t, uint64_t(t - 1) * (uint64_t(5) << 33) + 4 * t};
        expect_cpus_bits(update, t);
    }
}

TEST(AdamW, OfShardsIsThatOfTheWhole) {
    const Shard before(6528);
    const Update whole = {6528, 2500, Update().step, 0.37f, {9, 2, 4096}};
    const Shard expected = updated_on_device(before, whole);
    Shard parts = before;
    for (const auto& [first, end] :
         {std::pair<long, long>(0, 128), {128, 2304}, {2304, 2432}, {2432, 6528}}) {
        Update part = whole;
        part.count = end - first;
        part.decayed = std::clamp(whole.decayed - first, 0L, part.count);
        part.rounding.first += uint64_t(first);
        parts = updated_on_device(parts, part, first);
    }
    parts.expect_same(expected);
}

TEST(AdamW, DoesNothingWhereTheScaleIsNotFinite) {
    const Shard before(256);
    for (float scale : {NAN, INFINITY, -INFINITY}) {
        Update update = {256, 100};
        update.grad_scale = scale;
        updated_on_device(before, update).expect_same(before);
    }
    updated_on_device(before, {0, 0}).expect_same(before);
}

TEST(AdamW, RefusesWhatItCannotLoadInPacksOrDrawsNoBitsFor) {
    const Shard before(256);
    EXPECT_THROW(updated_on_device(before, {130, 0}), std::invalid_argument);
    EXPECT_THROW(updated_on_device(before, {128, 0}, 1), std::invalid_argument);
    Update update = {128, 0};
    update.rounding.first = 2;
    EXPECT_THROW(updated_on_device(before, update), std::invalid_argument);
}

// An array that alone is not aligned, each in turn.
TEST(AdamW, RefusesAnyArrayThatIsNotAligned) {
    cuda::Stream stream;
    DeviceArray<float> arrays(Floats(64, 1.0f)), scale(Floats{1.0f});
    DeviceArray<floatX> params(64);
    for (int wrong = 0; wrong < 5; wrong++) {
        auto array = [&](int i) { return arrays + 8 * i + (i == wrong ? 1 : 0); };
        EXPECT_THROW(cuda::adamw_update(params + (wrong == 4 ? 1 : 0), array(0), array(1), array(2), array(3),
                                        8, 0, Update().step, scale, {}, stream),
                     std::invalid_argument)
            << wrong;
    }
}

// Masters that do not move, each so far above 1 that its random bits just carry it to the next bf16, or just
// do not. They are those that dev/reference/reference.py draws: random_bits(42, 4, [10, 11], 3).
TEST(AdamW, RoundsWithTheRandomBitsOfSeedStepAndPlaceInTheModel) {
    const int random[] = {0x1c81, 0x3221, 0xf91a, 0xab70, 0xc398, 0x81b0, 0xf613, 0x6c53,
                          0xfb05, 0xa98e, 0xcca9, 0x375f, 0xfe11, 0x295f, 0x276c, 0x58e4};
    for (int missing : {0, 1}) {
        Shard still(16);
        for (size_t i = 0; i < 16; i++) {
            still.master[i] = 1.0f + float(0x10000 - random[i] - missing) * 0x1p-23f;
            still.m[i] = still.v[i] = still.grad[i] = 0.0f;
        }
        Update update = {16, 0};
        update.rounding = {42, 3, 80};
        const Floats rounded(16, missing ? 1.0f : 1.0f + 0x1p-7f);
        EXPECT_EQ(to_floats(updated_on_device(still, update).params),
                  sizeof(floatX) == 2 ? rounded : still.master);
    }
}

// Masters that do not move: of each, `draws` roundings.   returns params - master in bf16's spacing, (draws,
// 8): of the values of one pack
std::vector<double> rounding_errors(float master, long draws) {
    Shard still(size_t(draws * 8));
    still.master.assign(still.master.size(), master);
    for (Floats* values : {&still.m, &still.v, &still.grad}) { values->assign(values->size(), 0.0f); }
    const Shard after = updated_on_device(still, {draws * 8, 0});
    EXPECT_EQ(after.master, still.master);
    std::vector<double> errors;
    for (floatX value : after.params) { errors.push_back((double(float(value)) - double(master)) * 0x1p7); }
    return errors;
}

// Up with probability f and down with 1 - f: the standard deviation is sqrt(f (1 - f)).
TEST(AdamW, RoundingIsUnbiasedForEachValueOfAPack) {
    const long draws = 2048;
    for (double f : {0.0, 0.0625, 0.3125, 0.5, 0.875}) {
        const std::vector<double> errors = rounding_errors(float(1 + f * 0x1p-7), draws);
        for (size_t j = 0; j < 8; j++) {
            double sum = 0;
            for (size_t i = j; i < errors.size(); i += 8) {
                if (sizeof(floatX) == 2) {
                    EXPECT_TRUE(errors[i] == -f || errors[i] == 1 - f) << errors[i];
                } else {
                    EXPECT_EQ(errors[i], 0.0);
                }
                sum += errors[i];
            }
            EXPECT_LE(std::abs(sum / draws), 4 * std::sqrt(f * (1 - f) / draws)) << f << ", value " << j;
        }
    }
}

}  // namespace
