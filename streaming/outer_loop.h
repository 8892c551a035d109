// OuterLoop: what the trainer asks of the exchange between workers, once per step. There are two:
//
//     Diloco         diloco.h          lock-step: every worker takes part in every sync, over a communicator
//     LoggedDiloco   logged_diloco.h   the sync log: nobody waits for who is slow, dead, or not yet there
//
// The calls, in this order: start; where a run goes on, restore; begin; after_inner_step for each step, with
// snapshots between any two; finish.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "llmc/floatx.h"
#include "streaming/snapshot.h"
#include "streaming/sync_report.h"

class OuterLoop {
public:
    virtual ~OuterLoop() = default;

    // global = local, momentum = 0.   local: (shard_size), the same on all workers
    virtual void start(const float* local, Stream& main) = 0;

    // Continues from a saved snapshot. tau may differ from the saved run's.
    // Throws a UserError if the snapshot is of other fragments.
    virtual void restore(const SavedState& saved, const Fields& fields, Stream& main) = 0;

    // Before the first step, behind `step` steps that are done: meets the others. Returns the step to go on
    // behind.   tokens: that this worker has trained on so far
    virtual long begin(long step, uint64_t tokens, float* local, floatX* params, Stream& main) = 0;

    // After the inner update of `step` (1, 2, ...): sends, then receives what is due. May set the step
    // forward: the next one comes behind that.
    // local: (shard_size)   params: flat; this rank's shards are written
    // Throws a CommError when an exchange failed, a RunError when the workers' global parameters differ.
    virtual std::vector<SyncReport> after_inner_step(long& step, uint64_t tokens, float* local,
                                                     floatX* params, Stream& main) = 0;

    // At the end of training, behind its last step: receives and applies what is in flight, in the order of
    // the sync numbers.
    virtual std::vector<SyncReport> finish(long step, float* local, floatX* params, Stream& main) = 0;

    // This worker has been asked to end the run. In lock-step all are, from its next send on: see
    // SyncReport::stops.
    virtual void request_stop() = 0;

    // The loop's snapshot. The first call allocates its memory, which all snapshots that are taken share.
    virtual OuterSnapshot& snapshot() = 0;

    // Between two steps: starts to copy the state into snapshot(). Syncs in flight are added when they are
    // received (snapshot.h). The previous snapshot must have been written or abandoned.
    virtual void take_snapshot(Stream& main) = 0;

    // Where the run ends behind a snapshot: takes part in what the snapshot and the other workers still wait
    // for, and applies none of it.
    virtual void collect_in_flight(Stream& main) = 0;

    // On any thread: the checkpoint that holds snapshot() is on disk and survives a crash.
    virtual void checkpointed() = 0;

    // The outer parameters, readable by kernels, for work on main from now on.   (shard_size)
    virtual const float* global(Stream& main) = 0;
};
