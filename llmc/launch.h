// launch: which worker and rank this process is. Whoever started it has said so, in one of these ways:
//     torchrun, mpirun, srun    by their environment: process number = worker * ranks + rank, or with
//                               --worker W the number is the rank in worker W; --store says where to meet
//     --worker W --store URL    this worker's ranks are started here, the other workers elsewhere
//     nothing of all that       all processes are started here, and meet in a fresh temporary folder
// DILOCO_STORE stands for --store where that is not given: it keeps a password out of the list of processes.
// Where processes are started here, this one becomes their launcher (launcher.h): it starts its own program
// again with DILOCO_WORKER and DILOCO_RANK set, passes on what they print, and ends when they have ended.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "llmc/error.h"
#include "llmc/launcher.h"
#include "llmc/process.h"
#include "llmc/store.h"

struct LaunchOptions {
    int workers = 1, ranks = 1;
    int worker = -1;        // -1: not given
    std::string store;      // URL; empty: not given, see store_url()
    std::string interface;  // of the network between workers; empty: the one that leads to the store
    std::string run_name = "diloco";
    double timeout = 600;
    bool stops_gracefully = false;  // the processes handle a request to stop (stop.h)
};

// This process as its number among those that another program has started.
struct World {
    std::string program;  // for messages
    long number, size;
    int local_rank;   // its number among those on this machine
    std::string job;  // the same for all of them, and different from other runs; may be empty
};

inline std::string environment(const char* name) {
    const char* value = getenv(name);
    return value ? value : "";
}

// Where processes meet; empty: not given.
inline std::string store_url(const LaunchOptions& o) {
    return o.store.empty() ? environment("DILOCO_STORE") : o.store;
}

// Has the launcher (launcher.h) started this process?
inline bool has_launcher() { return getenv("DILOCO_WORKER") && getenv("DILOCO_RANK"); }

// UserError unless the variable holds a number of at least 0.
inline long environment_number(const char* name) {
    const std::string text = environment(name);
    if (text.empty() || text.size() > 9 || text.find_first_not_of("0123456789") != std::string::npos) {
        throw UserError(
            format("%s is '%s', not a number: start the processes anew, or unset it", name, text.c_str()));
    }
    return std::stol(text);
}

// Of a variable that may be missing.
inline int number_or_zero(const char* name) { return getenv(name) ? int(environment_number(name)) : 0; }

// torchrun and mpirun set their variables in their processes alone. SLURM's are also there in a batch script
// and in an interactive shell, which are no parallel program, and in what torchrun or mpirun starts there: they
// come last, and a step number and several tasks tell an srun. A run of `expected` = 1 may be a step of one.
inline std::optional<World> find_world(long expected) {
    auto world = [](const char* program, const char* rank, const char* size, const char* local_rank,
                    const std::string& job) {
        return World{program, environment_number(rank), environment_number(size), number_or_zero(local_rank),
                     job};
    };
    if (getenv("RANK") && getenv("WORLD_SIZE") && getenv("LOCAL_RANK")) {
        return world("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", environment("TORCHELASTIC_RUN_ID"));
    }
    if (getenv("OMPI_COMM_WORLD_RANK") && getenv("OMPI_COMM_WORLD_SIZE")) {
        return world("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                     environment("PMIX_NAMESPACE"));
    }
    if (getenv("PMI_RANK") && getenv("PMI_SIZE") && getenv("MPI_LOCALRANKID")) {  // MPICH's, Intel MPI's
        return world("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "");
    }
    if (getenv("SLURM_PROCID") && getenv("SLURM_STEP_ID") && getenv("SLURM_NTASKS")) {
        const char* tasks = getenv("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
        const World step = world("srun", "SLURM_PROCID", tasks, "SLURM_LOCALID",
                                 environment("SLURM_JOB_ID") + "." + environment("SLURM_STEP_ID"));
        if (step.size > 1 || step.size == expected) { return step; }
    }
    return std::nullopt;
}

inline void check_launch_options(const LaunchOptions& o) {
    if (o.workers < 1 || o.ranks < 1) {
        throw UserError("--workers and --ranks must be at least 1: correct them");
    }
    if (o.worker < -1 || o.worker >= o.workers) {
        throw UserError(format(
            "--worker %d is none of the %d workers: give one of 0 to %d (and --workers if there are more)",
            o.worker, o.workers, o.workers - 1));
    }
    if (o.run_name.empty()) { throw UserError("--run-name is empty: give the run a name"); }
}

// Worker and rank of this process, and what tells its run from others of the same name.
struct Place {
    int worker = 0, rank = 0;
    int local_rank = 0;          // among the processes that were started with it on this machine
    bool starts_others = false;  // it is none of the processes but starts them
    std::string job;
    std::string started_by;  // torchrun, mpirun or srun
};

// From the environment and the options. UserError where they contradict each other.
inline Place find_place(const LaunchOptions& o) {
    check_launch_options(o);
    Place place;
    if (has_launcher()) {
        place.worker = int(environment_number("DILOCO_WORKER"));
        place.rank = int(environment_number("DILOCO_RANK"));
        place.local_rank = number_or_zero("DILOCO_LOCAL_RANK");
        return place;
    }
    const long expected = o.worker >= 0 ? o.ranks : long(o.workers) * o.ranks;
    const bool needs_store = store_url(o).empty() && long(o.workers) * o.ranks > 1;
    const std::optional<World> world = find_world(expected);
    if (world) {
        if (world->size != expected) {
            const std::string what = o.worker >= 0 ? format("worker %d has %d ranks", o.worker, o.ranks)
                                                   : format("%d workers x %d ranks are %ld processes",
                                                            o.workers, o.ranks, expected);
            throw UserError(
                format("%s started %ld processes but %s: make --workers, --ranks and --worker agree with it",
                       world->program.c_str(), world->size, what.c_str()));
        }
        if (world->number >= world->size) {
            throw UserError(format("%s numbers this process %ld of %ld: start the processes anew",
                                   world->program.c_str(), world->number, world->size));
        }
        if (needs_store) {
            throw UserError("processes that " + world->program +
                            " starts need a place to meet: give --store file:DIR (a folder that all "
                            "see) or redis://HOST:PORT");
        }
        const int number = int(world->number);
        place.worker = o.worker >= 0 ? o.worker : number / o.ranks;
        place.rank = number % o.ranks;
        place.local_rank = world->local_rank;
        if (o.worker < 0) { place.job = world->job; }  // else the other workers are other jobs
        place.started_by = world->program;
        return place;
    }
    if (o.worker >= 0 && o.workers > 1 && needs_store) {
        throw UserError(
            "--worker needs a place to meet the other workers: give --store file:DIR (a folder that all see) "
            "or redis://HOST:PORT");
    }
    place.worker = std::max(o.worker, 0);
    place.starts_others = expected > 1;
    return place;
}

// The processes to start here, as launcher.h wants them.
inline std::vector<Child> children_to_start(const LaunchOptions& o) {
    std::vector<Child> children;
    for (int worker = 0; worker < o.workers; worker++) {
        for (int rank = 0; rank < o.ranks && (o.worker < 0 || o.worker == worker); rank++) {
            children.emplace_back(worker, rank, worker == 0 && rank == 0);
        }
    }
    return children;
}

// This process, not yet met with the others. A process that starts others does not return from here but exits
// with their status, so call it before anything is written. Throws UserError.
inline Process launch(const LaunchOptions& o, char** argv) {
    const Place place = find_place(o);
    if (place.starts_others) {
        int status;
        {
            Launcher launcher(children_to_start(o), store_url(o), argv, o.stops_gracefully);
            status = launcher.run();
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
    process.timeout = o.timeout;
    process.interface = o.interface;
    process.run_name = place.job.empty() ? o.run_name : o.run_name + "." + place.job;
    // mpirun gives each process a terminal of its own, wherever its own output goes.
    process.terminal = has_launcher() ? environment("DILOCO_TERMINAL") == "1"
                                      : place.started_by != "mpirun" && isatty(STDOUT_FILENO);
    process.store_url = has_launcher() ? environment("DILOCO_STORE") : store_url(o);
    return process;
}
