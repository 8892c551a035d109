// Arrays that only matmuls read, such as the outputs of LayerNorm and GELU. Where matmuls round their inputs
// to bf16, LayerNorm and GELU store them rounded, in half the memory and without a pass of its own.
#pragma once
#include <cstdint>
#include <type_traits>

#include "llmc/arithmetic.h"
#include "llmc/cpu/buffer.h"

namespace cpu {

// float to bf16, to nearest, ties to even. NaN stays NaN.
HD_INLINE uint16_t bf16_bits(float value) {
    const uint32_t bits = float_to_bits(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

// value as T, which is float or, for bf16, uint16_t.
template <class T>
HD_INLINE T rounded_to(float value) {
    if constexpr (std::is_same_v<T, float>) {
        return value;
    } else {
        return bf16_bits(value);
    }
}

// The values of such an array, in fp32 or bf16.
class MatmulInput {
public:
    MatmulInput(const float* values) : values(const_cast<float*>(values)), bf16(false) {}
    MatmulInput(Buffer<float>& values) : MatmulInput(values.data()) {}
    explicit MatmulInput(uint16_t* values) : values(values), bf16(true) {}

    // Returns use(values), whose type is float* or uint16_t*.
    template <class Use>
    auto visit(const Use& use) const {
        return bf16 ? use(static_cast<uint16_t*>(values)) : use(static_cast<float*>(values));
    }

private:
    void* values;
    bool bf16;
};

// A MatmulInput with memory of its own. All zero bits when new.
class MatmulInputBuffer {
public:
    MatmulInputBuffer() = default;
    MatmulInputBuffer(long count, bool bf16) : bf16(bf16), halves(bf16 ? count : 2 * count) {}
    operator MatmulInput() {
        return bf16 ? MatmulInput(halves.data()) : MatmulInput(reinterpret_cast<float*>(halves.data()));
    }

private:
    bool bf16 = false;
    Buffer<uint16_t> halves;
};

}  // namespace cpu
