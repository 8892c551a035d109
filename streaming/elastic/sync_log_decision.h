// Deciding who is counted in a sync (sync_log.h): who is alive, who is waited for, and whether it is time.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "streaming/elastic/sync_log_records.h"
#include "streaming/elastic/sync_log_rules.h"
#include "streaming/elastic/sync_log_types.h"

// Which workers are alive, by their beats. A worker is alive unless its beat was the same in two looks that
// are `expiry` apart. So a worker that seldom looks, over a slow link or after a stall, takes nobody for dead
// by mistake; nor does one whose answers are slow, since a look is dated by when it was asked for and a beat
// by the first answer that showed it.
//
// A worker that is alive and has promised to be in time is waited for unless that has cost too much: the time
// that others have waited for it, at most one grace per standstill, is its debt, which falls by a fiftieth of
// the time that passes. So a slow worker costs the others about a fiftieth of their speed.
class Presence {
public:
    Presence(double expiry, double grace) : expiry(expiry), grace(grace), most_debt(grace / 5) {}

    struct Change {
        LogEventKind kind;  // joined, late, gone, back
        int worker;
        long sync = -1;  // late, back: the sync that shows it
        int start = 0;   // joined, back: its incarnation
    };

    // All beats, at one look.   from: when it was asked for
    void look(const std::map<std::string, std::string>& beats, double from, double now) {
        looked = std::max(looked, from);  // an earlier look over another connection may be answered later
        for (const auto& [name, text] : beats) {
            const int worker = std::atoi(name.c_str());
            const auto [at, is_first] = seen.insert({worker, Seen()});
            Seen& one = at->second;
            const LogBeat beat = LogBeat::parse(text);
            if (one.text == text || beat.incarnation < one.beat.incarnation) { continue; }
            if (beat.incarnation == one.beat.incarnation && beat.count < one.beat.count) { continue; }
            // The first beat that is found may be left from a worker that is long dead.
            if (!is_first) { note_life(one, {worker, beat.incarnation}); }
            one.text = text;
            one.beat = beat;
            one.changed = now;
            if (beat.promise != LogBeat::catches_up) { one.member = 0; }
        }
        for (auto& [worker, one] : seen) {
            if (is_alive(one) || one.state == State::unknown || one.state == State::gone) { continue; }
            one.state = State::gone;
            changed.push_back({LogEventKind::gone, worker});
        }
    }

    // The run's first members are waited for from its first sync on, though their beats may not be there yet.
    void expect(const std::vector<Incarnation>& members, long first, double now) {
        looked = now;
        for (const Incarnation& who : members) {
            Seen& one = seen[who.worker];
            if (one.beat.incarnation > who.number) { continue; }
            if (one.beat.incarnation < who.number) { one.beat = LogBeat(); }
            one.beat.incarnation = one.member = who.number;
            one.first = first;
            one.changed = now;
        }
    }

    // The store did not answer for `seconds`: this time is held against no worker.
    void forgive(double seconds, double now) {
        for (auto& [worker, one] : seen) {
            one.changed = std::min(one.changed + seconds, now);
            one.charged_at = std::min(one.charged_at + seconds, now);
        }
    }

    // Workers counted together with `reader` are alive, even if their beats were seen only once. A worker
    // that is missing from the entry has broken its promise, if it had made one.
    void note(const LogEntry& entry, long sync, const Incarnation& reader) {
        const auto& all = entry.contributors;
        const auto is_reader = [&](const Contributor& one) { return one.who == reader; };
        const bool is_of_now = std::any_of(all.begin(), all.end(), is_reader);
        for (const Contributor& one : all) {
            if (is_of_now && is_alive(one.who)) { note_life(seen.at(one.who.worker), one.who); }
        }
        for (auto& [worker, one] : seen) {
            const bool had_promised = keeps_promise(one, sync);
            if (!entry.knows(worker)) {
                if (had_promised && one.state == State::in_time) {
                    one.state = State::late;
                    changed.push_back({LogEventKind::late, worker, sync});
                }
                one.missed = std::max(one.missed, sync);
            } else if (had_promised && one.state == State::late) {
                one.state = State::in_time;
                changed.push_back({LogEventKind::back, worker, sync});
            }
        }
    }

    // Since the last call.
    std::vector<Change> changes() { return std::exchange(changed, {}); }

    bool is_alive(const Incarnation& who) const {
        const auto found = seen.find(who.worker);
        return found != seen.end() && is_alive(found->second) && found->second.beat.incarnation == who.number;
    }

    // Its beat has not changed yet, stands still or says that it ends, or a later start of its worker has
    // shown one. False as long as there is no beat.
    bool may_be_dead(const Incarnation& who) const {
        const auto found = seen.find(who.worker);
        if (found == seen.end() || found->second.beat.incarnation < who.number) { return false; }
        return !is_alive(who) || found->second.state == State::unknown ||
               found->second.beat.promise == LogBeat::ends;
    }

    // It is alive, is not catching up, and has not said that it ends.
    bool is_at_work(const Incarnation& who) const { return is_alive(who) && works(seen.at(who.worker)); }

    enum Which { nobody, at_work, anybody };
    bool is(Which which, int worker) const {
        const auto found = seen.find(worker);
        return which == anybody || (which == at_work && found != seen.end() && works(found->second));
    }

    // "workers at work;dead workers"
    std::string awaited_and_dead() const {
        std::vector<long> awaited, dead;
        for (const auto& [worker, one] : seen) {
            if (!is_alive(one)) { dead.push_back(worker); }
            if (works(one)) { awaited.push_back(worker); }
        }
        return numbers(awaited) + ";" + numbers(dead);
    }

    // How many workers are alive for which is(worker, promise) holds.
    template <class Is>
    int count_alive(Is is) const {
        int count = 0;
        for (const auto& [worker, one] : seen) { count += is_alive(one) && is(worker, promise_of(one)); }
        return count;
    }

    struct Missing {
        std::vector<int> who;  // alive, and not catching up
        bool waited_for = false, all_waited_for = true;
    };

    // there: the workers that have a line. The trainer has stood still since `stands_since`, for this sync or
    // for one that was due before it.
    Missing missing(long sync, const std::set<int>& there, double stands_since, double now) const {
        Missing missing;
        for (const auto& [worker, one] : seen) {
            if (there.count(worker) || !works(one)) { continue; }
            missing.who.push_back(worker);
            const bool is_one = is_waited_for(one, sync, stands_since, now);
            missing.waited_for |= is_one;
            missing.all_waited_for &= is_one;
        }
        return missing;
    }

    // The trainer has stood still since `since` because of workers without a line (all but `there`), which
    // are charged for that. Time in which it stands still for several syncs is charged once.
    void charge(long sync, const std::set<int>& there, double since, double stands_since, double now) {
        for (auto& [worker, one] : seen) {
            if (there.count(worker) || !is_waited_for(one, sync, stands_since, now)) { continue; }
            const double from = std::max(since, one.charged_at);
            if (from >= now) { continue; }
            one.debt = debt_of(one, stands_since, now);
            if (!is_charged_in(one, stands_since)) { one.charge = 0; }
            one.charge = std::min(one.charge + now - from, grace);
            one.charged_at = now;
        }
    }

private:
    enum class State { unknown, in_time, late, gone };

    struct Seen {
        std::string text;
        LogBeat beat;
        double changed = 0;
        long missed = -1;  // the newest sync that it had no line in
        State state = State::unknown;
        // What it cost before the last standstill that it was charged for, and in that one.
        double debt = 0, charge = 0, charged_at = 0;
        int member = 0;  // its start, if it is a first member of the run that has not promised anything yet
        long first = 0;  // the run's first sync, then
    };

    bool is_alive(const Seen& one) const { return looked < one.changed + expiry; }
    bool works(const Seen& one) const { return is_alive(one) && promise_of(one) >= 0; }
    // A first member has promised the first sync before it says so itself.
    static long promise_of(const Seen& one) {
        const bool begins = one.member > 0 && one.member == one.beat.incarnation;
        return begins && one.beat.promise == LogBeat::catches_up ? one.first : one.beat.promise;
    }
    bool is_waited_for(const Seen& one, long sync, double stands_since, double now) const {
        return keeps_promise(one, sync) && debt_of(one, stands_since, now) <= most_debt;
    }
    // The cost of earlier standstills that is not paid back yet. Syncs that are due at once share one
    // standstill, so that each of them may have the whole grace.
    static double debt_of(const Seen& one, double stands_since, double now) {
        const double cost = one.debt + (is_charged_in(one, stands_since) ? 0 : one.charge);
        return std::max(0.0, cost - (now - one.charged_at) / 50);
    }
    static bool is_charged_in(const Seen& one, double stands_since) { return stands_since < one.charged_at; }
    bool keeps_promise(const Seen& one, long sync) const {  // to be in time for this sync
        return works(one) && promise_of(one) <= sync && one.missed < promise_of(one);
    }

    void note_life(Seen& one, const Incarnation& who) {
        const bool is_new = one.state == State::unknown;
        const bool was_away = one.state == State::gone || who.number != one.beat.incarnation;
        if (!is_new && !was_away) { return; }
        one.state = State::in_time;
        changed.push_back({is_new ? LogEventKind::joined : LogEventKind::back, who.worker, -1, who.number});
    }

    double expiry, grace, most_debt;
    double looked = 0;         // when the last listing was asked for
    std::map<int, Seen> seen;  // by worker
    std::vector<Change> changed;
};

// The state that a new log begins with: the newest that its workers hold; of equally new states, the one that
// most workers hold. None: equally many hold different states at the same positions.
inline std::optional<LogBase> base_to_begin_with(const std::vector<LogBase>& held) {
    long newest = 0;
    for (const LogBase& one : held) { newest = std::max(newest, one.sum()); }
    std::map<std::string, size_t> holders;
    size_t most = 0;
    for (const LogBase& one : held) {
        if (one.sum() == newest) { most = std::max(most, ++holders[one.text()]); }
    }
    std::optional<LogBase> best;
    for (const auto& [text, count] : holders) {
        if (count < most) { continue; }
        const LogBase base = LogBase::parse(text);
        if (best && base.positions == best->positions) { return std::nullopt; }
        if (!best) { best = base; }
    }
    return best;
}

// One line for each worker: that of its latest start whose line may be counted, else of its latest start.
using StandingLines = std::map<int, std::pair<Incarnation, LogLine>>;

inline StandingLines standing_lines(const LogLines& lines, uint64_t hash, const SyncLogRules& rules) {
    StandingLines standing;
    const auto rank = [&](const Incarnation& who, const LogLine& line) {
        return std::make_pair(rules.counts(line, hash), who.number);
    };
    for (const auto& [text, line] : lines) {
        const Incarnation who = Incarnation::parse(text);
        auto& best = standing.insert({who.worker, {who, line}}).first->second;
        if (rank(who, line) > rank(best.first, best.second)) { best = {who, line}; }
    }
    return standing;
}

inline std::map<uint64_t, size_t> holders_of_hashes(const StandingLines& lines) {
    std::map<uint64_t, size_t> holders;
    for (const auto& [worker, one] : lines) { holders[one.second.hash]++; }
    return holders;
}

// The hash that more than half of the lines name, if there is one. Of two equal halves neither continues.
inline std::optional<uint64_t> majority_of(const StandingLines& standing) {
    for (const auto& [hash, count] : holders_of_hashes(standing)) {
        if (2 * count > standing.size()) { return hash; }
    }
    return std::nullopt;
}
