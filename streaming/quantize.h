// Quantize: outer gradients to the bytes of a payload, and payloads of all workers to their mean.
//
//     payload | header, 64 bytes | scales, a bf16 for 128 values | codes, two fp4 a byte, the first one low |
//
// Every section starts and ends on 16 bytes: NCCL moves single bytes otherwise. bf16 and fp32 have no scales.
//
//     delta = global - local                                   the outer gradient (arXiv 2501.18512, 2.1)
//     scale = max |delta| / largest code, rounded up to bf16   so that nothing clips; 0 where all are 0
//     code  = encode(delta / scale)
//     mean  = (0 + decode(code_0) * scale_0 + decode(code_1) * scale_1 + ...) / M     fp32, workers ascending
//
// A delta that is not finite or too large for bf16 sets a flag in the header; the payload still travels, with
// zeros for its block, so that no bits depend on what a machine's NaN looks like.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "formats.h"
#include "llmc/layout.h"
#include "llmc/stream.h"

const uint64_t delta_not_finite = 1;  // in PayloadHeader::flags

struct PayloadHeader {
    uint32_t magic = payload_magic;
    uint16_t version = 1;
    uint16_t format = 0;
    uint64_t sync = 0;       // the number of this exchange (schedule.h)
    uint32_t fragment = 0;
    uint32_t worker = 0;     // whose payload it is
    uint64_t send_step = 0;
    uint64_t values = 0;     // n, a multiple of 128
    uint64_t tokens = 0;     // that the worker trained on since it last sent this fragment
    uint64_t flags = 0;
    uint64_t hash = 0;       // of the sender's global parameters: the sum of hash_value() mod 2^64

    static constexpr uint32_t payload_magic = 0x4f434c44;  // "DLCO"
};
static_assert(sizeof(PayloadHeader) == 64, "the wire's format");

HD inline PayloadHeader& header_of(uint8_t* payload) { return *reinterpret_cast<PayloadHeader*>(payload); }

// Bytes of the sections of a payload of n values.   n: a multiple of 128
inline size_t scale_bytes(Format format, long n) {
    bool scaled = with_format(format, [](auto f) { return decltype(f)::scaled; });
    return scaled ? (size_t(n / quantization_block) * sizeof(uint16_t) + 15) / 16 * 16 : 0;
}

inline size_t code_bytes(Format format, long n) {
    return size_t(n) * size_t(with_format(format, [](auto f) { return decltype(f)::bits; })) / 8;
}

inline size_t payload_bytes(Format format, long n) {
    return sizeof(PayloadHeader) + scale_bytes(format, n) + code_bytes(format, n);
}

// What value number `index` adds to the hash. A product between two folds spreads every bit over the word.
HD inline uint64_t hash_value(uint64_t index, float value) {
    uint64_t x = index * 0x9e3779b97f4a7c15 + float_to_bits(value);
    x = (x ^ x >> 32) * 0xd6e8feb86659fd93;
    return x ^ x >> 32;
}

// x rounded up to bf16, as bits.   x: the bits of a non-negative fp32
// 0x7f80 and above: x was not finite, or bf16 cannot hold it.
HD inline uint32_t bf16_rounded_up(uint32_t x) { return (x + 0xffff) >> 16; }

// The scale of a block whose largest magnitude has the bits `absmax`, as bf16 bits: absmax / largest or more.
// 0 for formats without scales. Only a subnormal quotient can be rounded down to a bf16 that is too small;
// then the next one is right.
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

// Whether a block whose largest magnitude has the bits `absmax` can be sent: not where a delta is not finite,
// bf16 cannot hold it, or decoding it would overflow.   scale: block_scale<F>(absmax)
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

namespace cpu {

const long parallel_blocks = 512;  // below so many blocks one thread is faster than a team

// A code of format F by itself: the smallest unsigned integer that holds it.
template <class F>
using Code = std::conditional_t<F::bits <= 8, uint8_t, std::conditional_t<F::bits == 16, uint16_t, uint32_t>>;

// Codes to the bytes of a payload, and back.   codes: (128)
// Two fp4 codes are taken as one 16-bit word (little-endian), so that no vector lane has to be moved.
template <class F>
inline void pack_block(uint8_t* out, const Code<F>* codes) {
    if constexpr (F::bits == 4) {
        uint16_t pairs[quantization_block / 2];
        memcpy(pairs, codes, sizeof(pairs));
        for (int i = 0; i < quantization_block / 2; i++) { out[i] = uint8_t(pairs[i] | pairs[i] >> 4); }
    } else {
        memcpy(out, codes, quantization_block * sizeof(*codes));
    }
}

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

// One block of global - local. Returns false where it cannot be sent; it is zeros then.
// global, local: (128)
template <class F>
inline bool quantize_block(uint8_t* codes, uint16_t* scale, const float* global, const float* local) {
    float delta[quantization_block];
    Code<F> block[quantization_block];
    uint32_t absmax = 0;  // as bits: infinity and NaN are the largest
    for (int i = 0; i < quantization_block; i++) {
        delta[i] = subtract_rn(global[i], local[i]);
        absmax = std::max(absmax, float_to_bits(delta[i]) & 0x7fffffff);
    }
    const uint32_t scale_bits = block_scale<F>(absmax);
    const bool sendable = is_sendable<F>(absmax, scale_bits);
    if (!sendable) { std::fill_n(delta, quantization_block, 0.0f); }
    if constexpr (F::scaled) {
        *scale = uint16_t(sendable ? scale_bits : 0);
        const float divisor = *scale == 0 ? 1.0f : bits_to_float(uint32_t(*scale) << 16);
        for (int i = 0; i < quantization_block; i++) {
            block[i] = Code<F>(F::encode(divide_rn(delta[i], divisor)));
        }
    } else {
        for (int i = 0; i < quantization_block; i++) { block[i] = Code<F>(F::encode(delta[i])); }
    }
    pack_block<F>(codes, block);
    return sendable;
}

// sum[i] += value i of one block of a payload.   sum: (128)   scale: not used by formats without scales
template <class F>
inline void add_block(float* sum, const uint8_t* codes, const uint8_t* scale) {
    Code<F> block[quantization_block];
    unpack_block<F>(block, codes);
    if constexpr (F::scaled) {
        uint16_t bits;
        memcpy(&bits, scale, sizeof(bits));
        const float factor = bits_to_float(uint32_t(bits) << 16);
        for (int i = 0; i < quantization_block; i++) {
            sum[i] = add_rn(sum[i], multiply_rn(F::decode(block[i]), factor));
        }
    } else {
        for (int i = 0; i < quantization_block; i++) { sum[i] = add_rn(sum[i], F::decode(block[i])); }
    }
}

// Writes the header of a payload.
inline void write_header(uint8_t* payload, const PayloadHeader& header, Stream& stream) {
    stream.enqueue([=] { memcpy(payload, &header, sizeof(header)); });
}

// Reads the headers of `count` payloads that lie `stride` bytes apart. `headers` is memory of the host.
inline void read_headers(PayloadHeader* headers, const uint8_t* payloads, size_t stride, int count,
                         Stream& stream) {
    stream.enqueue([=] {
        for (int i = 0; i < count; i++) { memcpy(&headers[i], payloads + i * stride, sizeof(PayloadHeader)); }
    });
}

// The loops are functions of their own, outside the lambdas: the compiler reads again and again what a lambda
// has captured.
inline uint64_t hash_loop(const float* values, long first, long count) {
    uint64_t sum = 0;
    #pragma omp parallel for simd reduction(+ : sum) if (count >= parallel_blocks * quantization_block)
    for (long i = 0; i < count; i++) { sum += hash_value(uint64_t(first + i), values[i]); }
    return sum;
}

template <class F>
inline bool quantize_loop(uint8_t* codes, uint16_t* scales, const float* global, const float* local,
                          long blocks) {
    int finite = 1;
    #pragma omp parallel for reduction(& : finite) if (blocks >= parallel_blocks)
    for (long b = 0; b < blocks; b++) {
        const long i = b * quantization_block;
        finite &= quantize_block<F>(codes + i * F::bits / 8, scales + b, global + i, local + i);
    }
    return finite;
}

template <class F>
inline void dequantize_loop(float* mean, const uint8_t* codes, const uint8_t* scales, size_t stride,
                            int workers, long blocks) {
    #pragma omp parallel for if (blocks >= parallel_blocks)
    for (long b = 0; b < blocks; b++) {
        const long i = b * quantization_block;
        float sum[quantization_block] = {};
        for (int worker = 0; worker < workers; worker++) {
            const size_t payload = size_t(worker) * stride;
            add_block<F>(sum, codes + payload + i * F::bits / 8, scales + payload + b * 2);
        }
        for (int k = 0; k < quantization_block; k++) { mean[i + k] = divide_rn(sum[k], float(workers)); }
    }
}

// Adds the hash of values [first, first + count) of a fragment to the payload's header.   values: (count)
inline void add_hash(uint8_t* payload, long first, const float* values, long count, Stream& stream) {
    stream.enqueue([=] { header_of(payload).hash += hash_loop(values, first, count); });
}

// Quantizes values [first, first + count) of a fragment of n values into its payload: global - local.
// global, local: (count); first, count: multiples of 128; payload: 16-byte aligned, its header is written
// already. Memory: 8 bytes read a value, in one pass.
inline void quantize(uint8_t* payload, Format format, long n, long first, const float* global,
                     const float* local, long count, Stream& stream) {
    stream.enqueue([=] {
        bool finite = with_format(format, [=](auto f) {
            using F = decltype(f);
            uint8_t* scales = payload + sizeof(PayloadHeader);
            uint8_t* codes = scales + scale_bytes(format, n) + first * F::bits / 8;
            return quantize_loop<F>(codes, reinterpret_cast<uint16_t*>(scales) + first / quantization_block,
                                    global, local, count / quantization_block);
        });
        if (!finite) { header_of(payload).flags |= delta_not_finite; }
    });
}

// mean[i] = the sum over workers of what their payloads say of value i, in fp32 and ascending order, by
// float(workers). mean: (n)   payloads: `workers` of them, `stride` bytes apart.   Memory: 4 bytes written a
// value, in one pass.
inline void dequantize_mean(float* mean, const uint8_t* payloads, size_t stride, int workers, Format format,
                            long n, Stream& stream) {
    stream.enqueue([=] {
        with_format(format, [=](auto f) {
            const uint8_t* scales = payloads + sizeof(PayloadHeader);
            const uint8_t* codes = scales + scale_bytes(format, n);
            dequantize_loop<decltype(f)>(mean, codes, scales, stride, workers, n / quantization_block);
        });
    });
}

}  // namespace cpu

#ifdef USE_CUDA
#include "streaming/quantize.cuh"
#endif
