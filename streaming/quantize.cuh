// Quantize on a GPU: outer gradients to the bytes of a payload, payloads to their mean, and the hash of
// global parameters. The payload's layout, the equations and the arithmetic of a value are in quantize.h,
// whose CPU version gives the same bits.
//
// A thread has four values next to each other: 16 bytes of fp32 in one access, and their codes in one access
// of 2 (fp4), 4 (fp8), 8 (bf16) or 16 bytes (fp32). So a warp has one quantization block of 128 values, its
// largest magnitude is one warp reduction, and whatever a warp reads or writes is whole 32-byte sectors in a
// row.
#pragma once
#include <stdexcept>
#include <type_traits>

#include "llmc/cuda/device.cuh"
#include "streaming/quantize.h"

namespace cuda {

const int quantize_threads = 256;
const int hash_threads = 256, hash_packs = 4;             // packs that a thread has on their way at once
const long hash_values = hash_threads * hash_packs * 4L;  // of a block

// Four codes of format F, as they lie in memory.
template <class F>
using FourCodes = std::conditional_t<
    F::bits == 4, unsigned short,
    std::conditional_t<F::bits == 8, unsigned, std::conditional_t<F::bits == 16, uint2, uint4>>>;

template <class F>
__device__ inline void store_codes(uint8_t* out, const uint32_t (&codes)[4]) {
    uint32_t words[4] = {};
    for (int i = 0; i < 4; i++) { words[i * F::bits / 32] |= codes[i] << i * F::bits % 32; }
    FourCodes<F> packed;
    memcpy(&packed, words, sizeof(packed));
    __stcg(reinterpret_cast<FourCodes<F>*>(out), packed);
}

// Above a code's own bits there may be those of the next: decode() does not look at them.
template <class F>
__device__ inline void load_codes(uint32_t (&codes)[4], const uint8_t* inp) {
    const FourCodes<F> packed = __ldcs(reinterpret_cast<const FourCodes<F>*>(inp));
    uint32_t words[4] = {};
    memcpy(words, &packed, sizeof(packed));
    for (int i = 0; i < 4; i++) { codes[i] = words[i * F::bits / 32] >> i * F::bits % 32; }
}

// delta = values - minus + residual of four values.
__device__ inline Pack<float> load_delta(const Source& source, long i) {
    Pack<float> delta = load_pack(source.values + i), minus = {}, residual = {};
    if (source.minus != nullptr) { minus = load_pack(source.minus + i); }
    if (source.residual != nullptr) { residual = load_pack(source.residual + i); }
    if (source.minus != nullptr) {
        for (int k = 0; k < 4; k++) { delta[k] = subtract_rn(delta[k], minus[k]); }
    }
    if (source.residual != nullptr) {
        for (int k = 0; k < 4; k++) { delta[k] = add_rn(delta[k], residual[k]); }
    }
    return delta;
}

// codes[k] = encode(delta[k] / scale).   index: of the first value in the model, a multiple of 4
template <class F, bool stochastic>
__device__ inline void encode_four(uint32_t (&codes)[4], Pack<float> delta, uint32_t scale,
                                   const Rounding& rounding, uint64_t index) {
    if constexpr (F::scaled) {
        const Divisor divisor = divisor_of(scale);
        if (divisor.reciprocal != 0) {  // a whole warp
            for (int k = 0; k < 4; k++) { delta[k] = divide_by(delta[k], divisor); }
        } else {
            for (int k = 0; k < 4; k++) { delta[k] = divide_rn(delta[k], divisor.scale); }
        }
    }
    if constexpr (stochastic) {
        const Philox4 random = random_quad(rounding, index / 4);
        for (int k = 0; k < 4; k++) { codes[k] = F::encode(delta[k], random.v[k]); }
    } else {
        for (int k = 0; k < 4; k++) { codes[k] = F::encode(delta[k]); }
    }
}

// The part that a block of a fragment lies in. In 32 bits: a fragment has fewer blocks than 2^32, and a
// division of 64 bits costs as much as all else that a thread does.
__device__ inline unsigned part_of(const PayloadLayout& layout, long block) {
    return layout.parts == 1 ? 0 : unsigned(block) / unsigned(layout.part_values / quantization_block);
}

// One warp, one block of 128 values.   source: of the range's `blocks`   first: the range's first block
// Bound by memory: 8 bytes read a value, in one pass, and bits / 8 written (fp4: 0.5), 2 more a block; with a
// residual 12 and 4 more. Stochastic: 10 more integer instructions a value.
template <class F, bool stochastic>
__global__ void quantize_kernel(uint8_t* payload, PayloadLayout layout, Source source, Rounding rounding,
                                long first, long blocks) {
    const long block = (blockIdx.x * long(blockDim.x) + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32;
    if (block >= blocks) { return; }  // a whole warp
    const long i = block * quantization_block + lane * 4;
    const unsigned part = part_of(layout, first + block);
    const long within = (first + block) * quantization_block - part * layout.part_values;
    payload += part * layout.bytes;
    Pack<float> delta = load_delta(source, i);
    uint32_t absmax = 0;  // as bits: infinity and NaN are the largest
    for (int k = 0; k < 4; k++) { absmax = max(absmax, float_to_bits(delta[k]) & 0x7fffffff); }
    absmax = __reduce_max_sync(full_warp, absmax);

    uint32_t scale = block_scale<F>(absmax);
    const bool sendable = is_sendable<F>(absmax, scale);
    if (!sendable) {
        scale = 0;
        delta = {};
    }
    if (F::scaled && lane == 0) {
        reinterpret_cast<uint16_t*>(payload + layout.scales)[within / quantization_block] = uint16_t(scale);
    }
    uint32_t encoded[4];
    encode_four<F, stochastic>(encoded, delta, scale, rounding, rounding.first + uint64_t(i));
    store_codes<F>(payload + layout.codes + (within + lane * 4) * F::bits / 8, encoded);
    if (!sendable) {
        if (lane == 0) { atomicOr(&header_of(payload).flags, delta_not_finite); }
    } else if (source.residual != nullptr) {
        for (int k = 0; k < 4; k++) { delta[k] = lost<F>(delta[k], encoded[k], scale); }
        store_pack(source.residual + i, delta);
    }
}

// One thread, four values.   mean: (layout.values)   payloads: of worker 0, the next worker's `stride` bytes
// on   weights: (workers), for a weighted mean
// Bound by memory: bits / 8 bytes read a value and worker (fp4: 0.5), 4 written a value.
template <class F, bool weighted>
__global__ void dequantize_mean_kernel(float* mean, const uint8_t* payloads, PayloadLayout layout,
                                       size_t stride, int workers, const float* weights) {
    const long i = (blockIdx.x * long(blockDim.x) + threadIdx.x) * 4;
    if (i >= layout.values) { return; }
    const unsigned part = part_of(layout, i / quantization_block);
    const long within = i - part * layout.part_values;
    payloads += part * layout.bytes;
    const uint8_t* codes = payloads + layout.codes + within * F::bits / 8;
    const uint8_t* scales = payloads + layout.scales + within / quantization_block * sizeof(uint16_t);
    Pack<float> sum = {};
    #pragma unroll 4
    for (int worker = 0; worker < workers; worker++) {
        uint32_t encoded[4];
        load_codes<F>(encoded, codes + size_t(worker) * stride);
        float factor = 1.0f, weight = 1.0f;
        if constexpr (F::scaled) {
            const uint8_t* scale = scales + size_t(worker) * stride;
            factor = bits_to_float(uint32_t(__ldg(reinterpret_cast<const unsigned short*>(scale))) << 16);
        }
        if constexpr (weighted) { weight = __ldg(weights + worker); }
        for (int k = 0; k < 4; k++) {
            const float decoded = F::decode(encoded[k]);
            const float value = F::scaled ? multiply_rn(decoded, factor) : decoded;
            sum[k] = weighted ? fma_rn(weight, value, sum[k]) : add_rn(sum[k], value);
        }
    }
    if constexpr (!weighted) {
        for (int k = 0; k < 4; k++) { sum[k] = divide_rn(sum[k], float(workers)); }
    }
    store_pack(mean + i, sum);
}

// One block: each thread adds up the tokens of all workers, and has the weights of every 32nd.
__global__ void token_weights_kernel(float* weights, const uint8_t* payloads, size_t stride, int workers) {
    auto tokens = [=](int worker) {
        return reinterpret_cast<const PayloadHeader*>(payloads + size_t(worker) * stride)->tokens;
    };
    uint64_t sum = 0;
    for (int worker = 0; worker < workers; worker++) { sum += tokens(worker); }
    for (int worker = threadIdx.x; worker < workers; worker += 32) {
        weights[worker] = token_weight(tokens(worker), sum, workers);
    }
}

// One block; a thread moves 16 bytes at a time.   out: (1 + count) headers
__global__ void write_mean_headers_kernel(uint8_t* out, PayloadHeader header, const uint8_t* payloads,
                                          size_t stride, int count) {
    const int packs = sizeof(PayloadHeader) / 16;
    if (threadIdx.x == 0) { header_of(out) = header; }
    for (int i = threadIdx.x; i < count * packs; i += int(blockDim.x)) {
        const uint4* from = reinterpret_cast<const uint4*>(payloads + size_t(i / packs) * stride);
        reinterpret_cast<uint4*>(out + sizeof(PayloadHeader))[i] = from[i % packs];
    }
}

// header->hash += the hash of values [first, first + count).   values: (count)
// Sums mod 2^64 are the same in any order, so that each block may add its own when it is done.
// 4 bytes read a value; about 20 integer instructions a value, which is as much as a GPU does in that time.
__global__ void add_hash_kernel(PayloadHeader* header, long first, const float* values, long count) {
    SHARED(unsigned long long[hash_threads / 32], partial);
    const long begin = blockIdx.x * hash_values + threadIdx.x * 4;
    Pack<float> packs[hash_packs];
    for (int p = 0; p < hash_packs; p++) {
        const long i = begin + p * hash_threads * 4;
        if (i < count) { packs[p] = load_pack(values + i); }
    }
    unsigned long long sum = 0;
    for (int p = 0; p < hash_packs; p++) {
        const long i = begin + p * hash_threads * 4;
        if (i < count) {
            for (int k = 0; k < 4; k++) { sum += hash_value(uint64_t(first + i + k), packs[p][k]); }
        }
    }
    sum = warp_reduce(sum, Sum());
    if (threadIdx.x % 32 == 0) { partial[threadIdx.x / 32] = sum; }
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned long long total = 0;
        for (int warp = 0; warp < hash_threads / 32; warp++) { total += partial[warp]; }
        atomicAdd(reinterpret_cast<unsigned long long*>(&header->hash), total);
    }
}

__global__ void write_header_kernel(PayloadHeader* out, PayloadHeader header) { *out = header; }

inline void require_blocks_of_128(const char* what, long values) {
    if (values < 0 || values % quantization_block != 0) {
        throw std::invalid_argument(
            format("%s is %ld values, not a multiple of %ld", what, values, quantization_block));
    }
}

// Writes the header of a payload. It travels with the launch: nothing of the host has to stay alive.
inline void write_header(uint8_t* payload, const PayloadHeader& header, Stream& stream) {
    require_aligned("the payload", {payload});
    launch(write_header_kernel, Grid{1, 1, 0, stream}, &header_of(payload), header);
}

// Marked with *: these work on hosted streams, too, since they go through enqueue().

// * Reads the first `each` headers of `count` payloads that lie `stride` bytes apart. `headers` is memory of
// the host and has to stay alive until the stream has passed; where it is not pinned, the host may wait here
// for that.   headers: (count, each)
inline void read_headers(PayloadHeader* headers, const uint8_t* payloads, size_t stride, int count, int each,
                         Stream& stream) {
    stream.enqueue([=](cudaStream_t on) {
        for (int i = 0; i < count; i++) {
            cudaCheck(cudaMemcpyAsync(headers + i * each, payloads + size_t(i) * stride,
                                      size_t(each) * sizeof(PayloadHeader), cudaMemcpyDeviceToHost, on));
        }
    });
}

// * Writes what the payload of a mean begins with: a header of its own, and those of the `count` payloads
// that the mean is of, `stride` bytes apart.
inline void write_mean_headers(uint8_t* out, const PayloadHeader& header, const uint8_t* payloads,
                               size_t stride, int count, Stream& stream) {
    require_aligned("the payload", {out});
    require_aligned("the first payload", {payloads});
    require_aligned("the second payload", {payloads + stride});
    stream.enqueue([=](cudaStream_t on) {
        launch(write_mean_headers_kernel, Grid{1, 128, 0, on}, out, header, payloads, stride, count);
    });
}

// * Writes the zeros that parts have in place of the blocks that they lack.
inline void clear_padding(uint8_t* payload, const PayloadLayout& layout, Stream& stream) {
    stream.enqueue([=](cudaStream_t on) {
        for (int part = 0; part < layout.parts; part++) {
            const long n = layout.values_of(part);
            if (n == layout.part_values) { continue; }
            const size_t scales = layout.scales + bare_scale_bytes(layout.format, n);
            const size_t codes = layout.codes + code_bytes(layout.format, n);
            uint8_t* begin = payload + size_t(part) * layout.bytes;
            cudaCheck(cudaMemsetAsync(begin + scales, 0, layout.codes - scales, on));
            cudaCheck(cudaMemsetAsync(begin + codes, 0, layout.bytes - codes, on));
        }
    });
}

// * weights[w] = token_weight() of the worker whose payload is number w.   weights: (workers)
inline void token_weights(float* weights, const uint8_t* payloads, size_t stride, int workers,
                          Stream& stream) {
    require_aligned("the first payload", {payloads});
    require_aligned("the second payload", {payloads + stride});
    stream.enqueue([=](cudaStream_t on) {
        launch(token_weights_kernel, Grid{1, 32, 0, on}, weights, payloads, stride, workers);
    });
}

// * out = inp.   out, inp: (count), on the device
inline void copy_values(float* out, const float* inp, long count, Stream& stream) {
    stream.enqueue([=](cudaStream_t on) {
        cudaCheck(cudaMemcpyAsync(out, inp, size_t(count) * sizeof(float), cudaMemcpyDeviceToDevice, on));
    });
}

// Adds the hash of values [first, first + count) of a fragment to the payload's header.
// values: (count), 16-byte aligned   count: a multiple of 128
inline void add_hash(uint8_t* payload, long first, const float* values, long count, Stream& stream) {
    require_aligned("the payload", {payload});
    require_aligned("the array to hash", {values});
    require_blocks_of_128("the array to hash", count);
    if (count == 0) { return; }
    launch(add_hash_kernel, Grid{blocks_for(count, hash_values), hash_threads, 0, stream},
           &header_of(payload), first, values, count);
}

// * Quantizes values [first, first + count) of a fragment into its payload, whatever its parts.
// source: of `count` values, 16-byte aligned   layout.values, first, count: multiples of 128
// payload: 16-byte aligned, the headers of its parts are written already
// rounding.first: a multiple of 4 where it is stochastic
inline void quantize(uint8_t* payload, const PayloadLayout& layout, const Rounding& rounding, long first,
                     const Source& source, long count, Stream& stream) {
    require_aligned("the payload", {payload});
    require_aligned("the array to quantize", {source.values});
    require_aligned("the array to subtract", {source.minus});
    require_aligned("the array of residuals", {source.residual});
    require_blocks_of_128("the fragment", layout.values);
    require_blocks_of_128("what lies before the range to quantize", first);
    require_blocks_of_128("the range to quantize", count);
    if (rounding.stochastic && rounding.first % 4 != 0) {
        throw std::invalid_argument("the range to round stochastically does not begin at a multiple of 4");
    }
    if (count == 0) { return; }
    stream.enqueue([=](cudaStream_t on) {
        with_format(layout.format, [&](auto f) {
            using F = decltype(f);
            launch(rounding.stochastic ? quantize_kernel<F, true> : quantize_kernel<F, false>,
                   Grid{blocks_for(count / 4, quantize_threads), quantize_threads, 0, on}, payload, layout,
                   source, rounding, first / quantization_block, count / quantization_block);
        });
    });
}

// * mean[i] = the mean over workers of what their payloads say of value i: in fp32, in ascending order, by
// float(workers), or with their weights.   mean: (layout.values), 16-byte aligned   payloads: `workers` of
// them, `stride` bytes apart, a multiple of 16, and 16-byte aligned   weights: (workers), or null
inline void dequantize_mean(float* mean, const uint8_t* payloads, size_t stride, int workers,
                            const PayloadLayout& layout, const float* weights, Stream& stream) {
    require_aligned("the mean", {mean});
    require_aligned("the first payload", {payloads});
    require_aligned("the second payload", {payloads + stride});
    require_blocks_of_128("the fragment", layout.values);
    if (layout.values == 0) { return; }
    stream.enqueue([=](cudaStream_t on) {
        with_format(layout.format, [&](auto f) {
            using F = decltype(f);
            launch(weights != nullptr ? dequantize_mean_kernel<F, true> : dequantize_mean_kernel<F, false>,
                   Grid{blocks_for(layout.values / 4, quantize_threads), quantize_threads, 0, on}, mean,
                   payloads, layout, stride, workers, weights);
        });
    });
}

// The same for a fragment of n values in one part, and without weights.
inline void quantize(uint8_t* payload, Format format, const Rounding& rounding, long n, long first,
                     const Source& source, long count, Stream& stream) {
    quantize(payload, payload_layout(format, n), rounding, first, source, count, stream);
}

inline void dequantize_mean(float* mean, const uint8_t* payloads, size_t stride, int workers, Format format,
                            long n, Stream& stream) {
    dequantize_mean(mean, payloads, stride, workers, payload_layout(format, n), nullptr, stream);
}

}  // namespace cuda
