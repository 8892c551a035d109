// LogStore: where a sync log (sync_log.h) is kept, as sync_log_records.h lays it out. Values lie under a
// folder and a name in it. Two stores do this: log_store_redis.h and log_store_file.h.
#pragma once
#include <map>
#include <string>
#include <vector>

// Each may be asked again after its answer was lost: nothing that is done twice does harm.
struct StoreRequest {
    // put and put_if_absent answer the value that is there then. remove: without a name the whole folder.
    // list: names and values in a folder. folders: those whose names begin with `folder`.
    enum Kind { get, put, put_if_absent, remove, list, folders };
    Kind kind;
    std::string folder, name, value;
    bool asks_winner = true;  // put_if_absent; false: no other value can be there, and none is answered
};

struct StoreAnswer {
    bool lost = false;                           // the connection failed: it may have happened or not
    bool is_full = false;                        // lost: the store has no room for it; removals make some
    std::string trouble;                         // lost: why, a line for people
    bool found = false;                          // get
    std::string value;                           // get, put, put_if_absent
    std::map<std::string, std::string> listing;  // list: by name; folders: names alone
};

// What Redis (a folder is a hash: HGET, HSET, HSETNX, HDEL and UNLINK, HGETALL, SCAN) and a shared folder
// (open, rename, link, unlink, readdir) can both do. Blocks; the sync log is asked for requests and given
// answers, so that it is a thread of its own that waits here, or nothing but a simulation's clock.
class LogStore {
public:
    virtual ~LogStore() = default;
    virtual StoreAnswer perform(const StoreRequest& request) = 0;
    // In this order, and others' requests may come in between: of what is done, all that stands before it is
    // done too. They may go out together. Where an answer is lost, those after it count for nothing.
    virtual std::vector<StoreAnswer> perform_all(const std::vector<StoreRequest>& requests) {
        std::vector<StoreAnswer> answers;
        for (const StoreRequest& request : requests) {
            const bool is_lost = !answers.empty() && answers.back().lost;
            answers.push_back(is_lost ? answers.back() : perform(request));
        }
        return answers;
    }
    // Of settings that endanger the run, when it is opened.
    virtual std::string warning() const { return ""; }
};
