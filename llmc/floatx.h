// Number formats of a build and of a run.
//
//     floatX             parameters and activations: bf16 on GPUs (fp32 in a -DENABLE_FP32 build), fp32 on
//                        the CPU, except most activations where the CPU's matmuls round to bf16
//                        (llmc/cpu/activation.h). Master weights, optimizer state and outer state are
//                        float everywhere.
//     MatmulPrecision    precision of matmuls of fp32 values, in PyTorch's words: `highest` is fp32;
//                        llmc/cpu/matmul.h and llmc/cuda/matmul.cuh say how `high` and `medium` round.
//     MatmulOptions      the precision, and Matmul's settings on a GPU (llmc/cuda/matmul.cuh).
#pragma once
#include <string>

#include "llmc/error.h"

#if defined(USE_CUDA) && !defined(ENABLE_FP32)
#include <cuda_bf16.h>
using floatX = __nv_bfloat16;
#else
using floatX = float;
#endif

// Whether a rank keeps an fp32 copy (master weights) of the parameters that it updates. If not, it updates
// the model's own parameters, which are then fp32 and belong to this rank alone.
inline bool has_master_copy(int ranks) { return sizeof(floatX) < sizeof(float) || ranks > 1; }

enum class MatmulPrecision { highest, high, medium };

// word: one of the three
inline MatmulPrecision matmul_precision(const std::string& word) {
    return MatmulPrecision(place_of(word, {"highest", "high", "medium"}, "matmul precision"));
}

// fuse_gelu: 0: GELU has its own kernels; 1: forward products apply it; 2: backward products, too;
//            -1: 1 on Hopper and server Blackwell, else 0
// sms_taken: SMs that collectives hold while they wait for other workers: matmuls leave them free as long as
//            Matmul::leaves_sms says so. Collectives inside a worker are too short for this to pay off
//            (dev/results/h200.md).
struct MatmulOptions {
    MatmulOptions(MatmulPrecision precision, int fuse_gelu = -1, int sms_taken = 0)
        : precision(precision), fuse_gelu(fuse_gelu), sms_taken(sms_taken) {}
    MatmulPrecision precision;
    int fuse_gelu, sms_taken;
};
