// Outliers: llmc/outlier.h for the loss and the gradient norm of a step.
#pragma once
#include <cmath>

#include "llmc/outlier.h"
#include "llmc/stream.h"

namespace cpu {

// Enters *loss and *norm into the window, and sets *loss_zscore and *norm_zscore. If one is above its limit,
// *clip_scale becomes NaN, and the optimizers leave everything as it is. Call it after clip_scale.
inline void skip_outliers(OutlierWindow* window, float* loss_zscore, float* norm_zscore, float* clip_scale,
                          const float* loss, const float* norm, OutlierLimits limits, Stream&) {
    *loss_zscore = enter_value(window->losses, *loss);
    *norm_zscore = enter_value(window->norms, *norm);
    if (is_outlier(*loss_zscore, limits.loss_zscore) || is_outlier(*norm_zscore, limits.norm_zscore)) {
        *clip_scale = NAN;
    }
}

}  // namespace cpu
