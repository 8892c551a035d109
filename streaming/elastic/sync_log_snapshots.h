// Looking around, and snapshots (sync_log.h): which workers are alive, by their beats; how this worker gives
// a snapshot to one that needs it, and how it gets one itself; and the removal of what nobody needs any more.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>

#include "streaming/elastic/sync_log.h"

// -----------------------------------------------------------------------------------------------------------
// Looking around: which workers are alive, which need a snapshot

// beside_payload: this batch also carries a payload, so that it takes longer than a look
inline void SyncLog::look_around(bool beside_payload) {
    const bool is_last = is_leaving;
    const double from = asked_at;
    ask({StoreRequest::list, key("beat")}, [=](const StoreAnswer& answer, double now) {
        see(answer.listing, from, beside_payload ? look_seconds : now - from, now);
        const int able = presence.count_alive([this](int worker, long promise) {  // or some day able, to give
            return worker != me.worker && promise != LogBeat::needs_snapshot && promise != LogBeat::ends;
        });
        const bool is_alone = phase == Phase::behind && able == 0;
        alone_since = !is_alone ? -1 : alone_since < 0 ? now : alone_since;
        looks_for_an_end = is_alone && from >= alone_since + options.elastic.grace;
        if (phase == Phase::running) { look_for_readers(is_last, now); }
        for (Slot& slot : slots) {
            if (phase == Phase::running && slot.lines) { consider(slot, from, now); }
        }
    });
}

inline void SyncLog::hear_beats(const std::vector<StoreAnswer>& answers, double from, double now) {
    if (phase != Phase::running || is_leaving || answers.size() < 3 || answers.back().lost) { return; }
    see(answers[1].listing, from, (now - from) / 2, now);  // the beat went before
    if (phase == Phase::running) { look_for_readers(false, now); }
}

// A worker that needs a snapshot shows it in its beat; only then the wants are read.
inline void SyncLog::look_for_readers(bool is_last, double now) {
    const int readers = presence.count_alive([this](int worker, long promise) {
        return worker != me.worker && promise == LogBeat::needs_snapshot;
    });
    if (readers > 0) {
        looks_at_wants = true;
        wants_are_last = is_last;
    } else {
        wanted.clear();
        choose_reader(is_last, now);
    }
}

// Wants that have no offer yet. Wants are asked for last: a worker that has got its snapshot removes its want
// first, and then the offer.
inline void SyncLog::look_at_wants() {
    const auto offers = std::make_shared<Listing>(), givers = std::make_shared<Listing>();
    ask({StoreRequest::list, key("offer")},
        [offers](const StoreAnswer& answer, double) { *offers = answer.listing; });
    ask({StoreRequest::list, key("giver")},
        [givers](const StoreAnswer& answer, double) { *givers = answer.listing; });
    ask({StoreRequest::list, key("want")},
        [this, offers, givers, is_last = wants_are_last](const StoreAnswer& answer, double now) {
            note_wants(answer.listing, *offers, *givers, now);
            choose_reader(is_last, now);
        });
}

inline void SyncLog::note_wants(const Listing& wants, const Listing& offers, Listing& givers, double now) {
    std::map<std::string, Wanted> still;
    for (const auto& [want, reason] : wants) {
        if (Incarnation::parse(want).worker == me.worker || offers.count(want)) { continue; }
        const auto known = wanted.find(want);
        const std::string& text = givers[want];  // "": nobody has claimed it
        const bool is_same = known != wanted.end() && known->second.giver == text;
        still[want] = is_same ? known->second : Wanted{now, text};
        // Before this worker's trainer had its turn, another worker took over and began.
        if (gives(want) && giving->bytes.empty() && has_written(text)) { giving.reset(); }
    }
    wanted = still;
}

// giver: "v.j chunks". True for another worker that has written some.
inline bool SyncLog::has_written(const std::string& giver) const {
    const size_t space = giver.find(' ');
    const bool is_other = space != std::string::npos && !(Incarnation::parse(giver) == me);
    return is_other && std::atol(giver.substr(space).c_str()) > 0;
}

inline void SyncLog::rest_from_looking(double seconds, double now) {
    look_seconds = std::min(seconds, options.expiry / 8);
    // Looks take at most a fifth of the time, or half of it for a worker that catches up and must soon know
    // what others send. A look may have been slow because this process was stopped: then the next one comes
    // soon.
    look_earliest = now + (is_aligned ? pause() : std::max(options.poll / 4, look_seconds));
    // Training waits, or ends, or there may be a sync to jump to.
    const bool is_awaiting = is_waiting || is_leaving || !is_aligned;
    look_around_at = is_awaiting ? look_earliest : std::max(look_earliest, now + options.expiry / 4);
}

// A beat that is not whole counts as absent: a power cut may have damaged that of a dead worker.
// from: when the beats were asked for   seconds: how long that took
inline void SyncLog::see(Listing listing, double from, double seconds, double now) {
    long others_newest = -1;
    for (auto one = listing.begin(); one != listing.end();) {
        one = LogBeat::parse(one->second).text() == one->second ? std::next(one) : listing.erase(one);
    }
    for (const auto& [name, text] : listing) {
        const int worker = std::atoi(name.c_str());
        const LogBeat beat = LogBeat::parse(text);
        if (worker < 0 || worker >= options.workers ||
            beat.newest >= schedule.first_after(options.last_step)) {
            return refuse("beat", name, text);
        }
        note_open(beat.newest);
        if (worker != me.worker) { others_newest = std::max(others_newest, beat.newest); }
        if (worker != me.worker || beat.incarnation <= me.number) { continue; }
        const std::string folder = key("incarnation/" + std::to_string(worker));
        ask_later({StoreRequest::get, folder, std::to_string(beat.incarnation)},
                  [this, name = name, text = text](const StoreAnswer& start, double) {
                      if (!start.found) { return refuse("beat", name, text); }
                      end.replaced = true;
                      stop("another process has started as this worker");
                  });
    }
    if (others_newest < newest_open) { not_open_at = from; }
    has_looked = true;
    looked_from = from;
    presence.look(listing, from, now);
    tell_changes();
    rest_from_looking(seconds, now);
}

inline void SyncLog::note_open(long sync) {
    if (sync <= newest_open) { return; }
    newest_open = sync;
    not_open_at = looked_from;
}

// The worker with the lowest number gives; if it does not, or makes no progress, the next one does.
inline void SyncLog::choose_reader(bool is_last, double now) {
    has_looked_last = is_last;
    is_wanted = false;
    if (giving && !presence.is_alive(Incarnation::parse(giving->want))) { give_no_more(); }
    // A worker whose own parameters no entry has confirmed yet lets all others go first.
    const bool am_proven = std::find(is_proven.begin(), is_proven.end(), false) == is_proven.end();
    const int lower = presence.count_alive(
        [this](int worker, long promise) { return worker < me.worker && promise >= 0; });
    const int before_me = lower + (am_proven ? 0 : options.workers);
    for (const auto& [want, one] : wanted) {
        if (!presence.is_alive(Incarnation::parse(want))) { continue; }
        is_wanted = true;
        const Incarnation giver = Incarnation::parse(one.giver);
        const bool is_given = presence.is_at_work(giver) && !(giver == me);
        const double patience = (before_me + (is_given ? 3 : 0)) * options.elastic.grace;
        const double gives_at = std::max(one.since + patience, gives_from);
        if (!giving && now >= gives_at) { giving = Giving{want, !one.giver.empty()}; }
    }
}

// Nobody is alive that could give a snapshot. If a worker has finished, the run is over.
inline void SyncLog::look_for_an_end() {
    look_for_offer();
    ask({StoreRequest::list, key("done")}, [this](const StoreAnswer& answer, double) {
        if (snapshot.offer) { return; }
        if (answer.listing.empty()) {
            return say_waits("no live worker holds the run's state: start a worker that has a "
                             "checkpoint of it, or begin another run (--run-name)", nobody_to_give);
        }
        end.turn = LogTurn::over;
        stop("the run is over, and no worker is left to give a snapshot");
    });
}

// -----------------------------------------------------------------------------------------------------------
// Snapshots

// Stops if this worker's memory does not hold what the last syncs left there.
inline void SyncLog::write_snapshot(double now) {
    for (int p = 0; p < int(slots.size()); p++) {
        if (shard.hash(p) != slots[size_t(p)].hash) { return diverge(); }
    }
    const std::string place = numbers(positions()), line = place + "\n";
    try {
        Spool::require_room(options.spool_folder, shard.snapshot_bytes());
        Spool bytes(options.spool_folder);
        bytes.append(line.data(), line.size());
        shard.append_snapshot(bytes);
        giving->bytes = std::move(bytes);
    } catch (const SpoolError& error) { return put_off_giving(error.what(), now); }
    ask_later({StoreRequest::put, key("held"), giving->want, place});
}

inline void SyncLog::give() {
    if (!giving->is_claimed) { return claim(); }
    if (giving->chunks < chunks_of(giving->bytes.size(), options.snapshot_chunk)) { return give_chunk(); }
    const LogOffer mine{me, giving->bytes.size(), giving->bytes.digest()};
    ask({StoreRequest::put_if_absent, key("offer"), giving->want, mine.text()},
        [this, want = giving->want](const StoreAnswer& answer, double) {
            if (!gives(want)) { return; }
            if (!(LogOffer::parse(answer.value).giver == me)) { return give_no_more(); }
            say(LogEventKind::gives_snapshot, "gives a snapshot to " + giving->want);
            times_put_off = 0;
            giving.reset();
        });
}

inline void SyncLog::claim() {
    const auto kind = giving->takes_over ? StoreRequest::put : StoreRequest::put_if_absent;
    ask({kind, key("giver"), giving->want, progress()},
        [this, want = giving->want](const StoreAnswer& answer, double) {
            if (!gives(want)) { return; }
            giving->is_claimed = Incarnation::parse(answer.value) == me;
            if (!giving->is_claimed) { giving.reset(); }
        });
}

// Gives up if the reader's want is gone, or has an offer already.
inline void SyncLog::give_chunk() {
    const size_t size = options.snapshot_chunk, chunk = giving->chunks;
    std::string bytes;
    try {
        bytes = giving->bytes.read(chunk * size, size);
    } catch (const SpoolError& error) { return put_off_giving(error.what(), asked_at); }
    for (const bool is_offer : {false, true}) {
        ask({StoreRequest::get, key(is_offer ? "offer" : "want"), giving->want},
            [this, is_offer, want = giving->want](const StoreAnswer& answer, double) {
                if (gives(want) && answer.found == is_offer) { give_no_more(); }
            });
    }
    ask(own_chunk(key("snapshot/" + giving->want), chunk, std::move(bytes)),
        [this, want = giving->want](const StoreAnswer&, double) {
            if (gives(want) && !giving->bytes.empty()) { giving->chunks++; }
        });
    ask({StoreRequest::put, key("giver"), giving->want, progress()});
}

// Also removes the chunk that may be on its way.
inline void SyncLog::give_no_more() {
    for (size_t i = 0; i <= giving->chunks && !giving->bytes.empty(); i++) {
        add_removal(key("snapshot/" + giving->want), chunk_name(me, i));
    }
    giving.reset();
}

// All others may try before this worker tries again. Until one does, no payloads are kept for the reader.
inline void SyncLog::put_off_giving(const std::string& why, double now) {
    times_put_off++;
    if (!giving->bytes.empty()) { add_removal(key("held"), giving->want); }
    say(LogEventKind::snapshot_put_off, "gives no snapshot to " + giving->want + " for now: " + why);
    gives_from = now + (options.workers + 4) * options.elastic.grace;
    give_no_more();
}

inline void SyncLog::fall_behind(const std::string& reason) {
    say(LogEventKind::needs_snapshot, reason + ": needs a snapshot");
    phase = Phase::behind;
    promise = LogBeat::catches_up;
    if (giving) { give_no_more(); }
}

// The next one is wanted under another name.
inline void SyncLog::forget_snapshot() {
    remove_snapshot(want());
    snapshot = Snapshot{snapshot.attempt + 1};
}

inline void SyncLog::choose_behind(double now) {
    if (snapshot.is_whole) { return; }
    ask_chores();
    if (!snapshot.is_wanted && has_room_for_snapshot()) {
        ask({StoreRequest::put_if_absent, key("want"), want(), "-"},
            [this](const StoreAnswer&, double) { snapshot.is_wanted = true; });
    }
    if (snapshot.offer) {
        read_snapshot();
    } else if (std::exchange(looks_for_an_end, false)) {
        look_for_an_end();
    } else if (now >= snapshot.look_at) {
        look_for_offer();
    }
    if (now >= look_around_at) { look_around(bool(snapshot.offer)); }
}

// Without room for it, this worker asks nobody to make a snapshot. Later a giver on the same disk may take
// some of the room for a while.
inline bool SyncLog::has_room_for_snapshot() {
    if (snapshot.has_room) { return true; }
    lacks_room.clear();
    try {
        Spool::require_room(options.spool_folder, shard.snapshot_bytes());
    } catch (const SpoolError& error) {
        lacks_room = std::string("the snapshot that this worker needs cannot be stored (") + error.what() + ")";
        say_waits(lacks_room, no_room);
    }
    return snapshot.has_room = lacks_room.empty();
}

inline void SyncLog::look_for_offer() {
    ask({StoreRequest::get, key("offer"), want()}, [this](const StoreAnswer& answer, double now) {
        snapshot.look_at = now + options.poll;
        if (!answer.found) {  // the want may have been removed while this worker seemed dead
            snapshot.is_wanted = false;
            return;
        }
        const LogOffer& offer = snapshot.offer.emplace(LogOffer::parse(answer.value));
        if (!chunks_of(offer.bytes, options.snapshot_chunk)) { refuse("offer", want(), answer.value); }
    });
}

// Few bytes at a time, since a connection may hold them several times over.
inline void SyncLog::read_snapshot() {
    const LogOffer& offer = *snapshot.offer;
    const size_t all = chunks_of(offer.bytes, options.snapshot_chunk);
    const size_t some = std::max(options.chunk / 8 / options.snapshot_chunk, size_t(1));
    for (size_t chunk = snapshot.chunks; chunk < std::min(all, snapshot.chunks + some); chunk++) {
        ask({StoreRequest::get, key("snapshot/" + want()), chunk_name(offer.giver, chunk)},
            [this, attempt = snapshot.attempt](const StoreAnswer& answer, double) {
                if (snapshot.attempt == attempt) { take_chunk_of_snapshot(answer); }
            });
    }
}

inline void SyncLog::take_chunk_of_snapshot(const StoreAnswer& answer) {
    const LogOffer& offer = *snapshot.offer;
    try {
        if (snapshot.chunks == 0) { snapshot.bytes = Spool(options.spool_folder); }
        snapshot.bytes.append(answer.value.data(), answer.value.size());
    } catch (const SpoolError& error) {
        return stop(std::string("the snapshot that this worker needs cannot be stored: ") + error.what());
    }
    snapshot.chunks++;
    const bool is_last = snapshot.chunks == chunks_of(offer.bytes, options.snapshot_chunk);
    if (!rules.is_chunk(answer) || (is_last && !rules.is_whole(snapshot.bytes, offer))) {
        say(LogEventKind::snapshot_gone, "finds its snapshot gone, and asks for another");
        return forget_snapshot();
    }
    snapshot.is_whole = is_last;
}

inline void SyncLog::load_snapshot() {
    const std::string beginning = snapshot.bytes.read(0, 1 << 16);
    const std::string line = beginning.substr(0, beginning.find('\n'));
    shard.load(snapshot.bytes, line.size() + 1);
    enter(parse_numbers(line), false);
    note_open(all_applied());  // by the giver
    add_removal(key("done"), std::to_string(me.worker));
    say(LogEventKind::takes_snapshot, "continues from a snapshot, with its fragments at syncs " + line);
    forget_snapshot();
    phase = Phase::running;
}

// -----------------------------------------------------------------------------------------------------------
// Removal: once a period, over a bucket every second one, a decider removes what nobody needs any more

// After a power cut some files of a folder may be empty: positions that are not of all fragments are ignored.
inline void SyncLog::sweep(bool with_snapshots, bool is_in_need) {
    auto held = std::make_shared<std::vector<long>>(slots.size(), std::numeric_limits<long>::max());
    sweep_by({StoreRequest::list, key("held")},
             [this, held](const StoreAnswer& answer, double) { note_held(answer.listing, *held); });
    const bool waits = options.checkpoints && !is_in_need;  // for checkpoints that contain them
    sweep_by({StoreRequest::list, key("durable")}, [this, held, waits](const StoreAnswer& answer, double) {
        const long first = covered(answer.listing);
        std::vector<long> oldest;
        for (int p = 0; p < schedule.fragments(); p++) {
            const long index = newest_decided(slots[size_t(p)]);
            const long durable = waits ? schedule.index_from(p, first) : index;
            const long kept = rules.oldest_kept(index, options.elastic.retain, durable);
            oldest.push_back(std::min(kept, (*held)[size_t(p)]));
        }
        if (has_large) { sweep_syncs(key("payload/"), oldest); }
        if (!in_bucket()) { return sweep_syncs(key("sent/"), oldest); }
        for (auto one = trims.begin(); one != trims.end();) {
            const auto& [sync, line] = *one;
            const bool is_kept = schedule.index(sync) >= oldest[size_t(schedule.fragment(sync))];
            const StoreRequest trim{rules.payload_goes_by(), folder("sent", sync), words(me.worker), line};
            if (!is_kept) { ask_later(trim, ignore, true); }
            one = is_kept ? std::next(one) : trims.erase(one);
        }
    });
    if (with_snapshots) { sweep_snapshots(); }
}

// held: lowered to the positions from which living workers that catch up from a snapshot need payloads.
inline void SyncLog::note_held(const Listing& listing, std::vector<long>& held) {
    for (const auto& [want, text] : listing) {
        const Incarnation who = Incarnation::parse(want);
        if (!presence.is_alive(who) || presence.is_at_work(who)) {
            add_removal(key("held"), want, true);
            continue;
        }
        const std::vector<long> positions = parse_numbers(text);
        if (positions.size() != held.size()) { continue; }
        // A worker's n-th try may take twice as long as the one before, which may have been too slow.
        const int attempt = std::atoi(want.c_str() + want.rfind('.') + 1);
        const long most = 16 * options.elastic.retain << std::min(std::max(attempt - 1, 0), 6);
        for (size_t p = 0; p < held.size(); p++) {
            held[p] = std::min(held[p], std::max(positions[p], newest_decided(slots[p]) - most));
        }
    }
}

// The checkpoints of two workers, one of which may be lost, contain all syncs before this one. One number for
// all fragments, since a worker resumes all of them from one checkpoint.
inline long SyncLog::covered(const Listing& durable) const {
    std::vector<long> firsts;  // of each checkpoint, the oldest sync that it lacks
    for (const auto& [worker, text] : durable) {
        const std::vector<long> positions = parse_numbers(text);
        if (positions.size() != slots.size()) { continue; }
        long first = std::numeric_limits<long>::max();
        for (int p = 0; p < schedule.fragments(); p++) {
            first = std::min(first, schedule.sync(p, positions[size_t(p)]));
        }
        firsts.push_back(first);
    }
    const size_t copies = size_t(std::min(2, options.elastic.min_workers));
    if (firsts.size() < copies) { return 0; }
    std::sort(firsts.rbegin(), firsts.rend());
    return firsts[copies - 1];
}

// oldest: the oldest sync that is kept, by fragment
inline void SyncLog::sweep_syncs(const std::string& folder, const std::vector<long>& oldest) {
    sweep_by({StoreRequest::folders, folder}, [=](const StoreAnswer& answer, double) {
        for (const auto& [name, nothing] : answer.listing) {
            const long sync = std::atol(name.substr(folder.size()).c_str());
            const size_t p = size_t(schedule.fragment(sync));
            if (schedule.index(sync) < oldest[p]) { add_removal(name, "", true); }
        }
    });
}

// Snapshots whose reader is dead, has restarted, or has read them. Snapshots are listed before the wants;
// otherwise one whose want is just being written would seem to have no reader.
inline void SyncLog::sweep_snapshots() {
    const std::string folder = key("snapshot/");
    auto there = std::make_shared<std::set<std::string>>();
    const auto note = [there](size_t prefix) {
        return [there, prefix](const StoreAnswer& answer, double) {
            for (const auto& [name, text] : answer.listing) { there->insert(name.substr(prefix)); }
        };
    };
    sweep_by({StoreRequest::folders, folder}, note(folder.size()));
    for (const char* what : {"offer", "giver"}) { sweep_by({StoreRequest::list, key(what)}, note(0)); }
    sweep_by({StoreRequest::list, key("want")}, [this, there](const StoreAnswer& answer, double) {
        for (const auto& [want, reason] : answer.listing) {
            there->insert(want);
            if (presence.is_alive(Incarnation::parse(want))) { there->erase(want); }
        }
        for (const std::string& want : *there) { remove_snapshot(want); }
    });
}
