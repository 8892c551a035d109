// Meeting: how the processes of one run find each other in a store. NAME is the run's name; its id is fresh
// each time its processes meet.
//     NAME/join/I     the nonce of process I: random, new for each process
//     NAME/roster     process 0: the run's id and all nonces
//     ID/met/I        process I, when it finds its own nonce in the roster
//     ID/go           process 0, when all have answered
// So no run starts with the nonce of a process that died long ago. Two processes that claim one place
// overwrite each other's nonce:
//     NAME/refused/NONCE   the process that finds another nonce in its place, to the other one
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/run/store.h"

class Meeting {
public:
    // names: of all processes   index: this one's   loud: says on stderr which processes it waits for
    Meeting(std::shared_ptr<Store> store, const std::string& run_name, std::vector<std::string> names,
            int index, double timeout, bool loud)
        : everything(std::move(store)), store(everything, run_name + "/"), names(std::move(names)),
          index(index), timeout(timeout), loud(loud) {}

    // Returns the run's id. UserError if two processes claim one place; TemporaryFailure if processes are
    // missing, or the store is away, after the time limit, or if an earlier start of the run still trains.
    std::string meet() {
        for (bool has_claimed = false;;) {
            std::vector<std::string> missing;
            try {
                if (!has_claimed) { claim_place(); }
                has_claimed = true;
                missing = index == 0 ? gather() : answer();
                if (missing.empty()) { return id; }
            } catch (const RunError& error) {  // the store may come back
                if (patience.is_over()) { throw TemporaryFailure(error.what()); }
                missing = {std::string("the store (") + error.what() + ")"};
            }
            wait_for(missing);
        }
    }

    // Tells a process that has claimed this one's place since the last call that the place is taken. Returns
    // whether there was one.   trains: this process has met the others
    bool refuse_rival(bool trains = false) {
        std::optional<std::string> holder = store.try_get(join_key(index));
        if (!holder) { claim_place(); }  // a process that was refused has withdrawn its claim
        if (!holder || *holder == nonce || *holder == last_rival) { return false; }
        store.set("refused/" + *holder, trains ? still_runs : claim(index));
        last_rival = *holder;
        return true;
    }

    // Removes the keys of the meeting, for the next run of this name.
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

    static constexpr const char* still_runs =
        "an earlier start of this run still trains: wait until it ends, or give this run another --run-name";

    std::string claim(int i) const {
        return "two processes claim " + names[size_t(i)] +
               ": start each worker once, or give this run another --run-name";
    }

    [[noreturn]] static void fail(const std::string& why) {
        if (why == still_runs) { throw TemporaryFailure(why); }
        throw UserError(why);
    }

    // Process 0: publishes a new id for each new set of nonces, until all processes of one set have answered.
    // Returns those that are missing.
    std::vector<std::string> gather() {
        const std::vector<std::string> joined = read_joined();
        refuse_claims(joined);
        std::vector<std::string> missing = names_where([&](int i) { return joined[size_t(i)].empty(); });
        if (!missing.empty()) { return missing; }
        if (joined != nonces) {
            id = random_hex(8);
            publish(id, joined);
            nonces = joined;
        }
        missing = names_where(
            [&](int i) { return i != 0 && !everything->try_get(id + "/met/" + std::to_string(i)); });
        if (missing.empty()) { everything->set(id + "/go", ""); }
        return missing;
    }

    // The others: answer each roster that holds their nonce, until process 0 says go. Returns process 0 until
    // then.
    std::vector<std::string> answer() {
        if (refuse_rival()) { fail(claim(index)); }
        if (const auto why = store.try_get("refused/" + nonce)) {
            // Lets process 0, if it is there, see the refusal, which the next run must not see.
            for (Patience sight(2); !sight.is_over() && !is_refused_by_roster();) { sight.pause(); }
            forget_claim(index, nonce);
            fail(*why);
        }
        const std::string roster = store.try_get("roster").value_or("");
        if (roster.find("\n" + nonce + "\n") == std::string::npos) { return {names[0]}; }
        const std::string found = roster.substr(0, roster.find('\n'));
        if (found[0] == '!') { fail(found.substr(1)); }
        if (found != id) {
            everything->set(found + "/met/" + std::to_string(index), "");
            id = found;
        }
        if (everything->try_get(id + "/go")) { return {}; }
        return {names[0]};
    }

    void publish(const std::string& id, const std::vector<std::string>& nonces) {
        std::string roster = id + "\n";
        for (const std::string& n : nonces) { roster += n + "\n"; }
        store.set("roster", roster);
    }

    // If two live processes claim one place: tells all processes that have joined, and throws.
    void refuse_claims(const std::vector<std::string>& joined) {
        for (int i = 0; i < int(names.size()); i++) {
            const bool is_own = i == 0 && refuse_rival();  // then the rival does not know it yet
            const auto refusal = is_own ? claim(i) : store.try_get("refused/" + joined[size_t(i)]);
            if (!refusal) { continue; }
            publish("!" + *refusal, joined);
            if (!is_own) { forget_claim(i, joined[size_t(i)]); }
            fail(*refusal);
        }
    }

    // Removes a refused claim, which the next run would take for a live one.
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
            throw TemporaryFailure(
                format("%s did not join at %s within %g s: start all workers with the same --store, "
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
    std::string id, last_rival;
    std::vector<std::string> nonces;  // of process 0: those that belong to id
    Patience patience{timeout};
    double next_notice = 5;
};

// Keeps this process's place while it trains: a process that claims it later is told so, and leaves.
class PlaceKeeper {
public:
    // refuses: whether later claims are refused. Otherwise they succeed.
    PlaceKeeper(std::unique_ptr<Meeting> meeting, bool refuses) : meeting(std::move(meeting)) {
        if (refuses) { thread = std::thread([this] { run(); }); }
    }
    ~PlaceKeeper() { stop(); }

    // Does `work` while the thread that keeps the place pauses.
    void pause(const std::function<void()>& work) {
        std::lock_guard<std::mutex> lock(mutex);
        work();
    }

    // Gives up the place, and removes the keys of the meeting.
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
                meeting->refuse_rival(true);
            } catch (...) {}  // the store is down: training does not need it, and the next look may succeed
        }
    }

    std::unique_ptr<Meeting> meeting;
    std::mutex mutex;
    std::condition_variable changed;
    bool closing = false;
    std::thread thread;
};
