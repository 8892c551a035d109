// Arrays that are bf16 where matmuls round their inputs: the outputs of LayerNorm and attention, qkv, GELU's
// input and output, and the gradients of qkv and of GELU's input. The residual stream, what is added to it,
// the logits and all other gradients are fp32. The layer that computes such an array stores it rounded: half
// the memory and traffic, and no separate pass.
#pragma once
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include "llmc/arithmetic.h"
#include "llmc/cpu/buffer.h"
#include "llmc/cpu/vector.h"

namespace cpu {

// float to bf16, to nearest, ties to even. NaN stays NaN.
HD_INLINE uint16_t bf16_bits(float value) {
    const uint32_t bits = float_to_bits(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

// A stored value in fp32.
HD_INLINE float widened(float value) { return value; }
HD_INLINE float widened(uint16_t value) { return bits_to_float(uint32_t(value) << 16); }

// value as T, which is float or, for bf16, uint16_t.
template <class T>
HD_INLINE T rounded_to(float value) {
    if constexpr (std::is_same_v<T, float>) {
        return value;
    } else {
        return bf16_bits(value);
    }
}

// out[i] = value(i) for i < n. Where the CPU has an instruction that rounds to bf16, which makes GELU a
// quarter faster, denormals become 0, as they do in products.
template <class T, class Value>
inline void assign(T* out, long n, const Value& value) {
    long done = 0;
    if constexpr (multiplies_bf16 && std::is_same_v<T, uint16_t>) {
        const int step = 2 * vector_width;
        for (; done + step <= n; done += step) {
            float values[step];
            #pragma omp simd
            for (int i = 0; i < step; i++) { values[i] = value(done + i); }
            round_two(out + done, load(values), load(values + vector_width));
        }
    }
    #pragma omp simd
    for (long i = done; i < n; i++) { out[i] = rounded_to<T>(value(i)); }
}

// The same loop, divided among all threads.
template <class T, class Value>
inline void assign_in_parallel(T* out, long n, const Value& value) {
    const long chunk = 4096;
    #pragma omp parallel for
    for (long first = 0; first < n; first += chunk) {
        assign(out + first, std::min(chunk, n - first), [=](long i) { return value(first + i); });
    }
}

// The values of such an array, in fp32 or bf16.
class Activation {
public:
    Activation(const float* values) : values(const_cast<float*>(values)), bf16(false) {}
    Activation(Buffer<float>& values) : Activation(values.data()) {}
    explicit Activation(uint16_t* values) : values(values), bf16(true) {}

    bool is_bf16() const { return bf16; }
    void* data() const { return values; }

    // Returns use(values), whose type is float* or uint16_t*.
    template <class Use>
    auto visit(const Use& use) const {
        return bf16 ? use(static_cast<uint16_t*>(values)) : use(static_cast<float*>(values));
    }

    // The values as T*, the type of another array's. Throws if they have the other type.
    template <class T>
    T* like(const T*) const {
        if (bf16 != std::is_same_v<T, uint16_t>) { throw std::logic_error("activations of two types"); }
        return static_cast<T*>(values);
    }

private:
    void* values;
    bool bf16;
};

// An Activation with memory of its own. All zero bits when new.
class ActivationBuffer {
public:
    ActivationBuffer() = default;
    ActivationBuffer(long count, bool bf16) : bf16(bf16), halves(bf16 ? count : 2 * count) {}
    operator Activation() {
        return bf16 ? Activation(halves.data()) : Activation(reinterpret_cast<float*>(halves.data()));
    }

private:
    bool bf16 = false;
    Buffer<uint16_t> halves;
};

}  // namespace cpu
