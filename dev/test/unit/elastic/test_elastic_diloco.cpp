// Streaming DiLoCo over the sync log: the same bits as in lock-step while none is late, and the same global
// parameters on all workers when one is late, dies, or comes later. Workers are threads that meet in a store
// in memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>

#include "dev/test/files.h"
#include "dev/test/unit/local_comm.h"
#include "dev/test/random_values.h"
#include "dev/test/unit/toy_layout.h"
#include "dev/test/unit/wire.h"
#include "llmc/checkpoint/state_file.h"
#include "streaming/diloco.h"
#include "streaming/elastic/elastic_diloco.h"

namespace test_elastic_diloco {

// A store that threads share.
class MemoryStore {
public:
    StoreAnswer perform(const StoreRequest& request) {
        std::lock_guard<std::mutex> lock(mutex);
        StoreAnswer answer;
        auto& folder = folders[request.folder];
        switch (request.kind) {
            case StoreRequest::decide:
                break;
            case StoreRequest::decision:
            case StoreRequest::get: {
                const bool is_entry = request.kind == StoreRequest::decision;
                auto& values = is_entry ? folders[request.folder + "/entry"] : folder;
                answer.found = values.count(request.name) != 0;
                if (answer.found) { answer.value = values[request.name]; }
                break;
            }
            case StoreRequest::put:
                answer.value = folder[request.name] = request.value;
                break;
            case StoreRequest::put_if_absent:
                answer.value = folder.insert({request.name, request.value}).first->second;
                break;
            case StoreRequest::remove:
                request.name.empty() ? folder.clear() : void(folder.erase(request.name));
                break;
            case StoreRequest::list:
                answer.listing = folder;
                break;
            case StoreRequest::folders:
                for (const auto& [name, values] : folders) {
                    if (name.rfind(request.folder, 0) == 0 && !values.empty()) { answer.listing[name] = ""; }
                }
                break;
        }
        return answer;
    }

    // Whether a folder whose path ends with `folder` has a name that begins with `name`.
    bool has(const std::string& folder, const std::string& name) {
        std::lock_guard<std::mutex> lock(mutex);
        for (const auto& [path, values] : folders) {
            const bool is_it = path.size() >= folder.size() &&
                               path.compare(path.size() - folder.size(), folder.size(), folder) == 0;
            const auto at = values.lower_bound(name);
            if (is_it && at != values.end() && at->first.rfind(name, 0) == 0) { return true; }
        }
        return false;
    }

private:
    std::mutex mutex;
    std::map<std::string, std::map<std::string, std::string>> folders;
};

// A worker's connection to the store, which may be cut.
struct Line : LogStore {
    Line(MemoryStore& store, std::atomic<bool>& is_cut) : store(store), is_cut(is_cut) {}
    StoreAnswer perform(const StoreRequest& request) override {
        StoreAnswer answer;
        answer.lost = is_cut;
        return answer.lost ? answer : store.perform(request);
    }
    MemoryStore& store;
    std::atomic<bool>& is_cut;
};

const long H = 20;

// b0 and b2, sent at 20, 40, ...; b1 and b3, at 6, 26, ...; b4, at 13, 33, ...
std::vector<Fragment> toy_fragments() { return make_fragments(4, 5, 2, FragmentPattern::strided, H); }

WireOptions by_all_gather() {
    WireOptions wire;
    wire.exchange = ExchangeKind::all_gather;
    return wire;
}

struct Plan {
    WireOptions wire = by_all_gather();
    int workers = 2, ranks = 1;
    int min_workers = 0;  // 0: all
    long overlap = 1;
    float local_weight = 0.5f;
    bool offload = false, join_moments = false;
    long last = 200;
    double grace = 60, expiry = 60;
    long max_lag = 1000, retain = 4;
    bool checkpoints = false;
    std::string fingerprint = "H 20";

    DilocoOptions options() const {
        DilocoOptions options;
        options.inner_steps = H;
        options.overlap = overlap;
        options.local_weight = local_weight;
        options.offload = offload;
        set_wire(options, wire);
        return options;
    }

    SyncLogOptions log_options(int rank) const {
        SyncLogOptions options;
        options.shard = rank;
        options.overlap = overlap;
        options.elastic.join_moments = join_moments;
        options.workers = workers;
        options.elastic.min_workers = min_workers == 0 ? workers : min_workers;
        options.elastic.max_lag = max_lag;
        options.elastic.retain = retain;
        options.checkpoints = checkpoints;
        options.chunk = 100;           // bytes: several a payload
        options.snapshot_chunk = 160;  // pieces of 10 values
        options.elastic.grace = grace;
        options.expiry = expiry;
        options.poll = 0.0005;
        options.retry = 0.001;
        return options;
    }

    std::string describe() const {
        return name_of(wire.exchange) + " " + name_of(wire.format) + (wire.stochastic ? " stochastic" : "") +
               (wire.error_feedback ? " feedback" : "") + (wire.token_weights ? " tokens" : "") +
               format(" M %d R %d tau %ld alpha %g offload %d", workers, ranks, overlap, double(local_weight),
                      int(offload));
    }
};

// The part of a worker's rank that is the same in lock-step and over the log.
struct Trainer {
    Trainer(const Plan& plan, int worker, int rank)
        : plan(plan),
          layout(toy_layout(plan.ranks)),
          worker(worker),
          rank(rank),
          local(random_values(77, layout.shard_size(), 0.1f)),
          params(size_t(layout.size), -1.0f) {}

    // Stands for an inner optimizer.
    void move(long step) {
        const uint64_t seed = uint64_t(1000 * (worker + 1) + step);
        const Floats gradient = random_values(seed, layout.shard_size(), 0.01f);
        for (size_t i = 0; i < local.size(); i++) { local[i] -= 0.02f * local[i] + gradient[i]; }
        for (int block = 0; block < int(layout.blocks.size()); block++) {
            const Range range = layout.shard(block, rank);
            std::copy_n(&local[size_t(range.shard)], range.count, &params[size_t(range.flat)]);
        }
        tokens += uint64_t(10 + 3 * worker);
    }

    void after(OuterLoop& loop, long& step) {
        step = note(loop.after_inner_step(step, tokens, local.data(), params.data(), main));
    }

    // Returns the step to continue after.
    long note(const Outcome& outcome) {
        reports.insert(reports.end(), outcome.syncs.begin(), outcome.syncs.end());
        snapshots_taken += outcome.joined;
        course = outcome.course;
        return outcome.step;
    }

    void finish(OuterLoop& loop, long step) {
        note(loop.finish(step, local.data(), params.data(), main));
        const float* values = loop.global(main);
        global.assign(values, values + layout.shard_size());
    }

    void train(OuterLoop& loop, long step) {
        while (step < plan.last) {
            move(++step);
            after(loop, step);
        }
        finish(loop, step);
    }

    const Plan plan;
    const Layout layout;
    int worker, rank;
    Stream main;
    Floats local, params, global;
    uint64_t tokens = 0;
    std::vector<SyncReport> reports;
    int snapshots_taken = 0;  // of other workers
    Outcome::Course course = Outcome::continues;
};

// first, first + 1, ...
Floats ascending(size_t count, float first) {
    Floats values(count);
    std::iota(values.begin(), values.end(), first);
    return values;
}

// A worker's rank over the log.
struct Member : Trainer {
    Member(const Plan& plan, MemoryStore& store, int worker, int rank = 0, LocalGroup* ranks = nullptr)
        : Trainer(plan, worker, rank),
          inner(ranks ? *ranks : alone, rank),
          inner_stream(Stream::Kind::communicate),
          m(ascending(local.size(), float(worker))),
          v(ascending(local.size(), float(10 + worker))) {
        LogStart start;
        start.token = "start-" + std::to_string(number_of_starts++);
        start.fingerprint = plan.fingerprint;
        ElasticCallbacks callbacks;
        callbacks.report = [this](const std::vector<OuterEvent>&) {
            if (waiting) { waiting(); }
            return !leaves;
        };
        callbacks.refuse = [](const std::string& theirs) { throw UserError("the run has " + theirs); };
        loop = std::make_unique<ElasticDiloco>(
            plan.options(), plan.log_options(rank), worker, toy_fragments(), layout, inner, inner_stream,
            start, [this, &store] { return std::make_unique<Line>(store, is_cut); }, callbacks,
            InnerMoments{m.data(), v.data(), &updates});
        loop->start(local.data(), main);
        loop->snapshot();
    }

    long begin(long step = 0) {
        return note(loop->begin(step, tokens, local.data(), params.data(), main));
    }
    void run() { train(*loop, begin()); }

    // Residuals of a fragment, as a checkpoint would have them.
    std::string section(const std::string& name) {
        loop->take_snapshot(main);
        loop->snapshot().wait();
        for (const StateSection& one : loop->snapshot().sections()) {
            if (one.name == name) { return std::string(static_cast<const char*>(one.data), one.bytes); }
        }
        throw std::runtime_error("no section " + name);
    }

    void save(const std::string& path, long step) {
        loop->take_snapshot(main);
        loop->snapshot().wait();
        Fields fields;
        loop->snapshot().add_fields(fields);
        fields.set("tokens", tokens);
        const std::string text = fields.text();
        std::vector<StateSection> sections = loop->snapshot().sections();
        sections.push_back({"fields", text.data(), text.size()});
        sections.push_back({"master", local.data(), local.size() * sizeof(float)});
        sections.push_back({"params", params.data(), params.size() * sizeof(float)});
        write_state(path, {step, worker, rank, plan.workers, plan.ranks, "0123456789abcdef"}, sections);
    }

    long resume(const std::string& path) {
        const StateReader saved(path);
        const Fields fields = Fields::parse(saved.text("fields"), path);
        loop->restore(saved, fields, main);
        local = saved_values<float>(saved, "master");
        params = saved_values<float>(saved, "params");
        tokens = fields.count("tokens");
        return begin(saved.identity().step);
    }

    inline static std::atomic<int> number_of_starts{0};

    LocalGroup alone{1};
    LocalComm inner;
    Stream inner_stream;
    std::atomic<bool> is_cut{false};
    std::function<void()> waiting;
    bool leaves = false;  // while it waits
    Floats m, v;
    long updates = 7;
    std::unique_ptr<ElasticDiloco> loop;
};

// The results of a run, by process.
struct Ending {
    Floats global, local, params;
    std::vector<SyncReport> reports;
};
using Endings = std::vector<Ending>;

Ending ending_of(Trainer& trainer) {
    return {trainer.global, trainer.local, trainer.params, trainer.reports};
}

bool same_bits(const Floats& a, const Floats& b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void expect_no_errors(const std::vector<std::string>& errors, const std::string& what = "") {
    for (const std::string& error : errors) { ASSERT_EQ(error, "") << what; }
}

Endings run_lock_step(const Plan& plan) {
    Endings endings(size_t(plan.workers * plan.ranks));
    for (int rank = 0; rank < plan.ranks; rank++) {
        LocalGroup group(plan.workers);
        expect_no_errors(
            run_members(plan.workers,
                        [&](int worker) {
                            LocalComm comm(group, worker);
                            Stream outer(Stream::Kind::communicate);
                            Trainer trainer(plan, worker, rank);
                            Diloco diloco(plan.options(), toy_fragments(), trainer.layout, rank, comm, outer);
                            diloco.start(trainer.local.data(), trainer.main);
                            diloco.rehearse(trainer.main);
                            trainer.train(diloco, 0);
                            endings[size_t(worker * plan.ranks + rank)] = ending_of(trainer);
                        }),
            plan.describe());
    }
    return endings;
}

// started: how many of the plan's workers are started
Endings run_log(const Plan& plan, int started) {
    Endings endings(size_t(started * plan.ranks));
    MemoryStore store;
    std::vector<std::unique_ptr<LocalGroup>> groups;
    for (int worker = 0; worker < started; worker++) {
        groups.push_back(std::make_unique<LocalGroup>(plan.ranks));
    }
    expect_no_errors(run_members(started * plan.ranks,
                                 [&](int process) {
                                     const int worker = process / plan.ranks;
                                     Member member(plan, store, worker, process % plan.ranks,
                                                   groups[size_t(worker)].get());
                                     member.run();
                                     endings[size_t(process)] = ending_of(member);
                                 }),
                     plan.describe());
    return endings;
}

bool same(double a, double b) { return memcmp(&a, &b, sizeof a) == 0; }

void expect_same_report(const SyncReport& a, const SyncReport& b, const Plan& plan) {
    EXPECT_EQ(a.sync, b.sync);
    EXPECT_EQ(a.fragment, b.fragment);
    EXPECT_EQ(a.send_step, b.send_step);
    EXPECT_EQ(a.due_step, b.due_step);
    EXPECT_EQ(a.global_hash, b.global_hash);
    EXPECT_EQ(a.not_finite, b.not_finite);
    EXPECT_EQ(a.statistics.cosines, b.statistics.cosines);
    EXPECT_TRUE(same(a.statistics.delta_norm, b.statistics.delta_norm));
    EXPECT_TRUE(same(a.statistics.quantization_error, b.statistics.quantization_error));
    EXPECT_TRUE(same(a.mean_norm(), b.mean_norm()));
    ASSERT_TRUE(b.log);
    EXPECT_TRUE(b.log->counted);
    EXPECT_EQ(b.log->contributors.size(), size_t(plan.workers));
    EXPECT_GE(b.waited_seconds(), 0);
    EXPECT_EQ(b.traffic.bytes_received, a.traffic.bytes_received);
    EXPECT_EQ(b.traffic.bytes_sent * size_t(plan.workers - 1), a.traffic.bytes_sent);
}

// Syncs in flight after the last step are applied as they arrive, since fragments do not affect each other.
void sort_reports(Endings& endings) {
    for (Ending& ending : endings) {
        std::sort(ending.reports.begin(), ending.reports.end(),
                  [](const SyncReport& a, const SyncReport& b) { return a.sync < b.sync; });
    }
}

// absent: number of workers that never come
void expect_lock_steps_bits(const Plan& plan, int absent = 0) {
    SCOPED_TRACE(plan.describe());
    const Endings expected = run_lock_step(plan);
    Plan places = plan;
    places.workers += absent;
    places.min_workers = plan.workers;
    places.grace = absent > 0 ? 0.05 : plan.grace;
    Endings endings = run_log(places, plan.workers);
    sort_reports(endings);
    for (size_t i = 0; i < expected.size(); i++) {
        EXPECT_TRUE(same_bits(endings[i].global, expected[i].global));
        EXPECT_TRUE(same_bits(endings[i].local, expected[i].local));
        EXPECT_TRUE(same_bits(endings[i].params, expected[i].params));
        ASSERT_EQ(endings[i].reports.size(), 30u);
        ASSERT_EQ(expected[i].reports.size(), 30u);
        for (size_t s = 0; s < 30; s++) {
            expect_same_report(expected[i].reports[s], endings[i].reports[s], plan);
        }
    }
}

// All workers that applied a sync must report the same global hash for it.
void expect_one_history(const Endings& endings) {
    std::map<long, uint64_t> hashes;
    for (const Ending& ending : endings) {
        for (const SyncReport& report : ending.reports) {
            const auto [at, is_new] = hashes.insert({report.sync, report.global_hash});
            EXPECT_EQ(at->second, report.global_hash) << "sync " << report.sync;
        }
    }
    for (const Ending& ending : endings) { EXPECT_TRUE(same_bits(ending.global, endings[0].global)); }
}

TEST(ElasticDiloco, if_none_is_late_every_format_rounding_and_feedback_gives_lock_steps_bits_for_200_steps) {
    int variant = 0;
    for (Format format : all_formats) {
        for (int bits = 0; bits < 4; bits++) {
            Plan plan;
            plan.wire = {format, ExchangeKind::all_gather, bool(bits & 1), 99, bool(bits & 2)};
            plan.workers = variant % 2 ? 3 : 2;
            plan.overlap = std::vector<long>{0, 1, H - 1}[size_t(variant % 3)];
            plan.wire.token_weights = variant % 4 >= 2;
            plan.local_weight = variant % 5 < 3 ? 0.5f : 0.0f;
            plan.offload = variant % 7 == 3;
            variant++;
            ASSERT_NO_FATAL_FAILURE(expect_lock_steps_bits(plan));
        }
    }
}

TEST(ElasticDiloco, if_none_is_late_every_overlap_weight_and_number_of_workers_gives_lock_steps_bits) {
    for (int workers : {1, 2, 3}) {
        for (long overlap : {0L, 1L, H - 1}) {
            for (int bits = 0; bits < 4; bits++) {
                Plan plan;
                plan.workers = workers;
                plan.overlap = overlap;
                plan.local_weight = bits & 1 ? 0.5f : 0.0f;
                plan.wire.token_weights = bits & 2;
                plan.wire.error_feedback = true;
                ASSERT_NO_FATAL_FAILURE(expect_lock_steps_bits(plan));
            }
        }
    }
}

TEST(ElasticDiloco, each_shard_of_workers_of_two_ranks_has_lock_steps_bits) {
    for (long overlap : {0L, 3L}) {
        Plan plan;
        plan.ranks = 2;
        plan.overlap = overlap;
        plan.wire.error_feedback = true;
        ASSERT_NO_FATAL_FAILURE(expect_lock_steps_bits(plan));
    }
}

TEST(ElasticDiloco, two_workers_in_a_run_with_more_places_have_the_bits_of_a_run_of_two) {
    for (bool token_weights : {false, true}) {
        for (int absent : {1, 8}) {  // 8: statistics of ten workers would have cosines with the mean only
            Plan plan;
            plan.wire.token_weights = token_weights;
            ASSERT_NO_FATAL_FAILURE(expect_lock_steps_bits(plan, absent));
        }
    }
}

TEST(ElasticDiloco, a_report_names_the_counted_workers_with_their_weights_and_the_decider) {
    Plan plan;
    plan.workers = 3;
    plan.last = 60;
    for (const Ending& ending : run_log(plan, 3)) {
        for (const SyncReport& report : ending.reports) {
            const long since = std::min(report.send_step, H);
            ASSERT_EQ(report.log->contributors.size(), 3u);
            for (int worker = 0; worker < 3; worker++) {
                EXPECT_EQ(report.log->contributors[size_t(worker)].worker, worker);
                EXPECT_EQ(report.log->contributors[size_t(worker)].tokens,
                          uint64_t(since * (10 + 3 * worker)));
            }
            EXPECT_GE(report.log->decider, 0);
            EXPECT_LT(report.log->decider, 3);
            EXPECT_GE(report.log->grace_seconds, 0);
        }
    }
}

// Values of a fragment's shards.
Floats fragment_of(const Floats& shard, int p) {
    const Layout layout = toy_layout(1);
    const Fragment fragment = toy_fragments()[size_t(p)];
    Floats values;
    for (int block : fragment.blocks) {
        const Range range = layout.shard(block, 0);
        values.insert(values.end(), &shard[size_t(range.shard)], &shard[size_t(range.shard)] + range.count);
    }
    return values;
}

// Fragment p's part of a section of residuals, in which fragments lie one after another.
std::string residuals_of(const std::string& section, int p) {
    const std::vector<long> values = shard_values(toy_fragments(), toy_layout(1));
    const long first = std::accumulate(&values[0], &values[0] + p, 0L);
    return section.substr(size_t(first) * sizeof(float), size_t(values[size_t(p)]) * sizeof(float));
}

// Tries once per millisecond, and gives up after a minute.
template <class Condition>
void wait_until(Condition condition) {
    for (int i = 0; !condition(); i++) {
        if (i == 60000) { throw std::runtime_error("waited in vain"); }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

// Worker 2 is cut off from before its send of sync 3 (fragment 1, step 26) until the others have decided it.
TEST(ElasticDiloco, a_worker_that_was_not_counted_follows_global_and_has_the_residuals_of_before) {
    for (float alpha : {0.5f, 1.0f}) {
        Plan plan;
        plan.workers = 3;
        plan.wire.error_feedback = true;
        plan.local_weight = alpha;
        plan.min_workers = 2;
        plan.grace = 1;
        plan.last = 120;
        MemoryStore store;
        Endings endings(3);
        std::atomic<bool> has_followed{false}, has_sent_again{false};
        std::vector<uint64_t> tokens_at(size_t(plan.last) + 1);  // of worker 2, after each step
        expect_no_errors(run_members(3, [&](int worker) {
            Member member(plan, store, worker);
            long step = member.begin();
            std::string residuals;
            Floats local, global;
            member.waiting = [&] { member.is_cut = member.is_cut && !store.has("/entry", "3"); };
            while (step < plan.last) {
                member.move(++step);
                // Also of steps that it may jump over now.
                if (worker == 2) { std::fill(&tokens_at[size_t(step)], &tokens_at.back() + 1, member.tokens); }
                if (worker == 2 && step == 26) {
                    residuals = member.section("residuals");
                    member.is_cut = true;
                }
                if (worker == 2 && step == 27) {
                    EXPECT_NE(residuals_of(member.section("residuals"), 1), residuals_of(residuals, 1));
                    EXPECT_EQ(residuals_of(member.section("residuals_before"), 1),
                              residuals_of(residuals, 1));
                    const float* now = member.loop->global(member.main);
                    local = member.local;
                    global.assign(now, now + long(local.size()));
                }
                member.after(*member.loop, step);
                if (worker != 2 && step == 27) { wait_until([&] { return has_followed.load(); }); }
                if (worker != 2 && step == 45) { wait_until([&] { return has_sent_again.load(); }); }
                has_sent_again = has_sent_again || (worker == 2 && step == 46);
                if (worker != 2 || local.empty()) { continue; }
                has_followed = true;
                ASSERT_EQ(member.reports[3].sync, 3);
                EXPECT_FALSE(member.reports[3].log->counted);
                EXPECT_EQ(member.reports[3].log->contributors.size(), 2u);
                EXPECT_EQ(residuals_of(member.section("residuals"), 1), residuals_of(residuals, 1));
                const Floats was = fragment_of(local, 1), old_global = fragment_of(global, 1);
                const float* now = member.loop->global(member.main);
                const Floats new_global = fragment_of(Floats(now, now + long(local.size())), 1);
                Floats expected = was;
                for (size_t i = 0; i < was.size(); i++) { expected[i] += new_global[i] - old_global[i]; }
                EXPECT_TRUE(same_bits(fragment_of(member.local, 1), expected));
                EXPECT_TRUE(same_bits(fragment_of(member.params, 1), expected));
                EXPECT_FALSE(same_bits(new_global, old_global));
                local.clear();
            }
            member.finish(*member.loop, step);
            endings[size_t(worker)] = ending_of(member);
        }));
        expect_one_history(endings);
        ASSERT_GT(endings[2].reports.size(), 4u);
        // Its tokens in a mean are those since it was last counted for this fragment.
        uint64_t before[3] = {};
        int times = 0;
        for (const SyncReport& report : endings[0].reports) {
            for (const auto& one : report.log->contributors) {
                if (one.worker != 2) { continue; }
                const uint64_t now = tokens_at[size_t(report.send_step)];
                EXPECT_EQ(one.tokens, now - std::exchange(before[report.fragment], now));
                times += report.fragment == 1;
            }
        }
        EXPECT_GT(times, 1);
    }
}

// Lets a member take its turns after `step`, without training, until `until`.
void stand(Member& member, long step, const std::atomic<bool>& until) {
    wait_until([&] {
        member.after(*member.loop, step);
        return until.load();
    });
}

TEST(ElasticDiloco, a_newcomer_takes_a_snapshot_and_is_counted_from_then_on) {
    for (bool join_moments : {false, true}) {
        Plan plan;
        plan.workers = 3;
        plan.join_moments = join_moments;
        plan.wire.error_feedback = true;
        plan.offload = join_moments;
        plan.min_workers = 2;
        plan.grace = 1;
        plan.expiry = 10;
        plan.retain = 1;
        MemoryStore store;
        Endings endings(3);
        std::atomic<bool> has_joined{false};
        std::atomic<int> standing{0};
        expect_no_errors(run_members(3, [&](int worker) {
            if (worker == 2) { wait_until([&] { return standing == 2; }); }
            Member member(plan, store, worker);
            if (worker == 2) {  // it has trained by itself, which nobody gets to see
                member.local = random_values(5, member.layout.shard_size(), 0.1f);
                member.tokens = 100000;
            }
            long step = member.begin();
            if (worker == 2) {
                wait_until([&] {
                    member.after(*member.loop, step);
                    return member.snapshots_taken > 0;
                });
                EXPECT_EQ(step, 80);
                const float* global = member.loop->global(member.main);
                EXPECT_TRUE(same_bits(member.local, Floats(global, global + long(member.local.size()))));
                EXPECT_TRUE(same_bits(member.params, member.local));
                EXPECT_EQ(member.m, ascending(member.m.size(), join_moments ? 0.0f : 2.0f));
                EXPECT_EQ(member.v, ascending(member.v.size(), join_moments ? 10.0f : 12.0f));
                EXPECT_EQ(member.updates, join_moments ? 42 : 7);
                has_joined = true;
            } else {
                member.updates = 42;
            }
            while (step < plan.last) {
                member.move(++step);
                member.after(*member.loop, step);
                if (worker != 2 && step == 83) {  // nothing is in flight
                    standing++;
                    stand(member, step, has_joined);
                }
            }
            member.finish(*member.loop, step);
            endings[size_t(worker)] = ending_of(member);
        }));
        expect_one_history(endings);
        const auto& reports = endings[2].reports;
        EXPECT_TRUE(std::any_of(reports.begin(), reports.end(),
                                [](const SyncReport& report) { return report.log->counted; }));
        for (const SyncReport& report : endings[0].reports) {
            for (const auto& one : report.log->contributors) { EXPECT_LT(one.tokens, 100000u); }
        }
    }
}

// Ends a member as a crash would: nothing more of it reaches the store.
void die(Member& member) {
    member.is_cut = true;
    member.loop.reset();
}

// Worker 1 dies without a checkpoint after its payloads of nine syncs have counted, and begins anew. Its local
// parameters lack that training, so they may not stay behind global, whatever alpha is.
TEST(ElasticDiloco, a_newcomer_that_applies_what_an_earlier_start_has_sent_ends_at_global) {
    for (float alpha : {0.5f, 1.0f}) {
        Plan plan;
        plan.local_weight = alpha;
        plan.min_workers = 1;
        plan.checkpoints = true;  // of which there is none: no payload is removed
        plan.grace = 1;
        plan.last = 120;
        MemoryStore store;
        Endings endings(2);
        std::atomic<bool> is_back{false};
        expect_no_errors(run_members(2, [&](int worker) {
            auto member = std::make_unique<Member>(plan, store, worker);
            long step = member->begin();
            while (step < plan.last) {
                member->move(++step);
                member->after(*member->loop, step);
                if (worker == 0 && step == 63) { stand(*member, step, is_back); }  // nothing is in flight
                if (worker == 0 || step != 63 || is_back) { continue; }
                die(*member);
                member = std::make_unique<Member>(plan, store, worker);
                step = member->begin();
                wait_until([&] {
                    member->after(*member->loop, step);
                    return member->reports.size() == 8;  // the ninth is due in the next step
                });
                EXPECT_EQ(member->snapshots_taken, 0);
                for (const SyncReport& report : member->reports) { EXPECT_TRUE(report.log->counted); }
                const float* global = member->loop->global(member->main);
                float moved = 0, behind = 0;
                const Floats initial = random_values(77, member->layout.shard_size(), 0.1f);
                for (size_t i = 0; i < initial.size(); i++) {
                    moved = std::max(moved, std::abs(global[i] - initial[i]));
                    behind = std::max(behind, std::abs(global[i] - member->local[i]));
                }
                EXPECT_GT(moved, 0.01f);
                EXPECT_LT(behind, 1e-6f);
                is_back = true;
            }
            member->finish(*member->loop, step);
            endings[size_t(worker)] = ending_of(*member);
        }));
        expect_one_history(endings);
    }
}

// Worker 2 dies right after step 27, while sync 3 (sent at 26) is in flight, and resumes from a checkpoint of
// step 27 or 25.
void resume_in_mid_flight(bool is_counted, long saved_after = 27) {
    Plan plan;
    plan.workers = 3;
    plan.wire.error_feedback = true;
    plan.overlap = 3;
    plan.min_workers = 2;
    plan.grace = 1;
    plan.last = 120;
    plan.checkpoints = true;
    MemoryStore store;
    Endings endings(3);
    TemporaryFolder folder;
    std::atomic<bool> is_dead{false}, is_back{false}, has_sent{false};
    std::vector<uint64_t> tokens_at(size_t(plan.last) + 1);  // of worker 2, after each step
    const auto note_tokens = [&](long step, const Member& member) {  // also of steps that it may jump over now
        if (member.worker == 2) { std::fill(&tokens_at[size_t(step)], &tokens_at.back() + 1, member.tokens); }
    };
    expect_no_errors(run_members(3, [&](int worker) {
        auto member = std::make_unique<Member>(plan, store, worker);
        long step = member->begin();
        while (step < plan.last) {
            member->move(++step);
            note_tokens(step, *member);
            if (worker == 2 && step == 26 && !is_dead && !is_counted) { member->is_cut = true; }
            member->after(*member->loop, step);
            if (step == 26 && is_counted) { wait_until([&] { return store.has("/sent/3", "2."); }); }
            const std::string path = folder / "state";
            if (worker == 2 && step == saved_after && !is_dead) { member->save(path, step); }
            if (worker == 2 && step == 27 && !is_dead) {
                const std::string after = member->section("residuals"),
                                  before = member->section("residuals_before");
                EXPECT_NE(residuals_of(after, 1), residuals_of(before, 1));
                die(*member);
                is_dead = true;
                member = std::make_unique<Member>(plan, store, worker);
                wait_until([&] { return store.has("/entry", saved_after == 27 ? "3" : "4"); });
                step = member->resume(path);
                while (member->reports.empty()) {
                    member->move(++step);
                    note_tokens(step, *member);
                    member->after(*member->loop, step);
                }
                EXPECT_EQ(member->snapshots_taken, 0);
                EXPECT_EQ(member->reports[0].sync, 3);
                EXPECT_EQ(member->reports[0].log->counted, is_counted);
                const std::string residuals = residuals_of(member->section("residuals"), 1),
                                  none(residuals.size(), '\0');
                EXPECT_TRUE(residuals ==
                            (saved_after == 25 ? none : residuals_of(is_counted ? after : before, 1)));
                is_back = true;
            }
            // From a checkpoint of step 25 it jumps past its send of sync 3, so the others go on to sync 4.
            if (worker != 2 && step == (saved_after == 27 ? 30 : 37)) { stand(*member, step, is_back); }
            if (worker == 2 && step == 46) {  // fragment 1's next send: before it the others decide nothing
                wait_until([&] { return store.has("/sent/6", "2."); });
                has_sent = true;
            }
            if (worker != 2 && step == 45) { stand(*member, step, has_sent); }
        }
        member->finish(*member->loop, step);
        endings[size_t(worker)] = ending_of(*member);
    }));
    expect_one_history(endings);
    if (saved_after < 27) { return; }  // it repeats a step that counts
    uint64_t counted[3] = {};  // of worker 2: none are lost, and none count twice
    for (const SyncReport& report : endings[0].reports) {
        for (const auto& one : report.log->contributors) {
            if (one.worker != 2) { continue; }
            counted[report.fragment] += one.tokens;
            EXPECT_EQ(counted[report.fragment], tokens_at[size_t(report.send_step)]) << report.sync;
        }
    }
    EXPECT_GT(counted[1], tokens_at[27]);
}

TEST(ElasticDiloco, a_worker_that_resumes_in_mid_flight_keeps_what_rounding_lost_of_a_payload_that_counts) {
    resume_in_mid_flight(true);
}

TEST(ElasticDiloco, a_worker_that_resumes_in_mid_flight_gets_back_the_residuals_of_before_one_that_does_not) {
    resume_in_mid_flight(false);
}

TEST(ElasticDiloco, a_worker_that_resumes_before_it_sent_a_payload_that_counts_sends_no_residual_again) {
    resume_in_mid_flight(true, 25);
}

TEST(ElasticDiloco, an_outer_gradient_that_is_not_finite_is_applied_by_none_and_named_by_all) {
    Plan plan;
    plan.workers = 3;
    plan.wire.error_feedback = true;
    MemoryStore store;
    Endings endings(3);
    expect_no_errors(run_members(3, [&](int worker) {
        Member member(plan, store, worker);
        long step = member.begin();
        while (step < plan.last) {
            member.move(++step);
            const Floats kept = member.local;
            if (worker == 1 && step == 46) { member.local[130] = INFINITY; }  // of fragment 1: sync 6
            member.after(*member.loop, step);
            if (worker == 1 && step == 46) { member.local = kept; }
        }
        member.finish(*member.loop, step);
        endings[size_t(worker)] = ending_of(member);
    }));
    expect_one_history(endings);
    for (const Ending& ending : endings) {
        ASSERT_EQ(ending.reports.size(), 30u);
        for (const SyncReport& report : ending.reports) {
            EXPECT_EQ(report.not_finite, report.sync == 6 ? std::vector<int>{1} : std::vector<int>{});
            EXPECT_EQ(report.applied(), report.sync != 6);
        }
        for (size_t i = 7; i < 10; i++) { EXPECT_NE(ending.reports[i].global_hash, 0u); }
        EXPECT_EQ(ending.reports[9].global_hash, ending.reports[6].global_hash);  // of fragment 1, too
        for (float value : ending.global) { EXPECT_TRUE(std::isfinite(value)); }
    }
}

TEST(ElasticDiloco, a_payload_of_another_format_is_refused_with_whose_it_is) {
    MemoryStore store;
    const std::vector<std::string> errors = run_members(2, [&](int worker) {
        Plan plan;
        plan.wire.format = worker == 0 ? Format::fp4 : Format::fp4_e2m1;
        Member member(plan, store, worker);
        member.run();
    });
    EXPECT_TRUE(contains(errors[0],
                         "the payload of worker 1 for fragment 1 (sync 0, sent at step 6) was "
                         "refused: its number format is"))
        << errors[0];
    EXPECT_TRUE(contains(errors[1],
                         "the payload of worker 0 for fragment 1 (sync 0, sent at step 6) was "
                         "refused: its number format is"))
        << errors[1];
}

TEST(ElasticDiloco, a_payload_of_another_size_is_refused_with_whose_it_is) {
    MemoryStore store;
    const std::vector<std::string> errors = run_members(2, [&](int worker) {
        Plan plan;
        plan.wire.format = worker == 0 ? Format::bf16 : Format::fp32;
        Member member(plan, store, worker);
        member.run();
    });
    EXPECT_TRUE(contains(errors[0], "the payload of worker 1 for fragment 1 (sync 0, sent at step 6) was "
                                    "refused: it has "))
        << errors[0];
}

TEST(ElasticDiloco, a_worker_of_other_options_is_refused_with_those_of_the_run) {
    Plan plan;
    plan.workers = 1;
    plan.last = 30;
    MemoryStore store;
    without_teams();
    Member first(plan, store, 0);
    first.run();
    plan.fingerprint = "H 21";
    Member other(plan, store, 1);
    EXPECT_EQ(user_error([&] { other.begin(); }), "the run has H 20");
}

TEST(ElasticDiloco, a_worker_that_is_started_twice_is_stopped_with_a_status_of_its_own) {
    Plan plan;
    plan.workers = 1;
    plan.last = 1000000;
    MemoryStore store;
    without_teams();
    Member first(plan, store, 0), second(plan, store, 0);
    const long step = first.begin();
    second.begin();
    try {
        first.train(*first.loop, step);
        FAIL() << "it trains to its end";
    } catch (const RunError& stopped) {
        EXPECT_STREQ(stopped.what(), "another process has started as this worker");
        EXPECT_EQ(exit_status(stopped), replaced_status);
    }
}

TEST(ElasticDiloco, what_the_trainer_throws_while_it_waits_ends_the_wait) {
    Plan plan;
    MemoryStore store;
    without_teams();
    Member member(plan, store, 0);  // there is no other worker
    int calls = 0;
    member.waiting = [&] {
        if (++calls == 3) { throw RunError("asked to stop"); }
    };
    EXPECT_THROW(member.begin(), RunError);
    EXPECT_EQ(calls, 3);
}

TEST(ElasticDiloco, a_rank_that_ends_the_wait_takes_the_other_ranks_of_its_worker_along) {
    Plan plan;
    plan.ranks = 2;
    MemoryStore store;
    LocalGroup ranks(plan.ranks);
    std::atomic<int> left{0};
    std::vector<std::thread> threads;
    for (int rank = 0; rank < plan.ranks; rank++) {
        threads.emplace_back([&, rank] {
            without_teams();
            Member member(plan, store, 0, rank, &ranks);  // there is no other worker
            member.leaves = rank == 1;
            member.begin();
            left += member.course == Outcome::left;
        });
    }
    for (std::thread& thread : threads) { thread.join(); }
    EXPECT_EQ(left, 2);
}

TEST(ElasticDiloco, checkpoints_of_lock_step_and_of_the_log_are_not_taken_for_each_other) {
    Plan plan;
    plan.workers = 1;
    plan.last = 30;
    TemporaryFolder folder;
    MemoryStore store;
    without_teams();
    Member member(plan, store, 0);
    member.run();
    member.save(folder / "log", 30);
    LocalGroup group(1);
    LocalComm comm(group, 0);
    Stream outer(Stream::Kind::communicate);
    Diloco diloco(plan.options(), toy_fragments(), member.layout, 0, comm, outer);
    diloco.start(member.local.data(), member.main);
    const StateReader of_log(folder / "log");
    EXPECT_TRUE(contains(
        user_error([&] { diloco.restore(of_log, Fields::parse(of_log.text("fields"), "f"), member.main); }),
        "belongs to a run with --outer-transport store: "));

    diloco.take_snapshot(member.main);
    diloco.snapshot().wait();
    Fields fields;
    diloco.snapshot().add_fields(fields);
    write_state(folder / "lock_step", {30, 0, 0, 1, 1, "0123456789abcdef"}, diloco.snapshot().sections());
    EXPECT_TRUE(contains(
        user_error([&] { member.loop->restore(StateReader(folder / "lock_step"), fields, member.main); }),
        "belongs to a run without --outer-transport store: "));
}

}  // namespace test_elastic_diloco
