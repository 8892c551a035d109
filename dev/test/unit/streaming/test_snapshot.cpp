// Snapshots of Streaming DiLoCo: a run that resumes from one is, bit for bit, the run that never stopped,
// whatever was on the wire. Workers are threads that meet in a LocalComm. Snapshots go through a state file.
#include <gtest/gtest.h>

#include <cmath>
#include <future>
#include <map>
#include <mutex>

#include "dev/test/files.h"
#include "dev/test/unit/local_comm.h"
#include "dev/test/random_values.h"
#include "dev/test/unit/toy_layout.h"
#include "dev/test/unit/wire.h"
#include "llmc/checkpoint/state_file.h"
#include "streaming/diloco.h"

namespace test_snapshot {

struct Folder : TemporaryFolder {
    operator const std::string&() const { return name(); }
};

const long H = 5;

// b0 and b2, sent at 5, 10, ...; b1 and b3, at 1, 6, ...; b4, at 3, 8, ...
std::vector<Fragment> toy_fragments() { return make_fragments(4, 5, 2, FragmentPattern::strided, H); }

// A run that is saved to a state file or resumed from one.
struct Plan {
    WireOptions wire;
    std::vector<long> overlaps = {2};  // tau of each worker
    int workers = 2, ranks = 1;
    bool offload = false;
    float local_weight = 0.5f;  // alpha
    long not_finite = 0;        // step at which a worker's delta is not finite; 0: none
    long last = 19;             // step
    long stop_at = 0;           // step before which worker 0 is asked to stop

    DilocoOptions options(int worker) const {
        DilocoOptions options;
        options.inner_steps = H;
        options.overlap = overlaps[size_t(worker) % overlaps.size()];
        options.local_weight = local_weight;
        options.offload = offload;
        set_wire(options, wire);
        return options;
    }

    std::string describe() const {
        std::string text = name_of(wire.format) + " " + name_of(wire.exchange);
        text += std::string(wire.stochastic ? " stochastic" : "") + (wire.error_feedback ? " feedback" : "");
        text += std::string(offload ? " offload" : "") + " tau";
        for (long tau : overlaps) { text += " " + std::to_string(tau); }
        return text + format(" M %d R %d not finite %ld", workers, ranks, not_finite);
    }
};

// What a sync's report says, without what depends on timing.
struct Logged {
    long sync, send_step, due_step;
    int fragment;
    uint64_t bytes_sent, bytes_received, hash;
    std::vector<int> not_finite;
    std::vector<double> numbers;
    bool stops;

    explicit Logged(const SyncReport& r)
        : sync(r.sync), send_step(r.send_step), due_step(r.due_step), fragment(r.fragment),
          bytes_sent(r.traffic.bytes_sent), bytes_received(r.traffic.bytes_received), hash(r.global_hash),
          not_finite(r.not_finite), stops(r.stops) {
        numbers = {r.statistics.delta_norm, r.statistics.quantization_error, r.mean_norm()};
        for (double cosine : r.statistics.cosines) { numbers.push_back(cosine); }
        for (double cosine : r.statistics.mean_cosines) { numbers.push_back(cosine); }
        EXPECT_GE(r.waited_seconds(), 0);
    }

    bool operator==(const Logged& other) const {
        return sync == other.sync && send_step == other.send_step && due_step == other.due_step &&
               fragment == other.fragment && bytes_sent == other.bytes_sent &&
               bytes_received == other.bytes_received && hash == other.hash &&
               not_finite == other.not_finite && stops == other.stops &&
               numbers.size() == other.numbers.size() &&
               memcmp(numbers.data(), other.numbers.data(), numbers.size() * sizeof(double)) == 0;
    }
};

// One worker's rank.
struct Member {
    Member(const Plan& plan, Comm& comm, int rank)
        : plan(plan), layout(toy_layout(plan.ranks)), worker(comm.rank()), rank(rank),
          outer_stream(Stream::Kind::communicate),
          diloco(plan.options(worker), toy_fragments(), layout, rank, comm, outer_stream),
          local(random_values(77, layout.shard_size(), 0.1f)), params(size_t(layout.size), -1.0f) {
        diloco.start(local.data(), main);
        diloco.rehearse(main);
    }

    ~Member() {
        diloco.snapshot().abandon();
        if (writer.valid()) { writer.wait(); }
    }

    // Stands for an inner optimizer, then streams.
    void step(long step) {
        const uint64_t seed = uint64_t(1000 * (worker + 1) + step);
        const Floats gradient = random_values(seed, layout.shard_size(), 0.01f);
        for (size_t i = 0; i < local.size(); i++) { local[i] -= 0.02f * local[i] + gradient[i]; }
        for (int block = 0; block < int(layout.blocks.size()); block++) {
            const Range range = layout.shard(block, rank);
            std::copy_n(&local[size_t(range.shard)], range.count, &params[size_t(range.flat)]);
        }
        if (step == plan.stop_at && worker == 0) { diloco.request_stop(); }
        const bool spoiled = step == plan.not_finite && worker == plan.workers - 1;
        const Floats kept = local;
        if (spoiled) { std::fill_n(local.begin(), 129, NAN); }  // b0 and b1: some fragment at every step
        const uint64_t tokens = uint64_t(step) * uint64_t(10 + 3 * worker);
        log(diloco.after_inner_step(step, tokens, local.data(), params.data(), main).syncs);
        if (spoiled) { std::copy_n(kept.begin(), 129, local.begin()); }
    }

    void finish() { log(diloco.finish(0, local.data(), params.data(), main).syncs); }

    void log(const std::vector<SyncReport>& reports) {
        for (const SyncReport& report : reports) { logged.emplace_back(report); }
    }

    // Starts a snapshot; a thread writes it when it is complete.
    void save(const std::string& folder, long step) {
        if (writer.valid()) {
            if (writer.wait_for(std::chrono::seconds(20)) != std::future_status::ready) {
                throw std::runtime_error("a snapshot too many: the one before is not complete");
            }
            writer.get();
        }
        diloco.take_snapshot(main);
        const StateIdentity identity{step, worker, rank, plan.workers, plan.ranks, "0123456789abcdef"};
        const std::string path = state_path(folder, step, identity.process());
        writer = std::async(std::launch::async, [this, identity, path, master = local, params = params] {
            diloco.snapshot().wait();
            const std::string text = fields().text();
            std::vector<StateSection> sections = diloco.snapshot().sections();
            sections.push_back({"fields", text.data(), text.size()});
            sections.push_back({"master", master.data(), master.size() * sizeof(float)});
            sections.push_back({"params", params.data(), params.size() * sizeof(float)});
            write_state(path, identity, sections);
        });
    }

    Fields fields() {
        Fields fields;
        diloco.snapshot().add_fields(fields);
        return fields;
    }

    // All sections by name, when nothing is in flight.
    std::map<std::string, std::string> state() {
        if (writer.valid()) { writer.get(); }
        diloco.take_snapshot(main);
        diloco.snapshot().wait();
        std::map<std::string, std::string> all = {{"fields", fields().text()}};
        for (const StateSection& section : diloco.snapshot().sections()) {
            all[section.name] = std::string(static_cast<const char*>(section.data), section.bytes);
        }
        all["master"] = bytes_of(local);
        all["params"] = bytes_of(params);
        return all;
    }

    void resume(const std::string& folder, long step) {
        const StateReader saved(state_path(folder, step, process()));
        saved.verify();
        diloco.restore(saved, Fields::parse(saved.text("fields"), saved.path()), main);
        local = saved_values<float>(saved, "master");
        params = saved_values<float>(saved, "params");
        EXPECT_EQ(diloco.begin(step, 0, local.data(), params.data(), main).step, step);  // rehearses again
    }

    int process() const { return worker * plan.ranks + rank; }

    const Plan plan;
    const Layout layout;
    int worker, rank;
    Stream main, outer_stream;
    Diloco diloco;
    Floats local, params;
    std::vector<Logged> logged;
    std::future<void> writer;
};

void expect_no_errors(const std::vector<std::string>& errors, const std::string& what) {
    for (const std::string& error : errors) { ASSERT_EQ(error, "") << what; }
}

// Calls work(member) for all members of a run. Members of the same rank meet.
void run_all(const Plan& plan, const std::function<void(Member&)>& work) {
    for (int rank = 0; rank < plan.ranks; rank++) {
        LocalGroup group(plan.workers);
        expect_no_errors(run_members(plan.workers, [&](int worker) {
            LocalComm comm(group, worker);
            Member member(plan, comm, rank);
            work(member);
        }), plan.describe());
    }
}

// The results of one process.
struct Outcome {
    std::vector<Logged> logged;
    std::map<std::string, std::string> state;
};
using Outcomes = std::map<int, Outcome>;  // by process

// Runs to the end, from the start or resumed after step `from`, and takes snapshots after some steps.
Outcomes run(const Plan& plan, const std::string& folder, const std::vector<long>& snapshots, long from = 0,
             const std::string& saved = "") {
    Outcomes outcomes;
    std::mutex mutex;
    run_all(plan, [&](Member& member) {
        if (from > 0) { member.resume(saved, from); }
        for (long step = from + 1; step <= plan.last; step++) {
            member.step(step);
            if (std::count(snapshots.begin(), snapshots.end(), step) > 0) { member.save(folder, step); }
        }
        member.finish();
        Outcome outcome{member.logged, member.state()};
        std::lock_guard<std::mutex> lock(mutex);
        outcomes.emplace(member.process(), std::move(outcome));
    });
    return outcomes;
}

void expect_same_states(const Outcomes& expected, const Outcomes& outcomes, const Plan& plan) {
    ASSERT_EQ(outcomes.size(), size_t(plan.workers * plan.ranks)) << plan.describe();
    for (const auto& [process, outcome] : outcomes) {
        const auto& wanted = expected.at(process).state;
        ASSERT_EQ(outcome.state.size(), wanted.size()) << plan.describe();
        for (const auto& [name, bytes] : outcome.state) {
            ASSERT_TRUE(wanted.at(name) == bytes) << plan.describe() << ": " << name;
        }
    }
}

// The syncs that are received after `step`.
std::vector<Logged> received_after(const std::vector<Logged>& logged, long step) {
    std::vector<Logged> later;
    for (const Logged& one : logged) {
        if (one.due_step > step) { later.push_back(one); }
    }
    return later;
}

void expect_same_logs(const Outcomes& whole, const Outcomes& resumed, long step, const Plan& plan) {
    for (const auto& [process, outcome] : resumed) {
        ASSERT_TRUE(received_after(whole.at(process).logged, step) == outcome.logged) << plan.describe();
    }
}

// Compares a run without a stop, runs that take one snapshot, and runs that resume from it.
void expect_exact_resumes(const Plan& plan, const std::vector<long>& stops) {
    const Outcomes whole = run(plan, "", {});
    for (long stop : stops) {
        Folder folder;
        const Outcomes observed = run(plan, folder, {stop}), resumed = run(plan, "", {}, stop, folder);
        ASSERT_NO_FATAL_FAILURE(expect_same_states(whole, observed, plan));
        ASSERT_NO_FATAL_FAILURE(expect_same_states(whole, resumed, plan));
        ASSERT_NO_FATAL_FAILURE(expect_same_logs(whole, observed, 0, plan));
        ASSERT_NO_FATAL_FAILURE(expect_same_logs(whole, resumed, stop, plan));
    }
}

long saved_in_flight(const std::string& folder, long step, int process = 0) {
    const StateReader saved(state_path(folder, step, process));
    return Fields::parse(saved.text("fields"), saved.path()).integer("in_flight");
}

TEST(Snapshot, a_resumed_run_is_the_one_that_never_stopped_with_every_format_rounding_exchange_and_feedback) {
    for (Format format : all_formats) {
        for (int bits = 0; bits < 8; bits++) {
            Plan plan;
            const ExchangeKind kind = bits & 1 ? ExchangeKind::all_to_all : ExchangeKind::all_gather;
            plan.wire = {format, kind, bool(bits & 2), 99, bool(bits & 4)};
            plan.overlaps = {4};
            plan.workers = 3;
            ASSERT_NO_FATAL_FAILURE(expect_exact_resumes(plan, {11}));
        }
    }
}

TEST(Snapshot, after_every_step_of_a_period_with_every_overlap_and_number_of_workers) {
    for (int workers : {1, 2, 4}) {
        for (const std::vector<long>& overlaps :
             {std::vector<long>{0}, {1}, {H - 1}, {H - 1, 0, 2, 1}, {0, 3, H - 1, 2}}) {
            Plan plan;
            const ExchangeKind kind = overlaps[0] > 0 ? ExchangeKind::all_to_all : ExchangeKind::all_gather;
            plan.wire = {Format::fp4, kind, true, 5, true, workers == 4};
            plan.overlaps = overlaps;
            plan.workers = workers;
            plan.last = 15;
            ASSERT_NO_FATAL_FAILURE(expect_exact_resumes(plan, {6, 7, 8, 9, 10}));
        }
    }
}

TEST(Snapshot, of_each_shard_of_a_worker_of_two_ranks_and_of_a_state_on_the_host) {
    for (bool offload : {false, true}) {
        for (const std::vector<long>& overlaps : {std::vector<long>{0}, {H - 1, 1}}) {
            Plan plan;
            plan.wire = {Format::fp4, ExchangeKind::all_to_all, false, 0, true};
            plan.ranks = 2;
            plan.overlaps = overlaps;
            plan.offload = offload;
            ASSERT_NO_FATAL_FAILURE(expect_exact_resumes(plan, {9, 14}));
        }
    }
}

TEST(Snapshot, one_after_another_each_as_good_as_the_last_and_of_a_resumed_run_as_of_any) {
    Plan plan;
    plan.wire = {Format::fp4, ExchangeKind::all_gather, true, 3, true};
    plan.overlaps = {H - 1, 2};
    Folder first, second;
    const Outcomes whole = run(plan, first, {6, 12});
    ASSERT_NO_FATAL_FAILURE(expect_same_states(whole, run(plan, "", {}, 12, first), plan));
    run(plan, second, {7, 12}, 6, first);  // 7: with what it was resumed with still in flight
    for (long step : {7, 12}) {
        ASSERT_NO_FATAL_FAILURE(expect_same_states(whole, run(plan, "", {}, step, second), plan));
    }
    EXPECT_EQ(saved_in_flight(first, 6), 3);
    EXPECT_EQ(saved_in_flight(second, 7), 2);
}

TEST(Snapshot, a_sync_that_no_worker_applies_is_so_after_a_resume_and_leaves_the_residuals_of_before_it) {
    for (ExchangeKind kind : {ExchangeKind::all_gather, ExchangeKind::all_to_all}) {
        for (int workers : {1, 3}) {
            for (long spoiled : {10, 11}) {  // b0 and b2; b1 and b3
                Plan plan;
                plan.wire = {Format::fp4, kind, true, 5, true};
                plan.workers = workers;
                plan.overlaps = {H - 1, 2};
                plan.not_finite = spoiled;
                Folder folder;
                const Outcomes outcomes = run(plan, folder, {12});
                long refused = 0;
                for (const Logged& one : outcomes.at(0).logged) { refused += !one.not_finite.empty(); }
                EXPECT_EQ(refused, 1);
                EXPECT_EQ(saved_in_flight(folder, 12), 2);
                const StateReader saved(state_path(folder, 12, 0));
                EXPECT_EQ(saved.has("in_flight.0.mean"), spoiled != 10);
                EXPECT_EQ(saved.has("in_flight.1.mean"), spoiled != 11);
                ASSERT_NO_FATAL_FAILURE(expect_exact_resumes(plan, {spoiled, 12, 13}));
            }
        }
    }
}

TEST(Snapshot, a_run_that_leaves_now_collects_what_is_in_flight_and_is_resumed_as_if_it_had_gone_on) {
    for (ExchangeKind kind : {ExchangeKind::all_gather, ExchangeKind::all_to_all}) {
        for (long spoiled : {0, 11}) {
            Plan plan;
            plan.wire = {Format::fp4, kind, false, 0, true};
            plan.workers = 3;
            plan.overlaps = {H - 1, 1, 0};
            plan.not_finite = spoiled;
            Folder left;
            const Outcomes whole = run(plan, "", {});
            run_all(plan, [&](Member& member) {
                for (long step = 1; step <= 13; step++) { member.step(step); }
                member.save(left, 13);
                member.diloco.collect_in_flight(member.main);
                member.writer.get();
            });
            EXPECT_EQ(saved_in_flight(left, 13), 3);
            EXPECT_EQ(saved_in_flight(left, 13, 2), 0);
            const Outcomes rest = run(plan, "", {}, 13, left);
            ASSERT_NO_FATAL_FAILURE(expect_same_states(whole, rest, plan));
            ASSERT_NO_FATAL_FAILURE(expect_same_logs(whole, rest, 13, plan));
        }
    }
}

// With alpha = 1 workers' own parameters do not depend on when a mean is merged, and so nothing does.
TEST(Snapshot, another_overlap_after_the_resume_merges_the_same_means_at_other_steps) {
    for (bool offload : {false, true}) {
        for (long before : {0L, 2L, H - 1}) {
            Plan plan;
            plan.wire = {Format::fp4, ExchangeKind::all_to_all, true, 1, true};
            plan.overlaps = {before};
            plan.local_weight = 1;
            plan.offload = offload;
            Folder folder;
            const Outcomes whole = run(plan, folder, {13});
            EXPECT_EQ(saved_in_flight(folder, 13), before == 0 ? 0 : before == 2 ? 1 : 3) << before;
            for (long after : {0L, 1L, 3L, H - 1}) {
                Plan other = plan;
                other.overlaps = {after, (after + 2) % H};
                Folder next;
                const Outcomes resumed = run(other, next, {14}, 13, folder);
                ASSERT_NO_FATAL_FAILURE(expect_same_states(whole, resumed, other));
                for (const auto& [process, outcome] : resumed) {
                    const std::vector<Logged>& logged = outcome.logged;
                    for (size_t i = 1; i < logged.size(); i++) {
                        EXPECT_EQ(logged[i].sync, logged[i - 1].sync + 1) << process;
                    }
                }
            }
        }
    }
}

TEST(Snapshot, what_is_in_flight_when_the_training_ends_right_after_a_resume_is_applied) {
    Plan plan;
    plan.overlaps = {H - 1};
    plan.last = 13;
    Folder folder;
    const Outcomes whole = run(plan, folder, {13});
    EXPECT_EQ(saved_in_flight(folder, 13), 3);
    ASSERT_NO_FATAL_FAILURE(expect_same_states(whole, run(plan, "", {}, 13, folder), plan));
}

TEST(Snapshot, it_is_complete_when_the_last_sync_in_flight_has_been_received_and_not_before) {
    Plan plan;
    plan.overlaps = {H - 1};
    run_all(plan, [&](Member& member) {
        for (long step = 1; step <= 10; step++) { member.step(step); }
        member.diloco.take_snapshot(member.main);  // syncs of 6, 8 and 10
        EXPECT_THROW(member.diloco.take_snapshot(member.main), std::logic_error);
        std::future<void> waiting = std::async(std::launch::async, [&] { member.diloco.snapshot().wait(); });
        for (long step = 11; step <= 13; step++) {
            member.step(step);
            EXPECT_EQ(waiting.wait_for(std::chrono::milliseconds(5)), std::future_status::timeout);
        }
        member.step(14);
        waiting.get();
        member.diloco.take_snapshot(member.main);
    });
}

TEST(Snapshot, one_that_is_abandoned_ends_the_wait_and_the_next_is_good) {
    Plan plan;
    plan.overlaps = {H - 1};
    const Outcomes whole = run(plan, "", {});
    Folder taking;
    run_all(plan, [&](Member& member) {
        for (long step = 1; step <= plan.last; step++) {
            member.step(step);
            if (step == 8) { member.save(taking, step); }
            if (step == 9) {
                member.diloco.snapshot().abandon();
                EXPECT_THROW(member.writer.get(), RunError);
                member.save(taking, step);
            }
        }
        member.finish();
        EXPECT_TRUE(member.state() == whole.at(member.process()).state);
        member.diloco.snapshot().abandon();  // nothing is in flight, so this does nothing
        member.diloco.snapshot().wait();
    });
    ASSERT_NO_FATAL_FAILURE(expect_same_states(whole, run(plan, "", {}, 9, taking), plan));
}

// ---- what does not fit

std::string refusal(const std::function<void(Member&)>& restore, const Plan& plan) {
    std::string error;
    run_all(plan, [&](Member& member) {
        try {
            restore(member);
        } catch (const UserError& refused) {
            if (member.worker == 0) { error = refused.what(); }
        }
    });
    return error;
}

TEST(Snapshot, one_of_other_fragments_or_another_schedule_is_refused) {
    Plan plan;
    plan.wire.error_feedback = true;
    plan.overlaps = {H - 1};
    Folder folder;
    run(plan, folder, {11});
    auto with = [&](const std::string& name, const char* value) {
        return refusal([&](Member& member) {
            const StateReader saved(state_path(folder, 11, member.worker));
            std::string text = "\n" + saved.text("fields");
            const size_t at = text.find("\n" + name + " ") + 1;
            EXPECT_NE(at, 0u) << name;
            text.replace(at, text.find('\n', at) - at, name + " " + value);
            member.diloco.restore(saved, Fields::parse(text.substr(1), "f"), member.main);
        }, plan);
    };
    EXPECT_EQ(with("fragments", "3"), "");
    EXPECT_TRUE(contains(with("fragments", "4"), "has 4 fragments, but this run has 3: "));
    for (const auto& [name, value] : std::vector<std::pair<const char*, const char*>>{
             {"in_flight.0.values", "128"}, {"in_flight.1.sync", "4"}, {"in_flight.1.send_step", "9"},
             {"in_flight.1.send_step", "15"}, {"in_flight.1.send_step", "5"}}) {
        EXPECT_TRUE(contains(with(name, value), "resume with the options that the run had")) << name;
    }
    // b4's of step 8 had been received by step 12 with any tau: it is sent again at step 13.
    Folder later;
    run(plan, later, {12});
    EXPECT_TRUE(contains(refusal([&](Member& member) {
        const StateReader saved(state_path(later, 12, member.worker));
        Fields fields = Fields::parse(saved.text("fields"), "f");
        EXPECT_EQ(fields.integer("in_flight.0.send_step"), 10);
        fields.set("in_flight.0.sync", 4L);
        fields.set("in_flight.0.fragment", 2L);
        fields.set("in_flight.0.send_step", 8L);
        fields.set("in_flight.0.values", 384L);
        member.diloco.restore(saved, fields, member.main);
    }, plan), "of 384 values, in flight as sync 4 since step 8"));
    for (const char* name :
         {"in_flight", "in_flight.0.fragment", "in_flight.1.cosines", "in_flight.1.not_finite"}) {
        for (const char* value : {"-1", "5"}) {
            EXPECT_TRUE(contains(with(name, value), "of '" + std::string(name) + "', but at most"));
        }
    }
    Plan other = plan;
    other.wire.exchange = ExchangeKind::all_to_all;
    const std::string error = refusal([&](Member& member) { member.resume(folder, 11); }, other);
    EXPECT_TRUE(contains(error, "has no 'owner_residuals'"));
}

// ---- a request to stop

TEST(Stop, a_request_of_one_worker_is_in_the_reports_of_all_from_its_next_send_on_and_changes_no_bit) {
    for (ExchangeKind kind : {ExchangeKind::all_gather, ExchangeKind::all_to_all}) {
        Plan plan;
        plan.wire = {Format::fp4, kind};
        plan.workers = 3;
        plan.overlaps = {2, 0, H - 1};
        plan.not_finite = 10;
        Folder folder;
        const Outcomes calm = run(plan, "", {});
        plan.stop_at = 9;  // the next send is that of step 10
        const Outcomes asked = run(plan, folder, {11});
        ASSERT_NO_FATAL_FAILURE(expect_same_states(calm, asked, plan));
        for (const auto& [process, outcome] : asked) {
            ASSERT_EQ(outcome.logged.size(), 11u);
            for (const Logged& one : outcome.logged) { EXPECT_EQ(one.stops, one.send_step >= 10) << process; }
        }
        // Those in flight were on their way to a stop that has been made.
        plan.stop_at = 0;
        const Outcomes resumed = run(plan, "", {}, 11, folder);
        ASSERT_NO_FATAL_FAILURE(expect_same_states(calm, resumed, plan));
        ASSERT_NO_FATAL_FAILURE(expect_same_logs(calm, resumed, 11, plan));
    }
}

}  // namespace test_snapshot
