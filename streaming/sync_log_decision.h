// Deciding who makes up a sync (sync_log.h): who is alive, who is waited for, and whether it is time.
#pragma once
#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "sync_log_records.h"
#include "sync_log_rules.h"

// Who is there, by their beats. A worker is alive unless its beat was the same in looks that are `expiry`
// apart: who looks seldom, over a slow link or after a stall, takes nobody for dead because of that.
class Presence {
public:
    explicit Presence(double expiry) : expiry(expiry) {}

    // All beats, at one look.
    void look(const std::map<int, std::string>& beats, double now) {
        looked = now;
        for (const auto& [worker, text] : beats) {
            Seen& one = seen[worker];
            if (one.text == text) { continue; }
            one.text = text;
            one.beat = LogBeat::parse(text);
            one.changed = now;
        }
    }

    // Whoever is not in an entry has broken its promise, if it had made one.
    void note(const LogEntry& entry, long sync) {
        for (auto& [worker, one] : seen) {
            if (!entry.knows(worker)) { one.missed = std::max(one.missed, sync); }
        }
    }

    bool is_alive(const Incarnation& who) const {
        const auto found = seen.find(who.worker);
        return found != seen.end() && is_alive(found->second) && found->second.beat.incarnation == who.number;
    }

    std::map<std::string, LogBeat> alive() const {
        std::map<std::string, LogBeat> alive;
        for (const auto& [worker, one] : seen) {
            if (is_alive(one)) { alive[Incarnation{worker, one.beat.incarnation}.text()] = one.beat; }
        }
        return alive;
    }

    // Workers of lower numbers that are alive and have nothing to catch up with.
    int running_before(int worker) const {
        int count = 0;
        for (const auto& [other, one] : seen) {
            count += other < worker && is_alive(one) && one.beat.promise >= 0;
        }
        return count;
    }

    struct Missing {
        bool any = false;         // is alive, and not catching up
        bool waited_for = false;  // and has promised to be in this sync
    };

    // Who has no line: has(worker) tells who has.
    template <class Has>
    Missing missing(long sync, Has has) const {
        Missing missing;
        for (const auto& [worker, one] : seen) {
            if (has(worker) || !is_alive(one) || one.beat.promise < 0) { continue; }
            missing.any = true;
            missing.waited_for |= one.missed < one.beat.promise && one.beat.promise <= sync;
        }
        return missing;
    }

private:
    struct Seen {
        std::string text;
        LogBeat beat;
        double changed = 0;
        long missed = -1;  // the newest sync that it had no line in
    };

    bool is_alive(const Seen& one) const { return looked < one.changed + expiry; }

    double expiry;
    double looked = 0;         // when, the last time
    std::map<int, Seen> seen;  // by worker
};

// A sync as one worker sees it that may decide.
struct Question {
    long sync;
    uint64_t hash;     // that this worker stands on
    double due_since;  // negative: it is not due here yet
    Incarnation asker;
};

// The line that stands for each worker: of its starts the latest that may be counted, else the latest.
using StandingLines = std::map<int, std::pair<Incarnation, LogLine>>;

inline StandingLines standing_lines(const LogLines& lines, uint64_t hash, const SyncLogRules& rules) {
    StandingLines standing;
    const auto rank = [&](const Incarnation& who, const LogLine& line) {
        return std::make_pair(rules.counts(line, hash), who.number);
    };
    for (const auto& [text, line] : lines) {
        const Incarnation who = Incarnation::parse(text);
        const auto [at, is_first] = standing.insert({who.worker, {who, line}});
        if (!is_first && rank(who, line) > rank(at->second.first, at->second.second)) {
            at->second = {who, line};
        }
    }
    return standing;
}

inline std::map<uint64_t, size_t> holders_of_hashes(const StandingLines& lines) {
    std::map<uint64_t, size_t> holders;
    for (const auto& [worker, one] : lines) { holders[one.second.hash]++; }
    return holders;
}

// Do most stand on a hash that is not this one?
inline bool is_odd_one(const LogLines& lines, uint64_t hash, const SyncLogRules& rules) {
    const StandingLines standing = standing_lines(lines, hash, rules);
    for (const auto& [other, count] : holders_of_hashes(standing)) {
        if (other != hash && 2 * count > standing.size()) { return true; }
    }
    return false;
}

// The entry that this worker would write now, if it is time for one.
inline std::optional<LogEntry> decide(const Question& question, const LogLines& in_store,
                                      const Presence& presence, const SyncLogRules& rules, int min_workers,
                                      double grace, double now) {
    const uint64_t hash = question.hash;
    const LogLines lines = rules.taken_as_sent(in_store, presence.alive(), hash);
    const StandingLines standing = standing_lines(lines, hash, rules);
    if (int(standing.size()) < min_workers) { return std::nullopt; }
    if (!rules.is_majority(holders_of_hashes(standing)[hash], standing.size())) { return std::nullopt; }

    const auto missing = presence.missing(question.sync, [&](int w) { return standing.count(w) != 0; });
    const bool is_due = question.due_since >= 0;
    const bool is_time =
        !missing.any || (is_due && !missing.waited_for) || (is_due && now >= question.due_since + grace);
    if (!is_time) { return std::nullopt; }

    LogEntry entry;
    entry.hash = hash;
    entry.decider = question.asker;
    for (const auto& [worker, one] : standing) {
        if (rules.counts(one.second, hash)) {
            entry.contributors.push_back({one.first, one.second.bytes, one.second.digest});
        } else {
            entry.abstained.push_back(worker);
        }
    }
    return entry;
}
