// What a sync log (sync_log.h) and its caller tell each other: options, what a worker starts with, its shard
// of the outer state, and what a turn says.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

struct SyncLogOptions {
    int shard = 0;  // this process's rank in its worker
    int workers = 2;
    int min_workers = 2;
    long overlap = 1;         // tau
    long max_lag = 4;         // steps
    long retain = 4;          // syncs of each fragment
    bool checkpoints = true;  // payloads are kept until two workers' have passed them
    size_t chunk = 64 << 20;  // bytes, of payloads
    size_t snapshot_chunk = 4 << 20;  // of snapshots: what else is sent waits for one at most
    double grace = 10;        // seconds, as all that follows
    double expiry = 5;        // between two looks that find the same beat
    double poll = 0.1;        // between two looks at what has not happened yet
    double retry = 0.5;       // after a lost answer
};

// What a worker starts with. A first start: position 0 everywhere, no generation.
struct LogStart {
    std::string token;            // random, of this start
    std::string fingerprint;      // of the options that all must have
    std::string generation;       // in which the checkpoint was written
    std::vector<long> positions;  // of its fragments
    bool from_checkpoint = false;
};

struct Contribution {
    int worker;
    std::string payload;
};

// This worker's shard of the outer state. Called by the constructor, turn() and finish(); encoded(), by
// requests() and answer().
class LogShard {
public:
    struct Encoded {
        std::string payload;
        uint64_t tokens = 0;
        uint64_t hash = 0;  // of the global parameters that it was made on, at that instant
    };

    virtual ~LogShard() = default;
    virtual uint64_t hash(int fragment) = 0;  // of its global parameters
    virtual void encode(long sync) = 0;       // global - local as they are now
    // Null: not there yet, or not any more. Stays until the sync is applied, or a snapshot is loaded.
    virtual const Encoded* encoded(long sync) = 0;

    // In ascending order of workers; none: global stays.
    // counted: this worker's payload is among them, maybe that of an earlier start
    virtual void apply(long sync, const std::vector<Contribution>& contributions, bool counted) = 0;

    // Global and momentum of all fragments, after what is there. They are large: std::bad_alloc where the
    // host has no memory for them.
    virtual void append_snapshot(std::string& bytes) = 0;
    virtual void load(std::string_view snapshot) = 0;  // and local = global
};

struct LogTurn {
    enum Kind { go_on, wait, jump, stop };
    Kind kind;
    long step = 0;  // to jump to; it counts as done
};
