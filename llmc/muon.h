// Muon for the layers' matrices, computed jointly by all ranks of a worker (equations: llmc/optimizers.h).
//
// Newton-Schulz needs a whole matrix, and a rank has 1/R of each block. For R layers at a time, one
// all-to-all gives each rank a whole layer, and another returns the results:
//
//     each rank   Nesterov's directions, from its shards of the gradient and of the momentum
//     all_to_all  rank r receives all of layer first + r, in the order of the block
//     each rank   Newton-Schulz on the matrices of that layer
//     all_to_all  back: each rank receives its shards of the results
//     each rank   updates its shards of master and parameters
//
// The momentum is in AdamW's m; a matrix's v stays zero. Directions and results travel as floatX, in which
// Newton-Schulz computes anyway, and a layer's rank computes what one rank alone would: for the same
// gradients and algorithms of matmuls the bits do not depend on R.
//
// Traffic: for every R layers, a rank sends (R - 1) shards of a layer, twice. If R divides L, the number of
// layers, that is 2 / R of an all-gather of the layers' parameters. The worst case, two ranks and odd L, is
// (L + 1) / L of an all-gather.
// Work: 5 (4 m^2 n + 2 m^3) flops for a matrix of m x n, m <= n, so 300 C^3 for a layer of C channels. GPT-2
// 124M (L = 12, C = 768): 1.6 TFLOP a step, where forward and backward of 0.5M tokens take 420. A rank does
// ceil(L / R) layers or one less.
#pragma once
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "llmc/buffer.h"
#include "llmc/comm.h"
#include "llmc/floatx.h"
#include "llmc/layers.h"
#include "llmc/layout.h"
#include "llmc/optimizers.h"
#include "llmc/rounding.h"
#include "llmc/stream.h"

// Newton-Schulz's scratch memory, for matrices of at most `largest` values, whose shorter side is at most
// `side`.   batch: wide or square matrices at a time, together of at most `largest` values
struct NewtonSchulz {
    NewtonSchulz(long largest, long side, int batch = 1)
        : x(largest), next_x(largest), gram(batch * side * side), square(batch * side * side),
          polynomial(batch * side * side), sums(side * side), norm_squared(batch) {}
    Buffer<floatX> x, next_x, gram, square, polynomial;
    Buffer<float> sums, norm_squared;
};

const int newton_schulz_iterations = 5;

// matrix = scale * X, for X after five iterations that start from matrix / |matrix|. X keeps the matrix's
// singular vectors, and its singular values become about 1. A = X X^T; for a matrix with more rows than
// columns A = X^T X, and an iteration is X (a I + b A + c A A), so that A has the shorter side.
// matrix: (batch,rows,columns), each by itself; batch is 1 if there are more rows than columns
inline void newton_schulz(NewtonSchulz& scratch, device::Matmul& matmul, floatX* matrix, int rows,
                          int columns, float scale, Stream& main, int batch = 1) {
    const bool is_wide = rows <= columns;
    const int side = std::min(rows, columns);
    floatX *x = scratch.x, *next = scratch.next_x, *gram = scratch.gram, *polynomial = scratch.polynomial;
    device::muon_normalize(x, scratch.norm_squared, matrix, long(rows) * columns, main, batch);
    for (int i = 1; i <= newton_schulz_iterations; i++) {
        const bool is_last = i == newton_schulz_iterations;
        if (is_last) { next = matrix; }
        if (is_wide) {
            device::matmul_product_transposed(matmul, gram, x, x, side, columns, side, main, batch);
        } else {
            device::matmul_gram(matmul, scratch.sums, x, rows, side, main);
            device::cast(gram, scratch.sums.data(), long(side) * side, main);
        }
        device::matmul_product_transposed(matmul, scratch.square, gram, gram, side, side, side, main, batch);
        device::newton_schulz_polynomial(polynomial, gram, scratch.square, side, is_last ? scale : 1.0f,
                                         main, batch);
        if (is_wide) {
            device::matmul_product(matmul, next, polynomial, x, side, side, columns, main, batch);
        } else {
            device::matmul_product_transposed(matmul, next, x, polynomial, rows, side, side, main);
        }
        std::swap(x, next);
    }
}

// Matrices of a layer, `count` of the same shape one after another, at `offset` from the beginning of its
// block.
struct LayerMatrix {
    long offset;
    int rows, columns, count;
};

// The matrices of a layer, alike in all layers. Q, K and V count as three; attention's projection, which lies
// behind them (layout.h), has their shape.
inline std::vector<LayerMatrix> layer_matrices(const Layout& layout) {
    std::vector<LayerMatrix> matrices;
    for (const auto& [name, count] : {std::pair("qkvw", 4), {"fcw", 1}, {"fcprojw", 1}}) {
        const Tensor& tensor = layout.tensor(std::string("h.0.") + name);
        const int rows = int(count > 1 ? tensor.shape[1] : tensor.shape[0]);
        matrices.push_back({tensor.offset, rows, int(tensor.shape[1]), count});
    }
    return matrices;
}

// What Muon reads and writes.
struct MuonArrays {
    floatX* params;          // (layout.size)
    float *master, *m;       // (layout.shard_size()): this rank's shards
    const float* gradients;  // (layout.shard_size())
};

class ShardedMuon {
public:
    // comm: joins the ranks of a worker
    ShardedMuon(const Layout& layout, Comm& comm)
        : layout(layout), comm(comm), matrices(layer_matrices(layout)), parts(layout.blocks[0].size),
          layer(comm.size() > 1 ? layout.blocks[0].size : 0),
          scratch(layout.tensor("h.0.fcw").count(), layout.tensor("h.0.fcw").shape[1], 4) {}  // the largest

    // Updates this rank's shards of the matrices. Collective: all ranks call it, even if the update is
    // skipped (*grad_scale, the clip scale, is not finite).   rounding: of params; `first` is set here
    void update(const MuonArrays& arrays, const Muon& step, const float* grad_scale,
                StochasticRounding rounding, device::Matmul& matmul, Stream& main, Stream& comm_stream,
                Traffic& traffic) {
        for (int first = 0; first < layout.layers; first += comm.size()) {
            const int end = std::min(first + comm.size(), layout.layers), own = first + comm.rank();
            for (int l = first; l < end; l++) {
                const Range range = matrices_of_shard(l);
                device::muon_direction(part(l - first), arrays.m + range.shard,
                                       arrays.gradients + range.shard, range.count, step, grad_scale, main);
            }
            exchange(layer, parts, main, comm_stream, traffic);
            if (own < end) { orthogonalize(matmul, comm.size() > 1 ? layer : parts, main); }
            exchange(parts, layer, main, comm_stream, traffic);
            for (int l = first; l < end; l++) {
                const Range range = matrices_of_shard(l);
                rounding.first = uint64_t(layout.logical_index(range.flat));
                device::muon_update(arrays.params + range.flat, arrays.master + range.shard, part(l - first),
                                    range.count, step, grad_scale, rounding, main);
            }
        }
    }

    // The part of this rank's shard of a block that Muon updates: matrices come first in it.
    Range matrices_of_shard(int block) const {
        Range range = layout.shard(block, comm.rank());
        range.count = block < layout.layers ? layout.decayed(block, comm.rank()) : 0;
        return range;
    }

private:
    // This rank's shard of layer first + r.
    floatX* part(int r) { return parts + r * (parts.count() / comm.size()); }

    // Part r of `inp` goes to rank r; part r of `out` comes from it.
    void exchange(floatX* out, const floatX* inp, Stream& main, Stream& comm_stream, Traffic& traffic) {
        if (comm.size() == 1) { return; }
        const size_t bytes = size_t(parts.count() / comm.size()) * sizeof(floatX);
        order(main, comm_stream, to_comm);
        comm.all_to_all(out, inp, bytes, comm_stream, &traffic);
        order(comm_stream, main, to_main);
    }

    // Replaces the directions of a layer's matrices by their updates.   values: a whole block
    void orthogonalize(device::Matmul& matmul, floatX* values, Stream& main) {
        for (const LayerMatrix& m : matrices) {
            const float scale = 0.2f * std::sqrt(float(std::max(m.rows, m.columns)));  // Moonlight's
            newton_schulz(scratch, matmul, values + m.offset, m.rows, m.columns, scale, main, m.count);
        }
    }

    const Layout& layout;
    Comm& comm;
    const std::vector<LayerMatrix> matrices;
    Buffer<floatX> parts;  // (R, block size / R): this rank's shards of R layers
    Buffer<floatX> layer;  // (block size): a whole layer; with one rank `parts` is that already
    NewtonSchulz scratch;
    Event to_comm, to_main;
};
