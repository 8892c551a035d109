// Outliers of a run: how far a step's loss and gradient norm lie from those of the last 128 steps, in
// standard deviations,
//
//     z = (x - mean) / deviation     mean and deviation (over n, not n - 1) of the last 128 values, x among
//                                    them
//
// which is llm.c's z-score (its llmc/outlier_detector.h), so that its limits mean the same here: x enters the
// window before it is scored, whether or not its step is skipped, and has no score (NaN) while fewer than 128
// came before it. With x in the window z is at most sqrt(127) = 11.27: a limit above that skips nothing.
// What is not finite never enters, and has no score either; where the norm is not, AdamW does nothing anyway.
// Summed anew each time, mean first, in double: nothing drifts, and no large mean hides a small deviation.
#pragma once
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "llmc/host_device.h"

const int outlier_window_size = 128;

// The last values of a series; all bytes zero: none yet.
struct SeriesWindow {
    float values[outlier_window_size];
    uint64_t entered;  // so far; number i lies at i % outlier_window_size, so that no bytes lead outside
};

// A worker's, on the device, the same on all its ranks. In a checkpoint the section "outliers" is its bytes.
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

// Of a value that is in the window. 0 where all values are the same. The same bits on CPU and GPU: sums are
// in the window's order, the only product that a compiler could fuse with one is spelled fma, and division
// and root round to nearest in double on both.
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

// A value that is like no other has it: sqrt(n - 1) of n values.
constexpr double largest_zscore = 11.269427669584644;

// What has no score is none.
HD inline bool is_outlier(float zscore, float limit) { return limit > 0 && zscore > limit; }

struct Scalars {  // a step's results on the device: AdamW reads them there, the host receives a copy
    float loss, norm_squared, stop;  // summed over the ranks; stop: number of ranks with a request to stop
    float norm, clip_scale;          // clip_scale: NaN if the update is skipped
    float loss_zscore, norm_zscore;

    bool is_skipped() const { return !std::isfinite(clip_scale); }
};
const size_t summed_scalars = 3;
static_assert(offsetof(Scalars, norm) == summed_scalars * sizeof(float), "they are summed in one call");
