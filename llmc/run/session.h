// Session: what surrounds the training of one process: its place in the run, its communicators, the folder it
// writes to, logs and messages, the checkpoint that it resumes from, requests to stop, and the watchdog.
#pragma once
#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>
#include <climits>
#include <cmath>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "llmc/checkpoint/checkpointer.h"
#include "llmc/checkpoint/training_state.h"
#include "llmc/comm.h"
#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/run/accelerator.h"
#include "llmc/run/comms.h"
#include "llmc/run/fingerprint.h"
#include "llmc/run/inputs.h"
#include "llmc/run/logger.h"
#include "llmc/run/memory.h"
#include "llmc/run/options.h"
#include "llmc/run/process.h"
#include "llmc/run/report.h"
#include "llmc/run/stop.h"
#include "llmc/run/watchdog.h"

// -----------------------------------------------------------------------------------------------------------
// Where a run writes

// Each elastic worker has a folder of its own, and resumes from it. "": without -o
inline std::string checkpoint_folder(const Options& o, const Process& process) {
    const bool is_own = o.diloco.is_elastic() && !o.output.empty();
    return is_own ? o.output + format("/worker_%d", process.worker) : o.output;
}

// Whether this is not the first start of a run: -o has a checkpoint, of any worker, or SLURM has restarted it.
inline bool has_begun(const Options& o) {
    std::error_code unreadable;
    std::vector<std::string> names = names_in(o.output, unreadable);
    for (int w = 0; w < o.workers; w++) {
        for (auto& name : names_in(o.output + format("/worker_%d", w), unreadable)) { names.push_back(name); }
    }
    return number_or_zero("SLURM_RESTART_COUNT") > 0 ||
           std::any_of(names.begin(), names.end(), [](auto& name) { return bool(state_named(name)); });
}

// If -o is there, process 0 locks it until it ends: a second start of the same run must not write into its
// files. Elastic workers may be started again while they run, and take their own place.
inline void lock_folder(const Options& o, const Process& process) {
    if (process.index() != 0 || o.output.empty() || o.diloco.is_elastic()) { return; }
    static int descriptor = -1;
    if (descriptor < 0) { descriptor = open(o.output.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); }
    for (Patience patience(2); descriptor >= 0 && flock(descriptor, LOCK_EX | LOCK_NB) != 0;) {
        if (errno != EWOULDBLOCK) { return; }  // this file system has no locks
        if (patience.is_over()) {
            throw TemporaryFailure("another run is still writing into " + o.output +
                                   ": wait until it ends, or give another -o");
        }
        patience.pause();
    }
}

// Before the logs, which truncate old files. Returns -o.
inline const std::string& made_and_locked(const Options& o, Process& process) {
    process.check_together("lock", [&] {
        const std::string folder = checkpoint_folder(o, process);
        std::error_code error;
        if (!folder.empty()) { std::filesystem::create_directories(folder, error); }
        if (error) {
            throw UserError("cannot write into " + folder + " (" + error.message() + "): correct -o");
        }
        lock_folder(o, process);
    });
    return o.output;
}

// Identifies this process and `step` in a checkpoint that is written or resumed from.
inline StateIdentity state_identity(const Options& o, const Process& process, long step,
                                    const std::string& lineage) {
    return {step, process.worker, process.rank, o.workers, o.ranks, lineage, o.diloco.is_elastic()};
}

// Which lines of its logs a resumed run keeps: all but those that it will write again. A run that was at its
// end repeats that end. An elastic worker that returns without a checkpoint joins at the other workers' step
// and repeats nothing, so it keeps everything.
inline std::optional<LogCut> log_cut(const Options& o, const Resumption& resumed, long steps) {
    if (!resumed.state && o.diloco.is_elastic() && o.resume) { return LogCut{steps, LONG_MAX, true}; }
    if (!resumed.state) { return std::nullopt; }
    return LogCut{resumed.step, resumed.fields.integer("total.next_sync"), resumed.step < steps};
}

// -----------------------------------------------------------------------------------------------------------
// Before and after the training

// Before anything is written: all processes agree on the options and divide the data.
// check_log: further checks, made by every process
inline void agree(const Options& o, Process& process, Inputs& in, const std::function<void()>& check_log) {
    process.check_fingerprint(fingerprint(o, in));
    if (o.has_own_batch()) { share_data(o, process, in); }
    check_shards(process, *in.train_loader);
    process.check_together("log", check_log);
    process.check_together("output", [&] {
        if (!o.output.empty() && !o.resume) { refuse_models(checkpoint_folder(o, process)); }
    });
    process.check_together("folder", [&] { lock_folder(o, process); });
}

// -----------------------------------------------------------------------------------------------------------
// The training of one process

struct Session {
    const Options& options;
    Process& process;
    const std::string folder;  // of this process's checkpoints
    Resumption resumed;
    const device::Device device;
    Logger logger;
    StatusLine status;
    Totals totals{};
    Report report;
    std::unique_ptr<Comm> inner{};  // between the ranks of this worker
    std::unique_ptr<Comm> outer{};  // between workers in lock-step; else null
    Watchdog watchdog;
    Stopping stopping{};

    // sync_bytes: what a process sends in a sync of each fragment; empty if nothing is exchanged
    Session(const Options& o, Process& process, const Inputs& in, const std::vector<Fragment>& fragments,
            const std::vector<size_t>& sync_bytes, const MemoryNeed& memory, Resumption resumed_)
        : options(o), process(process), folder(checkpoint_folder(o, process)), resumed(std::move(resumed_)),
          device(checked_for_memory(choose_device(process, o.diloco.streams() && o.diloco.transport == "nccl"),
                                    memory)),
          logger(made_and_locked(o, process), number_among_all(o, process), o.workers * o.ranks,
                 o.resume != 0, log_cut(o, resumed, in.steps)),
          status(stdout, process.terminal, process.terminal ? 0.1 : 5.0),
          report(o, process, in, fragments, device.name, sync_bytes, totals, logger, status),
          watchdog(process) {}

    // Connects the ranks of this worker, and the workers if they run in lock-step. The watchdog watches,
    // since NCCL's blocking calls would wait for ever for a process that has died.
    void connect() {
        const Watchdog::Watch watch(watchdog, "the connection of the processes");
        watchdog.meet_neighbours(process);
        inner = device::make_inner_comm(process.inner_group());
        watchdog.guard(*inner);
        if (!options.diloco.streams() || options.diloco.is_elastic()) { return; }
        watchdog.progress();
        outer = device::make_outer_comm(process.outer_group(), options.diloco.transport);
        watchdog.guard(*outer);
    }

    // A resumed run can keep the old file, so a full disk does not end it.
    void write_config(const std::string& path) {
        try {
            write_file(path, [&](OutputFile& file) { file.write(options.toml.data(), options.toml.size()); },
                       format(".%d", process.worker));
        } catch (const RunError& error) {
            if (!options.resume || !std::filesystem::exists(path)) { throw; }
            status.print(std::string("warning: the old config.toml is kept: ") + error.what());
        }
    }

    // Starts the logs, and prints what this run is.   matmul, exchanges: text for people
    void announce(const Inputs& in, const std::vector<double>& fragment_offsets, const std::string& matmul,
                  const std::string& exchanges) {
        const std::string config = folder + "/config.toml";
        // A worker that was started by itself may have a folder of its own, or share process 0's.
        const bool writes = process.index() == 0 || (report.speaks() && !std::filesystem::exists(config));
        if (writes && !options.output.empty()) { write_config(config); }
        logger.run({host_name(), device.name, process.worker, process.rank, options.workers, options.ranks,
                    in.layout.values, options.resolved, in.steps, fragment_offsets},
                   resumed.step);
        report.banner(matmul, exchanges, resumed.notes, resumed.step);
    }

    // Whether this worker saves and samples (worker 0, or any elastic one), and whether this process does it.
    bool is_first_worker() const { return process.worker == process.first_worker; }
    bool is_first() const { return process.rank == 0 && is_first_worker(); }

    // If a loss is not finite, throws a RunError that says what to do. A resume takes the newest step of
    // which every process has a checkpoint, so the state that produced this loss must be deleted.
    // step: the parameters after this step gave the loss
    void check_loss(float loss, const std::string& name, long step) const {
        if (std::isfinite(loss)) { return; }
        const std::string what = name + (std::isnan(loss) ? " is not a number: " : " is infinite: ");
        const CheckpointFolder files(folder, process);
        std::set<long> good;
        try {
            if (!options.output.empty()) { good = files.whole_steps(resumed.lineage); }
        } catch (const RunError& error) { throw RunError(what + error.what()); }
        good.erase(good.lower_bound(step), good.end());
        // If this start has gained no checkpoint, another one would see the same loss; elastic workers differ.
        const bool repeats = !options.diloco.is_elastic() && (good.empty() || *good.rbegin() <= resumed.step);
        const int status = repeats ? mistake_status : 1;
        if (good.empty()) {
            throw RunError(
                what + "start again with a lower -l or a longer -u (there is no earlier checkpoint)", status);
        }
        const bool is_suspect_there = !first_that_exists({files.state(step)}).empty();
        const std::string suspect = folder + format("/state_%08ld_*.bin", step);
        throw RunError(what + (is_suspect_there ? "remove " + suspect + ", then " : "") +
                       format("resume (-y 1) from the last good checkpoint, of step %ld, with a lower -l or "
                              "-sg 4; unchanged, the run would fail again", *good.rbegin()),
                       status);
    }

    void validated(long step, float loss) {
        report.validation(step, loss);
        check_loss(loss, format("the validation loss after step %ld", step), step);
    }

    // These report how the training ended.   return whether the run is complete
    // gave_up: why the run ends though nobody has asked it to, which is an error; else ""
    bool left_while_waiting(const std::string& gave_up) {
        check_given_up(gave_up);
        report.say(
            "stopped by request while it waited for other workers: -y 1 resumes from the last checkpoint");
        return false;
    }
    bool ended_without_this_worker() {
        report.say("the other workers have reached the end of this run: give a new run another --run-name");
        return true;
    }
    bool stopped_after(long step, long steps, const std::string& gave_up) {
        check_given_up(gave_up);
        report.say(format("stopped by request after step %ld of %ld: -y 1 resumes there", step, steps));
        return false;
    }
    bool completed(long steps, const Traffic& inner, const OuterCosts& costs) {
        report.end(steps, inner, costs);
        return true;
    }

private:
    static void check_given_up(const std::string& why) {
        if (!why.empty()) { throw RunError(why + ": -y 1 resumes from the last checkpoint", retry_status); }
    }
};
