// A deterministic simulation of the sync log: workers of their own speeds, a store with delays and lost
// connections, crashes, stalls, restarts and newcomers, all drawn from one seed, with what must hold checked
// after every event. Time is a number: a run of a minute takes milliseconds, and a seed that fails fails
// again.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>

#include "dev/test/simulated_store.h"

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

// Small numbers that go the way of a fragment's: any difference in who was counted, in which order or on what
// base shows in the hash at once.
class Shard : public LogShard {
public:
    using Values = std::vector<float>;
    struct State {
        std::vector<Values> global, momentum, local, residual, residual_before;
        std::vector<uint64_t> tokens_at_send;
        uint64_t tokens = 0;
        bool is_corrupt = false;  // known to the simulation alone
    };

    Shard(int worker, const SyncSchedule& schedule) : worker(worker), schedule(schedule) {
        const size_t P = size_t(schedule.fragments());
        state.global.assign(P, Values(values, 1.0f));
        state.local = state.global;
        for (auto* one : {&state.momentum, &state.residual, &state.residual_before}) {
            one->assign(P, Values(values, 0.0f));
        }
        state.tokens_at_send.assign(P, 0);
    }

    void train(long step) {
        Random noise(uint64_t(step) * 64 + uint64_t(worker) + 1);
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
        const uint64_t header[3] = {uint64_t(sync), out.hash, out.tokens};
        out.payload.assign(reinterpret_cast<const char*>(header), sizeof header);
        append(out.payload, codes);
    }

    const Encoded* encoded(long sync) override { return &sent.at(sync); }

    void apply(long sync, const std::vector<Contribution>& contributions, bool counted) override {
        const size_t p = size_t(schedule.fragment(sync));
        const Values before = state.global[p];
        if (!contributions.empty()) { step(p, sync, contributions); }
        for (size_t i = 0; i < size_t(values); i++) {
            float& local = state.local[p][i];
            const float global = state.global[p][i];
            local = counted ? 0.5f * local + 0.5f * global : local + (global - before[i]);
        }
        if (sent.erase(sync) && !counted) { state.residual[p] = state.residual_before[p]; }
    }

    std::string snapshot() override {
        std::string bytes;
        for (size_t p = 0; p < state.global.size(); p++) {
            append(bytes, state.global[p]);
            append(bytes, state.momentum[p]);
        }
        return bytes + (state.is_corrupt ? "1" : "0");
    }

    void load(const std::string& snapshot) override {
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
        state.local = state.global;
        sent.clear();
    }

    State state;
    std::map<long, Encoded> sent;
    bool was_misled = false;  // by a snapshot of one that is corrupt

private:
    static void append(std::string& bytes, const Values& from) {
        bytes.append(reinterpret_cast<const char*>(from.data()), from.size() * sizeof(float));
    }

    void step(size_t p, long sync, const std::vector<Contribution>& contributions) {
        Values mean(values, 0.0f);
        float sum = 0;
        int last = -1;
        for (const Contribution& one : contributions) {
            uint64_t header[3];
            Values codes(values);
            if (one.payload.size() != sizeof header + sizeof(float) * values || one.worker <= last) {
                throw Violation("contributions of no such size, or out of order");
            }
            last = one.worker;
            std::memcpy(header, one.payload.data(), sizeof header);
            std::memcpy(codes.data(), one.payload.data() + sizeof header, sizeof(float) * values);
            if (header[0] != uint64_t(sync)) { throw Violation("a payload of another sync is applied"); }
            if (header[1] != hash(int(p)) && !state.is_corrupt) {
                throw Violation("a payload that stands on another hash is applied");
            }
            sum += float(header[2]);
            for (size_t i = 0; i < size_t(values); i++) {
                mean[i] = std::fmaf(float(header[2]), codes[i], mean[i]);
            }
        }
        for (size_t i = 0; i < size_t(values); i++) {
            float& momentum = state.momentum[p][i];
            momentum = std::fmaf(0.9f, momentum, mean[i] / sum);
            state.global[p][i] -= 0.4f * std::fmaf(0.9f, momentum, mean[i] / sum);
        }
    }

    const int worker;
    const SyncSchedule& schedule;
};

// What a run is like, from its seed.
struct Plan {
    enum Mode { plain, all_die, store_emptied, disks_lost, corruption, modes, none };
    Mode mode;
    int workers, min_workers;
    long H, fragments, steps, checkpoint_every;
    std::vector<long> overlap;
    std::vector<double> step_time, delay, first_start;
    double crashes, stalls, losses;  // probabilities of each, at a request
    double quiet_from;               // no faults any more
    SyncLogOptions options;

    explicit Plan(Random& random) {
        mode = Mode(random.among(0, modes - 1));
        workers = int(random.among(mode == corruption ? 3 : 2, 5));
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
        options.workers = workers;
        options.min_workers = min_workers;
        options.max_lag = random.among(0, 2 * H);
        options.retain = random.among(1, 4);
        options.chunk = size_t(random.among(10, 40));
        options.grace = random.between(1, 4);
        options.expiry = 3;
        options.poll = 0.3;
        options.retry = 0.4;
    }
};

// Three workers that do the same and do not fail by themselves.
inline void make_even(Plan& plan) {
    plan.mode = Plan::none;
    plan.workers = plan.options.workers = 3;
    plan.min_workers = plan.options.min_workers = 2;
    plan.steps = 40;
    plan.overlap.assign(3, std::min(1L, plan.H - 1));
    plan.step_time.assign(3, 2);
    plan.delay.assign(3, 0.02);
    plan.first_start.assign(3, 0);
    plan.crashes = plan.stalls = plan.losses = 0;
}

// What happened, over all runs.
struct Totals {
    long syncs = 0, deaths = 0, stalls = 0, snapshots = 0, snapshots_gone = 0, jumps = 0, late = 0;
    long new_generations = 0, diverged = 0, undecidable = 0;
    long most_answers = 0;  // that a worker had in vain

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
        most_answers = std::max(most_answers, more.most_answers);
    }

    std::string text() const {
        return format(
            "%ld syncs, %ld deaths, %ld stalls, %ld snapshots, %ld found gone, %ld jumps, %ld times late, "
            "%ld new generations, %ld diverged, %ld undecidable, %ld answers at most",
            syncs, deaths, stalls, snapshots, snapshots_gone, jumps, late, new_generations, diverged,
            undecidable, most_answers);
    }
};

// A worker has taken its global parameters from one whose own are wrong, before that could show: from here on
// nobody can know which are right.
struct Undecidable {};

class World {
public:
    // With the seed's plan, or what `change` makes of it.
    World(
        uint64_t seed, const SyncLogRules& rules, bool traced,
        const std::function<void(Plan&)>& change = [](Plan&) {})
        : random(seed),
          plan(make_plan(random, change)),
          rules(rules),
          traced(traced),
          schedule(make_schedule(plan)),
          store(schedule, plan.options.retain),
          workers(size_t(plan.workers)) {}

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

    // Of all generations, by key.
    const std::map<std::string, LogEntry>& entries() const { return store.entries(); }

    // From the newest sync that was open when w's second start began to train, how many it took until one
    // counted it. None: it was never counted.
    std::optional<long> syncs_until_counted(int w) const {
        const Process& process = *workers[size_t(w)].process;
        std::optional<long> first;
        for (const auto& [key, entry] : store.entries()) {
            const long sync = std::atol(key.substr(key.rfind('/') + 1).c_str());
            for (const Contributor& one : entry.contributors) {
                const bool is_it = one.who == Incarnation{w, 2};
                if (is_it && (!first || sync < *first)) { first = sync; }
            }
        }
        if (!first) { return std::nullopt; }
        return std::max(0L, *first - process.newest_at_return);
    }

    std::vector<std::string> trace;
    Totals totals;

private:
    struct Checkpoint {
        Shard::State shard;
        std::map<long, LogShard::Encoded> sent;
        std::vector<long> positions;
        std::string generation;
        long step = 0;
    };

    // A fragment's next sync, where it is due: for how long, and how many answers its worker has had since
    // there was no reason left to wait.
    struct Wait {
        long position = -1;
        double since = -1;
        long answers = 0;
    };

    struct Process {
        std::unique_ptr<Shard> shard;
        std::unique_ptr<SyncLog> log;
        std::unique_ptr<Heartbeat> heartbeat;
        long step = 0, done = -1;
        double stalled_until = 0;
        bool is_done = false;
        std::vector<long> checked;   // positions
        std::vector<Wait> waits;     // of each fragment
        long newest_at_return = -1;  // sync that was open when this start began to train
    };

    struct Worker {
        std::unique_ptr<Process> process;  // none: dead
        long life = 0;                     // events of an earlier one are void
        std::optional<Checkpoint> checkpoint;
    };

    struct Event {
        double time;
        long number;
        std::function<void()> what;
        bool operator<(const Event& other) const {
            return time > other.time || (time == other.time && number > other.number);
        }
    };

    static Plan make_plan(Random& random, const std::function<void(Plan&)>& change) {
        Plan plan(random);
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

    // In `seconds`, if the process still lives, and when it is not stopped.
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
        worker.process = std::make_unique<Process>();
        Process& process = *worker.process;
        process.shard = std::make_unique<Shard>(w, schedule);
        process.waits.resize(size_t(plan.fragments));
        LogStart begin;
        begin.token = format("%08x%08x", random.bits(), random.bits());
        begin.positions.assign(size_t(plan.fragments), 0);
        if (worker.checkpoint) {
            const Checkpoint& from = *worker.checkpoint;
            process.shard->state = from.shard;
            process.shard->sent = from.sent;
            process.step = process.done = from.step;
            begin.positions = from.positions;
            begin.generation = from.generation;
            begin.from_checkpoint = true;
        }
        SyncLogOptions options = plan.options;
        options.overlap = plan.overlap[size_t(w)];
        process.log = std::make_unique<SyncLog>(options, schedule, w, *process.shard, rules, begin);
        process.heartbeat = std::make_unique<Heartbeat>(0.7);
        tell(
            format("worker %d is started at step %ld%s", w, process.step, worker.checkpoint ? "" : ", anew"));
        later(w, 0, [this, w] { talk(w); });
        later(w, 0, [this, w] { beat(w); });
        later(w, 0, [this, w] { train(w); });
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

    void train(int w) {
        Process& process = *workers[size_t(w)].process;
        const LogTurn turn = process.log->turn(process.step, now);
        listen(w);
        check(w);
        switch (turn.kind) {
            case LogTurn::stop:
                return after_stop(w);
            case LogTurn::wait:
                return later(w, 0.3, [this, w] { train(w); });
            case LogTurn::jump:
                totals.jumps++;
                process.step = turn.step;
                return later(w, 0, [this, w] { train(w); });
            case LogTurn::go_on:
                break;
        }
        maybe_checkpoint(w);
        if (process.step >= plan.steps) {
            process.is_done = true;
            return later(w, 0.3, [this, w] { train(w); });
        }
        later(w, plan.step_time[size_t(w)] * random.between(0.9, 1.1), [this, w] {
            Process& process = *workers[size_t(w)].process;
            if (process.newest_at_return < 0) { process.newest_at_return = newest_open(); }
            process.shard->train(++process.step);
            train(w);
        });
    }

    // The newest sync that anybody has sent.
    long newest_open() {
        long newest = -1;
        for (const auto& [key, entry] : store.entries()) {
            newest = std::max(newest, std::atol(key.substr(key.rfind('/') + 1).c_str()));
        }
        while (store.has(store.generation() + "/sent/" + std::to_string(newest + 1))) { newest++; }
        return newest;
    }

    void listen(int w) {
        for (const std::string& news : workers[size_t(w)].process->log->news()) {
            tell(news);
            const auto says = [&](const char* text) { return news.find(text) != std::string::npos; };
            totals.snapshots += says("goes on from a snapshot");
            totals.snapshots_gone += says("finds its snapshot gone");
            totals.late += says("was late");
        }
    }

    // A worker that has stopped itself is started again; one that has diverged trusts its checkpoint no more.
    void after_stop(int w) {
        Worker& worker = workers[size_t(w)];
        const SyncLog& log = *worker.process->log;
        if (log.why_stopped().find("damaged") != std::string::npos) { throw Violation(log.why_stopped()); }
        if (log.has_diverged()) {
            if (!worker.process->shard->state.is_corrupt) { throw Violation(log.why_stopped()); }
            worker.checkpoint.reset();
            totals.diverged++;
        }
        kill(w, ", by itself");
        restart_after(w, random.between(0.5, 3));
    }

    void maybe_checkpoint(int w) {
        Process& process = *workers[size_t(w)].process;
        if (process.step % plan.checkpoint_every != 0 || process.step == process.done) { return; }
        process.done = process.step;
        auto checkpoint = std::make_shared<Checkpoint>();
        checkpoint->shard = process.shard->state;
        checkpoint->sent = process.shard->sent;
        checkpoint->positions = process.log->positions();
        checkpoint->generation = process.log->current_generation();
        checkpoint->step = process.step;
        later(w, random.between(0.1, 1), [this, w, checkpoint] {
            workers[size_t(w)].checkpoint = *checkpoint;
            workers[size_t(w)].process->log->checkpointed(checkpoint->positions);
        });
    }

    // -------------------------------------------------------------------------------------------------------
    // The store and the ways there

    double way(int w) { return plan.delay[size_t(w)] * random.between(0.3, random.happens(0.02) ? 20 : 1.5); }

    void talk(int w) {
        Process& process = *workers[size_t(w)].process;
        const std::optional<StoreRequest> request = process.log->request(now);
        listen(w);
        if (!request) {
            return later(w, 0.25, [this, w] { talk(w); });
        }
        travel(w, *request, [this, w](const StoreAnswer& answer) {
            workers[size_t(w)].process->log->answer(answer, now);
            listen(w);
            if (!answer.lost) { check_waits(w); }
            talk(w);
        });
    }

    void beat(int w) {
        Process& process = *workers[size_t(w)].process;
        const std::optional<StoreRequest> request = process.heartbeat->request(*process.log, w, now);
        if (!request) {
            return later(w, 0.4, [this, w] { beat(w); });
        }
        travel(w, *request, [this, w](const StoreAnswer& answer) {
            Process& process = *workers[size_t(w)].process;
            process.heartbeat->answer(answer, *process.log);
            beat(w);
        });
    }

    // A request that is on its way arrives even where its sender dies meanwhile.
    void travel(int w, const StoreRequest& request, std::function<void(const StoreAnswer&)> then) {
        maybe_fail(w);
        const bool lost = !is_quiet() && random.happens(plan.losses);
        const bool lost_on_the_way = lost && random.happens(0.5);
        const double there = way(w), back = lost ? random.between(0.2, 1.5) : way(w);
        const long life = workers[size_t(w)].life;
        at(now + there, [=, then = std::move(then)] {
            StoreAnswer answer;
            answer.lost = true;
            if (!lost_on_the_way && now >= store_away_until) {
                answer = store.perform(request);
                answer.lost = lost;
                trace_request(w, request, answer);
            }
            if (workers[size_t(w)].life != life || !workers[size_t(w)].process) { return; }
            maybe_fail(w);
            if (workers[size_t(w)].process) {
                later(w, back, [then, answer] { then(answer); });
            }
        });
    }

    void trace_request(int w, const StoreRequest& request, const StoreAnswer& answer) {
        if (!traced || request.folder.find("/beat") != std::string::npos) { return; }
        const char* kinds[] = {"get", "put", "put_if_absent", "remove", "list", "folders"};
        const bool is_text = request.folder.find("/payload") == std::string::npos &&
                             request.folder.find("/snapshot") == std::string::npos;
        std::string text = format("  worker %d: %s %s %s", w, kinds[request.kind], request.folder.c_str(),
                                  request.name.c_str());
        if (is_text) { text += " " + request.value + " -> " + answer.value; }
        for (const auto& [name, value] : answer.listing) {
            text += " [" + name + (is_text ? ": " + value : "") + "]";
        }
        tell(text + (answer.lost ? " (answer lost)" : ""));
    }

    // Between any two requests, and between a request and its answer.
    void maybe_fail(int w) {
        if (is_quiet() || !workers[size_t(w)].process) { return; }
        if (random.happens(plan.crashes)) {
            lose_disk(w);
            kill(w, "");
            restart_after(w, random.between(0.2, 10));
        } else if (random.happens(plan.stalls)) {
            totals.stalls++;
            const double seconds = random.between(0.5, random.happens(0.5) ? 3 : 12);
            tell(format("worker %d stalls for %.1f s", w, seconds));
            workers[size_t(w)].process->stalled_until = now + seconds;
        }
    }

    // One in a run: it is what the log promises to survive.
    void lose_disk(int w) {
        int others = 0;
        for (int v = 0; v < plan.workers; v++) {
            others += v != w && workers[size_t(v)].process && workers[size_t(v)].process->log->is_running();
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
            }
            const int w = int(random.among(0, plan.workers - 1));
            if (plan.mode == Plan::corruption && workers[size_t(w)].process) {
                tell(format("worker %d: a bit of its global parameters flips", w));
                workers[size_t(w)].process->shard->corrupt();
            }
        });
    }

    // -------------------------------------------------------------------------------------------------------
    // What must hold

    // At equal positions of one run all hold the same bits.
    void check(int w) {
        Process& process = *workers[size_t(w)].process;
        if (process.shard->was_misled) { throw Undecidable(); }
        if (process.shard->state.is_corrupt || !process.log->is_running()) { return; }
        const std::vector<long> positions = process.log->positions();
        if (positions == process.checked) { return; }
        process.checked = positions;
        for (int p = 0; p < int(positions.size()); p++) {
            const std::string place =
                process.log->current_generation() + format(" %d %ld", p, positions[size_t(p)]);
            const uint64_t hash = process.shard->hash(p);
            const auto [known, is_new] = hashes.insert({place, {hash, w}});
            if (known->second.first != hash) {
                throw Violation(format("workers %d and %d differ in fragment %d after %ld syncs", w,
                                       known->second.second, p, positions[size_t(p)]));
            }
            totals.syncs += is_new;
        }
    }

    // Who is due and finds enough lines waits for the grace, and then for nobody: for no more than what it
    // has to read by itself. (Where it is unknown who has diverged, all wait.)
    void check_waits(int w) {
        Process& process = *workers[size_t(w)].process;
        const std::string run = process.log->current_generation();
        if (plan.mode == Plan::corruption || run != store.generation() || !process.log->is_running()) {
            return;
        }
        const std::vector<long> positions = process.log->positions();
        for (int p = 0; p < int(positions.size()); p++) {
            Wait& wait = process.waits[size_t(p)];
            const long sync = schedule.sync(p, positions[size_t(p)]);
            const bool is_due = schedule.send_step(sync) + plan.overlap[size_t(w)] <= process.step;
            if (wait.position != positions[size_t(p)] || !is_due) { wait = {positions[size_t(p)], -1, 0}; }
            if (!is_due || (wait.since < 0 && !has_enough(run, sync))) { continue; }
            if (wait.since < 0) { wait.since = now; }
            wait.answers += now > wait.since + plan.options.grace;
            totals.most_answers = std::max(totals.most_answers, wait.answers);
            if (wait.answers > 250) {
                throw Violation(format("worker %d waits for sync %ld without need", w, sync));
            }
        }
    }

    bool has_enough(const std::string& run, long sync) {
        std::set<int> there;
        for (const auto& [who, line] : store.in(run + "/sent/" + std::to_string(sync))) {
            there.insert(Incarnation::parse(who).worker);
        }
        return int(there.size()) >= plan.min_workers;
    }

    bool is_over() const {
        if (!is_quiet()) { return false; }
        for (const Worker& worker : workers) {
            if (!worker.process || !worker.process->is_done || !worker.process->log->is_running() ||
                !worker.process->log->is_idle()) {
                return false;
            }
        }
        return true;
    }

    std::string where_all_are() const {
        std::string text;
        for (size_t w = 0; w < workers.size(); w++) {
            const auto& process = workers[w].process;
            text += !process ? format("worker %zu is dead; ", w)
                             : format("worker %zu is at step %ld%s; ", w, process->step,
                                      process->log->is_running() ? "" : ", waiting for the run");
        }
        return text;
    }

    void check_end() {
        long counted = 0;
        for (const auto& [key, entry] : store.entries()) { counted += !entry.contributors.empty(); }
        for (const auto& [want, reason] : store.in(store.generation() + "/want")) {
            const Worker& reader = workers[size_t(Incarnation::parse(want).worker)];
            const std::string beat = reader.process->log->beat(0);
            if (LogBeat::parse(beat).incarnation == Incarnation::parse(want).number) {
                throw Violation("the wish for snapshot " + want + " is still there");
            }
        }
        if (counted == 0) { throw Violation("no sync counted anybody"); }
    }

    Random random;
    const Plan plan;
    const SyncLogRules& rules;
    const bool traced;
    const SyncSchedule schedule;
    SimulatedStore store;
    std::vector<Worker> workers;
    std::vector<Event> events;  // a heap: the earliest is taken first
    std::map<std::string, std::pair<uint64_t, int>> hashes;
    double now = 0, store_away_until = 0;
    long count = 0;
    bool has_lost_disk = false;
};

// What went wrong; empty: nothing.
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
