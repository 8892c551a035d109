// How exact matmuls of fp32 values are, in PyTorch's words: `highest` is fp32; what `high` and `medium` allow
// is said where it is done (llmc/cpu/matmul.h, llmc/cuda/matmul.cuh).
#pragma once
#include <string>

enum class MatmulPrecision { highest, high, medium };

// word: one of the three
inline MatmulPrecision matmul_precision(const std::string& word) {
    return word == "highest" ? MatmulPrecision::highest
           : word == "high"  ? MatmulPrecision::high
                             : MatmulPrecision::medium;
}
