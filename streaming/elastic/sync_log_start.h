// The start of a sync log (sync_log.h): the store's generation, whether its run has this worker's options,
// the number of this start, and what the run begins with.
#pragma once
#include <algorithm>
#include <stdexcept>

#include "streaming/elastic/sync_log.h"

inline SyncLog::SyncLog(const SyncLogOptions& options, const SyncSchedule& schedule, int worker,
                        LogShard& shard, const SyncLogRules& rules, const LogStart& start)
    : options(options), schedule(schedule), shard(shard), rules(rules), start(start),
      candidates(options.expiry, options.elastic.grace), presence(options.expiry, options.elastic.grace) {
    me.worker = worker;
    encoded_until.assign(start.positions.size(), -1);
    enter(start.positions, !start.from_checkpoint);
}

inline void SyncLog::open() {
    ask({StoreRequest::put_if_absent, "run", "generation", start.token},
        [this](const StoreAnswer& answer, double) {
            generation = answer.value;
            phase = Phase::comparing;
        });
}

// The first worker writes the options that all must have, for all shards.
inline void SyncLog::compare() {
    ask({StoreRequest::put_if_absent, generation + "/run", "fingerprint", start.fingerprint},
        [this](const StoreAnswer& answer, double) {
            if (!rules.is_same_run(start.fingerprint, answer.value)) {
                end.theirs = answer.value;
                return stop("its options differ from the run's");
            }
            phase = Phase::registering;
        });
}

// Takes the first number above all that are taken.
inline void SyncLog::register_start() {
    const std::string folder = key("incarnation/" + std::to_string(me.worker));
    if (next_number == 0) {
        return ask({StoreRequest::list, folder}, [this](const StoreAnswer& answer, double) {
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
            if (start.from_checkpoint) { add_removal(key("done"), std::to_string(me.worker)); }
            phase = generation == start.generation ? Phase::running : Phase::agreeing;
            // The positions of a checkpoint of another generation mean nothing here, unless the log begins
            // with that checkpoint.
            checkpointed(phase == Phase::running ? start.positions : std::vector<long>(slots.size(), 0));
        });
}

inline LogBase SyncLog::base() const {
    LogBase base{positions(), {}};
    for (const Slot& slot : slots) { base.hashes.push_back(slot.hash); }
    return base;
}

// Agrees on what the log begins with: the newest state that the workers present hold (base_to_begin_with).
// All that are registered by then and alive are members, for which the run's first sync waits.
inline void SyncLog::agree(double now) {
    const auto then_begin = [this](const StoreAnswer& answer, double now) {
        if (!answer.found && !beginning) { return; }  // nobody has begun
        const LogBeginning there = LogBeginning::parse(answer.value);
        const bool is_whole = there.text() == answer.value && there.base.positions.size() == slots.size();
        is_whole ? begin(there, now) : refuse("run", "start", answer.value);
    };
    if (beginning) {
        return ask({StoreRequest::put_if_absent, key("run"), "start", beginning->text()}, then_begin);
    }
    if (now < agree_at) { return; }
    if (!is_registered) {
        ask({StoreRequest::put_if_absent, key("registered"), me.text(), base().text()},
            [this](const StoreAnswer&, double) { is_registered = true; });
    }
    ask({StoreRequest::get, key("run"), "start"}, then_begin);
    ask({StoreRequest::list, key("beat")}, [this, from = now](const StoreAnswer& answer, double now) {
        if (phase == Phase::agreeing) { candidates.look(answer.listing, from, now); }
    });
    ask({StoreRequest::list, key("registered")}, [this](const StoreAnswer& answer, double now) {
        if (phase == Phase::agreeing) { agree_on(answer.listing, now); }
    });
}

inline void SyncLog::agree_on(const Listing& registered, double now) {
    agree_at = now + options.poll;
    std::map<int, Incarnation> there;  // starts, by worker: the latest
    for (const auto& [text, base] : registered) {
        const Incarnation who = Incarnation::parse(text);
        const bool is_whole = LogBase::parse(base).positions.size() == slots.size();
        if (!is_whole || candidates.may_be_dead(who)) { continue; }
        if (there[who.worker].number < who.number) { there[who.worker] = who; }
    }
    const bool all = int(there.size()) >= options.workers;
    if (!all && now < agree_from + options.elastic.grace) { return; }
    const int least = std::max(options.elastic.min_workers, options.elastic.least_to_begin);
    if (!all && int(there.size()) < least) {
        return say_waits(format("%zu of at least %d workers have joined to begin", there.size(), least));
    }
    std::vector<Incarnation> members;
    std::vector<LogBase> held;
    for (const auto& [worker, who] : there) {
        members.push_back(who);
        held.push_back(LogBase::parse(registered.at(who.text())));
    }
    const std::optional<LogBase> base = base_to_begin_with(held);
    const std::string tie = "equally many workers hold different states after the same syncs";
    if (base) { beginning = LogBeginning{*base, members}; }
    if (!base) { all ? stop("it is unclear whose checkpoints are right: " + tie) : say_waits(tie); }
}

// The run's first sync waits for all members.
inline void SyncLog::begin(const LogBeginning& beginning, double now) {
    if (std::count(beginning.members.begin(), beginning.members.end(), me) > 0) {
        promise = LogBeat::nothing;
        for (int p = 0; p < schedule.fragments(); p++) {
            promise = std::min(promise, schedule.sync(p, beginning.base.positions[size_t(p)]));
        }
        presence.expect(beginning.members, promise, now);
        is_aligned = true;
    }
    if (!(beginning.base == base())) { return fall_behind("does not hold the state the run begins with"); }
    phase = Phase::running;
    is_proven.assign(slots.size(), true);  // the run begins with what it holds
    if (start.from_checkpoint) { checkpointed(start.positions); }
}

// Continues at these positions, with what the shard holds.   is_sure: the run holds the same
inline void SyncLog::enter(const std::vector<long>& positions, bool is_sure) {
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
