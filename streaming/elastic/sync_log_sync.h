// The store's side of a sync (sync_log.h): payload and line are written, an entry is decided or found, and
// the payloads that it counts are read.
#pragma once
#include <algorithm>
#include <cmath>
#include <memory>

#include "streaming/elastic/sync_log.h"

inline bool SyncLog::needs_store(const Slot& slot, double now) const {
    if (slot.entry) { return false; }
    return slot.proposal || slot.own == Slot::sending || slot.own == Slot::abstaining ||
           (slot.has_line() && now >= slot.look_at);
}

inline void SyncLog::serve(Slot& slot) {
    if (slot.proposal) {
        write_entry(slot.sync, *slot.proposal);
    } else if (slot.own == Slot::sending) {
        send(slot);
    } else if (slot.own == Slot::abstaining) {
        write_line(slot, {slot.hash, 0, 0, 0}, Slot::abstained);
    } else {
        look(slot);
    }
}

// Handlers find their slot by its sync, since the slot may be at the next one by now.
inline SyncLog::Slot* SyncLog::find(long sync) {
    for (Slot& slot : slots) {
        if (slot.sync == sync) { return &slot; }
    }
    return nullptr;
}

// The line goes out with the last chunk; over a bucket it holds a small payload.
inline void SyncLog::send(Slot& slot) {
    const LogShard::Encoded* encoded = shard.encoded(slot.sync);
    if (encoded == nullptr) { return; }
    if (encoded->tokens == 0) {
        slot.own = Slot::abstaining;
        return;
    }
    const std::string& payload = encoded->payload;
    const bool is_in_line = payload.size() <= options.in_line;
    const size_t chunks = is_in_line ? 0 : chunks_of(payload.size(), options.chunk);
    if (slot.chunks < chunks) {
        ask(own_chunk(folder("payload", slot.sync), payload, slot.chunks, options.chunk),
            [this, sync = slot.sync](const StoreAnswer&, double) {
                if (Slot* slot = find(sync)) { slot->chunks++; }
            });
    }
    if (slot.chunks + 1 < chunks) { return; }
    slot.hash = encoded->hash;
    write_line(slot, {slot.hash, encoded->tokens, payload.size(), digest_of(payload)}, Slot::sent,
               is_in_line ? "\n" + payload : "");
}

// If this is the last line, a store with scripts decides. Otherwise the next look leads to one.
// payload: what goes behind the line
inline void SyncLog::write_line(Slot& slot, const LogLine& line, Slot::Own own, const std::string& payload) {
    const bool asks_winner = false;
    ask({StoreRequest::put_if_absent, folder("sent", slot.sync), me.text(), line.text() + payload, asks_winner},
        [this, sync = slot.sync, own, line](const StoreAnswer&, double now) {
            Slot* slot = find(sync);
            if (slot == nullptr) { return; }
            slot->own = own;
            if (own == Slot::sent) { show_pace(sync, now); }
            slot->found[me.text()] = line;
            if (is_near(*slot)) { weigh(*slot, now); }
        });
    if (options.in_line > 0) { return look(slot); }
    const std::string question = words(line.hash, me.text(), options.elastic.min_workers) + ";" +
                                 presence.awaited_and_dead();
    ask({StoreRequest::decide, run(), std::to_string(slot.sync), question});
    look(slot);
}

// The first looks over a bucket ask only for what comes next: for lines of workers at work, the first time
// beside the worker's own line, and then for the entry.
inline void SyncLog::look_shortly(Slot& slot) {
    const std::string lines = folder("sent", slot.sync);
    for (const Incarnation& who : presence.at_work()) {
        if (who == me || slot.found.count(who.text())) { continue; }
        ask({StoreRequest::get, lines, who.text()},
            [this, sync = slot.sync, who = who.text()](const StoreAnswer& answer, double now) {
                Slot* slot = find(sync);
                if (slot == nullptr || slot->entry || !is_near(*slot)) { return; }
                if (answer.found) { take_line(*slot, slot->found, who, answer.value); }
                if (phase == Phase::running) { weigh(*slot, now); }
            });
    }
    if (++slot.short_looks <= looks_at_lines) { return; }
    ask_entry(slot.sync, {StoreRequest::decision, run(), std::to_string(slot.sync), me.text()});
}

// request: reads or writes the entry, and brings the one that stands
inline void SyncLog::ask_entry(long sync, StoreRequest request) {
    const auto entry = std::make_shared<StoreAnswer>();
    ask(std::move(request), [entry](const StoreAnswer& answer, double) {
        *entry = answer;
        entry->found |= !answer.value.empty();
    });
    ask({StoreRequest::get, "run", "generation"},
        [this, sync, entry, open = newest_open](const StoreAnswer& answer, double now) {
            check_generation(answer);
            Slot* slot = find(sync);
            if (slot == nullptr || slot->entry || phase != Phase::running) { return; }
            slot->proposal.reset();
            slot->look_at = now + pause(*slot);
            if (entry->found) { return learn(*slot, *entry, open); }
            if (is_near(*slot)) { weigh(*slot, now); }
        });
}

// Decides if all workers at work have sent. If they had when this worker's own line was there, it was the
// last one, and decides at once. The others ask for its entry before they try.
inline void SyncLog::weigh(Slot& slot, double now) {
    slot.look_at = now + pause(slot);
    const std::vector<Incarnation> awaited = presence.at_work();
    const bool are_all = slot.found.count(me.text()) &&
                         std::all_of(awaited.begin(), awaited.end(), [&](const Incarnation& who) {
                             return slot.found.count(who.text()) != 0;
                         });
    if (slot.entry || !are_all || slot.proposal) { return; }
    if (slot.short_looks > 1) { slot.short_looks = std::max(slot.short_looks, looks_at_lines); }
    slot.look_at = now + pause(slot);
    if (slot.short_looks > 1 && slot.short_looks < most_short_looks - 1) { return; }
    slot.lines = slot.found;
    consider(slot, asked_at, now);
}

// After a short look the next one comes soon: the pauses begin at about half a round trip.
inline double SyncLog::pause(const Slot& slot) const {
    const double first = std::max(look_seconds / 8, 0.005);
    const int longer = slot.short_looks < looks_at_lines ? slot.short_looks - 1 : 0;
    return is_near(slot) ? std::min(pause(), first * std::pow(1.5, longer)) : pause();
}

inline void SyncLog::take_line(Slot& slot, LogLines& lines, const std::string& who, const std::string& text) {
    const size_t end = std::min(text.find('\n'), text.size());
    const LogLine line = LogLine::parse(text.substr(0, end));
    if (!rules.is_start(Incarnation::parse(who), who, options.workers) || line.text() != text.substr(0, end)) {
        return refuse("sent/" + std::to_string(slot.sync), who, text);
    }
    lines[who] = line;
    if (end < text.size() && who != me.text()) { slot.early[who] = text.substr(end + 1); }
}

// Should there be an entry? The beats are asked for after the lines.
inline void SyncLog::look(Slot& slot) {
    const bool is_over = slot.due_since >= 0 && asked_at >= slot.judged_since() + options.elastic.grace;
    if (is_near(slot) && !is_over) { return look_shortly(slot); }
    asks_beats = true;
    ask({StoreRequest::list, folder("sent", slot.sync)},
        [this, sync = slot.sync](const StoreAnswer& answer, double now) {
            Slot* slot = find(sync);
            if (slot == nullptr || slot->entry) { return; }
            slot->look_at = now + pause();
            if (answer.listing.count(me.text()) == 0) {  // the store came back without its newest data
                slot->own = slot->own == Slot::sent ? Slot::sending : Slot::abstaining;
                slot->chunks = 0;
                return;
            }
            slot->lines.emplace();
            for (const auto& [who, text] : answer.listing) {
                if (phase == Phase::running) { take_line(*slot, *slot->lines, who, text); }
            }
        });
}

// -----------------------------------------------------------------------------------------------------------
// Being told

// A slot with an entry needs its payloads; one that has sent, abstained or fallen behind needs its entry,
// which short looks ask for, too.
inline bool SyncLog::listens_to(const Slot& slot) const {
    if (slot.entry) { return !slot.is_fetched(); }
    return is_behind(slot) || (slot.own != Slot::none && !is_near(slot));
}

inline bool SyncLog::listens() const {
    return phase == Phase::running &&
           (has_idle_chores() || std::any_of(slots.begin(), slots.end(), [this](const Slot& slot) {
                return listens_to(slot);
            }));
}

// Waits for entries only if none of them can already be there. The generation is asked for after the entries,
// and no entry is used before it is checked. Requests whose answers are lost are made again.
inline std::vector<StoreRequest> SyncLog::listen() {
    heard.clear();
    for (Slot& slot : slots) {
        if (listens() && slot.entry && listens_to(slot)) { fetch_payloads(slot); }
    }
    awaits = heard.empty();
    const auto decisions = std::make_shared<std::map<long, StoreAnswer>>();  // by sync
    for (const Slot& slot : slots) {
        if (!listens() || slot.entry || !listens_to(slot)) { continue; }
        awaits &= slot.heard || !is_behind(slot);
        heard.push_back({{StoreRequest::decision, run(), std::to_string(slot.sync), me.text()},
                         [decisions, sync = slot.sync](const StoreAnswer& answer, double) {
                             (*decisions)[sync] = answer;
                         }});
    }
    const auto learn_all = [this, decisions, open = newest_open](const StoreAnswer& answer, double) {
        check_generation(answer);
        for (const auto& [sync, decision] : *decisions) {
            Slot* slot = find(sync);
            if (slot && phase == Phase::running) { learn(*slot, decision, open); }
        }
    };
    if (!heard.empty()) { heard.push_back({{StoreRequest::get, "run", "generation"}, learn_all}); }
    hears_chores = heard.empty() && phase == Phase::running && has_idle_chores();
    if (hears_chores) {
        heard.swap(chores);
        awaits = false;
    }
    std::vector<StoreRequest> requests;
    for (const Asked& one : heard) { requests.push_back(one.request); }
    return requests;
}

inline void SyncLog::hear(const std::vector<StoreAnswer>& answers, double now) {
    const std::vector<Asked> batch = std::exchange(heard, {});
    deaf = !answers.empty() && answers.back().lost ? answers.back().trouble : "";
    size_t next = 0;
    for (; next < batch.size() && !answers[next].lost && phase == Phase::running; next++) {
        batch[next].then(answers[next], now);
    }
    for (; hears_chores && next < batch.size(); next++) {
        ask_later(batch[next].request, batch[next].then, true);
    }
}

// open: the newest sync that somebody had sent when this was asked for
inline void SyncLog::learn(Slot& slot, const StoreAnswer& decision, long open) {
    slot.heard = true;
    if (!decision.found) {
        // A worker that sends the fragment's next sync has applied this one.
        if (open >= slot.sync + schedule.fragments()) { miss_entry(slot.sync); }
        return;
    }
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
    times_missed = sync == missed ? times_missed + 1 : 1;
    missed = sync;
    if (times_missed <= 3) { return fall_behind(format("finds the entry of sync %ld gone", sync)); }
    stop(format("the store holds a damaged or forged record: a beat in %s says that sync %ld was sent, and "
                "sync %ld is not decided", key("beat").c_str(), newest_open, sync));
}

// Lines and beats have just been read.   asked: when they were asked for
inline void SyncLog::consider(Slot& slot, double asked, double now) {
    const StandingLines standing = standing_lines(*slot.lines, slot.hash, rules);
    slot.lines.reset();
    if (majority_of(standing).value_or(slot.hash) != slot.hash) { return diverge(slot); }
    tell_of_few(slot, standing, asked);
    if (phase == Phase::stopped) { return; }
    const Question question{slot.sync, slot.hash, due_for_all(slot, now), stands_since(now), me};
    charge(question, standing, presence, options.elastic.min_workers, pause(), asked);
    slot.proposal = decide(question, standing, presence, rules, options.elastic.min_workers,
                           options.elastic.grace, asked, now);
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

// Tells that nobody may decide: too few workers have sent, or no hash has a majority.
inline void SyncLog::tell_of_few(Slot& slot, const StandingLines& standing, double asked) {
    const bool waits = slot.due_since >= 0 && asked >= slot.judged_since() + options.elastic.grace;
    const bool are_few = int(standing.size()) < options.elastic.min_workers;
    const bool are_split = !are_few && !majority_of(standing);
    if (!waits || !(are_few || are_split)) { return; }
    const std::string holders = in_words(holders_of_hashes(standing));
    if (are_split && int(standing.size()) >= options.workers) {
        end.diverged = true;
        return stop("nobody knows whose global parameters are right: there are workers " + holders);
    }
    const std::string what =
        are_few ? format("%zu of at least %d workers have sent", standing.size(), options.elastic.min_workers)
                : "no global parameters have a majority (" + holders + ") among the workers that have sent";
    say_waits(what + format(" sync %ld", slot.sync), slot.sync);
}

// An entry that is already there stays. This worker learns the result through listen(), like all others.
inline void SyncLog::write_entry(long sync, const LogEntry& entry) {
    const StoreRequest write = {rules.entry_is_written_by(), key("entry"), std::to_string(sync), entry.text()};
    if (options.in_line > 0) { return ask_entry(sync, write); }
    ask(write, [this, sync](const StoreAnswer&, double now) {
            Slot* slot = find(sync);
            if (slot == nullptr) { return; }
            slot->proposal.reset();
            slot->look_at = now + pause();
        });
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
    presence.note(entry, slot.sync);
    tell_changes();
    const int named = int(entry.contributors.size() + entry.abstained.size());
    const bool was_few = std::exchange(are_few, entry.counts(me.worker) && 2 * named <= options.workers);
    if (are_few && !was_few) {
        const std::string text = format("goes on with %d of %d workers", named, options.workers);
        say(LogEventKind::too_few, text, slot.sync);
    }
    if (entry.decider == me) {
        say(LogEventKind::decided, slot.sync, entry, format("decides sync %ld: it ", slot.sync));
        if (slot.sync % schedule.fragments() == 0) { sweep(); }  // once a period
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
        return fall_behind("has begun with other global parameters than the run's");
    }
    diverge();
}

inline void SyncLog::diverge() {
    end.diverged = true;
    stop(format("the global parameters of worker %d are not those of the run", me.worker));
}

// Asks for about as many bytes as one chunk holds.
inline void SyncLog::fetch_payloads(Slot& slot) {
    size_t asked_for = 0;
    for (size_t i = 0; i < slot.payloads.size(); i++) {
        const Contributor& one = slot.entry->contributors[i];
        const size_t chunk = chunk_of(one.bytes);
        const bool is_in_line = one.bytes <= options.in_line;
        for (size_t at = slot.payloads[i].size(); at < one.bytes && asked_for < options.chunk; at += chunk) {
            const std::string name = is_in_line ? one.who.text() : chunk_name(one.who, at / chunk);
            heard.push_back({{StoreRequest::get, folder(is_in_line ? "sent" : "payload", slot.sync), name},
                             [this, sync = slot.sync, i, at, is_in_line](StoreAnswer answer, double) {
                                 Slot* slot = find(sync);
                                 if (is_in_line) { answer.value.erase(0, answer.value.find('\n') + 1); }
                                 if (slot) { take_chunk(*slot, i, at, answer); }
                             }});
            asked_for += std::min(chunk, one.bytes - at);
        }
    }
}

// A damaged payload is as good as none: a snapshot from a worker that has another copy of it replaces it.
// at: the chunk's place in the payload
inline void SyncLog::take_chunk(Slot& slot, size_t i, size_t at, const StoreAnswer& answer) {
    if (phase != Phase::running || i >= slot.payloads.size() || at != slot.payloads[i].size()) { return; }
    if (!answer.found) { return fall_behind(format("finds a payload of sync %ld gone", slot.sync)); }
    const Contributor& one = slot.entry->contributors[i];
    const size_t bytes = std::min(chunk_of(one.bytes), one.bytes - at);
    const std::string name = folder("payload", slot.sync) + " " + chunk_name(one.who, at / chunk_of(one.bytes));
    if (answer.value.size() != bytes) {
        return fall_behind(
            format("finds %s damaged (%zu bytes in place of %zu)", name.c_str(), answer.value.size(), bytes));
    }
    slot.payloads[i] += answer.value;
    slot.bytes_read += answer.value.size();
    if (slot.has_payload(i) && digest_of(slot.payloads[i]) != one.digest) {
        fall_behind(format("finds %s damaged (its digest is another one)", name.c_str()));
    }
}

// Of payloads that came with their lines. A worker does not read back its own payload. It checks that the
// entry has the payload's size and digest.
inline void SyncLog::take_known_payloads(Slot& slot) {
    for (size_t i = 0; i < slot.payloads.size(); i++) {
        const auto early = slot.early.find(slot.entry->contributors[i].who.text());
        if (early != slot.early.end()) { take_chunk(slot, i, 0, {false, false, "", true, early->second, {}}); }
        if (phase != Phase::running) { return; }
        if (!rules.is_own_payload(slot.entry->contributors[i].who, me)) { continue; }
        const LogShard::Encoded* encoded = shard.encoded(slot.sync);
        if (encoded == nullptr) { continue; }
        const Contributor& one = slot.entry->contributors[i];
        if (one.bytes != encoded->payload.size() || one.digest != digest_of(encoded->payload)) {
            return refuse("entry", std::to_string(slot.sync), slot.entry->text());
        }
        slot.payloads[i] = encoded->payload;
    }
}
