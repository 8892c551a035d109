// LogStore: where a sync log is stored (its keys: streaming/elastic/README.md). A value has a name in a
// folder. There are three kinds of store: Redis (streaming/elastic/log_store_redis.h), a directory
// (log_store_file.h) and a bucket (log_store_s3.h).
#pragma once
#include <algorithm>
#include <chrono>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "llmc/clock.h"

// A request may be repeated after its answer was lost: all of them are idempotent.
struct StoreRequest {
    // put and put_if_absent answer with the value that is there afterwards. remove without a name removes the
    // whole folder. list: names and values in a folder. folders: the folders whose names begin with `folder`.
    // In the next two, `folder` is the run's log and `name` a sync (README.md).
    // decide: writes the entry if it is absent and all workers at work have lines with the same hash. value:
    // "HASH ASKER MIN_WORKERS;required workers;dead workers". A store may do nothing instead.
    // decision: reads the entry, and perhaps the first chunks of payloads that it counts, except the caller's
    // own (`value`: the caller's start, README.md).
    enum Kind { get, put, put_if_absent, remove, list, folders, decide, decision };
    Kind kind;
    std::string folder, name = "", value = "";
    bool asks_winner = true;  // put_if_absent; false: no other value can be there, and the answer has none
};

struct StoreAnswer {
    bool lost = false;                           // the request may or may not have been done
    bool is_full = false;                        // lost because the store is full; removing values makes room
    std::string trouble;                         // why it was lost, for people
    bool found = false;                          // get, decision
    std::string value;                           // get, put, put_if_absent, decision
    std::map<std::string, std::string> listing;  // list; folders: names alone; decision: first chunks
};

inline StoreAnswer lost_answer(const std::string& trouble, bool is_full) {
    return {true, is_full, trouble, false, "", {}};
}

// Pauses between the requests of a poll. After the first request they grow from the shortest one. Where
// requests cost money (shorter > 0), the pause before the first request adapts to how late answers have been,
// so that few requests are made.
struct Pauses {
    double shortest = 0.002, longest = 0.1;  // seconds
    double longer = 1.2, shorter = 0;        // factors
    double first = 0, pause = 0;
    long unanswered = 0;  // requests since the last answer
    double after(bool is_answered) {
        const double factor = is_answered || shorter == 0 ? shorter : longer;
        if (unanswered == 0) { first = std::clamp(first * factor, shortest, longest); }
        if (is_answered) { return begin_again(); }
        pause = ++unanswered == 1 ? shortest : std::min(pause * longer, longest);
        return pause;
    }
    // Also called when polling is given up.
    double begin_again() {
        unanswered = 0;
        return pause = first;
    }
};
inline constexpr Pauses pauses_of_bucket{0.025, 1, 3, 0.7};  // each request costs money

// What Redis (a folder is a hash: HGET, HSET, HSETNX, HDEL and UNLINK, HGETALL, SCAN), a shared folder (open,
// rename, link, unlink, readdir) and a bucket (GET, PUT, DELETE) can all do. Calls block: each store is used
// by a thread of its own.
class LogStore {
public:
    virtual ~LogStore() = default;
    // A store overrides at least one of these two; each default calls the other.
    virtual StoreAnswer perform(const StoreRequest& request) { return perform_all({request}).front(); }
    // Performs requests in order where their order matters; other processes' requests may come in between. A
    // request is performed only if all earlier ones on which it depends were. They may be sent together.
    // After the first lost answer the later ones are meaningless.
    virtual std::vector<StoreAnswer> perform_all(const std::vector<StoreRequest>& requests) {
        std::vector<StoreAnswer> answers;
        for (const StoreRequest& request : requests) {
            const bool is_lost = !answers.empty() && answers.back().lost;
            answers.push_back(is_lost ? answers.back() : perform(request));
        }
        return answers;
    }
    // Repeats perform_all() until it finds anything besides the generation, or `seconds` have passed.
    virtual std::vector<StoreAnswer> await(const std::vector<StoreRequest>& requests, double seconds) {
        const double until = now_seconds() + seconds;
        for (double pause = pauses.pause;;) {
            std::this_thread::sleep_for(std::chrono::duration<double>(std::min(pause, seconds)));
            const double from = now_seconds();
            std::vector<StoreAnswer> answers = perform_all(requests);
            bool is_over = false;
            for (size_t i = 0; i < requests.size(); i++) {
                is_over |= answers[i].lost || (answers[i].found && requests[i].folder != "run");
            }
            pause = pauses.after(is_over);
            if (is_over) { return answers; }
            if (from >= until) {
                pauses.begin_again();
                return answers;
            }
        }
    }
    // A warning about settings that endanger the run, as found when the store was opened; else "".
    virtual std::string warning() const { return ""; }

protected:
    Pauses pauses;  // of await()
};
