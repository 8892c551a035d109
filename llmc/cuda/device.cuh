// The seam between kernels and the machine. Kernels are compiled by nvcc for a GPU, or by an ordinary C++
// compiler for the emulator (dev/emulator/), and this is the only file that knows which.
//
// It has launches, shared memory, accesses of 16 bytes, the PTX instructions in use (each with its emulation)
// and reductions. A kernel uses these and CUDA's own barriers, shuffles with explicit masks and intrinsics.
// Barriers and warp operations stand in uniform control flow, and no thread returns before one. The last
// parameter `site` of a function is for the emulator's messages.
#pragma once
#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#else
#include "dev/emulator/tensor_cores.h"
#endif
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <stdexcept>
#include <type_traits>
#ifdef __CUDACC__
#include <map>
#include <mutex>
#include <utility>
#endif

#include "llmc/error.h"
#include "llmc/host_device.h"

// ---- launches

inline void cudaCheck(cudaError_t error, Site site = Site::here()) {
    if (error == cudaSuccess) { return; }
    throw std::runtime_error(format("%s:%d: CUDA: %s", site.file, site.line, cudaGetErrorString(error)));
}

// Whether the status is this error, which is then cleared: else the next caller of cudaGetLastError would get
// it. Throws for any other error.
inline bool failed_with(cudaError_t error, cudaError_t status, Site site = Site::here()) {
    if (status == error) { cudaGetLastError(); }
    if (status != error) { cudaCheck(status, site); }
    return status == error;
}

// The shape of a launch: Grid{blocks, threads of a block, bytes of dynamic shared memory, stream}.
struct Grid {
    Grid(dim3 blocks, dim3 threads, size_t shared_bytes = 0, cudaStream_t stream = nullptr,
         Site site = Site::here())
        : blocks(blocks), threads(threads), shared_bytes(shared_bytes), stream(stream), site(site) {}
    dim3 blocks, threads;
    size_t shared_bytes;
    cudaStream_t stream;
    Site site;
};

// The arguments get the kernel's parameter types, whatever types the caller passes.
template <class T>
struct Parameter {
    using type = T;
};

#ifdef __CUDACC__
// A kernel that takes more than 48 KiB of shared memory must ask for it, once per device.
inline void allow_shared_memory(const void* kernel, const Grid& grid) {
    static std::mutex mutex;
    static std::map<std::pair<const void*, int>, size_t> allowed;
    int device = 0;
    cudaCheck(cudaGetDevice(&device), grid.site);
    const std::lock_guard<std::mutex> lock(mutex);
    size_t& bytes = allowed[{kernel, device}];
    if (grid.shared_bytes <= bytes) { return; }
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   int(grid.shared_bytes)),
              grid.site);
    bytes = grid.shared_bytes;
}
#endif

// launch(kernel, Grid{...}, arguments...). Throws if the launch itself fails; with the emulator also if the
// kernel makes a mistake.
template <class... P>
void launch(void (*kernel)(P...), const Grid& grid, typename Parameter<P>::type... arguments) {
#ifdef __CUDACC__
    const size_t without_asking = 40 * 1024;  // static shared memory, at most 8 KiB, is part of the 48
    if (grid.shared_bytes > without_asking) {
        allow_shared_memory(reinterpret_cast<const void*>(kernel), grid);
    }
    // This returns the launch's own status. After <<< >>>, cudaGetLastError may report an older call's error.
    void* pointers[] = {static_cast<void*>(&arguments)..., nullptr};
    cudaCheck(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid.blocks, grid.threads, pointers,
                               grid.shared_bytes, grid.stream),
              grid.site);
#else
    emulator::launch({reinterpret_cast<const void*>(kernel), grid.blocks, grid.threads, grid.shared_bytes,
                      grid.stream, grid.site},
                     [=] { kernel(arguments...); });
    cudaCheck(cudaGetLastError(), grid.site);  // stricter: an older call must not have left an error, either
#endif
}

// Blocks of `threads` threads for `count` threads' work.
inline unsigned blocks_for(long count, long threads) { return unsigned((count + threads - 1) / threads); }

// Throws where a launcher's condition does not hold: its kernel would fail, or compute wrong numbers.
inline void require(bool condition, Site site = Site::here()) {
    if (condition) { return; }
    throw std::invalid_argument(
        format("%s:%d: a kernel does not take these sizes or arrays", site.file, site.line));
}

// Whether kernels can move arrays in units of that many bytes.
inline bool are_aligned(std::initializer_list<const void*> arrays, size_t bytes = 16) {
    for (const void* array : arrays) {
        if (reinterpret_cast<uintptr_t>(array) % bytes != 0) { return false; }
    }
    return true;
}

// ---- shared memory
//
// SHARED(float[4][32], partial): a variable, 16-byte aligned.
// DYNAMIC_SHARED(memory): unsigned char* to the launch's dynamic shared memory, 128-byte aligned.

#ifdef __CUDACC__
#define SHARED(Type, name)           \
    using name##_shared_type = Type; \
    __shared__ alignas(16) name##_shared_type name
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#endif

// ---- 16 bytes of global or shared memory in one instruction, or 8; aligned to as many
//
// The lanes of a warp have neighbouring packs, so that each instruction moves whole 32-byte sectors. In a
// kernel with arrays of floats and of bf16, a thread has four of each: Pack<float> and Pack<bf16, 4>.

template <class T, int count = 16 / int(sizeof(T))>
struct alignas(count * sizeof(T)) Pack {
    static constexpr int size = count;
    T values[size];
    __device__ T& operator[](int i) { return values[i]; }
    __device__ const T& operator[](int i) const { return values[i]; }
};

// The type that one instruction moves for a pack.
template <class P>
using PackBits = std::conditional_t<sizeof(P) == 16, int4, int2>;

template <class T, int count = Pack<T>::size>
__device__ inline Pack<T, count> load_pack(const T* p, [[maybe_unused]] Site site = Site::here()) {
    using Bits = PackBits<Pack<T, count>>;
    static_assert(sizeof(Bits) == sizeof(Pack<T, count>), "16 bytes or 8");
#ifndef __CUDACC__
    emulator::check_aligned(p, sizeof(Bits), site);
#endif
    const Bits bits = *reinterpret_cast<const Bits*>(p);
    Pack<T, count> pack;
    memcpy(&pack, &bits, sizeof bits);
    return pack;
}

template <class T, int count>
__device__ inline void store_pack(T* p, const Pack<T, count>& pack,
                                  [[maybe_unused]] Site site = Site::here()) {
    using Bits = PackBits<Pack<T, count>>;
    static_assert(sizeof(Bits) == sizeof pack, "16 bytes or 8");
#ifndef __CUDACC__
    emulator::check_aligned(p, sizeof(Bits), site);
#endif
    Bits bits;
    memcpy(&bits, &pack, sizeof bits);
    *reinterpret_cast<Bits*>(p) = bits;
}

// ---- asynchronous copies from global to shared memory (PTX: cp.async; sm_80 and later)
//
// The copies of a thread since its last commit form a group. After copy_async_wait<N>() all its groups but
// the newest N have arrived; other threads see them after the next barrier.

// Copies 16 bytes; both addresses are 16-byte aligned. If not `valid`, writes zeros and does not read
// `global`.
__device__ inline void copy_async_16(void* shared, const void* global, bool valid = true,
                                     [[maybe_unused]] Site site = Site::here()) {
#ifdef __CUDACC__
    const unsigned to = unsigned(__cvta_generic_to_shared(shared));
    const int source_bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(source_bytes)
                 : "memory");
#else
    emulator::copy_async_16(shared, global, valid, site);
#endif
}

__device__ inline void copy_async_commit() {
#ifdef __CUDACC__
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    emulator::copy_async_commit();
#endif
}

template <int groups_in_flight>
__device__ inline void copy_async_wait() {
#ifdef __CUDACC__
    asm volatile("cp.async.wait_group %0;" ::"n"(groups_in_flight) : "memory");
#else
    emulator::copy_async_wait(groups_in_flight);
#endif
}

// ---- tensor cores (PTX: ldmatrix, mma.sync), by a whole warp

// Loads four 8x8 matrices of 16-bit values from shared memory. PTX ISA, "ldmatrix": lane i gives the address
// of row i % 8 of matrix i / 8 (8 values, 16-byte aligned); register m of lane t gets elements 2 * (t % 4)
// and, in its upper half, 2 * (t % 4) + 1 of row t / 4 of matrix m. `transposed`: it gets elements t / 4 of
// rows 2 * (t % 4) and 2 * (t % 4) + 1.
template <bool transposed = false>
__device__ inline void load_matrix_x4(uint32_t (&r)[4], const void* row,
                                      [[maybe_unused]] Site site = Site::here()) {
#ifdef __CUDACC__
    const unsigned from = unsigned(__cvta_generic_to_shared(row));
    if (transposed) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
    }
#else
    emulator::load_matrix_x4<transposed>(r, row, site);
#endif
}

// C += A B.   C: (16, 8) float   A: (16, 16) bf16   B: (16, 8) bf16
// PTX ISA, "mma.m16n8k16": with g = lane / 4, p = 2 * (lane % 4), two bf16 in a register, low half first,
//
//     a[0]: A[g][p, p + 1]           a[1]: A[g + 8][p, p + 1]
//     a[2]: A[g][p + 8, p + 9]       a[3]: A[g + 8][p + 8, p + 9]
//     b0:   B[p, p + 1][g]           b1:   B[p + 8, p + 9][g]
//     c[0], c[1]: C[g][p, p + 1]     c[2], c[3]: C[g + 8][p, p + 1]
//
// It is not documented in which order a tensor core sums the 16 products, nor how it rounds. The emulator
// sums them in ascending order and rounds each sum to float.
__device__ inline void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                         [[maybe_unused]] Site site = Site::here()) {
#ifdef __CUDACC__
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    emulator::MmaOperand own{c, a, {b0, b1}};
    emulator::warp_operation("mma.m16n8k16", ~0u, &own, emulator::mma_m16n8k16, site);
#endif
}

// ---- arithmetic in one instruction

// 2^x (PTX: ex2.approx.ftz). The PTX ISA promises a relative error of at most 2^-22; denormal arguments and
// results become 0. The emulator's result is exact to float.
__device__ inline float exp2_approximate(float x) {
    float y;
#ifdef __CUDACC__
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
#else
    y = x < -126.0f ? 0.0f : exp2f(x);
#endif
    return y;
}

// ---- reductions: all threads get the result; the order of the sum is fixed

constexpr unsigned full_warp = 0xFFFFFFFFu;

__device__ inline void sync_threads([[maybe_unused]] Site site) {
#ifdef __CUDACC__
    __syncthreads();
#else
    __syncthreads(site);
#endif
}

template <class T>
__device__ inline T shuffle_xor(T value, int bits, [[maybe_unused]] Site site) {
#ifdef __CUDACC__
    return __shfl_xor_sync(full_warp, value, bits);
#else
    return __shfl_xor_sync(full_warp, value, bits, 32, site);
#endif
}

struct Sum {
    static constexpr float identity = 0.0f;
    template <class T>
    __device__ T operator()(T a, T b) const {
        return a + b;
    }
};

// Ignores a NaN if the other value is a number.
struct Maximum {
    static constexpr float identity = -INFINITY;
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Called by a whole warp. Reduces each group of `lanes` successive lanes.
template <int lanes = 32, class T, class Operation>
__device__ inline T warp_reduce(T value, Operation operation, Site site = Site::here()) {
    for (int bits = lanes / 2; bits > 0; bits /= 2) {
        value = operation(value, shuffle_xor(value, bits, site));
    }
    return value;
}

// By a whole block, a multiple of 32 threads in one dimension. Two barriers.
template <class T, class Operation>
__device__ inline T block_reduce(T value, Operation operation, Site site = Site::here()) {
    SHARED(T[32], partial);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    value = warp_reduce(value, operation, site);
    if (lane == 0) { partial[warp] = value; }
    sync_threads(site);
    value = warp_reduce(lane < warps ? partial[lane] : T(Operation::identity), operation, site);
    sync_threads(site);  // the next reduction writes `partial` again
    return value;
}

__device__ inline float warp_sum(float value, Site site = Site::here()) {
    return warp_reduce(value, Sum(), site);
}
template <class T>
__device__ inline T block_sum(T value, Site site = Site::here()) {
    return block_reduce(value, Sum(), site);
}
__device__ inline float block_max(float value, Site site = Site::here()) {
    return block_reduce(value, Maximum(), site);
}
