// Clipping gradients by their norm (Pascanu et al., arXiv 1211.5063): the factor that all of them are
// multiplied with, so that their norm is at most `clip`.
#pragma once
#include <cmath>

#include "llmc/host_device.h"

// 1 for clip 0; NaN where norm is not finite: AdamW then leaves everything as it is.
HD inline float clip_factor(float norm, float clip) {
    if (!std::isfinite(norm)) { return NAN; }
    return clip > 0 && norm > clip ? clip / norm : 1.0f;
}
