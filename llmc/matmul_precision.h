// The precision of matmuls of fp32 values, in PyTorch's words: `highest` is fp32; llmc/cpu/matmul.h and
// llmc/cuda/matmul.cuh say how `high` and `medium` round.
#pragma once
#include <string>

enum class MatmulPrecision { highest, high, medium };

// word: one of the three
inline MatmulPrecision matmul_precision(const std::string& word) {
    return word == "highest" ? MatmulPrecision::highest
           : word == "high"  ? MatmulPrecision::high
                             : MatmulPrecision::medium;
}
