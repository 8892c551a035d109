// Requests of a sync log (sync_log.h): what goes to the store together and in which order; lost answers are
// asked for again. And the events that are told to the caller.
#pragma once
#include <algorithm>
#include <iterator>
#include <stdexcept>

#include "streaming/elastic/sync_log.h"

inline std::vector<StoreRequest> SyncLog::requests(double now) {
    if (phase == Phase::stopped || (!asked.empty() && now < retry_at)) { return {}; }
    if (asked.empty()) { choose(now); }
    std::vector<StoreRequest> requests;
    for (const Asked& one : asked) { requests.push_back(one.request); }
    return requests;
}

inline void SyncLog::answer(const std::vector<StoreAnswer>& answers, double now) {
    if (phase == Phase::stopped) { return; }
    std::vector<Asked> batch = std::exchange(asked, {});
    if (batch.size() != answers.size()) { throw std::logic_error("answers to other requests"); }
    retry_at = 0;
    size_t next = 0;
    for (; next < batch.size() && !answers[next].lost; next++) {
        if (is_cut_off && (!refuses_writes || writes(batch[next].request))) {
            is_cut_off = refuses_writes = false;
            say(LogEventKind::store_back, "has the store again");
            forgive(now - cut_off_since, now);
            asked_at = now;
        }
        batch[next].then(answers[next], now);
        if (phase == Phase::stopped) { return; }
    }
    if (next == batch.size()) { return; }
    const size_t lost = next;
    lose_store(batch[lost].request, answers[lost].trouble, now);
    const auto decides = [this](const StoreRequest& one) {  // an entry, or a line that closes another's place
        const bool is_line = one.kind == rules.line_is_written_by() && is_of_lines(one);
        return one.folder == key("entry") || (in_bucket() && is_line && one.name != words(me.worker));
    };
    for (; next < batch.size(); next++) {
        if (!decides(batch[next].request)) { asked.push_back(std::move(batch[next])); }
    }
    if (answers[lost].is_full) { make_room(now); }
}

inline double SyncLog::rest(double now) const {
    const double soon = 0.001;
    if (phase == Phase::stopped) { return options.poll; }
    if (!asked.empty()) { return std::max(retry_at - now, soon); }
    if (phase != Phase::running) { return chores.empty() ? options.poll : soon; }
    double until = looks_around_at();
    const bool gives = giving && !lacks_snapshot(), waits = chores_can_wait && !in_bucket();
    const bool has_chores = !chores.empty() && !waits;
    if (gives || has_chores || looks_at_wants || may_leave()) { until = now; }
    for (const Slot& slot : slots) {
        if (needs_store(slot, now)) { until = now; }
        if (slot.look_at > now) { until = std::min(until, slot.look_at); }
    }
    return std::max(until - now, soon);
}

inline LogPulse SyncLog::pulse() const {
    const bool is_known = phase == Phase::agreeing || phase == Phase::running || phase == Phase::behind;
    if (!is_known) { return LogPulse(); }
    const long promised = phase == Phase::behind ? LogBeat::needs_snapshot : promise;
    // Or applied, as are all before it, by the start that it resumes or by the giver of its snapshot.
    const long newest = phase == Phase::running ? std::max(newest_sent, all_applied()) : newest_sent;
    return {generation, key("beat"), me.worker, {me.number, 0, promised, newest}};
}

inline void SyncLog::check_generation(const StoreAnswer& answer) {
    if (phase == Phase::stopped || generation.empty() || answer.lost) { return; }
    if (!answer.found || answer.value != generation) {
        end.turn = LogTurn::lost;
        stop("the store has lost the run: it came back empty, or is another store");
    }
}

// -----------------------------------------------------------------------------------------------------------
// Asking: what goes out together

inline void SyncLog::lose_store(const StoreRequest& lost, const std::string& trouble, double now) {
    if (!std::exchange(is_cut_off, true)) {
        say(LogEventKind::store_lost, "has lost the store, and continues until it needs the store" +
                                          (trouble.empty() ? "" : ": " + trouble));
        cut_off_since = asked_at;
    }
    this->trouble = trouble;
    refuses_writes |= writes(lost);
    retry_at = now + options.retry;
    // A store that comes back may have lost its newest data. An entry must not stand on lost lines: their
    // senders would find the entry and not send again.
    for (Slot& slot : slots) {
        slot.lines.reset();
        slot.proposal.reset();
        slot.found.clear();
        slot.is_near = slot.is_gone = false;
        if (in_bucket() && slot.has_line() && !slot.entry) { send_again(slot); }
        slot.heard = false;
    }
}

// The store has no room for what is asked next. A snapshot can be given later; removals, and the lists that
// they need, come first.
inline void SyncLog::make_room(double now) {
    if (giving && !giving->bytes.empty()) {
        const auto is_of_it = [this](const Asked& one) {
            return one.request.folder == key("snapshot/" + giving->want) ||
                   (one.request.folder == key("held") && one.request.name == giving->want);
        };
        asked.erase(std::remove_if(asked.begin(), asked.end(), is_of_it), asked.end());
        put_off_giving("the store has no memory left for it", now);
    }
    if (phase == Phase::running && has_looked && now >= sweeps_at) {  // without room, nobody decides a sync
        // The last time did not help, or not for long: the run's checkpoints stand still.
        const bool is_in_need = options.checkpoints && now < sweeps_at + options.elastic.grace;
        sweeps_at = now + options.elastic.grace;
        if (is_in_need && !std::exchange(has_told_need, true)) {
            say(LogEventKind::too_few, "removes payloads that no checkpoint contains yet: the store is full");
        }
        sweep(true, is_in_need);
    }
    const auto takes_room = [this](const Asked& one) {
        return writes(one.request) && !is_of_lines(one.request);  // lines: again, without their payloads
    };
    const auto removes = [](const Asked& one) { return one.request.kind == StoreRequest::remove; };
    std::stable_partition(asked.begin(), asked.end(), removes);
    const auto first = std::stable_partition(chores.begin(), chores.end(), takes_room);
    asked.insert(asked.begin(), std::make_move_iterator(first), std::make_move_iterator(chores.end()));
    chores.erase(first, chores.end());
}

// The store did not answer for `seconds`: all deadlines move by as much.
inline void SyncLog::forgive(double seconds, double now) {
    candidates.forgive(seconds, now);
    presence.forgive(seconds, now);
    for (Slot& slot : slots) {
        if (slot.due_since >= 0) { slot.excused = std::min(slot.excused + seconds, now - slot.due_since); }
    }
    for (auto& [want, one] : wanted) { one.since = std::min(one.since + seconds, now); }
    if (alone_since >= 0) { alone_since = std::min(alone_since + seconds, now); }
}

inline void SyncLog::choose(double now) {
    asked_at = now;
    asks_beats = false;
    switch (phase) {
        case Phase::opening: return open();
        case Phase::comparing: return compare();
        case Phase::registering: return register_start();
        case Phase::agreeing: return agree(now);
        case Phase::running: return choose_running(now);
        case Phase::behind: return choose_behind(now);
        case Phase::stopped: return;
    }
}

inline void SyncLog::choose_running(double now) {
    const auto sends = [](const Slot& slot) { return slot.own == Slot::sending; };
    const bool has_payload = std::any_of(slots.begin(), slots.end(), sends);
    if (is_leaving || !chores_can_wait || has_payload != in_bucket()) { ask_chores(); }
    if (std::exchange(looks_at_wants, false)) { look_at_wants(); }
    bool moves = false;  // a chunk of a payload or of a snapshot
    for (Slot& slot : slots) {
        if (!needs_store(slot, now)) { continue; }
        moves |= slot.own == Slot::sending || slot.own == Slot::abstaining;
        serve(slot);
    }
    if (giving && !lacks_snapshot()) {
        moves = true;
        give();
    }
    if (asks_beats || now >= looks_around_at()) { look_around(moves); }
    if ((asked.empty() || (cannot_give() && chores.empty())) && may_leave()) {
        ask({StoreRequest::put, key("done"), std::to_string(me.worker), std::to_string(step)},
            [this](const StoreAnswer&, double) { has_left = true; });
    }
}

// Everything is applied, and no living worker needs a snapshot from this one.
inline bool SyncLog::may_leave() const {
    const bool is_needed = giving || (is_wanted && !cannot_give());
    return is_leaving && has_looked_last && !has_left && !is_needed;
}

inline void SyncLog::ask_chores() {
    const auto end = chores.begin() + std::min<long>(long(chores.size()), 64);  // more would hold up payloads
    std::move(chores.begin(), end, std::back_inserter(asked));
    chores.erase(chores.begin(), end);
}

// -----------------------------------------------------------------------------------------------------------
// Events

inline void SyncLog::stop(const std::string& reason) {
    end.why = reason;
    say(LogEventKind::stops, "stops: " + reason);
    phase = Phase::stopped;
}

// Once for each sync. In place of a sync: to_begin, nobody_to_give, no_room.
inline void SyncLog::say_waits(const std::string& what, long sync) {
    if (!waits_told.insert(sync).second) { return; }
    say(LogEventKind::too_few, "waits: " + what, std::max(sync, -1L));
}

// Tells what became of other workers. One that is gone may have finished.
inline void SyncLog::tell_changes() {
    for (const Presence::Change& change : presence.changes()) {
        if (change.worker == me.worker) { continue; }
        const std::string who = format("worker %d ", change.worker);
        if (change.kind == LogEventKind::gone) {
            if (!asks_if_done.insert(change.worker).second) { continue; }  // it was back for a moment
            ask_later({StoreRequest::get, key("done"), std::to_string(change.worker)},
                      [this, change, who](const StoreAnswer& answer, double) {
                          asks_if_done.erase(change.worker);
                          const auto is_it = [&](int worker, long) { return worker == change.worker; };
                          if (presence.count_alive(is_it) > 0) { return; }  // it is back already
                          const LogEventKind kind = answer.found ? LogEventKind::done : change.kind;
                          const char* what = answer.found ? "has ended" : "is gone";
                          told.push_back({kind, -1, change.worker, who + what});
                      });
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
