// What a worker's sync log (sync_log.h) has to tell: an event for each change, so that one readable log says
// who was counted in which sync, and why not the others. Each worker tells what it sees itself.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "streaming/elastic/sync_log_records.h"

enum class LogEventKind {
    // of this worker
    starts,
    stops,
    jumps,
    store_lost,
    store_back,
    too_few,  // it waits: for --min-workers that have sent a sync, for most on one hash, for a snapshot
    decided,  // by this worker
    applied,       // a sync, whoever was counted
    needs_snapshot,
    gives_snapshot,
    snapshot_put_off,  // that it was about to give
    takes_snapshot,
    snapshot_gone,
    // of another one; late: or of this one
    joined,
    late,  // it had promised to be in time for this sync
    gone,  // its beat has stopped
    back,  // in time, or alive, again
    done,  // it has applied all there is until its last step, and left
};

inline std::string name_of(LogEventKind kind) {
    const char* const names[] = {"starts", "stops", "jumps", "store_lost", "store_back", "too_few", "decided",
                                 "applied", "needs_snapshot", "gives_snapshot", "snapshot_put_off",
                                 "takes_snapshot", "snapshot_gone", "joined", "late", "gone", "back", "done"};
    return names[int(kind)];
}

struct LogEvent {
    LogEventKind kind;
    long sync;         // -1: of none
    int worker;        // whom it is about
    std::string text;  // a line for people, without who tells it

    // decided, applied
    std::optional<LogEntry> entry = std::nullopt;
    // applied
    bool counted = false;           // this worker's payload is in it
    double waited = 0;              // seconds, that the trainer stood still for it at the due step
    size_t bytes_read = 0;          // of payloads, from the store
};

inline std::string workers_in_words(const std::vector<int>& workers) {
    std::vector<std::string> names;
    for (int worker : workers) { names.push_back(std::to_string(worker)); }
    return (workers.size() == 1 ? "worker " : "workers ") + list_in_words(names);
}

// "2 on 00c0ffee00c0ffee and 1 on 0123456789abcdef"
inline std::string in_words(const std::map<uint64_t, size_t>& holders) {
    std::vector<std::string> parts;
    for (const auto& [hash, count] : holders) {
        parts.push_back(format("%zu on %016llx", count, static_cast<unsigned long long>(hash)));
    }
    return list_in_words(parts);
}

// "counts 0.1 (4096 tokens) and 2.3 (512 tokens); worker 1 abstains; worker 3 is missing after 1.5 s"
inline std::string in_words(const LogEntry& entry) {
    std::vector<std::string> counted;
    for (const Contributor& one : entry.contributors) {
        counted.push_back(one.who.text() + " (" + std::to_string(one.tokens) + " tokens)");
    }
    std::string text = "counts " + (counted.empty() ? "nobody" : list_in_words(counted));
    if (!entry.abstained.empty()) {
        text += "; " + workers_in_words(entry.abstained);
        text += entry.abstained.size() == 1 ? " abstains" : " abstain";
    }
    if (!entry.missing.empty()) {
        text += "; " + workers_in_words(entry.missing);
        text += format(entry.missing.size() == 1 ? " is missing after %.3g s" : " are missing after %.3g s",
                       double(entry.waited) / 1000);
    }
    return text;
}
