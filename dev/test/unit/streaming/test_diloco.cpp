// The state machine of Streaming DiLoCo: against arithmetic written out by hand, bitwise between workers, and
// under failures. Workers are threads that meet in a LocalComm.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <future>
#include <map>
#include <set>

#include "dev/test/one_part.h"
#include "dev/test/unit/local_comm.h"
#include "dev/test/unit/toy_layout.h"
#include "llmc/random.h"
#include "streaming/diloco.h"

namespace test_diloco {

std::vector<Fragment> fragments_of(const Layout& layout, int fragment_layers, long H) {
    const int blocks = int(layout.blocks.size());
    return make_fragments(layout.layers, blocks, fragment_layers, FragmentPattern::strided, H);
}

// One worker's rank: its streams, parameters and Diloco.
struct Member {
    Member(const DilocoOptions& options, const std::vector<Fragment>& fragments, const Layout& layout,
           Comm& comm, int rank = 0)
        : layout(layout), rank(rank), worker(comm.rank()), outer_stream(Stream::Kind::communicate),
          diloco(options, fragments, layout, rank, comm, outer_stream), local(size_t(layout.shard_size())),
          params(size_t(layout.size), -1.0f) {
        for (size_t i = 0; i < local.size(); i++) { local[i] = standard_normal(7, RandomUse::parameters, i); }
    }

    void start() { diloco.start(local.data(), main); }

    // Stands for an inner optimizer: a move that depends on worker, step and parameter.
    void inner_step(long step, float size = 0.01f) {
        for (size_t i = 0; i < local.size(); i++) {
            uint64_t index = i + local.size() * uint64_t(step);
            local[i] -= size * (local[i] + standard_normal(uint64_t(worker) + 1, RandomUse::sampling, index));
        }
        for (int block = 0; block < int(layout.blocks.size()); block++) {
            Range range = layout.shard(block, rank);
            std::copy_n(&local[range.shard], range.count, &params[range.flat]);
        }
    }

    std::vector<SyncReport> after(long step, uint64_t tokens = 0) {
        return diloco.after_inner_step(step, tokens, local.data(), params.data(), main).syncs;
    }
    std::vector<SyncReport> finish() { return diloco.finish(0, local.data(), params.data(), main).syncs; }

    std::vector<float> global() {
        const float* values = diloco.global(main);
        return std::vector<float>(values, values + layout.shard_size());
    }

    const Layout& layout;
    int rank, worker;
    Stream main, outer_stream;
    Diloco diloco;
    std::vector<float> local, params;
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void expect_no_errors(const std::vector<std::string>& errors) {
    for (const std::string& error : errors) { EXPECT_EQ(error, ""); }
}

// Both fragments, one weight each, after each of `steps` inner steps: written out from the definition,
// without any code of streaming/.
std::vector<std::array<double, 2>> recurrence(int steps, int tau, double alpha) {
    double local[2] = {1, 1}, global[2] = {1, 1}, delta[2] = {0, 0};
    std::vector<std::array<double, 2>> trace;
    for (int step = 1; step <= steps; step++) {
        for (int p = 0; p < 2; p++) {
            local[p] -= 1 * 2;  // inner SGD: lr 1, gradient 2
            const int applied = 3 * (p + 1);
            if (step + tau >= applied && (step + tau - applied) % 6 == 0) { delta[p] = global[p] - local[p]; }
            if (step >= applied && (step - applied) % 6 == 0) {
                global[p] -= 2 * delta[p];  // outer SGD: lr 2
                local[p] = alpha * local[p] + (1 - alpha) * global[p];
            }
        }
        trace.push_back({local[0], local[1]});
    }
    return trace;
}

TEST(Diloco, the_recurrence_of_two_fragments_is_exact_in_all_six_cases) {
    // Some of its values, worked out on paper, so that a mistake in recurrence() would be noticed.
    EXPECT_EQ(recurrence(18, 0, 0.0)[2][0], -11);   // 1 - 2 * 6
    EXPECT_EQ(recurrence(18, 0, 0.0)[8][0], -35);   // -11 - 2 * 12
    EXPECT_EQ(recurrence(18, 0, 0.5)[2][0], -8);    // (-5 - 11) / 2
    EXPECT_EQ(recurrence(18, 1, 0.0)[2][0], -7);    // 1 - 2 * 4, sent at step 2
    EXPECT_EQ(recurrence(18, 1, 0.0)[5][1], -19);   // 1 - 2 * 10, sent at step 5
    EXPECT_EQ(recurrence(18, 1, 0.5)[2][0], -6);    // (-5 - 7) / 2
    EXPECT_EQ(recurrence(18, 1, 1.0)[17][1], -35);  // never touched: 1 - 2 * 18

    const Layout layout = toy_layout({128, 128}, 2);
    for (long tau : {0, 1}) {
        for (float alpha : {0.0f, 0.5f, 1.0f}) {
            DilocoOptions options;
            options.inner_steps = 6;
            options.overlap = tau;
            options.local_weight = alpha;
            options.outer_lr = 2;
            options.outer_momentum = 0;
            options.outer_format = "fp32";
            std::vector<Fragment> fragments = fragments_of(layout, 1, 6);
            fragments[0].offset = 3 - tau;
            fragments[1].offset = (6 - tau) % 6;
            const std::vector<std::array<double, 2>> expected = recurrence(30, int(tau), double(alpha));
            LocalGroup group(2);
            expect_no_errors(run_members(2, [&](int worker) {
                LocalComm comm(group, worker);
                Member member(options, fragments, layout, comm);
                std::fill(member.local.begin(), member.local.end(), 1.0f);
                member.start();
                for (long step = 1; step <= 30; step++) {
                    for (float& value : member.local) { value -= 2; }
                    member.after(step);
                    for (size_t i = 0; i < 256; i++) {
                        EXPECT_EQ(double(member.local[i]), expected[size_t(step - 1)][i / 128])
                            << "tau " << tau << " alpha " << alpha << " step " << step;
                    }
                }
            }));
        }
    }
}

TEST(Diloco, one_fragment_without_overlap_in_fp32_is_algorithm_1_of_DiLoCo) {
    const int workers = 3, H = 7, steps = 28;
    const Layout layout = toy_layout({256, 128, 384}, 2);
    DilocoOptions options;
    options.inner_steps = H;
    options.overlap = 0;
    options.local_weight = 0;
    options.outer_format = "fp32";
    std::vector<std::vector<float>> local(workers), global(workers), initial(workers);
    LocalGroup group(workers);
    expect_no_errors(run_members(workers, [&](int worker) {
        LocalComm comm(group, worker);
        Member member(options, fragments_of(layout, 0, H), layout, comm);
        initial[worker] = member.local;
        member.start();
        for (long step = 1; step <= steps; step++) {
            member.inner_step(step);
            EXPECT_EQ(member.after(step).size(), step % H == 0 ? 1u : 0u);
        }
        EXPECT_TRUE(member.finish().empty());
        local[worker] = member.local;
        global[worker] = member.global();
        EXPECT_TRUE(same_bits(member.params, member.local));
    }));

    const size_t n = size_t(layout.shard_size());
    std::vector<double> theta(initial[0].begin(), initial[0].end()), momentum(n, 0.0);
    for (int round = 0; round < steps / H; round++) {
        std::vector<double> outer_gradient(n, 0.0);
        for (int worker = 0; worker < workers; worker++) {
            std::vector<double> x = theta;
            for (int h = 1; h <= H; h++) {
                for (size_t i = 0; i < n; i++) {
                    uint64_t index = i + n * uint64_t(round * H + h);
                    x[i] -= 0.01 * (x[i] + standard_normal(uint64_t(worker) + 1, RandomUse::sampling, index));
                }
            }
            for (size_t i = 0; i < n; i++) { outer_gradient[i] += (theta[i] - x[i]) / workers; }
        }
        for (size_t i = 0; i < n; i++) {
            momentum[i] = 0.9 * momentum[i] + outer_gradient[i];
            theta[i] -= 0.4 * (outer_gradient[i] + 0.9 * momentum[i]);
        }
    }
    for (size_t i = 0; i < n; i++) { ASSERT_NEAR(global[0][i], theta[i], 2e-6); }
    for (int worker = 0; worker < workers; worker++) {
        EXPECT_TRUE(same_bits(global[worker], global[0]));
        EXPECT_TRUE(same_bits(local[worker], global[0]));
    }
}

TEST(Diloco, with_alpha_1_a_worker_is_bitwise_what_it_would_be_alone) {
    const Layout layout = toy_layout({128, 256, 128}, 2);
    DilocoOptions options;
    options.inner_steps = 5;
    options.overlap = 2;
    options.local_weight = 1;
    LocalGroup group(2);
    expect_no_errors(run_members(2, [&](int worker) {
        LocalComm comm(group, worker);
        Member member(options, fragments_of(layout, 1, 5), layout, comm);
        LocalGroup alone(1);
        LocalComm nobody(alone, 0);
        Member lonely(options, fragments_of(layout, 1, 5), layout, nobody);
        lonely.worker = worker;  // the same data; its Diloco is never called
        member.local[3] = lonely.local[3] = -0.0f;
        member.start();
        const std::vector<float> before = member.global();
        size_t syncs = 0;
        for (long step = 1; step <= 20; step++) {
            member.inner_step(step);
            lonely.inner_step(step);
            syncs += member.after(step).size();
        }
        syncs += member.finish().size();
        EXPECT_EQ(syncs, 12u);
        EXPECT_TRUE(same_bits(member.local, lonely.local));
        EXPECT_TRUE(same_bits(member.params, lonely.params));
        EXPECT_FALSE(same_bits(member.global(), before));
    }));
}

TEST(Diloco, one_worker_alone_takes_its_own_movement_as_outer_gradient) {
    const Layout layout = toy_layout({128}, 0);
    DilocoOptions options;
    options.inner_steps = 4;
    options.overlap = 1;
    options.outer_format = "fp32";
    LocalGroup group(1);
    LocalComm comm(group, 0);
    Member member(options, fragments_of(layout, 3, 4), layout, comm);
    std::fill(member.local.begin(), member.local.end(), 1.0f);
    member.start();
    double local = 1, global = 1, momentum = 0, delta = 0;
    for (long step = 1; step <= 17; step++) {
        for (float& value : member.local) { value -= 0.25f; }
        const std::vector<SyncReport> reports = member.after(step);
        local -= 0.25;
        if (step % 4 == 0) { delta = global - local; }
        if (step % 4 == 1 && step > 4) {
            momentum = 0.9 * momentum + delta;
            global -= 0.4 * (delta + 0.9 * momentum);
            local = 0.5 * local + 0.5 * global;
            EXPECT_EQ(reports.size(), 1u);
            EXPECT_EQ(reports[0].traffic.bytes_sent, 0u);
        }
        ASSERT_NEAR(member.local[77], local, 1e-5);
        ASSERT_NEAR(member.global()[77], global, 1e-5);
    }
}

TEST(Diloco, the_optimizer_average_makes_global_the_mean_of_the_workers) {
    const Layout layout = toy_layout({128}, 0);
    DilocoOptions options;
    options.inner_steps = 2;
    options.overlap = 0;
    options.local_weight = 0;
    options.outer_optimizer = "average";
    options.outer_format = "fp32";
    LocalGroup group(4);
    expect_no_errors(run_members(4, [&](int worker) {
        LocalComm comm(group, worker);
        Member member(options, fragments_of(layout, 0, 2), layout, comm);
        std::fill(member.local.begin(), member.local.end(), 8.0f);
        member.start();
        for (long step = 1; step <= 4; step++) {
            for (float& value : member.local) { value += float(worker); }  // by 1.5 on average
            member.after(step);
        }
        EXPECT_EQ(member.global(), std::vector<float>(128, 8.0f + 4 * 1.5f));
    }));
}

// Global parameters after every sync, by sync number and worker, with another overlap on each worker, late
// messages and several fragments in flight.
void expect_agreement(int workers, Format format, int ranks) {
    const long H = 9, steps = 40;
    const Layout layout = toy_layout({128, 384, 128, 256, 256, 640, 128}, 5, ranks);
    const std::vector<Fragment> fragments = fragments_of(layout, 2, H);  // 3 of layers, 2 of the embedding
    std::vector<std::map<long, std::vector<float>>> after_sync(static_cast<size_t>(workers));
    LocalGroup group(workers);
    expect_no_errors(run_members(workers, [&](int worker) {
        DilocoOptions options;
        options.inner_steps = H;
        options.overlap = std::vector<long>{8, 5, 0, 3}[worker];
        options.outer_format = name_of(format);
        auto delay = [&](long call) { return 0.001 * double((call + worker) % 3); };
        LocalComm comm(group, worker, delay);
        const int rank = ranks - 1;
        Member member(options, fragments, layout, comm, rank);
        member.start();
        int in_flight = 0, most = 0;
        auto record = [&](const std::vector<SyncReport>& reports) {
            for (const SyncReport& report : reports) {
                std::vector<float> fragment;
                for (int block : fragments[report.fragment].blocks) {
                    const Range range = layout.shard(block, rank);
                    const float* first = member.diloco.global(member.main) + range.shard;
                    fragment.insert(fragment.end(), first, first + range.count);
                }
                after_sync[worker][report.sync] = fragment;
                EXPECT_EQ(report.due_step, report.send_step + options.overlap);
                EXPECT_EQ(report.sync, sync_number(fragments, report.fragment, report.send_step, H));
                in_flight--;
            }
        };
        for (long step = 1; step <= steps; step++) {
            member.inner_step(step);
            for (const Fragment& fragment : fragments) { in_flight += is_sent(fragment, step, H); }
            most = std::max(most, in_flight);
            record(member.after(step));
        }
        record(member.finish());
        EXPECT_EQ(in_flight, 0);
        if (worker == 0) { EXPECT_EQ(most, 5); }
        for (int block = 0; block < int(layout.blocks.size()); block++) {  // other ranks' shards are not ours
            const Range mine = layout.shard(block, rank), first = layout.shard(block, 0);
            const float *params = &member.params[mine.flat], *local = &member.local[mine.shard];
            EXPECT_EQ(memcmp(params, local, size_t(mine.count) * sizeof(float)), 0);
            if (ranks > 1) { EXPECT_EQ(member.params[first.flat], -1.0f); }
        }
    }));
    ASSERT_EQ(after_sync[0].size(), size_t(steps / H) * fragments.size() + 2);  // two were sent after step 36
    for (int worker = 1; worker < workers; worker++) {
        ASSERT_EQ(after_sync[worker].size(), after_sync[0].size());
        for (const auto& [sync, global] : after_sync[0]) {
            ASSERT_TRUE(same_bits(after_sync[worker][sync], global)) << "sync " << sync << ", " << worker;
        }
    }
}

TEST(Diloco, global_is_bitwise_equal_on_2_3_and_4_workers_after_every_sync_whatever_their_overlap) {
    for (int workers : {2, 3, 4}) { expect_agreement(workers, Format::fp4, 1); }
    for (Format format : all_formats) { expect_agreement(3, format, 2); }
}

// The results of a run.
struct Outcome {
    std::vector<float> global, local, params;
    std::vector<uint64_t> hashes;        // of the global parameters, as they were sent
    std::vector<std::vector<float>> at;  // global after some of the steps
};

bool operator==(const Outcome& a, const Outcome& b) {
    bool same = same_bits(a.global, b.global) && same_bits(a.local, b.local) &&
                same_bits(a.params, b.params) && a.hashes == b.hashes && a.at.size() == b.at.size();
    for (size_t i = 0; same && i < a.at.size(); i++) { same = same_bits(a.at[i], b.at[i]); }
    return same;
}

Outcome run_worker(const DilocoOptions& options, const std::vector<Fragment>& fragments, const Layout& layout,
                   long steps, Comm& comm) {
    Member member(options, fragments, layout, comm);
    Outcome outcome;
    auto note = [&](const std::vector<SyncReport>& reports) {
        for (const SyncReport& report : reports) { outcome.hashes.push_back(report.global_hash); }
    };
    member.start();
    for (long step = 1; step <= steps; step++) {
        member.inner_step(step);
        if (step == 5) { member.local[1] = NAN; }  // nobody applies its fragment then
        note(member.after(step));
        if (step == 5) { member.local[1] = 1; }
        if (step % 7 == 0) { outcome.at.push_back(member.global()); }
    }
    note(member.finish());
    outcome.global = member.global();
    outcome.local = member.local;
    outcome.params = member.params;
    return outcome;
}

TEST(Offload, the_state_on_the_host_gives_the_bits_of_the_one_on_the_device_under_every_schedule) {
    const Layout layout = toy_layout({128, 384, 128, 256, 256, 640, 128}, 5);
    for (uint64_t seed = 0; seed < 60; seed++) {
        auto draw = [&](long n, uint64_t use) {
            return long(random_bits(seed, RandomUse::sampling, use).v[0] % uint64_t(n));
        };
        DilocoOptions options;
        const long H = options.inner_steps = 1 + draw(9, 1);
        options.overlap = std::vector<long>{0, std::min(1L, H - 1), H - 1, draw(H, 2)}[seed % 4];
        std::vector<Fragment> fragments = fragments_of(layout, int(draw(4, 3)), H);
        if (seed % 3 > 0) {  // few offsets, some of which collide
            const long places = seed % 3 == 1 ? H : std::min(2L, H);
            for (size_t p = 0; p < fragments.size(); p++) { fragments[p].offset = draw(places, 10 + p); }
        }
        const long steps = H + draw(4 * H, 4);
        Outcome outcomes[2][2];  // resident, offloaded; of each worker
        for (int offload = 0; offload < 2; offload++) {
            options.offload = offload == 1;
            LocalGroup group(2);
            expect_no_errors(run_members(2, [&](int worker) {
                LocalComm comm(group, worker);
                outcomes[offload][worker] = run_worker(options, fragments, layout, steps, comm);
            }));
        }
        for (int worker = 0; worker < 2; worker++) {
            ASSERT_TRUE(outcomes[1][worker] == outcomes[0][worker]) << "seed " << seed << ", " << worker;
        }
        ASSERT_FALSE(outcomes[0][0].hashes.empty());
    }
}

TEST(Offload, there_are_as_many_slots_as_any_step_has_fragments) {
    const Layout layout = toy_layout(std::vector<long>(8, 128), 7);
    for (long H = 1; H <= 9; H++) {
        for (long overlap = 0; overlap < H; overlap++) {
            for (int fragment_layers : {0, 1, 2, 3}) {
                const std::vector<Fragment> fragments = fragments_of(layout, fragment_layers, H);
                int most = 0;
                for (long step = 1; step <= 4 * H; step++) {
                    std::set<int> used;
                    for (int p = 0; p < int(fragments.size()); p++) {
                        const bool sent = is_sent(fragments[p], step, H);
                        if (sent || is_due(fragments[p], step, H, overlap)) { used.insert(p); }
                    }
                    most = std::max(most, int(used.size()));
                }
                EXPECT_EQ(most_in_a_step(fragments, H, overlap), most) << H << " " << overlap;
            }
        }
    }
}

TEST(Offload, a_step_that_needs_more_than_the_slots_is_refused) {
    const std::vector<std::vector<Range>> ranges = {{Range{0, 0, 128}}, {Range{128, 128, 128}}};
    OuterState state(ranges, 256, 128, 1);
    Stream main;
    const std::vector<float> local(256, 1.0f);
    state.start(local.data(), main);
    state.fetch(0);
    EXPECT_THROW(state.fetch(1), std::logic_error);
    state.clear();
    EXPECT_EQ(state.use(1, main)[0].global[127], 1.0f);
}

TEST(Offload, what_was_not_fetched_ahead_is_fetched_when_it_is_used) {
    const std::vector<std::vector<Range>> ranges = {{Range{0, 0, 128}}, {Range{128, 128, 128}}};
    OuterState state(ranges, 256, 128, 1);
    Stream main;
    const std::vector<float> local(256, 1.0f);
    state.start(local.data(), main);
    for (int p = 0; p < 2; p++) {
        const OuterState::Part part = state.use(p, main)[0];
        part.global[5] = float(10 + p);
        part.momentum[5] = float(20 + p);
        state.end_write(p, main);
    }
    EXPECT_EQ(state.use(0, main)[0].global[5], 10.0f);
    EXPECT_EQ(state.use(0, main)[0].momentum[5], 20.0f);
    EXPECT_EQ(state.global(main)[128 + 5], 11.0f);
}

TEST(Diloco, more_fragments_than_inner_steps_are_all_exchanged) {
    const Layout layout = toy_layout(std::vector<long>(7, 128), 5);
    DilocoOptions options;
    options.inner_steps = 3;
    options.overlap = 2;
    LocalGroup group(2);
    expect_no_errors(run_members(2, [&](int worker) {
        LocalComm comm(group, worker);
        Member member(options, fragments_of(layout, 1, 3), layout, comm);
        member.start();
        std::vector<long> numbers;
        auto record = [&](const std::vector<SyncReport>& reports) {
            for (const SyncReport& report : reports) { numbers.push_back(report.sync); }
        };
        for (long step = 1; step <= 12; step++) {
            member.inner_step(step);
            record(member.after(step));
        }
        record(member.finish());
        std::vector<long> expected(28);
        std::iota(expected.begin(), expected.end(), 0);
        EXPECT_EQ(numbers, expected);
    }));
}

TEST(Diloco, training_goes_on_while_a_fragment_is_on_the_wire) {
    const Layout layout = toy_layout({128}, 0);
    DilocoOptions options;
    options.inner_steps = 5;
    options.overlap = 3;
    LocalGroup group(2);
    std::promise<void> permission;
    std::shared_future<void> permitted = permission.get_future().share();
    expect_no_errors(run_members(2, [&](int worker) {
        LocalComm comm(group, worker, [&, worker](long) {
            if (worker == 1) { permitted.wait(); }  // the wire does not move before this
            return 0.0;
        });
        Member member(options, fragments_of(layout, 0, 5), layout, comm);
        member.start();
        for (long step = 1; step <= 7; step++) {
            member.inner_step(step);
            EXPECT_TRUE(member.after(step).empty());
        }
        if (worker == 1) { permission.set_value(); }
        member.inner_step(8);
        EXPECT_EQ(member.after(8).size(), 1u);
    }));
}

TEST(Diloco, the_time_waited_for_a_late_worker_is_reported_and_bytes_are_counted) {
    const Layout layout = toy_layout({1280}, 0);
    DilocoOptions options;
    options.inner_steps = 2;
    options.overlap = 0;
    LocalGroup group(3);
    expect_no_errors(run_members(3, [&](int worker) {
        LocalComm comm(group, worker, [&, worker](long) { return worker == 2 ? 0.03 : 0.0; });
        Member member(options, fragments_of(layout, 0, 2), layout, comm);
        member.start();
        member.after(1);
        const std::vector<SyncReport> reports = member.after(2);
        ASSERT_EQ(reports.size(), 1u);
        EXPECT_GE(reports[0].waited_seconds(), 0.01);
        EXPECT_GE(reports[0].traffic.seconds, 0.01);
        EXPECT_EQ(reports[0].traffic.bytes_sent, 2 * (64u + 32 + 640));
        EXPECT_EQ(reports[0].traffic.bytes_received, 2 * (64u + 32 + 640));
    }));
}

TEST(Diloco, the_time_waited_in_a_report_outlives_later_syncs) {
    const Layout layout = toy_layout({128, 128}, 1);
    DilocoOptions options;
    options.inner_steps = 2;
    options.overlap = 0;
    LocalGroup group(2);
    expect_no_errors(run_members(2, [&](int worker) {
        LocalComm comm(group, worker, [&](long call) { return 0.001 * double(call % 3); });
        Member member(options, fragments_of(layout, 1, 2), layout, comm);
        member.start();
        std::vector<SyncReport> kept;
        std::vector<double> seconds;
        for (long step = 1; step <= 12; step++) {
            for (const SyncReport& report : member.after(step)) {
                kept.push_back(report);
                seconds.push_back(report.waited_seconds());
            }
        }
        ASSERT_EQ(kept.size(), 12u);
        for (size_t i = 0; i < kept.size(); i++) { EXPECT_EQ(kept[i].waited_seconds(), seconds[i]); }
    }));
}

TEST(Diloco, a_rehearsal_leaves_no_trace) {
    const Layout layout = toy_layout({128, 384, 256}, 2);
    DilocoOptions options;
    options.inner_steps = 4;
    std::vector<float> global[2], local[2];
    std::vector<uint64_t> sent[2];
    for (int rehearsed = 0; rehearsed < 2; rehearsed++) {
        LocalGroup group(2);
        expect_no_errors(run_members(2, [&](int worker) {
            LocalComm comm(group, worker);
            Member member(options, fragments_of(layout, 1, 4), layout, comm);
            member.start();
            for (int i = 0; i < rehearsed; i++) { member.diloco.rehearse(member.main); }
            for (long step = 1; step <= 12; step++) {
                member.inner_step(step);
                for (const SyncReport& report : member.after(step)) {
                    if (worker == 0) { sent[rehearsed].push_back(report.traffic.bytes_sent); }
                }
            }
            if (worker != 0) { return; }
            global[rehearsed] = member.global();
            local[rehearsed] = member.local;
        }));
    }
    EXPECT_TRUE(same_bits(global[1], global[0]));
    EXPECT_TRUE(same_bits(local[1], local[0]));
    EXPECT_EQ(sent[1], sent[0]);
    EXPECT_EQ(sent[1].size(), 8u);
}

TEST(Diloco, nobody_returns_from_a_rehearsal_before_all_have_come_with_a_payload_of_the_largest_fragment) {
    const Layout layout = toy_layout({128, 640, 256}, 2);
    LocalGroup group(3);
    std::atomic<int> arrived{0};
    std::atomic<size_t> bytes_sent{0};
    expect_no_errors(run_members(3, [&](int worker) {
        LocalComm comm(group, worker, nullptr, [&](long, uint8_t*, size_t bytes) { bytes_sent = bytes; });
        DilocoOptions options;
        options.inner_steps = 100;
        Member member(options, fragments_of(layout, 1, 100), layout, comm);
        member.start();
        std::this_thread::sleep_for(std::chrono::milliseconds(10 * worker));
        arrived++;
        member.diloco.rehearse(member.main);
        EXPECT_EQ(arrived, 3);
    }));
    EXPECT_EQ(bytes_sent, payload_bytes(Format::fp4, 640));
}

TEST(Diloco, a_worker_that_is_missing_at_the_rehearsal_or_of_another_format_is_named) {
    const Layout layout = toy_layout({128}, 0);
    auto errors = [&](bool leaves) {
        LocalGroup group(2, 5);
        return run_members(2, [&](int worker) {
            DilocoOptions options;
            options.inner_steps = 100;
            if (!leaves && worker == 1) { options.outer_format = "fp4"; }
            LocalComm comm(group, worker);
            Member member(options, fragments_of(layout, 0, 100), layout, comm);
            member.start();
            if (leaves && worker == 1) { return group.leave(1); }
            member.diloco.rehearse(member.main);
        });
    };
    EXPECT_EQ(errors(true)[0], "the exchange of fragment 0 (rehearsal before step 1) failed with worker 1: "
                               "the connection was closed");
    EXPECT_NE(errors(false)[0].find("the payload of worker 1 for fragment 0 (rehearsal before step 1) was "
                                    "refused: its number format is"), std::string::npos);
}

TEST(Diloco, a_header_tells_the_tokens_trained_on_since_the_fragments_last_send) {
    const Layout layout = toy_layout({128, 128}, 1);
    DilocoOptions options;
    options.inner_steps = 4;
    options.overlap = 0;
    LocalGroup group(2);
    std::vector<uint64_t> tokens;  // worker 1's, as worker 0 received them
    expect_no_errors(run_members(2, [&](int worker) {
        LocalComm comm(group, worker, nullptr, [&, worker](long, uint8_t* parts, size_t bytes) {
            PayloadHeader header;
            memcpy(&header, parts + bytes, sizeof(header));
            if (worker == 0) { tokens.push_back(header.tokens); }
        });
        Member member(options, fragments_of(layout, 1, 4), layout, comm);
        member.start();
        const uint64_t tokens_per_step = worker == 0 ? 100 : 30;
        for (long step = 1; step <= 8; step++) { member.after(step, uint64_t(step) * tokens_per_step); }
        member.finish();
    }));
    EXPECT_EQ(tokens, (std::vector<uint64_t>{2 * 30, 4 * 30, 4 * 30, 4 * 30}));  // fragments 1, 0, 1, 0
}

// Runs `workers` workers of one fragment and returns the error of each. prepare(member, step) is called
// before each step.
std::vector<std::string> errors_of(int workers, const std::function<void(Member&, long)>& prepare,
                                   const LocalComm::Corrupt& corrupt_at_0 = nullptr) {
    const Layout layout = toy_layout({128, 256, 128}, 2);
    DilocoOptions options;
    options.inner_steps = 6;
    options.overlap = 1;
    LocalGroup group(workers, 5);
    return run_members(workers, [&](int worker) {
        LocalComm comm(group, worker, nullptr, worker == 0 ? corrupt_at_0 : nullptr);
        Member member(options, fragments_of(layout, 1, 6), layout, comm);
        member.start();
        try {
            for (long step = 1; step <= 13; step++) {
                member.inner_step(step);
                prepare(member, step);
                member.after(step);
            }
        } catch (const std::exception&) {
            if (corrupt_at_0) { group.leave(worker); }  // the others have noticed nothing and would wait
            throw;
        }
    });
}

TEST(Diloco, a_flipped_bit_of_one_workers_global_parameters_stops_all_and_names_it) {
    for (int workers : {2, 3, 4}) {
        const std::vector<std::string> errors = errors_of(workers, [](Member& member, long step) {
            if (step == 7 && member.worker == 1) {  // block 1 is fragment 1, offset 2, sent at 2 and 8
                float& value = const_cast<float*>(member.diloco.global(member.main))[128 + 200];
                value = bits_to_float(float_to_bits(value) ^ 1);
            }
        });
        for (const std::string& error : errors) {
            EXPECT_NE(error.find("fragment 1 (sync 3, sent at step 8)"), std::string::npos) << error;
            const char* who = workers == 2 ? "(suspected: workers 0 and 1):" : "(suspected: worker 1):";
            EXPECT_NE(error.find(who), std::string::npos) << error;
            const std::string advice = "its last checkpoint, or, if it stops here again, from its beginning";
            EXPECT_NE(error.find(advice), std::string::npos) << error;  // 8 is less than 2 H
        }
    }
}

TEST(Diloco, an_outer_gradient_that_is_not_finite_is_applied_by_none_and_named_by_all) {
    const Layout layout = toy_layout({128, 256}, 1);
    const std::vector<Fragment> fragments = fragments_of(layout, 1, 4);  // sent at 4, 8, ... and 2, 6, ...
    DilocoOptions options;
    options.inner_steps = 4;
    options.overlap = 1;
    LocalGroup group(3);
    std::vector<std::vector<float>> global(3);
    expect_no_errors(run_members(3, [&](int worker) {
        LocalComm comm(group, worker);
        Member member(options, fragments, layout, comm);
        member.start();
        for (long step = 1; step <= 12; step++) {
            member.inner_step(step);
            const float kept = member.local[300];
            if (step == 6 && worker == 1) { member.local[300] = step % 2 ? INFINITY : NAN; }
            const std::vector<float> before = member.global(), local = member.local;
            const std::vector<SyncReport> reports = member.after(step);
            for (const SyncReport& report : reports) {
                if (report.send_step == 6) {
                    EXPECT_EQ(report.not_finite, std::vector<int>{1});
                    EXPECT_TRUE(same_bits(member.global(), before));
                    EXPECT_TRUE(same_bits(member.local, local));
                    EXPECT_GT(report.traffic.bytes_sent, 0u);
                } else {
                    EXPECT_TRUE(report.not_finite.empty());
                    EXPECT_FALSE(same_bits(member.global(), before));
                }
            }
            if (step == 6 && worker == 1) { member.local[300] = kept; }
        }
        member.finish();
        global[worker] = member.global();
        for (float value : member.global()) { EXPECT_TRUE(std::isfinite(value)); }
    }));
    EXPECT_TRUE(same_bits(global[1], global[0]));
    EXPECT_TRUE(same_bits(global[2], global[0]));
}

TEST(Diloco, a_payload_with_a_wrong_header_is_refused_with_what_is_wrong) {
    struct Damage {
        size_t offset;
        const char* what;
    };
    for (const Damage& damage : {Damage{offsetof(PayloadHeader, magic), "magic number"},
                                 Damage{offsetof(PayloadHeader, version), "version"},
                                 Damage{offsetof(PayloadHeader, format), "number format"},
                                 Damage{offsetof(PayloadHeader, sync), "sync number"},
                                 Damage{offsetof(PayloadHeader, fragment), "fragment"},
                                 Damage{offsetof(PayloadHeader, worker), "sender"},
                                 Damage{offsetof(PayloadHeader, send_step), "send step"},
                                 Damage{offsetof(PayloadHeader, values), "number of values"}}) {
        const std::vector<std::string> errors = errors_of(
            2, [](Member&, long) {},
            [&](long call, uint8_t* parts, size_t bytes) {
                if (call == 2) { parts[bytes + damage.offset] ^= 4; }
            });
        const std::string expected = "the payload of worker 1 for fragment 0 (sync 2, sent at step 6) was "
                                     "refused: its " + std::string(damage.what) + " is ";
        EXPECT_EQ(errors[0].substr(0, expected.size()), expected);
    }
}

TEST(Diloco, workers_with_different_formats_or_schedules_are_refused) {
    const Layout layout = toy_layout({128, 128}, 1);
    LocalGroup group(2, 5);
    const std::vector<std::string> errors = run_members(2, [&](int worker) {
        DilocoOptions options;
        options.inner_steps = 4;
        options.outer_format = worker == 0 ? "fp4" : "fp4_e2m1";
        LocalComm comm(group, worker);
        Member member(options, fragments_of(layout, 1, 4), layout, comm);
        member.start();
        for (long step = 1; step <= 4; step++) { member.after(step); }
    });
    for (const std::string& error : errors) {
        EXPECT_NE(error.find("its number format is"), std::string::npos) << error;
    }
}

TEST(Diloco, a_dead_worker_is_named_with_the_fragment_and_the_sync) {
    const Layout layout = toy_layout({128}, 0);
    DilocoOptions options;
    options.inner_steps = 3;
    options.overlap = 2;
    LocalGroup group(3, 5);
    int peer = -1;
    const std::vector<std::string> errors = run_members(3, [&](int worker) {
        LocalComm comm(group, worker);
        Member member(options, fragments_of(layout, 0, 3), layout, comm);
        member.start();
        for (long step = 1; step <= 9; step++) {
            if (worker == 2 && step == 6) {
                group.leave(2);
                return;
            }
            try {
                member.after(step);
            } catch (const CommError& error) {
                if (worker == 0) { peer = error.peer; }
                throw;
            }
        }
    });
    EXPECT_EQ(errors[0], "the exchange of fragment 0 (sync 1, sent at step 6) failed with worker 2: "
                         "the connection was closed");
    EXPECT_EQ(errors[1], errors[0]);
    EXPECT_EQ(peer, 2);
}

TEST(Exchange, the_wire_waits_for_a_payload_that_the_main_stream_is_still_writing) {
    const long n = 256;
    LocalGroup group(2);
    expect_no_errors(run_members(2, [&](int worker) {
        LocalComm comm(group, worker);
        Stream main(Stream::Kind::communicate), outer(Stream::Kind::communicate);
        AllGatherExchange exchange({Format::fp32}, n, 1, comm, outer);
        std::vector<float> global(n, 3.0f), local(n, worker == 0 ? 1.0f : 2.0f), mean(n);
        const Sync sync{0, 0, 1, n};
        uint8_t* payload = exchange.payload(sync);
        main.enqueue([] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
        device::write_header(payload, make_header(sync, exchange.layout(sync), 0, worker, 0), main);
        device::quantize(payload, Format::fp32, Rounding(), n, 0, {global.data(), local.data()}, n, main);
        exchange.start(sync, main);
        EXPECT_EQ(exchange.wait(sync).sent[0].size(), 2u);
        exchange.mean(mean.data(), sync, main);
        main.synchronize();
        EXPECT_EQ(mean, std::vector<float>(n, 1.5f));
        EXPECT_EQ(exchange.finish(sync, true, main).bytes_sent, payload_bytes(Format::fp32, n));
    }));
}

TEST(Outer, the_merge_is_exact_at_both_ends_and_the_formula_between) {
    const std::vector<float> special = {0.0f, -0.0f, 1.0f, -1e-45f, 1e-40f, 3e38f, -3e38f, INFINITY, NAN};
    Stream stream;
    for (float alpha : {0.0f, 1.0f}) {
        for (float start : special) {
            for (float target : special) {
                float global = target, momentum = 0, local = start, params = 17, mean = 0;
                device::outer_step(&global, &momentum, &local, &params, &mean, 1, {0, 0, alpha}, stream);
                const float expected = alpha == 0 ? global : start;
                EXPECT_EQ(float_to_bits(local), float_to_bits(expected)) << start << " " << target;
                EXPECT_EQ(float_to_bits(params), float_to_bits(alpha == 0 ? global : 17.0f));
            }
        }
    }
    EXPECT_EQ(merge(4, 8, 0.25f), 7.0f);
}

TEST(Outer, the_step_is_that_of_nesterov_and_the_same_for_any_length) {
    const long n = cpu::parallel_values + 4321;  // more than one thread does
    std::vector<float> global(n), momentum(n), local(n), params(n), mean(n);
    for (size_t i = 0; i < size_t(n); i++) {
        global[i] = standard_normal(1, RandomUse::parameters, i);
        momentum[i] = standard_normal(2, RandomUse::parameters, i);
        local[i] = standard_normal(3, RandomUse::parameters, i);
        mean[i] = standard_normal(4, RandomUse::parameters, i);
    }
    std::vector<float> global_one = global, momentum_one = momentum, local_one = local, params_one = params;
    const OuterStep step{0.4f, 0.9f, 0.25f};
    Stream stream;
    device::outer_step(global.data(), momentum.data(), local.data(), params.data(), mean.data(), n, step,
                       stream);
    for (size_t i = 0; i < size_t(n); i++) {
        const double m = 0.9 * double(momentum_one[i]) + mean[i];
        const double g = global_one[i] - 0.4 * (mean[i] + 0.9 * m);
        ASSERT_NEAR(momentum[i], m, 1e-6);
        ASSERT_NEAR(global[i], g, 2e-6);
        ASSERT_NEAR(local[i], 0.25 * local_one[i] + 0.75 * g, 2e-6);
        device::outer_step(&global_one[i], &momentum_one[i], &local_one[i], &params_one[i], &mean[i], 1, step,
                           stream);
    }
    EXPECT_TRUE(same_bits(global, global_one));
    EXPECT_TRUE(same_bits(momentum, momentum_one));
    EXPECT_TRUE(same_bits(local, local_one));
    EXPECT_TRUE(same_bits(params, local));
}

TEST(Agreement, the_worker_that_stands_alone_is_named_and_all_where_there_is_no_majority) {
    auto diverged = [](const std::vector<uint64_t>& hashes) {
        std::vector<PayloadHeader> headers(hashes.size());
        for (size_t i = 0; i < hashes.size(); i++) { headers[i].hash = hashes[i]; }
        return diverged_workers(headers);
    };
    EXPECT_EQ(diverged({5}), std::vector<int>{});
    EXPECT_EQ(diverged({5, 5, 5}), std::vector<int>{});
    EXPECT_EQ(diverged({5, 6}), (std::vector<int>{0, 1}));
    EXPECT_EQ(diverged({5, 6, 5}), std::vector<int>{1});
    EXPECT_EQ(diverged({5, 6, 7}), (std::vector<int>{0, 1, 2}));
    EXPECT_EQ(diverged({5, 6, 5, 6}), (std::vector<int>{0, 1, 2, 3}));
    EXPECT_EQ(diverged({5, 6, 5, 7, 5}), (std::vector<int>{1, 3}));
}

TEST(Options, each_mistake_is_the_users_and_says_what_to_do) {
    auto mistake = [](const std::function<void(DilocoOptions&)>& change, long steps = 1000, int workers = 2) {
        DilocoOptions options;
        options.inner_steps = 100;
        change(options);
        try {
            validate(options, steps, workers);
        } catch (const UserError& error) {
            EXPECT_NE(std::string(error.what()).find(": "), std::string::npos) << error.what();
            return true;
        }
        return false;
    };
    EXPECT_FALSE(mistake([](DilocoOptions&) {}));
    EXPECT_FALSE(mistake([](DilocoOptions&) {}, 100));
    EXPECT_FALSE(mistake([](DilocoOptions&) {}, -1));
    EXPECT_TRUE(mistake([](DilocoOptions&) {}, 10, 1));
    EXPECT_FALSE(mistake([](DilocoOptions& o) { o.overlap = 99; }));
    EXPECT_FALSE(mistake([](DilocoOptions& o) { o.outer_optimizer = "none"; }, 1000, 1));
    EXPECT_TRUE(mistake([](DilocoOptions& o) { o.inner_steps = 0; }));
    EXPECT_TRUE(mistake([](DilocoOptions& o) { o.inner_steps = -3; }));
    EXPECT_TRUE(mistake([](DilocoOptions& o) { o.overlap = 100; }));
    EXPECT_TRUE(mistake([](DilocoOptions& o) { o.overlap = -1; }));
    EXPECT_TRUE(mistake([](DilocoOptions& o) { o.outer_optimizer = "none"; }));
    EXPECT_TRUE(mistake([](DilocoOptions&) {}, 99));
    EXPECT_FALSE(mistake([](DilocoOptions& o) { o.outer_optimizer = "average"; }));
    EXPECT_TRUE(mistake([](DilocoOptions& o) { o.outer_optimizer = "adam"; }));
    EXPECT_TRUE(mistake([](DilocoOptions& o) { o.outer_format = "fp5"; }));
    EXPECT_TRUE(mistake([](DilocoOptions& o) { o.outer_exchange = "ring"; }));
}

}  // namespace test_diloco
