// The sync log: one worker's part in exchanges that wait for nobody who is slow, dead, or not yet there.
//
// Payloads lie in a store. Whose payloads make up sync s is decided there once, by an entry that is set if
// absent and never changed. The global parameters after s are a function of the entries up to s, so a worker
// is only ever at some position of one log: dying, stalling, being slow and joining are all the same, being
// behind. Where workers have several ranks each shard has a log of its own, and the contributors of one sync
// may differ from shard to shard; the ranks of a worker agree on what their turns say, at each step.
// (Keys: sync_log_records.h. Who is counted: sync_log_decision.h. Means: sync_log_means.h. What safety hangs
// on: sync_log_rules.h. What is told of it: sync_log_events.h. Threads: sync_log_threads.h.)
//
// A worker takes part in sync s of a fragment once it has applied the fragment's syncs before s:
//   1. chunks, then line    Who reads the line finds the payload. Each start has its own names (incarnation),
//                           so what lies under a name never changes. Who passes the send step unsent
//                           abstains.
//   2. entry? lines, beats  Who has a line in s may decide: at once when all that are alive and not catching
//                           up have one; at its due step when all that are waited for have; `grace` later
//                           without them. Never with fewer lines than min_workers. It counts those that stand
//                           on its hash, if most do; where most stand on another, it stops.
//   3. entry, if absent     The first one wins, and the winner's is read, by its decider as well.
//   4. generation           Read after the entry: a store that came back empty has lost lines, so what is
//                           decided there is believed by nobody.
//   5. payloads, or a mean  Where they are many, and large (merged_from), the decider reads the payloads and
//                           writes the mean, chunks, then a record; the others read that. Who misses it, for
//                           the decider is dead or slow, makes the same bytes of the payloads.
//   6. apply                At the due step, at the latest behind the last one; at once where this worker was
//                           not to send s any more. Whose payload was not counted moves local by what global
//                           moved.
//   7. removal              By the decider, once a period: payloads and means that are older than `retain`
//                           syncs of their fragment and that the checkpoints of two workers have behind them,
//                           so that the run survives the death of all of them and the loss of a disk; with
//                           them, what a stalled worker wrote too late.
// Who finds an entry's payload gone asks for a snapshot: all fragments of another worker as they were at one
// instant, in chunks, then an offer with their digest. Who gives it says so, and how far it is: another one
// gives it only where that is dead, or gets no further. The first offer is read, and checked; who finds a
// chunk gone asks again under a new name. From where the snapshot is payloads are kept until its reader has
// caught up. What a dead start asked for, deciders remove.
//
// Who has finished its last step applies what was sent until then, gives the snapshots that those ask for who
// are alive, and leaves a note. Who needs one later, when nobody is there, knows by it that the run is over.
//
// Who is waited for is said by beats. A beat promises to be in time from a sync on: who begins the run, from
// its first one on; who comes later, or was not in time, once it has shown that it keeps pace: was counted,
// or had sent within the grace of the first who did. Later each time that it was late; and who costs others
// more than a little of their time is not waited for: of a hung worker that is a single grace. Who is more
// than max_lag steps behind the newest sync that anyone opened jumps to its step; who has just started, sent
// too late to be counted, or had to jump to be in time, however little it is behind. Who ends early takes its
// promise back.
//
// What does not need each other's answers is asked for together. Where nobody is late that is three times a
// sync for who is the last to send: the payload, its line, and whether all are there; the entry; the payloads
// of the others. (Who reads a mean finds its record with the entry, or later.) It may break off between any
// two of these requests, as it might if they went one by one.
//
// Nothing here waits or asks a clock: requests() says what to ask the store next, answer() takes what it has
// said; turn() is the trainer's, at the end of a step, and says whether it may go on. A lost answer is asked
// for again: every request may be done twice. The caller keeps these three apart (a mutex); it makes a mean
// that mean_to_make() asks for while the others may be called, and brings it.
#pragma once
#include <algorithm>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "sync_log_decision.h"
#include "sync_log_heartbeat.h"
#include "sync_log_means.h"
#include "sync_log_records.h"
#include "sync_log_rules.h"

struct SyncLogOptions {
    int shard = 0;  // this process's rank in its worker
    int workers = 2;
    int min_workers = 2;
    long overlap = 1;         // tau
    long max_lag = 4;         // steps
    long retain = 4;          // syncs of each fragment
    MergedFrom merged_from;   // the same for all
    bool checkpoints = true;  // payloads are kept until two workers' have them behind them
    size_t chunk = 64 << 20;  // bytes, of payloads and means
    size_t snapshot_chunk = 4 << 20;  // of snapshots: what else is sent waits for one at most
    double grace = 10;        // seconds, as all that follows
    double expiry = 5;        // between two looks that find the same beat
    double poll = 0.1;        // between two looks at what has not happened yet
    double retry = 0.5;       // after a lost answer
};

// What a worker starts with. A first start: position 0 everywhere, no generation.
struct LogStart {
    std::string token;            // random, of this start
    std::string fingerprint;      // of the options that all must have
    std::string generation;       // in which the checkpoint was written
    std::vector<long> positions;  // of its fragments
    bool from_checkpoint = false;
};

struct Contribution {
    int worker;
    std::string payload;
};

// What LogShard::mean() is to be given.
struct MeanToMake {
    long sync;
    std::vector<Contribution> contributions;
};

// This worker's shard of the outer state. Called by the constructor, turn() and finish(); encoded(), by
// requests() and answer(); mean(), by who calls these, at the same time as the trainer's.
class LogShard {
public:
    struct Encoded {
        std::string payload;
        uint64_t tokens = 0;
        uint64_t hash = 0;  // of the global parameters that it was made on, at that instant
    };

    virtual ~LogShard() = default;
    virtual uint64_t hash(int fragment) = 0;  // of its global parameters
    virtual void encode(long sync) = 0;       // global - local as they are now
    // Null: not there yet, or not any more. Stays until the sync is applied, or a snapshot is loaded.
    virtual const Encoded* encoded(long sync) = 0;

    // In ascending order of workers; none: global stays.
    // counted: this worker's payload is among them, maybe that of an earlier start
    virtual void apply(long sync, const std::vector<Contribution>& contributions, bool counted) = 0;

    // The mean of these, encoded: a function of its arguments and of what all workers have in common.
    virtual std::string mean(long sync, const std::vector<Contribution>& contributions) = 0;
    // apply() of such a mean.   workers: contributors, ascending
    virtual void apply_mean(long sync, const std::vector<int>& workers, const std::string& mean,
                            bool counted) = 0;

    virtual std::string snapshot() = 0;                  // global and momentum of all fragments
    virtual void load(const std::string& snapshot) = 0;  // and local = global
};

struct LogTurn {
    enum Kind { go_on, wait, jump, stop };
    Kind kind;
    long step = 0;  // to jump to; it counts as done
};

class SyncLog {
public:
    SyncLog(const SyncLogOptions& options, const SyncSchedule& schedule, int worker, LogShard& shard,
            const SyncLogRules& rules, const LogStart& start)
        : options(options),
          schedule(schedule),
          shard(shard),
          rules(rules),
          start(start),
          presence(options.expiry, options.grace) {
        me.worker = worker;
        encoded_until.assign(start.positions.size(), -1);
        enter(start.positions, !start.from_checkpoint);
    }

    // What to ask the store now, if anything, in this order. The caller brings the answers before it asks for
    // more.
    std::vector<StoreRequest> requests(double now) {
        if (phase == Phase::stopped || (!asked.empty() && now < retry_at)) { return {}; }
        if (asked.empty()) { choose(now); }
        std::vector<StoreRequest> requests;
        for (const Asked& one : asked) { requests.push_back(one.request); }
        return requests;
    }

    // Of all of them. From the first one that is lost on they are asked for again.
    void answer(const std::vector<StoreAnswer>& answers, double now) {
        if (phase == Phase::stopped) { return; }
        std::vector<Asked> batch = std::exchange(asked, {});
        retry_at = 0;
        size_t next = 0;
        for (; next < batch.size() && !answers[next].lost; next++) {
            if (std::exchange(is_cut_off, false)) {
                say(LogEventKind::store_back, "has the store again");
                forgive(now - cut_off_since, now);
                asked_at = now;
            }
            batch[next].then(answers[next], now);
            if (phase == Phase::stopped) { return; }
        }
        if (next == batch.size()) { return; }
        lose_store(answers[next].trouble, now);
        asked.assign(std::make_move_iterator(batch.begin() + long(next)),
                     std::make_move_iterator(batch.end()));
    }

    // To be asked for before requests(): a mean that is to be made, and then brought.
    std::optional<MeanToMake> mean_to_make() {
        for (Slot& slot : slots) {
            if (phase != Phase::running || !slot.lacks_only_mean()) { continue; }
            slot.mean.is_being_made = true;
            return MeanToMake{slot.sync, take_payloads(slot)};
        }
        return std::nullopt;
    }
    void bring_mean(long sync, std::string bytes) {
        Slot* slot = find(sync);
        if (slot == nullptr || !slot->mean.is_being_made) { return; }
        slot->mean.is_being_made = false;
        slot->mean.is_whole = true;
        if (writes_mean(*slot)) { outgoing_means.push_back({sync, bytes}); }
        slot->mean.bytes = std::move(bytes);
    }

    // At the end of `step`, and again until it says something else than to wait. Before the first step, with
    // the step that is done: it waits until it has a place in the run.
    LogTurn turn(long step, double now) {
        const LogTurn said = take_turn(step, now);
        keep_time(said.kind == LogTurn::wait, now);
        is_waiting = said.kind == LogTurn::wait;
        if (is_waiting) { look_around_at = std::min(look_around_at, look_earliest); }
        return said;
    }

    // Behind the last step, in place of turn(). All that was sent until then is due now; at the end global
    // parameters are those of all others that end there. It waits, too, while it is needed for a snapshot.
    LogTurn finish(long last_step, double now) {
        is_finishing = true;
        const LogTurn last = turn(last_step, now);
        if (last.kind != LogTurn::go_on) { return last; }
        if (!is_leaving) {
            is_leaving = true;
            look_around_at = look_earliest;
        }
        return {has_left ? LogTurn::go_on : LogTurn::wait};
    }

    // Would turn() say, or do, something else now than when it last said to wait?
    bool is_turn_due() const {
        if (phase == Phase::stopped) { return true; }
        if (phase == Phase::behind) { return snapshot.is_whole; }
        if (phase != Phase::running) { return false; }
        if (lacks_snapshot() || ready() >= 0 || is_far_behind()) { return true; }
        bool waits = false;
        for (const Slot& slot : slots) {
            if (!is_due(slot.sync)) { continue; }
            if (slot.due_since < 0) { return true; }
            waits = true;
        }
        return !waits && (!is_leaving || has_left);
    }

    // Seconds until requests() will have something to ask, unless turn() changes that. When a payload will be
    // encoded is not known.
    double rest(double now) const {
        const double soon = 0.001;
        if (phase == Phase::stopped) { return options.poll; }
        if (!asked.empty()) { return std::max(retry_at - now, soon); }
        if (phase != Phase::running || !chores.empty()) { return chores.empty() ? options.poll : soon; }
        double until = look_around_at;
        const bool gives = (giving && !lacks_snapshot()) || !outgoing_means.empty();
        if (gives || looks_at_wants || may_leave()) { until = now; }
        for (const Slot& slot : slots) {
            if (next(slot, now) != Next::nothing) { until = now; }
            if (slot.look_at > now) { until = std::min(until, slot.look_at); }
        }
        return std::max(until - now, soon);
    }

    LogPulse pulse() const {
        const bool is_known = phase == Phase::agreeing || phase == Phase::running || phase == Phase::behind;
        if (!is_known) { return LogPulse(); }
        const long promised = phase == Phase::behind ? LogBeat::needs_snapshot : promise;
        return {generation, key("beat"), me.worker, {me.number, 0, promised, newest_sent}};
    }

    // The answer to what `run/generation` is.
    void check_generation(const StoreAnswer& answer) {
        if (phase == Phase::stopped || generation.empty() || answer.lost) { return; }
        if (!answer.found || answer.value != generation) {
            stop("the store has lost the run: it came back empty, or is another one");
        }
    }

    // A checkpoint with these positions will be there after a crash.
    void checkpointed(const std::vector<long>& positions) {
        chores.push_back({{StoreRequest::put, key("durable"), std::to_string(me.worker), numbers(positions)},
                          [](const StoreAnswer&, double) {}});
    }

    std::vector<long> positions() const {
        std::vector<long> positions;
        for (const Slot& slot : slots) { positions.push_back(schedule.index(slot.sync)); }
        return positions;
    }
    const std::string& current_generation() const { return generation; }
    Incarnation incarnation() const { return me; }  // number 0: not registered yet
    const std::string& why_stopped() const { return why; }
    bool has_diverged() const { return diverged; }
    bool is_over() const { return over; }  // it came too late: all others have ended
    bool is_refused() const { return !run_fingerprint.empty(); }
    const std::string& theirs() const { return run_fingerprint; }  // the run's, that it was refused for
    bool is_running() const { return phase == Phase::running; }
    bool is_idle() const { return !giving && outgoing_means.empty() && chores.empty(); }
    std::vector<LogEvent> events() { return std::exchange(told, {}); }

private:
    using Handler = std::function<void(const StoreAnswer&, double now)>;
    struct Asked {
        StoreRequest request;
        Handler then;
    };
    enum class Phase { opening, comparing, registering, agreeing, running, behind, stopped };

    // A fragment's next sync.
    struct Slot {
        enum Own { none, sending, sent, abstaining, abstained };
        long sync = 0;
        uint64_t hash = 0;
        Own own = none;
        size_t chunks = 0;  // written
        bool looked = false;
        double look_at = 0;
        std::optional<LogLines> lines;     // as they have just been read
        std::optional<LogEntry> proposal;  // to be written, if there is none
        std::optional<LogEntry> entry;
        bool confirmed = false;
        double confirmed_at = 0;
        bool is_merged = false, reads_payloads = false;
        std::vector<Contributor> sources;   // whose payloads are read: the entry's contributors
        std::vector<std::string> payloads;  // of these, as far as they are read
        SyncMean mean;                      // where it is merged
        size_t bytes_read = 0;
        double due_since = -1;
        double excused = 0;     // seconds since then in which nobody could be heard
        bool has_told = false;  // that there are too few, or no majority

        bool has_line() const { return own == sent || own == abstained; }
        bool has_payload(size_t i) const { return payloads[i].size() >= sources[i].bytes; }
        bool has_payloads() const {
            for (size_t i = 0; i < payloads.size(); i++) {
                if (!has_payload(i)) { return false; }
            }
            return true;
        }
        bool is_fetched() const { return confirmed && (is_merged ? mean.is_whole : has_payloads()); }
        bool lacks_only_mean() const {
            const bool is_to_be_made = reads_payloads && !mean.is_being_made && !mean.is_whole;
            return confirmed && is_merged && is_to_be_made && has_payloads();
        }
    };

    struct Snapshot {
        int attempt = 0;
        bool is_wanted = false;  // the store knows
        std::optional<LogOffer> offer;
        std::string bytes;
        size_t chunks = 0;
        bool is_whole = false;
        double look_at = 0;
    };

    struct Giving {
        std::string want;
        bool takes_over;          // from one that does not get on with it
        bool is_claimed = false;  // nobody else gives it
        std::string bytes = "";   // from the trainer's turn on
        size_t chunks = 0;        // written
    };

    // What another worker wants and nobody offers.
    struct Wanted {
        double since;        // the last change that was seen
        std::string giver;   // who says that it gives it, and how far that is
    };

    // -------------------------------------------------------------------------------------------------------
    // Asking: what goes out together

    void ask(StoreRequest request, Handler then) { asked.push_back({std::move(request), std::move(then)}); }

    std::string key(const std::string& folder) const {
        return generation + "/" + std::to_string(options.shard) + "/" + folder;
    }

    void lose_store(const std::string& trouble, double now) {
        if (!std::exchange(is_cut_off, true)) {
            say(LogEventKind::store_lost, "has lost the store, and goes on until it needs it" +
                                              (trouble.empty() ? "" : ": " + trouble));
            cut_off_since = asked_at;
        }
        retry_at = now + options.retry;
    }

    // For so long there was no store.
    void forgive(double seconds, double now) {
        presence.forgive(seconds, now);
        for (Slot& slot : slots) {
            if (slot.due_since < 0) { continue; }
            slot.excused = std::min(slot.excused + seconds, now - slot.due_since);
        }
        for (auto& [want, one] : wanted) { one.since = std::min(one.since + seconds, now); }
        if (alone_since >= 0) { alone_since = std::min(alone_since + seconds, now); }
    }

    void choose(double now) {
        asked_at = now;
        asks_beats = asks_generation = false;
        switch (phase) {
            case Phase::opening:
                return open();
            case Phase::comparing:
                return compare();
            case Phase::registering:
                return register_start();
            case Phase::agreeing:
                return agree(now);
            case Phase::running:
                return choose_running(now);
            case Phase::behind:
                return choose_behind(now);
            case Phase::stopped:
                return;
        }
    }

    // A payload goes out with what stands on its way only now and then: that need not wait for it.
    void choose_running(double now) {
        ask_chores();
        if (looks_at_wants) { look_at_wants(); }
        bool is_served = false;
        for (Slot& slot : slots) { is_served |= serve(slot, now); }
        const bool moves = (!is_served || is_payloads_turn) && move_a_payload(now);
        is_payloads_turn = is_served && !moves;
        if (asks_beats || now >= look_around_at) { look_around(moves); }
        if (asks_generation) { look_at_generation(); }
        if (asked.empty() && may_leave()) { leave(); }
    }

    // In turns, so that none is put off for ever: those of all fragments, and of who needs a snapshot.
    // A mean before all: others may stand still for it.
    bool move_a_payload(double now) {
        const size_t before = asked.size();
        if (!outgoing_means.empty()) { write_mean(); }
        for (size_t i = 0; i <= slots.size() && asked.size() == before; i++) {
            next_turn = (next_turn + 1) % (slots.size() + 1);
            if (next_turn < slots.size()) {
                move_payload(slots[next_turn], now);
            } else if (giving) {
                give();
            }
        }
        return asked.size() > before;
    }

    // Nobody who is alive needs anything from this worker: it says that it has all, and may end.
    bool may_leave() const {
        return is_leaving && has_looked_last && !has_left && !is_wanted && !giving && outgoing_means.empty();
    }
    void leave() {
        ask({StoreRequest::put, key("done"), std::to_string(me.worker), std::to_string(step)},
            [this](const StoreAnswer&, double) { has_left = true; });
    }

    void ask_chores() {
        for (Asked& chore : chores) { asked.push_back(std::move(chore)); }
        chores.clear();
    }

    void add_removal(const std::string& folder, const std::string& name = "") {
        chores.push_back({{StoreRequest::remove, folder, name, ""}, [](const StoreAnswer&, double) {}});
    }

    // -------------------------------------------------------------------------------------------------------
    // Starting

    void open() {
        ask({StoreRequest::put_if_absent, "run", "generation", start.token},
            [this](const StoreAnswer& answer, double) {
                generation = answer.value;
                phase = Phase::comparing;
            });
    }

    // Who comes first says what all must agree in, for all shards.
    void compare() {
        ask({StoreRequest::put_if_absent, generation + "/run", "fingerprint", start.fingerprint},
            [this](const StoreAnswer& answer, double) {
                if (rules.is_same_run(start.fingerprint, answer.value)) {
                    phase = Phase::registering;
                } else {
                    run_fingerprint = answer.value;
                    stop("its options are not those of the run");
                }
            });
    }

    // The first number, behind all that are taken, that is this start's own.
    void register_start() {
        const std::string folder = key("incarnation/" + std::to_string(me.worker));
        if (next_number == 0) {
            return ask({StoreRequest::list, folder, "", ""}, [this](const StoreAnswer& answer, double) {
                next_number = rules.first_free(answer.listing);
            });
        }
        ask({StoreRequest::put_if_absent, folder, std::to_string(next_number), start.token},
            [this](const StoreAnswer& answer, double now) {
                if (!rules.is_own_start(answer.value, start.token)) {
                    next_number++;
                    return;
                }
                me.number = next_number;
                say(LogEventKind::starts, "starts as " + me.text());
                agree_from = now;
                add_removal(key("done"), std::to_string(me.worker));
                phase = generation == start.generation ? Phase::running : Phase::agreeing;
                // A checkpoint of another generation is not of this log, unless the log begins with it.
                checkpointed(phase == Phase::running ? start.positions : std::vector<long>(slots.size(), 0));
            });
    }

    LogBase base() const {
        LogBase base;
        base.positions = positions();
        for (const Slot& slot : slots) { base.hashes.push_back(slot.hash); }
        return base;
    }

    // What the log begins with: of those that are there, the newest. Who is registered by then begins with
    // the run, and keeps step from its first sync on.
    void agree(double now) {
        const auto then_begin = [this](const StoreAnswer& answer, double now) {
            if (!answer.value.empty()) { begin(LogBeginning::parse(answer.value), now); }
        };
        if (beginning) {
            return ask({StoreRequest::put_if_absent, key("run"), "start", beginning->text()}, then_begin);
        }
        if (now < agree_at) { return; }
        if (!is_registered) {
            ask({StoreRequest::put_if_absent, key("registered"), me.text(), base().text()},
                [this](const StoreAnswer&, double) { is_registered = true; });
        }
        ask({StoreRequest::get, key("run"), "start", ""}, then_begin);
        ask({StoreRequest::list, key("registered"), "", ""}, [this](const StoreAnswer& answer, double now) {
            if (phase == Phase::agreeing) { agree_on(answer.listing, now); }
        });
    }

    void agree_on(const std::map<std::string, std::string>& registered, double now) {
        agree_at = now + options.poll;
        std::map<int, int> there;  // starts, by worker: the latest
        std::optional<LogBase> newest;
        for (const auto& [text, base] : registered) {
            const LogBase one = LogBase::parse(base);
            if (!newest || one.sum() > newest->sum()) { newest = one; }
            const Incarnation who = Incarnation::parse(text);
            there[who.worker] = std::max(there[who.worker], who.number);
        }
        const bool all = int(there.size()) >= options.workers;
        const bool enough = int(there.size()) >= options.min_workers && now >= agree_from + options.grace;
        if (!newest || !(all || enough)) {
            if (!has_told_of_few && now >= agree_from + options.grace) {
                has_told_of_few = true;
                say(LogEventKind::too_few, format("waits: %zu of at least %d workers are here to begin",
                                                  there.size(), options.min_workers));
            }
            return;
        }
        beginning = LogBeginning{*newest, {}};
        for (const auto& [worker, number] : there) { beginning->members.push_back({worker, number}); }
    }

    void begin(const LogBeginning& first, double now) {
        const bool holds_it = first.base == base();
        if (first.has(me)) { expect(first, now); }
        if (!holds_it) { return fall_behind("holds not what the run begins with"); }
        phase = Phase::running;
        if (start.from_checkpoint) { checkpointed(start.positions); }
    }

    // The run begins here and now, with all its members.
    void expect(const LogBeginning& beginning, double now) {
        long first = schedule.sync(0, beginning.base.positions[0]);
        for (int p = 1; p < schedule.fragments(); p++) {
            first = std::min(first, schedule.sync(p, beginning.base.positions[size_t(p)]));
        }
        presence.expect(beginning.members, first, now);
        promise = first;
        is_aligned = true;
    }

    // At these positions, with what the shard holds.
    // is_sure: that is what the run has
    void enter(const std::vector<long>& positions, bool is_sure) {
        if (int(positions.size()) != schedule.fragments()) {
            throw std::logic_error("positions of another number of fragments");
        }
        slots.assign(positions.size(), Slot());
        is_proven.assign(positions.size(), is_sure);
        for (int p = 0; p < int(slots.size()); p++) {
            slots[size_t(p)].sync = schedule.sync(p, positions[size_t(p)]);
            slots[size_t(p)].hash = shard.hash(p);
        }
    }

    void stop(const std::string& reason) {
        why = reason;
        say(LogEventKind::stops, "stops: " + reason);
        phase = Phase::stopped;
    }

    void say(LogEventKind kind, const std::string& text, long sync = -1) {
        told.push_back({kind, sync, me.worker, text});
    }

    void say(LogEventKind kind, long sync, const LogEntry& entry, const std::string& text) {
        say(kind, text + in_words(entry), sync);
        told.back().entry = entry;
    }

    // Of others. Who is gone may have been done.
    void tell_changes() {
        for (const Presence::Change& change : presence.changes()) {
            if (change.worker == me.worker) { continue; }
            const std::string who = format("worker %d ", change.worker);
            if (change.kind == LogEventKind::gone) {
                chores.push_back({{StoreRequest::get, key("done"), std::to_string(change.worker), ""},
                                  [this, change, who](const StoreAnswer& answer, double) {
                                      told.push_back({answer.found ? LogEventKind::done : change.kind, -1,
                                                      change.worker,
                                                      who + (answer.found ? "has ended" : "is gone")});
                                  }});
                continue;
            }
            const char* said = change.kind == LogEventKind::joined ? "joins"
                               : change.kind == LogEventKind::late ? "is late"
                               : change.sync < 0                   ? "is back"
                                                                   : "is in time again";
            const std::string what = change.sync < 0 ? format(", as start %d", change.start)
                                                     : format(" for sync %ld", change.sync);
            told.push_back({change.kind, change.sync, change.worker, who + said + what});
        }
    }

    // -------------------------------------------------------------------------------------------------------
    // A sync, on the trainer's side

    LogTurn take_turn(long step, double now) {
        if (phase == Phase::stopped) { return {LogTurn::stop}; }
        began_step += std::max(step - this->step - 1, 0L);  // those that it has jumped over
        this->step = step;
        if (phase == Phase::behind && snapshot.is_whole) { load_snapshot(); }
        if (phase != Phase::running) { return {LogTurn::wait}; }
        if (lacks_snapshot() && !write_snapshot()) { return {LogTurn::stop}; }
        for (int p = ready(); p >= 0; p = ready()) { apply(slots[size_t(p)], now); }
        if (is_far_behind()) { return jump(); }
        take_part();
        bool waits = false;
        for (Slot& slot : slots) {
            if (!is_due(slot.sync)) { continue; }
            waits = true;
            if (slot.due_since < 0) { slot.due_since = slot.look_at = now; }
        }
        if (waits) { return {LogTurn::wait}; }
        if (promise < 0 && has_looked) { promise = LogBeat::nothing; }
        return {LogTurn::go_on};
    }

    // Of steps, without what it waits in between.
    void keep_time(bool waits, double now) {
        if (!has_begun && !waits) {
            has_begun = true;
            began_step = step;
            began_at = now;
        } else if (waits && !is_waiting) {
            waits_since = now;
        } else if (!waits && is_waiting) {
            began_at += now - waits_since;
        }
    }

    bool is_due(long sync) const {
        const long send_step = schedule.send_step(sync);
        return is_finishing ? rules.is_of_run(send_step, step) : send_step + options.overlap <= step;
    }

    // The fragment of what can be applied at this step: of the lowest sync. -1: none.
    int ready() const {
        const Slot* first = nullptr;
        for (const Slot& slot : slots) {
            const bool may_be = is_due(slot.sync) || slot.own == Slot::none;
            if (slot.is_fetched() && may_be && (first == nullptr || slot.sync < first->sync)) {
                first = &slot;
            }
        }
        return first == nullptr ? -1 : int(first - slots.data());
    }

    bool is_far_behind() const {
        const long max_lag = is_aligned ? options.max_lag : 0;
        return !is_finishing && newest_open >= 0 && schedule.send_step(newest_open) > step + max_lag;
    }

    // The ranks of a worker may need some turns to agree on it.
    LogTurn jump() {
        const long to = schedule.send_step(newest_open);
        if (to != jumps_to) { say(LogEventKind::jumps, format("jumps from step %ld to %ld", step, to)); }
        jumps_to = to;
        return {LogTurn::jump, to};
    }

    static std::vector<Contribution> take_payloads(Slot& slot) {
        std::vector<Contribution> contributions;
        for (size_t i = 0; i < slot.payloads.size(); i++) {
            contributions.push_back({slot.sources[i].who.worker, std::move(slot.payloads[i])});
            slot.payloads[i].clear();
        }
        return contributions;
    }

    void apply(Slot& slot, double now) {
        const bool counted = slot.entry->counts(me.worker);
        if (slot.is_merged) {
            shard.apply_mean(slot.sync, slot.entry->workers(), slot.mean.bytes, counted);
        } else {
            shard.apply(slot.sync, take_payloads(slot), counted);
        }
        tell_of_applied(slot, counted, now);
        keep_promise(slot);
        const int p = schedule.fragment(slot.sync);
        const long next = slot.sync + schedule.fragments();
        slot = Slot();
        slot.sync = next;
        slot.hash = shard.hash(p);
    }

    void tell_of_applied(const Slot& slot, bool counted, double now) {
        const std::string text = format("applies sync %ld, ", slot.sync) + (counted ? "" : "not counted: ");
        say(LogEventKind::applied, slot.sync, *slot.entry, text + "it ");
        LogEvent& event = told.back();
        event.counted = counted;
        event.waited = slot.due_since < 0 ? 0 : now - slot.due_since;
        event.bytes_read = slot.bytes_read;
        const bool has_made_mean = slot.is_merged && slot.reads_payloads && writes_mean(slot);
        event.mean_bytes_written = has_made_mean ? slot.mean.bytes.size() : 0;
    }

    // Whose payload counts has shown that it keeps pace. Who was not in time though it had promised to be
    // promises nothing for now.
    void keep_promise(const Slot& slot) {
        const bool counts = slot.entry->counts(me.worker), has_sent = slot.own == Slot::sent;
        if (has_sent || slot.own == Slot::sending) {
            is_aligned = counts && jumps_to < schedule.send_step(slot.sync);
        }
        if (has_sent && counts) {
            times_late = 0;
            make_promise();
        }
        if (promise < 0 || slot.sync < promise || slot.entry->knows(me.worker)) { return; }
        times_late++;
        promise = LogBeat::nothing;
        say(LogEventKind::late, format("was late for sync %ld", slot.sync), slot.sync);
    }

    // Its line is there: within the grace of the first who has sent, and before anybody has sent a later one?
    // Then it would be in time for others that wait.
    void show_pace(long sync, double now) {
        const bool is_newest = schedule.send_step(newest_open) <= schedule.send_step(sync);
        if (is_newest && now <= not_open_at + options.grace) { make_promise(); }
    }

    // For what it sends next, or later each time that it was late, so that others seldom wait in vain.
    void make_promise() {
        if (promise >= 0 && promise != LogBeat::nothing) { return; }
        const long later = times_late < 2 ? 0 : long(schedule.fragments()) << std::min(times_late - 2, 4);
        promise = schedule.first_after(step) + later;
    }

    // Sends what is sent at this step; abstains where a send step has been passed over, and where it has sent
    // and then taken a snapshot: one name never holds two payloads.
    void take_part() {
        for (int p = 0; p < int(slots.size()); p++) {
            Slot& slot = slots[size_t(p)];
            if (slot.own != Slot::none || slot.entry) { continue; }
            const long send_step = schedule.send_step(slot.sync);
            if (send_step == step && slot.sync > encoded_until[size_t(p)]) {
                shard.encode(slot.sync);
                slot.own = Slot::sending;
                encoded_until[size_t(p)] = slot.sync;
                newest_sent = std::max(newest_sent, slot.sync);
                note_open(slot.sync);
            } else if (send_step <= step) {
                slot.own = Slot::abstaining;
            }
        }
    }

    // -------------------------------------------------------------------------------------------------------
    // A sync, on the store's side

    std::string folder(const char* what, long sync) const { return key(what + ("/" + std::to_string(sync))); }

    enum class Next { nothing, fetch, look_for_mean, decide, look, send, abstain };

    Next next(const Slot& slot, double now) const {
        if (slot.entry) {
            return slot.confirmed && !slot.is_fetched() ? next_to_read(slot, now) : Next::nothing;
        }
        if (slot.proposal) { return Next::decide; }
        // Behind, it is likely that there is an entry: then there is nothing to send any more.
        const bool is_behind = newest_open > slot.sync;
        if (is_behind && !slot.looked) { return Next::look; }
        if (slot.own == Slot::sending) { return Next::send; }
        if (slot.own == Slot::abstaining) { return Next::abstain; }
        return now >= slot.look_at && (slot.has_line() || is_behind) ? Next::look : Next::nothing;
    }

    Next next_to_read(const Slot& slot, double now) const {
        if (slot.reads_payloads) {
            const bool has_all = slot.mean.is_being_made || slot.has_payloads();
            return has_all ? Next::nothing : Next::fetch;
        }
        if (slot.mean.record) { return Next::fetch; }
        return now >= slot.look_at ? Next::look_for_mean : Next::nothing;
    }

    // False: there is nothing but a payload, or a mean, that it needs.
    bool serve(Slot& slot, double now) {
        switch (next(slot, now)) {
            case Next::decide:
                write_entry(slot.sync, *slot.proposal);
                return true;
            case Next::look:
                look(slot, slot.has_line());
                return true;
            case Next::look_for_mean:
                look_for_mean(slot.sync);
                return true;
            case Next::abstain:
                write_line(slot, {slot.hash, 0, 0, 0}, Slot::abstained);
                return true;
            case Next::nothing:
            case Next::fetch:
            case Next::send:
                break;
        }
        return false;
    }

    void move_payload(Slot& slot, double now) {
        const Next what = next(slot, now);
        if (what == Next::send) { send(slot); }
        if (what == Next::fetch) { slot.reads_payloads ? fetch_payloads(slot) : fetch_mean(slot); }
    }

    // Handlers find their slot by its sync: it may have moved on.
    Slot* find(long sync) {
        for (Slot& slot : slots) {
            if (slot.sync == sync) { return &slot; }
        }
        return nullptr;
    }

    // The last chunk with its line.
    void send(Slot& slot) {
        const LogShard::Encoded* encoded = shard.encoded(slot.sync);
        if (encoded == nullptr) { return; }
        if (encoded->tokens == 0) {
            slot.own = Slot::abstaining;
            return;
        }
        const std::string& payload = encoded->payload;
        const size_t chunks = chunks_of(payload.size(), options.chunk);
        if (slot.chunks < chunks) {
            ask({StoreRequest::put_if_absent, folder("payload", slot.sync),
                 me.text() + "." + std::to_string(slot.chunks),
                 payload.substr(slot.chunks * options.chunk, options.chunk)},
                [this, sync = slot.sync](const StoreAnswer&, double) {
                    if (Slot* slot = find(sync)) { slot->chunks++; }
                });
        }
        if (slot.chunks + 1 < chunks) { return; }
        slot.hash = encoded->hash;
        write_line(slot, {slot.hash, encoded->tokens, payload.size(), digest_of(payload)}, Slot::sent);
    }

    // And looks at once whether all others are there.
    void write_line(Slot& slot, const LogLine& line, Slot::Own own) {
        ask({StoreRequest::put_if_absent, folder("sent", slot.sync), me.text(), line.text()},
            [this, sync = slot.sync, own](const StoreAnswer&, double now) {
                Slot* slot = find(sync);
                if (slot == nullptr) { return; }
                slot->own = own;
                if (own == Slot::sent) { show_pace(sync, now); }
            });
        look(slot, true);
    }

    // Is there an entry? If not, should there be one? Who is alive is asked behind the lines, and whether it
    // still is the same run behind all.
    void look(Slot& slot, bool has_line) {
        asks_generation = true;
        ask({StoreRequest::get, key("entry"), std::to_string(slot.sync), ""},
            [this, sync = slot.sync](const StoreAnswer& answer, double now) {
                Slot* slot = find(sync);
                if (slot == nullptr) { return; }
                slot->looked = true;
                rest_from_looking_at(*slot, now);
                if (answer.found) { slot->entry = LogEntry::parse(answer.value); }
            });
        if (options.merged_from.contributors > 0) { look_for_mean(slot.sync); }
        if (!has_line) { return; }
        asks_beats = true;
        ask({StoreRequest::list, folder("sent", slot.sync), "", ""},
            [this, sync = slot.sync](const StoreAnswer& answer, double) {
                Slot* slot = find(sync);
                if (slot == nullptr || slot->entry) { return; }
                if (answer.listing.count(me.text()) == 0) { return send_again(*slot); }
                slot->lines.emplace();
                for (const auto& [who, text] : answer.listing) { (*slot->lines)[who] = LogLine::parse(text); }
            });
    }

    // The store had its line, and has it no more: it came back without what it was told last.
    void send_again(Slot& slot) {
        slot.own = slot.own == Slot::sent ? Slot::sending : Slot::abstaining;
        slot.chunks = 0;
    }

    // The trainer stands still for what is due.
    void rest_from_looking_at(Slot& slot, double now) const {
        slot.look_at = now + (slot.due_since < 0 ? options.poll : options.poll / 10);
    }

    // Lines, and then beats, are as they have just been read.
    void consider(Slot& slot, double now) {
        const LogLines lines = *std::exchange(slot.lines, std::nullopt);
        if (is_odd_one(lines, slot.hash, rules)) { return diverge(slot); }
        tell_of_few(slot, lines, now);
        if (phase == Phase::stopped) { return; }
        const Question question{slot.sync, slot.hash, due_for_all(slot, now), me};
        charge(question, lines, presence, rules, options.min_workers, now);
        slot.proposal = decide(question, lines, presence, rules, options.min_workers, options.grace, now);
    }

    // Since when it would be due if there were more steps; negative: not yet. What is due only because this
    // worker has none left, the others still have time for.
    double due_for_all(const Slot& slot, double now) const {
        const long left = schedule.send_step(slot.sync) + options.overlap - step, done = step - began_step;
        if (slot.due_since < 0) { return -1; }
        double since = judged_since(slot);
        if (left > 0 && done > 0) { since += double(left) * (slot.due_since - began_at) / double(done); }
        return now < since ? -1 : since;
    }
    static double judged_since(const Slot& slot) {
        return slot.due_since < 0 ? -1 : slot.due_since + slot.excused;
    }

    // Nobody may decide: too few have sent it, or most of those stand on no hash.
    void tell_of_few(Slot& slot, const LogLines& lines, double now) {
        const StandingLines standing = standing_lines(lines, slot.hash, rules);
        const bool waits = slot.due_since >= 0 && now >= judged_since(slot) + options.grace;
        const bool are_few = int(standing.size()) < options.min_workers;
        const bool are_split = !are_few && !has_majority(standing, rules);
        if (!waits || !(are_few || are_split)) { return; }
        const std::string holders = in_words(holders_of_hashes(standing));
        if (are_split && int(standing.size()) >= options.workers) {
            diverged = true;
            return stop("nobody knows whose global parameters are right: there are workers " + holders);
        }
        if (std::exchange(slot.has_told, true)) { return; }
        const std::string what =
            are_few ? format("%zu of at least %d workers have sent", standing.size(), options.min_workers)
                    : "most stand on no same global parameters, but " + holders + ", of those that have sent";
        say(LogEventKind::too_few, "waits: " + what + format(" sync %ld", slot.sync), slot.sync);
    }

    void write_entry(long sync, const LogEntry& entry) {
        asks_generation = true;
        ask({rules.entry_is_written_by(), key("entry"), std::to_string(sync), entry.text()},
            [this, sync, entry](const StoreAnswer& answer, double) {
                const LogEntry decided = rules.decided(entry, LogEntry::parse(answer.value));
                if (Slot* slot = find(sync)) { slot->entry = decided; }
            });
    }

    void look_at_generation() {
        ask({StoreRequest::get, "run", "generation", ""}, [this](const StoreAnswer& answer, double now) {
            check_generation(answer);
            for (Slot& slot : slots) {
                if (phase == Phase::running && slot.entry && !slot.confirmed) { confirm(slot, now); }
            }
        });
    }

    void confirm(Slot& slot, double now) {
        if (slot.entry->hash != slot.hash) { return diverge(slot); }
        slot.confirmed = true;
        is_proven[size_t(schedule.fragment(slot.sync))] = true;
        slot.confirmed_at = now;
        slot.sources = rules.averaged(*slot.entry, slot.proposal).contributors;
        slot.payloads.resize(slot.sources.size());
        slot.is_merged = is_merged(*slot.entry, options.merged_from);
        presence.note(*slot.entry, slot.sync);
        tell_changes();
        if (slot.entry->decider == me) {
            say(LogEventKind::decided, slot.sync, *slot.entry, format("decides sync %ld: it ", slot.sync));
            if (slot.sync % schedule.fragments() == 0) { sweep(); }  // once a period
        }
        if (!slot.is_merged || (writes_mean(slot) && !slot.mean.record)) { read_payloads(slot); }
    }

    // What a checkpoint has kept wrong is not a reason to stop: that would be read again, and again. Nor is
    // what such a worker has given.
    void diverge(const Slot& slot) {
        if (!is_proven[size_t(schedule.fragment(slot.sync))]) {
            return fall_behind("has begun with other global parameters than the run's");
        }
        diverge();
    }
    void diverge() {
        diverged = true;
        stop(format("the global parameters of worker %d are not those of the run", me.worker));
    }

    // As much as one chunk holds, and what is begun with it.
    void fetch_payloads(Slot& slot) {
        size_t bytes = 0;
        for (size_t i = 0; i < slot.payloads.size(); i++) {
            const Contributor& one = slot.sources[i];
            fetch_chunks(folder("payload", slot.sync), one.who, slot.payloads[i].size(), one.bytes, bytes,
                         [this, sync = slot.sync, i](const StoreAnswer& answer, double) {
                             if (Slot* slot = find(sync)) { take_chunk(*slot, i, answer); }
                         });
        }
    }

    // from: what is there already of the `whole` bytes   asked_for: bytes, in this batch
    void fetch_chunks(const std::string& folder, const Incarnation& who, size_t from, size_t whole,
                      size_t& asked_for, const Handler& then) {
        for (size_t at = from; at < whole && asked_for < options.chunk; at += options.chunk) {
            ask({StoreRequest::get, folder, who.text() + "." + std::to_string(at / options.chunk), ""}, then);
            asked_for += std::min(options.chunk, whole - at);
        }
    }

    void take_chunk(Slot& slot, size_t i, const StoreAnswer& answer) {
        if (phase != Phase::running) { return; }
        if (!answer.found) { return fall_behind(format("finds a payload of sync %ld gone", slot.sync)); }
        slot.payloads[i] += answer.value;
        slot.bytes_read += answer.value.size();
        if (slot.has_payload(i)) { check_payload(slot, i); }
    }

    void check_payload(const Slot& slot, size_t i) {
        const Contributor& one = slot.sources[i];
        if (digest_of(slot.payloads[i]) == one.digest) { return; }
        stop(format("the payload of worker %d for sync %ld is damaged", one.who.worker, slot.sync));
    }

    // What it has sent itself it has.
    void read_payloads(Slot& slot) {
        slot.reads_payloads = true;
        for (size_t i = 0; i < slot.payloads.size(); i++) {
            if (!rules.is_own_payload(slot.sources[i].who, me)) { continue; }
            const LogShard::Encoded* encoded = shard.encoded(slot.sync);
            if (encoded == nullptr) { continue; }
            slot.payloads[i] = encoded->payload;
            check_payload(slot, i);
        }
    }

    // -------------------------------------------------------------------------------------------------------
    // The mean of a merged sync

    bool writes_mean(const Slot& slot) const { return rules.writes_mean(slot.entry->decider, me); }

    // Beside a look for the entry: the mean may be there as well.
    void look_for_mean(long sync) {
        ask({StoreRequest::get, key("means"), std::to_string(sync), ""},
            [this, sync](const StoreAnswer& answer, double now) {
                Slot* slot = find(sync);
                if (slot == nullptr || slot->reads_payloads) { return; }
                if (answer.found) {
                    slot->mean.record = LogOffer::parse(answer.value);
                } else if (slot->confirmed) {
                    rest_from_looking_at(*slot, now);
                    judge_missing(*slot, now);
                }
            });
    }

    void judge_missing(Slot& slot, double now) {
        if (newest_open >= slot.sync + schedule.fragments()) {
            return do_without_mean(slot, "others have applied it");
        }
        const Incarnation& decider = slot.entry->decider;
        switch (judge_missing_mean(decider, presence, has_looked, slot.confirmed_at, judged_since(slot),
                                   options.grace, now)) {
            case MissingMean::awaited:
                return;
            case MissingMean::decider_is_gone:
                return do_without_mean(slot, format("worker %d, which decided it, is gone", decider.worker));
            case MissingMean::takes_too_long:
                return do_without_mean(slot, format("that of worker %d takes too long", decider.worker));
        }
    }

    void do_without_mean(Slot& slot, const std::string& why) {
        say(LogEventKind::without_mean, format("makes the mean of sync %ld itself: ", slot.sync) + why,
            slot.sync);
        read_payloads(slot);
    }

    void fetch_mean(Slot& slot) {
        const LogOffer& record = *slot.mean.record;
        size_t asked_for = 0;
        fetch_chunks(folder("mean", slot.sync), record.giver, slot.mean.bytes.size(), record.bytes, asked_for,
                     [this, sync = slot.sync](const StoreAnswer& answer, double) {
                         Slot* slot = find(sync);
                         if (slot != nullptr && !slot->reads_payloads) { take_chunk_of_mean(*slot, answer); }
                     });
    }

    void take_chunk_of_mean(Slot& slot, const StoreAnswer& answer) {
        if (!rules.is_mean_chunk(answer)) { return do_without_mean(slot, "that in the store is gone"); }
        const LogOffer& record = *slot.mean.record;
        slot.mean.bytes += answer.value;
        slot.bytes_read += answer.value.size();
        if (slot.mean.bytes.size() < record.bytes) { return; }
        slot.mean.is_whole = true;
        if (rules.is_whole_mean(slot.mean.bytes, record)) { return; }
        stop(format("the mean of sync %ld, which worker %d wrote, is damaged", slot.sync,
                    record.giver.worker));
    }

    // The last chunk with its record.
    void write_mean() {
        const OutgoingMean& mean = outgoing_means.front();
        const size_t chunks = chunks_of(mean.bytes.size(), options.chunk);
        ask({StoreRequest::put_if_absent, folder("mean", mean.sync),
             me.text() + "." + std::to_string(mean.chunks),
             mean.bytes.substr(mean.chunks * options.chunk, options.chunk)},
            [this](const StoreAnswer&, double) { outgoing_means.front().chunks++; });
        if (mean.chunks + 1 < chunks) { return; }
        const LogOffer record{me, mean.bytes.size(), digest_of(mean.bytes)};
        ask({StoreRequest::put_if_absent, key("means"), std::to_string(mean.sync), record.text()},
            [this](const StoreAnswer&, double) { outgoing_means.pop_front(); });
    }

    // -------------------------------------------------------------------------------------------------------
    // Looking around: who is alive, who needs a snapshot

    // Often where the trainer stands still. Over a slow link at most a fifth of the time, or half of it.
    // beside_payload: what is asked for takes longer than a look
    void look_around(bool beside_payload) {
        const bool is_last = is_leaving;
        const double from = asked_at;
        ask({StoreRequest::list, key("beat"), "", ""}, [=](const StoreAnswer& answer, double now) {
            see(answer.listing, from, now);
            if (phase == Phase::stopped) { return; }
            rest_from_looking(beside_payload ? now : from, now);
            const bool is_alone = phase == Phase::behind && !presence.can_anyone_give(me.worker);
            alone_since = !is_alone ? -1 : alone_since < 0 ? now : alone_since;
            looks_for_an_end = is_alone && now >= alone_since + options.grace;
            if (phase == Phase::running) { look_for_readers(is_last, now); }
            for (Slot& slot : slots) {
                if (phase == Phase::running && slot.lines) { consider(slot, now); }
            }
        });
    }

    // Who wants something shows it in its beat.
    void look_for_readers(bool is_last, double now) {
        if (presence.does_anyone_need(me.worker)) {
            looks_at_wants = true;
            wants_are_last = is_last;
        } else {
            wanted.clear();
            choose_reader(is_last, now);
        }
    }

    // What others want. Of that, what nobody offers yet is for somebody to give. Wants are asked for last:
    // who has what it wanted removes its want first, and then the offer.
    void look_at_wants() {
        looks_at_wants = false;
        const auto offers = std::make_shared<std::map<std::string, std::string>>();
        const auto givers = std::make_shared<std::map<std::string, std::string>>();
        ask({StoreRequest::list, key("offer"), "", ""},
            [offers](const StoreAnswer& answer, double) { *offers = answer.listing; });
        ask({StoreRequest::list, key("giver"), "", ""},
            [givers](const StoreAnswer& answer, double) { *givers = answer.listing; });
        ask({StoreRequest::list, key("want"), "", ""},
            [this, offers, givers, is_last = wants_are_last](const StoreAnswer& answer, double now) {
                note_wants(answer.listing, *offers, now);
                note_givers(*givers, now);
                choose_reader(is_last, now);
            });
    }

    void note_wants(const std::map<std::string, std::string>& wants,
                    const std::map<std::string, std::string>& offers, double now) {
        std::map<std::string, Wanted> still;
        for (const auto& [want, reason] : wants) {
            const auto known = wanted.find(want);
            if (Incarnation::parse(want).worker == me.worker || offers.count(want)) { continue; }
            still[want] = known == wanted.end() ? Wanted{now, ""} : known->second;
        }
        wanted = still;
    }

    void note_givers(const std::map<std::string, std::string>& givers, double now) {
        for (auto& [want, one] : wanted) {
            const auto giver = givers.find(want);
            const std::string text = giver == givers.end() ? "" : giver->second;
            if (text != one.giver) { one = {now, text}; }
            // While this worker's trainer had no turn, another one has taken it over, and begun.
            if (gives(want) && giving->bytes.empty() && has_written(text)) { giving.reset(); }
        }
    }
    bool gives(const std::string& want) const { return giving && giving->want == want; }
    // giver: "v.j chunks"; of others
    bool has_written(const std::string& giver) const {
        const size_t space = giver.find(' ');
        const bool is_other = space != std::string::npos && !(Incarnation::parse(giver) == me);
        return is_other && std::atol(giver.substr(space).c_str()) > 0;
    }

    void rest_from_looking(double from, double now) {
        // It may have taken long because this process was stopped: it knows nothing of the others then.
        const double shares = is_aligned ? 4 : 1;  // who has to catch up must know soon what others open
        look_earliest = now + std::max(options.poll, shares * std::min(now - from, options.expiry / 8));
        // Its end, or a sync that it might jump to.
        const bool is_awaiting = is_waiting || is_leaving || !is_aligned;
        look_around_at = is_awaiting ? look_earliest : std::max(look_earliest, now + options.expiry / 4);
    }

    // from: when it was asked for
    void see(const std::map<std::string, std::string>& listing, double from, double now) {
        std::map<int, std::string> beats;
        long others_newest = -1;
        for (const auto& [name, text] : listing) {
            const int worker = std::atoi(name.c_str());
            const LogBeat beat = LogBeat::parse(text);
            beats[worker] = text;
            note_open(beat.newest);
            if (worker != me.worker) { others_newest = std::max(others_newest, beat.newest); }
            if (worker == me.worker && beat.incarnation > me.number) {
                return stop("another process has started as this worker");
            }
        }
        if (others_newest < newest_open) { not_open_at = from; }
        has_looked = true;
        looked_from = from;
        presence.look(beats, now);
        tell_changes();
    }

    void note_open(long sync) {
        if (sync <= newest_open) { return; }
        newest_open = sync;
        not_open_at = looked_from;
    }

    // The worker with the lowest number gives; the next one where nobody does, or who does gets no further.
    void choose_reader(bool is_last, double now) {
        has_looked_last = is_last;
        is_wanted = false;
        if (giving && !presence.is_alive(Incarnation::parse(giving->want))) { give_no_more(); }
        // Whose own parameters no entry has confirmed yet lets others go first.
        const bool am_proven = std::find(is_proven.begin(), is_proven.end(), false) == is_proven.end();
        const int before_me = presence.running_before(me.worker) + (am_proven ? 0 : options.workers);
        for (const auto& [want, one] : wanted) {
            if (!presence.is_alive(Incarnation::parse(want))) { continue; }
            is_wanted = true;
            const Incarnation giver = Incarnation::parse(one.giver);
            const bool is_given = presence.is_at_work(giver) && !(giver == me);
            const double patience = (before_me + (is_given ? 3 : 0)) * options.grace;
            if (!giving && now >= one.since + patience) { giving = Giving{want, !one.giver.empty()}; }
        }
    }

    // Nobody is alive that could give a snapshot. If somebody has ended, nobody is awaited.
    void look_for_an_end() {
        looks_for_an_end = false;
        look_for_offer();
        ask({StoreRequest::list, key("done"), "", ""}, [this](const StoreAnswer& answer, double) {
            if (snapshot.offer) { return; }
            if (answer.listing.empty()) { return tell_of_nobody(); }
            over = true;
            stop("the run is over, and nobody is there to take a snapshot from");
        });
    }

    void tell_of_nobody() {
        if (std::exchange(has_told_of_nobody, true)) { return; }
        say(LogEventKind::too_few, "waits: nobody who is alive holds what the run has: start a worker that "
                                   "has a checkpoint of it, or begin another run (--run-name)");
    }

    // -------------------------------------------------------------------------------------------------------
    // Snapshots

    bool lacks_snapshot() const { return giving && giving->is_claimed && giving->bytes.empty(); }

    // False: what lies in this worker's memory is not what the last syncs left there.
    bool write_snapshot() {
        for (int p = 0; p < int(slots.size()); p++) {
            if (shard.hash(p) != slots[size_t(p)].hash) {
                diverge();
                return false;
            }
        }
        giving->bytes = numbers(positions()) + "\n" + shard.snapshot();
        chores.push_back({{StoreRequest::put, key("held"), giving->want, numbers(positions())},
                          [](const StoreAnswer&, double) {}});
        return true;
    }

    void give() {
        if (!giving->is_claimed) { return claim(); }
        if (giving->bytes.empty()) { return; }  // the trainer's turn
        if (giving->chunks < chunks_of(giving->bytes.size(), options.snapshot_chunk)) {
            return give_chunk();
        }
        const LogOffer mine{me, giving->bytes.size(), digest_of(giving->bytes)};
        ask({StoreRequest::put_if_absent, key("offer"), giving->want, mine.text()},
            [this, want = giving->want](const StoreAnswer& answer, double) {
                if (!gives(want)) { return; }
                if (!(LogOffer::parse(answer.value).giver == me)) { return give_no_more(); }
                say(LogEventKind::gives_snapshot, "gives a snapshot to " + giving->want);
                giving.reset();
            });
    }

    std::string progress() const { return me.text() + " " + std::to_string(giving->chunks); }

    void claim() {
        const auto kind = giving->takes_over ? StoreRequest::put : StoreRequest::put_if_absent;
        ask({kind, key("giver"), giving->want, progress()},
            [this, want = giving->want](const StoreAnswer& answer, double) {
                if (!gives(want)) { return; }
                giving->is_claimed = Incarnation::parse(answer.value) == me;
                if (!giving->is_claimed) { giving.reset(); }
            });
    }

    // Unless the reader has gone, or has an offer already.
    void give_chunk() {
        const auto stop_if = [this](bool it_is_there) {
            return [this, it_is_there, want = giving->want](const StoreAnswer& answer, double) {
                if (gives(want) && answer.found == it_is_there) { give_no_more(); }
            };
        };
        ask({StoreRequest::get, key("want"), giving->want, ""}, stop_if(false));
        ask({StoreRequest::get, key("offer"), giving->want, ""}, stop_if(true));
        ask({StoreRequest::put_if_absent, key("snapshot/" + giving->want),
             me.text() + "." + std::to_string(giving->chunks),
             giving->bytes.substr(giving->chunks * options.snapshot_chunk, options.snapshot_chunk)},
            [this, want = giving->want](const StoreAnswer&, double) {
                if (gives(want)) { giving->chunks++; }
            });
        ask({StoreRequest::put, key("giver"), giving->want, progress()}, [](const StoreAnswer&, double) {});
    }

    // The chunk that may be on its way, too.
    void give_no_more() {
        for (size_t i = 0; i <= giving->chunks && !giving->bytes.empty(); i++) {
            add_removal(key("snapshot/" + giving->want), me.text() + "." + std::to_string(i));
        }
        giving.reset();
    }

    void fall_behind(const std::string& reason) {
        say(LogEventKind::needs_snapshot, reason + ": needs a snapshot");
        phase = Phase::behind;
        promise = LogBeat::catches_up;
        if (giving) { give_no_more(); }
        ask_for_snapshot();
    }

    // Under a new name each time.
    void ask_for_snapshot() {
        const int attempt = snapshot.attempt + 1;
        snapshot = Snapshot();
        snapshot.attempt = attempt;
    }

    std::string want() const { return me.text() + "." + std::to_string(snapshot.attempt); }

    void choose_behind(double now) {
        if (snapshot.is_whole) { return; }
        ask_chores();
        if (!snapshot.is_wanted) {
            ask({StoreRequest::put_if_absent, key("want"), want(), "-"},
                [this](const StoreAnswer&, double) { snapshot.is_wanted = true; });
        }
        if (snapshot.offer) {
            read_snapshot();
        } else if (looks_for_an_end) {
            look_for_an_end();
        } else if (now >= snapshot.look_at) {
            look_for_offer();
        }
        if (now >= look_around_at) { look_around(bool(snapshot.offer)); }
    }

    void look_for_offer() {
        ask({StoreRequest::get, key("offer"), want(), ""}, [this](const StoreAnswer& answer, double now) {
            snapshot.look_at = now + options.poll;
            if (answer.found) {
                snapshot.offer = LogOffer::parse(answer.value);
            } else {  // the wish may have been swept away while this worker was not alive
                snapshot.is_wanted = false;
            }
        });
    }

    // As much as one chunk of a payload holds.
    void read_snapshot() {
        const LogOffer& offer = *snapshot.offer;
        const size_t all = chunks_of(offer.bytes, options.snapshot_chunk);
        const size_t some = std::max(options.chunk / options.snapshot_chunk, size_t(1));
        for (size_t chunk = snapshot.chunks; chunk < std::min(all, snapshot.chunks + some); chunk++) {
            const std::string name = offer.giver.text() + "." + std::to_string(chunk);
            ask({StoreRequest::get, key("snapshot/" + want()), name, ""},
                [this, attempt = snapshot.attempt](const StoreAnswer& answer, double) {
                    if (snapshot.attempt == attempt) { take_chunk_of_snapshot(answer); }
                });
        }
    }

    void take_chunk_of_snapshot(const StoreAnswer& answer) {
        const LogOffer& offer = *snapshot.offer;
        snapshot.bytes += answer.value;
        snapshot.chunks++;
        const bool is_last = snapshot.chunks == chunks_of(offer.bytes, options.snapshot_chunk);
        if (!rules.is_chunk(answer) || (is_last && !rules.is_whole(snapshot.bytes, offer))) {
            say(LogEventKind::snapshot_gone, "finds its snapshot gone, and asks for another");
            remove_snapshot(want());
            return ask_for_snapshot();
        }
        snapshot.is_whole = is_last;
    }

    void load_snapshot() {
        const size_t end = snapshot.bytes.find('\n');
        shard.load(snapshot.bytes.substr(end + 1));
        enter(parse_numbers(snapshot.bytes.substr(0, end)), false);
        say(LogEventKind::takes_snapshot,
            "goes on from a snapshot, its fragments at syncs " + snapshot.bytes.substr(0, end));
        remove_snapshot(want());
        const int attempt = snapshot.attempt;
        snapshot = Snapshot();
        snapshot.attempt = attempt;
        phase = Phase::running;
    }

    // -------------------------------------------------------------------------------------------------------
    // Removing what nobody needs any more

    void sweep() {
        auto held = std::make_shared<std::vector<long>>(slots.size(), std::numeric_limits<long>::max());
        chores.push_back(
            {{StoreRequest::list, key("held"), "", ""},
             [this, held](const StoreAnswer& answer, double) { note_held(answer.listing, *held); }});
        chores.push_back(
            {{StoreRequest::list, key("durable"), "", ""}, [this, held](const StoreAnswer& answer, double) {
                 std::vector<long> oldest;
                 for (size_t p = 0; p < slots.size(); p++) {
                     std::vector<long> durable;
                     for (const auto& [worker, text] : answer.listing) {
                         durable.push_back(parse_numbers(text)[p]);
                     }
                     // The newest that is known to be decided.
                     const long index = schedule.index(slots[p].sync) - (slots[p].entry ? 0 : 1);
                     const long kept = rules.oldest_kept(index, options.retain, covered(durable, index));
                     oldest.push_back(std::min(kept, std::max((*held)[p], index - 16 * options.retain)));
                 }
                 sweep_records_of_means(oldest);
                 for (const char* what : {"payload/", "sent/", "mean/"}) { sweep_syncs(key(what), oldest); }
             }});
        sweep_snapshots();
    }

    // What those need that are alive and on their way from a snapshot. Not for ever: they may never catch up.
    void note_held(const std::map<std::string, std::string>& listing, std::vector<long>& held) {
        for (const auto& [want, text] : listing) {
            const Incarnation who = Incarnation::parse(want);
            if (!presence.is_alive(who) || presence.is_at_work(who)) {
                add_removal(key("held"), want);
                continue;
            }
            const std::vector<long> positions = parse_numbers(text);
            for (size_t p = 0; p < held.size(); p++) { held[p] = std::min(held[p], positions[p]); }
        }
    }

    // Up to where the checkpoints of two workers reach: one of them may be lost.
    long covered(std::vector<long> positions, long index) const {
        if (!options.checkpoints) { return index; }
        const size_t copies = size_t(std::min(2, options.min_workers));
        if (positions.size() < copies) { return 0; }
        std::sort(positions.rbegin(), positions.rend());
        return positions[copies - 1];
    }

    // oldest: that is kept, by fragment
    void sweep_syncs(const std::string& folder, const std::vector<long>& oldest) {
        chores.push_back({{StoreRequest::folders, folder, "", ""}, [=](const StoreAnswer& answer, double) {
                              for (const auto& [name, nothing] : answer.listing) {
                                  const long sync = std::atol(name.substr(folder.size()).c_str());
                                  if (!is_kept(sync, oldest)) { add_removal(name); }
                              }
                          }});
    }

    void sweep_records_of_means(const std::vector<long>& oldest) {
        if (options.merged_from.contributors == 0) { return; }
        chores.push_back(
            {{StoreRequest::list, key("means"), "", ""}, [=](const StoreAnswer& answer, double) {
                 for (const auto& [sync, record] : answer.listing) {
                     if (!is_kept(std::atol(sync.c_str()), oldest)) { add_removal(key("means"), sync); }
                 }
             }});
    }

    bool is_kept(long sync, const std::vector<long>& oldest) const {
        return schedule.index(sync) >= oldest[size_t(schedule.fragment(sync))];
    }

    // Snapshots whose reader is dead, or has started again, or has read them. What there is is asked for
    // before who wants it, or what is only now being written would seem to be wanted by nobody.
    void sweep_snapshots() {
        const std::string folder = key("snapshot/");
        auto there = std::make_shared<std::set<std::string>>();
        const auto note = [there](size_t prefix) {
            return [there, prefix](const StoreAnswer& answer, double) {
                for (const auto& [name, text] : answer.listing) { there->insert(name.substr(prefix)); }
            };
        };
        chores.push_back({{StoreRequest::folders, folder, "", ""}, note(folder.size())});
        for (const char* what : {"offer", "giver"}) {
            chores.push_back({{StoreRequest::list, key(what), "", ""}, note(0)});
        }
        chores.push_back(
            {{StoreRequest::list, key("want"), "", ""}, [this, there](const StoreAnswer& answer, double) {
                 for (const auto& [want, reason] : answer.listing) {
                     if (presence.is_alive(Incarnation::parse(want))) {
                         there->erase(want);
                     } else {
                         there->insert(want);
                     }
                 }
                 for (const std::string& want : *there) { remove_snapshot(want); }
             }});
    }

    void remove_snapshot(const std::string& want) {
        for (const char* what : {"want", "giver", "offer"}) { add_removal(key(what), want); }
        add_removal(key("snapshot/" + want));
    }

    static std::string numbers(const std::vector<long>& values) {
        std::string text;
        for (long value : values) { text += (text.empty() ? "" : " ") + std::to_string(value); }
        return text;
    }
    static std::vector<long> parse_numbers(const std::string& text) {
        std::vector<long> values;
        std::istringstream in(text);
        for (long value; in >> value;) { values.push_back(value); }
        return values;
    }

    static constexpr double long_ago = -1e300;

    const SyncLogOptions options;
    const SyncSchedule schedule;
    LogShard& shard;
    const SyncLogRules& rules;
    const LogStart start;
    Incarnation me;
    Phase phase = Phase::opening;
    std::string generation, run_fingerprint, why;
    bool diverged = false, over = false;
    std::vector<LogEvent> told;

    std::vector<Asked> asked;  // and not yet answered
    double asked_at = 0;
    bool asks_beats = false, asks_generation = false;  // behind what some fragment asks
    bool is_payloads_turn = false;
    bool is_cut_off = false;  // its last answer was lost
    double cut_off_since = 0;
    double retry_at = 0;
    std::vector<Asked> chores;

    double agree_from = 0, agree_at = 0;
    int next_number = 0;                    // to register as; 0: what is taken is not known yet
    bool is_registered = false;             // before the run has begun
    std::optional<LogBeginning> beginning;  // to be written, if there is none
    bool has_told_of_few = false;           // that they cannot begin

    std::vector<Slot> slots;  // by fragment
    size_t next_turn = 0;
    long step = 0;
    bool has_begun = false;  // it has found its place in the run: where, and when, as keep_time() has it
    long began_step = 0;
    double began_at = 0, waits_since = 0;
    long newest_sent = -1, newest_open = -1;  // syncs; by this worker, by any
    double not_open_at = long_ago;            // the newest one, by any other: when it looked last
    std::vector<long> encoded_until;          // by fragment: the newest sync that this start has encoded
    std::vector<bool> is_proven;              // by fragment: an entry stands on what it has
    long promise = LogBeat::catches_up;
    long jumps_to = -1;
    int times_late = 0;
    bool is_aligned = false;  // it keeps step with the others: its last payload was counted, without a jump

    double look_around_at = 0, look_earliest = 0;
    double looked_from = long_ago;  // when the last look was asked for
    bool has_looked = false;
    bool is_waiting = true;  // the trainer
    Presence presence;
    bool looks_at_wants = false, wants_are_last = false;
    std::map<std::string, Wanted> wanted;  // snapshots, that nobody offers
    bool is_wanted = false;                // by one that is alive
    std::optional<Giving> giving;
    std::deque<OutgoingMean> outgoing_means;
    Snapshot snapshot;
    double alone_since = -1;  // behind, and nobody there that could give one
    bool looks_for_an_end = false, has_told_of_nobody = false;

    bool is_finishing = false;     // behind the last step
    bool is_leaving = false;       // all is applied
    bool has_looked_last = false;  // since then: does anybody need anything?
    bool has_left = false;         // and said so
};
