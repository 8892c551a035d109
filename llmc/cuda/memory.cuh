// Copies, casts and the few scalars of a step (loss, gradient norm, clip scale), which stay on the device:
// only copy_to_host waits for it. Copies are asynchronous where the host's side is a HostBuffer; from other
// memory they may wait, and what they read must not change before the stream has come past them.
#pragma once
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>

#include "llmc/cuda/stream.cuh"

namespace cuda {

// ---- what kernels of elementwise work share

// `count` values at `p`, 16-byte aligned, as floats and back, 16 bytes at a time.
template <int count, class T>
__device__ inline void load_packs(float (&values)[count], const T* p) {
    for (int i = 0; i < count; i += Pack<T>::size) {
        const Pack<T> pack = load_pack(p + i);
        for (int j = 0; j < Pack<T>::size; j++) { values[i + j] = float(pack[j]); }
    }
}

template <int count, class T>
__device__ inline void store_packs(T* p, const float (&values)[count]) {
    for (int i = 0; i < count; i += Pack<T>::size) {
        Pack<T> pack;
        for (int j = 0; j < Pack<T>::size; j++) { pack[j] = T(values[i + j]); }
        store_pack(p + i, pack);
    }
}

// Blocks of `threads` threads for `count` threads' work.
inline unsigned blocks_for(long count, int threads) { return unsigned((count + threads - 1) / threads); }

// What kernels move 16 bytes at a time begins at a multiple of them.
inline void require_aligned(const char* function, std::initializer_list<const void*> arrays) {
    for (const void* array : arrays) {
        if (reinterpret_cast<uintptr_t>(array) % 16 != 0) {
            throw std::invalid_argument(format("%s: an array is not 16-byte aligned", function));
        }
    }
}

// ---- kernels

// One thread converts 8 values, the last one what is left. Bound by memory: sizeof(Out) + sizeof(In) bytes a
// value.
template <class Out, class In>
__global__ void __launch_bounds__(256) cast_kernel(Out* out, const In* inp, long n) {
    const long i = (long(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
    if (i + 8 <= n) {
        float values[8];
        load_packs(values, inp + i);
        store_packs(out + i, values);
    } else {
        for (long j = i; j < n; j++) { out[j] = Out(float(inp[j])); }
    }
}

// One block. In double, as on the CPU, so that the order of the sum hardly ever shows in the float. There are
// as many values as a step has tokens: bound by the latency of a few loads.
__global__ void __launch_bounds__(512)
    add_scaled_sum_kernel(float* out, const float* values, long n, float scale) {
    double sum = 0;
    for (long i = threadIdx.x; i < n; i += blockDim.x) { sum += values[i]; }
    sum = block_sum(sum);
    if (threadIdx.x == 0) { *out += float(sum * scale); }
}

// One thread: bound by the launch.
__global__ void clip_scale_kernel(float* norm, float* scale, const float* norm_squared, float clip) {
    *norm = sqrtf(*norm_squared);
    *scale = !std::isfinite(*norm) ? NAN : clip > 0 && *norm > clip ? clip / *norm : 1.0f;
}

// ---- launchers

// inp: of the host
template <class T>
inline void copy_to_device(T* out, const T* inp, long n, Stream& stream) {
    cudaCheck(cudaMemcpyAsync(out, inp, size_t(n) * sizeof(T), cudaMemcpyHostToDevice, stream));
}

// The host has the values when the stream has come past this. out: of a HostBuffer
template <class T>
inline void copy_to_host_later(T* out, const T* inp, long n, Stream& stream) {
    cudaCheck(cudaMemcpyAsync(out, inp, size_t(n) * sizeof(T), cudaMemcpyDeviceToHost, stream));
}

// Returns when the host has the values.
template <class T>
inline void copy_to_host(T* out, const T* inp, long n, Stream& stream) {
    copy_to_host_later(out, inp, n, stream);
    stream.synchronize();
}

template <class T>
inline void set_zero(T* out, long n, Stream& stream) {
    cudaCheck(cudaMemsetAsync(out, 0, size_t(n) * sizeof(T), stream));
}

// out[i] = inp[i], rounded to nearest.   out, inp: (n), float or bf16, 16-byte aligned
template <class Out, class In>
inline void cast(Out* out, const In* inp, long n, Stream& stream) {
    require_aligned("cast", {out, inp});
    if (n == 0) { return; }
    launch(cast_kernel<Out, In>, Grid{blocks_for((n + 7) / 8, 256), 256, 0, stream}, out, inp, n);
}

// *out += scale * (values[0] + ... + values[n - 1]), summed in a fixed order in double.
inline void add_scaled_sum(float* out, const float* values, long n, float scale, Stream& stream) {
    launch(add_scaled_sum_kernel, Grid{1, 512, 0, stream}, out, values, n, scale);
}

// *norm = sqrt(*norm_squared);  *scale = min(1, clip / norm), or 1 for clip 0; NaN where norm is not finite.
inline void clip_scale(float* norm, float* scale, const float* norm_squared, float clip, Stream& stream) {
    launch(clip_scale_kernel, Grid{1, 1, 0, stream}, norm, scale, norm_squared, clip);
}

}  // namespace cuda
