// The parameters that a new model starts from.
#pragma once
#include <algorithm>
#include <cmath>
#include <string>

#include "llmc/layout.h"
#include "llmc/random.h"

// GPT-2's initial parameters: weights N(0, 0.02^2), projections into the residual stream divided by
// sqrt(2 L), LayerNorm weights 1, biases 0. Every machine computes the same bits.   flat: (layout.size)
inline void init_parameters(float* flat, const GptShape& shape, const Layout& layout, uint64_t seed) {
    const float residual_scale = 1.0f / sqrtf(2.0f * float(std::max(1, shape.layers)));
    std::fill(flat, flat + layout.size, 0.0f);
    for (const Tensor& tensor : layout.tensors) {
        const std::string& name = tensor.name;
        const std::string last = name.substr(name.rfind('.') + 1);
        if (last == "ln1w" || last == "ln2w" || last == "lnfw") {
            std::fill(flat + tensor.offset, flat + tensor.offset + tensor.count(), 1.0f);
        }
        if (!tensor.decay) { continue; }
        const float std = last == "attprojw" || last == "fcprojw" ? 0.02f * residual_scale : 0.02f;
        const long count = last == "wte" ? long(shape.vocab_size) * shape.channels : tensor.count();
        const long logical = layout.logical_index(tensor.offset);
        #pragma omp parallel for
        for (long i = 0; i < count; i++) {
            flat[tensor.offset + i] =
                std * standard_normal(seed, RandomUse::parameters, uint64_t(logical + i));
        }
    }
}
