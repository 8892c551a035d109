// Copies, casts and the few scalars of a step (loss, gradient norm, clip scale). Nothing here makes the host
// wait but copy_to_host, so that on a GPU they stay on the device. On the CPU all run at once, for the main
// stream, but the two copies that do not wait: they are for every stream.
#pragma once
#include <cmath>
#include <cstring>

#include "llmc/adamw.h"
#include "llmc/floatx.h"
#include "llmc/stream.h"

namespace cpu {

template <class T>
inline void copy_to_device(T* out, const T* inp, long n, Stream& stream) {
    stream.enqueue([=] { memcpy(out, inp, size_t(n) * sizeof(T)); });
}

// The host has the values when the stream has come past this. out: of the host, on a GPU a HostBuffer
template <class T>
inline void copy_to_host_later(T* out, const T* inp, long n, Stream& stream) {
    stream.enqueue([=] { memcpy(out, inp, size_t(n) * sizeof(T)); });
}

// Returns when the host has the values.
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
