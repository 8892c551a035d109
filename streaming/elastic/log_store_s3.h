// S3LogStore: the sync log in a bucket (llmc/run/s3_folders.h), as objects PREFIX/log/RUN/FOLDER/NAME.
//
// Each request is a round trip. Those whose order does not matter travel together: most reads, and removals.
// A worker that waits asks the same question again and again; the pauses in between grow from the time that
// an answer takes to a second.
#pragma once
#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "llmc/clock.h"
#include "llmc/run/s3_folders.h"
#include "streaming/elastic/log_store_folders.h"

class S3LogStore : public FolderLogStore<S3Folders> {
public:
    using FolderLogStore::FolderLogStore;

    std::vector<StoreAnswer> perform_all(const std::vector<StoreRequest>& requests) override {
        pause_before(requests);
        const double from = now_seconds();
        std::vector<StoreAnswer> answers;
        while (answers.size() < requests.size()) {
            const size_t first = answers.size();
            size_t end = first + 1;
            while (end < requests.size() && may_go_with(requests[first], requests[end])) { end++; }
            if (end == first + 1) {
                answers.push_back(perform(requests[first]));
            } else {
                perform_together({requests.begin() + long(first), requests.begin() + long(end)}, answers);
            }
            if (answers.back().lost) { answers.resize(requests.size(), answers.back()); }
        }
        answered_at = now_seconds();
        took = answered_at - from;
        return answers;
    }

private:
    static bool is_read(const StoreRequest& one) {
        return one.kind == StoreRequest::get || one.kind == StoreRequest::list ||
               one.kind == StoreRequest::decision;
    }

    // What the log reads last must be newer than the rest: the generation, and which snapshots are wanted.
    static bool may_go_with(const StoreRequest& first, const StoreRequest& next) {
        const std::string want = "/want", &folder = next.folder;
        const bool is_last = folder == "run" || (folder.size() > want.size() &&
                                                 folder.substr(folder.size() - want.size()) == want);
        const bool removes = first.kind == StoreRequest::remove && next.kind == StoreRequest::remove;
        return removes || (is_read(first) && is_read(next) && !is_last);
    }

    void perform_together(const std::vector<StoreRequest>& group, std::vector<StoreAnswer>& answers) {
        std::vector<S3Folders::Read> reads;
        std::vector<S3Folders::Place> places;
        for (const StoreRequest& one : group) {
            const std::string entry = one.kind == StoreRequest::decision ? "/entry" : "";
            reads.push_back({{one.folder + entry, one.name}, one.kind == StoreRequest::list});
            places.push_back(reads.back().place);
        }
        try {
            is_read(group[0]) ? folders.read_all(reads) : folders.remove_all(places);
        } catch (const std::exception& error) {
            return answers.push_back(lost_answer(error.what(), S3Folders::is_full(error)));
        }
        for (S3Folders::Read& read : reads) {
            answers.push_back({});
            answers.back().found = read.found;
            answers.back().value = std::move(read.value);
            answers.back().listing = std::move(read.listing);
        }
    }

    void pause_before(const std::vector<StoreRequest>& requests) {
        std::string question;
        for (const StoreRequest& one : requests) {
            if (one.folder == "run") { continue; }  // the generation, which goes with any question
            if (!is_read(one)) {
                question = "";
                break;
            }
            question += one.folder + "\n" + one.name + "\n";
        }
        if (question.empty() && !requests.empty() && is_read(requests.back())) { return; }
        const bool is_repeated = !question.empty() && question == last_question;
        last_question = question;
        pause = !is_repeated ? 0 : std::min(1.0, std::max({1.5 * pause, took, 0.01}));
        const double rest = answered_at + pause - now_seconds();
        if (is_repeated && rest > 0) { std::this_thread::sleep_for(std::chrono::duration<double>(rest)); }
    }

    std::string last_question;
    double pause = 0, took = 0, answered_at = 0;  // seconds
};
