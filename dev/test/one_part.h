// quantize() and dequantize_mean() of a fragment of n values in one part, without weights: for tests and
// benchmarks.
#pragma once
#include "dev/test/formats.h"
#include "streaming/quantize.h"

namespace cpu {
inline void quantize(uint8_t* payload, Format format, const Rounding& rounding, long n, long first,
                     const Source& source, long count, Stream& stream) {
    quantize(payload, payload_layout(format, n), rounding, first, source, count, stream);
}
inline void dequantize_mean(float* mean, const uint8_t* payloads, size_t stride, int workers, Format format,
                            long n, Stream& stream) {
    dequantize_mean(mean, payloads, stride, workers, payload_layout(format, n), nullptr, stream);
}
}  // namespace cpu

#ifdef USE_CUDA
namespace cuda {
inline void quantize(uint8_t* payload, Format format, const Rounding& rounding, long n, long first,
                     const Source& source, long count, Stream& stream) {
    quantize(payload, payload_layout(format, n), rounding, first, source, count, stream);
}
inline void dequantize_mean(float* mean, const uint8_t* payloads, size_t stride, int workers, Format format,
                            long n, Stream& stream) {
    dequantize_mean(mean, payloads, stride, workers, payload_layout(format, n), nullptr, stream);
}
}  // namespace cuda
#endif
