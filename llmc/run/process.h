// Process: this process's place in its run, and what the processes settle with each other before and after
// training. An elastic worker (which knows the others through the sync log alone) is a run of one worker.
//     meet()                all are there and alive; keys of older runs in the same store are told apart
//     check_fingerprint()   all were given the same options
//     inner_group(), outer_group()   its peers: the ranks of this worker; the owners of this shard
//     leave()               no process ends while another still waits for it
// All of it goes through the store, under keys that start with the run's id (meeting.h). The run's name is
// the one that the user gave, and an elastic worker's RUN/worker W.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "llmc/run/cause.h"
#include "llmc/comm.h"
#include "llmc/error.h"
#include "llmc/run/meeting.h"
#include "llmc/run/store.h"
#include "llmc/run/stores.h"

struct Process {
    int worker = 0, rank = 0;    // this process
    int local_rank = 0;          // and among the processes on this machine
    int workers = 1, ranks = 1;  // M and R of the run
    int first_worker = 0;        // the number of its first worker: of an elastic one, its own
    bool gives_way = false;      // a later start of the same processes takes their place
    int restart = 0;             // how many times the launcher has restarted this worker
    bool waits_for_store = false;  // at the start, if the store is away
    bool terminal = false;       // its output goes to a terminal, be it through the launcher
    double timeout = 600;        // seconds to wait for others
    std::string interface;       // of the network between workers; empty: the one that leads to the store
    std::string run_name = "diloco";
    std::string store_url;                 // where processes meet; needed if there are several
    std::string job_folder;                // where they meet instead, if not empty
    std::shared_ptr<Store> meeting_point;  // that store; meet() opens it if it is null
    std::string run_id;                    // set by meet(), as are the next two
    std::shared_ptr<PrefixStore> store;    // the keys of this run
    std::unique_ptr<PlaceKeeper> keeper;
    std::unique_ptr<std::atomic<bool>> is_leaving = std::make_unique<std::atomic<bool>>(false);

    // Makes it a process of a run that consists of its worker alone.
    void become_elastic() {
        run_name += format("/worker %d", worker);
        first_worker = worker;
        workers = 1;
        gives_way = true;  // the earlier processes learn of it from the sync log
    }

    // Its number among all processes of the run.
    int index() const { return (worker - first_worker) * ranks + rank; }
    int size() const { return workers * ranks; }
    static std::string name(int worker, int rank) { return format("worker %d rank %d", worker, rank); }
    std::string name() const { return name(worker, rank); }
    std::string member(int i) const { return name(first_worker + i / ranks, i % ranks); }

    // Returns when all processes of the run are there. TemporaryFailure when some are missing after
    // `timeout`, UserError when two claim the same place.
    void meet() {
        const bool uses_url = gives_way || (!meeting_point && job_folder.empty() && size() > 1);
        if (waits_for_store && uses_url) { wait_for_store(store_url, timeout, rank == 0); }
        if (!meeting_point && !job_folder.empty()) { meeting_point = open_job_store(job_folder); }
        if (!meeting_point && size() > 1) { meeting_point = open_store(store_url, timeout); }
        if (!meeting_point) { meeting_point = std::make_shared<MemoryStore>(); }
        std::vector<std::string> names;
        for (int i = 0; i < size(); i++) { names.push_back(member(i)); }
        auto meeting = std::make_unique<Meeting>(meeting_point, run_name, names, index(), timeout, rank == 0);
        run_id = meeting->meet();
        store = std::make_shared<PrefixStore>(meeting_point, run_id + "/");
        if (size() > 1) { keeper = std::make_unique<PlaceKeeper>(std::move(meeting), !gives_way); }
    }

    // Compares all (option, value) pairs with process 0's. If any differ, all processes throw the same
    // UserError.
    void check_fingerprint(const std::vector<std::pair<std::string, std::string>>& options) {
        std::string packed;
        for (const auto& option : options) { packed += option.first + '\0' + option.second + '\0'; }
        store->set("fingerprint/" + std::to_string(index()), packed);
        if (index() == 0) {
            std::string verdict;
            for (int i = 1; i < size(); i++) {
                const std::string theirs = await("fingerprint/" + std::to_string(i), i);
                verdict += differences(options, unpack_options(theirs), i);
            }
            store->set("fingerprint/verdict", verdict.empty() ? "" : verdict.substr(strlen("; ")));
        }
        const std::string verdict = await("fingerprint/verdict", 0);
        if (!verdict.empty()) { throw UserError(verdict + ": give all processes the same"); }
    }

    // The values that all processes give for `key`, in the order of the processes' numbers.
    std::vector<std::string> gather(const std::string& key, const std::string& value) {
        store->set(key + "/" + std::to_string(index()), value);
        std::vector<std::string> values;
        for (int i = 0; i < size(); i++) { values.push_back(await(key + "/" + std::to_string(i), i)); }
        return values;
    }

    // The largest value among the processes that meet. Collective; every process gives its own value.
    long largest(const std::string& key, long value) {
        long largest = value;
        for (const std::string& text : gather(key, std::to_string(value))) {
            largest = std::max(largest, atol(text.c_str()));
        }
        return largest;
    }

    // Runs `check` on all processes. If it throws a UserError or TemporaryFailure on one of them, all throw
    // that same error, before any of them has written anything.
    void check_together(const std::string& key, const std::function<void()>& check) {
        if (size() == 1) { return check(); }
        std::string mistake;  // "2 ...": a mistake; "75 ...": a failure that may pass
        try {
            check();
        } catch (const UserError& error) { mistake = format("%d ", exit_status(error)) + error.what(); }
        for (const std::string& text : gather(key, mistake)) {
            if (text.rfind("75 ", 0) == 0) { throw TemporaryFailure(text.substr(3)); }
            if (!text.empty()) { throw UserError(text.substr(2)); }
        }
    }

    // Does `set`, which calls setenv(). That is not safe beside getenv() in another thread, and the thread
    // that keeps the place may call getenv() when it connects to the store again: so it pauses. There must be
    // no other threads yet.
    void change_environment(const std::function<void()>& set) { keeper ? keeper->pause(set) : set(); }

    // The ranks of this worker.
    CommGroup inner_group() const {
        std::vector<std::string> members;
        for (int r = 0; r < ranks; r++) { members.push_back(name(worker, r)); }
        return {*store, "inner/" + std::to_string(worker), rank, ranks, "", timeout, members};
    }

    // The owners of this process's shard, one of each worker.
    CommGroup outer_group() const {
        std::vector<std::string> members;
        for (int w = 0; w < workers; w++) { members.push_back(name(w, rank)); }
        return {*store, "outer/" + std::to_string(rank), worker, workers, interface, timeout, members};
    }

    // Returns when all processes have come here: then none needs another's connections any more, and the
    // run's keys are removed. CommError if one has failed instead, RunError if the store has.
    void leave() {
        try {
            store->set("left/" + std::to_string(index()), "");
            if (index() == 0) {
                for (int i = 1; i < size(); i++) { await("left/" + std::to_string(i), i); }
                store->set("all left", "");
            }
            await("all left", 0, 2);  // process 0 may still be writing the last model
        } catch (const CommError&) {
            throw;
        } catch (const RunError& error) { throw RunError(error.what(), retry_status); }
        remove_keys();
        keeper.reset();
    }

    // Ends this process with its one line on stderr and the error's exit_status(). To be called
    // where an error is caught while communicators still exist: their threads may be waiting for a process
    // that is alive, and destructors would wait with them. A failure of this process's own is written down
    // for the others to report. Of several threads that find an error, the first one's counts.
    [[noreturn]] void leave_with(const std::exception& error) const {
        while (is_leaving->exchange(true)) { std::this_thread::sleep_for(std::chrono::hours(1)); }
        const bool is_others_failure = dynamic_cast<const CommError*>(&error);
        if (store && size() > 1 && !is_others_failure) {
            record_cause(*store, {name(), "has stopped: " + message_of(error)});
        }
        fflush(stdout);
        fprintf(stderr, "error: %s\n", message_of(error).c_str());
        fflush(stderr);
        // A launcher blames the process that it sees end first: let the one that failed do so.
        if (is_others_failure) { std::this_thread::sleep_for(std::chrono::milliseconds(200)); }
        _exit(exit_status(error));
    }

private:
    using OptionList = std::vector<std::pair<std::string, std::string>>;

    // Waits for the value that process `from` sets. RunError if the run has failed meanwhile, or after
    // `limits` times the time limit.
    std::string await(const std::string& key, int from, int limits = 1) {
        // Process 0 may itself wait for another process, which it then names: wait for it a little longer.
        Patience patience(limits * timeout + (from == 0 ? 5 : 0));
        while (true) {
            // In this order, since a value that was set before the failure counts.
            const bool failed = store->try_get("cause").has_value();
            if (std::optional<std::string> value = store->try_get(key)) { return *value; }
            if (failed || patience.is_over()) {
                const std::string silent = format("has been silent for %g s (%s--timeout)", limits * timeout,
                                                  limits == 2 ? "twice " : "");
                const Cause cause = record_cause(*store, {member(from), silent});
                throw CommError(-1, cause.text());
            }
            patience.pause();
        }
    }

    // Each process removes the keys that it has set, process 0 last: the others wait for its "all left". The
    // run is complete: if the store fails now, or a process does not remove its keys within 5 s, that is no
    // failure.
    void remove_keys() {
        try {
            Patience patience(std::min(timeout, 5.0));
            for (int i = 1; index() == 0 && i < size(); i++) {
                const std::string key = "left/" + std::to_string(i);
                while (store->try_get(key) && !patience.is_over()) { patience.pause(); }
            }
            store->remove_own();
            if (keeper) { keeper->leave(run_id); }
        } catch (const RunError&) {}
    }

    // Options and their values, each ended by a zero byte. What another program wrote may be cut short.
    static OptionList unpack_options(const std::string& packed) {
        OptionList options;
        std::istringstream words(packed);
        for (std::string name, value; std::getline(words, name, '\0') && std::getline(words, value, '\0');) {
            if (!words.eof()) { options.emplace_back(name, value); }
        }
        return options;
    }

    // "; worker 1 has --inner-steps 50, worker 0 has 100" for each option that differs.
    std::string differences(const OptionList& ours, const OptionList& theirs, int them) const {
        auto speaker = [&](int i) { return ranks == 1 ? format("worker %d", i) : member(i); };
        auto shown = [](const std::string& value) { return value.empty() ? "none" : value; };
        std::string text;
        auto add = [&](int one, const OptionList& options, int other, const OptionList& others) {
            for (const auto& option : options) {
                const auto found = std::find_if(others.begin(), others.end(), [&](const auto& entry) {
                    return entry.first == option.first;
                });
                if (found != others.end() && (one == 0 || found->second == option.second)) { continue; }
                text += "; " + speaker(one) + " has " + option.first + " " + shown(option.second) + ", " +
                        (found == others.end() ? "which " + speaker(other) + " does not use"
                                               : speaker(other) + " has " + shown(found->second));
            }
        };
        add(them, theirs, 0, ours);
        add(0, ours, them, theirs);  // only what they do not use: the rest is said
        return text;
    }
};
