// The sync log: one worker's part in exchanges that wait for nobody who is slow, dead, or not yet there.
//
// Payloads lie in a store. Whose payloads make up sync s is decided there once, by an entry that is set if
// absent and never changed. The global parameters after s are a function of the entries up to s, so a worker
// is only ever at some position of one log: dying, stalling, being slow and joining are all the same, being
// behind. (Keys: sync_log_records.h. Who is counted: sync_log_decision.h. What safety hangs on:
// sync_log_rules.h.)
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
//   5. payloads, apply      At the due step; at once where this worker was not to send s any more. Whose
//                           payload was not counted moves local by what global moved.
//   6. removal              By the decider: payloads of its fragment that are older than `retain` syncs and
//                           that the checkpoints of two workers have behind them, so that the run survives
//                           the death of all of them and the loss of a disk; with them, what a stalled worker
//                           wrote too late.
// Who finds an entry's payload gone asks for a snapshot: all fragments of another worker as they were at one
// instant, in chunks, then an offer with their digest. The first offer is read, and checked; who finds a
// chunk gone asks again under a new name. What a dead start asked for, deciders remove.
//
// Who is waited for is said by beats. A beat promises to be in time from a sync on. Who was not, is not
// waited for until it promises again, later each time: a slow worker costs others little, a hung one a single
// grace. Who is more than max_lag steps behind the newest sync that anyone opened jumps to its step; who has
// just started, or sent too late to be counted, however little it is behind.
//
// Nothing here waits or asks a clock: request() says what to ask the store next, answer() takes what it said,
// one at a time; turn() is the trainer's, at the end of a step, and says whether it may go on. A lost answer
// is asked for again: every request may be done twice. The caller keeps these three apart (a mutex).
#pragma once
#include <algorithm>
#include <deque>
#include <functional>
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
#include "sync_log_records.h"
#include "sync_log_rules.h"

struct SyncLogOptions {
    int workers = 2;
    int min_workers = 2;
    long overlap = 1;         // tau
    long max_lag = 4;         // steps
    long retain = 4;          // syncs of each fragment
    bool checkpoints = true;  // payloads are kept until two workers' have them behind them
    size_t chunk = 64 << 20;  // bytes
    double grace = 10;        // seconds, as all that follows
    double expiry = 5;        // between two looks that find the same beat
    double poll = 0.1;        // between two looks at what has not happened yet
    double retry = 0.5;       // after a lost answer
};

// What a worker starts with. A first start: position 0 everywhere, no generation.
struct LogStart {
    std::string token;            // random, of this start
    std::string generation;       // in which the checkpoint was written
    std::vector<long> positions;  // of its fragments
    bool from_checkpoint = false;
};

struct Contribution {
    int worker;
    std::string payload;
};

// This worker's shard of the outer state. Called by the constructor and turn(); encoded(), by request().
class LogShard {
public:
    struct Encoded {
        std::string payload;
        uint64_t tokens = 0;
        uint64_t hash = 0;  // of the global parameters that it was made on, at that instant
    };

    virtual ~LogShard() = default;
    virtual uint64_t hash(int fragment) = 0;        // of its global parameters
    virtual void encode(long sync) = 0;             // global - local as they are now
    virtual const Encoded* encoded(long sync) = 0;  // null: not there yet. Stays until the sync is applied.

    // In ascending order of workers; none: global stays.
    // counted: this worker's payload is among them, maybe that of an earlier start
    virtual void apply(long sync, const std::vector<Contribution>& contributions, bool counted) = 0;

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
          presence(options.expiry) {
        me.worker = worker;
        enter(start.positions);
    }

    // What to ask the store now, if anything. The caller brings the answer before it asks for more.
    std::optional<StoreRequest> request(double now) {
        if (phase == Phase::stopped || (is_asked && now < retry_at)) { return std::nullopt; }
        if (!is_asked) { choose(now); }
        return is_asked ? std::optional<StoreRequest>(asked.request) : std::nullopt;
    }

    void answer(const StoreAnswer& answer, double now) {
        if (phase == Phase::stopped) { return; }
        if (answer.lost) {
            if (!is_cut_off) { say("has lost the store, and goes on until it needs it"); }
            is_cut_off = true;
            retry_at = now + options.retry;
            return;
        }
        if (is_cut_off) { say("has the store again"); }
        is_cut_off = false;
        is_asked = false;
        retry_at = 0;
        const Handler then = std::move(asked.then);
        then(answer, now);
    }

    // At the end of `step`, and again until it says something else than to wait.
    LogTurn turn(long step, double now) {
        if (phase == Phase::stopped) { return {LogTurn::stop}; }
        this->step = step;
        if (phase == Phase::behind && snapshot.is_whole) { load_snapshot(); }
        if (phase != Phase::running) { return {LogTurn::wait}; }
        if (giving && giving->bytes.empty() && !write_snapshot()) { return {LogTurn::stop}; }
        while (Slot* slot = ready()) { apply(*slot); }
        const long max_lag = is_aligned ? options.max_lag : 0;
        if (newest_open >= 0 && schedule.send_step(newest_open) > step + max_lag) {
            say(format("jumps from step %ld to %ld", step, schedule.send_step(newest_open)));
            return {LogTurn::jump, schedule.send_step(newest_open)};
        }
        take_part();
        for (Slot& slot : slots) {
            if (due_step(slot.sync) <= step && slot.due_since < 0) { slot.due_since = now; }
        }
        for (const Slot& slot : slots) {
            if (slot.due_since >= 0) { return {LogTurn::wait}; }
        }
        if (promise < 0) { promise = schedule.first_after(step); }
        return {LogTurn::go_on};
    }

    // For the heartbeat. An empty one: not registered yet.
    std::string beat(long count) const {
        const bool is_known = phase == Phase::agreeing || phase == Phase::running || phase == Phase::behind;
        return is_known ? LogBeat{me.number, count, promise, newest_sent}.text() : std::string();
    }
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
    const std::string& why_stopped() const { return why; }
    bool has_diverged() const { return diverged; }
    bool is_running() const { return phase == Phase::running; }
    bool is_idle() const { return !giving && chores.empty(); }
    std::vector<std::string> news() { return std::exchange(told, {}); }

private:
    using Handler = std::function<void(const StoreAnswer&, double now)>;
    struct Asked {
        StoreRequest request;
        Handler then;
    };
    enum class Phase { opening, registering, agreeing, running, behind, stopped };

    // A fragment's next sync.
    struct Slot {
        enum Own { none, sending, sent, abstaining, abstained };
        long sync = 0;
        uint64_t hash = 0;
        Own own = none;
        size_t chunks = 0;  // written
        bool looked = false;
        double look_at = 0;
        std::optional<LogEntry> entry;
        bool confirmed = false;
        std::vector<std::string> payloads;  // of the entry's contributors, as far as they are read
        std::string part;                   // of the next one
        double due_since = -1;
        bool has_told = false;  // that there are too few

        bool has_line() const { return own == sent || own == abstained; }
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
        std::string want, bytes;
        size_t chunks = 0;
    };

    // -------------------------------------------------------------------------------------------------------
    // Asking

    void ask(StoreRequest request, Handler then) {
        asked = {std::move(request), std::move(then)};
        is_asked = true;
    }

    std::string key(const std::string& folder) const { return generation + "/" + folder; }

    void choose(double now) {
        switch (phase) {
            case Phase::opening:
                return open();
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

    void choose_running(double now) {
        if (do_chore()) { return; }
        if (now >= look_around_at) { return look_around(now); }
        // In turns, so that none of them is put off for ever: all fragments, and who needs a snapshot.
        for (size_t i = 0; i <= slots.size() && !is_asked; i++) {
            next_turn = (next_turn + 1) % (slots.size() + 1);
            if (next_turn < slots.size()) {
                serve(slots[next_turn], now);
            } else if (giving) {
                give();
            }
        }
    }

    bool do_chore() {
        if (chores.empty()) { return false; }
        Asked chore = std::move(chores.front());
        chores.pop_front();
        ask(std::move(chore.request), std::move(chore.then));
        return true;
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
                phase = Phase::registering;
                me.number = 1;
            });
    }

    // The first number that is this start's own.
    void register_start() {
        const std::string folder = key("incarnation/" + std::to_string(me.worker));
        ask({StoreRequest::put_if_absent, folder, std::to_string(me.number), start.token},
            [this](const StoreAnswer& answer, double now) {
                if (!rules.is_own_start(answer.value, start.token)) {
                    me.number++;
                    return;
                }
                say("starts");
                agree_from = now;
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

    // What the log begins with: of those that are there, the newest. Who is registered before that begins
    // with the run, and keeps step from its first sync on.
    void agree(double now) {
        if (now < agree_at) { return; }
        ask({StoreRequest::get, key("run"), "start", ""}, [this](const StoreAnswer& answer, double) {
            if (answer.found) { return begin(LogBase::parse(answer.value)); }
            if (!is_aligned) {
                return ask({StoreRequest::put_if_absent, key("registered"), me.text(), base().text()},
                           [this](const StoreAnswer&, double) { is_aligned = true; });
            }
            ask({StoreRequest::list, key("registered"), "", ""},
                [this](const StoreAnswer& answer, double now) { agree_on(answer.listing, now); });
        });
    }

    void agree_on(const std::map<std::string, std::string>& registered, double now) {
        agree_at = now + options.poll;
        std::set<int> there;
        std::optional<LogBase> newest;
        for (const auto& [who, text] : registered) {
            const LogBase one = LogBase::parse(text);
            if (!newest || one.sum() > newest->sum()) { newest = one; }
            there.insert(Incarnation::parse(who).worker);
        }
        const bool all = int(there.size()) >= options.workers;
        const bool enough = int(there.size()) >= options.min_workers && now >= agree_from + options.grace;
        if (!newest || !(all || enough)) { return; }
        ask({StoreRequest::put_if_absent, key("run"), "start", newest->text()},
            [this](const StoreAnswer& answer, double) { begin(LogBase::parse(answer.value)); });
    }

    void begin(const LogBase& first) {
        if (first == base()) {
            phase = Phase::running;
            if (start.from_checkpoint) { checkpointed(start.positions); }
        } else {
            fall_behind("holds not what the run begins with");
        }
    }

    // At these positions, with what the shard holds.
    void enter(const std::vector<long>& positions) {
        if (int(positions.size()) != schedule.fragments()) {
            throw std::logic_error("positions of another number of fragments");
        }
        slots.assign(positions.size(), Slot());
        for (int p = 0; p < int(slots.size()); p++) {
            slots[size_t(p)].sync = schedule.sync(p, positions[size_t(p)]);
            slots[size_t(p)].hash = shard.hash(p);
        }
    }

    void stop(const std::string& reason) {
        why = reason;
        say("stops: " + reason);
        phase = Phase::stopped;
    }

    void say(const std::string& text) { told.push_back(me.text() + " " + text); }

    // -------------------------------------------------------------------------------------------------------
    // A sync, on the trainer's side

    long due_step(long sync) const { return schedule.send_step(sync) + options.overlap; }

    // What can be applied at this step: the lowest sync.
    Slot* ready() {
        Slot* first = nullptr;
        for (Slot& slot : slots) {
            const bool is_fetched = slot.confirmed && slot.payloads.size() == slot.entry->contributors.size();
            const bool is_due = due_step(slot.sync) <= step || slot.own == Slot::none;
            if (is_fetched && is_due && (first == nullptr || slot.sync < first->sync)) { first = &slot; }
        }
        return first;
    }

    void apply(Slot& slot) {
        std::vector<Contribution> contributions;
        for (size_t i = 0; i < slot.payloads.size(); i++) {
            contributions.push_back({slot.entry->contributors[i].who.worker, std::move(slot.payloads[i])});
        }
        const bool counted = slot.entry->counts(me.worker);
        shard.apply(slot.sync, contributions, counted);
        keep_promise(slot);
        const int p = schedule.fragment(slot.sync);
        const long next = slot.sync + schedule.fragments();
        slot = Slot();
        slot.sync = next;
        slot.hash = shard.hash(p);
    }

    // Who was not in time though it had promised to be promises again: at first for the next sync, then later
    // each time, so that others seldom wait in vain.
    void keep_promise(const Slot& slot) {
        if (slot.own == Slot::sent || slot.own == Slot::sending) {
            is_aligned = slot.entry->counts(me.worker);
        }
        if (slot.entry->counts(me.worker)) { times_late = 0; }
        if (promise < 0 || slot.sync < promise || slot.entry->knows(me.worker)) { return; }
        times_late++;
        const long later = times_late == 1 ? 0 : long(schedule.fragments()) << std::min(times_late - 2, 4);
        promise = schedule.first_after(step) + later;
        say(format("was late for sync %ld", slot.sync));
    }

    // Sends what is sent at this step; abstains where a send step has been passed over.
    void take_part() {
        for (Slot& slot : slots) {
            if (slot.own != Slot::none || slot.entry) { continue; }
            const long send_step = schedule.send_step(slot.sync);
            if (send_step == step) {
                shard.encode(slot.sync);
                slot.own = Slot::sending;
                newest_sent = std::max(newest_sent, slot.sync);
                newest_open = std::max(newest_open, slot.sync);
            } else if (send_step < step) {
                slot.own = Slot::abstaining;
            }
        }
    }

    // -------------------------------------------------------------------------------------------------------
    // A sync, on the store's side

    std::string folder(const char* what, long sync) const { return key(what + ("/" + std::to_string(sync))); }

    void serve(Slot& slot, double now) {
        if (slot.entry) {
            if (!slot.confirmed) { return confirm(slot); }
            if (slot.payloads.size() < slot.entry->contributors.size()) { fetch(slot); }
            return;
        }
        // Behind, it is likely that there is an entry: then there is nothing to send any more.
        const bool is_behind = newest_open > slot.sync;
        if (is_behind && !slot.looked) { return look(slot); }
        if (slot.own == Slot::sending) { return send(slot); }
        if (slot.own == Slot::abstaining) { return write_line(slot, {slot.hash, 0, 0, 0}, Slot::abstained); }
        if (now >= slot.look_at && (slot.has_line() || is_behind)) { look(slot); }
    }

    // Handlers find their slot by its sync: it may have moved on.
    Slot* find(long sync) {
        for (Slot& slot : slots) {
            if (slot.sync == sync) { return &slot; }
        }
        return nullptr;
    }

    void send(Slot& slot) {
        const LogShard::Encoded* encoded = shard.encoded(slot.sync);
        if (encoded == nullptr) { return; }
        if (encoded->tokens == 0) {
            slot.own = Slot::abstaining;
            return;
        }
        const std::string& payload = encoded->payload;
        if (slot.chunks == chunks_of(payload.size(), options.chunk)) {
            slot.hash = encoded->hash;
            return write_line(slot, {slot.hash, encoded->tokens, payload.size(), digest_of(payload)},
                              Slot::sent);
        }
        ask({StoreRequest::put_if_absent, folder("payload", slot.sync),
             me.text() + "." + std::to_string(slot.chunks),
             payload.substr(slot.chunks * options.chunk, options.chunk)},
            [this, sync = slot.sync](const StoreAnswer&, double) {
                if (Slot* slot = find(sync)) { slot->chunks++; }
            });
    }

    void write_line(Slot& slot, const LogLine& line, Slot::Own own) {
        ask({StoreRequest::put_if_absent, folder("sent", slot.sync), me.text(), line.text()},
            [this, sync = slot.sync, own](const StoreAnswer&, double) {
                if (Slot* slot = find(sync)) { slot->own = own; }
            });
    }

    // Is there an entry? If not, should there be one?
    void look(Slot& slot) {
        ask({StoreRequest::get, key("entry"), std::to_string(slot.sync), ""},
            [this, sync = slot.sync](const StoreAnswer& answer, double now) {
                Slot* slot = find(sync);
                if (slot == nullptr) { return; }
                slot->looked = true;
                slot->look_at = now + options.poll;
                if (answer.found) {
                    slot->entry = LogEntry::parse(answer.value);
                } else if (slot->has_line()) {
                    look_at_lines(*slot);
                }
            });
    }

    void look_at_lines(const Slot& slot) {
        ask({StoreRequest::list, folder("sent", slot.sync), "", ""},
            [this, sync = slot.sync](const StoreAnswer& answer, double now) {
                Slot* slot = find(sync);
                if (slot == nullptr) { return; }
                LogLines lines;
                for (const auto& [who, text] : answer.listing) { lines[who] = LogLine::parse(text); }
                if (is_odd_one(lines, slot->hash, rules)) { return diverge(); }
                tell_of_few(*slot, lines, now);
                const Question question{sync, slot->hash, slot->due_since, me};
                if (std::optional<LogEntry> entry =
                        decide(question, lines, presence, rules, options.min_workers, options.grace, now)) {
                    write_entry(sync, *entry);
                }
            });
    }

    void tell_of_few(Slot& slot, const LogLines& lines, double now) {
        const size_t there = standing_lines(lines, slot.hash, rules).size();
        const bool waits = slot.due_since >= 0 && now >= slot.due_since + options.grace;
        if (slot.has_told || !waits || int(there) >= options.min_workers) { return; }
        slot.has_told = true;
        say(format("waits: %zu of at least %d workers have sent sync %ld", there, options.min_workers,
                   slot.sync));
    }

    void write_entry(long sync, const LogEntry& entry) {
        ask({rules.entry_is_written_by(), key("entry"), std::to_string(sync), entry.text()},
            [this, sync, entry](const StoreAnswer& answer, double) {
                const LogEntry decided = rules.decided(entry, LogEntry::parse(answer.value));
                if (Slot* slot = find(sync)) { slot->entry = decided; }
            });
    }

    void confirm(Slot& slot) {
        ask({StoreRequest::get, "run", "generation", ""},
            [this, sync = slot.sync](const StoreAnswer& answer, double) {
                check_generation(answer);
                Slot* slot = find(sync);
                if (phase == Phase::stopped || slot == nullptr) { return; }
                if (slot->entry->hash != slot->hash) { return diverge(); }
                slot->confirmed = true;
                presence.note(*slot->entry, sync);
                if (slot->entry->decider == me) {
                    say(format("decided sync %ld: %s", sync, slot->entry->text().c_str()));
                    sweep(sync);
                }
            });
    }

    void diverge() {
        diverged = true;
        stop(format("the global parameters of worker %d are not those of the run", me.worker));
    }

    void fetch(Slot& slot) {
        const Contributor& one = slot.entry->contributors[slot.payloads.size()];
        const size_t chunk = slot.part.size() / options.chunk;
        ask({StoreRequest::get, folder("payload", slot.sync), one.who.text() + "." + std::to_string(chunk),
             ""},
            [this, sync = slot.sync, one](const StoreAnswer& answer, double) {
                Slot* slot = find(sync);
                if (slot == nullptr) { return; }
                if (!answer.found) { return fall_behind(format("finds a payload of sync %ld gone", sync)); }
                slot->part += answer.value;
                if (slot->part.size() < one.bytes) { return; }
                if (digest_of(slot->part) != one.digest) {
                    return stop(
                        format("the payload of worker %d for sync %ld is damaged", one.who.worker, sync));
                }
                slot->payloads.push_back(std::exchange(slot->part, ""));
            });
    }

    // -------------------------------------------------------------------------------------------------------
    // Looking around: who is alive, who needs a snapshot

    // Over a slow link at most a fifth of the time.
    void look_around(double from) {
        ask({StoreRequest::list, key("beat"), "", ""}, [this, from](const StoreAnswer& answer, double now) {
            see(answer.listing, now);
            ask({StoreRequest::list, key("want"), "", ""},
                [this, from](const StoreAnswer& answer, double now) {
                    look_around_at = now + std::max(options.poll, 4 * (now - from));
                    if (phase == Phase::running) { consider(answer.listing, now); }
                });
        });
    }

    void see(const std::map<std::string, std::string>& listing, double now) {
        std::map<int, std::string> beats;
        for (const auto& [name, text] : listing) {
            const int worker = std::atoi(name.c_str());
            const LogBeat beat = LogBeat::parse(text);
            beats[worker] = text;
            newest_open = std::max(newest_open, beat.newest);
            if (worker == me.worker && beat.incarnation > me.number) {
                return stop("another process has started as this worker");
            }
        }
        presence.look(beats, now);
    }

    // The worker with the lowest number gives; the next one, where that takes too long.
    void consider(const std::map<std::string, std::string>& wants, double now) {
        std::map<std::string, double> still;
        for (const auto& [want, reason] : wants) {
            const auto known = wanted_since.find(want);
            still[want] = known == wanted_since.end() ? now : known->second;
        }
        wanted_since = still;
        if (giving) { return; }
        const int before_me = presence.running_before(me.worker);
        std::vector<std::string> due;
        for (const auto& [want, since] : wanted_since) {
            const bool is_mine = Incarnation::parse(want).worker == me.worker;
            if (!is_mine && now >= since + before_me * options.grace) { due.push_back(want); }
        }
        if (!due.empty()) { choose_reader(due); }
    }

    void choose_reader(const std::vector<std::string>& wants) {
        ask({StoreRequest::list, key("offer"), "", ""}, [this, wants](const StoreAnswer& answer, double) {
            for (const std::string& want : wants) {
                if (!answer.listing.count(want)) {
                    giving = Giving{want, "", 0};
                    return;
                }
            }
        });
    }

    // -------------------------------------------------------------------------------------------------------
    // Snapshots

    // False: what lies in this worker's memory is not what the last syncs left there.
    bool write_snapshot() {
        for (int p = 0; p < int(slots.size()); p++) {
            if (shard.hash(p) != slots[size_t(p)].hash) {
                diverge();
                return false;
            }
        }
        giving->bytes = numbers(positions()) + "\n" + shard.snapshot();
        return true;
    }

    void give() {
        if (giving->bytes.empty()) { return; }  // the trainer's turn
        if (giving->chunks < chunks_of(giving->bytes.size(), options.chunk)) {
            return ask({StoreRequest::put_if_absent, key("snapshot/" + giving->want),
                        me.text() + "." + std::to_string(giving->chunks),
                        giving->bytes.substr(giving->chunks * options.chunk, options.chunk)},
                       [this](const StoreAnswer&, double) {
                           if (giving) { giving->chunks++; }
                       });
        }
        const LogOffer mine{me, giving->bytes.size(), digest_of(giving->bytes)};
        ask({StoreRequest::put_if_absent, key("offer"), giving->want, mine.text()},
            [this](const StoreAnswer& answer, double) {
                if (!giving) { return; }
                say("gives a snapshot to " + giving->want);
                for (size_t i = 0; i < giving->chunks && !(LogOffer::parse(answer.value).giver == me); i++) {
                    add_removal(key("snapshot/" + giving->want), me.text() + "." + std::to_string(i));
                }
                giving.reset();
            });
    }

    void fall_behind(const std::string& reason) {
        say(reason + ": needs a snapshot");
        phase = Phase::behind;
        promise = -1;
        giving.reset();
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
        if (snapshot.is_whole || do_chore()) { return; }
        if (now >= look_around_at) { return look_around(now); }
        if (!snapshot.is_wanted) {
            return ask({StoreRequest::put_if_absent, key("want"), want(), "-"},
                       [this](const StoreAnswer&, double) { snapshot.is_wanted = true; });
        }
        if (snapshot.offer) { return read_snapshot(); }
        if (now < snapshot.look_at) { return; }
        ask({StoreRequest::get, key("offer"), want(), ""}, [this](const StoreAnswer& answer, double now) {
            snapshot.look_at = now + options.poll;
            if (answer.found) {
                snapshot.offer = LogOffer::parse(answer.value);
            } else {  // the wish may have been swept away while this worker was not alive
                snapshot.is_wanted = false;
            }
        });
    }

    void read_snapshot() {
        const LogOffer& offer = *snapshot.offer;
        ask({StoreRequest::get, key("snapshot/" + want()),
             offer.giver.text() + "." + std::to_string(snapshot.chunks), ""},
            [this](const StoreAnswer& answer, double) {
                const LogOffer& offer = *snapshot.offer;
                snapshot.bytes += answer.value;
                snapshot.chunks++;
                const bool is_last = snapshot.chunks == chunks_of(offer.bytes, options.chunk);
                if (!rules.is_chunk(answer) || (is_last && !rules.is_whole(snapshot.bytes, offer))) {
                    say("finds its snapshot gone");
                    remove_snapshot(want());
                    return ask_for_snapshot();
                }
                snapshot.is_whole = is_last;
            });
    }

    void load_snapshot() {
        const size_t end = snapshot.bytes.find('\n');
        shard.load(snapshot.bytes.substr(end + 1));
        enter(parse_numbers(snapshot.bytes.substr(0, end)));
        say("goes on from a snapshot at " + snapshot.bytes.substr(0, end));
        remove_snapshot(want());
        const int attempt = snapshot.attempt;
        snapshot = Snapshot();
        snapshot.attempt = attempt;
        phase = Phase::running;
    }

    // -------------------------------------------------------------------------------------------------------
    // Removing what nobody needs any more

    void sweep(long sync) {
        chores.push_back(
            {{StoreRequest::list, key("durable"), "", ""}, [this, sync](const StoreAnswer& answer, double) {
                 const int p = schedule.fragment(sync);
                 std::vector<long> durable;
                 for (const auto& [worker, text] : answer.listing) {
                     durable.push_back(parse_numbers(text)[size_t(p)]);
                 }
                 const long reach = covered(durable, sync);
                 const long oldest = rules.oldest_kept(schedule.index(sync), options.retain, reach);
                 for (const char* what : {"payload/", "sent/"}) { sweep_syncs(key(what), p, oldest); }
             }});
        sweep_snapshots();
    }

    // Up to where the checkpoints of two workers reach: one of them may be lost.
    long covered(std::vector<long> positions, long sync) const {
        if (!options.checkpoints) { return schedule.index(sync); }
        const size_t copies = size_t(std::min(2, options.min_workers));
        if (positions.size() < copies) { return 0; }
        std::sort(positions.rbegin(), positions.rend());
        return positions[copies - 1];
    }

    void sweep_syncs(const std::string& folder, int p, long oldest) {
        chores.push_back({{StoreRequest::folders, folder, "", ""},
                          [this, folder, p, oldest](const StoreAnswer& answer, double) {
                              for (const auto& [name, nothing] : answer.listing) {
                                  const long sync = std::atol(name.substr(folder.size()).c_str());
                                  if (schedule.fragment(sync) == p && schedule.index(sync) < oldest) {
                                      add_removal(name);
                                  }
                              }
                          }});
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
        chores.push_back({{StoreRequest::list, key("offer"), "", ""}, note(0)});
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
        add_removal(key("want"), want);
        add_removal(key("offer"), want);
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

    const SyncLogOptions options;
    const SyncSchedule schedule;
    LogShard& shard;
    const SyncLogRules& rules;
    const LogStart start;
    Incarnation me;
    Phase phase = Phase::opening;
    std::string generation, why;
    bool diverged = false;
    std::vector<std::string> told;

    Asked asked;
    bool is_asked = false;    // and not yet answered
    bool is_cut_off = false;  // its last answer was lost
    double retry_at = 0;
    std::deque<Asked> chores;

    double agree_from = 0, agree_at = 0;

    std::vector<Slot> slots;  // by fragment
    size_t next_turn = 0;
    long step = 0;
    long newest_sent = -1, newest_open = -1;  // syncs; by this worker, by any
    long promise = -1;
    int times_late = 0;
    bool is_aligned = false;  // it keeps step with the others: its last payload was counted

    double look_around_at = 0;
    Presence presence;
    std::map<std::string, double> wanted_since;
    std::optional<Giving> giving;
    Snapshot snapshot;
};

// Shows that this process is alive, over a connection of its own: a payload may take a minute.
class Heartbeat {
public:
    explicit Heartbeat(double interval) : interval(interval) {}

    std::optional<StoreRequest> request(const SyncLog& log, int worker, double now) {
        if (is_checking) { return StoreRequest{StoreRequest::get, "run", "generation", ""}; }
        const std::string beat = log.beat(0);
        if (beat.empty() || (now < next && beat == shown)) { return std::nullopt; }
        shown = beat;
        next = now + interval;
        return StoreRequest{StoreRequest::put, log.current_generation() + "/beat", std::to_string(worker),
                            log.beat(++count)};
    }

    void answer(const StoreAnswer& answer, SyncLog& log) {
        if (is_checking) { log.check_generation(answer); }
        is_checking = !is_checking;
    }

private:
    double interval, next = 0;
    std::string shown;
    long count = 0;
    bool is_checking = false;
};
