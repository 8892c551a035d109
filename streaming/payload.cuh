// Payloads on a GPU: their headers, hashes, weights and padding (payload.h).
//
// Launchers marked with * go through enqueue(), and so work on hosted streams, too.
#pragma once
#include "llmc/cuda/device.cuh"
#include "streaming/payload.h"

namespace cuda {

const int hash_threads = 256, hash_packs = 4;             // packs that a thread loads at once
const long hash_values = hash_threads * hash_packs * 4L;  // of a block

// One block: each thread adds up the tokens of all workers; thread i writes the weights of i, i + 32, ...
__global__ void token_weights_kernel(float* weights, const uint8_t* payloads, size_t stride, int workers) {
    auto tokens = [=](int worker) { return header_of(payloads + size_t(worker) * stride).tokens; };
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
// Bound by memory and arithmetic alike: 4 bytes and about 20 integer instructions per value.
__global__ void add_hash_kernel(PayloadHeader* header, long first, const float* values, long count) {
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
    sum = block_sum(sum);
    if (threadIdx.x == 0) { atomicAdd(reinterpret_cast<unsigned long long*>(&header->hash), sum); }
}

__global__ void write_header_kernel(PayloadHeader* out, PayloadHeader header) { *out = header; }

// ---- launchers

inline bool is_whole_blocks(long values) { return values >= 0 && values % quantization_block == 0; }

// Writes the header of a payload. It is an argument of the launch, so no host memory has to stay alive.
inline void write_header(uint8_t* payload, const PayloadHeader& header, Stream& stream) {
    require(are_aligned({payload}));
    launch(write_header_kernel, Grid{1, 1, 0, stream}, &header_of(payload), header);
}

// * Writes the headers of the payload of a mean: its own, and those of the `count` payloads that are
// averaged, which lie `stride` bytes apart.
inline void write_mean_headers(uint8_t* out, const PayloadHeader& header, const uint8_t* payloads,
                               size_t stride, int count, Stream& stream) {
    require(are_aligned({out, payloads, payloads + stride}));
    stream.enqueue([=](cudaStream_t on) {
        launch(write_mean_headers_kernel, Grid{1, 128, 0, on}, out, header, payloads, stride, count);
    });
}

// * Writes zeros for the blocks that parts lack.
inline void clear_padding(uint8_t* payload, const PayloadLayout& layout, Stream& stream) {
    stream.enqueue([=](cudaStream_t on) {
        for_each_gap(layout, [=](size_t at, size_t bytes) {
            cudaCheck(cudaMemsetAsync(payload + at, 0, bytes, on));
        });
    });
}

// * weights[w] = token_weight() of the worker whose payload is number w.   weights: (workers)
inline void token_weights(float* weights, const uint8_t* payloads, size_t stride, int workers,
                          Stream& stream) {
    require(are_aligned({payloads, payloads + stride}));
    stream.enqueue([=](cudaStream_t on) {
        launch(token_weights_kernel, Grid{1, 32, 0, on}, weights, payloads, stride, workers);
    });
}

// Adds the hash of values [first, first + count) of a fragment to the payload's header.
// values: (count), 16-byte aligned   count: a multiple of 128
inline void add_hash(uint8_t* payload, long first, const float* values, long count, Stream& stream) {
    require(is_whole_blocks(count) && are_aligned({payload, values}));
    if (count == 0) { return; }
    launch(add_hash_kernel, Grid{blocks_for(count, hash_values), hash_threads, 0, stream},
           &header_of(payload), first, values, count);
}

}  // namespace cuda
