// Copies, casts and the few scalars of a step (loss, gradient norm, clip scale). Only copy_to_host makes the
// host wait. The functions above it take any stream; those below are for the main stream, which on the CPU
// runs everything at once.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "llmc/optimizers.h"
#include "llmc/stream.h"

namespace cpu {

template <class T>
inline void copy_to_device(T* out, const T* inp, long n, Stream& stream) {
    stream.enqueue([=] { memcpy(out, inp, size_t(n) * sizeof(T)); });
}

// The host has the values once the stream has completed this.   out: in host memory, on a GPU a HostBuffer
template <class T>
inline void copy_to_host_later(T* out, const T* inp, long n, Stream& stream) {
    stream.enqueue([=] { memcpy(out, inp, size_t(n) * sizeof(T)); });
}

// Copies `count` groups of `each` values that lie `stride` bytes apart into memory of the host.
// out: (count, each)
template <class T>
inline void read_groups(T* out, const uint8_t* from, size_t stride, int count, int each, Stream& stream) {
    stream.enqueue([=] {
        for (int i = 0; i < count; i++) {
            memcpy(out + i * each, from + size_t(i) * stride, size_t(each) * sizeof(T));
        }
    });
}

// out = inp.   out, inp: (count), on the device
inline void copy_values(float* out, const float* inp, long count, Stream& stream) {
    stream.enqueue([=] { memcpy(out, inp, size_t(count) * sizeof(float)); });
}

// Returns once the host has the values.
template <class T>
inline void copy_to_host(T* out, const T* inp, long n, Stream&) {
    memcpy(out, inp, size_t(n) * sizeof(T));
}

template <class T>
inline void set_zero(T* out, long n, Stream&) {
    memset(static_cast<void*>(out), 0, size_t(n) * sizeof(T));
}

// out[i] = inp[i].   out, inp: (n)
template <class Out, class In>
inline void cast(Out* out, const In* inp, long n, Stream&) {
    #pragma omp parallel for simd
    for (long i = 0; i < n; i++) { out[i] = Out(inp[i]); }
}

// *out += scale * (values[0] + ... + values[n - 1]), summed in that order in double.
inline void add_scaled_sum(float* out, const float* values, long n, float scale, Stream&) {
    double sum = 0;
    for (long i = 0; i < n; i++) { sum += values[i]; }
    *out += float(sum * scale);
}

// *norm = sqrt(*norm_squared);  *scale = clip_factor(*norm, clip).
inline void clip_scale(float* norm, float* scale, const float* norm_squared, float clip, Stream&) {
    *norm = sqrtf(*norm_squared);
    *scale = clip_factor(*norm, clip);
}

}  // namespace cpu
