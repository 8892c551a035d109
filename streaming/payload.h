// Payload: the bytes that a worker sends of a fragment.
//
//     payload | header, 64 bytes | scales, a bf16 for 128 values | codes, two fp4 a byte, the first one low |
//
// Every section starts and ends at a multiple of 16 bytes: otherwise NCCL moves single bytes. bf16 and fp32
// have no scales. A fragment may be cut into parts, each a payload of its own (PayloadLayout). The header
// carries the hash of the sender's global parameters, by which all workers see whether they still agree.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "llmc/layout.h"
#include "llmc/stream.h"
#include "streaming/formats.h"

// Bits of PayloadHeader::flags.
const uint32_t delta_not_finite = 1;
const uint32_t stop_requested = 2;  // the sender was asked to end the run: all workers stop at the same step

struct PayloadHeader {
    uint32_t magic = payload_magic;
    uint16_t version = 1;
    uint16_t format = 0;
    uint64_t sync = 0;       // the number of this exchange (schedule.h)
    uint32_t fragment = 0;
    uint32_t worker = 0;     // the sender
    uint64_t send_step = 0;
    uint64_t values = 0;     // n of the fragment, a multiple of 128
    uint64_t tokens = 0;     // trained on since the last send of this fragment (elastic: that counted)
    uint32_t flags = 0;
    uint16_t part = 0, parts = 1;  // of the fragment
    uint64_t hash = 0;       // of the sender's global parameters: the part's sum of hash_value() mod 2^64

    static constexpr uint32_t payload_magic = 0x4f434c44;  // "DLCO"
};
static_assert(sizeof(PayloadHeader) == 64, "the wire's format");

HD inline PayloadHeader& header_of(uint8_t* payload) { return *reinterpret_cast<PayloadHeader*>(payload); }
HD inline const PayloadHeader& header_of(const uint8_t* payload) {
    return *reinterpret_cast<const PayloadHeader*>(payload);
}

// Bytes of the scales of n values, of their section, and of the codes.   n: a multiple of 128
inline size_t bare_scale_bytes(Format format, long n) {
    bool scaled = with_format(format, [](auto f) { return decltype(f)::scaled; });
    return scaled ? size_t(n / quantization_block) * sizeof(uint16_t) : 0;
}

inline size_t scale_bytes(Format format, long n) { return (bare_scale_bytes(format, n) + 15) / 16 * 16; }

inline size_t code_bytes(Format format, long n) {
    return size_t(n) * size_t(with_format(format, [](auto f) { return decltype(f)::bits; })) / 8;
}

inline size_t payload_bytes(Format format, long n) {
    return sizeof(PayloadHeader) + scale_bytes(format, n) + code_bytes(format, n);
}

// Where the values of a fragment lie in its payloads. A part has ceil(blocks / parts) quantization blocks;
// the last ones may have fewer, or none. Each part is a payload of its own, and all are equally long: zeros
// stand for the blocks that a part lacks.
struct PayloadLayout {
    Format format;
    long values;       // n, of the fragment, a multiple of 128
    int parts;
    long part_values;  // of a whole part
    size_t scales, codes, bytes;  // of a part: offsets of its sections, and of the next part

    long first_of(int part) const { return std::min(part * part_values, values); }
    long values_of(int part) const { return first_of(part + 1) - first_of(part); }

    // The layout of one part by itself.
    PayloadLayout only(int part) const {
        PayloadLayout one = *this;
        one.values = values_of(part);
        one.parts = 1;
        return one;
    }
};

// headers: how many a part begins with   more: bytes after them, a multiple of 16
inline PayloadLayout payload_layout(Format format, long n, int parts = 1, int headers = 1, size_t more = 0) {
    const long blocks = n / quantization_block;
    const long part_values = (blocks + parts - 1) / parts * quantization_block;
    const size_t scales = sizeof(PayloadHeader) * size_t(headers) + more;
    const size_t codes = scales + scale_bytes(format, part_values);
    return {format, n, parts, part_values, scales, codes, codes + code_bytes(format, part_values)};
}

// Calls work(part, first, count) for each part that has some of the values [first, first + count).
template <class Work>
inline void for_each_part(const PayloadLayout& layout, long first, long count, Work work) {
    const long end = first + count;
    while (first < end) {
        const int part = int(first / layout.part_values);
        const long next = std::min(end, (part + 1) * layout.part_values);
        work(part, first, next - first);
        first = next;
    }
}

// Calls work(offset, bytes) for the unused end of each section of a part that lacks blocks.
template <class Work>
inline void for_each_gap(const PayloadLayout& layout, Work work) {
    for (int part = 0; part < layout.parts; part++) {
        const long n = layout.values_of(part);
        if (n == layout.part_values) { continue; }
        const size_t begin = size_t(part) * layout.bytes;
        const size_t scales = layout.scales + bare_scale_bytes(layout.format, n);
        const size_t codes = layout.codes + code_bytes(layout.format, n);
        work(begin + scales, layout.codes - scales);
        work(begin + codes, layout.bytes - codes);
    }
}

// Weight of a worker in the mean.   sum: of all workers' tokens
HD inline float token_weight(uint64_t tokens, uint64_t sum, int workers) {
    return sum == 0 ? divide_rn(1.0f, float(workers)) : divide_rn(float(tokens), float(sum));
}

// What value number `index` adds to the hash. A multiplication between two xor-shifts spreads every bit over
// the word.
HD inline uint64_t hash_value(uint64_t index, float value) {
    uint64_t x = index * 0x9e3779b97f4a7c15 + float_to_bits(value);
    x = (x ^ x >> 32) * 0xd6e8feb86659fd93;
    return x ^ x >> 32;
}

namespace cpu {

const long parallel_blocks = 512;  // with fewer blocks one thread is faster than a team

inline void write_header(uint8_t* payload, const PayloadHeader& header, Stream& stream) {
    stream.enqueue([=] { memcpy(payload, &header, sizeof(header)); });
}

// Writes the headers of the payload of a mean: its own, and those of the `count` payloads that are averaged,
// which lie `stride` bytes apart.
inline void write_mean_headers(uint8_t* out, const PayloadHeader& header, const uint8_t* payloads,
                               size_t stride, int count, Stream& stream) {
    stream.enqueue([=] {
        memcpy(out, &header, sizeof(header));
        for (int i = 0; i < count; i++) {
            memcpy(out + size_t(i + 1) * sizeof(header), payloads + size_t(i) * stride, sizeof(header));
        }
    });
}

// Writes zeros for the blocks that parts lack.
inline void clear_padding(uint8_t* payload, const PayloadLayout& layout, Stream& stream) {
    stream.enqueue([=] {
        for_each_gap(layout, [=](size_t at, size_t bytes) { memset(payload + at, 0, bytes); });
    });
}

// weights[w] = token_weight() of the worker whose payload is number w.   weights: (workers)
inline void token_weights(float* weights, const uint8_t* payloads, size_t stride, int workers,
                          Stream& stream) {
    stream.enqueue([=] {
        auto tokens = [=](int worker) { return header_of(payloads + size_t(worker) * stride).tokens; };
        uint64_t sum = 0;
        for (int worker = 0; worker < workers; worker++) { sum += tokens(worker); }
        for (int worker = 0; worker < workers; worker++) {
            weights[worker] = token_weight(tokens(worker), sum, workers);
        }
    });
}

inline uint64_t hash_loop(const float* values, long first, long count) {
    uint64_t sum = 0;
    #pragma omp parallel for simd reduction(+ : sum) if (count >= parallel_blocks * quantization_block)
    for (long i = 0; i < count; i++) { sum += hash_value(uint64_t(first + i), values[i]); }
    return sum;
}

// Adds the hash of values [first, first + count) of a fragment to the payload's header.   values: (count)
inline void add_hash(uint8_t* payload, long first, const float* values, long count, Stream& stream) {
    stream.enqueue([=] { header_of(payload).hash += hash_loop(values, first, count); });
}

}  // namespace cpu

#ifdef USE_CUDA
#include "streaming/payload.cuh"
#endif
