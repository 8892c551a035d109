// launch: which worker and rank this process is. There are four ways to start the processes of a run:
//     torchrun, mpirun, srun    The environment numbers the processes: worker * ranks + rank, or with
//                               --worker W the rank in worker W. They meet in --store or, if all are on this
//                               machine, in a folder of their job.
//     -pn N -pr R               llm.c's flags number them (world.h).
//     --worker W --store URL    This worker's ranks are started here, the other workers elsewhere.
//     none of these             All processes are started here, and meet in a fresh temporary folder.
// Without --store, DILOCO_STORE is used: it keeps a password out of the list of processes.
// If processes are started here, this one becomes their launcher (launcher.h): it starts its own program
// again with DILOCO_WORKER and DILOCO_RANK set, passes on their output, and ends when they have ended. It
// restarts an elastic worker that has failed, with DILOCO_RESTART set to the number of restarts so far.
#pragma once
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>
#include <xxhash.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string>

#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/run/launcher.h"
#include "llmc/run/options.h"
#include "llmc/run/process.h"
#include "llmc/run/world.h"

// Where processes meet; empty: not given.
inline std::string store_url(const Options& o) {
    return o.store.empty() ? environment("DILOCO_STORE") : o.store;
}

inline void check_launch_options(const Options& o) {
    if (o.workers < 1 || o.ranks < 1) {
        throw UserError("--workers and --ranks must be at least 1: correct them");
    }
    if (o.worker < -1 || o.worker >= o.workers) {
        throw UserError(format("--worker %d is out of range for %d workers: give 0 to %d, or a larger "
                               "--workers", o.worker, o.workers, o.workers - 1));
    }
    if (o.run_name.empty()) { throw UserError("--run-name is empty: give the run a name"); }
}

// Worker and rank of this process, and what distinguishes its run from others of the same name.
struct Place {
    int worker = 0, rank = 0;
    int local_rank = 0;          // among the processes that were started with it on this machine
    bool starts_others = false;  // it is no process of the run, but their launcher
    std::string job;
    std::string started_by;  // torchrun, mpirun or srun
    std::string folder;      // where the processes meet without a store
};

// UserError unless the world has as many processes as the options say.
inline void check_world(const World& world, const Options& o, long expected) {
    if (world.size != expected) {
        const std::string what =
            o.worker >= 0 ? format("worker %d has %d ranks", o.worker, o.ranks)
                          : format("%d workers x %d ranks are %ld processes", o.workers, o.ranks, expected);
        throw UserError(format("%s %ld processes but %s: make --workers, --ranks and --worker match",
                               world.says().c_str(), world.size, what.c_str()));
    }
    if (world.number >= world.size) {
        throw UserError(format("%s numbers this process %ld of %ld: restart the processes",
                               world.program.c_str(), world.number, world.size));
    }
}

inline std::string temporary_folder() {
    const std::string folder = environment("TMPDIR");
    return folder.empty() ? "/tmp" : folder;
}

// The folder in which the processes of a job meet if all were started on this machine; it belongs to this
// user and job. Empty if they were not, and for elastic workers, whose log must outlive the job.
inline std::string job_folder(const World& world, const Options& o) {
    const bool others_elsewhere = o.worker >= 0 && o.workers > 1;
    const bool is_usable = world.is_on_one_machine() && !others_elsewhere && !o.diloco.is_elastic();
    if (world.job.empty() || !is_usable) { return ""; }
    const uint64_t hash = XXH3_64bits(world.job.data(), world.job.size());
    return temporary_folder() + format("/diloco-%ld-%016llx", long(geteuid()), (unsigned long long)hash);
}

inline Place place_in_world(const World& world, const Options& o, bool needs_store) {
    Place place;
    if (needs_store) {
        place.folder = job_folder(world, o);
        if (place.folder.empty()) {
            const std::string who = world.program.empty() ? "-pn and -pr number" : world.program + " starts";
            throw UserError("processes that " + who + " need a place to meet: give --store file:DIR (a "
                            "folder that all see) or redis://HOST:PORT");
        }
    }
    const int number = int(world.number);
    place.worker = o.worker >= 0 ? o.worker : number / o.ranks;
    place.rank = number % o.ranks;
    place.local_rank = world.local_rank;
    // If the other workers are, or may be, other jobs, the job does not identify the run.
    if (o.worker < 0 && !o.diloco.is_elastic()) { place.job = world.job; }
    place.started_by = world.program;
    return place;
}

// From the environment and the options. UserError if they contradict each other.
inline Place find_place(const Options& o) {
    check_launch_options(o);
    Place place;
    if (has_launcher()) {
        place.worker = int(environment_number("DILOCO_WORKER"));
        place.rank = int(environment_number("DILOCO_RANK"));
        place.local_rank = number_or_zero("DILOCO_LOCAL_RANK");
        return place;
    }
    const long expected = o.worker >= 0 ? o.ranks : long(o.workers) * o.ranks;
    const bool has_others = o.diloco.is_elastic() || long(o.workers) * o.ranks > 1;
    const bool needs_store = store_url(o).empty() && has_others;
    const std::optional<World> world = o.world ? o.world : find_world(expected);
    if (world) {
        if (o.elastic.restarts > 0) {
            throw UserError("--restart is for processes that this program starts: leave it out, or start one "
                            "for each worker (--worker W)");
        }
        check_world(*world, o, expected);
        return place_in_world(*world, o, needs_store);
    }
    if (o.worker >= 0 && o.workers > 1 && needs_store) {
        throw UserError("--worker needs a place to meet the other workers: give --store file:DIR (a folder "
                        "that all see) or redis://HOST:PORT");
    }
    place.worker = std::max(o.worker, 0);
    // An elastic worker that is alone here may need a launcher for its restarts, or for the store.
    place.starts_others = expected > 1 || (o.diloco.is_elastic() && (o.elastic.restarts > 0 || needs_store));
    for (const char* name : {"PMI_RANK", "PMIX_RANK", "PALS_RANKID", "FLUX_TASK_RANK"}) {
        if (o.worker >= 0 || !place.starts_others || number_or_zero(name) == 0) { continue; }
        throw UserError(format("%s says that a launcher other than torchrun, mpirun or srun has started this "
                               "process: number its processes with -pn, -pr and -pg", name));
    }
    return place;
}

// A folder in $TMPDIR or /tmp that is removed with all that is in it. It is locked, so that systemd-tmpfiles,
// which removes old files from /tmp on some systems, leaves it alone.
class TemporaryDirectory {
public:
    TemporaryDirectory() {
        path = temporary_folder() + "/diloco-XXXXXX";
        if (!mkdtemp(&path[0])) {
            throw UserError("cannot make the temporary folder " + path + " (" + strerror(errno) +
                            "): set TMPDIR to a writable folder");
        }
        descriptor = FileDescriptor(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
        if (descriptor >= 0) { flock(descriptor, LOCK_SH); }
    }
    ~TemporaryDirectory() {
        std::error_code ignored;
        std::filesystem::remove_all(path, ignored);
    }
    std::string path;

private:
    FileDescriptor descriptor;
};

// The runs to start here: one, or one for each elastic worker.
inline std::vector<LaunchedRun> runs_to_start(const Options& o) {
    std::vector<LaunchedRun> runs;
    int number = 0;
    for (int worker = 0; worker < o.workers; worker++) {
        if (o.worker >= 0 && o.worker != worker) { continue; }
        if (runs.empty() || o.diloco.is_elastic()) { runs.emplace_back(Restarts(o.elastic.restarts)); }
        std::vector<Child>& children = runs.back().children;
        for (int rank = 0; rank < o.ranks; rank++) { children.emplace_back(worker, rank, number++); }
    }
    return runs;
}

// Returns this process, which has not met the others yet. In a launcher it does not return but exits with its
// status: call it before anything is written. Throws UserError.
// waits_for_store: if the store is down
inline Process launch(const Options& o, bool waits_for_store, char** argv) {
    const Place place = find_place(o);
    if (place.starts_others) {
        int status;
        {
            std::optional<TemporaryDirectory> folder;
            if (store_url(o).empty()) { folder.emplace(); }
            const std::string store = folder ? "file:" + folder->path : store_url(o);
            status = Launcher(runs_to_start(o), o.diloco.is_elastic(), store, argv, !o.output.empty()).run();
        }
        std::exit(status);
    }
    if (has_launcher()) { setvbuf(stdout, nullptr, _IOLBF, BUFSIZ); }  // a pipe that is read line by line

    Process process;
    process.worker = place.worker;
    process.rank = place.rank;
    process.local_rank = place.local_rank;
    process.workers = o.workers;
    process.ranks = o.ranks;
    process.restart = has_launcher() ? number_or_zero("DILOCO_RESTART") : 0;
    process.timeout = o.timeout;
    process.waits_for_store = waits_for_store || process.restart > 0;
    process.interface = o.interface;
    process.run_name = place.job.empty() ? o.run_name : o.run_name + "." + place.job;
    // mpirun gives each process a terminal, wherever mpirun's own output goes.
    process.terminal = has_launcher() ? environment("DILOCO_TERMINAL") == "1"
                                      : place.started_by != "mpirun" && isatty(STDOUT_FILENO);
    process.store_url = has_launcher() ? environment("DILOCO_STORE") : store_url(o);
    if (o.diloco.is_elastic()) { process.become_elastic(); }
    process.job_folder = place.folder;
    return process;
}
