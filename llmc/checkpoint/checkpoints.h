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
#include "llmc/checkpoint/state_file.h"
#include "llmc/checkpoint/training_state.h"
#include "llmc/run/logger.h"
#include "llmc/run/process.h"
#include "llmc/run/watchdog.h"

class Checkpoints {
public:
    // who: identifies this process in its state files   keep, major: -nk, -nm
    // outer_snapshot: returns the outer optimizer's snapshot, or null if there is no outer optimizer
    // use_device: makes the writing thread use this process's device
    // when_whole: called on the writing thread once a checkpoint would survive a crash
    Checkpoints(const std::string& folder, const Process& process, const StateIdentity& who, long keep,
                long major, const GptShape& shape, const Layout& layout, bool writes_model,
                std::function<OuterSnapshot*()> outer_snapshot, Logger& logger, StatusLine& status,
                Watchdog& watchdog, std::function<void()> use_device, std::function<void()> when_whole)
        : who(who), shape(shape), layout(layout), writes_model(writes_model),
          outer_snapshot(std::move(outer_snapshot)), logger(logger), status(status), watchdog(watchdog),
          use_device(std::move(use_device)), when_whole(std::move(when_whole)),
          writer(folder, process, keep, major) {
        writer.forget_later(who.step, who.lineage);
    }

    // Allocates the snapshot, so that the first checkpoint does not have to.
    void allocate() {
        if (!snapshot) {
            snapshot = std::make_unique<TrainingSnapshot>(layout.shard_size(), outer_snapshot(),
                                                          writes_model ? layout.size : 0);
        }
    }

    // Waits until the writer no longer needs the snapshot's memory, and returns the snapshot.
    // is_last: this process's last checkpoint. The previous one may still wait for syncs that will no longer
    // be received; it is abandoned, since the last one has everything.
    TrainingSnapshot& next(bool is_last) {
        if (!writer.is_idle()) {
            if (is_last) { snapshot->abandon(); }
            const Watchdog::Alone alone(watchdog);
            writer.wait();
        }
        allocate();
        return *snapshot;
    }

    // Starts to write the snapshot as the checkpoint of `step`, once what is on `copies` by now is done.
    void write(long step, bool is_last_of_run, Stream& copies) {
        snapshot->end_copies(copies);
        CheckpointJob job;
        job.identity = who;
        job.identity.step = step;
        job.is_last = is_last_of_run;
        job.ready = [this] {
            use_device();
            snapshot->wait();
            logger.sync();  // a resumed run continues this log: it must not lack lines after a power failure
        };
        job.sections = [this] { return snapshot->sections(); };
        if (writes_model) {
            job.write_model = [this](const std::string& path) {
                write_model(path, shape, layout, snapshot->model.data());
            };
        }
        job.when_whole = when_whole;
        writer.begin(std::move(job));
    }

    void print_messages() {
        for (const std::string& message : writer.take_messages()) { status.print(message); }
    }

    // Waits for the last checkpoint. RunError if it does not become whole.
    void finish() {
        const Watchdog::Alone alone(watchdog);
        writer.finish([this](const std::string& message) { status.print(message); });
    }

    // Before this process ends early: removes half-written files, which would otherwise take space on the
    // disk until the run is resumed. Other processes may wait a few seconds for this.
    void abandon() {
        if (snapshot) { snapshot->abandon(); }
        writer.abandon();
    }

private:
    const StateIdentity who;
    const GptShape shape;
    const Layout& layout;
    const bool writes_model;
    const std::function<OuterSnapshot*()> outer_snapshot;
    Logger& logger;
    StatusLine& status;
    Watchdog& watchdog;
    const std::function<void()> use_device, when_whole;
    std::unique_ptr<TrainingSnapshot> snapshot;
    Checkpointer writer;  // last, so that its thread ends before the snapshot is destroyed
};
