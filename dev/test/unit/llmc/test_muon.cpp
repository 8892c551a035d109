// Muon on the CPU: Newton-Schulz and ten updates against double precision, and the ranks of a worker against
// one rank: the same bits, for so many bytes.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "dev/test/alone.h"
#include "dev/test/newton_schulz.h"
#include "dev/test/unit/local_comm.h"
#include "llmc/muon.h"
#include "llmc/random.h"

namespace test_muon {

using newton_schulz_test::Doubles;
using newton_schulz_test::exact_newton_schulz;
using Floats = std::vector<float>;

Floats random_floats(long n, uint64_t seed) {
    Floats values(static_cast<size_t>(n));
    for (long i = 0; i < n; i++) {
        values[size_t(i)] = standard_normal(seed, RandomUse::parameters, uint64_t(i));
    }
    return values;
}

double relative_error(const Floats& values, const Doubles& expected) {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < values.size(); i++) {
        difference += std::pow(values[i] - expected[i], 2);
        norm += std::pow(expected[i], 2);
    }
    return std::sqrt(difference / norm);
}

Stream main_stream;

Floats orthogonalized(Floats values, int rows, int columns, float scale, MatmulPrecision precision) {
    cpu::Matmul matmul(precision);
    NewtonSchulz scratch(long(values.size()), std::min(rows, columns));
    newton_schulz(scratch, matmul, values.data(), rows, columns, scale, main_stream);
    return values;
}

TEST(Muon, newton_schulz_matches_double_precision_for_any_shape) {
    for (auto [rows, columns] : {std::pair(16, 16), {16, 64}, {64, 16}, {48, 40}, {1, 24}, {24, 1}}) {
        SCOPED_TRACE(testing::Message() << rows << " x " << columns);
        const Floats values = random_floats(long(rows) * columns, uint64_t(rows));
        const Doubles exact = exact_newton_schulz(Doubles(values.begin(), values.end()), rows, columns, 2.5);
        EXPECT_LT(relative_error(orthogonalized(values, rows, columns, 2.5f, MatmulPrecision::highest), exact),
                  1e-5);
        const double of_bf16 = cpu::cpu_has_fast_bf16() ? 0.1 : 1e-5;  // small singular values are mostly noise
        EXPECT_LT(relative_error(orthogonalized(values, rows, columns, 2.5f, MatmulPrecision::medium), exact),
                  of_bf16);
    }
}

TEST(Muon, newton_schulz_of_zeros_is_zero_and_of_a_small_matrix_what_it_is_of_a_large_one) {
    EXPECT_EQ(orthogonalized(Floats(64), 8, 8, 1.0f, MatmulPrecision::highest), Floats(64));
    const Floats values = random_floats(128, 1);
    const Floats expected = orthogonalized(values, 8, 16, 1.0f, MatmulPrecision::highest);
    for (float factor : {0x1p-50f, 0x1p40f}) {
        Floats scaled = values;
        for (float& value : scaled) { value *= factor; }
        EXPECT_EQ(orthogonalized(scaled, 8, 16, 1.0f, MatmulPrecision::highest), expected);
    }
}

// ---------------------------------------------------------------------------------------------------------
// - Updates

const GptShape shape{8, 20, 128, 3, 2, 16};  // positions, vocabulary, padded, layers, heads, channels

const Muon step = muon(0.02f, {0.02f, 0.9f}, 0.1f);

// The whole model's arrays without padding, after `steps` updates by `ranks` ranks.
struct Result {
    Floats params, master, m;
    Traffic traffic;
};

// Values of a shard, by their place in the model.
void scatter(Floats& model, const float* shard, const Layout& layout, int rank) {
    for (int b = 0; b < int(layout.blocks.size()); b++) {
        const Block& block = layout.blocks[size_t(b)];
        const Range range = layout.shard(b, rank);
        for (long i = 0; i < range.count; i++) {
            const long at = range.flat + i - block.offset;
            if (at < block.values) { model[size_t(block.logical_offset + at)] = shard[range.shard + i]; }
        }
    }
}

// model: values without padding
void gather(Floats& shard, const Floats& model, const Layout& layout, int rank) {
    for (int b = 0; b < int(layout.blocks.size()); b++) {
        const Block& block = layout.blocks[size_t(b)];
        const Range range = layout.shard(b, rank);
        for (long i = 0; i < range.count; i++) {
            const long at = range.flat + i - block.offset;
            shard[size_t(range.shard + i)] = at < block.values ? model[size_t(block.logical_offset + at)] : 0;
        }
    }
}

const Floats& initial() {
    static const Floats values = random_floats(gpt_layout(shape, 1, 1).values, 7);
    return values;
}

Floats gradient(int t) { return random_floats(long(initial().size()), uint64_t(100 + t)); }

// scale: of the gradients
Result updated(int ranks, int steps, float scale = 0.5f) {
    const Layout layout = gpt_layout(shape, ranks, 1);
    LocalGroup group(ranks);
    Result result;
    for (Floats* values : {&result.params, &result.master, &result.m}) { values->resize(initial().size()); }
    std::mutex mutex;
    const std::vector<std::string> errors = run_members(ranks, [&](int rank) {
        LocalComm comm(group, rank);
        Stream main, comm_stream(Stream::Kind::communicate);
        cpu::Matmul matmul(MatmulPrecision::highest);
        ShardedMuon muon(layout, comm);
        const size_t n = size_t(layout.shard_size());
        Floats params(size_t(layout.size)), master(n), m(n), gradients(n), shard_params(n);
        gather(master, initial(), layout, rank);
        Traffic traffic;
        for (int t = 1; t <= steps; t++) {
            gather(gradients, gradient(t), layout, rank);
            muon.update({params.data(), master.data(), m.data(), gradients.data()}, step, &scale, {1, 1, 0},
                        matmul, main, comm_stream, traffic);
        }
        for (int b = 0; b < int(layout.blocks.size()); b++) {
            const Range range = layout.shard(b, rank);
            std::copy_n(&params[size_t(range.flat)], range.count, &shard_params[size_t(range.shard)]);
        }
        std::lock_guard<std::mutex> lock(mutex);
        scatter(result.params, shard_params.data(), layout, rank);
        scatter(result.master, master.data(), layout, rank);
        scatter(result.m, m.data(), layout, rank);
        if (rank == 0) { result.traffic = traffic; }
    });
    for (const std::string& error : errors) { EXPECT_EQ(error, ""); }
    return result;
}

// Ten updates of every matrix by the equations, in double; all else stays.
TEST(Muon, ten_updates_of_the_layers_matrices_match_double_precision) {
    const Layout layout = gpt_layout(shape, 1, 1);
    Doubles w(initial().begin(), initial().end()), m(w.size());
    const long C = shape.channels;
    for (int t = 1; t <= 10; t++) {
        const Floats g = gradient(t);
        for (int l = 0; l < shape.layers; l++) {
            long at = layout.blocks[size_t(l)].logical_offset;
            for (auto [rows, columns] : {std::pair(C, C), {C, C}, {C, C}, {C, C}, {4 * C, C}, {C, 4 * C}}) {
                Doubles u;
                for (long i = at; i < at + rows * columns; i++) {
                    m[size_t(i)] = 0.9 * m[size_t(i)] + 0.5 * g[size_t(i)];
                    u.push_back(0.5 * g[size_t(i)] + 0.9 * m[size_t(i)]);
                }
                const double scale = 0.2 * std::sqrt(double(std::max(rows, columns)));
                u = exact_newton_schulz(u, int(rows), int(columns), scale);
                for (double value : u) {
                    w[size_t(at)] = w[size_t(at)] * (1 - 0.02 * 0.1) - 0.02 * value;
                    at++;
                }
            }
        }
    }
    const Result result = updated(1, 10);
    EXPECT_LT(relative_error(result.master, w), 1e-6);
    EXPECT_LT(relative_error(result.m, m), 1e-6);
    for (const auto& [values, by] : {std::pair(&result.m, 0.0f), {&result.params, 0.0f}}) {  // no other value
        for (size_t i = 0; i < values->size(); i++) {
            if (m[i] == 0) { EXPECT_EQ((*values)[i], by) << i; }
        }
    }
}

TEST(Muon, any_number_of_ranks_computes_the_same_bits) {
    const Result one = updated(1, 3);
    for (int ranks : {2, 3, 4, 5}) {
        SCOPED_TRACE(ranks);
        const Result result = updated(ranks, 3);
        EXPECT_EQ(result.params, one.params);
        EXPECT_EQ(result.master, one.master);
        EXPECT_EQ(result.m, one.m);
    }
}

// Twice (R - 1) shards of a layer for each R layers.
TEST(Muon, a_rank_sends_no_more_than_in_an_all_gather_of_the_layers_parameters) {
    EXPECT_EQ(updated(1, 2).traffic.bytes_sent, 0u);
    for (int ranks : {2, 3, 4, 5}) {
        const Layout layout = gpt_layout(shape, ranks, 1);
        const uint64_t shard = uint64_t(layout.blocks[0].size / ranks) * sizeof(floatX);
        const uint64_t groups = uint64_t((shape.layers + ranks - 1) / ranks), others = uint64_t(ranks - 1);
        const Traffic traffic = updated(ranks, 2).traffic;
        EXPECT_EQ(traffic.bytes_sent, 2 * 2 * groups * others * shard);
        EXPECT_EQ(traffic.bytes_received, traffic.bytes_sent);
        const uint64_t all_gather = uint64_t(shape.layers) * others * shard, one_layer = others * shard;
        EXPECT_LE(traffic.bytes_sent / 2, all_gather + (ranks == 2 ? one_layer : 0));  // three layers are odd
    }
}

TEST(Muon, a_skipped_step_changes_nothing_and_every_rank_takes_part_in_it) {
    for (int ranks : {1, 2}) {
        for (float scale : {NAN, INFINITY}) {
            const Result result = updated(ranks, 2, scale);
            EXPECT_EQ(result.master, initial());
            EXPECT_EQ(result.m, Floats(initial().size()));
            EXPECT_EQ(result.params, Floats(initial().size()));
        }
    }
}

}  // namespace test_muon
