// Process: this process among all of its run, and what these settle with each other around the training. An
// elastic worker (which knows the others through the sync log alone) is a run of one worker.
//     meet()                all are there and alive; keys of older runs in the same store are told apart
//     check_fingerprint()   all were given the same options
//     inner_group(), outer_group()   its peers: the ranks of this worker; the owners of this shard
//     leave()               no process ends while another still waits for it
// All of it goes through the store. Keys of a run start with its run id, fresh each time processes meet (NAME
// is the run's name, of an elastic worker RUN/worker W):
//     NAME/join/I     the nonce of process I: random, new for each process
//     NAME/roster     run id and all nonces, from process 0; one that finds its nonce there answers with
//     ID/met/I        and only when all have, process 0 sets
//     ID/go           so nobody starts with the nonce of a process that is long dead
#pragma once
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "llmc/run/cause.h"
#include "llmc/comm.h"
#include "llmc/error.h"
#include "llmc/run/store.h"
#include "llmc/run/stores.h"

// -----------------------------------------------------------------------------------------------------------
// Meeting

// How processes of one name find each other in a store, once.
class Meeting {
public:
    // `names`: of all processes; `index`: this one's. `loud`: says on stderr whom it waits for.
    Meeting(std::shared_ptr<Store> store, const std::string& run_name, std::vector<std::string> names,
            int index, double timeout, bool loud)
        : everything(std::move(store)),
          store(everything, run_name + "/"),
          names(std::move(names)),
          index(index),
          timeout(timeout),
          loud(loud) {}

    // Returns the run id. UserError when processes are missing after the time limit or two claim one place.
    std::string meet() {
        claim_place();
        return index == 0 ? gather() : answer();
    }

    // Looks whether another process has taken this one's place; tells it so and returns true the first time.
    bool is_displaced() {
        std::optional<std::string> holder = store.try_get(join_key(index));
        if (!holder) { claim_place(); }  // one that was refused has taken its claim back
        if (!holder || *holder == nonce || *holder == last_rival) { return false; }
        last_rival = *holder;
        store.set("refused/" + *holder, claim(index));
        return true;
    }

    // Takes back what the next processes of this name need not see.
    void forget(const std::string& id) {
        if (store.try_get(join_key(index)) == nonce) { store.remove(join_key(index)); }
        everything->remove(id + "/met/" + std::to_string(index));
        if (index != 0) { return; }
        everything->remove(id + "/go");
        if (store.try_get("roster").value_or("").rfind(id + "\n", 0) == 0) { store.remove("roster"); }
    }

private:
    void claim_place() { store.set(join_key(index), nonce); }

    static std::string join_key(int i) { return "join/" + std::to_string(i); }

    std::string claim(int i) const {
        return "two processes claim " + names[size_t(i)] +
               ": start each worker once, or give this run another --run-name";
    }

    // Process 0: a new run id for each new set of nonces, until all of one set have answered.
    std::string gather() {
        std::vector<std::string> nonces;
        std::string id;
        while (true) {
            std::vector<std::string> joined = read_joined();
            refuse_claims(joined);
            std::vector<std::string> missing = names_where([&](int i) { return joined[size_t(i)].empty(); });
            if (missing.empty()) {
                if (joined != nonces) {
                    nonces = joined;
                    id = random_hex(8);
                    publish(id, nonces);
                }
                missing = names_where(
                    [&](int i) { return i != 0 && !everything->try_get(id + "/met/" + std::to_string(i)); });
                if (missing.empty()) {
                    everything->set(id + "/go", "");
                    return id;
                }
            }
            wait_for(missing);
        }
    }

    // The others: answer each roster that holds this process's nonce, until process 0 says go.
    std::string answer() {
        std::string id;
        while (true) {
            if (is_displaced()) { throw UserError(claim(index)); }
            if (store.try_get("refused/" + nonce)) {
                // A process 0 that is there shall see it, too; the next one must not.
                for (Patience sight(2); !sight.is_over() && !is_refused_by_roster();) { sight.pause(); }
                forget_claim(index, nonce);
                throw UserError(claim(index));
            }
            const std::string roster = store.try_get("roster").value_or("");
            if (roster.find("\n" + nonce + "\n") != std::string::npos) {
                const std::string found = roster.substr(0, roster.find('\n'));
                if (found[0] == '!') { throw UserError(found.substr(1)); }
                if (found != id) {
                    id = found;
                    everything->set(id + "/met/" + std::to_string(index), "");
                }
                if (everything->try_get(id + "/go")) { return id; }
            }
            wait_for({names[0]});
        }
    }

    void publish(const std::string& id, const std::vector<std::string>& nonces) {
        std::string roster = id + "\n";
        for (const std::string& n : nonces) { roster += n + "\n"; }
        store.set("roster", roster);
    }

    // Two live processes in one place: tells everyone who has joined, and leaves.
    void refuse_claims(const std::vector<std::string>& joined) {
        for (int i = 0; i < int(names.size()); i++) {
            const bool is_own = i == 0 && is_displaced();  // then the other one has yet to see that
            if (is_own || store.try_get("refused/" + joined[size_t(i)])) {
                publish("!" + claim(i), joined);
                if (!is_own) { forget_claim(i, joined[size_t(i)]); }
                throw UserError(claim(i));
            }
        }
    }

    // Takes a refused claim out of the store: the next run would take it for a live one.
    void forget_claim(int i, const std::string& refused) {
        if (store.try_get(join_key(i)) == refused) { store.remove(join_key(i)); }
        store.remove("refused/" + refused);
    }

    bool is_refused_by_roster() {
        const std::string roster = store.try_get("roster").value_or("");
        return roster.rfind("!", 0) == 0 && roster.find("\n" + nonce + "\n") != std::string::npos;
    }

    std::vector<std::string> read_joined() {
        std::vector<std::string> joined;
        for (int i = 0; i < int(names.size()); i++) {
            joined.push_back(store.try_get(join_key(i)).value_or(""));
        }
        return joined;
    }

    template <class Condition>
    std::vector<std::string> names_where(Condition condition) const {
        std::vector<std::string> found;
        for (int i = 0; i < int(names.size()); i++) {
            if (condition(i)) { found.push_back(names[size_t(i)]); }
        }
        return found;
    }

    void wait_for(const std::vector<std::string>& missing) {
        if (patience.is_over()) {
            throw OthersAbsent(
                format("%s did not come to %s within %g s: start all workers with the same --store, "
                       "--run-name, --workers and --ranks, or raise --timeout",
                       list_in_words(missing).c_str(), everything->url().c_str(), timeout));
        }
        if (loud && patience.waited() > next_notice) {
            fprintf(stderr, "waiting for %s (%.0f of %g s)\n", list_in_words(missing).c_str(),
                    patience.waited(), timeout);
            next_notice += 30;
        }
        patience.pause();
    }

    std::shared_ptr<Store> everything;
    PrefixStore store;
    const std::vector<std::string> names;
    const int index;
    const double timeout;
    const bool loud;
    const std::string nonce = random_hex(16);
    std::string last_rival;
    Patience patience{timeout};
    double next_notice = 5;
};

// Keeps this process's place while it trains: one that claims it later is told so, and leaves.
class PlaceKeeper {
public:
    // `refuses`: those that claim it later. Else they get it.
    PlaceKeeper(std::unique_ptr<Meeting> meeting, bool refuses) : meeting(std::move(meeting)) {
        if (refuses) { thread = std::thread([this] { run(); }); }
    }
    ~PlaceKeeper() { stop(); }

    // Does `work` while the thread that keeps the place does nothing.
    void pause(const std::function<void()>& work) {
        std::lock_guard<std::mutex> lock(mutex);
        work();
    }

    // Nobody's place is kept any longer; what the meeting left in the store is removed.
    void leave(const std::string& id) {
        stop();
        meeting->forget(id);
    }

private:
    void stop() {
        if (!thread.joinable()) { return; }
        {
            std::lock_guard<std::mutex> lock(mutex);
            closing = true;
        }
        changed.notify_all();
        thread.join();
    }

    void run() {
        std::unique_lock<std::mutex> lock(mutex);
        while (!changed.wait_for(lock, std::chrono::seconds(1), [&] { return closing; })) {
            try {
                meeting->is_displaced();
            } catch (const RunError&) {
                return;  // the store is gone: training needs it no more, and the next to use it says so
            }
        }
    }

    std::unique_ptr<Meeting> meeting;
    std::mutex mutex;
    std::condition_variable changed;
    bool closing = false;
    std::thread thread;
};

// -----------------------------------------------------------------------------------------------------------
// The process

struct Process {
    int worker = 0, rank = 0;    // this process
    int local_rank = 0;          // and among the processes on this machine
    int workers = 1, ranks = 1;  // M and R of the run
    int first_worker = 0;        // the number of its first worker: of an elastic one, its own
    bool gives_way = false;      // a later start of the same processes takes their place
    int restart = 0;             // how often the launcher has started this worker again
    bool terminal = false;       // what it prints goes to a terminal, if through the process that started it
    double timeout = 600;        // seconds to wait for others
    std::string interface;       // of the network between workers; empty: the one that leads to the store
    std::string run_name = "diloco";
    std::string store_url;                 // where processes meet; needed if the run has more than one
    std::shared_ptr<Store> meeting_point;  // that store; opened by meet(), as soon as it is needed
    std::string run_id;                    // known after meet(), as is
    std::shared_ptr<PrefixStore> store;    // the keys of this run
    std::unique_ptr<PlaceKeeper> keeper;
    std::unique_ptr<std::atomic<bool>> is_leaving = std::make_unique<std::atomic<bool>>(false);

    // Makes it a process of a run that consists of its worker alone.
    void become_elastic() {
        run_name += format("/worker %d", worker);
        first_worker = worker;
        workers = 1;
        gives_way = true;  // the sync log tells the processes that were started before
    }

    // Its number among all processes of the run.
    int index() const { return (worker - first_worker) * ranks + rank; }
    int size() const { return workers * ranks; }
    static std::string name(int worker, int rank) { return format("worker %d rank %d", worker, rank); }
    std::string name() const { return name(worker, rank); }
    std::string member(int i) const { return name(first_worker + i / ranks, i % ranks); }

    // Returns when all processes of the run are there. UserError when some are missing after `timeout`, or
    // when two claim the same place.
    void meet() {
        if (!meeting_point && size() > 1) { meeting_point = open_store(store_url, timeout); }
        if (!meeting_point) { meeting_point = std::make_shared<MemoryStore>(); }
        std::vector<std::string> names;
        for (int i = 0; i < size(); i++) { names.push_back(member(i)); }
        auto meeting =
            std::make_unique<Meeting>(meeting_point, run_name, names, index(), timeout, rank == 0);
        run_id = meeting->meet();
        store = std::make_shared<PrefixStore>(meeting_point, run_id + "/");
        if (size() > 1) { keeper = std::make_unique<PlaceKeeper>(std::move(meeting), !gives_way); }
    }

    // Compares all (option, value) pairs with process 0's. If any differ, all throw the same UserError.
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
        if (!verdict.empty()) { throw UserError(verdict + ": give all the same"); }
    }

    // What each process says of itself under `key`, in the order of their numbers.
    std::vector<std::string> gather(const std::string& key, const std::string& value) {
        store->set(key + "/" + std::to_string(index()), value);
        std::vector<std::string> values;
        for (int i = 0; i < size(); i++) { values.push_back(await(key + "/" + std::to_string(i), i)); }
        return values;
    }

    // Runs `check` on all processes. If it throws a UserError on one of them, all throw that same error,
    // before any of them has written anything.
    void check_together(const std::string& key, const std::function<void()>& check) {
        std::string mistake;
        try {
            check();
        } catch (const UserError& error) { mistake = error.what(); }
        for (const std::string& text : gather(key, mistake)) {
            if (!text.empty()) { throw UserError(text); }
        }
    }

    // Does `set`, which calls setenv(). Not safe beside getenv() in another thread, and a connection to the
    // store that is made anew may call it: so the thread that has one pauses. Others must not be there yet.
    void change_environment(const std::function<void()>& set) {
        if (keeper) {
            keeper->pause(set);
        } else {
            set();
        }
    }

    // The ranks of this worker.
    CommGroup inner_group() const {
        std::vector<std::string> members;
        for (int r = 0; r < ranks; r++) { members.push_back(name(worker, r)); }
        return {*store, "inner/" + std::to_string(worker), rank, ranks, "", timeout, members};
    }

    // The processes that own this one's shard, one of each worker.
    CommGroup outer_group() const {
        std::vector<std::string> members;
        for (int w = 0; w < workers; w++) { members.push_back(name(w, rank)); }
        return {*store, "outer/" + std::to_string(rank), worker, workers, interface, timeout, members};
    }

    // Returns when all processes have come here: from now on none needs another's connections, and the
    // run's keys are removed. RunError where one has failed instead.
    void leave() {
        store->set("left/" + std::to_string(index()), "");
        if (index() == 0) {
            for (int i = 1; i < size(); i++) { await("left/" + std::to_string(i), i); }
            store->set("all left", "");
        }
        await("all left", 0);
        remove_keys();
        keeper.reset();
    }

    // Ends this process with its one line on stderr: status 2 for a UserError, otherwise 1. To be called
    // where an error is caught while communicators still exist: their threads may be waiting for a process
    // that is alive, and destructors would wait with them. A failure of this process's own is written down
    // for the others to report. Of several threads that find an error, the first one's counts.
    [[noreturn]] void leave_with(const std::exception& error) const {
        while (is_leaving->exchange(true)) { std::this_thread::sleep_for(std::chrono::hours(1)); }
        const bool is_others_failure = dynamic_cast<const CommError*>(&error);
        if (store && size() > 1 && !is_others_failure) {
            record_cause(*store, {name(), format("has stopped: %s", error.what())});
        }
        fflush(stdout);
        fprintf(stderr, "error: %s\n", error.what());
        fflush(stderr);
        // A launcher blames the process that it sees end first: let the one that failed do so.
        if (is_others_failure) { std::this_thread::sleep_for(std::chrono::milliseconds(200)); }
        _exit(exit_status(error));
    }

private:
    using OptionList = std::vector<std::pair<std::string, std::string>>;

    // The value that process `from` sets. RunError when the run has failed meanwhile, or after the limit.
    std::string await(const std::string& key, int from) {
        // Process 0 is waited for while it waits for others, and knows better who is missing.
        Patience patience(from == 0 ? timeout + 5 : timeout);
        while (true) {
            // In this order: a value that was set before the failure counts.
            const bool failed = store->try_get("cause").has_value();
            if (std::optional<std::string> value = store->try_get(key)) { return *value; }
            if (failed || patience.is_over()) {
                const std::string silent =
                    format("has been silent for %.0f s (--timeout)", patience.waited());
                const Cause cause = record_cause(*store, {member(from), silent});
                throw CommError(-1, cause.text());
            }
            patience.pause();
        }
    }

    // Each process removes what it has set, process 0 last: the others wait for its "all left". The run is
    // complete: a store that fails now does no harm, and processes that end now are waited for only so long.
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

    // An option and its value, each ended by a zero byte; another program's words may be cut short.
    static OptionList unpack_options(const std::string& packed) {
        OptionList options;
        for (size_t at = 0; at < packed.size();) {
            const size_t middle = packed.find('\0', at);
            const size_t end = middle == std::string::npos ? middle : packed.find('\0', middle + 1);
            if (end == std::string::npos) { break; }
            options.emplace_back(packed.substr(at, middle - at),
                                 packed.substr(middle + 1, end - middle - 1));
            at = end + 1;
        }
        return options;
    }

    // "; worker 1 has --inner-steps 50, worker 0 has 100" for each option that differs.
    std::string differences(const OptionList& ours, const OptionList& theirs, int them) const {
        const std::string who = ranks == 1 ? format("worker %d", them) : member(them);
        const std::string we = ranks == 1 ? "worker 0" : member(0);
        auto find = [](const OptionList& list, const std::string& option) {
            return std::find_if(list.begin(), list.end(),
                                [&](const auto& entry) { return entry.first == option; });
        };
        auto shown = [](const std::string& value) { return value.empty() ? std::string("none") : value; };
        std::string text;
        for (const auto& [option, value] : theirs) {
            const auto own = find(ours, option);
            if (own == ours.end()) {
                text += "; " + who + " has " + option + " " + shown(value) + ", which the program of " + we +
                        " does not know";
            } else if (own->second != value) {
                text += "; " + who + " has " + option + " " + shown(value) + ", " + we + " has " +
                        shown(own->second);
            }
        }
        for (const auto& [option, value] : ours) {
            if (find(theirs, option) == theirs.end()) {
                text += "; " + we + " has " + option + " " + shown(value) + ", which the program of " + who +
                        " does not know";
            }
        }
        return text;
    }
};
