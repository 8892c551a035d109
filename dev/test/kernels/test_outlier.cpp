// Outliers on the device: the CPU's bits in scores, window and clip scale, in every order of the threads.
// Compiles with nvcc, too (-x cu).
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "dev/emulator/device_array.h"
#include "dev/test/kernels/values.h"
#include "llmc/cpu/adamw.h"
#include "llmc/cpu/outlier.h"
#include "llmc/cuda/adamw.cuh"
#include "llmc/cuda/outlier.cuh"

namespace {

// Two series, and for some of their values what else may come.
struct Series {
    Floats losses, norms;
};

Series made_up_series(size_t steps, uint64_t seed) {
    Series series{random_floats(steps, seed, 0.5f, 4.0f), random_floats(steps, seed + 1, 0.2f, 0.6f)};
    const float strange[] = {NAN, INFINITY, -INFINITY, 1e38f, 1e-45f, 0.0f, -1.0f, 60.0f, 60.0f};
    for (size_t i = 3; i + 2 < steps; i += 5) {
        series.losses[i] = strange[i % 9];
        series.norms[i + i % 3] = strange[i % 8];
    }
    return series;
}

// What comes of each step, and the window at the end.
struct Outcome {
    Floats loss_zscores, norm_zscores, clip_scales;
    std::vector<OutlierWindow> window = {OutlierWindow{}};
};

Outcome on_cpu(const Series& series, OutlierLimits limits) {
    cpu::Stream stream;
    Outcome all;
    for (size_t i = 0; i < series.losses.size(); i++) {
        float loss_zscore = 7, norm_zscore = 7, clip_scale = 0.5f;
        cpu::skip_outliers(all.window.data(), &loss_zscore, &norm_zscore, &clip_scale, &series.losses[i],
                           &series.norms[i], limits, stream);
        all.loss_zscores.push_back(loss_zscore);
        all.norm_zscores.push_back(norm_zscore);
        all.clip_scales.push_back(clip_scale);
    }
    return all;
}

// All steps are enqueued before the host looks at any.
Outcome on_device(const Series& series, OutlierLimits limits) {
    cuda::Stream stream;
    const size_t steps = series.losses.size();
    DeviceArray<float> losses(series.losses), norms(series.norms), loss_zscores(steps), norm_zscores(steps),
        clip_scales(Floats(steps, 0.5f));
    DeviceArray<OutlierWindow> window(1);
    cuda::set_zero(static_cast<OutlierWindow*>(window), 1, stream);
    for (size_t i = 0; i < steps; i++) {
        cuda::skip_outliers(window, loss_zscores + i, norm_zscores + i, clip_scales + i, losses + i,
                            norms + i, limits, stream);
    }
    stream.synchronize();
    return {loss_zscores.to_host(), norm_zscores.to_host(), clip_scales.to_host(), window.to_host()};
}

size_t skipped(const Floats& clip_scales) {
    size_t count = 0;
    for (float scale : clip_scales) { count += std::isnan(scale) ? 1 : 0; }
    return count;
}

TEST(Outlier, HasTheCpusBits) {
    for (const OutlierLimits limits : {OutlierLimits{}, {2, 0}, {0, 2}, {1.5f, 2.5f}}) {
        const Series series = made_up_series(300, 1);
        const Outcome expected = on_cpu(series, limits);
        const bool some = limits.loss_zscore > 0 || limits.norm_zscore > 0;
        EXPECT_EQ(skipped(expected.clip_scales) > 0, some);
        EXPECT_LT(skipped(expected.clip_scales), 100u);
        for_each_order(4, [&] {
            const Outcome outcome = on_device(series, limits);
            expect_same_bits(outcome.loss_zscores, expected.loss_zscores, "scores of losses");
            expect_same_bits(outcome.norm_zscores, expected.norm_zscores, "scores of norms");
            expect_same_bits(outcome.clip_scales, expected.clip_scales, "clip scales");
            EXPECT_EQ(memcmp(&outcome.window[0], &expected.window[0], sizeof(OutlierWindow)), 0);
        });
    }
}

// From the norm to AdamW without the host: a step in 140 of which the loss is an outlier changes nothing.
TEST(Outlier, SkipsTheUpdateOnTheDevice) {
    for_each_order(2, [] {
        cuda::Stream stream;
        const Floats start(64, 1.0f);
        DeviceArray<float> master(start), m(Floats(64)), v(Floats(64)), grad(start), squared(Floats{4.0f});
        DeviceArray<floatX> params(to_floatX(start));
        DeviceArray<float> loss(2), scalars(4);
        DeviceArray<OutlierWindow> window(1);
        cuda::set_zero(static_cast<OutlierWindow*>(window), 1, stream);
        Floats moved;
        for (int step = 1; step <= 140; step++) {
            const Floats losses = {step % 2 == 0 ? 3.0f : 3.1f, 9.0f};
            cuda::copy_to_device(static_cast<float*>(loss), losses.data(), 2, stream);
            float *norm = scalars, *scale = scalars + 1;
            cuda::clip_scale(norm, scale, squared, 1.0f, stream);
            cuda::skip_outliers(window, scalars + 2, scalars + 3, scale, loss + (step == 135 ? 1 : 0), norm,
                                {5, 5}, stream);
            const Floats before = master.to_host();
            cuda::adamw_update(params, master, m, v, grad, 64, 0, adamw(1e-2f, {0.9f, 0.95f, 1e-8f, 0}, step),
                               scale, {1, uint32_t(step), 0}, stream);
            stream.synchronize();
            EXPECT_EQ(master.to_host() == before, step == 135) << step;
        }
    });
}

}  // namespace
