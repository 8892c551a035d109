// Gradients that are sums over all rows of a tensor: of biases, and of LayerNorm's parameters.
//
// The kernel that computes the rows sums them on the way: each block leaves the sums over its rows. A launch
// for a whole layer adds all these partial sums to the gradients, in a fixed order.
#pragma once
#include <algorithm>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "llmc/cuda/buffer.cuh"
#include "llmc/cuda/memory.cuh"
#include "llmc/floatx.h"
#include "llmc/layout.h"

namespace cuda {

// to[i] += from[0,i] + from[1,i] + ..., or = where gradients are overwritten.   to: (columns)
// from: (rows,columns) with leading dimension ld, of float or floatX
struct ColumnSums {
    struct One {
        float* to;
        const void* from;
        bool is_float;
        int rows, columns, ld;
    } of[12];  // a layer has 9, the final LayerNorm 3
};

constexpr int partial_warps = 16, partial_rows = 16;  // rows that a thread loads at once

// Block (x, y) adds 32 columns of sum y: each warp every 16th row, then the first warp the warps' sums.
// Bound by latency: a few megabytes, 4 bytes a value.
__global__ void add_column_sums_kernel(ColumnSums sums, bool add) {
    SHARED(float[partial_warps][32], warp_sums);
    const ColumnSums::One& s = sums.of[blockIdx.y];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int column = blockIdx.x * 32 + lane;
    const bool valid = column < s.columns;
    float sum = 0.0f;
    for (int first = warp; first < s.rows; first += partial_warps * partial_rows) {
        float rows[partial_rows];
        for (int k = 0; k < partial_rows; k++) {
            const int row = first + k * partial_warps;
            const size_t at = size_t(row) * s.ld + column;
            rows[k] = !valid || row >= s.rows ? 0.0f
                      : s.is_float ? static_cast<const float*>(s.from)[at]
                                   : float(static_cast<const floatX*>(s.from)[at]);
        }
        for (float row : rows) { sum += row; }
    }
    warp_sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && valid) {
        for (int w = 1; w < partial_warps; w++) { sum += warp_sums[w][lane]; }
        s.to[column] = add ? s.to[column] + sum : sum;
    }
}

// The sums of one stream that are not added yet.
class GradientSums : public MicroStep {
public:
    // Memory for a kernel's partial sums, until add_pending().   returns (rows,columns)
    float* partial(long rows, int columns) {
        if (used == long(buffers.size())) { buffers.emplace_back(); }
        Buffer<float>& buffer = buffers[size_t(used++)];
        if (buffer.count() < rows * columns) { buffer = Buffer<float>(rows * columns); }
        return buffer;
    }

    // In the next add_pending(): to[i] += sum over rows of from[.,i], or = unless it adds. to null: nothing
    template <class T>
    void add_later(float* to, const T* from, long rows, int columns, int ld) {
        if (!to) { return; }
        if (count == long(std::size(pending.of))) { throw std::logic_error("more sums than a launch adds"); }
        pending.of[count++] = {to, from, std::is_same<T, float>::value, int(rows), columns, ld};
        widest = std::max(widest, long(columns));
    }

    void add_pending(Stream& stream) {
        if (count == 0) { return; }
        launch(add_column_sums_kernel,
               Grid{dim3(blocks_for(widest, 32), unsigned(count)), partial_warps * 32, 0, stream}, pending,
               adds);
        count = used = widest = 0;
    }

private:
    ColumnSums pending{};
    long count = 0, used = 0, widest = 0;  // of `pending`, of `buffers`, columns
    std::vector<Buffer<float>> buffers;
};

}  // namespace cuda
