// Quantize on a GPU: outer gradients to the scales and codes of a payload, and payloads to their mean. The
// equations and the arithmetic of a value are in quantize.h, whose CPU version gives the same bits.
//
// A thread handles four neighbouring values: 16 bytes of fp32 in one access, and their codes in one access
// of 2 (fp4), 4 (fp8), 8 (bf16) or 16 bytes (fp32). A warp therefore handles one quantization block of 128
// values: its largest magnitude is one warp reduction, and its accesses cover whole 32-byte sectors in a
// row.
//
// Launchers marked with * go through enqueue(), and so work on hosted streams, too.
#pragma once
#include <type_traits>

#include "llmc/cuda/device.cuh"
#include "streaming/payload.cuh"
#include "streaming/quantize.h"

namespace cuda {

const int quantize_threads = 256;

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

// Four values, loaded now and decoded later, so that a thread can have many loads in flight.
template <class F>
struct Encoded {
    FourCodes<F> codes;
    unsigned short scale;

    // Values [i, i + 4) of a part.
    __device__ void load(const uint8_t* payload, const PayloadLayout& layout, long i) {
        codes = __ldcs(reinterpret_cast<const FourCodes<F>*>(payload + layout.codes + i * F::bits / 8));
        const auto* scales = reinterpret_cast<const unsigned short*>(payload + layout.scales);
        if constexpr (F::scaled) { scale = __ldg(scales + i / quantization_block); }
    }

    // A word may hold the next code's bits above those of its own code; decode() ignores them.
    __device__ Pack<float> decoded() const {
        uint32_t words[4] = {};
        memcpy(words, &codes, sizeof(codes));
        const float factor = F::scaled ? bits_to_float(uint32_t(scale) << 16) : 1.0f;
        Pack<float> values;
        for (int k = 0; k < 4; k++) {
            values[k] = multiply_rn(F::decode(words[k * F::bits / 32] >> k * F::bits % 32), factor);
        }
        return values;
    }
};

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
        for (int k = 0; k < 4; k++) { delta[k] = divide_rn(delta[k], divisor_of(scale)); }
    }
    if constexpr (stochastic) {
        const Philox4 random = random_quad(rounding, index / 4);
        for (int k = 0; k < 4; k++) { codes[k] = F::encode(delta[k], random.v[k]); }
    } else {
        for (int k = 0; k < 4; k++) { codes[k] = F::encode(delta[k]); }
    }
}

// The part that holds a block of a fragment. In 32 bits: a fragment has fewer than 2^32 blocks, and a
// division of 64 bits costs as much as everything else that a thread does.
__device__ inline unsigned part_of(const PayloadLayout& layout, long block) {
    return layout.parts == 1 ? 0 : unsigned(block) / unsigned(layout.part_values / quantization_block);
}

// One warp, one block of 128 values.   source: of the range's `blocks`   first: the range's first block
// Bound by memory: per value 8 bytes read, in one pass, and bits / 8 written (fp4: 0.5), and 2 per block;
// with a residual 12 and 4 more. Stochastic: about 22 more integer instructions per value.
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

const int dequantize_at_once = 4;  // workers whose codes a thread loads before it decodes the first

// One thread, four values.   mean: (layout.values)   payloads: of all workers, `stride` bytes apart
// weights: (workers), for a weighted mean
// Bound by memory or, below 16 bits, by instructions: bits / 8 bytes read per value and worker, 4 written.
template <class F, bool weighted>
__global__ void __launch_bounds__(quantize_threads)
    dequantize_mean_kernel(float* mean, const uint8_t* payloads, PayloadLayout layout, size_t stride,
                           int workers, const float* weights) {
    const long i = (blockIdx.x * long(blockDim.x) + threadIdx.x) * 4;
    if (i >= layout.values) { return; }
    const unsigned part = part_of(layout, i / quantization_block);
    const long within = i - part * layout.part_values;
    payloads += part * layout.bytes;
    Pack<float> sum = {};
    for (int first = 0; first < workers; first += dequantize_at_once) {
        Encoded<F> encoded[dequantize_at_once];
        float weight[dequantize_at_once];
        for (int k = 0; k < dequantize_at_once; k++) {
            if (first + k >= workers) { continue; }
            encoded[k].load(payloads + size_t(first + k) * stride, layout, within);
            weight[k] = weighted ? __ldg(weights + first + k) : 1.0f;
        }
        for (int k = 0; k < dequantize_at_once; k++) {
            if (first + k >= workers) { continue; }
            const Pack<float> values = encoded[k].decoded();
            for (int j = 0; j < 4; j++) {
                sum[j] = weighted ? fma_rn(weight[k], values[j], sum[j]) : add_rn(sum[j], values[j]);
            }
        }
    }
    if constexpr (!weighted) {
        for (int k = 0; k < 4; k++) { sum[k] = divide_rn(sum[k], float(workers)); }
    }
    store_pack(mean + i, sum);
}

// * Quantizes values [first, first + count) of a fragment into the parts of its payload.
// source: of `count` values, 16-byte aligned   layout.values, first, count: multiples of 128
// payload: 16-byte aligned, with the headers of its parts
// rounding.first: a multiple of 4 if it is stochastic
inline void quantize(uint8_t* payload, const PayloadLayout& layout, const Rounding& rounding, long first,
                     const Source& source, long count, Stream& stream) {
    require(is_whole_blocks(layout.values) && is_whole_blocks(first) && is_whole_blocks(count));
    require(are_aligned({payload, source.values, source.minus, source.residual}));
    require(!rounding.stochastic || rounding.first % 4 == 0);
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

// * mean[i] = the mean of the workers' decoded values i: in fp32, in ascending order, divided by
// float(workers) or with weights.   mean: (layout.values), 16-byte aligned
// payloads: 16-byte aligned, `stride` bytes apart, a multiple of 16   weights: (workers), or null
inline void dequantize_mean(float* mean, const uint8_t* payloads, size_t stride, int workers,
                            const PayloadLayout& layout, const float* weights, Stream& stream) {
    require(is_whole_blocks(layout.values) && are_aligned({mean, payloads, payloads + stride}));
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

}  // namespace cuda
