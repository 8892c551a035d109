// Outliers: the distance of a step's loss and gradient norm from those of the last 128 steps, in standard
// deviations,
//
//     z = (x - mean) / deviation     mean and deviation (over n, not n - 1) of the last 128 values, x among
//                                    them
//
// which is llm.c's z-score (its llmc/outlier_detector.h), so that llm.c's limits mean the same here. x enters
// the window before it is scored, whether or not its step is skipped, and its score is NaN as long as fewer
// than 128 values came before it. Since x is in the window, z is at most sqrt(127) = 11.27: a higher limit
// skips nothing. A value that is not finite never enters and has no score; with such a norm no update is
// made anyway. Mean and deviation are summed anew each time, in double: nothing drifts, and a large mean
// hides no small deviation.
#pragma once
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "llmc/host_device.h"

const int outlier_window_size = 128;

// The last values of a series; all bytes zero: none yet.
struct SeriesWindow {
    float values[outlier_window_size];
    uint64_t entered;  // so far. Value i lies at i % outlier_window_size: in range even if corrupted
};

// The windows of a worker, on the device, the same on all its ranks. A checkpoint's section "outliers" holds
// their bytes.
struct OutlierWindow {
    SeriesWindow losses, norms;
};
static_assert(std::is_trivially_copyable_v<OutlierWindow>);
static_assert(sizeof(OutlierWindow) == 2 * (outlier_window_size * sizeof(float) + sizeof(uint64_t)),
              "no padding: all bytes are written to files");

// Scores above which a step is skipped. 0: none is.
struct OutlierLimits {
    float loss_zscore = 0, norm_zscore = 0;
};

// The score of a value in the window; 0 if all values are equal. The same bits on CPU and GPU: sums are
// formed in the window's order, the only product that a compiler could fuse with a sum is written as fma, and
// on both division and square root round to nearest in double.
HD inline float zscore(const SeriesWindow& window, float value) {
    const int count = window.entered < outlier_window_size ? int(window.entered) : outlier_window_size;
    double sum = 0, squares = 0;
    for (int i = 0; i < count; i++) { sum += double(window.values[i]); }
    const double mean = sum / count;
    for (int i = 0; i < count; i++) {
        const double distance = double(window.values[i]) - mean;
        squares = fma(distance, distance, squares);
    }
    const double deviation = sqrt(squares / count);
    return deviation > 0 ? float((double(value) - mean) / deviation) : 0.0f;
}

// Enters the next value of the series, and returns its score.
HD inline float enter_value(SeriesWindow& window, float value) {
    if (!std::isfinite(value)) { return NAN; }
    const bool was_full = window.entered >= outlier_window_size;
    window.values[window.entered % outlier_window_size] = value;
    window.entered++;
    return was_full ? zscore(window, value) : NAN;
}

// The largest possible score, sqrt(n - 1): that of one value among n - 1 equal ones.
constexpr double largest_zscore = 11.269427669584644;

// A value without a score (NaN) is not an outlier.
HD inline bool is_outlier(float zscore, float limit) { return limit > 0 && zscore > limit; }

struct Scalars {  // a step's results on the device: the optimizers read them there, the host gets a copy
    float loss, norm_squared, stop;  // summed over the ranks; stop: number of ranks with a request to stop
    float norm, clip_scale;          // clip_scale: NaN if the update is skipped
    float loss_zscore, norm_zscore;

    bool is_skipped() const { return !std::isfinite(clip_scale); }
};
const size_t summed_scalars = 3;
static_assert(offsetof(Scalars, norm) == summed_scalars * sizeof(float), "they are summed in one call");
