// A deterministic simulation of the sync log: workers of different speeds, a store with delays and lost
// connections, crashes, stalls, restarts and newcomers, all drawn from one seed. What must always hold is
// checked after every event. Time is simulated: a run of a minute takes milliseconds, and a seed that fails
// once always fails.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>

#include "dev/test/unit/elastic/simulated_store.h"
#include "streaming/elastic/sync_log_threads.h"

namespace simulation {

// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014).
class Random {
public:
    explicit Random(uint64_t seed) : state(seed) {}
    uint32_t bits() {
        uint64_t mixed = state += 0x9e3779b97f4a7c15;
        mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
        mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
        return uint32_t((mixed ^ (mixed >> 31)) >> 32);
    }
    double between(double low, double high) { return low + (high - low) * bits() * 0x1p-32; }
    long among(long low, long high) { return low + long(bits() % uint32_t(high - low + 1)); }
    bool happens(double probability) { return bits() * 0x1p-32 < probability; }

private:
    uint64_t state;
};

const int values = 3;  // of a fragment

// A few numbers in place of a fragment's values: any difference in which workers were counted, in which order
// or on which global parameters changes the hash at once.
class Shard : public LogShard {
public:
    using Values = std::vector<float>;
    struct State {
        std::vector<Values> global, momentum, local, residual, residual_before;
        std::vector<uint64_t> tokens_at_send;
        uint64_t tokens = 0;
        bool is_corrupt = false;  // only the simulation knows
    };

    Shard(int worker, int rank, const SyncSchedule& schedule)
        : worker(worker), rank(rank), schedule(schedule) {
        const size_t P = size_t(schedule.fragments());
        state.global.assign(P, Values(values, 1.0f + float(rank)));
        state.local = state.global;
        for (auto* one : {&state.momentum, &state.residual, &state.residual_before}) {
            one->assign(P, Values(values, 0.0f));
        }
        state.tokens_at_send.assign(P, 0);
    }

    void train(long step) {
        Random noise(uint64_t(step) * 64 + uint64_t(rank * 32 + worker) + 1);
        for (Values& fragment : state.local) {
            for (float& value : fragment) { value -= float(noise.between(-0.05, 0.1)) * value; }
        }
        state.tokens += 10 + uint64_t(worker);
    }

    void corrupt() {
        state.global[0][0] += 0.25f;
        state.is_corrupt = true;
    }

    uint64_t hash(int p) override {
        std::string bytes;
        append(bytes, state.global[size_t(p)]);
        append(bytes, state.momentum[size_t(p)]);
        return digest_of(bytes);
    }

    void encode(long sync) override {
        const size_t p = size_t(schedule.fragment(sync));
        Encoded& out = sent[sync];
        out.tokens = state.tokens - state.tokens_at_send[p];
        state.tokens_at_send[p] = state.tokens;
        state.residual_before[p] = state.residual[p];
        Values codes(values);
        for (size_t i = 0; i < size_t(values); i++) {
            const float delta = state.global[p][i] - state.local[p][i] + state.residual[p][i];
            codes[i] = std::floor(delta * 64 + 0.5f) / 64;
            state.residual[p][i] = delta - codes[i];
        }
        out.hash = hash(int(p));
        const Header header{id_of(sync, worker), out.hash, out.tokens};
        out.payload.assign(reinterpret_cast<const char*>(&header), sizeof header);
        append(out.payload, codes);
    }

    const Encoded* encoded(long sync) override {
        const auto found = sent.find(sync);
        return found == sent.end() ? nullptr : &found->second;
    }

    void apply(long sync, const std::vector<Contribution>& contributions, bool counted) override {
        if (contributions.empty()) { return move(sync, Values(), counted); }
        for (const Contribution& one : contributions) { check_base(sync, header_of(sync, one).hash); }
        move(sync, mean_of(sync, contributions), counted);
    }

    void move(long sync, const Values& mean, bool counted) {
        const size_t p = size_t(schedule.fragment(sync));
        const Values before = state.global[p];
        if (!mean.empty()) { step(p, mean); }
        for (size_t i = 0; i < size_t(values); i++) {
            float& local = state.local[p][i];
            const float global = state.global[p][i];
            local = counted ? 0.5f * local + 0.5f * global : local + (global - before[i]);
        }
        if (sent.erase(sync) && !counted) { state.residual[p] = state.residual_before[p]; }
    }

    size_t snapshot_bytes() const override { return state.global.size() * size_t(values) * 2 * sizeof(float); }

    void append_snapshot(Spool& spool) override {
        std::string bytes;
        for (size_t p = 0; p < state.global.size(); p++) {
            append(bytes, state.global[p]);
            append(bytes, state.momentum[p]);
        }
        bytes += state.is_corrupt ? "1" : "0";
        spool.append(bytes.data(), bytes.size());
    }

    void load(const Spool& spool, size_t from) override {
        const std::string snapshot = spool.read(std::min(from, spool.size()), spool.size());
        size_t at = 0;
        for (size_t p = 0; p < state.global.size(); p++) {
            for (Values* to : {&state.global[p], &state.momentum[p]}) {
                const size_t there =
                    std::min(snapshot.size() - std::min(at, snapshot.size()), sizeof(float) * values);
                std::memcpy(to->data(), snapshot.data() + std::min(at, snapshot.size()), there);
                at += sizeof(float) * values;
            }
            state.residual[p].assign(values, 0.0f);
        }
        was_misled = at < snapshot.size() && snapshot[at] == '1';
        state.is_corrupt = false;
        state.local = state.global;
        sent.clear();
    }

    State state;
    std::map<long, Encoded> sent;
    bool was_misled = false;  // by the snapshot of a corrupt worker

private:
    static void append(std::string& bytes, const Values& from) {
        bytes.append(reinterpret_cast<const char*>(from.data()), from.size() * sizeof(float));
    }

    struct Header {
        uint64_t id, hash, tokens;
    };

    static uint64_t id_of(long sync, int worker) { return uint64_t(sync) * 32 + uint64_t(worker); }

    static Header header_of(long sync, const Contribution& one) {
        Header header;
        if (one.payload.size() != sizeof header + sizeof(float) * values) {
            throw Violation("a payload of no such size");
        }
        std::memcpy(&header, one.payload.data(), sizeof header);
        if (header.id != id_of(sync, one.worker)) {
            throw Violation("a payload of another sync, or of another worker, is counted");
        }
        return header;
    }

    void check_base(long sync, uint64_t base) {
        if (base != hash(schedule.fragment(sync)) && !state.is_corrupt) {
            throw Violation("what stands on another hash is applied");
        }
    }

    // Weighted by tokens.
    static Values mean_of(long sync, const std::vector<Contribution>& contributions) {
        Values mean(values, 0.0f);
        float sum = 0;
        int last = -1;
        for (const Contribution& one : contributions) {
            const Header header = header_of(sync, one);
            if (one.worker <= last) { throw Violation("contributions out of order"); }
            last = one.worker;
            Values codes(values);
            std::memcpy(codes.data(), one.payload.data() + sizeof header, sizeof(float) * values);
            sum += float(header.tokens);
            for (size_t i = 0; i < size_t(values); i++) {
                mean[i] = std::fmaf(float(header.tokens), codes[i], mean[i]);
            }
        }
        for (float& value : mean) { value /= sum; }
        return mean;
    }

    void step(size_t p, const Values& mean) {
        for (size_t i = 0; i < size_t(values); i++) {
            float& momentum = state.momentum[p][i];
            momentum = std::fmaf(0.9f, momentum, mean[i]);
            state.global[p][i] -= 0.4f * std::fmaf(0.9f, momentum, mean[i]);
        }
    }

    const int worker, rank;
    const SyncSchedule& schedule;
};

// The properties of a run, drawn from its seed.
struct Plan {
    enum Mode { plain, all_die, store_emptied, disks_lost, corruption, modes, none };
    Mode mode;
    int workers, ranks, min_workers;
    long H, fragments, steps, checkpoint_every;
    std::vector<long> overlap;
    std::vector<double> step_time, delay, first_start;
    double crashes, stalls, losses;  // probabilities of each, at a request
    double strangers;                // probability that a start has other options than the run
    double quiet_from;               // when faults end
    SyncLogOptions options;

    explicit Plan(Random& random) {
        mode = Mode(random.among(0, modes - 1));
        workers = int(random.among(mode == corruption ? 3 : 2, 5));
        ranks = random.happens(0.1) ? 2 : 1;
        min_workers = workers / 2 + 1;
        H = random.among(2, 6);
        fragments = random.among(1, 3);
        steps = random.among(3 * H, 6 * H);
        checkpoint_every = random.among(1, 4 * H);
        quiet_from = random.between(5, 30);
        for (int w = 0; w < workers; w++) {
            overlap.push_back(random.among(0, H - 1));
            step_time.push_back(random.happens(0.2) ? random.between(1.5, 4) : random.between(0.4, 1.0));
            delay.push_back(random.happens(0.2) ? random.between(0.1, 0.4) : random.between(0.002, 0.05));
            first_start.push_back(w >= min_workers && random.happens(0.3) ? random.between(3, 40)
                                                                          : random.between(0, 1));
        }
        const double often = random.happens(0.2) ? 4 : random.happens(0.3) ? 0 : 1;
        crashes = often * random.between(0, 0.006);
        stalls = often * random.between(0, 0.006);
        losses = often * random.between(0, 0.06);
        strangers = mode == store_emptied ? 0 : 0.1;
        options.workers = workers;
        options.elastic.min_workers = min_workers;
        options.elastic.max_lag = random.among(0, 2 * H);
        options.elastic.retain = random.among(1, 4);
        options.chunk = options.snapshot_chunk = size_t(random.among(10, 40));
        options.elastic.grace = random.between(1, 4);
        options.expiry = 3;
        options.poll = 0.3;
        options.retry = 0.4;
    }
};

// Three workers that are alike and do not fail by themselves.
inline void make_even(Plan& plan) {
    plan.mode = Plan::none;
    plan.workers = plan.options.workers = 3;
    plan.min_workers = plan.options.elastic.min_workers = 2;
    plan.ranks = 1;
    plan.steps = 40;
    plan.overlap.assign(3, std::min(1L, plan.H - 1));
    plan.step_time.assign(3, 2);
    plan.delay.assign(3, 0.02);
    plan.first_start.assign(3, 0);
    plan.crashes = plan.stalls = plan.losses = plan.strangers = 0;
}

// Counts of what happened, over all runs.
struct Totals {
    long syncs = 0, deaths = 0, stalls = 0, snapshots = 0, snapshots_gone = 0, jumps = 0, late = 0;
    long new_generations = 0, diverged = 0, undecidable = 0, refused = 0, too_late = 0, gone = 0;
    long overtaken = 0;     // writes, by the reads beside them
    long most_answers = 0;  // that a worker got in vain

    void operator+=(const Totals& more) {
        syncs += more.syncs;
        deaths += more.deaths;
        stalls += more.stalls;
        snapshots += more.snapshots;
        snapshots_gone += more.snapshots_gone;
        jumps += more.jumps;
        late += more.late;
        new_generations += more.new_generations;
        diverged += more.diverged;
        undecidable += more.undecidable;
        refused += more.refused;
        too_late += more.too_late;
        gone += more.gone;
        overtaken += more.overtaken;
        most_answers = std::max(most_answers, more.most_answers);
    }

    std::string text() const {
        return format(
            "%ld syncs, %ld deaths, %ld stalls, %ld snapshots, %ld found gone, %ld jumps, %ld times late, "
            "%ld new generations, %ld diverged, %ld undecidable, %ld refused, %ld too late for the run, "
            "%ld times gone, %ld writes overtaken, %ld answers at most",
            syncs, deaths, stalls, snapshots, snapshots_gone, jumps, late, new_generations, diverged,
            undecidable, refused, too_late, gone, overtaken, most_answers);
    }
};

// A worker has taken its global parameters from a corrupt worker before that could be noticed. From then on
// nobody can know whose are right.
struct Undecidable {};

// Nobody knows whose global parameters are right, or this worker's are wrong.
inline bool is_diverged(const LogStop& end) {
    const auto begins = [&](const char* text) { return end.why.rfind(text, 0) == 0; };
    return begins("it is unclear whose checkpoints are right") ||
           begins("no global parameters have a majority") || begins("the global parameters of worker ");
}

class World {
public:
    // With the seed's plan, as altered by `change` if given.
    World(
        uint64_t seed, const SyncLogRules& rules, bool traced,
        const std::function<void(Plan&)>& change = [](Plan&) {})
        : random(seed),
          plan(make_plan(seed, random, change)),
          rules(rules),
          traced(traced),
          schedule(make_schedule(plan)),
          store(schedule, plan.options.elastic.retain),
          workers(size_t(plan.workers)) {
        store.has_scripts = seed % 3 == 1;
        store.places = plan.options.in_line > 0 ? size_t(plan.workers) : 0;
    }

    // Throws a Violation.
    void run() {
        for (int w = 0; w < plan.workers; w++) {
            at(plan.first_start[size_t(w)], [this, w] { start(w); });
        }
        plan_disasters();
        const double deadline = plan.quiet_from + 200 + 20.0 * double(plan.steps);
        while (!is_over()) {
            if (events.empty()) { throw Violation("nothing happens any more"); }
            std::pop_heap(events.begin(), events.end());
            const Event event = std::move(events.back());
            events.pop_back();
            now = event.time;
            if (now > deadline) { throw Violation("the run has not ended: " + where_all_are()); }
            event.what();
        }
        check_end();
    }

    // Worker w dies at `time` and comes back.
    void kill_at(int w, double time, double for_seconds) {
        at(time, [this, w, for_seconds] {
            kill(w, "");
            restart_after(w, for_seconds);
        });
    }

    // The entries of all generations, by key.
    const std::map<std::string, LogEntry>& entries() const { return store.entries(); }

    // For each sync decided after `from`: how long its decider stood still at the due step after the lines of
    // all workers that it knows, except worker w, had come.
    std::map<long, double> waits_for(int w, double from) const {
        std::map<long, double> waits;
        for (const auto& [key, entry] : store.entries()) {
            if (first_written.at(key) < from) { continue; }
            const size_t slash = key.rfind('/');
            const std::string lines =
                key.substr(0, slash - strlen("entry")) + "sent/" + key.substr(slash + 1);
            double last_line = 0;
            for (const auto& [line, time] : first_written) {
                const bool is_one = line.rfind(lines + "/", 0) == 0;
                const int worker = is_one ? Incarnation::parse(line.substr(lines.size() + 1)).worker : w;
                if (worker != w && entry.knows(worker)) { last_line = std::max(last_line, time); }
            }
            const double since = first_written.at(key) - last_line;
            waits[std::atol(key.substr(slash + 1).c_str())] = std::min(double(entry.waited) / 1000, since);
        }
        return waits;
    }

    // For each snapshot that was asked for: which starts have written a part of it.
    std::map<std::string, std::set<std::string>> givers() const {
        std::map<std::string, std::set<std::string>> givers;
        for (const auto& [chunk, time] : first_written) {
            const size_t from = chunk.find("/snapshot/"), slash = chunk.rfind('/');
            if (from == std::string::npos) { continue; }
            const std::string giver = Incarnation::parse(chunk.substr(slash + 1)).text();
            givers[chunk.substr(0, slash)].insert(giver);
        }
        return givers;
    }

    // The first sync that a start has sent, counted or not. None: -1
    long first_sent(const Incarnation& who) const {
        long first = -1;
        for (const auto& [line, time] : first_written) {
            const size_t slash = line.rfind('/');
            if (line.find("/sent/") == std::string::npos || line.substr(slash + 1) != who.text()) {
                continue;
            }
            const size_t begin = line.rfind('/', slash - 1) + 1;
            const long sync = std::atol(line.substr(begin).c_str());
            first = first < 0 ? sync : std::min(first, sync);
        }
        return first;
    }

    // From the newest sync that was open when w's second start began to train, how many it took until one
    // counted it. None: it was never counted.
    std::optional<long> syncs_until_counted(int w) const {
        std::optional<long> first;
        for (const auto& [key, entry] : store.entries()) {
            const long sync = std::atol(key.substr(key.rfind('/') + 1).c_str());
            for (const Contributor& one : entry.contributors) {
                const bool is_it = one.who == Incarnation{w, 2};
                if (is_it && (!first || sync < *first)) { first = sync; }
            }
        }
        if (!first) { return std::nullopt; }
        return std::max(0L, *first - workers[size_t(w)].newest_at_return);
    }

    // Of worker w, for each sync that was decided, without beats and looks at them.
    double reads_a_sync(int w) const {
        return double(workers[size_t(w)].reads) / double(store.entries().size());
    }
    double requests_a_sync(int w) const {
        return reads_a_sync(w) + double(workers[size_t(w)].others) / double(store.entries().size());
    }

    std::vector<std::string> trace;
    Totals totals;

private:
    struct Checkpoint {
        struct Rank {
            Shard::State shard;
            std::map<long, LogShard::Encoded> sent;
            std::vector<long> positions;
            std::string generation;
        };
        std::vector<Rank> ranks;
        long step = 0;
    };

    // A fragment's next sync: since when it has been due with enough lines, and how many answers the worker
    // has had after the grace.
    struct Wait {
        long position = -1;
        double since = -1;
        long answers = 0;
    };

    struct Rank {
        std::unique_ptr<Shard> shard;
        std::unique_ptr<SyncLog> log;
        std::unique_ptr<Heartbeat> heartbeat;
        std::vector<long> checked;           // positions
        std::vector<Wait> waits;             // of each fragment
        std::map<int, LogEventKind> others;  // the last event about each
    };

    // All ranks of a worker: if one dies or stops, all do.
    struct Process {
        std::vector<Rank> ranks;
        long step = 0, done = -1;
        double stalled_until = 0;
        bool is_finishing = false, is_stranger = false;

        bool is_running() const {
            return std::all_of(ranks.begin(), ranks.end(),
                               [](const Rank& rank) { return rank.log->is_running(); });
        }
    };

    struct Worker {
        std::unique_ptr<Process> process;  // null: it is dead or has ended
        long life = 0;                     // events of an earlier life are void
        bool has_ended = false;
        std::optional<Checkpoint> checkpoint;
        long newest_at_return = -1;  // sync that was open when this start began to train
        long reads = 0, others = 0;  // requests, without beats
        Pauses pauses = pauses_of_bucket;
    };

    struct Event {
        double time;
        long number;
        std::function<void()> what;
        bool operator<(const Event& other) const {
            return time > other.time || (time == other.time && number > other.number);
        }
    };

    // A third each is like Redis, like a folder, and like a bucket. There a payload is a part of its line; in a
    // quarter of the runs it is too large for that.
    static Plan make_plan(uint64_t seed, Random& random, const std::function<void(Plan&)>& change) {
        Plan plan(random);
        plan.options.in_line = seed % 3 != 0 ? 0 : seed % 4 == 1 ? 10 : 1000;
        change(plan);
        return plan;
    }

    static SyncSchedule make_schedule(const Plan& plan) {
        std::vector<Fragment> fragments{size_t(plan.fragments)};
        for (long p = 0; p < plan.fragments; p++) {
            fragments[size_t(p)].offset = p * plan.H / plan.fragments;
        }
        return SyncSchedule(fragments, plan.H);
    }

    void at(double time, std::function<void()> what) {
        events.push_back({time, count++, std::move(what)});
        std::push_heap(events.begin(), events.end());
    }

    // In `seconds`, if the process is still alive then, and after any stall.
    void later(int w, double seconds, std::function<void()> what) {
        const long life = workers[size_t(w)].life;
        at(now + seconds, [this, w, life, what = std::move(what)] {
            Worker& worker = workers[size_t(w)];
            if (!worker.process || worker.life != life) { return; }
            const double stalled = worker.process->stalled_until - now;
            if (stalled > 0) { return later(w, stalled, what); }
            what();
        });
    }

    void tell(const std::string& text) {
        if (traced) { trace.push_back(format("%8.3f  ", now) + text); }
    }

    bool is_quiet() const { return now >= plan.quiet_from; }

    // -------------------------------------------------------------------------------------------------------
    // A process

    void start(int w) {
        Worker& worker = workers[size_t(w)];
        if (worker.process) { return; }
        worker.life++;
        worker.newest_at_return = -1;
        worker.process = std::make_unique<Process>();
        Process& process = *worker.process;
        process.is_stranger =
            !is_quiet() && !store.in(store.generation() + "/run").empty() && random.happens(plan.strangers);
        if (worker.checkpoint) { process.step = process.done = worker.checkpoint->step; }
        process.ranks.resize(size_t(plan.ranks));
        tell(
            format("worker %d is started at step %ld%s", w, process.step, worker.checkpoint ? "" : ", anew"));
        for (int r = 0; r < plan.ranks; r++) {
            start_rank(w, r);
            later(w, 0, [this, w, r] { talk(w, r); });
            later(w, 0, [this, w, r] { listen(w, r); });
            later(w, 0, [this, w, r] { beat(w, r); });
        }
        later(w, 0, [this, w] { train(w); });
    }

    void start_rank(int w, int r) {
        const Worker& worker = workers[size_t(w)];
        Rank& rank = worker.process->ranks[size_t(r)];
        rank.shard = std::make_unique<Shard>(w, r, schedule);
        rank.waits.resize(size_t(plan.fragments));
        LogStart begin;
        begin.token = format("%08x%08x", random.bits(), random.bits());
        begin.fingerprint = worker.process->is_stranger ? "other options" : "the run's options";
        begin.positions.assign(size_t(plan.fragments), 0);
        if (worker.checkpoint) {
            const Checkpoint::Rank& from = worker.checkpoint->ranks[size_t(r)];
            rank.shard->state = from.shard;
            rank.shard->sent = from.sent;
            begin.positions = from.positions;
            begin.generation = from.generation;
            begin.from_checkpoint = true;
        }
        SyncLogOptions options = plan.options;
        options.overlap = plan.overlap[size_t(w)];
        options.shard = r;
        rank.log = std::make_unique<SyncLog>(options, schedule, w, *rank.shard, rules, begin);
        rank.heartbeat = std::make_unique<Heartbeat>(0.7, plan.options.in_line > 0);
    }

    void kill(int w, const char* why) {
        tell(format("worker %d dies%s", w, why));
        totals.deaths++;
        workers[size_t(w)].process.reset();
        workers[size_t(w)].life++;
    }

    void restart_after(int w, double seconds) {
        at(now + seconds, [this, w] { start(w); });
    }

    // The answer on which two ranks of a worker agree.
    static LogTurn agreed(const LogTurn& one, const LogTurn& other) {
        for (const LogTurn::Kind kind :
             {LogTurn::stop, LogTurn::lost, LogTurn::over, LogTurn::wait, LogTurn::jump}) {
            if (one.kind == kind || other.kind == kind) { return {kind, std::max(one.step, other.step)}; }
        }
        return one;
    }

    LogTurn turn(Process& process) {
        LogTurn turn{LogTurn::go_on};
        for (Rank& rank : process.ranks) {
            turn = agreed(turn, process.is_finishing ? rank.log->finish(process.step, now)
                                                     : rank.log->turn(process.step, now));
        }
        return turn;
    }

    void train(int w) {
        Process& process = *workers[size_t(w)].process;
        const LogTurn said = turn(process);
        listen_to_events(w);
        check(w);
        switch (said.kind) {
            case LogTurn::over:
            case LogTurn::lost:
            case LogTurn::stop:
                return after_stop(w);
            case LogTurn::wait:
                return later(w, 0.3, [this, w] { train(w); });
            case LogTurn::jump:
                totals.jumps++;
                process.step = said.step;
                return later(w, 0, [this, w] { train(w); });
            case LogTurn::go_on:
                break;
        }
        if (process.is_finishing) { return end(w); }
        maybe_checkpoint(w);
        if (process.step >= plan.steps) {
            process.is_finishing = true;
            return later(w, 0, [this, w] { train(w); });
        }
        later(w, plan.step_time[size_t(w)] * random.between(0.9, 1.1), [this, w] {
            Worker& worker = workers[size_t(w)];
            if (worker.newest_at_return < 0) { worker.newest_at_return = newest_open(); }
            worker.process->step++;
            for (Rank& rank : worker.process->ranks) { rank.shard->train(worker.process->step); }
            train(w);
        });
    }

    // Worker w ends. All that was sent must have been applied.
    void end(int w) {
        Worker& worker = workers[size_t(w)];
        for (int r = 0; r < plan.ranks; r++) {
            const SyncLog& log = *worker.process->ranks[size_t(r)].log;
            for (long sync : first_missing(log.positions())) {
                if (schedule.send_step(sync) <= plan.steps) {
                    throw Violation(format("worker %d ends without sync %ld", w, sync));
                }
            }
            const std::string run = log.current_generation();
            for (const auto& [want, reason] : store.in(run + format("/%d/want", r))) {
                if (run == store.generation() && Incarnation::parse(want) == log.incarnation()) {
                    throw Violation("the wish for snapshot " + want + " is still there");
                }
            }
        }
        tell(format("worker %d ends", w));
        leave(w);
    }

    // A worker that ends in a run that the store has lost takes part in the next one.
    void leave(int w) {
        Worker& worker = workers[size_t(w)];
        worker.has_ended = worker.process->ranks[0].log->current_generation() == store.generation();
        if (!worker.has_ended) { restart_after(w, 1); }
        worker.process.reset();
        worker.life++;
    }

    std::vector<long> first_missing(const std::vector<long>& positions) const {
        std::vector<long> syncs;
        for (int p = 0; p < int(positions.size()); p++) {
            syncs.push_back(schedule.sync(p, positions[size_t(p)]));
        }
        return syncs;
    }

    // The newest sync that anybody has sent.
    long newest_open() {
        long newest = -1;
        for (const auto& [key, entry] : store.entries()) {
            newest = std::max(newest, std::atol(key.substr(key.rfind('/') + 1).c_str()));
        }
        while (store.has(store.generation() + "/0/sent/" + std::to_string(newest + 1))) { newest++; }
        return newest;
    }

    void listen_to_events(int w) {
        for (Rank& rank : workers[size_t(w)].process->ranks) {
            for (const LogEvent& event : rank.log->events()) {
                if (traced) { tell(rank.log->incarnation().text() + " " + event.text); }
                totals.snapshots += event.kind == LogEventKind::takes_snapshot;
                totals.snapshots_gone += event.kind == LogEventKind::snapshot_gone;
                totals.late += event.kind == LogEventKind::late;
                if (event.worker != w) { listen_to_change(rank, event); }
                if (event.kind == LogEventKind::applied) { check_applied(rank, event); }
            }
        }
    }

    // All workers apply the same entry: the record, or what the lines say over a bucket.
    void check_applied(const Rank& rank, const LogEvent& event) {
        const size_t r = size_t(&rank - workers[size_t(event.worker)].process->ranks.data());
        const std::string run = rank.log->current_generation() + format("/%zu", r);
        const auto decided = store.entries().find(run + "/entry/" + std::to_string(event.sync));
        const auto named = [](const LogEntry& entry) {
            std::string text;
            for (const Contributor& one : entry.contributors) { text += one.who.text() + " "; }
            return text + ";" + numbers({entry.abstained.begin(), entry.abstained.end()});
        };
        if (decided != store.entries().end() && named(decided->second) != named(*event.entry)) {
            throw Violation(format("worker %d applies another entry of sync %ld", event.worker, event.sync));
        }
    }

    // Each change must be reported once.
    void listen_to_change(Rank& rank, const LogEvent& event) {
        totals.gone += event.kind == LogEventKind::gone;
        const auto [last, is_first] = rank.others.insert({event.worker, event.kind});
        const bool is_again = !is_first && last->second == event.kind && event.kind != LogEventKind::back;
        if (is_again || is_first != (event.kind == LogEventKind::joined)) {
            throw Violation("what is told of others makes no sense: " + event.text);
        }
        last->second = event.kind;
    }

    // A worker that has stopped itself is started again from its checkpoint, which may contain the reason for
    // the stop.
    void after_stop(int w) {
        Worker& worker = workers[size_t(w)];
        for (int r = 0; r < plan.ranks; r++) {
            const Rank& rank = worker.process->ranks[size_t(r)];
            const SyncLog& log = *rank.log;
            const bool is_damaged = log.stopped().why.find("damaged") != std::string::npos;
            if (is_damaged) { throw Violation(log.stopped().why); }
            if (!log.stopped().theirs.empty() && !worker.process->is_stranger) {
                throw Violation(format("worker %d is refused, and has the options of the run", w));
            }
            totals.refused += !log.stopped().theirs.empty();
            if (log.stopped().turn == LogTurn::over) {
                const std::string run = log.current_generation() + format("/%d", r);
                if (!store.has_ended(run)) { throw Violation(log.stopped().why); }
                totals.too_late++;
                return leave(w);
            }
            if (is_diverged(log.stopped())) {
                if (!rank.shard->state.is_corrupt) { throw Violation(log.stopped().why); }
                totals.diverged++;
            }
        }
        kill(w, ", by itself");
        restart_after(w, random.between(0.5, 3));
    }

    void maybe_checkpoint(int w) {
        Process& process = *workers[size_t(w)].process;
        if (process.step % plan.checkpoint_every != 0 || process.step == process.done) { return; }
        process.done = process.step;
        auto checkpoint = std::make_shared<Checkpoint>();
        for (const Rank& rank : process.ranks) {
            checkpoint->ranks.push_back(
                {rank.shard->state, rank.shard->sent, rank.log->positions(), rank.log->current_generation()});
        }
        checkpoint->step = process.step;
        later(w, random.between(0.1, 1), [this, w, checkpoint] {
            workers[size_t(w)].checkpoint = *checkpoint;
            for (int r = 0; r < plan.ranks; r++) {
                workers[size_t(w)].process->ranks[size_t(r)].log->checkpointed(
                    checkpoint->ranks[size_t(r)].positions);
            }
        });
    }

    // -------------------------------------------------------------------------------------------------------
    // The store and the ways there

    double way(int w) { return plan.delay[size_t(w)] * random.between(0.3, random.happens(0.02) ? 20 : 1.5); }

    void talk(int w, int r) {
        Rank& rank = workers[size_t(w)].process->ranks[size_t(r)];
        const std::vector<StoreRequest> requests = rank.log->requests(now);
        listen_to_events(w);
        if (requests.empty()) {
            return later(w, std::clamp(rank.log->rest(now), 0.02, 0.25), [this, w, r] { talk(w, r); });
        }
        maybe_stall_over_snapshot(w, requests);
        count_requests(w, requests);
        travel(w, requests, [this, w, r](const std::vector<StoreAnswer>& answers) {
            workers[size_t(w)].process->ranks[size_t(r)].log->answer(answers, now);
            listen_to_events(w);
            if (!answers.back().lost) { check_waits(w, r); }
            talk(w, r);
        });
    }

    void listen(int w, int r) {
        SyncLog& log = *workers[size_t(w)].process->ranks[size_t(r)].log;
        const std::vector<StoreRequest> requests = log.listen();
        if (requests.empty()) {
            return later(w, 0.05, [this, w, r] { listen(w, r); });
        }
        const double patience = log.patience, pause = std::min(workers[size_t(w)].pauses.pause, patience);
        later(w, plan.options.in_line > 0 ? pause : 0, [this, w, r, requests, patience] {
            count_requests(w, requests);
            travel(w, requests, [this, w, r](const std::vector<StoreAnswer>& answers) {
                workers[size_t(w)].process->ranks[size_t(r)].log->hear(answers, now);
                listen_to_events(w);
                later(w, answers.back().lost ? 0.5 : 0, [this, w, r] { listen(w, r); });
            }, patience);
        });
    }

    void beat(int w, int r) {
        Rank& rank = workers[size_t(w)].process->ranks[size_t(r)];
        const std::vector<StoreRequest> requests = rank.heartbeat->requests(rank.log->pulse(), now);
        if (requests.empty()) {
            return later(w, 0.4, [this, w, r] { beat(w, r); });
        }
        travel(w, requests, [this, w, r, from = now](const std::vector<StoreAnswer>& answers) {
            Rank& rank = workers[size_t(w)].process->ranks[size_t(r)];
            if (!rank.heartbeat->answer(answers.back())) { rank.log->check_generation(answers.back()); }
            rank.log->hear_beats(answers, from, now);
            beat(w, r);
        });
    }

    // Requests that go out together, on their way to the store and back.
    struct Batch {
        int w;
        long life;  // of their sender
        std::vector<StoreRequest> requests;
        std::vector<StoreAnswer> answers;
        size_t lost_from;  // answers
        size_t done;       // requests that reach the store, even if their answers are lost
        std::function<void(const std::vector<StoreAnswer>&)> then;
        double patience;   // seconds that it waits for a decision, or a line
        std::vector<StoreAnswer> overtook = {};  // reads that arrived before the write that they travel with
    };

    // Requests that are on their way arrive even if their sender dies.
    void travel(int w, const std::vector<StoreRequest>& requests,
                std::function<void(const std::vector<StoreAnswer>&)> then, double patience = 0) {
        maybe_fail(w);
        const bool lost = !is_quiet() && random.happens(plan.losses);
        const long all = long(requests.size()), lost_from = lost ? random.among(0, all - 1) : all;
        const long done = random.happens(0.5) ? lost_from : random.among(lost_from, all);
        auto batch = std::make_shared<Batch>(Batch{
            w, workers[size_t(w)].life, requests, {}, size_t(lost_from), size_t(done), std::move(then), patience});
        at(now + way(w), [this, batch] { arrive(batch); });
    }

    bool is_alive(const Batch& batch) const {
        const Worker& worker = workers[size_t(batch.w)];
        return worker.process && worker.life == batch.life;
    }

    static bool is_read(const StoreRequest& one) {
        return one.kind == StoreRequest::get || one.kind == StoreRequest::decision;
    }

    bool is_there(const Batch& batch) {
        return std::any_of(batch.requests.begin(), batch.requests.end(), [this](const StoreRequest& one) {
            return is_read(one) && one.folder != "run" && store.perform(one).found;
        });
    }

    // To a bucket a write and the reads after it travel at the same time, and may arrive in any order.
    void let_reads_overtake(Batch& batch) {
        const size_t write = batch.answers.size();
        const auto kind = batch.requests[write].kind;
        const bool is_write = kind == StoreRequest::put || kind == StoreRequest::put_if_absent;
        batch.overtook.clear();
        if (plan.options.in_line == 0 || !is_write || random.happens(0.5)) { return; }
        for (size_t i = write + 1; i < batch.done && is_read(batch.requests[i]); i++) {
            batch.overtook.push_back(store.perform(batch.requests[i]));
        }
        totals.overtaken += !batch.overtook.empty();
    }

    StoreAnswer perform(Batch& batch, const StoreRequest& request) {
        if (is_read(request) && !batch.overtook.empty()) {
            const StoreAnswer answer = batch.overtook.front();
            batch.overtook.erase(batch.overtook.begin());
            return answer;
        }
        let_reads_overtake(batch);
        return store.perform(request);
    }

    void count_requests(int w, const std::vector<StoreRequest>& requests) {
        for (const StoreRequest& one : requests) {
            if (one.folder.find("/beat") != std::string::npos) { continue; }
            (is_read(one) ? workers[size_t(w)].reads : workers[size_t(w)].others)++;
        }
    }

    // Seconds until a question whose answer is not there yet arrives again (LogStore::await).
    double pause_of(const Batch& batch) {
        if (plan.options.in_line == 0) { return 0.05; }
        count_requests(batch.w, batch.requests);
        const double round_trip = 2 * way(batch.w);
        return round_trip + workers[size_t(batch.w)].pauses.after(false);
    }

    // The next request of a batch arrives. Requests and failures of others come in between.
    void arrive(const std::shared_ptr<Batch>& batch) {
        const size_t next = batch->answers.size();
        if (batch->patience > 0 && !is_there(*batch) && now >= store_away_until && is_alive(*batch)) {
            const double pause = pause_of(*batch);
            batch->patience -= pause;
            if (batch->patience <= 0) { workers[size_t(batch->w)].pauses.begin_again(); }
            return at(now + pause, [this, batch] { arrive(batch); });
        }
        if (batch->patience > 0) { workers[size_t(batch->w)].pauses.after(true); }
        batch->patience = 0;
        if (now < store_away_until) { batch->done = batch->lost_from = next; }
        if (next < batch->done) {
            const StoreRequest& request = batch->requests[next];
            batch->answers.push_back(perform(*batch, request));
            batch->answers.back().lost = next >= batch->lost_from;
            trace_request(batch->w, request, batch->answers.back());
            const bool decides = request.kind == StoreRequest::decide;
            if (request.kind == StoreRequest::put_if_absent || decides) {
                const std::string folder = request.folder + (decides ? "/entry" : "");
                const bool is_there = store.in(folder).count(request.name) != 0;
                if (is_there) { first_written.insert({folder + "/" + request.name, now}); }
                if (store.places > 0) { note_line(folder, request.name); }
            }
        }
        if (is_alive(*batch)) { maybe_fail(batch->w); }
        if (batch->answers.size() == batch->done) { return come_back(batch); }
        const bool is_torn = !is_alive(*batch) && random.happens(0.5);
        if (!is_torn) {
            at(now + 0.1 * way(batch->w), [this, batch] { arrive(batch); });
        }
    }

    // Over a bucket a line lies under its worker's number, and the last one decides.
    void note_line(const std::string& folder, const std::string& name) {
        const size_t sent = folder.find("/sent/");
        if (sent == std::string::npos) { return; }
        const Incarnation who = SimulatedStore::written(store.in(folder)[name]).first;
        if (std::to_string(who.worker) == name) { first_written.insert({folder + "/" + who.text(), now}); }
        const std::string entry = folder.substr(0, sent) + "/entry/" + folder.substr(sent + strlen("/sent/"));
        if (store.entries().count(entry)) { first_written.insert({entry, now}); }
    }

    void come_back(const std::shared_ptr<Batch>& batch) {
        if (!is_alive(*batch)) { return; }
        StoreAnswer lost;
        lost.lost = true;
        batch->answers.resize(batch->requests.size(), lost);
        const double back = batch->answers.back().lost ? random.between(0.2, 1.5) : way(batch->w);
        later(batch->w, back, [batch] { batch->then(batch->answers); });
    }

    void trace_request(int w, const StoreRequest& request, const StoreAnswer& answer) {
        if (!traced || request.folder.find("/beat") != std::string::npos) { return; }
        const char* kinds[] = {"get", "put", "put_if_absent", "remove", "list", "folders", "decide", "decision"};
        const bool is_text = request.folder.find("/payload") == std::string::npos &&
                             request.folder.find("/snapshot") == std::string::npos;
        std::string text = format("  worker %d: %s %s %s", w, kinds[request.kind], request.folder.c_str(),
                                  request.name.c_str());
        const auto shown = [](const std::string& value) { return value.substr(0, value.find('\n')); };
        if (is_text) { text += " " + shown(request.value) + " -> " + shown(answer.value); }
        for (const auto& [name, value] : answer.listing) {
            text += " [" + name + (is_text ? ": " + shown(value) : "") + "]";
        }
        tell(text + (answer.lost ? " (answer lost)" : ""));
    }

    // Called between any two requests, and between a request and its answer.
    void maybe_fail(int w) {
        if (is_quiet() || !workers[size_t(w)].process) { return; }
        if (random.happens(plan.crashes)) {
            lose_disk(w);
            kill(w, "");
            restart_after(w, random.between(0.2, 10));
        } else if (random.happens(plan.stalls)) {
            stall(w, random.between(0.5, random.happens(0.5) ? 3 : 12));
        }
    }

    void stall(int w, double seconds) {
        totals.stalls++;
        tell(format("worker %d stalls for %.1f s", w, seconds));
        workers[size_t(w)].process->stalled_until = now + seconds;
    }

    // Stalls a worker that reads a snapshot, so that it is taken for dead and the snapshot is removed, which
    // seldom happens by itself. This happens in the quiet phase, too, where most snapshots are read.
    void maybe_stall_over_snapshot(int w, const std::vector<StoreRequest>& requests) {
        const auto is_read = [](const StoreRequest& one) {
            return one.kind == StoreRequest::get && one.folder.find("/snapshot/") != std::string::npos;
        };
        const bool reads = std::any_of(requests.begin(), requests.end(), is_read);
        if (plan.stalls > 0 && reads && random.happens(0.1)) { stall(w, random.between(4, 12)); }
    }

    // At most one disk in a run: the log promises to survive that.
    void lose_disk(int w) {
        int others = 0;
        for (int v = 0; v < plan.workers; v++) {
            others += v != w && workers[size_t(v)].process && workers[size_t(v)].process->is_running();
        }
        const bool may_be = plan.mode == Plan::disks_lost && !has_lost_disk && others >= plan.min_workers;
        if (may_be && random.happens(0.5)) {
            has_lost_disk = true;
            workers[size_t(w)].checkpoint.reset();
            tell(format("worker %d loses its disk", w));
        }
    }

    void kill_all() {
        for (int w = 0; w < plan.workers; w++) {
            if (workers[size_t(w)].process) {
                kill(w, ", as all do");
                restart_after(w, random.between(0.2, 10));
            }
        }
    }

    void plan_disasters() {
        if (plan.mode == Plan::none) { return; }
        const double when = random.between(0.3, 1) * plan.quiet_from;
        if (random.happens(0.3)) {
            const double until = when + random.between(0.5, 8);
            at(when, [this, until] {
                tell("the store is away");
                store_away_until = until;
            });
        }
        if (plan.mode == Plan::all_die || (plan.mode == Plan::store_emptied && random.happens(0.4))) {
            at(random.between(0.3, 1) * plan.quiet_from, [this] { kill_all(); });
        }
        at(when, [this] {
            if (plan.mode == Plan::store_emptied) {
                tell("the store loses its data");
                store.empty();
                totals.new_generations++;
                for (int w = 0; w < plan.workers; w++) {
                    if (std::exchange(workers[size_t(w)].has_ended, false)) { restart_after(w, 1); }
                }
            }
            const int w = int(random.among(0, plan.workers - 1));
            if (plan.mode == Plan::corruption && workers[size_t(w)].process) {
                tell(format("worker %d: a bit of its global parameters flips", w));
                workers[size_t(w)].process->ranks[0].shard->corrupt();
            }
        });
    }

    // -------------------------------------------------------------------------------------------------------
    // What must hold

    // At equal positions of one run all workers hold the same bits. Strangers take no part in it.
    void check(int w) {
        Process& process = *workers[size_t(w)].process;
        for (int r = 0; r < plan.ranks; r++) {
            Rank& rank = process.ranks[size_t(r)];
            if (process.is_stranger && rank.log->incarnation().number > 0) {
                throw Violation(format("worker %d takes part, with other options than the run's", w));
            }
            if (rank.shard->was_misled) { throw Undecidable(); }
            if (rank.shard->state.is_corrupt || !rank.log->is_running()) { continue; }
            const std::vector<long> positions = rank.log->positions();
            if (positions == rank.checked) { continue; }
            rank.checked = positions;
            check_hashes(w, r);
        }
    }

    void check_hashes(int w, int r) {
        const Rank& rank = workers[size_t(w)].process->ranks[size_t(r)];
        for (int p = 0; p < int(rank.checked.size()); p++) {
            const long position = rank.checked[size_t(p)];
            const std::string place = rank.log->current_generation() + format(" %d %d %ld", r, p, position);
            const uint64_t hash = rank.shard->hash(p);
            const auto [known, is_new] = hashes.insert({place, {hash, w}});
            if (known->second.first != hash) {
                throw Violation(format("workers %d and %d differ in fragment %d after %ld syncs", w,
                                       known->second.second, p, position));
            }
            totals.syncs += is_new;
        }
    }

    // A worker with a due sync and enough lines waits for the grace, and then only for what it has to read
    // itself. (While it is unknown which worker has diverged, all wait.)
    void check_waits(int w, int r) {
        Process& process = *workers[size_t(w)].process;
        Rank& rank = process.ranks[size_t(r)];
        const std::string generation = rank.log->current_generation();
        const std::string run = generation + format("/%d", r);
        if (plan.mode == Plan::corruption || generation != store.generation() || !rank.log->is_running()) {
            return;
        }
        const std::vector<long> positions = rank.log->positions();
        for (int p = 0; p < int(positions.size()); p++) {
            Wait& wait = rank.waits[size_t(p)];
            const long sync = schedule.sync(p, positions[size_t(p)]);
            const bool is_due = schedule.send_step(sync) + plan.overlap[size_t(w)] <= process.step;
            if (wait.position != positions[size_t(p)] || !is_due) { wait = {positions[size_t(p)], -1, 0}; }
            if (!is_due || (wait.since < 0 && !has_enough(run, sync))) { continue; }
            if (wait.since < 0) { wait.since = now; }
            wait.answers += now > wait.since + plan.options.elastic.grace;
            totals.most_answers = std::max(totals.most_answers, wait.answers);
            if (wait.answers > 250) {
                throw Violation(format("worker %d waits for sync %ld without need", w, sync));
            }
        }
    }

    bool has_enough(const std::string& run, long sync) {
        return int(store.senders(run + "/sent/" + std::to_string(sync)).size()) >= plan.min_workers;
    }

    bool is_over() const {
        return (is_quiet() || events.empty()) &&
               std::all_of(workers.begin(), workers.end(),
                           [](const Worker& worker) { return worker.has_ended; });
    }

    std::string where_all_are() const {
        std::string text;
        for (size_t w = 0; w < workers.size(); w++) {
            const auto& process = workers[w].process;
            const char* without = workers[w].has_ended ? "has ended" : "is dead";
            text += !process ? format("worker %zu %s; ", w, without)
                             : format("worker %zu is at step %ld%s; ", w, process->step,
                                      process->is_running() ? "" : ", waiting for the run");
        }
        return text;
    }

    void check_end() {
        long counted = 0;
        for (const auto& [key, entry] : store.entries()) { counted += !entry.contributors.empty(); }
        if (counted == 0) { throw Violation("no sync counted anybody"); }
    }

    Random random;
    const Plan plan;
    const SyncLogRules& rules;
    const bool traced;
    const SyncSchedule schedule;
    SimulatedStore store;
    std::vector<Worker> workers;
    std::vector<Event> events;  // a heap with the earliest event on top
    std::map<std::string, std::pair<uint64_t, int>> hashes;
    std::map<std::string, double> first_written;  // set if absent: when, by folder and name
    double now = 0, store_away_until = 0;
    long count = 0;
    bool has_lost_disk = false;
};

// The violation; empty: there was none.
inline std::string run(uint64_t seed, const SyncLogRules& rules, std::vector<std::string>* trace = nullptr,
                       Totals* totals = nullptr) {
    World world(seed, rules, trace != nullptr);
    std::string wrong;
    try {
        world.run();
    } catch (const Violation& violation) { wrong = violation.what(); } catch (const Undecidable&) {
        world.totals.undecidable++;
    } catch (const std::logic_error& error) { wrong = error.what(); }
    if (trace) { *trace = world.trace; }
    if (totals) { *totals += world.totals; }
    return wrong;
}

}  // namespace simulation
