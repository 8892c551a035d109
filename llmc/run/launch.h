// launch: which worker and rank this process is. Whoever started it has said so, in one of these ways:
//     torchrun, mpirun, srun    by their environment: process number = worker * ranks + rank, or with
//                               --worker W the number is the rank in worker W; --store says where to meet,
//                               unless all are on this machine: then a folder of their job does
//     -pn N -pr R               llm.c's flags: the same by options (world.h)
//     --worker W --store URL    this worker's ranks are started here, the other workers elsewhere
//     nothing of all that       all processes are started here, and meet in a fresh temporary folder
// DILOCO_STORE stands for --store where that is not given: it keeps a password out of the list of processes.
// Where processes are started here, this one becomes their launcher (launcher.h): it starts its own program
// again with DILOCO_WORKER and DILOCO_RANK set, passes on what they print, and ends when they have ended. It
// restarts an elastic worker that has failed, with DILOCO_RESTART set to the number of restarts so far.
#pragma once
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "llmc/error.h"
#include "llmc/run/launcher.h"
#include "llmc/run/process.h"
#include "llmc/run/store.h"
#include "llmc/run/world.h"

struct LaunchOptions {
    int workers = 1, ranks = 1;
    int worker = -1;        // -1: not given
    std::string store;      // URL; empty: not given, see store_url()
    std::string interface;  // of the network between workers; empty: the one that leads to the store
    std::string run_name = "diloco";
    double timeout = 600;
    bool stops_gracefully = false;  // the processes handle a request to stop (stop.h)
    std::optional<World> world{};   // by -pn and -pr; else the environment may have one
    bool elastic = false;           // each worker is a run of its own: see Process
    int restarts = 0;               // of an elastic worker that has failed, by the launcher
};

// Where processes meet; empty: not given.
inline std::string store_url(const LaunchOptions& o) {
    return o.store.empty() ? environment("DILOCO_STORE") : o.store;
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
    std::string folder;      // where the processes meet if no store is given
};

// UserError unless the world is that of these options.
inline void check_world(const World& world, const LaunchOptions& o, long expected) {
    if (world.size != expected) {
        const std::string what =
            o.worker >= 0 ? format("worker %d has %d ranks", o.worker, o.ranks)
                          : format("%d workers x %d ranks are %ld processes", o.workers, o.ranks, expected);
        throw UserError(format("%s %ld processes but %s: make --workers, --ranks and --worker agree with it",
                               world.says().c_str(), world.size, what.c_str()));
    }
    if (world.number >= world.size) {
        throw UserError(format("%s numbers this process %ld of %ld: start the processes anew",
                               world.program.c_str(), world.number, world.size));
    }
}

// Where processes meet that were all started on this machine: a folder of this user and their job. Empty
// where that cannot be; and for elastic workers, whose log has to outlive a job.
inline std::string job_folder(const World& world, const LaunchOptions& o) {
    const bool others_elsewhere = o.worker >= 0 && o.workers > 1;
    const bool is_usable = world.is_on_one_machine() && !others_elsewhere && !o.elastic;
    if (world.job.empty() || !is_usable) { return ""; }
    const std::string parent = environment("TMPDIR");
    const uint64_t hash = XXH3_64bits(world.job.data(), world.job.size());
    return (parent.empty() ? "/tmp" : parent) +
           format("/diloco-%ld-%016llx", long(geteuid()), (unsigned long long)hash);
}

inline Place place_in_world(const World& world, const LaunchOptions& o, bool needs_store) {
    Place place;
    if (needs_store) {
        place.folder = job_folder(world, o);
        if (place.folder.empty()) {
            const std::string who = world.program.empty() ? "-pn and -pr number" : world.program + " starts";
            throw UserError("processes that " + who +
                            " need a place to meet: give --store file:DIR (a folder that all "
                            "see) or redis://HOST:PORT");
        }
    }
    const int number = int(world.number);
    place.worker = o.worker >= 0 ? o.worker : number / o.ranks;
    place.rank = number % o.ranks;
    place.local_rank = world.local_rank;
    // Where the other workers are other jobs, or may be, the job says nothing of the run.
    if (o.worker < 0 && !o.elastic) { place.job = world.job; }
    place.started_by = world.program;
    return place;
}

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
    const bool has_others = o.elastic || long(o.workers) * o.ranks > 1;
    const bool needs_store = store_url(o).empty() && has_others;
    const std::optional<World> world = o.world ? o.world : find_world(expected);
    if (world) {
        if (o.restarts > 0) {
            throw UserError(
                "--restart is for processes that this program starts: leave it out, or start one "
                "for each worker (--worker W)");
        }
        check_world(*world, o, expected);
        return place_in_world(*world, o, needs_store);
    }
    if (o.worker >= 0 && o.workers > 1 && needs_store) {
        throw UserError(
            "--worker needs a place to meet the other workers: give --store file:DIR (a folder that all see) "
            "or redis://HOST:PORT");
    }
    place.worker = std::max(o.worker, 0);
    // An elastic worker that is alone here may need a launcher: for its restarts, or for the store.
    place.starts_others = expected > 1 || (o.elastic && (o.restarts > 0 || needs_store));
    return place;
}

// Makes the folder, or takes it if another process of the job has made it. UserError where it is not this
// user's alone: whoever can write there could tell the processes whom to connect to.
inline void make_private_folder(const std::string& path) {
    struct stat info;
    do {
        if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
            throw UserError("no temporary folder " + path + " (" + strerror(errno) +
                            "): set TMPDIR to a folder that can be written, or give --store file:DIR");
        }
    } while (lstat(path.c_str(), &info) != 0 && errno == ENOENT);  // removed by one that has just left
    if (!S_ISDIR(info.st_mode) || info.st_uid != geteuid() || (info.st_mode & 077) != 0) {
        throw UserError("the temporary folder " + path +
                        " is not yours alone: remove it, set TMPDIR to another place, or give --store "
                        "file:DIR");
    }
}

// The store in the folder of a job: made when it is first used, and removed by the last process that comes to
// its end. A run that is killed leaves some kB there. A job that SLURM puts back into its queue comes again
// under the same name, and finds them: as in any store, they are no run's but the old one's (process.h).
class JobStore : public Store {
public:
    explicit JobStore(std::string path) : path(std::move(path)) {}
    ~JobStore() override {
        if (opened) { rmdir(path.c_str()); }
    }
    void set(const std::string& key, const std::string& value) override { files().set(key, value); }
    std::optional<std::string> try_get(const std::string& key) override { return files().try_get(key); }
    std::string set_if_absent(const std::string& key, const std::string& value) override {
        return files().set_if_absent(key, value);
    }
    void remove(const std::string& key) override { files().remove(key); }
    std::string url() const override { return "file:" + path; }

private:
    FileStore& files() {
        std::call_once(once, [this] {
            make_private_folder(path);
            opened = std::make_unique<FileStore>(path);
        });
        return *opened;
    }

    const std::string path;
    std::once_flag once;
    std::unique_ptr<FileStore> opened;
};

// A folder in $TMPDIR or /tmp that is removed with all that is in it.
class TemporaryDirectory {
public:
    TemporaryDirectory() {
        const char* parent = getenv("TMPDIR");
        path = std::string(parent && *parent ? parent : "/tmp") + "/diloco-XXXXXX";
        if (!mkdtemp(&path[0])) {
            throw UserError("no temporary folder " + path + " (" + strerror(errno) +
                            "): set TMPDIR to a folder that can be written");
        }
    }
    TemporaryDirectory(const TemporaryDirectory&) = delete;
    TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
    ~TemporaryDirectory() {
        std::error_code ignored;
        std::filesystem::remove_all(path, ignored);
    }
    std::string path;
};

// The runs to start here: one, or one for each elastic worker.
inline std::vector<LaunchedRun> runs_to_start(const LaunchOptions& o) {
    std::vector<LaunchedRun> runs;
    int number = 0;
    for (int worker = 0; worker < o.workers; worker++) {
        if (o.worker >= 0 && o.worker != worker) { continue; }
        if (runs.empty() || o.elastic) { runs.emplace_back(Restarts(o.restarts)); }
        std::vector<Child>& children = runs.back().children;
        for (int rank = 0; rank < o.ranks; rank++) { children.emplace_back(worker, rank, number++); }
    }
    return runs;
}

// This process, not yet met with the others. A process that starts others does not return from here but exits
// with their status, so call it before anything is written. Throws UserError.
inline Process launch(const LaunchOptions& o, char** argv) {
    const Place place = find_place(o);
    if (place.starts_others) {
        int status;
        {
            std::optional<TemporaryDirectory> folder;
            if (store_url(o).empty()) { folder.emplace(); }
            const std::string store = folder ? "file:" + folder->path : store_url(o);
            status = Launcher(runs_to_start(o), o.elastic, store, argv, o.stops_gracefully).run();
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
    process.interface = o.interface;
    process.run_name = place.job.empty() ? o.run_name : o.run_name + "." + place.job;
    // mpirun gives each process a terminal of its own, wherever its own output goes.
    process.terminal = has_launcher() ? environment("DILOCO_TERMINAL") == "1"
                                      : place.started_by != "mpirun" && isatty(STDOUT_FILENO);
    process.store_url = has_launcher() ? environment("DILOCO_STORE") : store_url(o);
    if (o.elastic) { process.become_elastic(); }
    if (!place.folder.empty()) { process.meeting_point = std::make_shared<JobStore>(place.folder); }
    return process;
}
