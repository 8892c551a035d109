// Merged syncs (sync_log.h). Where n are counted, each would read the payloads of all others: n (n - 1) of
// them over the store's line. So the decider alone reads them, and writes their mean, encoded once more; the
// others read that: 2 (n - 1) payloads and means, and one read each.
//
// The mean is a function of the entry: of its contributors' payloads, in ascending order of workers. Whoever
// has these makes the same bytes. So nothing hangs on who writes a mean, or whether it is there: who misses
// it reads the payloads and makes it itself.
#pragma once
#include <algorithm>
#include <optional>
#include <string>

#include "streaming/elastic/sync_log_decision.h"

// Which syncs are merged: those of so many contributors and more, whose payloads have so many bytes and more.
struct MergedFrom {
    int contributors = 0;  // 0: no sync is
    size_t bytes = 0;      // of one's payload: in a sync all have as many

    bool contains(size_t contributors_, size_t bytes_) const {
        return contributors > 0 && contributors_ >= size_t(contributors) && bytes_ >= bytes;
    }
};

inline bool is_merged(const LogEntry& entry, const MergedFrom& from) {
    const std::vector<Contributor>& all = entry.contributors;
    return !all.empty() && from.contains(all.size(), all.front().bytes);
}

// A merged sync's mean, as far as a worker has it.
struct SyncMean {
    std::optional<LogOffer> record;  // in the store: it is there, under these names
    std::string bytes;               // as far as it is read; or made here
    bool is_being_made = false;
    bool is_whole = false;
};

// One that its maker writes to the store. Its own sync may be applied meanwhile.
struct OutgoingMean {
    long sync;
    std::string bytes;
    size_t chunks = 0;  // written
};

enum class MissingMean { awaited, decider_is_gone, takes_too_long };

// Of one that has no record yet. As long as the decider lives there will be one: not to wait for it is worth
// n - 1 payloads only where the trainer has stood still for it for `patience` seconds.
// known_since: when this worker saw the entry   due_since: since when the trainer stands still; negative: no
inline MissingMean judge_missing_mean(const Incarnation& decider, const Presence& presence, bool has_looked,
                                      double known_since, double due_since, double patience, double now) {
    if (has_looked && !presence.is_at_work(decider)) { return MissingMean::decider_is_gone; }
    const bool is_late = due_since >= 0 && now > std::max(known_since, due_since) + patience;
    return is_late ? MissingMean::takes_too_long : MissingMean::awaited;
}
