// S3LogStore: the sync log in a bucket (llmc/run/s3_folders.h), as objects PREFIX/log/RUN/FOLDER/NAME.
//
// Each request is a round trip. Those whose order does not matter travel together: reads, a write with the
// reads of single values after it, and removals.
#pragma once
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "llmc/clock.h"
#include "llmc/run/s3_folders.h"
#include "streaming/elastic/log_store.h"

class S3LogStore : public LogStore {
public:
    // UserError if the bucket cannot be used.
    S3LogStore(const std::string& url, const std::string& root, double timeout) : folders(url, root, timeout) {
        pauses = pauses_of_bucket;
    }

    std::vector<StoreAnswer> perform_all(const std::vector<StoreRequest>& requests) override {
        std::vector<StoreAnswer> answers;
        while (answers.size() < requests.size()) {
            const auto first = requests.begin() + long(answers.size());
            auto end = first + 1;
            while (end < requests.end() && may_go_with(*first, *end)) { end++; }
            const double from = now_seconds();
            try {
                perform_together({first, end}, answers);
                // The generation was asked for beside the rest, which may have taken several attempts.
                const bool is_old = end[-1].folder == "run" && now_seconds() > from + 1 && end > first + 1;
                if (is_old) {
                    answers.pop_back();
                    perform_together({end - 1, end}, answers);
                }
            } catch (const std::exception& error) {
                answers.resize(requests.size(), lost_answer(error.what(), S3Folders::is_full(error)));
            }
        }
        return answers;
    }

private:
    using Access = S3Folders::Access;
    using Kind = StoreRequest::Kind;

    static bool is_read(Kind kind) {
        return kind == Kind::get || kind == Kind::list || kind == Kind::folders || kind == Kind::decision;
    }

    // Which snapshots are wanted must be newer than the rest.
    static bool may_go_with(const StoreRequest& first, const StoreRequest& next) {
        const std::string want = "/want", &folder = next.folder;
        const bool is_last = next.kind == Kind::list && folder.size() > want.size() &&
                             folder.substr(folder.size() - want.size()) == want;
        if (first.kind == Kind::remove) { return next.kind == Kind::remove; }
        if (first.kind == Kind::decide || is_last) { return false; }
        return is_read(first.kind) ? is_read(next.kind) : next.kind == Kind::get || next.kind == Kind::decision;
    }

    // Throws what S3Folders throws; then it has added no answers.
    void perform_together(const std::vector<StoreRequest>& group, std::vector<StoreAnswer>& answers) {
        std::vector<Access> accesses;
        for (const StoreRequest& one : group) {
            const std::string entry = one.kind == Kind::decision ? "/entry" : "";
            accesses.push_back({kind_of(one), {one.folder + entry, one.name}, &one.value});
        }
        if (group[0].kind != Kind::decide) { folders.access_all(accesses); }  // workers decide
        std::vector<StoreAnswer> found(group.size());
        for (size_t i = 0; i < group.size(); i++) {
            const bool is_put = group[i].kind == Kind::put || group[i].kind == Kind::put_if_absent;
            found[i].found = accesses[i].found && !is_put;
            found[i].value = std::move(accesses[i].value);
            if (is_put && group[i].asks_winner) { found[i].value = group[i].value; }
            found[i].listing = std::move(accesses[i].listing);
            if (!is_put || !accesses[i].found || !group[i].asks_winner) { continue; }
            std::vector<Access> winner = {{Access::get, accesses[i].place}};
            folders.access_all(winner);
            if (!winner[0].found) { throw RunError("the value that was there is gone"); }
            found[i].value = std::move(winner[0].value);
        }
        for (StoreAnswer& one : found) { answers.push_back(std::move(one)); }
    }

    static Access::Kind kind_of(const StoreRequest& one) {
        switch (one.kind) {
            case Kind::list: return Access::list;
            case Kind::folders: return Access::folders;
            case Kind::put: return Access::put;
            case Kind::put_if_absent: return Access::put_if_absent;
            case Kind::remove: return Access::remove;
            default: return Access::get;
        }
    }

    S3Folders folders;
};
