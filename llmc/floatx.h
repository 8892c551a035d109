// Number formats of a build and of a run.
//
//     floatX             of parameters and activations: bf16 on GPUs (fp32 in a -DENABLE_FP32 build), fp32 on
//                        the CPU. Master weights, optimizer state and outer state are float everywhere.
//     MatmulPrecision    of matmuls of fp32 values, in PyTorch's words: `highest` is fp32; llmc/cpu/matmul.h
//                        and llmc/cuda/matmul.cuh say how `high` and `medium` round.
#pragma once
#include <string>

#if defined(USE_CUDA) && !defined(ENABLE_FP32)
#include <cuda_bf16.h>
using floatX = __nv_bfloat16;
#else
using floatX = float;
#endif

enum class MatmulPrecision { highest, high, medium };

// word: one of the three
inline MatmulPrecision matmul_precision(const std::string& word) {
    return word == "highest" ? MatmulPrecision::highest
           : word == "high"  ? MatmulPrecision::high
                             : MatmulPrecision::medium;
}
