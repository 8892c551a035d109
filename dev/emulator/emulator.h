// CUDA's device language on a CPU, for an ordinary C++ compiler: llmc/cuda/device.cuh includes this if the
// compiler is not nvcc. Threads of a block run as fibers and meet in barriers and warp operations; a thread
// that waits in vain, or misuses one of them, ends the launch with an emulator::Error that names kernel,
// block, thread and line. README.md beside this file says what is found that way and what is not.
#pragma once
// The toolkit's own `extern const uint3 threadIdx` would clash with ours.
#define __DEVICE_LAUNCH_PARAMETERS_H__
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "llmc/host_device.h"

#define __launch_bounds__(...)
// The toolkit makes this nothing: each thread would silently have a variable of its own.
#undef __shared__
#define __shared__ write_SHARED_or_DYNAMIC_SHARED_instead

// Real variables, set at each switch from one thread to another, so that a debugger can test them.
extern __thread uint3 threadIdx, blockIdx;
extern __thread dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace emulator {

// A mistake in a kernel, or a launch that no device would take.
struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Settings {
    uint64_t seed = 1;  // of the order of blocks and threads; 0: ascending.  EMULATOR_SEED
    size_t shared_bytes_per_block = 99 * 1024;  // sm_86, sm_89: 99 KiB; sm_80: 163; sm_90, sm_100: 227
    // Streams are threads, else their work is done at once.  EMULATOR_ASYNCHRONOUS=1
    bool asynchronous = false;
    bool protect = true;  // if asynchronous, device memory is closed to the host.  EMULATOR_PROTECT=0
    bool no_default_stream = false;  // a call on the null stream is a mistake.  EMULATOR_NO_DEFAULT_STREAM=1
};
Settings& settings();

struct Launch {
    const void* kernel;
    dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
    Site site;
};

// Runs all blocks of a grid, one after another: on the calling thread, at once, or with asynchronous streams
// on the stream's thread. `body` is one thread's work. Throws Error if no device would accept the launch, and
// if a kernel that runs at once makes a mistake. What was written before the mistake was found stays written.
void launch(const Launch& launch, const std::function<void()>& body);

// Ends the launch with an Error about the running thread.
[[noreturn]] void fail(const std::string& what, Site site);
// The same about another lane of its warp, which waits in the same operation.
[[noreturn]] void fail_lane(int lane, const std::string& what);

int lane();

// Shared memory of the running block, NaN bits at first. `key`: one address for each variable.
void* shared_variable(const void* key, const char* name, size_t bytes, Site site);
void* dynamic_shared();
bool is_shared(const void* p, size_t bytes);

// Waits for all threads of the block, and returns how many of their predicates are true.
int block_barrier(const char* name, bool predicate, Site site);

// The operands of a warp operation by lane; null for lanes that are not in the mask.
using Operands = void* const (&)[32];

// Returns when all lanes of `mask` are here; the last to come has run `combine` on all operands.
// `orders_memory`: what a lane wrote before is visible to the others after.
void warp_operation(const char* name, unsigned mask, void* operand, void (*combine)(Operands), Site site,
                    bool orders_memory = false);

// cp.async: `shared` is NaN bits from now on, and is written as late as allowed, by copy_async_wait: 16 bytes
// from `global`, or zeros.
void copy_async_16(void* shared, const void* global, bool valid, Site site);
void copy_async_commit();
void copy_async_wait(int groups_in_flight);

inline void check_aligned(const void* p, size_t bytes, Site site) {
    if (reinterpret_cast<uintptr_t>(p) % bytes != 0) {
        fail("misaligned access: " + std::to_string(bytes) + " bytes at an address that is " +
                 std::to_string(reinterpret_cast<uintptr_t>(p) % bytes) + " bytes beyond a multiple of it",
             site);
    }
}

// Each lane gets the value of the lane that it names.
template <class T>
T shuffle(const char* name, unsigned mask, T value, int source, Site site) {
    struct Operand {
        T value, result;
        int source;
    } own{value, value, source};
    warp_operation(
        name, mask, &own,
        [](Operands lanes) {
            for (int lane = 0; lane < 32; lane++) {
                if (!lanes[lane]) { continue; }
                Operand& operand = *static_cast<Operand*>(lanes[lane]);
                const Operand* from = static_cast<const Operand*>(lanes[operand.source]);
                if (!from) {
                    fail_lane(lane, "wrong mask: the value comes from lane " +
                                        std::to_string(operand.source) + ", which is not in the mask");
                }
                operand.result = from->value;
            }
        },
        site);
    return own.result;
}

// Each lane gets the combination of all lanes' values, formed in ascending order of lanes.
template <class T, class Combine>
T warp_reduce(const char* name, unsigned mask, T value, Combine, Site site) {
    warp_operation(
        name, mask, &value,
        [](Operands lanes) {
            T total{};
            bool first = true;
            for (void* operand : lanes) {
                if (!operand) { continue; }
                total = first ? *static_cast<T*>(operand) : Combine{}(total, *static_cast<T*>(operand));
                first = false;
            }
            for (void* operand : lanes) {
                if (operand) { *static_cast<T*>(operand) = total; }
            }
        },
        site);
    return value;
}

struct Minimum {
    template <class T>
    T operator()(T a, T b) const {
        return std::min(a, b);
    }
};
struct Maximum {
    template <class T>
    T operator()(T a, T b) const {
        return std::max(a, b);
    }
};

// *p = update(*p) in one piece; returns what was there.
template <class T, class Update>
T atomic_update(T* p, Update update) {
    T old, updated;
    __atomic_load(p, &old, __ATOMIC_RELAXED);
    do {
        updated = update(old);
    } while (!__atomic_compare_exchange(p, &old, &updated, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}

template <class To, class From>
To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "reinterprets bits");
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}

// Keeps a parameter out of the deduction of T: atomicAdd(&unsigned_counter, 1).
template <class T>
struct Exactly {
    using type = T;
};

}  // namespace emulator

// ---- barriers and warp operations: CUDA C++ Programming Guide, "Synchronization", "Warp Shuffle Functions"

inline void __syncthreads(Site site = Site::here()) { emulator::block_barrier("__syncthreads", false, site); }
inline int __syncthreads_count(int predicate, Site site = Site::here()) {
    return emulator::block_barrier("__syncthreads_count", predicate != 0, site);
}
inline int __syncthreads_or(int predicate, Site site = Site::here()) {
    return emulator::block_barrier("__syncthreads_or", predicate != 0, site) != 0;
}
inline int __syncthreads_and(int predicate, Site site = Site::here()) {
    return emulator::block_barrier("__syncthreads_and", predicate == 0, site) == 0;
}
inline void __syncwarp(unsigned mask = ~0u, Site site = Site::here()) {
    emulator::warp_operation(
        "__syncwarp", mask, &mask, [](emulator::Operands) {}, site, true);
}

// Where the source lies outside of its part of `width` lanes, a lane gets its own value.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, Site site = Site::here()) {
    const int from = (emulator::lane() & -width) | (source & (width - 1));
    return emulator::shuffle("__shfl_sync", mask, value, from, site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, Site site = Site::here()) {
    const int own = emulator::lane(), from = own ^ bits;
    const bool inside = (from & -width) <= (own & -width);
    return emulator::shuffle("__shfl_xor_sync", mask, value, inside ? from : own, site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, Site site = Site::here()) {
    const int own = emulator::lane(), from = own + int(delta);
    const bool inside = (from & -width) == (own & -width);
    return emulator::shuffle("__shfl_down_sync", mask, value, inside ? from : own, site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, Site site = Site::here()) {
    const int own = emulator::lane(), from = own - int(delta);
    const bool inside = from >= (own & -width);
    return emulator::shuffle("__shfl_up_sync", mask, value, inside ? from : own, site);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, Site site = Site::here()) {
    const unsigned bit = predicate ? 1u << emulator::lane() : 0u;
    return emulator::warp_reduce("__ballot_sync", mask, bit, std::bit_or<unsigned>(), site);
}
inline int __any_sync(unsigned mask, int predicate, Site site = Site::here()) {
    return int(
        emulator::warp_reduce("__any_sync", mask, unsigned(predicate != 0), std::bit_or<unsigned>(), site));
}
inline int __all_sync(unsigned mask, int predicate, Site site = Site::here()) {
    return int(
        emulator::warp_reduce("__all_sync", mask, unsigned(predicate != 0), std::bit_and<unsigned>(), site));
}
// Integers only, as on the device.
template <class T>
T __reduce_add_sync(unsigned mask, T value, Site site = Site::here()) {
    static_assert(std::is_integral<T>::value, "the device reduces integers");
    return emulator::warp_reduce("__reduce_add_sync", mask, value, std::plus<T>(), site);
}
template <class T>
T __reduce_min_sync(unsigned mask, T value, Site site = Site::here()) {
    static_assert(std::is_integral<T>::value, "the device reduces integers");
    return emulator::warp_reduce("__reduce_min_sync", mask, value, emulator::Minimum(), site);
}
template <class T>
T __reduce_max_sync(unsigned mask, T value, Site site = Site::here()) {
    static_assert(std::is_integral<T>::value, "the device reduces integers");
    return emulator::warp_reduce("__reduce_max_sync", mask, value, emulator::Maximum(), site);
}

// ---- memory

template <class T>
T atomicAdd(T* p, typename emulator::Exactly<T>::type value) {
    return emulator::atomic_update(p, [=](T old) { return T(old + value); });
}
template <class T>
T atomicOr(T* p, typename emulator::Exactly<T>::type value) {
    return emulator::atomic_update(p, [=](T old) { return T(old | value); });
}
template <class T>
T atomicMax(T* p, typename emulator::Exactly<T>::type value) {
    return emulator::atomic_update(p, [=](T old) { return std::max(old, value); });
}
template <class T>
T atomicMin(T* p, typename emulator::Exactly<T>::type value) {
    return emulator::atomic_update(p, [=](T old) { return std::min(old, value); });
}
template <class T>
T atomicExch(T* p, typename emulator::Exactly<T>::type value) {
    return emulator::atomic_update(p, [=](T) { return value; });
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __threadfence(); }

// Loads and stores with a hint for the caches.
template <class T>
T __ldg(const T* p, Site site = Site::here()) {
    emulator::check_aligned(p, alignof(T), site);
    return *p;
}
template <class T>
T __ldcs(const T* p, Site site = Site::here()) {
    return __ldg(p, site);
}
template <class T>
T __ldcg(const T* p, Site site = Site::here()) {
    return __ldg(p, site);
}
template <class T>
void __stcs(T* p, typename emulator::Exactly<T>::type value, Site site = Site::here()) {
    emulator::check_aligned(p, alignof(T), site);
    *p = value;
}
template <class T>
void __stcg(T* p, typename emulator::Exactly<T>::type value, Site site = Site::here()) {
    __stcs(p, value, site);
}

inline void __trap(Site site = Site::here()) { emulator::fail("__trap", site); }

// ---- arithmetic. The fast intrinsics are the exact functions here.

// Macros: glibc declares functions of these names, and exports none.
#define __expf expf
#define __logf logf
#define __sinf sinf
#define __cosf cosf
#define __powf powf
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __saturatef(float a) { return fminf(fmaxf(a, 0.0f), 1.0f); }
inline int __float2int_rn(float a) { return int(lrintf(a)); }
inline int __float2int_rd(float a) { return int(floorf(a)); }
inline int __popc(unsigned a) { return __builtin_popcount(a); }
inline int __clz(int a) { return a == 0 ? 32 : __builtin_clz(unsigned(a)); }
inline int __ffs(int a) { return __builtin_ffs(a); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline unsigned __float_as_uint(float a) { return emulator::bits_as<unsigned>(a); }
inline int __float_as_int(float a) { return emulator::bits_as<int>(a); }
inline float __uint_as_float(unsigned a) { return emulator::bits_as<float>(a); }
inline float __int_as_float(int a) { return emulator::bits_as<float>(a); }
using std::max;
using std::min;
// On the device a NaN loses against a number; std::max keeps its first argument.
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

// ---- shared memory: see llmc/cuda/device.cuh

#define SHARED(Type, name)                                        \
    using name##_shared_type = Type;                              \
    static const char name##_key = 0;                             \
    name##_shared_type& name = *static_cast<name##_shared_type*>( \
        emulator::shared_variable(&name##_key, #name, sizeof(name##_shared_type), Site::here()))
#define DYNAMIC_SHARED(name) unsigned char* name = static_cast<unsigned char*>(emulator::dynamic_shared())
