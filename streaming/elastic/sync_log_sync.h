// The store's side of a sync (sync_log.h): payload and line are written, an entry is decided or found, and
// the payloads that it counts are read.
#pragma once
#include <algorithm>
#include <memory>
#include <string_view>

#include "streaming/elastic/sync_log.h"

inline bool SyncLog::needs_store(const Slot& slot, double now) const {
    if (slot.entry) { return false; }
    return slot.proposal || slot.own == Slot::sending || slot.own == Slot::abstaining ||
           (slot.has_line() && now >= slot.look_at);
}

inline void SyncLog::serve(Slot& slot) {
    if (slot.proposal) {
        in_bucket() ? close(slot) : write_entry(slot.sync, *slot.proposal);
    } else if (slot.own == Slot::sending) {
        send(slot);
    } else if (slot.own == Slot::abstaining) {
        write_line(slot, {slot.hash, 0, 0, 0}, Slot::abstained);
    } else {
        look(slot);
    }
}

// The line goes out with the last chunk; over a bucket it holds a small payload.
inline void SyncLog::send(Slot& slot) {
    const LogShard::Encoded* encoded = shard.encoded(slot.sync);
    if (encoded == nullptr) {  // a GPU may not have come to the send: this worker waits for nobody yet
        if (slot.due_since >= 0) { slot.due_since = asked_at, slot.excused = 0; }
        return;
    }
    if (encoded->tokens == 0) {
        slot.own = Slot::abstaining;
        return;
    }
    const std::string& payload = encoded->payload;
    const bool is_in_line = payload.size() <= options.in_line;
    const size_t chunks = is_in_line ? 0 : chunks_of(payload.size(), options.chunk);
    if (slot.chunks < chunks) {
        const size_t size = options.chunk, chunk = slot.chunks;
        ask(own_chunk(folder("payload", slot.sync), chunk, payload.substr(chunk * size, size)),
            with_slot(slot.sync, [](Slot& slot, const StoreAnswer&, double) { slot.chunks++; }));
    }
    if (slot.chunks + 1 < chunks) { return; }
    slot.hash = encoded->hash;
    write_line(slot, {slot.hash, encoded->tokens, payload.size(), digest_of(payload)}, Slot::sent,
               is_in_line ? "\n" + payload : "");
}

// If this is the last line, a store with scripts decides. Over a bucket the others' lines are asked for at
// the same time. Otherwise the next look leads to an entry.   payload: what follows the line
inline void SyncLog::write_line(Slot& slot, const LogLine& line, Slot::Own own, const std::string& payload) {
    const std::string name = in_bucket() ? words(me.worker) : me.text();
    const std::string text = (in_bucket() ? me.text() + " " : "") + line.text() + payload;
    ask({rules.line_is_written_by(), folder("sent", slot.sync), name, text, in_bucket()},
        with_slot(slot.sync, [this, own, name](Slot& slot, const StoreAnswer& answer, double now) {
            slot.own = own;
            if (own == Slot::sent) { show_pace(slot.sync, now); }
            if (!in_bucket() || slot.entry) { return; }
            slot.found[name] = answer.value;
            slot.is_near = true;
            slot.look_at = now + pause();
        }));
    if (in_bucket()) { return ask_lines(slot, Presence::at_work, false); }
    const std::string question = words(line.hash, me, options.elastic.min_workers) + ";" +
                                 presence.awaited_and_dead();
    ask({StoreRequest::decide, run(), std::to_string(slot.sync), question});
    look(slot);
}

// Over a bucket the lines of all workers are the entry (README.md).

// The workers whose lines are not found yet. A worker without a line asks for its own, too, if its place may
// have been closed, even while it sends a large payload.
inline std::vector<std::string> SyncLog::lacking(const Slot& slot, Presence::Which of) const {
    std::vector<std::string> missing;
    const bool may_be_closed = is_behind(slot) && (slot.own == Slot::none || slot.chunks > 0);
    for (int w = 0; w < options.workers; w++) {
        const bool is_one = w == me.worker ? may_be_closed && !slot.has_line() : presence.is(of, w);
        if (is_one && slot.found.count(words(w)) == 0) { missing.push_back(words(w)); }
    }
    return missing;
}

inline void SyncLog::add_lines(std::vector<Asked>& to, const Slot& slot, Presence::Which of) {
    for (const std::string& name : lacking(slot, of)) {
        const auto take = [this, name, open = newest_open](Slot& slot, const StoreAnswer& answer, double) {
            if (slot.entry || phase != Phase::running) { return; }
            if (answer.found) { slot.found[name] = answer.value; }
            (answer.found ? slot.is_near : slot.is_gone) |= answer.found || is_over(slot.sync, open);
        };
        to.push_back({{StoreRequest::get, folder("sent", slot.sync), name}, with_slot(slot.sync, take)});
    }
}

// Asks for lines, which count only if the store is still the one that has the run.
inline void SyncLog::ask_lines(const Slot& slot, Presence::Which of, bool may_close) {
    add_lines(asked, slot, of);
    ask({StoreRequest::get, "run", "generation"},
        [this, may_close, sync = slot.sync](const StoreAnswer& answer, double now) {
            check_generation(answer);
            if (Slot* slot = find(sync)) { weigh(*slot, may_close || lacking(*slot).empty(), now); }
        });
}

// may_close: it may be time to do without those that have no line
inline void SyncLog::weigh(Slot& slot, bool may_close, double now) {
    if (slot.entry || phase != Phase::running) { return; }
    slot.heard = true;
    if (std::exchange(slot.is_gone, false)) { return miss_entry(slot.sync); }
    may_close &= slot.has_line() && has_looked;
    if (!may_close && !rules.are_all(slot.found.size(), options.workers)) {
        if (!slot.is_near && lacking(slot).empty()) { slot.look_at = 0; }  // the last sender closed nobody
        return;
    }
    slot.look_at = now + pause();
    take_lines(slot, slot.found);
    if (phase == Phase::running) { consider(slot, std::min(asked_at, looked_from), now); }
}

// Puts a line that abstains into each empty place. The first line stays: the worker's own may come first.
inline void SyncLog::close(Slot& slot) {
    const LogEntry decision = *std::exchange(slot.proposal, std::nullopt);
    for (int w = 0; w < options.workers; w++) {
        if (slot.found.count(words(w))) { continue; }
        const bool is_missing = std::count(decision.missing.begin(), decision.missing.end(), w) > 0;
        const LogLine line{slot.hash, 0, size_t(decision.waited), is_missing};
        ask({rules.line_is_written_by(), folder("sent", slot.sync), words(w), words(me, line.text())},
            with_slot(slot.sync, [w](Slot& slot, const StoreAnswer& answer, double) {
                slot.found[words(w)] = answer.value;
            }));
    }
    slot.is_near = false;
    ask_lines(slot, Presence::nobody, true);
}

// All workers make the same entry from the same lines.
inline void SyncLog::settle(Slot& slot, const StandingLines& standing) {
    LogEntry entry = *std::exchange(slot.proposal, std::nullopt);
    const long turn = schedule.index(slot.sync) / 2 % long(standing.size());
    entry.decider = std::next(standing.begin(), turn)->second.first;
    entry.missing.clear();
    entry.waited = 0;
    for (const auto& [worker, line] : slot.closed) {
        if (line.digest) { entry.missing.push_back(worker); }
        entry.waited = std::max(entry.waited, long(line.bytes));
    }
    take_entry(slot, entry.text());
}

// A worker that has not sent asks only whether its place is closed, unless the sync must have been decided.
// Once all workers at work have sent, the others' places may soon be closed.
inline void SyncLog::listen_to_lines(Slot& slot) {
    const bool was_near = std::exchange(slot.is_near, false), has_all = lacking(slot).empty();
    if (was_near && has_all) { patience = std::min(patience, std::max(0.1, 3 * look_seconds)); }
    const bool has_own = slot.own != Slot::none || slot.found.count(words(me.worker)) > 0;
    const auto some = has_own ? Presence::at_work : Presence::nobody;
    const bool asks_all = has_all || is_over(slot.sync, newest_open);
    add_lines(listened_for, slot, asks_all ? Presence::anybody : some);
}

// Over a bucket a line says who wrote it, and lies under a worker's number. Another worker's closes the place.
inline void SyncLog::take_lines(Slot& slot, const Listing& texts) {
    slot.lines.emplace();
    slot.closed.clear();
    for (const auto& [name, text] : texts) {
        const std::string full = (in_bucket() ? "" : name + " ") + text.substr(0, text.find('\n'));
        const std::string start = full.substr(0, full.find(' '));
        const Incarnation who = Incarnation::parse(start);
        const LogLine line = LogLine::parse(full.substr(start.size()));
        const bool closes = in_bucket() && words(who.worker) != name;
        const bool is_whole = full == words(start, line.text()) && !(closes && line.tokens > 0);
        if (!rules.is_start(who, start, options.workers) || !is_whole) {
            return refuse("sent/" + std::to_string(slot.sync), name, text);
        }
        (closes ? slot.closed[std::atoi(name.c_str())] : (*slot.lines)[start]) = line;
    }
}

// Checks whether it is time for an entry. Beats are read after lines; over a bucket the heartbeat lists them.
inline void SyncLog::look(Slot& slot) {
    if (in_bucket()) {
        slot.look_at = asked_at + pause();
        if (int(slot.found.size()) >= options.elastic.min_workers) { weigh(slot, true, asked_at); }
        if (slot.proposal) { return close(slot); }
        const bool is_late = slot.due_since >= 0 && asked_at >= slot.judged_since() + options.elastic.grace;
        const bool asks_all = is_late || is_over(slot.sync, newest_open) || lacking(slot).empty();
        return ask_lines(slot, asks_all ? Presence::anybody : Presence::at_work, true);
    }
    asks_beats = true;
    ask({StoreRequest::list, folder("sent", slot.sync)},
        with_slot(slot.sync, [this](Slot& slot, const StoreAnswer& answer, double now) {
            if (slot.entry) { return; }
            slot.look_at = now + pause();
            if (answer.listing.count(me.text()) == 0) {  // the store came back without its newest data
                slot.chunks = 0;
                return send_again(slot);
            }
            take_lines(slot, answer.listing);
        }));
}

// A slot with an entry needs its payloads; one that has sent, abstained or fallen behind needs its entry. Over
// a bucket lines are asked for here only if they may be there soon; look() asks for them more seldom.
inline bool SyncLog::listens_to(const Slot& slot) const {
    if (slot.entry) { return !slot.is_fetched(); }
    if (!in_bucket()) { return slot.own != Slot::none || is_behind(slot); }
    const bool looks = slot.has_line() && slot.heard;
    return !slot.proposal && (slot.is_near || (is_behind(slot) && !looks));
}

inline bool SyncLog::listens() const {
    return phase == Phase::running && std::any_of(slots.begin(), slots.end(),
                                                  [this](const Slot& slot) { return listens_to(slot); });
}

// Waits for entries only if none of them can already be there. The generation is asked for after the entries,
// and checked before any entry is used. Requests whose answers are lost are made again.
inline std::vector<StoreRequest> SyncLog::listen() {
    listened_for.clear();
    if (!listens()) { return {}; }
    for (Slot& slot : slots) {
        if (slot.entry && listens_to(slot)) { fetch_payloads(slot); }
    }
    patience = listened_for.empty() ? 1 : 0;
    const auto decisions = std::make_shared<std::map<long, StoreAnswer>>();  // by sync
    for (Slot& slot : slots) {
        if (slot.entry || !listens_to(slot)) { continue; }
        if (is_behind(slot) && !slot.heard) { patience = 0; }
        if (in_bucket()) {
            listen_to_lines(slot);
            (*decisions)[slot.sync];
            continue;
        }
        listened_for.push_back(
            {{StoreRequest::decision, run(), std::to_string(slot.sync), me.text()},
             [decisions, at = slot.sync](const StoreAnswer& answer, double) { (*decisions)[at] = answer; }});
    }
    const auto learn_all = [this, decisions, open = newest_open](const StoreAnswer& answer, double now) {
        check_generation(answer);
        for (const auto& [sync, decision] : *decisions) {
            Slot* slot = find(sync);
            if (slot == nullptr || phase != Phase::running) { continue; }
            in_bucket() ? weigh(*slot, false, now) : learn(*slot, decision, open);
        }
    };
    listened_for.push_back({{StoreRequest::get, "run", "generation"}, learn_all});
    std::vector<StoreRequest> requests;
    for (const Asked& one : listened_for) { requests.push_back(one.request); }
    return requests;
}

inline void SyncLog::hear(const std::vector<StoreAnswer>& answers, double now) {
    const std::vector<Asked> batch = std::exchange(listened_for, {});
    const bool is_lost = !answers.empty() && answers.back().lost;
    listen_trouble = is_lost ? answers.back().trouble : "";
    for (Slot& slot : slots) { slot.is_near |= is_lost && slot.has_line() && !slot.entry; }
    for (size_t i = 0; i < batch.size() && !answers[i].lost && phase == Phase::running; i++) {
        batch[i].then(answers[i], now);
    }
}

// open: the newest sync that somebody had sent when this was asked for
inline void SyncLog::learn(Slot& slot, const StoreAnswer& decision, long open) {
    slot.heard = true;
    if (slot.entry) { return; }  // it was learned over the other connection meanwhile
    if (!decision.found && is_over(slot.sync, open)) { return miss_entry(slot.sync); }
    if (!decision.found) { return; }
    take_entry(slot, decision.value);
    for (size_t i = 0; i < slot.payloads.size(); i++) {
        const auto chunk = decision.listing.find(chunk_name(slot.entry->contributors[i].who, 0));
        if (chunk == decision.listing.end()) { continue; }
        take_chunk(slot, i, 0, {false, false, "", true, chunk->second, {}});
    }
}

// A later sync of the fragment was sent, and this one is not decided. The later one cannot have been sent
// before this one was decided. So if snapshots keep ending before it, the beat is forged or damaged.
inline void SyncLog::miss_entry(long sync) {
    times_missed = std::exchange(missed, sync) == sync ? times_missed + 1 : 1;
    if (times_missed <= 3) { return fall_behind(format("finds the entry of sync %ld gone", sync)); }
    stop(format("the store holds a damaged or forged record: a beat in %s says that sync %ld was sent, and "
                "sync %ld is not decided", key("beat").c_str(), newest_open, sync));
}

// Lines and beats have just been read.   asked: when they were asked for
inline void SyncLog::consider(Slot& slot, double asked, double now) {
    const StandingLines standing = standing_lines(*slot.lines, slot.hash, rules);
    slot.lines.reset();
    const bool are_all = in_bucket() && rules.are_all(slot.found.size(), options.workers);
    const bool is_other = majority_of(standing).value_or(slot.hash) != slot.hash;
    if (is_other && (are_all || !in_bucket())) { return diverge(slot); }
    tell_of_few(slot, standing, asked);
    if (phase == Phase::stopped) { return; }
    slot.proposal = decide(slot, standing, asked, now);
    if (slot.proposal && are_all) { settle(slot, standing); }
}

// The entry that this worker would write now, if it is time for one.
// asked: when the lines were asked for; missing workers may have sent since
inline std::optional<LogEntry> SyncLog::decide(const Slot& slot, const StandingLines& standing, double asked,
                                               double now) {
    if (int(standing.size()) < options.elastic.min_workers) { return std::nullopt; }
    std::set<int> there;  // workers with a line, their own or one that closes their place
    for (const auto& [worker, line] : standing) { there.insert(worker); }
    for (const auto& [worker, line] : slot.closed) { there.insert(worker); }
    const double due_since = due_for_all(slot, now), all_since = stands_since(now);
    const bool is_due = due_since >= 0;
    // If this worker still stands still, the missing workers are charged, but not for the first pause: the
    // lines of workers that are equally fast do not arrive at once. Nobody is charged for the time that the
    // answer took.
    if (is_due) { presence.charge(slot.sync, there, due_since + pause(), all_since, asked); }
    if (majority_of(standing) != slot.hash) { return std::nullopt; }
    const auto missing = presence.missing(slot.sync, there, all_since, now);
    const bool waits = missing.waited_for && asked < due_since + options.elastic.grace;
    if (!missing.who.empty() && (!is_due || waits)) { return std::nullopt; }

    LogEntry entry{slot.hash, me, {}, {}, missing.who, is_due ? long((now - due_since) * 1000) : 0};
    for (const auto& [worker, one] : standing) {
        const LogLine& line = one.second;
        if (rules.counts(line, slot.hash)) {
            entry.contributors.push_back({one.first, line.bytes, line.digest, line.tokens});
        } else {
            entry.abstained.push_back(worker);
        }
    }
    return entry;
}

// The time since which the sync is due; negative: it is not due yet. A worker that has no steps left counts
// from the time at which it would have reached the due step.
inline double SyncLog::due_for_all(const Slot& slot, double now) const {
    const long left = schedule.send_step(slot.sync) + options.overlap - step, done = step - began_step;
    if (slot.due_since < 0) { return -1; }
    double since = slot.judged_since();
    if (left > 0 && done > 0) { since += double(left) * (slot.due_since - began_at) / double(done); }
    return now < since ? -1 : since;
}

// The earliest due time of the syncs that nobody has decided; negative: none is due.
inline double SyncLog::stands_since(double now) const {
    double first = -1;
    for (const Slot& slot : slots) {
        const double since = slot.entry ? -1 : due_for_all(slot, now);
        if (since >= 0 && (first < 0 || since < first)) { first = since; }
    }
    return first;
}

// Tells that nobody may decide, since too few workers have sent or no hash has a majority; or that this
// worker may not, since another hash has the majority so far.
inline void SyncLog::tell_of_few(Slot& slot, const StandingLines& standing, double asked) {
    const bool waits = slot.due_since >= 0 && asked >= slot.judged_since() + options.elastic.grace;
    const bool are_few = int(standing.size()) < options.elastic.min_workers;
    const bool are_split = !are_few && !majority_of(standing);
    const bool are_others = !are_few && majority_of(standing).value_or(slot.hash) != slot.hash;
    if (!waits || !(are_few || are_split || are_others)) { return; }
    const std::string holders = in_words(holders_of_hashes(standing));
    if (are_split && int(standing.size() + slot.closed.size()) >= options.workers) {
        return stop("no global parameters have a majority, and no worker can still send (" + holders + ")");
    }
    const std::string what =
        are_few ? format("%zu of at least %d workers have sent", standing.size(), options.elastic.min_workers)
                : std::string(are_split ? "no" : "other") + " global parameters have a majority (" + holders +
                      ") among the workers that have sent";
    say_waits(what + format(" sync %ld", slot.sync), slot.sync);
}

// An entry that is already there stays. This worker learns the result through listen(), like all others.
inline void SyncLog::write_entry(long sync, const LogEntry& entry) {
    ask({rules.entry_is_written_by(), key("entry"), std::to_string(sync), entry.text()},
        with_slot(sync, [this](Slot& slot, const StoreAnswer&, double now) {
            slot.proposal.reset();
            slot.look_at = now + pause();
        }));
}

inline void SyncLog::take_entry(Slot& slot, const std::string& text) {
    const LogEntry entry = LogEntry::parse(text);
    const bool is_whole = entry.text() == text;
    if (!is_whole || !rules.is_possible(entry, options.workers, options.elastic.min_workers)) {
        return refuse("entry", std::to_string(slot.sync), text);
    }
    if (entry.hash != slot.hash) { return diverge(slot); }
    slot.entry = entry;
    is_proven[size_t(schedule.fragment(slot.sync))] = true;
    slot.payloads.resize(entry.contributors.size());
    presence.note(entry, slot.sync, me);
    tell_changes();
    const int named = int(entry.contributors.size() + entry.abstained.size());
    const bool was_few = std::exchange(are_few, entry.counts(me.worker) && 2 * named <= options.workers);
    if (are_few && !was_few) {
        const std::string text = format("continues with %d of %d workers", named, options.workers);
        say(LogEventKind::too_few, text, slot.sync);
    }
    for (const Contributor& one : entry.contributors) {
        has_large |= one.bytes > options.in_line;
        if (one.who.worker != me.worker || one.bytes > options.in_line) { continue; }
        trims[slot.sync] = words(one.who, entry.hash, one.tokens, one.bytes, one.digest);
    }
    if (entry.decider == me) {
        const std::string what = format("decides sync %ld: it ", slot.sync) + in_words(entry);
        say(LogEventKind::decided, what, slot.sync, entry);
        const long period = schedule.fragments(), rest = in_bucket() ? slot.sync % (4 * period) : 0;
        if (slot.sync % period == 0 && rest % (2 * period) == 0) { sweep(rest == 0); }
    }
    take_known_payloads(slot);
}

// No worker of this run can have written that record.
inline void SyncLog::refuse(const std::string& folder, const std::string& name, const std::string& text) {
    stop("the store holds a damaged or forged record, " + key(folder) + " " + name + ": \"" +
         text.substr(0, 200) + "\"");
}

// Wrong parameters that came from a checkpoint, or from a snapshot, are no reason to stop: after a restart
// they would be read again. Another snapshot replaces them.
inline void SyncLog::diverge(const Slot& slot) {
    if (!is_proven[size_t(schedule.fragment(slot.sync))]) {
        return fall_behind("began with global parameters that are not the run's");
    }
    diverge();
}

// Asks for about as many bytes as one chunk holds.
inline void SyncLog::fetch_payloads(Slot& slot) {
    size_t asked_for = 0;
    for (size_t i = 0; i < slot.payloads.size(); i++) {
        const Contributor& one = slot.entry->contributors[i];
        const size_t chunk = chunk_of(one.bytes);
        const bool is_in_line = one.bytes <= options.in_line;
        for (size_t at = slot.payloads[i].size(); at < one.bytes && asked_for < options.chunk; at += chunk) {
            const std::string name = is_in_line ? words(one.who.worker) : chunk_name(one.who, at / chunk);
            const auto take = [this, i, at](Slot& slot, const StoreAnswer& answer, double) {
                take_chunk(slot, i, at, answer);
            };
            const std::string place = folder(is_in_line ? "sent" : "payload", slot.sync);
            listened_for.push_back({{StoreRequest::get, place, name}, with_slot(slot.sync, take)});
            asked_for += std::min(chunk, one.bytes - at);
        }
    }
}

// A damaged payload counts as missing: the worker takes a snapshot from one that has read a good copy.
// at: the chunk's place in the payload   answer: the chunk, or a line that is followed by the payload
inline void SyncLog::take_chunk(Slot& slot, size_t i, size_t at, const StoreAnswer& answer) {
    if (phase != Phase::running || i >= slot.payloads.size() || at != slot.payloads[i].size()) { return; }
    const Contributor& one = slot.entry->contributors[i];
    const bool is_in_line = one.bytes <= options.in_line;
    const size_t begin = is_in_line ? answer.value.find('\n') + 1 : 0;  // 0 in a line: there is no payload
    if (!answer.found || (is_in_line && begin == 0)) {
        const char* advice = snapshot.attempt > 1 ? ": if it recurs, give all others a larger --retain" : "";
        return fall_behind(format("finds a payload of sync %ld gone", slot.sync) + advice);
    }
    const std::string_view chunk = std::string_view(answer.value).substr(begin);
    const size_t bytes = std::min(chunk_of(one.bytes), one.bytes - at);
    const std::string name = folder("payload", slot.sync) + " " + chunk_name(one.who, at / chunk_of(one.bytes));
    if (chunk.size() != bytes) {
        return fall_behind(
            format("finds %s damaged (%zu bytes instead of %zu)", name.c_str(), chunk.size(), bytes));
    }
    slot.payloads[i] += chunk;
    slot.bytes_read += chunk.size();
    if (slot.has_payload(i) && digest_of(slot.payloads[i]) != one.digest) {
        fall_behind(format("finds %s damaged (its digest does not match)", name.c_str()));
    }
}

// Takes payloads that came with their lines. A worker does not read back its own payload, but checks that the
// entry has its size and digest.
inline void SyncLog::take_known_payloads(Slot& slot) {
    for (size_t i = 0; i < slot.payloads.size(); i++) {
        const Contributor& one = slot.entry->contributors[i];
        const LogShard::Encoded* own = rules.is_own_payload(one.who, me) ? shard.encoded(slot.sync) : nullptr;
        if (own != nullptr) {
            if (one.bytes != own->payload.size() || one.digest != digest_of(own->payload)) {
                return refuse("entry", std::to_string(slot.sync), slot.entry->text());
            }
            slot.payloads[i] = own->payload;
            continue;
        }
        const std::string line = std::move(slot.found[words(one.who.worker)]);
        if (line.find('\n') < line.size()) { take_chunk(slot, i, 0, {false, false, "", true, line, {}}); }
        if (phase != Phase::running) { return; }
    }
}
