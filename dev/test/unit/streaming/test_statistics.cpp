// Statistics of the outer gradients: sums of products of payloads against decoding by hand in double, norms
// and cosines computed from these sums, and whole syncs, in which every worker reports those of the deltas.
// Workers are threads.
#include <gtest/gtest.h>

#include <cmath>

#include "dev/test/one_part.h"
#include "dev/test/unit/local_comm.h"
#include "dev/test/unit/wire.h"
#include "dev/test/random_values.h"
#include "streaming/diloco.h"

namespace test_statistics {

Floats minus(const Floats& a, const Floats& b) {
    Floats difference(a.size());
    for (size_t i = 0; i < a.size(); i++) { difference[i] = a[i] - b[i]; }
    return difference;
}

double dot(const Floats& a, const Floats& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); i++) { sum += double(a[i]) * double(b[i]); }
    return sum;
}

double norm(const Floats& a) { return std::sqrt(dot(a, a)); }

// For sums in double that differ only in their order.
void expect_same_sum(double sum, double expected, double size) {
    EXPECT_NEAR(sum, expected, 1e-12 * size + 1e-300);
}

TEST(Statistics, sums_are_of_squares_first_then_of_pairs_row_by_row_or_with_the_mean) {
    for (int workers : {1, 2, 3, 8}) {
        int sum = 0;
        for (; sum < workers; sum++) {
            EXPECT_EQ(rows_of(sum, workers).a, sum);
            EXPECT_EQ(rows_of(sum, workers).b, sum);
        }
        for (int a = 0; a < workers; a++) {
            for (int b = a + 1; b < workers; b++, sum++) {
                EXPECT_EQ(rows_of(sum, workers).a, a);
                EXPECT_EQ(rows_of(sum, workers).b, b);
            }
        }
        EXPECT_EQ(row_sums(workers), sum);
    }
    EXPECT_EQ(row_sums(9), 19);
    EXPECT_EQ(rows_of(3, 9).b, 3);
    EXPECT_EQ(rows_of(9, 9).a, 0);
    EXPECT_EQ(rows_of(17, 9).a, 8);
    for (int sum : {9, 17, 18}) { EXPECT_EQ(rows_of(sum, 9).b, 9); }
    EXPECT_EQ(rows_of(18, 9).a, 9);  // mean . mean
}

TEST(Statistics, norms_cosines_and_the_error_follow_from_the_sums) {
    const double encoding[] = {25, 0.25};
    const OuterStatistics three = outer_statistics(encoding, {4, 9, 16, 3, -8, 0}, 3);
    EXPECT_DOUBLE_EQ(three.delta_norm, 5);
    EXPECT_DOUBLE_EQ(three.quantization_error, 0.1);
    EXPECT_EQ(three.cosines, (std::vector<double>{0.5, -1, 0}));
    EXPECT_TRUE(three.mean_cosines.empty());
    EXPECT_TRUE(outer_statistics(encoding, {4}, 1).cosines.empty());

    std::vector<double> nine(9, 4);
    for (int w = 0; w < 9; w++) { nine.push_back(w); }
    nine.push_back(16);  // of the mean
    const OuterStatistics many = outer_statistics(encoding, nine, 9);
    EXPECT_TRUE(many.cosines.empty());
    ASSERT_EQ(many.mean_cosines.size(), 9u);
    for (int w = 0; w < 9; w++) { EXPECT_DOUBLE_EQ(many.mean_cosines[size_t(w)], w / 8.0); }

    const double zeros[] = {0, 0};
    const OuterStatistics none = outer_statistics(zeros, {4, 0, 0}, 2);
    EXPECT_EQ(none.delta_norm, 0);
    EXPECT_TRUE(std::isnan(none.quantization_error));
    EXPECT_TRUE(std::isnan(none.cosines[0]));
}

// Payloads of several workers, their decoded values, and the mean.
struct Rows {
    Rows(Format format, long n, int workers)
        : layout(payload_layout(format, n)), payloads(long(layout.bytes) * workers) {
        for (int w = 0; w < workers; w++) {
            uint8_t* payload = payloads + size_t(w) * layout.bytes;
            const Floats delta = random_values(uint64_t(w), n, 0.01f * float(w + 1));
            device::quantize(payload, format, Rounding(), n, 0, {delta.data()}, n, stream);
            values.emplace_back(delta.size());
            device::dequantize_mean(values.back().data(), payload, 0, 1, format, n, stream);
        }
        mean.resize(size_t(n));
        device::dequantize_mean(mean.data(), payloads, layout.bytes, workers, format, n, stream);
    }

    const Floats& row(int number) const {
        return number == int(values.size()) ? mean : values[size_t(number)];
    }

    Stream stream;
    PayloadLayout layout;
    Buffer<uint8_t> payloads;
    std::vector<Floats> values;
    Floats mean;
};

// One chunk and part of a second, and more chunks than there are partial sums.
TEST(Statistics, sums_of_rows_are_those_of_what_is_decoded_in_every_format) {
    for (Format format : all_formats) {
        for (auto [workers, blocks] : {std::pair{1, 1L}, {2, 9L}, {2, 2100L}, {3, 8L}, {8, 3L}, {9, 11L}}) {
            Rows rows(format, 128 * blocks, workers);
            Buffer<double> partial(partial_sums(workers));
            std::vector<double> sums(size_t(row_sums(workers)), NAN);
            device::sum_rows(sums.data(), partial, rows.payloads, rows.layout.bytes, workers, rows.layout,
                             rows.mean.data(), rows.stream);
            for (int s = 0; s < row_sums(workers); s++) {
                const Floats &a = rows.row(rows_of(s, workers).a), &b = rows.row(rows_of(s, workers).b);
                expect_same_sum(sums[size_t(s)], dot(a, b), norm(a) * norm(b));
            }
        }
    }
}

TEST(Statistics, squares_of_the_largest_and_of_the_smallest_floats_are_kept) {
    for (float value : {3e38f, 1e-40f}) {
        const Floats delta(128, value);
        Buffer<uint8_t> payload(long(payload_bytes(Format::fp32, 128)));
        Buffer<double> partial(partial_sums(1));
        Stream stream;
        device::quantize(payload, Format::fp32, Rounding(), 128, 0, {delta.data()}, 128, stream);
        double sum = 0;
        device::sum_rows(&sum, partial, payload, 0, 1, payload_layout(Format::fp32, 128), nullptr, stream);
        expect_same_sum(sum, dot(delta, delta), sum);
        EXPECT_GT(sum, 0);
        EXPECT_TRUE(std::isfinite(sum));
    }
}

// Quantizes into a payload of `parts`, in two calls that need not end between parts, and sums up the loss.
struct Encoded {
    double sums[encoding_sums] = {};
    Floats decoded;

    Encoded(Format format, int parts, const Floats& global, const Floats& local, float* residual) {
        const long n = long(global.size()), cut = n / 128 / 3 * 128;
        const PayloadLayout layout = payload_layout(format, n, parts);
        Buffer<uint8_t> payload(long(layout.bytes) * parts);
        Buffer<double> partial(partial_sums(1));
        Stream stream;
        for (auto [first, count] : {std::pair{0L, cut}, {cut, n - cut}}) {
            const Source source = Source{global.data(), local.data(), residual}.from(first);
            device::quantize(payload, layout, Rounding(), first, source, count, stream);
            device::sum_encoding(sums, partial, payload, layout, first, source, count, stream);
        }
        decoded.resize(global.size());
        device::dequantize_mean(decoded.data(), payload, 0, 1, layout, nullptr, stream);
    }
};

TEST(Statistics, what_encoding_loses_is_the_delta_without_what_is_decoded) {
    for (Format format : all_formats) {
        for (auto [parts, blocks] : {std::pair{1, 1L}, {1, 1700L}, {3, 29L}, {4, 5L}}) {
            const Floats global = random_values(1, 128 * blocks, 1.0f);
            const Floats local = random_values(2, 128 * blocks, 1.0f);
            const Floats delta = minus(global, local);
            const Encoded encoded(format, parts, global, local, nullptr);
            const Floats lost = minus(delta, encoded.decoded);
            expect_same_sum(encoded.sums[0], dot(delta, delta), dot(delta, delta));
            expect_same_sum(encoded.sums[1], dot(lost, lost), dot(lost, lost));
        }
    }
}

// The delta is no longer in memory: it is recomputed as a sum of two floats, rounded once.
TEST(Statistics, with_error_feedback_it_is_the_new_residual_and_the_delta_has_the_old_one_in_it) {
    const Floats global = random_values(1, 128 * 29, 1.0f), local = random_values(2, 128 * 29, 1.0f);
    for (Format format : {Format::fp4, Format::fp8_e4m3, Format::bf16}) {
        Floats residual = random_values(3, 128 * 29, 0.5f), delta = minus(global, local);
        for (size_t i = 0; i < delta.size(); i++) { delta[i] += residual[i]; }
        const Encoded encoded(format, 3, global, local, residual.data());
        EXPECT_NEAR(encoded.sums[0], dot(delta, delta), 1e-7 * dot(delta, delta));
        expect_same_sum(encoded.sums[1], dot(residual, residual), dot(residual, residual));
        EXPECT_GT(encoded.sums[1], 0);
    }
}

// ---- whole syncs

const long shard = 128 * 21;

Layout one_block() {
    Layout layout;
    layout.ranks = 1;
    layout.blocks.push_back({"b0", 0, shard, shard, 0, 0});
    layout.size = layout.values = shard;
    return layout;
}

// Workers' parameters at the first send: after a step that all share, and one of their own.
Floats initial() { return random_values(5, shard, 0.1f); }
Floats moved(int worker) {
    Floats values = minus(initial(), random_values(6, shard, 0.01f));
    return minus(values, random_values(uint64_t(100 + worker), shard, 0.01f * float(worker + 1)));
}

// Each worker's report on the first sync.
struct Reported {
    OuterStatistics statistics;
    double mean_norm;
    Floats step;  // of the global parameters: the mean, where the optimizer is `average`
};

std::vector<Reported> first_sync(const WireOptions& wire, int workers, int not_finite = -1) {
    DilocoOptions options;
    options.inner_steps = 2;
    options.overlap = 0;
    options.outer_optimizer = "average";
    set_wire(options, wire);
    std::vector<Reported> reported(static_cast<size_t>(workers));
    LocalGroup group(workers);
    const std::vector<std::string> errors = run_members(workers, [&](int worker) {
        LocalComm comm(group, worker);
        Stream main, outer(Stream::Kind::communicate);
        const std::vector<Fragment> fragments = make_fragments(0, 1, 0, FragmentPattern::strided, 2);
        Diloco diloco(options, fragments, one_block(), 0, comm, outer);
        Floats local = initial(), params = initial();
        diloco.start(local.data(), main);
        diloco.rehearse(main);
        long step = 1;
        diloco.after_inner_step(step, 10, local.data(), params.data(), main);
        step = 2;
        local = moved(worker);
        if (worker == not_finite) { local[300] = INFINITY; }
        const std::vector<SyncReport> reports =
            diloco.after_inner_step(step, 20, local.data(), params.data(), main).syncs;
        ASSERT_EQ(reports.size(), 1u);
        const float* global = diloco.global(main);
        reported[size_t(worker)] = {reports[0].statistics, reports[0].mean_norm(),
                                    minus(initial(), Floats(global, global + shard))};
    });
    for (const std::string& error : errors) { EXPECT_EQ(error, ""); }
    return reported;
}

Floats delta_of(int worker) { return minus(initial(), moved(worker)); }

double cosine(const Floats& a, const Floats& b) { return dot(a, b) / (norm(a) * norm(b)); }

TEST(Statistics, every_worker_reports_the_norms_and_cosines_of_the_deltas_by_both_exchanges) {
    for (ExchangeKind kind : {ExchangeKind::all_gather, ExchangeKind::all_to_all}) {
        for (int workers : {1, 2, 3, 8}) {
            const std::vector<Reported> reported = first_sync({Format::fp32, kind}, workers);
            for (int w = 0; w < workers; w++) {
                const auto& [statistics, mean_norm, step] = reported[size_t(w)];
                EXPECT_NEAR(statistics.delta_norm, norm(delta_of(w)), 1e-12 * norm(delta_of(w)));
                EXPECT_EQ(statistics.quantization_error, 0);
                EXPECT_NEAR(mean_norm, norm(step), 1e-5 * norm(step));
                EXPECT_TRUE(statistics.mean_cosines.empty());
                ASSERT_EQ(statistics.cosines.size(), size_t(workers * (workers - 1) / 2));
                EXPECT_EQ(statistics.cosines, reported[0].statistics.cosines);
                size_t pair = 0;
                for (int a = 0; a < workers; a++) {
                    for (int b = a + 1; b < workers; b++, pair++) {
                        EXPECT_NEAR(statistics.cosines[pair], cosine(delta_of(a), delta_of(b)), 1e-12);
                    }
                }
            }
        }
    }
}

TEST(Statistics, more_than_eight_workers_report_cosines_with_their_mean) {
    for (ExchangeKind kind : {ExchangeKind::all_gather, ExchangeKind::all_to_all}) {
        const std::vector<Reported> reported = first_sync({Format::fp32, kind}, 9);
        for (int w = 0; w < 9; w++) {
            const OuterStatistics& statistics = reported[size_t(w)].statistics;
            EXPECT_TRUE(statistics.cosines.empty());
            EXPECT_EQ(statistics.mean_cosines, reported[0].statistics.mean_cosines);
            ASSERT_EQ(statistics.mean_cosines.size(), 9u);
            EXPECT_NEAR(statistics.mean_cosines[size_t(w)], cosine(delta_of(w), reported[0].step), 1e-5);
        }
    }
}

TEST(Statistics, rounding_shows_in_the_error_and_in_the_cosines_of_what_is_decoded) {
    for (ExchangeKind kind : {ExchangeKind::all_gather, ExchangeKind::all_to_all}) {
        Floats decoded[2];
        for (int w = 0; w < 2; w++) {
            decoded[w] = Encoded(Format::fp4, 1, initial(), moved(w), nullptr).decoded;
        }
        const std::vector<Reported> reported = first_sync({Format::fp4, kind}, 2);
        for (int w = 0; w < 2; w++) {
            const OuterStatistics& statistics = reported[size_t(w)].statistics;
            const double error = norm(minus(delta_of(w), decoded[w])) / norm(delta_of(w));
            EXPECT_NEAR(statistics.quantization_error, error, 1e-12);
            EXPECT_GT(error, 0.05);
            EXPECT_NEAR(statistics.cosines[0], cosine(decoded[0], decoded[1]), 1e-12);
            EXPECT_NEAR(reported[size_t(w)].mean_norm, norm(reported[0].step), 1e-5 * norm(reported[0].step));
        }
    }
}

TEST(Statistics, a_sync_that_no_worker_applies_has_none) {
    for (const Reported& reported : first_sync({Format::fp4, ExchangeKind::all_gather}, 2, 1)) {
        EXPECT_TRUE(std::isnan(reported.statistics.delta_norm));
        EXPECT_TRUE(reported.statistics.cosines.empty());
        EXPECT_TRUE(std::isnan(reported.mean_norm));
    }
}

}  // namespace test_statistics
