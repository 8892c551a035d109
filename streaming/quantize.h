// Quantize: outer gradients to the scales and codes of a payload (payload.h), and the payloads of all workers
// to their mean.
//
//     delta = global - local                                   the outer gradient (arXiv 2501.18512, 2.1)
//     scale = max |delta| / largest code, rounded up to bf16   so that nothing clips; 0 where all are 0
//     code  = encode(delta / scale)                            to nearest or stochastically (rounding.h)
//     mean  = (0 + decode(code_0) * scale_0 + decode(code_1) * scale_1 + ...) / M     fp32, workers ascending
//
// or, weighted by the tokens that the headers state,
//
//     weight_w = float(tokens_w) / float(tokens_0 + tokens_1 + ...)             1 / M if no worker has any
//     mean     = fma(weight_1, decode(code_1) * scale_1, fma(weight_0, decode(code_0) * scale_0, 0)) ...
//
// With error feedback (Seide et al. 2014) the rounding error is added the next time:
//
//     delta    = global - local + residual
//     residual = delta - decode(code) * scale
//
// The owner of a mean quantizes the mean's values instead of global - local.
//
// A delta that is not finite or too large for bf16 sets a flag in the header. The payload is still sent, with
// zeros for that block, so that no bits depend on a machine's representation of NaN. The block's residual
// stays as it was.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "streaming/formats.h"
#include "streaming/payload.h"
#include "streaming/rounding.h"

// x rounded up to bf16, as bits.   x: the bits of a non-negative fp32
// 0x7f80 and above: x is not finite, or too large for bf16.
HD inline uint32_t bf16_rounded_up(uint32_t x) { return (x + 0xffff) >> 16; }

// The scale of a block whose largest magnitude has the bits `absmax`, as bf16 bits: at least absmax /
// largest. 0 for formats without scales. A subnormal quotient may be rounded to a bf16 that is too small;
// then the next one is large enough.
template <class F>
HD inline uint32_t block_scale(uint32_t absmax) {
    if constexpr (F::scaled) {
        const uint32_t scale = bf16_rounded_up(float_to_bits(divide_rn(bits_to_float(absmax), F::largest)));
        const float reached = multiply_rn(bits_to_float(scale << 16), F::largest);
        return scale + (reached < bits_to_float(absmax) ? 1 : 0);
    } else {
        return 0;
    }
}

// Whether a block whose largest magnitude has the bits `absmax` can be sent: not if a delta is not finite or
// too large for bf16, or its decoding would overflow.   scale: block_scale<F>(absmax)
template <class F>
HD inline bool is_sendable(uint32_t absmax, [[maybe_unused]] uint32_t scale) {
    if constexpr (F::bits == 32) {
        return absmax < 0x7f800000;
    } else if constexpr (F::scaled) {
        const float decoded = multiply_rn(bits_to_float(scale << 16), F::largest);
        return bf16_rounded_up(absmax) < 0x7f80 && float_to_bits(decoded) < 0x7f800000;
    } else {
        return bf16_rounded_up(absmax) < 0x7f80;
    }
}

// The input of quantize(): values - minus + residual. {global, local} is an outer gradient, {mean} a mean.
// The residual is the last rounding error, which quantize() replaces with the new one; null: no error
// feedback. Each array has as many values as the call quantizes.
struct Source {
    const float* values;
    const float* minus = nullptr;
    float* residual = nullptr;

    // The same without the first `count` values.
    Source from(long count) const {
        return {values + count, minus == nullptr ? nullptr : minus + count,
                residual == nullptr ? nullptr : residual + count};
    }
};

// The divisor of a block's deltas.   scale: the block's, as bf16 bits; if it is 0, all deltas are 0
HD inline float divisor_of(uint32_t scale) { return scale == 0 ? 1.0f : bits_to_float(scale << 16); }

// The rounding error of a delta: delta - decoded.   scale: of its block, in bf16, as bits
template <class F>
HD inline float lost(float delta, uint32_t code, uint32_t scale) {
    const float value = F::decode(code);
    return subtract_rn(delta, F::scaled ? multiply_rn(value, bits_to_float(scale << 16)) : value);
}

namespace cpu {

// The smallest unsigned integer that holds a code of format F.
template <class F>
using Code = std::conditional_t<F::bits <= 8, uint8_t, std::conditional_t<F::bits == 16, uint16_t, uint32_t>>;

// Codes to the bytes of a payload, and back.   codes: (128)
template <class F>
inline void pack_block(uint8_t* out, const Code<F>* codes) {
    if constexpr (F::bits == 4) {
        for (int i = 0; i < quantization_block / 2; i++) {
            out[i] = uint8_t(codes[2 * i] | codes[2 * i + 1] << 4);
        }
    } else {
        memcpy(out, codes, quantization_block * sizeof(*codes));
    }
}

// Two fp4 codes are unpacked as one 16-bit word (little-endian), without moves between vector lanes.
template <class F>
inline void unpack_block(Code<F>* codes, const uint8_t* inp) {
    if constexpr (F::bits == 4) {
        uint16_t pairs[quantization_block / 2];
        for (int i = 0; i < quantization_block / 2; i++) {
            pairs[i] = uint16_t((inp[i] | inp[i] << 4) & 0x0f0f);
        }
        memcpy(codes, pairs, sizeof(pairs));
    } else {
        memcpy(codes, inp, quantization_block * sizeof(*codes));
    }
}

// delta = values - minus + residual of a block. Returns the largest magnitude, as bits, in which infinity and
// NaN are larger than any number.   delta: (128)
inline uint32_t load_block(float* delta, const Source& source, long i) {
    const float* values = source.values + i;
    if (source.minus != nullptr) {
        const float* minus = source.minus + i;
        for (int k = 0; k < quantization_block; k++) { delta[k] = subtract_rn(values[k], minus[k]); }
    } else {
        memcpy(delta, values, quantization_block * sizeof(float));
    }
    if (source.residual != nullptr) {
        const float* residual = source.residual + i;
        for (int k = 0; k < quantization_block; k++) { delta[k] = add_rn(delta[k], residual[k]); }
    }
    uint32_t absmax = 0;
    for (int k = 0; k < quantization_block; k++) {
        absmax = std::max(absmax, float_to_bits(delta[k]) & 0x7fffffff);
    }
    return absmax;
}

// codes[k] = encode(values[k]).   values, codes: (128)   first: where the block begins in the model
template <class F, bool stochastic>
inline void encode_block(Code<F>* codes, const float* values, const Rounding& rounding, uint64_t first) {
    if constexpr (stochastic && F::bits < 32) {
        const int quads = quantization_block / 4 + 1;  // one more, in case `first` is not a multiple of 4
        uint32_t words[4 * quads];
        for (int i = 0; i < quads; i++) {
            const Philox4 drawn = random_quad(rounding, first / 4 + uint64_t(i));
            std::copy_n(drawn.v, 4, words + 4 * i);
        }
        const uint32_t* random = words + first % 4;
        for (int k = 0; k < quantization_block; k++) { codes[k] = Code<F>(F::encode(values[k], random[k])); }
    } else {
        for (int k = 0; k < quantization_block; k++) { codes[k] = Code<F>(F::encode(values[k])); }
    }
}

// Quantizes block `i / 128` of a range. Returns false, and writes zeros, if it cannot be sent.
template <class F, bool stochastic>
inline bool quantize_block(uint8_t* codes, uint16_t* scale, const Source& source, const Rounding& rounding,
                           long i) {
    float delta[quantization_block], quotients[quantization_block];
    Code<F> block[quantization_block];
    const uint32_t absmax = load_block(delta, source, i);
    uint32_t scale_bits = block_scale<F>(absmax);
    const bool sendable = is_sendable<F>(absmax, scale_bits);
    if (!sendable) {
        scale_bits = 0;
        std::fill_n(delta, quantization_block, 0.0f);
    }
    if constexpr (F::scaled) {
        *scale = uint16_t(scale_bits);
        const float divisor = divisor_of(scale_bits);
        for (int k = 0; k < quantization_block; k++) { quotients[k] = divide_rn(delta[k], divisor); }
    }
    encode_block<F, stochastic>(block, F::scaled ? quotients : delta, rounding, rounding.first + uint64_t(i));
    pack_block<F>(codes, block);
    if (source.residual != nullptr && sendable) {
        float* residual = source.residual + i;
        for (int k = 0; k < quantization_block; k++) {
            residual[k] = lost<F>(delta[k], block[k], scale_bits);
        }
    }
    return sendable;
}

// The values of codes of E2M1, doubled: 0, 1, 2, 3, 4, 6, 8, 12, as bytes, because a vector holds more bytes
// than floats. Zeros lose their sign, which does not change any sum.   doubled, codes: (128)
inline void double_e2m1(int8_t* doubled, const uint8_t* codes) {
    for (int k = 0; k < quantization_block; k++) {
        const uint8_t code = codes[k] & 7;
        const uint8_t magnitude = uint8_t(code + (code > 4 ? code - 4 : 0) + (code > 6 ? 2 : 0));
        const int8_t sign = int8_t(-(codes[k] >> 3));  // 0 or -1: all bits
        doubled[k] = int8_t((magnitude ^ sign) - sign);
    }
}

// values = a decoded block.   values: (128)   scale: not used by formats without scales
template <class F>
inline void decode_block(float* values, const uint8_t* codes, const uint8_t* scale) {
    Code<F> block[quantization_block];
    unpack_block<F>(block, codes);
    float factor = 1.0f;
    if constexpr (F::scaled) {
        uint16_t bits;
        memcpy(&bits, scale, sizeof(bits));
        factor = bits_to_float(uint32_t(bits) << 16);
    }
    if constexpr (std::is_same_v<F, E2M1>) {
        int8_t doubled[quantization_block];
        double_e2m1(doubled, block);
        const float half = multiply_rn(factor, 0.5f);  // exact: a factor is a bf16, denormal or not
        for (int k = 0; k < quantization_block; k++) { values[k] = multiply_rn(float(doubled[k]), half); }
    } else {
        for (int k = 0; k < quantization_block; k++) { values[k] = multiply_rn(F::decode(block[k]), factor); }
    }
}

// The loops are functions of their own, because inside a lambda the compiler reloads every captured
// variable in each iteration.
template <class F, bool stochastic>
inline bool quantize_loop(uint8_t* codes, uint16_t* scales, const Source& source, const Rounding& rounding,
                          long blocks) {
    int finite = 1;
    #pragma omp parallel for reduction(& : finite) if (blocks >= parallel_blocks)
    for (long b = 0; b < blocks; b++) {
        const long i = b * quantization_block;
        finite &= quantize_block<F, stochastic>(codes + i * F::bits / 8, scales + b, source, rounding, i);
    }
    return finite;
}

// mean, codes, scales: the beginning of a part of `blocks` blocks   weights: (workers), for a weighted mean
template <class F, bool weighted>
inline void dequantize_loop(float* mean, const uint8_t* codes, const uint8_t* scales, size_t stride,
                            int workers, const float* weights, long blocks) {
    #pragma omp parallel for if (blocks >= parallel_blocks)
    for (long b = 0; b < blocks; b++) {
        const long i = b * quantization_block;
        float sum[quantization_block] = {}, values[quantization_block];
        for (int worker = 0; worker < workers; worker++) {
            const size_t payload = size_t(worker) * stride;
            decode_block<F>(values, codes + payload + i * F::bits / 8, scales + payload + b * 2);
            for (int k = 0; k < quantization_block; k++) {
                sum[k] = weighted ? fma_rn(weights[worker], values[k], sum[k]) : add_rn(sum[k], values[k]);
            }
        }
        for (int k = 0; k < quantization_block; k++) {
            mean[i + k] = weighted ? sum[k] : divide_rn(sum[k], float(workers));
        }
    }
}

// Quantizes values [first, first + count) of a fragment into its payload.
// source: of `count` values   first, count: multiples of 128   payload: 16-byte aligned, with the headers of
// its parts. Memory, in one pass: 8 bytes read per value; with a residual 12, and 4 written.
inline void quantize(uint8_t* payload, const PayloadLayout& layout, const Rounding& rounding, long first,
                     const Source& source, long count, Stream& stream) {
    stream.enqueue([=] {
        for_each_part(layout, first, count, [&](int part, long begin, long n) {
            uint8_t* bytes = payload + size_t(part) * layout.bytes;
            const long skipped = begin - first, within = begin - layout.first_of(part);
            const bool finite = with_format(layout.format, [=](auto f) {
                using F = decltype(f);
                uint8_t* codes = bytes + layout.codes + within * F::bits / 8;
                uint16_t* scales =
                    reinterpret_cast<uint16_t*>(bytes + layout.scales) + within / quantization_block;
                return (rounding.stochastic ? quantize_loop<F, true> : quantize_loop<F, false>)(
                    codes, scales, source.from(skipped), rounding.at(rounding.first + uint64_t(skipped)),
                    n / quantization_block);
            });
            if (!finite) { header_of(bytes).flags |= delta_not_finite; }
        });
    });
}

// mean[i] = the mean of the workers' decoded values i: in fp32, in ascending order, divided by float(workers)
// or with weights.   mean: (layout.values)   payloads: `workers` of them, `stride` bytes apart
// weights: (workers), or null   Memory, in one pass: 4 bytes written per value.
inline void dequantize_mean(float* mean, const uint8_t* payloads, size_t stride, int workers,
                            const PayloadLayout& layout, const float* weights, Stream& stream) {
    stream.enqueue([=] {
        for_each_part(layout, 0, layout.values, [&](int part, long first, long n) {
            const uint8_t* bytes = payloads + size_t(part) * layout.bytes;
            with_format(layout.format, [=](auto f) {
                using F = decltype(f);
                (weights != nullptr ? dequantize_loop<F, true> : dequantize_loop<F, false>)(
                    mean + first, bytes + layout.codes, bytes + layout.scales, stride, workers, weights,
                    n / quantization_block);
            });
        });
    });
}

}  // namespace cpu

#ifdef USE_CUDA
#include "streaming/quantize.cuh"
#endif
