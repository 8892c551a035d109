// GELU in the tanh form that GPT-2 was trained with (Hendrycks & Gimpel, arXiv 1606.08415, section 2), and
// its derivative. As 1 + tanh(u) = 2 sigmoid(2 u), it is
//
//     gelu(x)  = x s,                       s = sigmoid(2 k (x + 0.044715 x^3)),   k = sqrt(2 / pi)
//     gelu'(x) = s + x s (1 - s) 2 k (1 + 3 * 0.044715 x^2)
//
// which needs one exponential and keeps its relative precision for negative x, where 1 + tanh cancels.
#pragma once
#include "llmc/arithmetic.h"

const float gelu_2k = 1.5957691216f;          // 2 sqrt(2 / pi)
const float gelu_2k_cubic = 0.0713548163f;    // 2 sqrt(2 / pi) * 0.044715

HD_INLINE float gelu(float x) { return x * sigmoid(x * (gelu_2k + gelu_2k_cubic * (x * x))); }

HD_INLINE float gelu_derivative(float x) {
    const float square = x * x;
    const float s = sigmoid(x * (gelu_2k + gelu_2k_cubic * square));
    return s + x * s * (1.0f - s) * (gelu_2k + 3.0f * gelu_2k_cubic * square);
}
