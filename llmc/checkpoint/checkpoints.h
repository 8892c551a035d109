// Checkpoints: what the trainer calls to write the checkpoints of one process. The state is copied to a
// snapshot in host memory while training continues, and a thread writes the snapshot to the disk
// (checkpointer.h). The calls for each checkpoint:
//
//     TrainingSnapshot& snapshot = checkpoints.next(...);   waits until the previous one has been written
//     snapshot.begin_copies(...); snapshot.set_fields(...);
//     checkpoints.write(step, ...);
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "llmc/checkpoint/checkpointer.h"
#include "llmc/checkpoint/model_file.h"
#include "llmc/checkpoint/training_state.h"
#include "llmc/run/session.h"

class Checkpoints {
public:
    // outer_snapshot: returns the outer optimizer's snapshot, or null if there is no outer optimizer
    // when_whole: called on the writing thread once a checkpoint would survive a crash
    Checkpoints(Session& session, const Inputs& in, std::function<OuterSnapshot*()> outer_snapshot,
                std::function<void()> when_whole)
        : session(session), in(in), outer_snapshot(std::move(outer_snapshot)),
          when_whole(std::move(when_whole)),
          writer(session.folder, session.process, session.options.keep_checkpoints,
                 session.options.major_checkpoints) {
        writer.forget_later(session.resumed.step, session.resumed.lineage);
    }

    // Allocates the snapshot, so that the first checkpoint does not have to.
    void allocate() {
        if (!snapshot) {
            snapshot = std::make_unique<TrainingSnapshot>(in.layout.shard_size(), outer_snapshot(),
                                                          session.is_first() ? in.layout.size : 0);
        }
    }

    // Waits until the writer no longer needs the snapshot's memory, and returns the snapshot.
    // is_last: this process's last checkpoint. The previous one may still wait for syncs that will no longer
    // be received; it is abandoned, since the last one has everything.
    TrainingSnapshot& next(bool is_last) {
        if (!writer.is_idle()) {
            if (is_last) { snapshot->abandon(); }
            const Watchdog::Alone alone(session.watchdog);
            writer.wait();
        }
        allocate();
        return *snapshot;
    }

    // Starts to write the snapshot as the checkpoint of `step`, once the work enqueued on `copies` is done.
    void write(long step, bool is_last_of_run, Stream& copies) {
        snapshot->end_copies(copies);
        CheckpointJob job;
        job.identity = state_identity(session.options, session.process, step, session.resumed.lineage);
        job.is_last = is_last_of_run;
        job.ready = [this] {
            device::use_in_this_thread(session.device);
            snapshot->wait();
            session.logger.sync();  // a resumed run continues this log: a power failure must not cut it short
        };
        job.sections = [this] { return snapshot->sections(); };
        if (session.is_first()) {
            job.write_model = [this](const std::string& path) {
                write_model(path, in.shape, in.layout, snapshot->model.data());
            };
        }
        job.when_whole = when_whole;
        writer.begin(std::move(job));
    }

    void print_messages() {
        for (const std::string& message : writer.take_messages()) { session.status.print(message); }
    }

    // Waits for the last checkpoint. RunError if it does not become whole.
    void finish() {
        const Watchdog::Alone alone(session.watchdog);
        writer.finish([this](const std::string& message) { session.status.print(message); });
    }

    // Before this process ends early: removes half-written files, which would otherwise take space on the
    // disk until the run is resumed. Other processes may wait a few seconds for this.
    void abandon() {
        if (snapshot) { snapshot->abandon(); }
        writer.abandon();
    }

private:
    Session& session;
    const Inputs& in;
    const std::function<OuterSnapshot*()> outer_snapshot;
    const std::function<void()> when_whole;
    std::unique_ptr<TrainingSnapshot> snapshot;
    Checkpointer writer;  // last, so that its thread ends before the snapshot is destroyed
};
