// Exchanges: all-gather and all-to-all, over a LocalComm. Bytes are compared with the formula, means with
// decoding by hand, and hashes with each other; wrong headers must be refused; and what each option of the
// wire does to whole runs. Workers are threads.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "dev/test/one_part.h"
#include "dev/test/unit/local_comm.h"
#include "dev/test/unit/toy_layout.h"
#include "dev/test/unit/wire.h"
#include "dev/test/random_values.h"
#include "streaming/diloco.h"

namespace test_exchange {

const std::vector<ExchangeKind> both_kinds = {ExchangeKind::all_gather, ExchangeKind::all_to_all};

bool same_bits(const Floats& a, const Floats& b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void expect_no_errors(const std::vector<std::string>& errors) {
    for (const std::string& error : errors) { EXPECT_EQ(error, ""); }
}

// A fragment of `n` values in two pieces, which do not adjoin in the model.
std::vector<Piece> two_pieces(long n) {
    const long cut = n / 128 / 3 * 128;
    return {{0, cut, 1000}, {cut, n - cut, 50000}};
}

std::unique_ptr<Exchange> make_exchange(const WireOptions& wire, long n, Comm& comm, Stream& stream) {
    if (wire.exchange == ExchangeKind::all_gather) {
        return std::make_unique<AllGatherExchange>(wire, n, 2, comm, stream);
    }
    return std::make_unique<AllToAllExchange>(wire, std::vector<std::vector<Piece>>{two_pieces(n)}, 2, comm,
                                              stream);
}

// The payload of one worker, as diloco.h writes it.
void write_payload(Exchange& exchange, const Sync& sync, const WireOptions& wire, int worker, uint64_t tokens,
                   const Floats& values, Stream& main) {
    uint8_t* payload = exchange.payload(sync);
    const PayloadLayout layout = exchange.layout(sync);
    for (int part = 0; part < layout.parts; part++) {
        device::write_header(payload + size_t(part) * layout.bytes,
                             make_header(sync, layout, part, worker, tokens), main);
    }
    device::clear_padding(payload, layout, main);
    const Rounding rounding = wire.rounding(worker, sync.number, RandomUse::send_rounding);
    for (const Piece& piece : two_pieces(sync.values)) {
        for_each_part(layout, piece.first, piece.count, [&](int part, long first, long count) {
            uint8_t* bytes = payload + size_t(part) * layout.bytes;
            device::add_hash(bytes, first, &values[size_t(first)], count, main);
        });
        if (piece.count == 0) { continue; }
        device::quantize(payload, layout, rounding.at(piece.index), piece.first,
                         {&values[size_t(piece.first)]}, piece.count, main);
    }
}

// `values` after encoding and decoding, with the random bits of their places in the model.
Floats rounded(const Floats& values, Format format, const Rounding& rounding) {
    const long n = long(values.size());
    Buffer<uint8_t> payload(long(payload_bytes(format, n)));
    Stream stream;
    for (const Piece& piece : two_pieces(n)) {
        if (piece.count == 0) { continue; }
        device::quantize(payload, format, rounding.at(piece.index), n, piece.first,
                         {&values[size_t(piece.first)]}, piece.count, stream);
    }
    Floats decoded(values.size());
    device::dequantize_mean(decoded.data(), payload, 0, 1, format, n, stream);
    return decoded;
}

struct Result {
    Floats mean;
    Traffic traffic;
    Headers headers;
};

// One worker's part of a sync, from the payload to the end.
Result exchange_one(Exchange& exchange, const Sync& sync, const WireOptions& wire, int worker,
                    uint64_t tokens, Stream& main) {
    write_payload(exchange, sync, wire, worker, tokens, random_values(uint64_t(worker), sync.values, 1.0f),
                  main);
    exchange.start(sync, main);
    Result result;
    result.headers = exchange.wait(sync);
    result.mean.resize(size_t(sync.values));
    exchange.mean(result.mean.data(), sync, main);
    result.traffic = exchange.finish(sync, true, main);
    return result;
}

// One exchange of `n` values among `workers`. Worker w has w + 1 tokens unless they are given.
std::vector<Result> exchange_once(const WireOptions& wire, long n, int workers,
                                  std::vector<uint64_t> tokens = {}) {
    std::vector<Result> results(static_cast<size_t>(workers));
    LocalGroup group(workers);
    expect_no_errors(run_members(workers, [&](int worker) {
        LocalComm comm(group, worker);
        Stream main, outer(Stream::Kind::communicate);
        const std::unique_ptr<Exchange> exchange = make_exchange(wire, n, comm, outer);
        const uint64_t own = tokens.empty() ? uint64_t(worker) + 1 : tokens[size_t(worker)];
        results[size_t(worker)] = exchange_one(*exchange, {3, 0, 17, n}, wire, worker, own, main);
    }));
    return results;
}

// The mean by hand: workers' values are rounded and, with weights if given, summed in ascending order.
Floats mean_by_hand(const WireOptions& wire, long n, int workers, const std::vector<float>& weights) {
    Floats sum(static_cast<size_t>(n));
    for (int worker = 0; worker < workers; worker++) {
        const Floats values = rounded(random_values(uint64_t(worker), n, 1.0f), wire.format,
                                      wire.rounding(worker, 3, RandomUse::send_rounding));
        for (size_t i = 0; i < values.size(); i++) {
            sum[i] = weights.empty() ? sum[i] + values[i] : fmaf(weights[size_t(worker)], values[i], sum[i]);
        }
    }
    if (weights.empty()) {
        for (float& value : sum) { value /= float(workers); }
    }
    return sum;
}

// The same mean as received: in all-to-all the owner of each part rounds it once more.
Floats arriving_mean(const WireOptions& wire, long n, int workers, const std::vector<float>& weights = {}) {
    const Floats mean = mean_by_hand(wire, n, workers, weights);
    if (wire.exchange == ExchangeKind::all_gather) { return mean; }
    Floats arriving = mean;
    const long part = (n / 128 + workers - 1) / workers * 128;
    for (int owner = 0; owner < workers; owner++) {
        const Floats all = rounded(mean, wire.format, wire.rounding(owner, 3, RandomUse::owner_rounding));
        const long begin = std::min(owner * part, n), end = std::min(begin + part, n);
        std::copy(all.begin() + begin, all.begin() + end, arriving.begin() + begin);
    }
    return arriving;
}

// fp4 takes half a byte per value and 2 per block, in multiples of 16 bytes. Each sum takes 8.
size_t fp4_bytes(size_t headers, size_t blocks, size_t sums = 0) {
    return 64 * headers + (8 * sums + 15) / 16 * 16 + (2 * blocks + 15) / 16 * 16 + 64 * blocks;
}

TEST(Exchange, bytes_on_the_wire_are_those_of_the_formula_for_sizes_that_divide_by_nothing) {
    for (int workers : {2, 3, 4, 8}) {
        for (long blocks : {1L, 7L, 8L, 29L, 101L}) {
            const size_t others = size_t(workers - 1), M = size_t(workers);
            const size_t part = (size_t(blocks) + M - 1) / M;
            WireOptions wire{Format::fp4, ExchangeKind::all_gather};
            for (const Result& result : exchange_once(wire, 128 * blocks, workers)) {
                EXPECT_EQ(result.traffic.bytes_sent, others * fp4_bytes(1, size_t(blocks)));
                EXPECT_EQ(result.traffic.bytes_received, result.traffic.bytes_sent);
            }
            wire.exchange = ExchangeKind::all_to_all;
            for (const Result& result : exchange_once(wire, 128 * blocks, workers)) {
                EXPECT_EQ(result.traffic.bytes_sent,
                          others * (fp4_bytes(1, part) + fp4_bytes(1 + M, part, M * (M + 1) / 2)));
                EXPECT_EQ(result.traffic.bytes_received, result.traffic.bytes_sent);
            }
        }
    }
}

TEST(Exchange, the_plans_bytes_are_those_that_travel_in_every_format) {
    for (ExchangeKind kind : both_kinds) {
        for (Format format : all_formats) {
            for (int workers : {1, 3}) {
                const size_t bytes = exchange_bytes(kind, format, 128 * 10, workers);
                EXPECT_EQ(exchange_once({format, kind}, 128 * 10, workers)[0].traffic.bytes_sent, bytes);
            }
        }
    }
}

TEST(Exchange, auto_is_the_one_with_fewer_bytes) {
    auto chosen = [](Format format, long blocks, int workers) {
        return choose_exchange({format}, {128 * blocks}, workers);
    };
    EXPECT_EQ(chosen(Format::fp4, 1000, 1), ExchangeKind::all_gather);
    for (Format format : all_formats) {
        EXPECT_EQ(chosen(format, 1000, 2), ExchangeKind::all_gather);  // as many values, but more headers
        EXPECT_EQ(chosen(format, 1000, 3), ExchangeKind::all_to_all);
    }
    EXPECT_EQ(chosen(Format::fp4, 3, 3), ExchangeKind::all_gather);  // little but headers
    EXPECT_EQ(choose_exchange({Format::fp4}, {128 * 3, 128 * 1000}, 3), ExchangeKind::all_to_all);
    EXPECT_EQ(choose_exchange({Format::fp4, ExchangeKind::all_to_all}, {128}, 1), ExchangeKind::all_to_all);
    for (ExchangeKind kind : both_kinds) { EXPECT_EQ(parse_exchange(name_of(kind)), kind); }
    EXPECT_EQ(parse_exchange("auto"), ExchangeKind::automatic);
    EXPECT_THROW(parse_exchange("ring"), UserError);
}

TEST(Exchange, the_mean_is_what_decoding_by_hand_gives_on_every_worker) {
    for (ExchangeKind kind : both_kinds) {
        for (bool stochastic : {false, true}) {
            for (Format format : all_formats) {
                for (auto [workers, blocks] : {std::pair{1, 3L}, {2, 5L}, {3, 29L}, {4, 2L}, {8, 101L}}) {
                    const WireOptions wire{format, kind, stochastic, 1234};
                    const Floats expected = arriving_mean(wire, 128 * blocks, workers);
                    for (const Result& result : exchange_once(wire, 128 * blocks, workers)) {
                        ASSERT_TRUE(same_bits(result.mean, expected))
                            << name_of(kind) << " " << name_of(format) << " " << workers;
                    }
                }
            }
        }
    }
}

TEST(Exchange, a_mean_by_tokens_is_what_the_weights_by_hand_give) {
    for (ExchangeKind kind : both_kinds) {
        for (Format format : {Format::fp4, Format::fp32}) {
            const WireOptions wire{format, kind, false, 0, false, true};
            const std::vector<float> weights = {100.0f / 133, 0.0f, 33.0f / 133};
            const Floats expected = arriving_mean(wire, 128 * 7, 3, weights);
            for (const Result& result : exchange_once(wire, 128 * 7, 3, {100, 0, 33})) {
                EXPECT_TRUE(same_bits(result.mean, expected));
            }
            const Floats equal = arriving_mean(wire, 128 * 7, 3, {1.0f / 3, 1.0f / 3, 1.0f / 3});
            EXPECT_TRUE(same_bits(exchange_once(wire, 128 * 7, 3, {0, 0, 0})[1].mean, equal));
        }
    }
}

TEST(Exchange, a_sync_in_the_buffers_of_another_has_its_own_bytes_and_nothing_of_the_others_rounding) {
    for (ExchangeKind kind : both_kinds) {
        const WireOptions wire{Format::fp4, kind};
        LocalGroup group(3);
        expect_no_errors(run_members(3, [&](int worker) {
            LocalComm comm(group, worker);
            Stream main, outer(Stream::Kind::communicate);
            const std::unique_ptr<Exchange> exchange = make_exchange(wire, 128 * 7, comm, outer);
            const Result first = exchange_one(*exchange, {3, 0, 17, 128 * 7}, wire, worker, 1, main);
            const Result second = exchange_one(*exchange, {4, 0, 22, 128 * 7}, wire, worker, 1, main);
            EXPECT_TRUE(same_bits(first.mean, second.mean)) << name_of(kind);
            EXPECT_EQ(first.traffic.bytes_sent, second.traffic.bytes_sent) << name_of(kind);
            EXPECT_EQ(first.traffic.bytes_received, second.traffic.bytes_received) << name_of(kind);
        }));
    }
}

TEST(Exchange, the_hashes_of_the_parts_add_up_to_that_of_the_whole) {
    for (int workers : {2, 3, 8}) {
        const long n = 128 * 13;
        const std::vector<Result> whole = exchange_once({Format::fp4, ExchangeKind::all_gather}, n, workers);
        const std::vector<Result> parts = exchange_once({Format::fp4, ExchangeKind::all_to_all}, n, workers);
        ASSERT_EQ(parts[0].headers.sent.size(), size_t(workers));
        for (size_t worker = 0; worker < size_t(workers); worker++) {
            uint64_t sum = 0;
            for (const std::vector<PayloadHeader>& part : parts[0].headers.sent) {
                EXPECT_EQ(part[worker].tokens, worker + 1);
                sum += part[worker].hash;
            }
            EXPECT_EQ(sum, whole[0].headers.sent[0][worker].hash);
            EXPECT_NE(sum, 0u);
        }
    }
}

TEST(Exchange, what_parts_lack_of_blocks_is_zeros_also_where_another_fragment_lay) {
    for (Format format : all_formats) {
        const PayloadLayout layout = payload_layout(format, 128 * 5, 4);  // 2, 2, 1 and no blocks
        Buffer<uint8_t> payload(long(layout.bytes) * 4);
        memset(payload.data(), 0xff, layout.bytes * 4);
        Stream stream;
        device::clear_padding(payload, layout, stream);
        for (int part = 0; part < 4; part++) {
            Floats decoded(256, 7.0f);
            const uint8_t* bytes = payload + size_t(part) * layout.bytes;
            device::dequantize_mean(decoded.data(), bytes, 0, 1, format, 256, stream);
            const long lacking = part < 2 ? 0 : part == 2 ? 128 : 256;
            EXPECT_EQ(std::count(decoded.end() - lacking, decoded.end(), 0.0f), lacking);
            EXPECT_EQ(bytes[0], 0xff);
            if (lacking < 256) { EXPECT_EQ(bytes[layout.codes], 0xff); }
        }
    }
}

// ---- whole runs

const long H = 5;
const Layout layout = toy_layout({128, 384, 128, 256, 640}, 4);  // fragments of b0 and b2, b1 and b3, b4

struct Worker {
    Worker(const DilocoOptions& options, Comm& comm)
        : number(comm.rank()), outer_stream(Stream::Kind::communicate),
          diloco(options, make_fragments(4, 5, 2, FragmentPattern::strided, H), layout, 0, comm,
                 outer_stream),
          local(random_values(77, layout.size, 0.1f)), params(local) {
        diloco.start(local.data(), main);
    }

    // Stands for an inner optimizer.
    void inner_step(long step) {
        const Floats gradient = random_values(uint64_t(1000 * (number + 1) + step), layout.size, 0.01f);
        for (size_t i = 0; i < local.size(); i++) { local[i] -= 0.02f * local[i] + gradient[i]; }
    }

    std::vector<SyncReport> after(long step) {
        const uint64_t tokens = uint64_t(step) * tokens_a_step;
        return diloco.after_inner_step(step, tokens, local.data(), params.data(), main).syncs;
    }

    Floats global() {
        const float* values = diloco.global(main);
        return Floats(values, values + layout.size);
    }

    int number;
    uint64_t tokens_a_step = 10;
    Stream main, outer_stream;
    Diloco diloco;
    Floats local, params;
};

DilocoOptions options_with(const WireOptions& wire) {
    DilocoOptions options;
    options.inner_steps = H;
    options.overlap = 2;
    set_wire(options, wire);
    return options;
}

using Prepare = std::function<void(Worker&, long)>;

// Runs `steps` steps. Returns workers' global parameters after each. prepare() is called before its sends.
std::vector<std::vector<Floats>> run(const DilocoOptions& options, int workers, long steps,
                                     const Prepare& prepare = nullptr,
                                     std::vector<std::string>* errors = nullptr) {
    std::vector<std::vector<Floats>> globals(static_cast<size_t>(workers));
    LocalGroup group(workers, 5);
    const std::vector<std::string> thrown = run_members(workers, [&](int number) {
        LocalComm comm(group, number);
        Worker worker(options, comm);
        for (long step = 1; step <= steps; step++) {
            worker.inner_step(step);
            if (prepare) { prepare(worker, step); }
            worker.after(step);
            globals[size_t(number)].push_back(worker.global());
        }
        worker.diloco.finish(0, worker.local.data(), worker.params.data(), worker.main);
    });
    if (errors) {
        *errors = thrown;
    } else {
        expect_no_errors(thrown);
    }
    return globals;
}

TEST(Wire, global_is_bitwise_the_same_on_all_workers_with_every_option) {
    for (ExchangeKind kind : both_kinds) {
        for (Format format : all_formats) {
            for (int bits = 0; bits < 8; bits++) {
                const WireOptions wire{format, kind, bool(bits & 1), 99, bool(bits & 2), bool(bits & 4)};
                const int workers = 2 + bits % 3;
                const auto globals = run(options_with(wire), workers, 23, [](Worker& worker, long) {
                    worker.tokens_a_step = uint64_t(worker.number == 1 ? 5 : 10);
                });
                for (const std::vector<Floats>& of_one : globals) {
                    for (size_t step = 0; step < of_one.size(); step++) {
                        ASSERT_TRUE(same_bits(of_one[step], globals[0][step])) << name_of(format) << step;
                    }
                }
                ASSERT_FALSE(same_bits(globals[0].back(), globals[0].front()));
            }
        }
    }
}

// In fp32 nothing is lost: both exchanges give the same, and rounding and feedback change nothing.
TEST(Wire, in_fp32_exchange_rounding_and_feedback_change_no_bit) {
    const auto expected = run(options_with({Format::fp32, ExchangeKind::all_gather}), 3, 23);
    for (ExchangeKind kind : both_kinds) {
        for (bool on : {false, true}) {
            const auto globals = run(options_with({Format::fp32, kind, on, 1, on}), 3, 23);
            EXPECT_TRUE(same_bits(globals[2].back(), expected[0].back()));
        }
    }
}

TEST(Wire, each_option_changes_what_it_should_and_is_repeatable) {
    for (ExchangeKind kind : both_kinds) {
        const WireOptions nearest{Format::fp4, kind}, stochastic{Format::fp4, kind, true, 1};
        const WireOptions other_seed{Format::fp4, kind, true, 2}, feedback{Format::fp4, kind, false, 0, true};
        std::vector<Floats> ends;
        for (const WireOptions& wire : {nearest, stochastic, other_seed, feedback}) {
            ends.push_back(run(options_with(wire), 3, 23)[0].back());
            EXPECT_TRUE(same_bits(run(options_with(wire), 3, 23)[0].back(), ends.back()));
        }
        for (size_t i = 0; i < ends.size(); i++) {
            for (size_t j = 0; j < i; j++) { EXPECT_FALSE(same_bits(ends[i], ends[j])); }
        }
    }
}

TEST(Wire, a_flipped_bit_of_global_parameters_names_the_fragment_and_the_worker_that_stands_alone) {
    for (ExchangeKind kind : both_kinds) {
        for (int workers : {2, 3, 4}) {
            std::vector<std::string> errors;
            run(options_with({Format::fp4, kind}), workers, 14, [](Worker& worker, long step) {
                if (step == 8 && worker.number == 1) {  // b4 is fragment 2, offset 3, sent at 3, 8 and 13
                    float* global = const_cast<float*>(worker.diloco.global(worker.main));
                    float& value = global[128 + 384 + 128 + 256 + 600];
                    value = bits_to_float(float_to_bits(value) ^ 1);
                }
            }, &errors);
            for (const std::string& error : errors) {
                EXPECT_NE(error.find("fragment 2 (sync 4, sent at step 8)"), std::string::npos) << error;
                const char* who = workers == 2 ? "(suspected: workers 0 and 1):" : "(suspected: worker 1):";
                EXPECT_NE(error.find(who), std::string::npos) << error;
            }
        }
    }
}

TEST(Wire, a_delta_that_is_not_finite_is_applied_by_none_and_named_by_all) {
    for (ExchangeKind kind : both_kinds) {
        LocalGroup group(3);
        std::vector<Floats> globals(3);
        expect_no_errors(run_members(3, [&](int number) {
            LocalComm comm(group, number);
            Worker worker(options_with({Format::fp4, kind, true, 5, true}), comm);
            for (long step = 1; step <= 24; step++) {
                worker.inner_step(step);
                const float kept = worker.local[200];  // of b1, which is sent at 1, 6, 11, ...
                if (step == 11 && number == 2) { worker.local[200] = NAN; }
                const Floats before = worker.global();
                for (const SyncReport& report : worker.after(step)) {
                    const bool refused = report.send_step == 11;
                    EXPECT_EQ(report.not_finite, refused ? std::vector<int>{2} : std::vector<int>{});
                    EXPECT_EQ(same_bits(worker.global(), before), refused);
                    EXPECT_GT(report.traffic.bytes_sent, 0u);
                }
                if (step == 11) { worker.local[200] = kept; }
            }
            globals[size_t(number)] = worker.global();
        }));
        for (const Floats& global : globals) {
            EXPECT_TRUE(same_bits(global, globals[0]));
            for (float value : global) { ASSERT_TRUE(std::isfinite(value)); }
        }
    }
}

// A whole sync by hand, rounded to nearest, with the residuals of all workers and of the mean.
struct ByHand {
    ByHand(const WireOptions& wire, const Floats& initial, int workers)
        : wire(wire), global(initial), of_mean(initial.size()),
          of_workers(size_t(workers), Floats(initial.size())) {}

    // Values as they arrive. `residual` becomes their rounding errors.
    Floats sent(const Source& source) const {
        const long n = long(global.size());
        Buffer<uint8_t> payload(long(payload_bytes(wire.format, n)));
        Stream stream;
        device::quantize(payload, wire.format, Rounding(), n, 0, source, n, stream);
        Floats arrived(global.size());
        device::dequantize_mean(arrived.data(), payload, 0, 1, wire.format, n, stream);
        return arrived;
    }

    // global -= mean   locals: of each worker
    void sync(const std::vector<Floats>& locals) {
        Floats mean(global.size());
        for (size_t worker = 0; worker < locals.size(); worker++) {
            const Floats arrived = sent({global.data(), locals[worker].data(), of_workers[worker].data()});
            for (size_t i = 0; i < mean.size(); i++) { mean[i] += arrived[i]; }
        }
        for (float& value : mean) { value /= float(locals.size()); }
        if (wire.exchange == ExchangeKind::all_to_all) {
            mean = sent({mean.data(), nullptr, of_mean.data()});
        }
        for (size_t i = 0; i < mean.size(); i++) { global[i] -= mean[i]; }
    }

    WireOptions wire;
    Floats global, of_mean;
    std::vector<Floats> of_workers;
};

TEST(Wire, feedback_of_senders_and_owners_is_as_by_hand_and_as_before_where_a_sync_is_refused) {
    const int workers = 3, refused = 4;
    const Layout small = toy_layout({128 * 5, 128 * 2}, 2);
    for (ExchangeKind kind : both_kinds) {
        DilocoOptions options;
        options.inner_steps = 1;
        options.overlap = 0;
        options.local_weight = 1;
        options.outer_optimizer = "average";
        set_wire(options, {Format::fp4, kind, false, 0, true});
        auto local_at = [&](int worker, long step) {
            return random_values(uint64_t(100 * step + worker), small.size, 0.1f);
        };
        const Floats initial = random_values(1, small.size, 0.1f);
        ByHand expected(wire_options(options), initial, workers);
        std::vector<Floats> expected_at;
        for (long step = 1; step <= 9; step++) {
            std::vector<Floats> locals;
            for (int worker = 0; worker < workers; worker++) { locals.push_back(local_at(worker, step)); }
            if (step != refused) { expected.sync(locals); }
            expected_at.push_back(expected.global);
        }
        LocalGroup group(workers);
        expect_no_errors(run_members(workers, [&](int worker) {
            LocalComm comm(group, worker);
            Stream main, outer(Stream::Kind::communicate);
            Diloco diloco(options, make_fragments(2, 2, 0, FragmentPattern::strided, 1), small, 0, comm,
                          outer);
            Floats params = initial;
            diloco.start(initial.data(), main);
            diloco.rehearse(main);
            for (long step = 1; step <= 9; step++) {
                Floats local = local_at(worker, step);
                if (step == refused && worker == 1) { local[130] = INFINITY; }
                diloco.after_inner_step(step, 0, local.data(), params.data(), main);
                const float* global = diloco.global(main);
                ASSERT_TRUE(same_bits(Floats(global, global + small.size), expected_at[size_t(step - 1)]))
                    << name_of(kind) << " " << step;
            }
        }));
    }
}

TEST(Wire, a_worker_with_half_the_batch_has_a_third_of_the_mean_of_two) {
    const Layout small = toy_layout({128 * 5, 128 * 2}, 2);
    for (ExchangeKind kind : both_kinds) {
        DilocoOptions options;
        options.inner_steps = 4;
        options.overlap = 0;
        options.outer_optimizer = "average";
        set_wire(options, {Format::fp32, kind, false, 0, false, true});
        const Floats initial = random_values(1, small.size, 1.0f);
        const Floats ends[2] = {random_values(2, small.size, 1.0f), random_values(3, small.size, 1.0f)};
        Floats expected = initial;
        for (size_t i = 0; i < expected.size(); i++) {
            const float full = initial[i] - ends[0][i], half = initial[i] - ends[1][i];
            const float two_thirds = 128.0f / 192, third = 64.0f / 192;  // tokens of four steps
            expected[i] = initial[i] - fmaf(third, half, two_thirds * full);
        }
        LocalGroup group(2);
        expect_no_errors(run_members(2, [&](int worker) {
            LocalComm comm(group, worker);
            Stream main, outer(Stream::Kind::communicate);
            Diloco diloco(options, make_fragments(2, 2, 0, FragmentPattern::strided, 4), small, 0, comm,
                          outer);
            Floats local = ends[worker], params = initial;
            diloco.start(initial.data(), main);
            for (long step = 1; step <= 4; step++) {
                const uint64_t tokens = uint64_t(step) * (worker == 0 ? 32 : 16);
                diloco.after_inner_step(step, tokens, local.data(), params.data(), main);
            }
            const float* global = diloco.global(main);
            EXPECT_TRUE(same_bits(Floats(global, global + small.size), expected));
        }));
    }
}

// fp32 sends each value, and their sum is more than fp32 holds.
TEST(Wire, a_mean_that_is_not_finite_is_applied_by_none_and_its_owner_named) {
    const Layout small = toy_layout({128 * 3}, 1);
    DilocoOptions options;
    options.inner_steps = 1;
    options.overlap = 0;
    set_wire(options, {Format::fp32, ExchangeKind::all_to_all});
    LocalGroup group(3);
    expect_no_errors(run_members(3, [&](int worker) {
        LocalComm comm(group, worker);
        Stream main, outer(Stream::Kind::communicate);
        Diloco diloco(options, make_fragments(1, 1, 0, FragmentPattern::strided, 1), small, 0, comm, outer);
        Floats local(size_t(small.size)), params = local;
        diloco.start(local.data(), main);
        local[200] = -3e38f;
        long step = 1;
        const std::vector<SyncReport> reports =
            diloco.after_inner_step(step, 0, local.data(), params.data(), main).syncs;
        EXPECT_EQ(reports[0].not_finite, std::vector<int>{1});
        EXPECT_EQ(diloco.global(main)[200], 0.0f);
    }));
}

// Delays all work that main gets after the point at which the wire takes the payload.
class CommAheadOfMain : public LocalComm {
public:
    CommAheadOfMain(LocalGroup& group, int rank, Stream& main) : LocalComm(group, rank), main(main) {}

    void all_gather(void* out, const void* inp, size_t bytes, Stream& stream, Traffic* traffic) override {
        hold();
        LocalComm::all_gather(out, inp, bytes, stream, traffic);
    }

    void all_to_all(void* out, const void* inp, size_t bytes, Stream& stream, Traffic* traffic) override {
        hold();
        LocalComm::all_to_all(out, inp, bytes, stream, traffic);
    }

private:
    void hold() {
        main.enqueue([] { std::this_thread::sleep_for(std::chrono::milliseconds(30)); });
    }

    Stream& main;
};

// The host reads the sums after it has waited for the exchange, and for nothing else.
TEST(Wire, the_sums_of_what_a_worker_encodes_are_the_hosts_before_the_exchange_is_through) {
    const Layout small = toy_layout({128 * 5, 128 * 2}, 2);
    for (ExchangeKind kind : both_kinds) {
        DilocoOptions options;
        options.inner_steps = 2;
        options.overlap = 1;
        set_wire(options, {Format::fp32, kind});
        const Floats initial = random_values(1, small.size, 1.0f);
        LocalGroup group(2);
        expect_no_errors(run_members(2, [&](int worker) {
            Stream main(Stream::Kind::communicate), outer(Stream::Kind::communicate);
            CommAheadOfMain comm(group, worker, main);
            Diloco diloco(options, make_fragments(2, 2, 0, FragmentPattern::strided, 2), small, 0, comm,
                          outer);
            Floats params = initial, local = random_values(uint64_t(2 + worker), small.size, 1.0f);
            double square = 0;
            for (size_t i = 0; i < local.size(); i++) {
                const double delta = double(initial[i] - local[i]);
                square += delta * delta;
            }
            diloco.start(initial.data(), main);
            long step = 2;
            diloco.after_inner_step(step, 10, local.data(), params.data(), main);
            diloco.take_snapshot(main);
            diloco.collect_in_flight(main);
            diloco.snapshot().wait();
            Fields fields;
            diloco.snapshot().add_fields(fields);
            EXPECT_NEAR(fields.real("in_flight.0.delta_norm"), std::sqrt(square), 1e-6 * std::sqrt(square));
        }));
    }
}

// ---- headers by all-to-all

// An exchange up to the wait for its mean.
void send_and_wait(LocalComm& comm) {
    Stream main, outer(Stream::Kind::communicate);
    const WireOptions wire{Format::fp4, ExchangeKind::all_to_all};
    const std::unique_ptr<Exchange> exchange = make_exchange(wire, 128 * 7, comm, outer);
    const Sync sync{3, 0, 17, 128 * 7};
    write_payload(*exchange, sync, wire, comm.rank(), 1, random_values(1, 128 * 7, 1.0f), main);
    exchange->start(sync, main);
    exchange->wait(sync);
}

TEST(AllToAll, a_header_that_is_wrong_in_either_stage_is_refused_by_all_workers_that_receive_it) {
    struct Damage {
        size_t offset;
        const char* what;
    };
    for (bool of_mean : {false, true}) {
        for (const Damage& damage : {Damage{offsetof(PayloadHeader, magic), "magic number"},
                                     Damage{offsetof(PayloadHeader, version), "version"},
                                     Damage{offsetof(PayloadHeader, format), "number format"},
                                     Damage{offsetof(PayloadHeader, sync), "sync number"},
                                     Damage{offsetof(PayloadHeader, fragment), "fragment"},
                                     Damage{offsetof(PayloadHeader, worker), "sender"},
                                     Damage{offsetof(PayloadHeader, send_step), "send step"},
                                     Damage{offsetof(PayloadHeader, values), "number of values"},
                                     Damage{offsetof(PayloadHeader, part), "part"},
                                     Damage{offsetof(PayloadHeader, parts), "number of parts"}}) {
            LocalGroup group(3, 5);
            // Worker 1's payload, as worker 0 gets it for the part that it owns; or the mean that 1 owns.
            const long call_of_stage = of_mean ? 1 : 0;
            auto corrupt = [&](long call, uint8_t* parts, size_t bytes) {
                if (call == call_of_stage) { parts[bytes + damage.offset] ^= 4; }
            };
            const std::vector<std::string> errors = run_members(3, [&](int worker) {
                LocalComm comm(group, worker, nullptr, worker == 0 ? corrupt : LocalComm::Corrupt());
                send_and_wait(comm);
            });
            const std::string expected = "the payload of worker 1 for fragment 0 (sync 3, sent at step 17) "
                                         "was refused: its " + std::string(damage.what) + " is ";
            for (size_t worker = 0; worker < 3; worker++) {
                if (worker == 0 || !of_mean) {  // what was received in stage 1 travels on in stage 2
                    EXPECT_EQ(errors[worker].substr(0, expected.size()), expected);
                } else {
                    EXPECT_EQ(errors[worker], "");
                }
            }
        }
    }
}

TEST(AllToAll, the_header_of_every_worker_and_of_every_mean_is_looked_at) {
    for (long stage : {0, 1}) {
        for (size_t damaged : {0, 1, 2}) {
            LocalGroup group(3, 5);
            auto corrupt = [&](long call, uint8_t* parts, size_t bytes) {
                if (call == stage) { parts[damaged * bytes + offsetof(PayloadHeader, sync)] ^= 4; }
            };
            const std::vector<std::string> errors = run_members(3, [&](int worker) {
                LocalComm comm(group, worker, nullptr, worker == 0 ? corrupt : LocalComm::Corrupt());
                send_and_wait(comm);
            });
            const std::string expected = "the payload of worker " + std::to_string(damaged) + " for ";
            EXPECT_EQ(errors[0].substr(0, expected.size()), expected);
        }
    }
}

TEST(AllToAll, a_worker_that_leaves_between_the_stages_is_named) {
    LocalGroup group(3, 5);
    const std::vector<std::string> errors = run_members(3, [&](int worker) {
        auto delay = [&](long call) {
            if (call == 1 && worker == 2) { group.leave(2); }
            return 0.0;
        };
        LocalComm comm(group, worker, delay);
        send_and_wait(comm);
    });
    for (const std::string& error : errors) {
        EXPECT_EQ(error, "the exchange of fragment 0 (sync 3, sent at step 17) failed with worker 2: "
                         "the connection was closed");
    }
}

}  // namespace test_exchange
