// The threads of the sync log (streaming/elastic/sync_log_threads.h), over a store in memory that checks the
// keys of a run while several workers write to it. test_sync_log.cpp tests the log itself.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <new>
#include <thread>

#include "dev/test/unit/elastic/sync_log_simulation.h"
#include "streaming/elastic/sync_log_threads.h"

namespace test_sync_log_threads {

using simulation::Shard;

const long H = 6;

SyncSchedule two_fragments() {
    std::vector<Fragment> fragments(2);
    fragments[1].offset = 3;
    return SyncSchedule(fragments, H);
}

struct Store {
    const SyncSchedule schedule = two_fragments();
    std::mutex mutex;
    SimulatedStore folders{schedule, 4};

    StoreAnswer perform(const StoreRequest& request) {
        const std::lock_guard<std::mutex> lock(mutex);
        return folders.perform(request);
    }
    LogBeat beat(int worker) {
        const std::lock_guard<std::mutex> lock(mutex);
        return LogBeat::parse(folders.in(folders.generation() + "/0/beat")[std::to_string(worker)]);
    }
    // Waits for three more heartbeats of a worker. False if they do not come.
    bool shows_more_beats(int worker) {
        const long before = beat(worker).count;
        return comes_true([&] { return beat(worker).count >= before + 3; });
    }
    bool shows_a_promise(int worker) {
        return comes_true([&] { return beat(worker).promise >= 0; });
    }

private:
    template <class Condition>
    bool comes_true(const Condition& condition) {
        for (int tries = 0; tries < 10000 && !condition(); tries++) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        return condition();
    }
};

// A connection that may do something to each request.
class Connection : public LogStore {
public:
    using Perform = std::function<StoreAnswer(const StoreRequest&)>;
    explicit Connection(Perform what) : what(std::move(what)) {}
    StoreAnswer perform(const StoreRequest& request) override { return what(request); }

private:
    Perform what;
};

std::function<std::unique_ptr<LogStore>()> connections(const Connection::Perform& what) {
    return [what] { return std::make_unique<Connection>(what); };
}

std::function<std::unique_ptr<LogStore>()> connections(Store& store) {
    return connections([&store](const StoreRequest& request) { return store.perform(request); });
}

bool is_payload(const StoreRequest& request) { return request.folder.find("/payload/") != std::string::npos; }

SyncLogOptions options_for(int workers) {
    SyncLogOptions options;
    options.workers = options.elastic.min_workers = workers;
    options.elastic.max_lag = H;
    options.chunk = 20;
    options.elastic.grace = 60;
    options.expiry = 20;
    options.poll = 0.002;
    options.retry = 0.002;
    return options;
}

LogStart first_start(int worker, const std::string& fingerprint = "options") {
    LogStart start;
    start.token = "start of " + std::to_string(worker);
    start.fingerprint = fingerprint;
    start.positions = {0, 0};
    return start;
}

template <class Turn>
LogTurn settled(SyncLogThreads& log, const Turn& turn) {
    LogTurn said = turn();
    while (said.kind == LogTurn::wait) {
        log.wait(0.1);
        said = turn();
    }
    return said;
}

// Trains these steps, and returns the first answer other than go_on, or the last answer.
LogTurn train(SyncLogThreads& log, Shard& shard, long first, long last) {
    LogTurn said{LogTurn::go_on};
    for (long step = first; step <= last && said.kind == LogTurn::go_on; step++) {
        if (step > 0) { shard.train(step); }
        said = settled(log, [&] { return log.turn(step); });
    }
    return said;
}

LogTurn train(SyncLogThreads& log, Shard& shard, long steps) {
    const LogTurn said = train(log, shard, 0, steps);
    return said.kind != LogTurn::go_on ? said : settled(log, [&] { return log.finish(steps); });
}

TEST(SyncLogThreads, workers_that_keep_step_are_all_counted_and_end_with_the_same_bits) {
    const int workers = 4;
    const long steps = 30;
    Store store;
    std::vector<std::vector<uint64_t>> hashes(workers);
    std::vector<double> cpu_seconds(workers);
    std::vector<std::thread> threads;
    for (int w = 0; w < workers; w++) {
        threads.emplace_back([&, w] {
            Shard shard(w, 0, store.schedule);
            SyncLogThreads log(options_for(workers), store.schedule, w, shard, first_start(w), connections(store));
            EXPECT_EQ(train(log, shard, steps).kind, LogTurn::go_on) << log.stopped().why;
            EXPECT_EQ(log.positions(), (std::vector<long>{5, 5}));
            for (int p = 0; p < 2; p++) { hashes[size_t(w)].push_back(shard.hash(p)); }
            for (const LogEvent& event : log.events()) {
                EXPECT_NE(event.kind, LogEventKind::late) << event.text;
                EXPECT_TRUE(event.kind != LogEventKind::applied || event.entry->counts(w)) << event.text;
            }
            cpu_seconds[size_t(w)] = log.cpu_seconds();
        });
    }
    for (std::thread& thread : threads) { thread.join(); }
    for (int w = 1; w < workers; w++) { EXPECT_EQ(hashes[size_t(w)], hashes[0]) << w; }
    EXPECT_EQ(store.folders.entries().size(), 10u);
    for (const auto& [key, entry] : store.folders.entries()) {
        EXPECT_EQ(entry.contributors.size(), size_t(workers)) << key;
    }
    for (double seconds : cpu_seconds) { EXPECT_GT(seconds, 0); }
}

TEST(SyncLogThreads, the_heartbeat_goes_on_while_a_payload_is_on_its_way) {
    Store store;
    Shard shard(0, 0, store.schedule);
    SyncLogOptions options = options_for(1);
    options.expiry = 0.04;
    std::atomic<int> payloads{0};
    const auto open = connections([&](const StoreRequest& request) {
        if (is_payload(request) && request.kind == StoreRequest::put_if_absent) {
            EXPECT_TRUE(store.shows_more_beats(0));
            payloads++;
        }
        return store.perform(request);
    });
    SyncLogThreads log(options, store.schedule, 0, shard, first_start(0), open);
    EXPECT_EQ(train(log, shard, H).kind, LogTurn::go_on) << log.stopped().why;
    EXPECT_GE(payloads, 2);
}

TEST(SyncLogThreads, the_heartbeat_goes_on_while_a_sync_is_applied) {
    struct SlowShard : Shard {
        SlowShard(Store& store) : Shard(0, 0, store.schedule), store(store) {}
        void apply(long sync, const std::vector<Contribution>& contributions, bool counted) override {
            EXPECT_TRUE(store.shows_more_beats(0));
            applied++;
            Shard::apply(sync, contributions, counted);
        }
        Store& store;
        int applied = 0;
    };
    Store store;
    SlowShard shard(store);
    SyncLogOptions options = options_for(1);
    options.expiry = 0.04;
    SyncLogThreads log(options, store.schedule, 0, shard, first_start(0), connections(store));
    EXPECT_EQ(train(log, shard, H).kind, LogTurn::go_on) << log.stopped().why;
    EXPECT_EQ(shard.applied, 2);
}

TEST(SyncLogThreads, a_worker_that_ends_before_the_others_is_not_waited_for) {
    Store store;
    SyncLogOptions options = options_for(2);
    options.elastic.min_workers = 1;
    options.elastic.grace = options.expiry = 1e6;  // it would take longer than any test
    Shard staying(0, 0, store.schedule), leaving(1, 0, store.schedule);
    SyncLogThreads log(options, store.schedule, 0, staying, first_start(0), connections(store));
    {
        SyncLogThreads other(options, store.schedule, 1, leaving, first_start(1), connections(store));
        EXPECT_EQ(train(other, leaving, 0, 0).kind, LogTurn::go_on);
        EXPECT_EQ(train(log, staying, 0, 0).kind, LogTurn::go_on);
        EXPECT_TRUE(store.shows_a_promise(1));
    }
    EXPECT_EQ(store.beat(1).promise, LogBeat::ends);
    EXPECT_EQ(train(log, staying, 1, 2 * H).kind, LogTurn::go_on) << log.stopped().why;
    EXPECT_EQ(settled(log, [&] { return log.finish(2 * H); }).kind, LogTurn::go_on);
    EXPECT_EQ(store.folders.entries().size(), 4u);
}

TEST(SyncLogThreads, what_a_thread_throws_the_trainer_gets) {
    for (const char* where : {"/payload/", "/beat", ""}) {
        Store store;
        Shard shard(0, 0, store.schedule);
        const auto open = connections([&](const StoreRequest& request) {
            const bool is_it = *where ? request.folder.find(where) != std::string::npos
                                      : request.kind == StoreRequest::decision;
            if (is_it) { throw std::bad_alloc(); }
            return store.perform(request);
        });
        SyncLogOptions options = options_for(1);
        options.overlap = 0;
        SyncLogThreads log(options, store.schedule, 0, shard, first_start(0), open);
        const auto go_on = [&] {
            for (long step = 0;; step++) { train(log, shard, step, step); }
        };
        EXPECT_THROW(go_on(), std::bad_alloc) << where;
    }
}

TEST(SyncLogThreads, while_the_store_is_away_training_goes_on_to_the_next_due_step) {
    Store store;
    Shard shard(0, 0, store.schedule);
    std::atomic<bool> is_away{false};
    const auto open = connections([&](const StoreRequest& request) {
        StoreAnswer answer;
        if (!is_away) { return store.perform(request); }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        answer.lost = true;
        answer.trouble = "connection refused";
        return answer;
    });
    SyncLogThreads log(options_for(1), store.schedule, 0, shard, first_start(0), open);
    EXPECT_EQ(train(log, shard, 0, 0).kind, LogTurn::go_on);
    is_away = true;
    EXPECT_EQ(train(log, shard, 1, 3).kind, LogTurn::go_on);  // the first send
    EXPECT_EQ(log.turn(4).kind, LogTurn::wait);               // it is due
    std::string said;
    while (said.find("connection refused") == std::string::npos) {
        log.wait(0.01);
        for (const LogEvent& event : log.events()) { said += event.text + "\n"; }
    }
    EXPECT_EQ(log.turn(4).kind, LogTurn::wait);
    is_away = false;
    EXPECT_EQ(train(log, shard, 4, H).kind, LogTurn::go_on);
    EXPECT_EQ(settled(log, [&] { return log.finish(H); }).kind, LogTurn::go_on);
    for (const LogEvent& event : log.events()) { said += event.text + "\n"; }
    EXPECT_NE(said.find("has the store again"), std::string::npos) << said;
}

TEST(SyncLogThreads, a_worker_with_other_options_is_refused_and_told_the_runs) {
    Store store;
    Shard shard(0, 0, store.schedule), other(1, 0, store.schedule);
    SyncLogThreads log(options_for(1), store.schedule, 0, shard, first_start(0), connections(store));
    EXPECT_EQ(train(log, shard, 0, 0).kind, LogTurn::go_on);
    SyncLogThreads refused(options_for(1), store.schedule, 1, other, first_start(1, "other options"),
                           connections(store));
    EXPECT_EQ(train(refused, other, 0, 0).kind, LogTurn::stop);
    EXPECT_FALSE(refused.stopped().theirs.empty());
    EXPECT_EQ(refused.stopped().theirs, "options");
    EXPECT_EQ(store.folders.in(store.folders.generation() + "/0/incarnation/1").size(), 0u);
}

TEST(SyncLogThreads, a_store_that_comes_back_empty_ends_a_worker_that_only_trains) {
    Store store;
    Shard shard(0, 0, store.schedule);
    SyncLogOptions options = options_for(1);
    options.expiry = 0.04;
    SyncLogThreads log(options, store.schedule, 0, shard, first_start(0), connections(store));
    EXPECT_EQ(train(log, shard, 0, 1).kind, LogTurn::go_on);
    {
        const std::lock_guard<std::mutex> lock(store.mutex);
        store.folders.empty();
    }
    LogTurn said{LogTurn::go_on};
    while (said.kind == LogTurn::go_on) { said = train(log, shard, 2, 2); }
    EXPECT_EQ(said.kind, LogTurn::lost);
    EXPECT_NE(log.stopped().why.find("came back empty"), std::string::npos) << log.stopped().why;
}

}  // namespace test_sync_log_threads
