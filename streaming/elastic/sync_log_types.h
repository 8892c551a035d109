// What a sync log (sync_log.h) and its caller tell each other: options, what a worker starts with, its shard
// of the outer state, what a turn says, the pulse that others see, and events.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "llmc/error.h"
#include "llmc/run/spool.h"
#include "streaming/elastic/options.h"
#include "streaming/elastic/sync_log_records.h"

struct SyncLogOptions {
    ElasticOptions elastic;           // with min_workers and max_lag as numbers, not their defaults
    int shard = 0;                    // this process's rank in its worker
    int workers = 2;
    long overlap = 1;                    // tau
    long last_step = 1'000'000'000'000;  // of the run
    double timeout = 600;                // seconds that a worker waits for a store that does not answer
    bool checkpoints = true;             // payloads are kept until min(2, min_workers) checkpoints cover them
    std::string spool_folder = "";       // where a snapshot lies that is given or taken (Spool)
    size_t chunk = 64 << 20;             // bytes of a payload in one value
    size_t in_line = 0;                  // a payload of up to so many bytes is a part of its line (a bucket)
    size_t snapshot_chunk = 4 << 20;     // of a snapshot: other requests wait for one such chunk at most
    // Seconds:
    double expiry = 5;                // a worker is dead if two looks so far apart find the same beat
    double poll = 0.1;                // between two looks at what has not happened yet
    double retry = 0.5;               // after a lost answer
};

// What a worker starts with. At a first start all positions are 0 and there is no generation.
struct LogStart {
    std::string token;            // random, of this start
    std::string fingerprint;      // the options that all workers must have
    std::string generation;       // in which the checkpoint was written
    std::vector<long> positions;  // of its fragments
    bool from_checkpoint = false;
};

struct Contribution {
    int worker;
    std::string payload;
};

// This worker's shard of the outer state. The constructor, turn() and finish() call it; encoded() is also
// called by requests(), answer() and hear(), on other threads.
class LogShard {
public:
    struct Encoded {
        std::string payload;
        uint64_t tokens = 0;
        uint64_t hash = 0;  // of the global parameters that the payload was computed from
    };

    virtual ~LogShard() = default;
    virtual uint64_t hash(int fragment) = 0;  // of its global parameters
    virtual void encode(long sync) = 0;       // global - local as they are now
    // Null: not there yet, or no longer. It stays until the sync is applied or a snapshot is loaded.
    virtual const Encoded* encoded(long sync) = 0;

    // Contributions in ascending order of workers; without any, global does not change.
    // counted: this worker's payload is among them, perhaps that of an earlier start
    virtual void apply(long sync, const std::vector<Contribution>& contributions, bool counted) = 0;

    virtual size_t snapshot_bytes() const = 0;
    // Appends global and momentum of all fragments. SpoolError if the disk has no room for them.
    virtual void append_snapshot(Spool& spool) = 0;
    virtual void load(const Spool& snapshot, size_t at) = 0;  // from byte `at` on; then local = global
};

struct LogTurn {
    enum Kind { go_on, jump, wait, over, lost, stop };  // a worker's ranks all do the last of their kinds
    Kind kind;
    long step = 0;  // to jump to; it counts as done
};

// Why a sync log has stopped.
struct LogStop {
    std::string why;        // "": it has not
    LogTurn::Kind turn = LogTurn::stop;  // over: all others have ended; lost: the store has lost the run
    bool replaced = false;  // by a later start of this worker
    std::string theirs;     // the run's options, if this worker has others
};

// What a worker shows of itself: a copy, so that the heartbeat need not wait for a sync log that is at work.
struct LogPulse {
    std::string generation, folder;  // empty: there is nothing to show
    int worker = 0;
    LogBeat beat;  // without its count

    bool operator==(const LogPulse& other) const {
        return folder == other.folder && worker == other.worker && beat.text() == other.beat.text();
    }
};

// -----------------------------------------------------------------------------------------------------------
// Events: one for each change, so that a readable log says who was counted in which sync, and why others were
// not. Each worker tells what it sees itself.

//   too_few           it waits for --min-workers to send, for a majority on one hash, or for a snapshot, or
//                     continues with half of the workers or fewer
//   decided, applied  this worker has decided, or applied, a sync, whether or not it was counted in it
//   snapshot_put_off  that this worker was about to give
//   late              for a sync that it had promised to be in time for; also of this worker
//   gone, back        its beat has stopped; it is in time, or alive, again
//   done              it has applied everything until its last step, and left
enum class LogEventKind {
    starts, stops, jumps, store_lost, store_back, too_few, decided, applied,          // of this
    needs_snapshot, gives_snapshot, snapshot_put_off, takes_snapshot, snapshot_gone,  // of this
    joined, late, gone, back, done  // of another
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
    std::string text;  // a line for people; its subject, this worker, is left out
    std::optional<LogEntry> entry = std::nullopt;  // decided, applied
    size_t bytes_read = 0;                         // applied: of payloads, from the store
};

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
