// Values as an Activation (llmc/cpu/activation.h) holds them in bf16.
#pragma once
#include <cstdint>
#include <vector>

#include "llmc/cpu/matmul.h"

// Rounds the values themselves, too.
inline std::vector<uint16_t> in_bf16(std::vector<float>& values) {
    std::vector<uint16_t> rounded(values.size());
    cpu::convert_to_bf16(rounded.data(), values.data(), long(values.size()));
    for (size_t i = 0; i < values.size(); i++) { values[i] = cpu::widened(rounded[i]); }
    return rounded;
}
