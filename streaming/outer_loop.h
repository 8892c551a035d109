// OuterLoop: what the trainer asks of the exchange between workers, once per step. There are two:
//
//     Diloco          diloco.h                   lock-step: every worker takes part in every sync
//     ElasticDiloco   elastic/elastic_diloco.h   over a sync log: no worker waits for one that is slow, dead,
//                                                or not there yet
//
// The order of the calls: start; restore, if the run is resumed; begin; after_inner_step for each step, with
// snapshots between any two; finish.
#pragma once
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "llmc/floatx.h"
#include "streaming/snapshot.h"
#include "streaming/sync_report.h"

// Something that happened between workers, for the log and for people.
struct OuterEvent {
    std::string kind;          // as the log of events names it
    std::optional<long> sync;  // none: of no sync
    int worker;                // whom it is about
    std::string text;          // a line for people
    bool is_routine;           // for the log alone: it happens in every sync
};

// What a call did, and whether the run continues.
struct Outcome {
    enum Course {
        continues,
        left,  // a request to stop, or a time limit, ended a wait for others; a run that is resumed from a
               // snapshot of this moment applies what is due
        over   // the other workers have reached the end of the run: there is nothing left to do here
    };
    long step = 0;                       // training continues after it; it may be later than the call's step
    std::vector<SyncReport> syncs = {};  // that ended
    std::vector<OuterEvent> events = {};
    bool joined = false;  // another worker's global parameters replaced local, of this rank or another
    Course course = continues;
    bool exchanges = false;  // collectives may run on the device until after the next step's update
};

// What exchanges cost besides their payloads, in seconds since the start. NaN: not measured.
struct OuterCosts {
    double turns = NAN;    // on the trainer's thread, without waits
    double threads = NAN;  // CPU time of other threads
};

class OuterLoop {
public:
    virtual ~OuterLoop() = default;

    // global = local, momentum = 0.   local: (shard_size), the same on all workers
    virtual void start(const float* local, Stream& main) = 0;

    // Continues from a saved snapshot. tau may differ from the saved run's.
    // Throws a UserError if the snapshot is of other fragments.
    virtual void restore(const SavedState& saved, const Fields& fields, Stream& main) = 0;

    // Before the first step, when `step` steps are done: meets the other workers.
    // tokens: that this worker has trained on so far
    virtual Outcome begin(long step, uint64_t tokens, float* local, floatX* params, Stream& main) = 0;

    // After the inner update of `step` (1, 2, ...): sends, then receives what is due.
    // local: (shard_size)   params: flat; this rank's shards are written
    // Throws a CommError when an exchange failed, a RunError when the workers' global parameters differ.
    virtual Outcome after_inner_step(long step, uint64_t tokens, float* local, floatX* params,
                                     Stream& main) = 0;

    // After the last step: receives and applies what is in flight, in the order of the sync numbers.
    virtual Outcome finish(long step, float* local, floatX* params, Stream& main) = 0;

    // This worker was asked to end the run. In lock-step all workers learn it from this worker's next send:
    // see SyncReport::stops.
    virtual void request_stop() = 0;

    // The loop's snapshot. The first call allocates its memory, which all snapshots that are taken share.
    virtual OuterSnapshot& snapshot() = 0;

    // Between two steps: starts to copy the state into snapshot(). Syncs in flight are added when they are
    // received (snapshot.h). The previous snapshot must have been written or abandoned.
    // copies: ordered after main's work so far; the caller makes main wait for it before the next call
    virtual void take_snapshot(Stream& copies) = 0;

    // When the run ends after a snapshot: takes part in the exchanges that the snapshot and the other workers
    // still wait for, and applies none of them.
    virtual void collect_in_flight(Stream& main) = 0;

    // On any thread: the checkpoint that holds snapshot() is on disk and survives a crash.
    virtual void checkpointed() = 0;

    // The outer parameters, readable by kernels, for work on main from now on.   (shard_size)
    virtual const float* global(Stream& main) = 0;

    // After begin(): a warning about settings of the store that endanger the run, or "".
    virtual std::string warning() const { return ""; }

    // Why the loop ended the run (Outcome::left) without a request to stop; else "".
    virtual std::string gave_up() const { return ""; }

    virtual OuterCosts costs() const { return {}; }
};
