// Copies, casts and the few scalars of a step (loss, gradient norm, clip scale), which stay on the device:
// copy_to_host makes the host wait, and so may a copy from or to memory that is not a HostBuffer's. All else
// is asynchronous: what is copied must not change before the stream has completed the copy.
#pragma once
#include "llmc/cuda/stream.cuh"
#include "llmc/optimizers.h"

namespace cuda {

// ---- shared by elementwise kernels

// Loads `count` values at `p` as floats, and stores them, in packs of 16 bytes, or of 8 if there are no more.
template <int count, class T>
__device__ inline void load_packs(float (&values)[count], const T* p) {
    constexpr int size = count < Pack<T>::size ? count : Pack<T>::size;
    for (int i = 0; i < count; i += size) {
        const Pack<T, size> pack = load_pack<T, size>(p + i);
        for (int j = 0; j < size; j++) { values[i + j] = float(pack[j]); }
    }
}

template <int count, class T>
__device__ inline void store_packs(T* p, const float (&values)[count]) {
    constexpr int size = count < Pack<T>::size ? count : Pack<T>::size;
    for (int i = 0; i < count; i += size) {
        Pack<T, size> pack;
        for (int j = 0; j < size; j++) { pack[j] = T(values[i + j]); }
        store_pack(p + i, pack);
    }
}

// ---- kernels

// One thread converts four values, the last thread the rest. Bound by memory: sizeof(Out) + sizeof(In) bytes
// a value.
template <class Out, class In>
__global__ void __launch_bounds__(256) cast_kernel(Out* out, const In* inp, long n) {
    const long i = (long(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
    if (i + 4 <= n) {
        float values[4];
        load_packs(values, inp + i);
        store_packs(out + i, values);
    } else {
        for (long j = i; j < n; j++) { out[j] = Out(float(inp[j])); }
    }
}

constexpr int sum_threads = 512, sum_each = 8;  // values that a thread loads at once

// One block. It sums in double, as the CPU does, so that the order hardly ever shows in the float. There are
// only as many values as a micro-step has tokens: bound by the latency of a few loads.
__global__ void __launch_bounds__(sum_threads)
    add_scaled_sum_kernel(float* out, const float* values, long n, float scale) {
    double sum = 0;
    for (long first = threadIdx.x; first < n; first += sum_threads * sum_each) {
        float some[sum_each];
        for (int k = 0; k < sum_each; k++) {
            const long i = first + k * sum_threads;
            some[k] = i < n ? values[i] : 0.0f;
        }
        for (float value : some) { sum += value; }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) { *out += float(sum * scale); }
}

// One thread: bound by the launch.
__global__ void clip_scale_kernel(float* norm, float* scale, const float* norm_squared, float clip) {
    *norm = sqrtf(*norm_squared);
    *scale = clip_factor(*norm, clip);
}

// ---- launchers

// inp: in host memory
template <class T>
inline void copy_to_device(T* out, const T* inp, long n, Stream& stream) {
    cudaCheck(cudaMemcpyAsync(out, inp, size_t(n) * sizeof(T), cudaMemcpyHostToDevice, stream));
}

// The host has the values once the stream has completed this.   out: in a HostBuffer
template <class T>
inline void copy_to_host_later(T* out, const T* inp, long n, Stream& stream) {
    cudaCheck(cudaMemcpyAsync(out, inp, size_t(n) * sizeof(T), cudaMemcpyDeviceToHost, stream));
}

// Copies `count` groups of `each` values that lie `stride` bytes apart into memory of the host, which must
// stay alive until the stream has completed the copies. If it is not pinned, the host may wait here. This and
// copy_values() go through enqueue(), and so work on hosted streams, too.   out: (count, each)
template <class T>
inline void read_groups(T* out, const uint8_t* from, size_t stride, int count, int each, Stream& stream) {
    stream.enqueue([=](cudaStream_t on) {
        for (int i = 0; i < count; i++) {
            cudaCheck(cudaMemcpyAsync(out + i * each, from + size_t(i) * stride, size_t(each) * sizeof(T),
                                      cudaMemcpyDeviceToHost, on));
        }
    });
}

// out = inp.   out, inp: (count), on the device
inline void copy_values(float* out, const float* inp, long count, Stream& stream) {
    stream.enqueue([=](cudaStream_t on) {
        cudaCheck(cudaMemcpyAsync(out, inp, size_t(count) * sizeof(float), cudaMemcpyDeviceToDevice, on));
    });
}

// Returns once the host has the values.
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
    require(are_aligned({out, inp}));
    if (n == 0) { return; }
    launch(cast_kernel<Out, In>, Grid{blocks_for((n + 3) / 4, 256), 256, 0, stream}, out, inp, n);
}

// *out += scale * (values[0] + ... + values[n - 1]), summed in a fixed order in double.
inline void add_scaled_sum(float* out, const float* values, long n, float scale, Stream& stream) {
    launch(add_scaled_sum_kernel, Grid{1, sum_threads, 0, stream}, out, values, n, scale);
}

// *norm = sqrt(*norm_squared);  *scale = clip_factor(*norm, clip).
inline void clip_scale(float* norm, float* scale, const float* norm_squared, float clip, Stream& stream) {
    launch(clip_scale_kernel, Grid{1, 1, 0, stream}, norm, scale, norm_squared, clip);
}

}  // namespace cuda
