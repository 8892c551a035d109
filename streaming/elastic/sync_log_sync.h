// The store's side of a sync (sync_log.h): payload and line are sent, an entry is decided or found, and the
// payloads that it counts are read; of a merged sync the mean is read, or written.
#pragma once
#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "llmc/error.h"
#include "streaming/elastic/sync_log.h"

// -----------------------------------------------------------------------------------------------------------
// A sync, on the store's side

inline SyncLog::Next SyncLog::next(const Slot& slot, double now) const {
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

inline SyncLog::Next SyncLog::next_to_read(const Slot& slot, double now) const {
    if (slot.reads_payloads) {
        const bool has_all = slot.mean.is_being_made || slot.has_payloads();
        return has_all ? Next::nothing : Next::fetch;
    }
    if (slot.mean.record) { return Next::fetch; }
    return now >= slot.look_at ? Next::look_for_mean : Next::nothing;
}

// False: there is nothing but a payload, or a mean, that it needs.
inline bool SyncLog::serve(Slot& slot, double now) {
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

inline void SyncLog::move_payload(Slot& slot, double now) {
    const Next what = next(slot, now);
    if (what == Next::send) { send(slot); }
    if (what == Next::fetch) { slot.reads_payloads ? fetch_payloads(slot) : fetch_mean(slot); }
}

// Handlers find their slot by its sync: it may have moved on.
inline SyncLog::Slot* SyncLog::find(long sync) {
    for (Slot& slot : slots) {
        if (slot.sync == sync) { return &slot; }
    }
    return nullptr;
}

// The last chunk with its line.
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

// And looks at once whether all others are there.
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

// Is there an entry? If not, should there be one? Which workers are alive is asked after the lines, and
// whether it still is the same run after all else.
inline void SyncLog::look(Slot& slot, bool has_line) {
    asks_generation = true;
    ask({StoreRequest::get, key("entry"), std::to_string(slot.sync), ""},
        [this, sync = slot.sync, must_be_there = has_been_applied(slot.sync)](const StoreAnswer& answer,
                                                                              double now) {
            Slot* slot = find(sync);
            if (slot == nullptr || phase != Phase::running) { return; }
            slot->looked = true;
            rest_from_looking_at(*slot, now);
            if (answer.found) {
                slot->entry = LogEntry::parse(answer.value);
            } else if (must_be_there) {
                fall_behind(format("finds the entry of sync %ld gone", sync));
            }
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

// By somebody: whoever sends the same fragment's next sync, or a later one, has.
inline bool SyncLog::has_been_applied(long sync) const {
    return newest_open >= sync + schedule.fragments();
}

// The store had its line, and has it no more: it came back without what it was told last.
inline void SyncLog::send_again(Slot& slot) {
    slot.own = slot.own == Slot::sent ? Slot::sending : Slot::abstaining;
    slot.chunks = 0;
}

// The trainer stands still for what is due.
inline void SyncLog::rest_from_looking_at(Slot& slot, double now) const {
    slot.look_at = now + (slot.due_since < 0 ? options.poll : options.poll / 10);
}

// Lines, and then beats, are as they have just been read.   asked: when they were asked for
inline void SyncLog::consider(Slot& slot, double asked, double now) {
    const LogLines lines = *std::exchange(slot.lines, std::nullopt);
    if (is_odd_one(lines, slot.hash, rules)) { return diverge(slot); }
    tell_of_few(slot, lines, asked);
    if (phase == Phase::stopped) { return; }
    const Question question{slot.sync, slot.hash, due_for_all(slot, now), stands_since(now), me};
    charge(question, lines, presence, rules, options.min_workers, asked);
    slot.proposal =
        decide(question, lines, presence, rules, options.min_workers, options.grace, asked, now);
}

// Since when it would be due if there were more steps; negative: not yet. What is due only because this
// worker has none left, the others still have time for.
inline double SyncLog::due_for_all(const Slot& slot, double now) const {
    const long left = schedule.send_step(slot.sync) + options.overlap - step, done = step - began_step;
    if (slot.due_since < 0) { return -1; }
    double since = judged_since(slot);
    if (left > 0 && done > 0) { since += double(left) * (slot.due_since - began_at) / double(done); }
    return now < since ? -1 : since;
}

// Since when the first of those is due that nobody has decided; negative: none is.
inline double SyncLog::stands_since(double now) const {
    double first = -1;
    for (const Slot& slot : slots) {
        const double since = slot.entry ? -1 : due_for_all(slot, now);
        if (since >= 0 && (first < 0 || since < first)) { first = since; }
    }
    return first;
}

inline double SyncLog::judged_since(const Slot& slot) {
    return slot.due_since < 0 ? -1 : slot.due_since + slot.excused;
}

// Nobody may decide: too few have sent it, or most of those stand on no hash.
inline void SyncLog::tell_of_few(Slot& slot, const LogLines& lines, double asked) {
    const StandingLines standing = standing_lines(lines, slot.hash, rules);
    const bool waits = slot.due_since >= 0 && asked >= judged_since(slot) + options.grace;
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

inline void SyncLog::write_entry(long sync, const LogEntry& entry) {
    asks_generation = true;
    ask({rules.entry_is_written_by(), key("entry"), std::to_string(sync), entry.text()},
        [this, sync, entry](const StoreAnswer& answer, double) {
            const LogEntry decided = rules.decided(entry, LogEntry::parse(answer.value));
            if (Slot* slot = find(sync)) { slot->entry = decided; }
        });
}

inline void SyncLog::look_at_generation() {
    ask({StoreRequest::get, "run", "generation", ""}, [this](const StoreAnswer& answer, double now) {
        check_generation(answer);
        for (Slot& slot : slots) {
            if (phase == Phase::running && slot.entry && !slot.confirmed) { confirm(slot, now); }
        }
    });
}

inline void SyncLog::confirm(Slot& slot, double now) {
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
inline void SyncLog::diverge(const Slot& slot) {
    if (!is_proven[size_t(schedule.fragment(slot.sync))]) {
        return fall_behind("has begun with other global parameters than the run's");
    }
    diverge();
}

inline void SyncLog::diverge() {
    diverged = true;
    stop(format("the global parameters of worker %d are not those of the run", me.worker));
}

// As much as one chunk holds, and what is begun with it.
inline void SyncLog::fetch_payloads(Slot& slot) {
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
inline void SyncLog::fetch_chunks(const std::string& folder, const Incarnation& who, size_t from,
                                  size_t whole, size_t& asked_for, const Handler& then) {
    for (size_t at = from; at < whole && asked_for < options.chunk; at += options.chunk) {
        ask({StoreRequest::get, folder, chunk_name(who, at / options.chunk), ""}, then);
        asked_for += std::min(options.chunk, whole - at);
    }
}

inline void SyncLog::take_chunk(Slot& slot, size_t i, const StoreAnswer& answer) {
    if (phase != Phase::running) { return; }
    if (!answer.found) { return fall_behind(format("finds a payload of sync %ld gone", slot.sync)); }
    slot.payloads[i] += answer.value;
    slot.bytes_read += answer.value.size();
    if (slot.has_payload(i)) { check_payload(slot, i); }
}

inline void SyncLog::check_payload(const Slot& slot, size_t i) {
    const Contributor& one = slot.sources[i];
    if (digest_of(slot.payloads[i]) == one.digest) { return; }
    stop(format("the payload of worker %d for sync %ld is damaged", one.who.worker, slot.sync));
}

// What it has sent itself it has.
inline void SyncLog::read_payloads(Slot& slot) {
    slot.reads_payloads = true;
    for (size_t i = 0; i < slot.payloads.size(); i++) {
        if (!rules.is_own_payload(slot.sources[i].who, me)) { continue; }
        const LogShard::Encoded* encoded = shard.encoded(slot.sync);
        if (encoded == nullptr) { continue; }
        slot.payloads[i] = encoded->payload;
        check_payload(slot, i);
    }
}

// -----------------------------------------------------------------------------------------------------------
// The mean of a merged sync

// Beside a look for the entry: the mean may be there as well.
inline void SyncLog::look_for_mean(long sync) {
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

inline void SyncLog::judge_missing(Slot& slot, double now) {
    if (has_been_applied(slot.sync)) {
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

inline void SyncLog::do_without_mean(Slot& slot, const std::string& why) {
    say(LogEventKind::without_mean, format("makes the mean of sync %ld itself: ", slot.sync) + why,
        slot.sync);
    read_payloads(slot);
}

inline void SyncLog::fetch_mean(Slot& slot) {
    const LogOffer& record = *slot.mean.record;
    size_t asked_for = 0;
    fetch_chunks(folder("mean", slot.sync), record.giver, slot.mean.bytes.size(), record.bytes, asked_for,
                 [this, sync = slot.sync](const StoreAnswer& answer, double) {
                     Slot* slot = find(sync);
                     if (slot != nullptr && !slot->reads_payloads) { take_chunk_of_mean(*slot, answer); }
                 });
}

inline void SyncLog::take_chunk_of_mean(Slot& slot, const StoreAnswer& answer) {
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
inline void SyncLog::write_mean() {
    const OutgoingMean& mean = outgoing_means.front();
    const size_t chunks = chunks_of(mean.bytes.size(), options.chunk);
    ask(own_chunk(folder("mean", mean.sync), mean.bytes, mean.chunks, options.chunk),
        [this](const StoreAnswer&, double) { outgoing_means.front().chunks++; });
    if (mean.chunks + 1 < chunks) { return; }
    const LogOffer record{me, mean.bytes.size(), digest_of(mean.bytes)};
    ask({StoreRequest::put_if_absent, key("means"), std::to_string(mean.sync), record.text()},
        [this](const StoreAnswer&, double) { outgoing_means.pop_front(); });
}
