// The sync log, by simulation: thousands of runs with crashes, stalls, lost connections, restarts and
// newcomers between any two requests to the store, each drawn from a seed. Each rule is then broken in turn,
// which the simulation must notice. SEED=n shows all that happens in run n.
#include <gtest/gtest.h>

#include <signal.h>
#include <sys/resource.h>

#include <cstdlib>
#include <filesystem>

#include "dev/test/unit/elastic/sync_log_simulation.h"
#include "streaming/schedule.h"

namespace test_sync_log {

// How many runs are simulated. A broken rule is looked for in all of them: it mostly shows in the first hundred.
const uint64_t all_seeds = 10000;
uint64_t seeds() {
    const char* given = std::getenv("SEEDS");
    return given ? uint64_t(std::atoll(given)) : all_seeds / 5;
}

std::string last_lines(const std::vector<std::string>& trace, size_t most) {
    std::string text;
    for (size_t i = trace.size() - std::min(most, trace.size()); i < trace.size(); i++) {
        text += trace[i] + "\n";
    }
    return text;
}

TEST(SyncLog, workers_stay_equal_and_go_on_whatever_happens_between_any_two_requests) {
    const SyncLogRules rules;
    if (const char* seed = std::getenv("SEED")) {
        std::vector<std::string> trace;
        const std::string wrong = simulation::run(uint64_t(std::atoll(seed)), rules, &trace);
        printf("%s", last_lines(trace, trace.size()).c_str());
        ASSERT_EQ(wrong, "");
        return;
    }
    simulation::Totals totals;
    for (uint64_t seed = 1; seed <= seeds(); seed++) {
        if (simulation::run(seed, rules, nullptr, &totals).empty()) { continue; }
        std::vector<std::string> trace;
        const std::string wrong = simulation::run(seed, rules, &trace);
        FAIL() << "SEED=" << seed << " shows this run; its last lines:\n" << last_lines(trace, 60) << wrong;
    }
    // All that the log claims to survive has happened often enough: of these, a share as large as that of the seeds.
    printf("%s\n", totals.text().c_str());
    const auto share = [](long of_all) { return of_all * long(seeds()) / long(all_seeds); };
    EXPECT_GT(totals.syncs, share(50000));
    EXPECT_GT(totals.deaths, share(10000));
    EXPECT_GT(totals.stalls, share(10000));
    EXPECT_GT(totals.snapshots, share(1000));
    EXPECT_GT(totals.snapshots_gone, share(20));
    EXPECT_GT(totals.jumps, share(1000));
    EXPECT_GT(totals.late, share(1000));
    EXPECT_GT(totals.new_generations, share(500));
    EXPECT_GT(totals.diverged, share(100));
    EXPECT_LE(totals.undecidable, share(100));
    EXPECT_GT(totals.refused, share(1000));
    EXPECT_GT(totals.too_late, share(100));
    EXPECT_GT(totals.gone, share(1000));
    EXPECT_GT(totals.overtaken, share(10000));
}

TEST(SyncLog, a_seed_is_the_same_run_again) {
    for (uint64_t seed = 1; seed <= 20; seed++) {
        std::vector<std::string> first, again;
        simulation::run(seed, SyncLogRules(), &first);
        simulation::run(seed, SyncLogRules(), &again);
        ASSERT_GT(first.size(), 100u);
        ASSERT_EQ(first, again);
    }
}

// Then the bits are those of the exchanges in lock-step.
TEST(SyncLog, if_no_worker_is_late_all_are_counted_in_every_sync_and_none_jumps) {
    const SyncLogRules rules;
    for (uint64_t seed = 1; seed <= 100; seed++) {
        long syncs = 0;
        simulation::World world(seed, rules, false, [&](simulation::Plan& plan) {
            simulation::make_even(plan);
            plan.options.elastic.grace = 60;
            plan.options.elastic.max_lag = plan.H;
            syncs = plan.steps / plan.H * plan.fragments;
        });
        ASSERT_NO_THROW(world.run()) << "seed " << seed;
        EXPECT_EQ(world.totals.jumps, 0) << "seed " << seed;
        EXPECT_EQ(world.totals.late, 0) << "seed " << seed;
        ASSERT_GE(long(world.entries().size()), syncs - 4) << "seed " << seed;
        for (const auto& [key, entry] : world.entries()) {
            ASSERT_EQ(entry.contributors.size(), 3u) << "seed " << seed << ", " << key;
        }
    }
}

TEST(SyncLog, a_worker_that_comes_back_is_counted_again_within_two_periods) {
    const SyncLogRules rules;
    int later = 0;  // by some periods, if it comes back a step behind the others: tau is one step
    for (uint64_t seed = 1; seed <= 100; seed++) {
        long period = 0;
        simulation::World world(seed, rules, false, [&](simulation::Plan& plan) {
            simulation::make_even(plan);
            plan.options.elastic.grace = 4;  // two steps
            period = plan.fragments;
        });
        world.kill_at(int(seed % 3), 6 + double(seed % 50) / 10, double(seed % 7));
        ASSERT_NO_THROW(world.run()) << "seed " << seed;
        const std::optional<long> took = world.syncs_until_counted(int(seed % 3));
        ASSERT_TRUE(took) << "seed " << seed;
        ASSERT_LE(*took, 4 * period) << "seed " << seed;
        later += *took > 2 * period;
    }
    EXPECT_LE(later, 3);
}

// This holds even for a worker whose requests take long.
TEST(SyncLog, a_worker_that_begins_the_run_is_waited_for_before_its_first_beat_is_seen) {
    const SyncLogRules rules;
    for (uint64_t seed = 1; seed <= 30; seed++) {
        simulation::World world(seed, rules, false, [&](simulation::Plan& plan) {
            simulation::make_even(plan);
            plan.steps = 2 * plan.H;
            plan.step_time = {0.01, 0.01, 0.01};
            plan.delay[seed % 3] = 1;
            plan.options.chunk = 100;
            plan.options.elastic.grace = plan.options.expiry = 1000;
            plan.options.elastic.max_lag = plan.H;
        });
        ASSERT_NO_THROW(world.run()) << "seed " << seed;
        for (const auto& [key, entry] : world.entries()) {
            ASSERT_EQ(entry.contributors.size(), 3u) << "seed " << seed << ", " << key;
        }
    }
}

// However much later than the others one of them comes up, and learns that the run has begun.
TEST(SyncLog, workers_that_begin_the_run_together_skip_no_step) {
    const SyncLogRules rules;
    for (uint64_t seed = 1; seed <= 60; seed++) {
        simulation::World world(seed, rules, false, [&](simulation::Plan& plan) {
            simulation::make_even(plan);
            plan.step_time = {0.01, 0.01, 0.01};
            plan.delay[seed % 3] = seed % 2 == 0 ? 0.1 : 0.02;
            plan.first_start[(seed + 1) % 3] = double(seed % 9);
            plan.options.chunk = 100;
            plan.options.elastic.grace = 60;
            plan.options.expiry = 20;
            plan.options.poll = 0.1;
            plan.options.elastic.max_lag = plan.overlap[0];
        });
        ASSERT_NO_THROW(world.run()) << "seed " << seed;
        EXPECT_EQ(world.totals.jumps, 0) << "seed " << seed;
        EXPECT_EQ(world.totals.late, 0) << "seed " << seed;
        for (const auto& [key, entry] : world.entries()) {
            ASSERT_EQ(entry.contributors.size(), 3u) << "seed " << seed << ", " << key;
        }
    }
}

// A payload has tau steps of time, so a worker may be some steps behind, at the end of the run, too.
TEST(SyncLog, no_worker_is_late_because_the_run_ends) {
    const SyncLogRules rules;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        simulation::World world(seed, rules, false, [&](simulation::Plan& plan) {
            simulation::make_even(plan);
            plan.H = 8;
            plan.overlap.assign(3, 7);
            plan.options.elastic.max_lag = 7;
            plan.steps = 104;
            plan.step_time = {1, 1, 1.05};
            plan.options.elastic.grace = 1.5;
        });
        ASSERT_NO_THROW(world.run()) << "seed " << seed;
        for (const auto& [key, entry] : world.entries()) {
            ASSERT_EQ(entry.contributors.size(), 3u) << "seed " << seed << ", " << key;
        }
    }
}

// Nobody waits until it has sent once. Then it has shown how late it is, and may be waited for.
TEST(SyncLog, no_worker_waits_for_one_that_comes_back_before_it_has_shown_that_it_keeps_pace) {
    const SyncLogRules rules;
    int missed = 0;
    for (uint64_t seed = 1; seed <= 30; seed++) {
        const int w = int(seed % 3);
        double poll = 0;
        simulation::World world(seed, rules, false, [&](simulation::Plan& plan) {
            simulation::make_even(plan);
            plan.steps = 150;
            plan.H = 6;
            plan.delay[size_t(w)] = 0.35;  // it takes long to come back
            plan.options.elastic.grace = 30;
            plan.options.expiry = 8;
            plan.options.elastic.max_lag = plan.H;
            plan.checkpoint_every = 1 + long(seed % 8);
            poll = plan.options.poll;
        });
        const double killed = 15 + double(seed % 50) / 10, back = killed + 20 + double(seed % 20);
        world.kill_at(w, killed, back - killed);
        ASSERT_NO_THROW(world.run()) << "seed " << seed;
        const long first = world.first_sent({w, 2});
        ASSERT_GE(first, 0) << "seed " << seed;
        for (const auto& [sync, seconds] : world.waits_for(w, back)) {
            if (sync > first) { break; }
            EXPECT_LT(seconds, 4 * poll) << "seed " << seed << ", sync " << sync;
            missed++;
        }
    }
    EXPECT_GT(missed, 10);
}

// It has half or a tenth of the others' speed, and tau is five steps: it jumps, and is then in time.
TEST(SyncLog, a_slow_worker_does_not_slow_the_others_and_is_counted_in_nine_of_ten_syncs) {
    const SyncLogRules rules;
    for (const double slower : {2, 10}) {
        for (uint64_t seed = 1; seed <= 5; seed++) {
            const double steps = 600, step_time = 0.4;
            simulation::World world(seed, rules, false, [&](simulation::Plan& plan) {
                simulation::make_even(plan);
                plan.H = 10;
                plan.fragments = 1;
                plan.steps = long(steps);
                plan.overlap.assign(3, 5);
                plan.step_time = {step_time, step_time, step_time * slower};
                plan.options.elastic.grace = 5;
                plan.options.elastic.max_lag = 5;
            });
            ASSERT_NO_THROW(world.run()) << "seed " << seed;
            double waited = 0, counted = 0, syncs = 0;
            for (const auto& [sync, seconds] : world.waits_for(2, 0)) { waited += seconds; }
            for (const auto& [key, entry] : world.entries()) {
                const bool is_known_slow = std::atol(key.substr(key.rfind('/') + 1).c_str()) >= 10;
                syncs += is_known_slow;
                counted += is_known_slow && entry.counts(2);
            }
            // Two graces until it is known to be slow, then at most a fiftieth of the time.
            EXPECT_LT(waited, 10 + steps * step_time / 50) << "seed " << seed << ", " << slower;
            EXPECT_GE(syncs, 49);
            if (slower == 2) { EXPECT_GT(counted, 0.9 * syncs) << "seed " << seed; }
        }
    }
}

// Requests cost money. Some workers wait in each sync: for the slower one.
TEST(SyncLog, over_a_bucket_a_sync_takes_few_requests_whoever_is_slower) {
    const SyncLogRules rules;
    struct Case {
        int workers;
        double slower, one_way;
    };
    for (const Case& one : {Case{2, 1, 0.002}, Case{2, 1, 0.04}, Case{2, 1.2, 0.002}, Case{2, 1.2, 0.04},
                            Case{2, 3, 0.002}, Case{2, 3, 0.04}, Case{4, 1, 0.04}, Case{4, 1.2, 0.04}}) {
        double reads = 0, all = 0;
        for (uint64_t seed = 6; seed <= 30; seed += 6) {
            simulation::World world(seed, rules, false, [&](simulation::Plan& plan) {
                simulation::make_even(plan);
                plan.workers = plan.options.workers = one.workers;
                plan.min_workers = plan.options.elastic.min_workers = one.workers / 2;
                plan.H = 45;
                plan.fragments = 3;
                plan.steps = 900;
                plan.overlap.assign(size_t(one.workers), 12);
                plan.step_time.assign(size_t(one.workers), 0.06);
                plan.step_time[1] *= one.slower;
                plan.delay.assign(size_t(one.workers), one.one_way);
                plan.first_start.assign(size_t(one.workers), 0);
                plan.options.elastic.grace = 10;
                plan.options.expiry = 5;
                plan.options.poll = 1;
                ASSERT_GT(plan.options.in_line, 0u);
            });
            ASSERT_NO_THROW(world.run());
            for (int w = 0; w < one.workers; w++) {
                EXPECT_LE(world.requests_a_sync(w), one.workers == 2 ? 13 : 18) << w << ", seed " << seed;
                EXPECT_GE(world.requests_a_sync(w), 4) << w;  // lines, generation, trim
                reads += world.reads_a_sync(w) / 5 / one.workers;
                all += world.requests_a_sync(w) / 5 / one.workers;
            }
        }
        printf("%d workers, one %g times slower, %g s: %.1f requests a sync, of which %.1f read\n", one.workers,
               one.slower, 2 * one.one_way, all, reads);
    }
}

// A shard whose host may have no room for snapshots, and whose device may still be at work on a step.
struct PoorShard : simulation::Shard {
    using Shard::Shard;
    void append_snapshot(Spool& spool) override {
        if (is_poor) { throw SpoolError("this disk has no room"); }
        Shard::append_snapshot(spool);
    }
    size_t snapshot_bytes() const override { return is_huge ? size_t(1) << 60 : Shard::snapshot_bytes(); }
    const Encoded* encoded(long sync) override { return is_at_work ? nullptr : Shard::encoded(sync); }
    bool is_poor = false, is_huge = false, is_at_work = false;
};

// A worker whose requests a test asks for by hand, as often as it likes.
struct Driven {
    Driven(int worker, const SyncSchedule& schedule, LogStore& store, const SyncLogOptions& options,
           int rank = 0)
        : Driven(worker, schedule, store, options, start(worker, schedule), rank) {}
    Driven(int worker, const SyncSchedule& schedule, LogStore& store, const SyncLogOptions& options,
           const LogStart& start, int rank = 0)
        : store(store),
          shard(worker, rank, schedule),
          log(options, schedule, worker, shard, rules, start) {}

    static SyncLogOptions options(int workers = 3, int min_workers = 3) {
        SyncLogOptions options;
        options.workers = workers;
        options.elastic.min_workers = min_workers;
        options.elastic.max_lag = 4;
        options.elastic.grace = options.expiry = 100;
        options.snapshot_chunk = 10;  // bytes
        options.spool_folder = testing::TempDir();
        return options;
    }
    static LogStart start(int worker, const SyncSchedule& schedule) {
        LogStart start;
        start.token = std::to_string(worker);
        start.positions.assign(size_t(schedule.fragments()), 0);
        return start;
    }

    // Takes all requests to the store and brings the answers back. Returns false if there are no requests.
    bool go_there_and_back(double now) {
        const std::vector<StoreRequest> requests = log.requests(now);
        if (!requests.empty()) { log.answer(store.perform_all(requests), now); }
        return listen(now) || !requests.empty();
    }
    // Returns whether the store has told it anything new.
    bool listen(double now) {
        const std::vector<StoreRequest> requests = log.listen();
        if (requests.empty()) { return false; }
        const std::vector<StoreAnswer> answers = store.perform_all(requests);
        log.hear(answers, now);
        return answers[0].found;
    }
    void show_life(double now) { store.perform_all(heartbeat.requests(log.pulse(), now)); }
    int ways_until_it_goes_on(long step, double now) {
        int ways = 0;
        for (; log.turn(step, now).kind == LogTurn::wait; ways++) { EXPECT_TRUE(go_there_and_back(now)); }
        return ways;
    }

    LogStore& store;
    const SyncLogRules rules;
    PoorShard shard;
    SyncLog log;
    Heartbeat heartbeat{0.5, false};
};

TEST(SyncLog, a_sync_takes_the_last_sender_one_way_to_the_store_and_the_others_are_told) {
    const long H = 4;
    const SyncSchedule schedule(std::vector<Fragment>(1), H);
    SimulatedStore store(schedule, 4);
    std::vector<std::unique_ptr<Driven>> workers;
    for (int w = 0; w < 3; w++) {
        workers.push_back(std::make_unique<Driven>(w, schedule, store, Driven::options()));
    }
    double now = 0;
    const auto settle = [&] {
        for (now += 1; workers[0]->go_there_and_back(now) | workers[1]->go_there_and_back(now) |
                       workers[2]->go_there_and_back(now);) {}
    };
    for (int round = 0; round < 3; round++) { settle(); }
    for (long step = 0; step <= H; step++) {
        for (const auto& one : workers) {
            if (step > 0) { one->shard.train(step); }
            EXPECT_EQ(one->log.turn(step, now).kind, LogTurn::go_on);
        }
        if (step < H) { settle(); }
    }
    for (int w : {0, 1}) {  // they have sent, and see that a worker is missing
        EXPECT_TRUE(workers[size_t(w)]->go_there_and_back(now));
        EXPECT_FALSE(workers[size_t(w)]->go_there_and_back(now));
    }
    EXPECT_EQ(workers[2]->ways_until_it_goes_on(H + 1, now), 1);
    for (int w : {0, 1}) { EXPECT_EQ(workers[size_t(w)]->ways_until_it_goes_on(H + 1, now), 1); }
    for (const auto& one : workers) { EXPECT_EQ(one->log.positions(), std::vector<long>{1}); }
    EXPECT_EQ(store.entries().size(), 1u);
    EXPECT_EQ(store.entries().begin()->second.contributors.size(), 3u);
    std::vector<size_t> read;
    for (const auto& one : workers) {
        for (const LogEvent& event : one->log.events()) {
            if (event.kind == LogEventKind::applied) { read.push_back(event.bytes_read); }
        }
    }
    EXPECT_EQ(read, (std::vector<size_t>{72, 72, 72}));  // two payloads
}

TEST(SyncLog, a_worker_that_was_stopped_while_it_looked_around_looks_again_soon) {
    const SyncSchedule schedule(std::vector<Fragment>(1), 4);
    SimulatedStore store(schedule, 4);
    std::vector<std::unique_ptr<Driven>> workers;
    for (int w = 0; w < 3; w++) {
        workers.push_back(std::make_unique<Driven>(w, schedule, store, Driven::options()));
    }
    double now = 0;
    for (; now < 3; now += 1) {
        for (const auto& one : workers) {
            while (one->go_there_and_back(now)) {}
        }
    }
    SyncLog& log = workers[0]->log;
    ASSERT_EQ(log.turn(0, now).kind, LogTurn::go_on);
    const auto looks = [](const StoreRequest& request) {
        return request.kind == StoreRequest::list && request.folder.find("/beat") != std::string::npos;
    };
    const auto come_to_a_look = [&] {
        for (int i = 0; i < 100000; i++, now += 0.1) {
            const std::vector<StoreRequest> requests = log.requests(now);
            if (std::any_of(requests.begin(), requests.end(), looks)) { return requests; }
            if (!requests.empty()) { log.answer(store.perform_all(requests), now); }
        }
        return std::vector<StoreRequest>();
    };
    const std::vector<StoreRequest> requests = come_to_a_look();
    ASSERT_FALSE(requests.empty());
    const auto answers = store.perform_all(requests);
    now += 60;
    log.answer(answers, now);
    const double goes_on = now;
    ASSERT_FALSE(come_to_a_look().empty());
    EXPECT_LE(now - goes_on, Driven::options().expiry / 2 + 0.2);
}

TEST(SyncLog, nobody_is_taken_for_dead_because_a_look_took_long) {
    Presence presence(5, 10);
    const auto look = [&](long count, double from, double now) {
        presence.look({{"1", LogBeat{1, count, 0, -1}.text()}}, from, now);
    };
    look(1, 0, 0);
    look(2, 1, 1);
    presence.changes();
    look(2, 2, 17);  // the answer is that of the second 2
    EXPECT_TRUE(presence.is_alive({1, 1}));
    look(3, 17, 32);
    look(3, 32, 47);  // both may have been read in the second 32
    EXPECT_TRUE(presence.is_alive({1, 1}));
    EXPECT_TRUE(presence.changes().empty());
    look(3, 47, 62);
    EXPECT_FALSE(presence.is_alive({1, 1}));
}

TEST(SyncLog, one_whose_beat_was_seen_once_is_told_of_if_it_has_contributed_with_the_reader) {
    const auto kinds = [](Presence& presence) {
        std::vector<LogEventKind> kinds;
        for (const Presence::Change& change : presence.changes()) { kinds.push_back(change.kind); }
        return kinds;
    };
    struct Case {
        int start;      // of worker 1, whose beat is seen; its start 1 has contributed
        int of_reader;  // worker 0, whose start 1 has contributed
        bool is_told;
    };
    for (const auto [start, of_reader, is_told] :
         {Case{1, 1, true}, {2, 1, false}, {0, 1, false}, {1, 2, false}}) {
        Presence presence(5, 10);
        const auto look = [&](double now) {
            presence.look({{"1", LogBeat{start, 1, 0, -1}.text()}}, now, now);
        };
        LogEntry entry;
        entry.contributors = {{{0, 1}}, {{1, 1}}};
        look(0);
        EXPECT_TRUE(kinds(presence).empty()) << "it may be left from one that is long dead";
        presence.note(entry, 0, {0, of_reader});
        look(6);
        const std::vector<LogEventKind> both{LogEventKind::joined, LogEventKind::gone};
        EXPECT_EQ(kinds(presence), is_told ? both : std::vector<LogEventKind>());
    }
}

TEST(SyncLog, what_a_worker_has_cost_is_paid_back_while_it_is_charged_for_nothing_else) {
    Presence presence(5, 10);  // it may owe at most a fifth of the grace
    const auto beat = [&](long count, double now) {
        presence.look({{"1", LogBeat{1, count, 0, -1}.text()}}, now, now);
    };
    const std::set<int> nobody;
    const auto is_waited_for = [&](long sync, double since, double now) {
        return presence.missing(sync, nobody, since, now).waited_for;
    };
    beat(1, 0);
    beat(2, 13);
    presence.charge(3, nobody, 10, 10, 13);
    EXPECT_TRUE(is_waited_for(3, 10, 13));
    EXPECT_FALSE(is_waited_for(4, 14, 14));
    beat(3, 70);
    EXPECT_TRUE(is_waited_for(5, 70, 70));
}

TEST(SyncLog, of_syncs_that_are_due_at_once_each_waits_and_the_time_is_charged_once) {
    Presence presence(5, 10);
    const std::set<int> nobody;
    const auto is_waited_for = [&](long sync, double since, double now) {
        return presence.missing(sync, nobody, since, now).waited_for;
    };
    long count = 0;
    for (double now = 10; now < 20; now += 1) {
        presence.look({{"1", LogBeat{1, count++, 0, -1}.text()}}, now, now);
        for (long sync : {3, 4}) {
            EXPECT_TRUE(is_waited_for(sync, 10, now)) << sync << " at " << now;
            presence.charge(sync, nobody, 10, 10, now);
        }
        EXPECT_TRUE(is_waited_for(5, 10, now)) << "it was sent later, at " << now;
    }
    // Nine seconds and not eighteen, of which two are left after 350.
    presence.look({{"1", LogBeat{1, count++, 0, -1}.text()}}, 340, 340);
    EXPECT_FALSE(is_waited_for(6, 340, 340));
    presence.look({{"1", LogBeat{1, count++, 0, -1}.text()}}, 370, 370);
    EXPECT_TRUE(is_waited_for(6, 370, 370));
}

TEST(SyncLog, nobody_is_blamed_for_what_could_not_be_heard) {
    Presence presence(5, 10);
    const auto beat = [&](long count, double now) {
        presence.look({{"1", LogBeat{1, count, 0, -1}.text()}}, now, now);
    };
    beat(1, 0);
    beat(2, 1);
    presence.forgive(299, 300);  // seconds without the store
    beat(2, 301);                // as it lay there
    EXPECT_TRUE(presence.is_alive({1, 1}));
    beat(2, 306);
    EXPECT_FALSE(presence.is_alive({1, 1}));
}

// Workers of one fragment that have sent its first sync, and have not seen yet what the others have sent.
struct Senders {
    explicit Senders(int count) : Senders(count, Driven::options(count, count)) {}
    Senders(int count, const SyncLogOptions& options) {
        for (int w = 0; w < count; w++) {
            workers.push_back(std::make_unique<Driven>(w, schedule, store, options));
        }
        for (int round = 0; round < 3; round++) { settle(); }
    }
    void settle() {
        now += 1;
        for (const auto& one : workers) { one->show_life(now); }
        for (bool is_asked = true; is_asked;) {
            is_asked = false;
            for (const auto& one : workers) { is_asked |= one->go_there_and_back(now); }
        }
    }
    void train_until_they_send() {
        for (long step = 0; step <= H; step++) {
            for (const auto& one : workers) {
                if (step > 0) { one->shard.train(step); }
                EXPECT_EQ(one->log.turn(step, now).kind, LogTurn::go_on);
            }
            if (step < H) { settle(); }
        }
    }

    static constexpr long H = 4;
    const SyncSchedule schedule{std::vector<Fragment>(1), H};
    SimulatedStore store{schedule, 4};
    std::vector<std::unique_ptr<Driven>> workers;
    double now = 0;
};

// The host is a step ahead of its GPU, so it comes to the due step long before its payload is there. Of two
// workers that are equally fast, the first must not decide alone for that.
TEST(SyncLog, a_worker_waits_for_the_others_only_since_its_device_has_come_to_the_send) {
    for (double ahead : {1.0, 90.0, 150.0}) {  // seconds; the grace is 100
        Senders senders(2, Driven::options(2, 1));
        senders.train_until_they_send();
        for (const auto& one : senders.workers) { one->shard.is_at_work = true; }
        const auto wait = [&] {
            senders.settle();
            for (const auto& one : senders.workers) { one->log.turn(Senders::H + 1, senders.now); }
        };
        for (const double end = senders.now + ahead; senders.now < end;) { wait(); }
        senders.workers[0]->shard.is_at_work = false;
        wait();
        senders.workers[1]->shard.is_at_work = false;
        for (int i = 0; i < 5; i++) { wait(); }
        ASSERT_EQ(senders.store.entries().size(), 1u) << ahead;
        EXPECT_EQ(senders.store.entries().begin()->second.contributors.size(), 2u) << ahead;
    }
}

// A chunk of a payload that is there, but not all of it, is asked for once.
TEST(SyncLog, a_damaged_payload_is_named_once_and_replaced_by_a_snapshot) {
    for (const std::string& damaged : {std::string(), std::string("x"), std::string(100'000, 'x')}) {
        Senders senders(2);
        senders.train_until_they_send();
        Driven &one = *senders.workers[0], &other = *senders.workers[1];
        const std::string run = one.log.current_generation() + "/0/";
        EXPECT_TRUE(one.go_there_and_back(senders.now));
        ASSERT_EQ(senders.store.in(run + "payload/0").count("0.1.0"), 1u);
        senders.store.forge(run + "payload/0", "0.1.0", damaged);
        std::vector<std::string> told;
        bool has_snapshot = false;
        for (int round = 0; round < 2000 && !has_snapshot; round++) {
            for (const auto& worker : senders.workers) { worker->log.turn(Senders::H + 1, senders.now); }
            senders.settle();
            for (const LogEvent& event : other.log.events()) {
                if (event.kind == LogEventKind::needs_snapshot) { told.push_back(event.text); }
                has_snapshot |= event.kind == LogEventKind::takes_snapshot;
            }
        }
        EXPECT_TRUE(has_snapshot);
        ASSERT_EQ(told.size(), 1u) << told[0] << "; " << told.back();
        const std::string bytes = format("damaged (%zu bytes instead of ", damaged.size());
        EXPECT_NE(told[0].find("payload/0 0.1.0 " + bytes), std::string::npos) << told[0];
        EXPECT_EQ(one.log.stopped().why + other.log.stopped().why, "");
    }
}

// Returns why worker 0 of two stops that finds `entry` decided, after both have sent.
static std::string refusal_of(const std::function<std::string(LogEntry)>& forge) {
    Senders senders(2);
    senders.train_until_they_send();
    Driven& one = *senders.workers[0];
    const std::string run = one.log.current_generation() + "/0/";
    for (const auto& worker : senders.workers) { EXPECT_TRUE(worker->go_there_and_back(senders.now)); }
    LogEntry entry;
    entry.hash = one.shard.hash(0);
    entry.decider = {1, 1};
    for (const auto& [who, text] : senders.store.in(run + "sent/0")) {
        const LogLine line = LogLine::parse(text);
        entry.contributors.push_back({Incarnation::parse(who), line.bytes, line.digest, line.tokens});
    }
    EXPECT_EQ(entry.contributors.size(), 2u);
    senders.store.forge(run + "entry", "0", forge(entry));
    senders.settle();
    const LogTurn turn = one.log.turn(Senders::H + 1, senders.now);
    EXPECT_EQ(turn.kind == LogTurn::stop, !one.log.stopped().why.empty());
    return one.log.stopped().why;
}

TEST(SyncLog, an_entry_that_no_worker_can_have_written_is_refused_and_named) {
    using Forgery = std::function<void(LogEntry&)>;
    const std::vector<std::pair<const char*, Forgery>> forgeries = {
        {"too few workers", [](LogEntry& e) { e.contributors.pop_back(); }},
        {"nobody", [](LogEntry& e) { e.contributors.clear(); }},
        {"a worker that is not of the run", [](LogEntry& e) { e.contributors[1].who.worker = 7; }},
        {"a negative worker", [](LogEntry& e) { e.contributors[1].who.worker = -1; }},
        {"a worker twice", [](LogEntry& e) { e.contributors[1] = e.contributors[0]; }},
        {"a worker that abstained, too", [](LogEntry& e) { e.abstained = {1}; }},
        {"a payload without bytes", [](LogEntry& e) { e.contributors[1].bytes = 0; }},
        {"a payload without tokens", [](LogEntry& e) { e.contributors[1].tokens = 0; }},
        {"another size of this worker's payload", [](LogEntry& e) { e.contributors[0].bytes++; }},
        {"another digest of this worker's payload", [](LogEntry& e) { e.contributors[0].digest++; }},
    };
    for (const auto& [what, change] : forgeries) {
        const std::string why = refusal_of([&, change = change](LogEntry entry) {
            change(entry);
            return entry.text();
        });
        EXPECT_EQ(why.rfind("the store holds a damaged or forged record, ", 0), 0u) << what << ": " << why;
        EXPECT_NE(why.find("/0/entry 0: "), std::string::npos) << what << ": " << why;
    }
    for (const char* text : {"", "nonsense", "-1", "1 1.1 99999999999"}) {
        EXPECT_NE(refusal_of([&](const LogEntry&) { return text; }), "") << text;
    }
    EXPECT_NE(refusal_of([&](const LogEntry& entry) { return entry.text() + " 5"; }), "");
    EXPECT_EQ(refusal_of([&](const LogEntry& entry) { return entry.text(); }), "");
}

TEST(SyncLog, lines_and_beats_that_no_worker_can_have_written_are_refused_and_named) {
    const std::vector<std::vector<std::string>> forgeries = {
        {"sent/0", "7.1", "1 1 1 1"}, {"sent/0", "1.x", "1 1 1 1"},  {"sent/0", "0.1", "half of a li"},
        {"beat", "7", "1 1 0 0"},     {"beat", "-1", "1 1 0 0"},     {"beat", "1", "1 1 0 1000000"},
        {"sent/0", "1.0", "1 1 1 1"}, {"beat", "1", "1 1 0 9223372036854775807"},
    };
    for (const auto& forged : forgeries) {
        SyncLogOptions options = Driven::options(2, 2);
        options.last_step = 1000;
        Senders senders(2, options);
        senders.train_until_they_send();
        Driven& one = *senders.workers[0];
        EXPECT_TRUE(one.go_there_and_back(senders.now));
        senders.store.forge(one.log.current_generation() + "/0/" + forged[0], forged[1], forged[2]);
        one.log.turn(Senders::H + 1, senders.now);
        for (int i = 0; i < 3; i++) { one.go_there_and_back(senders.now += 200); }
        const std::string record = one.log.current_generation() + "/0/" + forged[0] + " " + forged[1] + ": ";
        EXPECT_NE(one.log.stopped().why.find(record), std::string::npos)
            << forged[0] << " " << forged[1] << " " << forged[2] << ": " << one.log.stopped().why;
    }
}

// Returns why worker 0 of two stops, or "", when it has read `beat` of worker 1, which does not train on.
static std::string end_after_beat(const std::string& beat, int* snapshots) {
    SyncLogOptions options = Driven::options(2, 2);
    options.last_step = 1000;
    Senders senders(2, options);
    senders.train_until_they_send();
    Driven &one = *senders.workers[0], &other = *senders.workers[1];
    long step = Senders::H + 1;
    one.shard.train(step);
    for (int round = 0; round < 2000 && one.log.stopped().why.empty(); round++) {
        const LogTurn turn = one.log.turn(step, senders.now);
        other.log.turn(Senders::H + 1, senders.now);
        if (turn.kind == LogTurn::jump) { step = turn.step; }
        if (turn.kind == LogTurn::go_on) { one.shard.train(++step); }
        senders.settle();
        if (round == 20) {
            senders.store.forge(one.log.current_generation() + "/0/beat", "1", beat);
            for (int i = 0; i < 3; i++) { one.go_there_and_back(senders.now += 200); }
        }
        for (const LogEvent& event : one.log.events()) {
            *snapshots += event.kind == LogEventKind::takes_snapshot;
        }
    }
    EXPECT_EQ(other.log.stopped().why, "");
    return one.log.stopped().why;
}

TEST(SyncLog, a_beat_that_names_a_sync_that_was_never_sent_ends_in_a_line_and_not_in_snapshots_without_end) {
    int snapshots = 0;
    const std::string why = end_after_beat(LogBeat{1, 1, 0, 50}.text(), &snapshots);
    EXPECT_EQ(why.rfind("the store holds a damaged or forged record: a beat in ", 0), 0u) << why;
    EXPECT_NE(why.find(" says that sync 50 was sent, and sync 1 is not decided"), std::string::npos) << why;
    EXPECT_EQ(snapshots, 3);
}

TEST(SyncLog, a_beat_that_is_not_whole_counts_as_absent) {
    for (const char* beat : {"", "1 1 0", "1 1 0 50 1 1 0 50", "nonsense"}) {
        int snapshots = 0;
        EXPECT_EQ(end_after_beat(beat, &snapshots), "") << beat;
        EXPECT_EQ(snapshots, 0) << beat;
    }
}

// The worker stands still while it waits for answers, but that time does not count against the others.
TEST(SyncLog, nothing_is_decided_without_others_because_the_answers_took_long) {
    SyncLogOptions options = Driven::options(3, 3);
    options.elastic.min_workers = 2;
    options.elastic.grace = 10;
    options.expiry = 5;
    Senders senders(3, options);
    senders.train_until_they_send();
    Driven& one = *senders.workers[0];
    EXPECT_TRUE(senders.workers[1]->go_there_and_back(senders.now));
    EXPECT_EQ(one.log.turn(Senders::H + 1, senders.now).kind, LogTurn::wait);
    EXPECT_TRUE(one.go_there_and_back(senders.now));
    senders.now += 0.1;  // all beats are still the same
    const auto requests = one.log.requests(senders.now);
    const auto answers = senders.store.perform_all(requests);
    one.log.events();
    senders.now += 3 * options.expiry;
    one.log.answer(answers, senders.now);
    for (const LogEvent& event : one.log.events()) { EXPECT_NE(event.kind, LogEventKind::gone); }
    EXPECT_TRUE(senders.workers[2]->go_there_and_back(senders.now));
    senders.settle();
    ASSERT_EQ(senders.store.entries().size(), 1u);
    EXPECT_EQ(senders.store.entries().begin()->second.contributors.size(), 3u);
}

// Whose store is a bucket. A worker is dead after 5 seconds.
struct BucketSenders : Senders {
    BucketSenders(int count, int min_workers, size_t in_line = 1 << 20)
        : Senders(count, options(count, min_workers, in_line)) {
        store.has_scripts = false;
        store.places = size_t(count);
        train_until_they_send();
    }
    static SyncLogOptions options(int count, int min_workers, size_t in_line) {
        SyncLogOptions options = Driven::options(count, min_workers);
        options.in_line = in_line;
        options.chunk = 10;
        options.expiry = 5;
        return options;
    }
    std::vector<StoreAnswer> beats() {
        const std::string folder = workers[0]->log.current_generation() + "/0/beat";
        return store.perform_all({{StoreRequest::get, folder, "0"},
                                  {StoreRequest::list, folder},
                                  {StoreRequest::get, "run", "generation"}});
    }
};

// With the payload behind it, and the other's line and the generation beside it.
TEST(SyncLog, over_a_bucket_a_sync_is_one_round_trip_for_who_sends_last) {
    BucketSenders senders(2, 2);
    Driven &one = *senders.workers[0], &other = *senders.workers[1];
    const std::vector<StoreRequest> requests = one.log.requests(senders.now);
    one.log.answer(senders.store.perform_all(requests), senders.now);
    EXPECT_EQ(other.ways_until_it_goes_on(Senders::H + 1, senders.now), 1);
    EXPECT_EQ(one.log.turn(Senders::H + 1, senders.now).kind, LogTurn::wait);
    EXPECT_TRUE(one.listen(senders.now));
    EXPECT_EQ(one.log.turn(Senders::H + 1, senders.now).kind, LogTurn::go_on);
    ASSERT_EQ(senders.store.entries().size(), 1u);
    EXPECT_EQ(senders.store.entries().begin()->second.contributors.size(), 2u);
    EXPECT_TRUE(senders.store.in(one.log.current_generation() + "/0/payload/0").empty());
}

TEST(SyncLog, over_a_bucket_what_is_lost_on_the_second_connection_alone_is_asked_for_again) {
    BucketSenders senders(2, 2);
    SyncLog& log = senders.workers[0]->log;
    log.answer(senders.store.perform_all(log.requests(senders.now)), senders.now);
    const std::vector<StoreRequest> requests = log.listen();
    ASSERT_FALSE(requests.empty());
    log.hear(std::vector<StoreAnswer>(requests.size(), lost_answer("silent", false)), senders.now);
    EXPECT_EQ(log.helpless(), "the store does not answer (silent)");
    EXPECT_TRUE(log.listens());
    senders.workers[0]->listen(senders.now);
    EXPECT_EQ(log.helpless(), "");
}

TEST(SyncLog, over_a_bucket_a_second_connection_that_nothing_is_asked_over_any_more_makes_nobody_helpless) {
    BucketSenders senders(2, 2);
    Driven& one = *senders.workers[0];
    one.log.answer(senders.store.perform_all(one.log.requests(senders.now)), senders.now);
    const std::vector<StoreRequest> lost = one.log.listen();
    ASSERT_FALSE(lost.empty());
    one.log.hear(std::vector<StoreAnswer>(lost.size(), lost_answer("silent", false)), senders.now);
    EXPECT_NE(one.log.helpless(), "");
    senders.workers[1]->ways_until_it_goes_on(Senders::H + 1, senders.now);
    for (int second = 0; second < 20 && one.log.listens(); second++) {
        senders.now += 1;
        one.log.turn(Senders::H + 1, senders.now);
        one.go_there_and_back(senders.now);
    }
    ASSERT_FALSE(one.log.listens());
    EXPECT_EQ(one.log.helpless(), "");
}

// It learns so while its second chunk is on its way, and its trainer goes on.
TEST(SyncLog, over_a_bucket_a_worker_whose_place_is_closed_does_not_first_send_a_large_payload) {
    BucketSenders senders(3, 2, 1);
    Driven& third = *senders.workers[2];
    third.log.answer(senders.store.perform_all(third.log.requests(senders.now)), senders.now);
    EXPECT_FALSE(third.log.requests(senders.now).empty());
    EXPECT_EQ(third.log.turn(Senders::H + 1, senders.now).kind, LogTurn::wait);
    for (long step = Senders::H + 1; step <= 2 * Senders::H; step++) {
        for (int second = 0; second < 12; second++) {
            senders.now += 1;
            for (int w : {0, 1}) {
                Driven& one = *senders.workers[size_t(w)];
                one.log.turn(step, senders.now);
                one.show_life(senders.now);
                one.go_there_and_back(senders.now);
            }
        }
    }
    third.log.hear_beats(senders.beats(), senders.now, senders.now);
    for (int question = 0; question < 50 && third.log.listens(); question++) { third.listen(senders.now); }
    third.log.turn(Senders::H + 1, senders.now);
    EXPECT_EQ(third.log.positions(), std::vector<long>{1});
}

// Another worker's line may have come meanwhile.
TEST(SyncLog, over_a_bucket_a_place_is_not_closed_by_a_request_from_before_the_store_was_lost) {
    BucketSenders senders(3, 2);
    SyncLog& log = senders.workers[0]->log;
    const auto closes = [](const std::vector<StoreRequest>& requests) {
        return std::any_of(requests.begin(), requests.end(), [](const StoreRequest& one) {
            return one.kind == StoreRequest::put_if_absent && one.name == "2";
        });
    };
    std::vector<StoreRequest> requests;
    for (int second = 0; second < 12 && !closes(requests); second++) {
        senders.now += 1;
        for (int w : {1, 0}) {
            senders.workers[size_t(w)]->log.turn(Senders::H + 1, senders.now);
            senders.workers[size_t(w)]->show_life(senders.now);
        }
        senders.workers[1]->go_there_and_back(senders.now);
        requests = log.requests(senders.now);
        if (!closes(requests)) { log.answer(senders.store.perform_all(requests), senders.now); }
    }
    ASSERT_TRUE(closes(requests));
    log.answer(std::vector<StoreAnswer>(requests.size(), lost_answer("silent", false)), senders.now);
    requests = log.requests(senders.now + 100);
    EXPECT_FALSE(requests.empty());
    EXPECT_FALSE(closes(requests));
}

// The heartbeat lists the beats at any time, also while a batch of the log is on its way.
TEST(SyncLog, over_a_bucket_the_heartbeat_finds_a_later_start_while_a_line_is_on_its_way) {
    BucketSenders senders(2, 2);
    SyncLog& log = senders.workers[0]->log;
    const std::string folder = log.current_generation() + "/0/";
    senders.store.perform({StoreRequest::put, folder + "incarnation/0", "2", "another token"});
    LogBeat beat;
    beat.incarnation = 2;
    senders.store.perform({StoreRequest::put, folder + "beat", "0", beat.text()});
    const std::vector<StoreRequest> line = log.requests(senders.now);
    ASSERT_FALSE(line.empty());
    log.hear_beats(senders.beats(), senders.now, senders.now);
    log.answer(senders.store.perform_all(line), senders.now);
    EXPECT_EQ(log.stopped().why, "");
    senders.workers[0]->go_there_and_back(senders.now);
    EXPECT_TRUE(log.stopped().replaced) << log.stopped().why;
}

// Two have sent, and the third one is dead. The last sender closes its place. Its own line comes too late then,
// and it goes on with what the others have decided.
TEST(SyncLog, over_a_bucket_a_worker_that_is_not_waited_for_is_closed_and_the_first_line_in_its_place_stays) {
    for (const bool has_sent : {false, true}) {
        BucketSenders senders(3, 2);
        Driven& third = *senders.workers[2];
        const std::vector<StoreRequest> own = third.log.requests(senders.now);
        if (has_sent) { senders.store.perform_all(own); }  // and it dies
        for (int second = 0; second < 12; second++) {
            senders.now += 1;
            for (int w : {0, 1}) {
                senders.workers[size_t(w)]->log.turn(Senders::H + 1, senders.now);
                senders.workers[size_t(w)]->show_life(senders.now);
                senders.workers[size_t(w)]->go_there_and_back(senders.now);
            }
        }
        ASSERT_EQ(senders.store.entries().size(), 1u);
        const LogEntry entry = senders.store.entries().begin()->second;
        EXPECT_EQ(entry.contributors.size(), has_sent ? 3u : 2u);
        EXPECT_EQ(entry.counts(2), has_sent);
        const std::string lines = third.log.current_generation() + "/0/sent/0";
        const std::string there = senders.store.in(lines)["2"];
        EXPECT_EQ(Incarnation::parse(there).worker == 2, has_sent) << there;
        third.log.answer(senders.store.perform_all(own), senders.now);
        EXPECT_EQ(senders.store.in(lines)["2"], there);
        for (int round = 0; round < 3; round++) {
            senders.settle();
            for (const auto& one : senders.workers) { one->log.turn(Senders::H + 1, senders.now); }
        }
        for (const auto& one : senders.workers) {
            EXPECT_EQ(one->log.positions(), std::vector<long>{1});
            EXPECT_EQ(one->shard.hash(0), third.shard.hash(0));
        }
    }
}

TEST(SyncLog, a_line_that_the_store_has_lost_is_sent_again) {
    Senders senders(2);
    senders.train_until_they_send();
    Driven &one = *senders.workers[0], &other = *senders.workers[1];
    EXPECT_TRUE(one.go_there_and_back(senders.now));
    const std::string sent = one.log.current_generation() + "/0/sent/0";
    ASSERT_EQ(senders.store.in(sent).size(), 1u);
    senders.store.perform({StoreRequest::remove, sent, "0.1", ""});
    EXPECT_TRUE(other.go_there_and_back(senders.now));
    for (int round = 0; round < 3; round++) { senders.settle(); }
    ASSERT_EQ(senders.store.entries().size(), 1u);
    EXPECT_EQ(senders.store.entries().begin()->second.contributors.size(), 2u);
}

TEST(SyncLog, a_chunk_does_not_ask_for_what_is_there_before_it) {
    Senders senders(2);
    senders.train_until_they_send();
    int chunks = 0, lines = 0;
    for (const StoreRequest& request : senders.workers[0]->log.requests(senders.now)) {
        const bool is_chunk = request.folder.find("/payload/") != std::string::npos;
        const bool is_line =
            request.folder.find("/sent/") != std::string::npos && request.kind == StoreRequest::put_if_absent;
        EXPECT_EQ(request.asks_winner, !is_chunk && !is_line);
        chunks += is_chunk;
        lines += is_line;
    }
    EXPECT_EQ(chunks, 1);
    EXPECT_EQ(lines, 1);
}

TEST(SyncLog, of_two_syncs_that_are_due_at_once_none_is_decided_before_the_grace_is_over) {
    const long H = 4;
    const SyncSchedule schedule(std::vector<Fragment>(2), H);
    SimulatedStore store(schedule, 4);
    std::vector<std::unique_ptr<Driven>> workers;
    for (int w = 0; w < 3; w++) {
        workers.push_back(std::make_unique<Driven>(w, schedule, store, Driven::options(3, 2)));
    }
    double now = 0;
    const auto settle = [&] {
        for (bool is_asked = true; is_asked;) {
            is_asked = false;
            for (const auto& one : workers) { is_asked |= one->go_there_and_back(now); }
        }
    };
    for (; now < 3; now += 1) { settle(); }
    const auto train = [&](Driven& one, long step) {
        if (step > 0) { one.shard.train(step); }
        return one.log.turn(step, now).kind;
    };
    for (long step = 0; step <= H + 1; step++) {
        for (int w : {0, 1}) {
            EXPECT_EQ(train(*workers[size_t(w)], step), step <= H ? LogTurn::go_on : LogTurn::wait);
        }
        if (step < H) { EXPECT_EQ(train(*workers[2], step), LogTurn::go_on); }
        settle();
        now += 1;
    }
    for (const double late = now + Driven::options().elastic.grace / 2; now < late; now += 5) {
        settle();
        EXPECT_TRUE(store.entries().empty()) << "at " << now;
    }
    train(*workers[2], H);
    for (int round = 0; round < 3; round++, now += 1) { settle(); }
    ASSERT_EQ(store.entries().size(), 2u);
    for (const auto& [key, entry] : store.entries()) { EXPECT_EQ(entry.contributors.size(), 3u) << key; }
}

TEST(SyncLog, a_run_begins_with_the_newest_checkpoint_that_most_hold) {
    const auto base = [](long first, long second, uint64_t hash) {
        return LogBase{{first, second}, {hash, hash}};
    };
    const LogBase old = base(3, 3, 1), right = base(4, 4, 9), wrong = base(4, 4, 2), other = base(5, 3, 3);
    EXPECT_EQ(base_to_begin_with({wrong, right, old, right, old, old})->text(), right.text());
    EXPECT_FALSE(base_to_begin_with({old, right, wrong}));
    EXPECT_FALSE(base_to_begin_with({right, wrong, wrong, right}));
    // After as many syncs, but not the same ones: both may be right.
    EXPECT_TRUE(base_to_begin_with({right, other}));
    EXPECT_EQ(base_to_begin_with({other, right, right})->text(), right.text());
}

// Two workers start with checkpoints of a run that the store has lost.
TEST(SyncLog, workers_whose_checkpoints_differ_do_not_begin_with_either) {
    const SyncSchedule schedule(std::vector<Fragment>(1), 4);
    SimulatedStore store(schedule, 4);
    const SyncLogRules rules;
    std::vector<std::unique_ptr<simulation::Shard>> shards;
    std::vector<std::unique_ptr<SyncLog>> logs;
    for (int w = 0; w < 2; w++) {
        LogStart start = Driven::start(w, schedule);
        start.positions = {3};
        start.generation = "lost";
        start.from_checkpoint = true;
        shards.push_back(std::make_unique<simulation::Shard>(w, 0, schedule));
        if (w == 1) { shards.back()->corrupt(); }
        logs.push_back(std::make_unique<SyncLog>(Driven::options(2, 2), schedule, w, *shards.back(), rules,
                                                 start));
    }
    for (int i = 0; i < 20; i++) {
        for (const auto& log : logs) {
            const auto requests = log->requests(i);
            if (!requests.empty()) { log->answer(store.perform_all(requests), i); }
        }
    }
    for (const auto& log : logs) {
        EXPECT_TRUE(simulation::is_diverged(log->stopped()));
        EXPECT_EQ(log->turn(0, 20).kind, LogTurn::stop);
    }
}

// A worker that was catching up when its store was emptied may have applied more syncs of one fragment than of others.
TEST(SyncLog, a_run_begins_with_fragments_that_are_some_syncs_apart) {
    std::vector<Fragment> fragments(2);
    fragments[1].offset = 2;
    const SyncSchedule schedule(fragments, 4);
    SimulatedStore store(schedule, 4);
    std::vector<std::unique_ptr<Driven>> workers;
    for (int w = 0; w < 2; w++) {
        LogStart start = Driven::start(w, schedule);
        start.positions = {4, 1};
        start.generation = "lost";
        start.from_checkpoint = true;
        workers.push_back(std::make_unique<Driven>(w, schedule, store, Driven::options(2, 2), start));
    }
    double now = 0;
    std::vector<long> steps(2, 17);
    std::string told;
    for (int second = 0; second < 60; second++) {
        now += 1;
        for (size_t w = 0; w < 2; w++) {
            Driven& one = *workers[w];
            const LogTurn turn = one.log.turn(steps[w], now);
            if (turn.kind == LogTurn::jump) { steps[w] = turn.step; }
            if (turn.kind == LogTurn::go_on && steps[w] < 30) { one.shard.train(++steps[w]); }
            one.show_life(now);
            one.go_there_and_back(now);
            for (const LogEvent& event : one.log.events()) {
                if (event.kind == LogEventKind::needs_snapshot) { told += event.text + "\n"; }
            }
        }
    }
    EXPECT_EQ(told, "");
    for (const auto& one : workers) { EXPECT_TRUE(one->log.is_running()) << one->log.helpless(); }
    EXPECT_EQ(steps, (std::vector<long>{30, 30}));
}

TEST(SyncLog, a_start_that_died_before_the_run_began_is_no_member_of_it) {
    const SyncSchedule schedule(std::vector<Fragment>(1), 4);
    SimulatedStore store(schedule, 4);
    SyncLogOptions options = Driven::options(4);  // the fourth has not come yet
    options.elastic.min_workers = 2;
    options.expiry = 5;
    options.elastic.grace = 10;
    std::vector<std::unique_ptr<Driven>> workers;
    for (int w = 0; w < 3; w++) {
        workers.push_back(std::make_unique<Driven>(w, schedule, store, options));
    }
    for (double now = 0; now < 20; now += 0.5) {
        for (const auto& one : workers) {
            if (now > 3 && one == workers.back()) { continue; }
            one->go_there_and_back(now);
            one->show_life(now);
        }
    }
    ASSERT_EQ(store.in(store.generation() + "/0/registered").size(), 3u);
    const auto run = store.in(store.generation() + "/0/run");
    ASSERT_EQ(run.count("start"), 1u);
    EXPECT_EQ(LogBeginning::parse(run.at("start")).members.size(), 2u);
}

// Of two workers the first one waits, and is killed or ends. The second one comes long after that.
TEST(SyncLog, a_worker_does_not_begin_with_one_that_died_before_it_came) {
    for (const bool says_so : {false, true}) {
        SCOPED_TRACE(says_so ? "it ended" : "it was killed");
        const SyncSchedule schedule(std::vector<Fragment>(1), 4);
        SimulatedStore store(schedule, 4);
        SyncLogOptions options = Driven::options(2, 1);
        options.expiry = 5;
        options.elastic.grace = 10;
        options.elastic.least_to_begin = 2;
        Driven first(0, schedule, store, options), second(1, schedule, store, options);
        const auto run = [&](Driven& worker, double from, double until) {
            for (double now = from; now < until; now += 0.5) {
                worker.go_there_and_back(now);
                worker.show_life(now);
            }
        };
        run(first, 0, 20);
        const std::string folder = store.generation() + "/0/";
        ASSERT_EQ(store.in(folder + "registered").size(), 1u);
        if (says_so) {
            StoreAnswer heard;
            heard.found = true;
            heard.value = store.generation();
            first.heartbeat.answer(heard);
            store.perform_all(first.heartbeat.farewell());
        }
        run(second, says_so ? 21 : 1000, says_so ? 24 : 1030);
        EXPECT_EQ(store.in(folder + "registered").size(), 2u);
        EXPECT_EQ(store.in(folder + "run").count("start"), 0u);
        Driven again(0, schedule, store, options);
        for (double now = 1030; now < 1032; now += 0.25) {
            for (Driven* one : {&second, &again}) {
                one->go_there_and_back(now);
                one->show_life(now);
            }
        }
        ASSERT_EQ(store.in(folder + "run").count("start"), 1u);
        EXPECT_EQ(LogBeginning::parse(store.in(folder + "run").at("start")).members.size(), 2u);
    }
}

// A store comes back without its newest data. Both lines are lost, and one worker was about to decide on
// them, or has not heard whether it has decided.
TEST(SyncLog, no_entry_is_written_for_lines_that_the_store_has_lost) {
    for (const bool is_decided_already : {false, true}) {
        SCOPED_TRACE(is_decided_already ? "the answer is lost" : "the request is lost");
        Senders senders(2);
        senders.store.has_scripts = false;
        senders.train_until_they_send();
        Driven &one = *senders.workers[0], &other = *senders.workers[1];
        const std::string run = one.log.current_generation() + "/0/";
        EXPECT_TRUE(one.go_there_and_back(senders.now));
        EXPECT_TRUE(other.go_there_and_back(senders.now));
        const std::vector<StoreRequest> requests = other.log.requests(senders.now);
        const auto writes_entry = [&](const StoreRequest& request) {
            return request.kind == StoreRequest::put_if_absent && request.folder == run + "entry";
        };
        ASSERT_TRUE(std::any_of(requests.begin(), requests.end(), writes_entry));
        std::vector<StoreAnswer> answers(requests.size());
        if (is_decided_already) { answers = senders.store.perform_all(requests); }
        for (StoreAnswer& answer : answers) { answer.lost = true; }
        other.log.answer(answers, senders.now);
        const auto forget = [&](const char* folder, const char* name) {
            senders.store.perform({StoreRequest::remove, run + folder, name, ""});
        };
        forget("entry", "0");
        for (const char* who : {"0.1", "1.1"}) { forget("sent/0", who); }
        for (const char* chunk : {"0.1.0", "1.1.0"}) { forget("payload/0", chunk); }
        for (int round = 0; round < 3; round++) { senders.settle(); }
        for (const auto& sender : senders.workers) {
            EXPECT_EQ(sender->log.turn(Senders::H + 1, senders.now).kind, LogTurn::go_on);
            EXPECT_EQ(sender->log.positions(), std::vector<long>{1});
        }
        EXPECT_EQ(senders.store.in(run + "payload/0").size(), 2u);
    }
}

TEST(SyncLog, whoever_finds_an_entry_gone_that_others_have_applied_takes_a_snapshot) {
    Senders senders(2);
    senders.train_until_they_send();
    Driven &one = *senders.workers[0], &other = *senders.workers[1];
    for (int round = 0; round < 3; round++) { senders.settle(); }
    const std::string run = one.log.current_generation() + "/0/";
    ASSERT_EQ(senders.store.in(run + "entry").size(), 1u);
    for (long step = Senders::H + 1; step <= 2 * Senders::H; step++) {
        EXPECT_EQ(one.log.turn(step, senders.now).kind, LogTurn::go_on);
        one.shard.train(step);
        one.go_there_and_back(senders.now);
        one.show_life(senders.now += 1);
    }
    senders.store.perform({StoreRequest::remove, run + "entry", "0", ""});
    // From a checkpoint before the first sync.
    LogStart start = Driven::start(1, senders.schedule);
    start.token = "again";
    start.generation = one.log.current_generation();
    start.from_checkpoint = true;
    simulation::Shard shard(1, 0, senders.schedule);
    SyncLog again(Driven::options(2, 2), senders.schedule, 1, shard, other.rules, start);
    std::vector<LogEventKind> told;
    for (int i = 0; i < 20; i++) {
        again.turn(0, senders.now += 1);
        const auto requests = again.requests(senders.now);
        if (!requests.empty()) { again.answer(senders.store.perform_all(requests), senders.now); }
        again.hear(senders.store.perform_all(again.listen()), senders.now);
        for (const LogEvent& event : again.events()) { told.push_back(event.kind); }
    }
    EXPECT_TRUE(std::count(told.begin(), told.end(), LogEventKind::needs_snapshot));
}

TEST(SyncLog, positions_that_were_written_half_are_none) {
    SyncLogOptions options = Driven::options(6, 2);
    options.elastic.grace = 1;  // the run begins without the others
    Senders senders(2, options);
    senders.train_until_they_send();
    const std::string run = senders.workers[0]->log.current_generation() + "/0/";
    const std::string catching_up = LogBeat{1, 1, LogBeat::catches_up, -1}.text();
    senders.store.perform({StoreRequest::put, run + "beat", "5", catching_up});
    senders.store.perform({StoreRequest::put, run + "held", "5.1.1", ""});
    senders.store.perform({StoreRequest::put, run + "durable", "5", ""});
    for (int round = 0; round < 3; round++) { senders.settle(); }
    EXPECT_EQ(senders.store.entries().size(), 1u);
    EXPECT_EQ(senders.store.in(run + "held").size(), 1u);  // whoever reads that snapshot still needs it
}

TEST(SyncLog, two_workers_that_differ_do_not_wait_for_each_other_for_ever) {
    Senders senders(2);
    for (const auto& one : senders.workers) {
        EXPECT_EQ(one->log.turn(0, senders.now).kind, LogTurn::go_on);
    }
    senders.workers[1]->shard.corrupt();
    senders.train_until_they_send();
    for (const auto& one : senders.workers) {
        EXPECT_EQ(one->log.turn(Senders::H + 1, senders.now).kind, LogTurn::wait);
    }
    // The one has waited in vain, and said so, when the other's line comes.
    EXPECT_TRUE(senders.workers[0]->go_there_and_back(senders.now));
    senders.now += Driven::options().elastic.grace;
    EXPECT_TRUE(senders.workers[0]->go_there_and_back(senders.now));
    const std::vector<LogEvent> events = senders.workers[0]->log.events();
    EXPECT_EQ(events.back().kind, LogEventKind::too_few);
    senders.settle();
    senders.now += Driven::options().elastic.grace;
    senders.settle();
    for (const auto& one : senders.workers) {
        EXPECT_TRUE(simulation::is_diverged(one->log.stopped()));
        EXPECT_EQ(one->log.turn(Senders::H + 1, senders.now).kind, LogTurn::stop);
    }
    EXPECT_TRUE(senders.store.entries().empty());
}

TEST(SyncLog, a_newcomer_takes_no_step_before_it_knows_where_the_others_are) {
    Senders senders(2, Driven::options(2, 1));
    senders.train_until_they_send();
    senders.settle();
    LogStart start = Driven::start(1, senders.schedule);
    start.token = "a newcomer";
    Driven late(1, senders.schedule, senders.store, Driven::options(2, 1), start);
    for (int way = 0; way < 50 && !late.log.is_running(); way++) { late.go_there_and_back(senders.now); }
    ASSERT_TRUE(late.log.is_running());
    EXPECT_EQ(late.log.turn(0, senders.now).kind, LogTurn::wait);
    EXPECT_FALSE(late.log.is_turn_due());
    EXPECT_TRUE(late.go_there_and_back(senders.now));
    EXPECT_TRUE(late.log.is_turn_due());
    const LogTurn turn = late.log.turn(0, senders.now);
    EXPECT_EQ(turn.kind, LogTurn::jump);
    EXPECT_EQ(turn.step, Senders::H);
}

// So that a newcomer learns where the run is even if nobody has sent since all were restarted.
TEST(SyncLog, the_beat_of_a_worker_that_resumes_names_the_newest_sync_that_it_has_applied) {
    Senders senders(2, Driven::options(2, 1));
    LogStart start = Driven::start(1, senders.schedule);
    start.token = "again";
    start.generation = senders.workers[0]->log.current_generation();
    start.positions = {3};
    start.from_checkpoint = true;
    Driven resumed(1, senders.schedule, senders.store, Driven::options(2, 1), start);
    EXPECT_EQ(resumed.log.pulse().beat.newest, -1);
    for (int way = 0; way < 50 && !resumed.log.is_running(); way++) { resumed.go_there_and_back(senders.now); }
    ASSERT_TRUE(resumed.log.is_running());
    EXPECT_EQ(resumed.log.pulse().beat.newest, 2);
}

TEST(SyncLog, a_snapshot_is_given_by_one_and_once_however_long_that_takes) {
    const SyncLogRules rules;
    size_t snapshots = 0;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        simulation::World world(seed, rules, false, [](simulation::Plan& plan) {
            simulation::make_even(plan);
            plan.workers = plan.options.workers = 4;
            plan.min_workers = plan.options.elastic.min_workers = 3;
            plan.steps = 60;
            plan.overlap.assign(4, 1);
            plan.step_time.assign(4, 0.5);
            plan.delay.assign(4, 0.1);
            plan.first_start = {0, 0, 0, 25};
            plan.options.elastic.retain = 1;
            plan.checkpoint_every = 1;
            plan.options.snapshot_chunk = 3;
            plan.options.elastic.grace = 2;
        });
        ASSERT_NO_THROW(world.run()) << "seed " << seed;
        snapshots += world.givers().size();
        for (const auto& [snapshot, givers] : world.givers()) {
            EXPECT_EQ(givers.size(), 1u) << snapshot << ", seed " << seed;
            const bool is_first = snapshot.substr(snapshot.rfind('.')) == ".1";
            EXPECT_TRUE(is_first) << snapshot << ": what comes after the one before was gone, seed " << seed;
        }
    }
    EXPECT_GE(snapshots, 10u);
}

// A store that may have no memory left.
struct LimitedStore : SimulatedStore {
    using SimulatedStore::SimulatedStore;
    StoreAnswer perform(const StoreRequest& request) override {
        const bool is_write =
            request.kind == StoreRequest::put || request.kind == StoreRequest::put_if_absent;
        if (!is_full || !is_write) { return SimulatedStore::perform(request); }
        StoreAnswer refused;
        refused.lost = refused.is_full = true;
        return refused;
    }
    bool is_full = false;
};

// Both lines are there when the store has no room left, and so nobody can write the entry: what is read then does
// not mean that the store is back.
TEST(SyncLog, a_store_that_stays_full_is_told_of_once_and_leaves_its_workers_helpless) {
    const SyncSchedule schedule(std::vector<Fragment>(1), 4);
    LimitedStore store(schedule, 4);
    store.has_scripts = false;
    std::vector<std::unique_ptr<Driven>> workers;
    for (int w = 0; w < 2; w++) {
        workers.push_back(std::make_unique<Driven>(w, schedule, store, Driven::options(2, 2)));
    }
    double now = 0;
    const auto pass = [&] {
        now += 1;
        for (const auto& one : workers) { one->show_life(now), one->go_there_and_back(now); }
    };
    for (int second = 0; second < 9; second++) { pass(); }
    for (long step = 0; step <= 4; step++) {
        for (const auto& one : workers) {
            if (step > 0) { one->shard.train(step); }
            EXPECT_EQ(one->log.turn(step, now).kind, LogTurn::go_on);
        }
    }
    pass();
    store.is_full = true;
    const auto lines = [&] { return store.in(workers[0]->log.current_generation() + "/0/sent/0").size(); };
    ASSERT_EQ(lines(), 2u);
    int lost = 0, away = 0;
    for (int second = 0; second < 200; second++) {
        pass();
        for (const auto& one : workers) { EXPECT_EQ(one->log.turn(5, now).kind, LogTurn::wait); }
        for (const LogEvent& event : workers[0]->log.events()) { lost += event.kind == LogEventKind::store_lost; }
        away += !workers[0]->log.helpless().empty();
    }
    EXPECT_EQ(lost, 1);
    EXPECT_GT(away, 190);
    store.is_full = false;
    for (int second = 0; second < 5; second++) { pass(); }
    EXPECT_EQ(workers[0]->log.helpless(), "");
    EXPECT_EQ(store.entries().size(), 1u);
}

// Two workers have begun a run; a third with other parameters needs a snapshot.
struct Givers {
    Givers() {
        for (int w : {0, 1}) { add(w, 0); }
        for (int round = 0; round < 5; round++) { pass(1); }
        turn(0);
        generation = workers[0]->log.current_generation();
        add(2, 1);
        begin = now;
    }
    void add(int worker, int rank) {
        workers.push_back(std::make_unique<Driven>(worker, schedule, store, Driven::options(3, 2), rank));
        hearts.emplace_back(10, false);
    }
    void pass(double seconds) {
        now += seconds;
        for (size_t w = 0; w < workers.size(); w++) {
            workers[w]->go_there_and_back(now);
            store.perform_all(hearts[w].requests(workers[w]->log.pulse(), now));
        }
    }
    // Of the two.
    void turn(long step) {
        for (size_t w : {0, 1}) {
            if (step > 0) { workers[w]->shard.train(step); }
            EXPECT_NE(workers[w]->log.turn(step, now).kind, LogTurn::stop);
        }
    }
    template <class Condition>
    void pass_until(long step, const Condition& is_met) {
        for (; !is_met() && now < begin + 2000; turn(step)) { pass(1); }
        EXPECT_TRUE(is_met());
    }
    size_t chunks() { return store.in(generation + "/0/snapshot/2.1.1").size(); }
    std::string offer() { return store.in(generation + "/0/offer")["2.1.1"]; }
    std::string told(size_t worker, LogEventKind kind) {
        std::string text;
        for (const LogEvent& event : workers[worker]->log.events()) {
            if (event.kind == kind) { text += event.text + "\n"; }
        }
        return text;
    }

    const SyncSchedule schedule{std::vector<Fragment>(1), 4};
    LimitedStore store{schedule, 4};
    std::vector<std::unique_ptr<Driven>> workers;
    std::vector<Heartbeat> hearts;
    std::string generation;
    double now = 0, begin = 0;
};

TEST(SyncLog, a_snapshot_that_the_store_has_no_memory_for_makes_room_and_is_given_later) {
    Givers run;
    run.pass_until(0, [&] { return run.chunks() >= 2; });
    run.store.is_full = true;
    ASSERT_EQ(run.store.in(run.generation + "/0/held").size(), 1u);
    run.pass_until(0, [&] { return run.chunks() == 0; });
    EXPECT_TRUE(run.store.in(run.generation + "/0/held").empty()) << "payloads are kept for nobody";
    EXPECT_NE(run.told(0, LogEventKind::snapshot_put_off).find("the store has no memory"), std::string::npos);
    run.store.is_full = false;
    for (long step = 1; step <= 5; step++) {
        run.turn(step);
        for (int way = 0; way < 4; way++) { run.pass(0.5); }
    }
    EXPECT_EQ(run.store.entries().size(), 1u);
    EXPECT_EQ(run.chunks(), 0u) << "it has been begun again at once";
    run.pass_until(5, [&] { return run.workers[2]->log.turn(0, run.now).kind != LogTurn::wait; });
}

// The store holds all of it: nobody else is needed any more.
TEST(SyncLog, a_worker_that_reads_a_whole_snapshot_is_not_helpless_without_its_giver) {
    for (const bool is_whole : {true, false}) {
        Givers run;
        Driven& reader = *run.workers[2];
        run.pass_until(0, [&] { return is_whole ? !run.offer().empty() : run.chunks() > 0; });
        ASSERT_EQ(run.offer().empty(), !is_whole);
        if (is_whole) { reader.go_there_and_back(run.now); }
        for (int second = 0; second < 400; second++) {  // without its givers
            run.now += 1;
            const bool is_slow = is_whole && second < 300;  // it has not even the first chunk
            if (!is_slow) { reader.go_there_and_back(run.now); }
            reader.show_life(run.now);
            if (is_whole) { ASSERT_EQ(reader.log.helpless(), ""); }
        }
        EXPECT_EQ(reader.log.helpless() == "", is_whole) << reader.log.helpless();
        EXPECT_EQ(reader.log.turn(0, run.now).kind == LogTurn::wait, !is_whole);
    }
}

TEST(SyncLog, a_snapshot_that_a_worker_has_no_room_for_is_given_by_another) {
    Givers run;
    run.workers[0]->shard.is_poor = true;
    run.pass_until(0, [&] { return !run.offer().empty(); });
    EXPECT_EQ(LogOffer::parse(run.offer()).giver.worker, 1);
    EXPECT_NE(run.told(0, LogEventKind::snapshot_put_off).find("this disk has no room"), std::string::npos);
}

TEST(SyncLog, at_the_end_no_worker_stays_forever_to_give_what_no_host_has_room_for) {
    Givers run;
    for (size_t w : {0, 1}) { run.workers[w]->shard.is_poor = true; }
    const auto has_ended = [&](size_t w) {
        return run.workers[w]->log.finish(0, run.now).kind != LogTurn::wait;
    };
    while (!(has_ended(0) & has_ended(1)) && run.now < run.begin + 5000) { run.pass(1); }
    EXPECT_TRUE(has_ended(0) && has_ended(1));
    EXPECT_EQ(run.store.in(run.generation + "/0/done").size(), 2u);
    EXPECT_GT(run.now - run.begin, Driven::options().elastic.grace) << "they have tried";
}

TEST(SyncLog, a_worker_whose_disk_has_no_room_for_a_snapshot_asks_nobody_for_one) {
    Givers run;
    Driven& reader = *run.workers[2];
    reader.shard.is_huge = true;
    run.pass_until(0, [&] { return !reader.log.helpless().empty(); });
    for (int i = 0; i < 100; i++) { run.pass(1); }
    EXPECT_NE(reader.log.helpless().find("No space left on device"), std::string::npos) << reader.log.helpless();
    EXPECT_TRUE(run.store.in(run.generation + "/0/want").empty());
    reader.shard.is_huge = false;
    run.pass_until(0, [&] { return reader.log.turn(0, run.now).kind != LogTurn::wait; });
    EXPECT_EQ(reader.log.helpless(), "");
}

// The worker that wanted the snapshot has died. While no sync is decided, no decider removes what it left.
TEST(SyncLog, a_full_store_loses_what_nobody_needs_and_the_run_continues) {
    Givers run;
    run.pass_until(0, [&] { return !run.offer().empty(); });
    run.workers.pop_back();
    run.hearts.pop_back();
    for (double end = run.now + 3 * Driven::options().expiry; run.now < end; run.turn(0)) { run.pass(1); }
    run.store.is_full = true;
    run.turn(4);
    run.pass_until(4, [&] { return run.chunks() == 0 && run.offer().empty(); });
    run.store.is_full = false;
    run.pass_until(5, [&] { return run.store.entries().size() == 1; });
}

TEST(SyncLog, a_worker_without_room_for_the_snapshot_that_it_needs_says_so) {
    Givers run;
    Driven& reader = *run.workers[2];
    run.pass_until(0, [&] { return !run.offer().empty(); });
    const auto handler = signal(SIGXFSZ, SIG_IGN);
    rlimit before;
    getrlimit(RLIMIT_FSIZE, &before);
    const rlimit small{20, before.rlim_max};  // bytes, of every file
    setrlimit(RLIMIT_FSIZE, &small);
    while (reader.log.turn(0, run.now).kind == LogTurn::wait && run.now < run.begin + 200) { run.pass(1); }
    setrlimit(RLIMIT_FSIZE, &before);
    signal(SIGXFSZ, handler);
    EXPECT_EQ(reader.log.stopped().why,
              "the snapshot that this worker needs cannot be stored: a temporary file in " +
                  testing::TempDir() + " failed: File too large");
}

// Cuts the files without a name that this process has open.
static int truncate_spools() {
    int cut = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
        std::error_code closed;
        const std::string name = std::filesystem::read_symlink(entry, closed);
        if (name.find("/spool.") == std::string::npos) { continue; }
        EXPECT_EQ(ftruncate(std::stoi(entry.path().filename()), 0), 0);
        cut++;
    }
    return cut;
}

TEST(SyncLog, a_giver_that_cannot_read_its_snapshot_goes_on_and_another_gives_one) {
    Givers run;
    run.pass_until(0, [&] { return truncate_spools() > 0; });
    run.pass_until(0, [&] { return !run.offer().empty(); });
    EXPECT_EQ(LogOffer::parse(run.offer()).giver.worker, 1);
    EXPECT_NE(run.told(0, LogEventKind::snapshot_put_off).find("Input/output error"), std::string::npos);
    run.pass_until(0, [&] { return run.workers[2]->log.turn(0, run.now).kind != LogTurn::wait; });
}

TEST(SyncLog, an_offer_that_is_damaged_or_forged_is_refused) {
    for (const std::string text : {"", "0.1 0 0", "0.1 18446744073709551615 0"}) {
        Givers run;
        run.store.perform({StoreRequest::put, run.generation + "/0/offer", "2.1.1", text});
        Driven& reader = *run.workers[2];
        while (reader.log.turn(0, run.now).kind == LogTurn::wait && run.now < run.begin + 200) {
            run.pass(1);
        }
        EXPECT_EQ(reader.log.stopped().why, "the store holds a damaged or forged record, " + run.generation +
                                                "/0/offer 2.1.1: \"" + text + "\"");
    }
}

TEST(SyncLog, of_two_starts_of_a_worker_the_earlier_one_is_replaced) {
    Givers run;
    run.add(0, 0);
    while (run.workers[0]->log.stopped().why.empty() && run.now < run.begin + 200) { run.pass(1); }
    EXPECT_TRUE(run.workers[0]->log.stopped().replaced);
    EXPECT_FALSE(run.workers[3]->log.stopped().replaced);
    EXPECT_EQ(run.workers[3]->log.stopped().why, "");
}

TEST(SyncLog, a_damaged_record_of_the_beginning_is_refused) {
    for (const char* text : {"", "nonsense", "1 2; 0.1", "-1 -1 -1 -1 ; -1.-1"}) {
        Givers run;
        run.store.perform({StoreRequest::put, run.generation + "/0/run", "start", text});
        for (int second = 0; second < 20; second++) { run.pass(1); }
        EXPECT_EQ(run.workers[0]->log.stopped().why, "the store holds a damaged or forged record, " +
                                                         run.generation + "/0/run start: \"" + text + "\"");
    }
}

TEST(SyncLog, a_forged_beat_of_a_later_start_replaces_no_worker) {
    Givers run;
    for (int second = 0; second < 200; second++) { run.pass(1); }  // the run has begun
    LogBeat forged;
    forged.incarnation = 9;
    while (run.workers[0]->log.stopped().why.empty() && run.now < run.begin + 400) {
        run.pass(1);
        run.store.perform({StoreRequest::put, run.generation + "/0/beat", "0", forged.text()});
    }
    EXPECT_FALSE(run.workers[0]->log.stopped().replaced);
    EXPECT_EQ(run.workers[0]->log.stopped().why.rfind("the store holds a damaged or forged record, ", 0), 0u)
        << run.workers[0]->log.stopped().why;
}

// The finding of the first seed that finds anything.
std::string found(const SyncLogRules& broken) {
    for (uint64_t seed = 1; seed <= all_seeds; seed++) {
        const std::string wrong = simulation::run(seed, broken);
        if (!wrong.empty()) {
            printf("seed %lu: %s\n", seed, wrong.c_str());
            return wrong;
        }
    }
    return "";
}

TEST(SyncLogSimulation, finds_an_entry_that_is_overwritten) {
    struct : SyncLogRules {
        StoreRequest::Kind entry_is_written_by() const override { return StoreRequest::put; }
    } rules;
    EXPECT_NE(found(rules), "");
}

TEST(SyncLogSimulation, finds_a_line_that_is_overwritten_over_a_bucket) {
    struct : SyncLogRules {
        StoreRequest::Kind line_is_written_by() const override { return StoreRequest::put; }
    } rules;
    EXPECT_NE(found(rules), "");
}

TEST(SyncLogSimulation, finds_a_worker_that_is_left_out_and_not_closed) {
    struct : SyncLogRules {
        bool are_all(size_t, int) const override { return true; }
    } rules;
    EXPECT_NE(found(rules), "");
}

TEST(SyncLogSimulation, finds_a_line_that_goes_with_its_payload) {
    struct : SyncLogRules {
        StoreRequest::Kind payload_goes_by() const override { return StoreRequest::remove; }
    } rules;
    EXPECT_NE(found(rules), "");
}

TEST(SyncLogSimulation, finds_a_payload_that_changes_after_a_restart_under_the_same_name) {
    struct : SyncLogRules {
        int first_free(const std::map<std::string, std::string>&) const override { return 1; }
        bool is_own_start(const std::string&, const std::string&) const override { return true; }
    } rules;
    EXPECT_NE(found(rules), "");
}

TEST(SyncLogSimulation, finds_a_payload_that_is_counted_on_another_hash) {
    struct : SyncLogRules {
        bool counts(const LogLine& line, uint64_t) const override { return line.tokens > 0; }
    } rules;
    EXPECT_NE(found(rules), "");
}

TEST(SyncLogSimulation, finds_a_deletion_that_is_too_early) {
    struct : SyncLogRules {
        long oldest_kept(long index, long retain, long) const override { return index - retain + 1; }
    } without_a_sync;
    EXPECT_NE(found(without_a_sync), "");
    struct : SyncLogRules {
        long oldest_kept(long index, long retain, long) const override { return index - retain; }
    } without_checkpoints;
    EXPECT_NE(found(without_checkpoints), "");
    struct : SyncLogRules {
        long oldest_kept(long index, long, long durable) const override { return std::min(index, durable); }
    } not_retained;
    EXPECT_NE(found(not_retained), "");
}

TEST(SyncLogSimulation, finds_a_snapshot_that_is_read_half) {
    struct : SyncLogRules {
        bool is_chunk(const StoreAnswer&) const override { return true; }
        bool is_whole(const Spool&, const LogOffer&) const override { return true; }
    } rules;
    EXPECT_NE(found(rules), "");
}

TEST(SyncLogSimulation, finds_a_worker_with_other_options_that_takes_part) {
    struct : SyncLogRules {
        bool is_same_run(const std::string&, const std::string&) const override { return true; }
    } rules;
    EXPECT_NE(found(rules), "");
}

TEST(SyncLogSimulation, finds_what_an_earlier_start_has_sent_taken_for_ones_own) {
    struct : SyncLogRules {
        bool is_own_payload(const Incarnation& who, const Incarnation& me) const override {
            return who.worker == me.worker;
        }
    } rules;
    EXPECT_NE(found(rules), "");
}

TEST(SyncLogSimulation, finds_a_worker_that_ends_without_the_last_sync) {
    struct : SyncLogRules {
        bool is_of_run(long send_step, long last_step) const override { return send_step < last_step; }
    } rules;
    EXPECT_NE(found(rules), "");
}

TEST(SyncLog, syncs_by_number_are_those_of_the_schedule) {
    for (long H : {1L, 2L, 5L, 7L}) {
        for (int count = 1; count <= 4; count++) {
            const auto fragments = make_fragments(count - 1, count, 1, FragmentPattern::strided, H);
            const SyncSchedule schedule(fragments, H);
            long next = 0;
            for (long step = 1; step <= 4 * H; step++) {
                ASSERT_EQ(schedule.first_after(step - 1), next);
                for (int p = 0; p < count; p++) {
                    if (!is_sent(fragments[size_t(p)], step, H)) { continue; }
                    ASSERT_EQ(sync_number(fragments, p, step, H), next);
                    ASSERT_EQ(schedule.fragment(next), p);
                    ASSERT_EQ(schedule.send_step(next), step);
                    ASSERT_EQ(schedule.sync(p, schedule.index(next)), next);
                    next++;
                }
            }
        }
    }
}

TEST(SyncLog, a_run_that_an_earlier_version_began_is_the_same_run_where_it_merged_no_means) {
    const SyncLogRules rules;
    const std::string now = "--workers 4\n--lr 0.1\n", before = "--lr 0.1\n--workers 4\n--fragment-offsets \n";
    const std::string merged = "--outer-exchange (merged from) ";
    EXPECT_TRUE(rules.is_same_run(now, now));
    EXPECT_TRUE(rules.is_same_run(now, before + merged + "0 workers, 0 bytes\n"));
    EXPECT_TRUE(rules.is_same_run(now, before + merged + "5 workers, 2097152 bytes\n"));
    EXPECT_FALSE(rules.is_same_run(now, before + merged + "4 workers, 2097152 bytes\n"));
    EXPECT_FALSE(rules.is_same_run(now, "--workers 4\n--lr 0.1\n--fragment-offsets 0,3\n"));
    EXPECT_FALSE(rules.is_same_run(now, "--workers 4\n--lr 0.2\n"));
}

TEST(SyncLog, records_are_read_as_they_were_written) {
    LogEntry entry;
    entry.hash = ~0ull;
    entry.decider = {3, 12};
    entry.contributors = {{{0, 1}, 17, 5, 4096}, {{10, 2}, 0, ~0ull, ~0ull}};
    entry.abstained = {4, 11};
    entry.missing = {5};
    entry.waited = 1250;
    const LogEntry read = LogEntry::parse(entry.text());
    EXPECT_EQ(read.text(), entry.text());
    EXPECT_EQ(read.contributors[0].tokens, 4096u);
    EXPECT_EQ(read.abstained, entry.abstained);
    EXPECT_EQ(read.missing, entry.missing);
    EXPECT_EQ(read.waited, 1250);
    EXPECT_EQ(in_words(read),
              "counts 0.1 (4096 tokens) and 10.2 (18446744073709551615 tokens); workers 4 and 11 abstain; "
              "worker 5 is missing after 1.25 s");
    EXPECT_TRUE(entry.counts(10) && !entry.counts(4) && entry.knows(4) && !entry.knows(3));
    for (const char* text : {"1 2 3 4", "18446744073709551615 0 0 0"}) {
        EXPECT_EQ(LogLine::parse(text).text(), text);
    }
    for (const char* text : {"1 2 3 4", "1 2 -1 -1"}) { EXPECT_EQ(LogBeat::parse(text).text(), text); }
    EXPECT_EQ(LogOffer::parse("3.2 10 11").text(), "3.2 10 11");
    EXPECT_EQ(LogBase::parse("3 5 2 ").positions, (std::vector<long>{3}));
    EXPECT_EQ(LogBase::parse("3 5 2 7 ").text(), "3 5 2 7 ");
}

}  // namespace test_sync_log
