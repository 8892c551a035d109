// The store's side of a sync (sync_log.h): payload and line are written, an entry is decided or found, and
// the payloads that it counts are read.
#pragma once
#include <algorithm>

#include "streaming/elastic/sync_log.h"

inline SyncLog::Next SyncLog::next(const Slot& slot, double now) const {
    if (slot.entry) { return slot.confirmed && !slot.is_fetched() ? Next::fetch : Next::nothing; }
    if (slot.proposal) { return Next::decide; }
    // If others are ahead there probably is an entry, and nothing to send any more.
    const bool is_behind = newest_open > slot.sync;
    if (is_behind && !slot.looked) { return Next::look; }
    if (slot.own == Slot::sending) { return Next::send; }
    if (slot.own == Slot::abstaining) { return Next::abstain; }
    return now >= slot.look_at && (slot.has_line() || is_behind) ? Next::look : Next::nothing;
}

// Asks for what is small. False: the slot needs nothing, or a payload.
inline bool SyncLog::serve(Slot& slot, double now) {
    const Next what = next(slot, now);
    if (what == Next::decide) { write_entry(slot.sync, *slot.proposal); }
    if (what == Next::look) { look(slot, slot.has_line()); }
    if (what == Next::abstain) { write_line(slot, {slot.hash, 0, 0, 0}, Slot::abstained); }
    return what == Next::decide || what == Next::look || what == Next::abstain;
}

inline void SyncLog::move_payload(Slot& slot, double now) {
    const Next what = next(slot, now);
    if (what == Next::send) { send(slot); }
    if (what == Next::fetch) { fetch_payloads(slot); }
}

// Handlers find their slot by its sync, since the slot may be at the next one by now.
inline SyncLog::Slot* SyncLog::find(long sync) {
    for (Slot& slot : slots) {
        if (slot.sync == sync) { return &slot; }
    }
    return nullptr;
}

// The line goes out with the last chunk.
inline void SyncLog::send(Slot& slot) {
    const LogShard::Encoded* encoded = shard.encoded(slot.sync);
    if (encoded == nullptr) { return; }
    if (encoded->tokens == 0) {
        slot.own = Slot::abstaining;
        return;
    }
    const std::string& payload = encoded->payload;
    const size_t chunks = chunks_of(payload.size(), options.chunk);
    if (slot.chunks < chunks) {
        ask(own_chunk(folder("payload", slot.sync), payload, slot.chunks, options.chunk),
            [this, sync = slot.sync](const StoreAnswer&, double) {
                if (Slot* slot = find(sync)) { slot->chunks++; }
            });
    }
    if (slot.chunks + 1 < chunks) { return; }
    slot.hash = encoded->hash;
    write_line(slot, {slot.hash, encoded->tokens, payload.size(), digest_of(payload)}, Slot::sent);
}

// Also looks at once whether the lines of all others are there.
inline void SyncLog::write_line(Slot& slot, const LogLine& line, Slot::Own own) {
    ask({StoreRequest::put_if_absent, folder("sent", slot.sync), me.text(), line.text()},
        [this, sync = slot.sync, own](const StoreAnswer&, double now) {
            Slot* slot = find(sync);
            if (slot == nullptr) { return; }
            slot->own = own;
            if (own == Slot::sent) { show_pace(sync, now); }
        });
    look(slot, true);
}

// Is there an entry? If not, should there be one? The beats are asked for after the lines, and the generation
// after everything else.
inline void SyncLog::look(Slot& slot, bool has_line) {
    asks_generation = true;
    // A worker that sends the fragment's next sync has applied this one.
    const bool must_be_there = newest_open >= slot.sync + schedule.fragments();
    ask({StoreRequest::get, key("entry"), std::to_string(slot.sync)},
        [this, sync = slot.sync, must_be_there](const StoreAnswer& answer, double now) {
            Slot* slot = find(sync);
            if (slot == nullptr || phase != Phase::running) { return; }
            slot->looked = true;
            const bool is_awaited = slot->due_since >= 0;  // by the trainer
            slot->look_at = now + (is_awaited ? options.poll / 10 : options.poll);
            if (answer.found) {
                take_entry(*slot, answer.value);
            } else if (must_be_there) {
                miss_entry(sync);
            }
        });
    if (!has_line) { return; }
    asks_beats = true;
    ask({StoreRequest::list, folder("sent", slot.sync)},
        [this, sync = slot.sync](const StoreAnswer& answer, double) {
            Slot* slot = find(sync);
            if (slot == nullptr || slot->entry) { return; }
            if (answer.listing.count(me.text()) == 0) {  // the store came back without its newest data
                slot->own = slot->own == Slot::sent ? Slot::sending : Slot::abstaining;
                slot->chunks = 0;
                return;
            }
            slot->lines.emplace();
            for (const auto& [who, text] : answer.listing) {
                const LogLine line = LogLine::parse(text);
                if (!rules.is_start(Incarnation::parse(who), who, options.workers) || line.text() != text) {
                    return refuse("sent/" + std::to_string(sync), who, text);
                }
                (*slot->lines)[who] = line;
            }
        });
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
    const LogLines lines = rules.taken_as_sent(*slot.lines, presence.alive(), slot.hash);
    const StandingLines standing = standing_lines(lines, slot.hash, rules);
    slot.lines.reset();
    if (is_odd_one(standing, slot.hash)) { return diverge(slot); }
    tell_of_few(slot, standing, asked);
    if (phase == Phase::stopped) { return; }
    const Question question{slot.sync, slot.hash, due_for_all(slot, now), stands_since(now), me};
    charge(question, standing, presence, options.elastic.min_workers, asked);
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
    const bool are_split = !are_few && !has_majority(standing, rules);
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

inline void SyncLog::write_entry(long sync, const LogEntry& entry) {
    asks_generation = true;
    ask({rules.entry_is_written_by(), key("entry"), std::to_string(sync), entry.text()},
        [this, sync, entry](const StoreAnswer& answer, double) {
            if (Slot* slot = find(sync)) { take_entry(*slot, rules.decided(entry.text(), answer.value)); }
        });
}

inline void SyncLog::take_entry(Slot& slot, const std::string& text) {
    const LogEntry entry = LogEntry::parse(text);
    const bool is_whole = entry.text() == text;
    if (!is_whole || !rules.is_possible(entry, options.workers, options.elastic.min_workers)) {
        return refuse("entry", std::to_string(slot.sync), text);
    }
    slot.entry = entry;
}

// No worker of this run can have written that record.
inline void SyncLog::refuse(const std::string& folder, const std::string& name, const std::string& text) {
    stop("the store holds a damaged or forged record, " + key(folder) + " " + name + ": \"" +
         text.substr(0, 200) + "\"");
}

inline void SyncLog::confirm(Slot& slot) {
    if (slot.entry->hash != slot.hash) { return diverge(slot); }
    slot.confirmed = true;
    is_proven[size_t(schedule.fragment(slot.sync))] = true;
    slot.payloads.resize(slot.entry->contributors.size());
    presence.note(*slot.entry, slot.sync);
    tell_changes();
    if (slot.entry->decider == me) {
        say(LogEventKind::decided, slot.sync, *slot.entry, format("decides sync %ld: it ", slot.sync));
        if (slot.sync % schedule.fragments() == 0) { sweep(); }  // once a period
    }
    take_own_payload(slot);
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
        for (size_t at = slot.payloads[i].size(); at < one.bytes && asked_for < options.chunk;
             at += options.chunk) {
            const std::string name = chunk_name(one.who, at / options.chunk);
            ask({StoreRequest::get, folder("payload", slot.sync), name},
                [this, sync = slot.sync, i](const StoreAnswer& answer, double) {
                    if (Slot* slot = find(sync)) { take_chunk(*slot, i, answer); }
                });
            asked_for += std::min(options.chunk, one.bytes - at);
        }
    }
}

// A damaged payload is as good as none: a snapshot from a worker that has another copy of it replaces it.
inline void SyncLog::take_chunk(Slot& slot, size_t i, const StoreAnswer& answer) {
    if (phase != Phase::running) { return; }
    if (!answer.found) { return fall_behind(format("finds a payload of sync %ld gone", slot.sync)); }
    const Contributor& one = slot.entry->contributors[i];
    const size_t at = slot.payloads[i].size(), bytes = std::min(options.chunk, one.bytes - at);
    const std::string name = folder("payload", slot.sync) + " " + chunk_name(one.who, at / options.chunk);
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

// A worker does not read back its own payload. It checks that the entry has the payload's size and digest.
inline void SyncLog::take_own_payload(Slot& slot) {
    for (size_t i = 0; i < slot.payloads.size(); i++) {
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
