// The trainer's side of a sync log (sync_log.h): at the end of a step it applies the syncs that are due and
// fetched, encodes what is sent, and says whether to continue, to wait or to jump.
#pragma once
#include <algorithm>

#include "streaming/elastic/sync_log.h"

inline LogTurn SyncLog::turn(long step, double now) {
    const LogTurn said = take_turn(step, now);
    const bool waits = said.kind == LogTurn::wait;
    // Keeps began_at so that the steps since began_step took the time since began_at, without the waits.
    if (waits && !is_waiting) {
        waits_since = now;
        look_around_at = std::min(look_around_at, std::max(look_earliest, now + pause()));
    } else if (!waits && !has_begun) {
        has_begun = true;
        began_step = step;
        began_at = now;
    } else if (!waits && is_waiting) {
        began_at += now - waits_since;
    }
    is_waiting = waits;
    return said;
}

inline LogTurn SyncLog::finish(long last_step, double now) {
    is_finishing = true;
    const LogTurn last = turn(last_step, now);
    if (last.kind != LogTurn::go_on) { return last; }
    if (!std::exchange(is_leaving, true)) { look_around_at = look_earliest; }
    return {has_left ? LogTurn::go_on : LogTurn::wait};
}

inline bool SyncLog::is_turn_due() const {
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
    return !waits && knows_its_place() && (!is_leaving || has_left);
}

inline LogTurn SyncLog::take_turn(long step, double now) {
    began_step += std::max(step - this->step - 1, 0L);  // steps that were jumped over are not done
    this->step = step;
    if (phase == Phase::behind && snapshot.is_whole) { load_snapshot(); }
    if (phase == Phase::stopped) { return {end.turn}; }
    if (phase != Phase::running) { return {LogTurn::wait}; }
    keep_pace(now);
    for (int p = ready(); p >= 0; p = ready()) { apply(slots[size_t(p)]); }
    if (lacks_snapshot()) { write_snapshot(now); }
    if (phase == Phase::stopped) { return {LogTurn::stop}; }
    if (is_far_behind()) { return jump(); }
    take_part();
    bool waits = false;
    for (Slot& slot : slots) {
        if (!is_due(slot.sync)) { continue; }
        waits = true;
        if (slot.due_since >= 0) { continue; }
        slot.due_since = now;
        const bool are_awaited = presence.missing(slot.sync, {}, now, now).all_waited_for;
        if (!are_awaited || !in_bucket()) { slot.look_at = now + (are_awaited ? pause() : 0); }
    }
    if (waits || !knows_its_place()) { return {LogTurn::wait}; }
    if (promise < 0 && has_looked) { promise = LogBeat::nothing; }
    return {LogTurn::go_on};
}

inline bool SyncLog::is_due(long sync) const {
    const long send_step = schedule.send_step(sync);
    return is_finishing ? rules.is_of_run(send_step, step) : send_step + options.overlap <= step;
}

// The fragment of the lowest sync that can be applied at this step. -1: none.
inline int SyncLog::ready() const {
    const Slot* first = nullptr;
    for (const Slot& slot : slots) {
        const bool may_be = is_due(slot.sync) || slot.own == Slot::none;
        if (slot.is_fetched() && may_be && (first == nullptr || slot.sync < first->sync)) { first = &slot; }
    }
    return first == nullptr ? -1 : int(first - slots.data());
}

// Whether it is behind by more steps than it may be. A worker that the others wait for does not jump for a
// short delay, nor before it has first sent, so that a run in which nobody is late skips no step.
inline bool SyncLog::is_far_behind() const {
    const long max_lag = is_aligned ? options.elastic.max_lag : 0;
    const bool may_catch_up = lag <= options.elastic.grace / 5 && 0 <= promise && promise <= newest_open;
    return !is_finishing && newest_open >= 0 && !may_catch_up &&
           schedule.send_step(newest_open) > step + max_lag;
}

// lag: seconds during which this worker was behind the others' newest sync. It falls by a fiftieth of
// the time that passes, as do the seconds that the others charge a worker with (Presence).
inline void SyncLog::keep_pace(double now) {
    const double seconds = now - std::exchange(turn_at, now);
    const long ahead = newest_open < 0 || newest_sent < 0 ? 0 : schedule.send_step(newest_open) - step;
    is_lagging = ahead > (is_lagging ? 0 : options.elastic.max_lag);
    lag = std::max(0.0, lag + (is_lagging ? seconds : 0) - seconds / 50);
}

// The ranks of a worker may need some turns to agree on it.
inline LogTurn SyncLog::jump() {
    const long to = schedule.send_step(newest_open);
    if (to != jumps_to) { say(LogEventKind::jumps, format("jumps from step %ld to %ld", step, to)); }
    jumps_to = to;
    return {LogTurn::jump, to};
}

inline void SyncLog::apply(Slot& slot) {
    const bool counted = slot.entry->counts(me.worker);
    std::vector<Contribution> contributions;
    for (size_t i = 0; i < slot.payloads.size(); i++) {
        contributions.push_back({slot.entry->contributors[i].who.worker, std::move(slot.payloads[i])});
    }
    shard.apply(slot.sync, contributions, counted);
    const std::string text = format("applies sync %ld, ", slot.sync) + (counted ? "it " : "not counted: it ");
    say(LogEventKind::applied, text + in_words(*slot.entry), slot.sync, slot.entry);
    told.back().bytes_read = slot.bytes_read;
    keep_promise(slot);
    const int p = schedule.fragment(slot.sync);
    const long next = slot.sync + schedule.fragments();
    slot = Slot();
    slot.sync = next;
    slot.hash = shard.hash(p);
}

// A worker whose payload counts has shown that it keeps pace. One that broke its promise promises nothing for
// now.
inline void SyncLog::keep_promise(const Slot& slot) {
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

// Called when its line is in the store. If that is within the first sender's grace, and before anybody has
// sent a later sync, waiting workers would get its payload in time, so it makes a promise.
inline void SyncLog::show_pace(long sync, double now) {
    const bool is_newest = schedule.send_step(newest_open) <= schedule.send_step(sync);
    if (is_newest && now <= not_open_at + options.elastic.grace) { make_promise(); }
}

// Promises the next sync, or a later one each time that it was late, so that others seldom wait in vain.
inline void SyncLog::make_promise() {
    if (promise >= 0 && promise != LogBeat::nothing) { return; }
    const long later = times_late < 2 ? 0 : long(schedule.fragments()) << std::min(times_late - 2, 4);
    promise = schedule.first_after(step) + later;
}

// Encodes what is sent at this step. Abstains if the send step was jumped over, and also if this start sent
// the sync before it took a snapshot: one name never holds two payloads.
inline void SyncLog::take_part() {
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
