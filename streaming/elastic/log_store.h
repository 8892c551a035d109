// LogStore: where a sync log lies (README.md: keys). A value lies under a folder and a name in it. There are
// three kinds: in Redis (log_store_redis.h), a folder (log_store_folders.h) and a bucket (log_store_s3.h).
#pragma once
#include <map>
#include <string>
#include <vector>

// A request may be repeated after its answer was lost: doing it twice does no harm.
struct StoreRequest {
    // put and put_if_absent answer with the value that is there afterwards. remove without a name removes the
    // whole folder. list: names and values in a folder. folders: the folders whose names begin with `folder`.
    enum Kind { get, put, put_if_absent, remove, list, folders };
    Kind kind;
    std::string folder, name = "", value = "";
    bool asks_winner = true;  // put_if_absent; false: no other value can be there, and the answer has none
};

struct StoreAnswer {
    bool lost = false;                           // the request may have been done or not
    bool is_full = false;                        // lost because the store has no room; removals make some
    std::string trouble;                         // why it was lost, for people
    bool found = false;                          // get
    std::string value;                           // get, put, put_if_absent
    std::map<std::string, std::string> listing;  // list: by name; folders: names alone
};

inline StoreAnswer lost_answer(const std::string& trouble, bool is_full) {
    return {true, is_full, trouble, false, "", {}};
}

// What Redis (a folder is a hash: HGET, HSET, HSETNX, HDEL and UNLINK, HGETALL, SCAN) and a shared folder
// (open, rename, link, unlink, readdir) can both do. Calls block: a thread of its own makes them.
class LogStore {
public:
    virtual ~LogStore() = default;
    virtual StoreAnswer perform(const StoreRequest& request) = 0;
    // In this order; requests of others may come in between. A request is done only if all before it are.
    // They may go out together. After the first answer that is lost the others count for nothing.
    virtual std::vector<StoreAnswer> perform_all(const std::vector<StoreRequest>& requests) {
        std::vector<StoreAnswer> answers;
        for (const StoreRequest& request : requests) {
            const bool is_lost = !answers.empty() && answers.back().lost;
            answers.push_back(is_lost ? answers.back() : perform(request));
        }
        return answers;
    }
    // About settings that endanger the run, as they were when the store was opened.
    virtual std::string warning() const { return ""; }
};
