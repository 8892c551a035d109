// Outliers: llmc/outlier.h for the loss and the gradient norm of a step. The host does not wait: it reads the
// scores later, with the step's other scalars. The bits are the CPU's.
#pragma once
#include "llmc/cuda/memory.cuh"
#include "llmc/outlier.h"

namespace cuda {

// Two threads: one for losses, one for norms. Bound by latency: 256 additions in double, one after the other,
// once a step.
__global__ void __launch_bounds__(2)
    skip_outliers_kernel(OutlierWindow* window, float* loss_zscore, float* norm_zscore, float* clip_scale,
                         const float* loss, const float* norm, OutlierLimits limits) {
    const bool is_loss = threadIdx.x == 0;
    const float score = enter_value(is_loss ? window->losses : window->norms, is_loss ? *loss : *norm);
    *(is_loss ? loss_zscore : norm_zscore) = score;
    const bool skips = __syncthreads_or(is_outlier(score, is_loss ? limits.loss_zscore : limits.norm_zscore));
    if (is_loss && skips) { *clip_scale = NAN; }
}

// Enters *loss and *norm into the window, and sets *loss_zscore and *norm_zscore. If one is above its limit,
// *clip_scale becomes NaN, and the optimizers leave everything as it is. Call it after clip_scale.
inline void skip_outliers(OutlierWindow* window, float* loss_zscore, float* norm_zscore, float* clip_scale,
                          const float* loss, const float* norm, OutlierLimits limits, Stream& stream) {
    launch(skip_outliers_kernel, Grid{1, 2, 0, stream}, window, loss_zscore, norm_zscore, clip_scale, loss,
           norm, limits);
}

}  // namespace cuda
