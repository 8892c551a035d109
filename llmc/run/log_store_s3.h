// S3LogStore: the sync log of an elastic run in a bucket (s3.h). The value of a name is the object
// PREFIX/log/RUN/FOLDER/NAME, each part written as file names are (value_file.h). A bucket answers with the
// newest value that it has confirmed.
//
// Each request is a round trip. Those whose order does not matter travel together: reads, a write with the
// reads of single values after it, removals, and lines that lose their payloads. A listing brings names, whose
// values are then fetched.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/run/log_store.h"
#include "llmc/run/s3.h"
#include "llmc/run/value_file.h"

class S3LogStore : public LogStore {
public:
    // UserError if the bucket cannot be used.
    S3LogStore(const std::string& url, std::string root, double silence)
        : client(url, silence), root(std::move(root)) {
        pauses = pauses_of_bucket;
        client.check();
    }

    std::vector<StoreAnswer> perform_all(const std::vector<StoreRequest>& requests) override {
        std::vector<StoreAnswer> answers;
        while (answers.size() < requests.size()) {
            const auto first = requests.begin() + long(answers.size());
            auto end = first + 1;
            while (end < requests.end() && may_go_with(*first, *end)) { end++; }
            try {
                perform_together({first, end}, answers);
            } catch (const std::exception& error) {
                const bool is_full = dynamic_cast<const S3Full*>(&error) != nullptr;
                answers.resize(requests.size(), lost_answer(error.what(), is_full));
            }
        }
        return answers;
    }

private:
    using Kind = StoreRequest::Kind;
    struct Place {
        std::string folder, name;
    };

    static bool is_of_lines(const StoreRequest& one) { return one.folder.find("/sent/") != std::string::npos; }

    // A list of wanted snapshots must be read after the requests before it, not beside them.
    static bool may_go_with(const StoreRequest& first, const StoreRequest& next) {
        const std::string want = "/want", &folder = next.folder;
        const bool is_last = next.kind == Kind::list && folder.size() > want.size() &&
                             folder.substr(folder.size() - want.size()) == want;
        if (first.kind == Kind::remove) { return next.kind == Kind::remove; }
        if (is_last) { return false; }
        const bool is_line = first.kind == Kind::put_if_absent && next.kind == first.kind;
        if (is_line && next.folder == first.folder) { return true; }  // of one sync
        const bool are_lines = is_of_lines(first) && is_of_lines(next);
        if (first.kind == Kind::put && next.kind == Kind::put && are_lines) { return true; }  // without payloads
        const bool is_write = first.kind == Kind::put || first.kind == Kind::put_if_absent;
        const bool is_list = next.kind == Kind::list || next.kind == Kind::folders;
        return next.kind == Kind::get || (is_list && !is_write);
    }

    // Sends the group in parallel. Reads beside a large write are delayed so that they arrive with it: of two
    // workers that do so, the later one then finds the other's value. Adds no answers if it throws.
    void perform_together(const std::vector<StoreRequest>& group, std::vector<StoreAnswer>& all) {
        std::vector<StoreAnswer> found(group.size());
        std::vector<S3Request> requests;
        std::vector<std::pair<size_t, Place>> listed;  // and by which request
        for (const StoreRequest& one : group) { requests.push_back(request_of(one)); }
        const bool is_large = requests.size() > 1 && requests[0].body && requests[0].body->size() >= small;
        double& lead = leads[is_large ? size_t(std::ilogb(requests[0].body->size())) : 0];
        for (size_t i = 1; is_large && i < requests.size(); i++) { requests[i].after = lead; }
        std::vector<S3Answer> answers = client.ask_all(requests);
        if (is_large) {  // one slow write must not delay the next reads by as much
            const double took = answers[0].seconds - answers[1].seconds;
            lead = std::clamp(took + 0.01, 0.01, 2 * lead + 0.25);
        }
        requests.clear();
        for (size_t i = 0; i < answers.size(); i++) {
            const Place place{group[i].folder, group[i].name};
            switch (group[i].kind) {
                case Kind::folders:
                case Kind::list:
                case Kind::remove:
                    if (!place.name.empty()) { break; }
                    for (const Place& there : places_in(group[i], std::move(answers[i]))) {
                        if (group[i].kind != Kind::folders) { listed.emplace_back(i, there); }
                        if (group[i].kind == Kind::folders) { found[i].listing[there.folder]; }
                    }
                    break;
                case Kind::get:
                    found[i].found = answers[i].found();
                    if (found[i].found) { found[i].value = std::move(answers[i].body); }
                    break;
                default:
                    if (group[i].asks_winner) {
                        found[i].value = answers[i].is_taken() ? winner(place) : group[i].value;
                    }
            }
        }
        for (const auto& [of, place] : listed) {
            requests.push_back({group[of].kind == Kind::remove ? "DELETE" : "GET", key(place)});
        }
        answers = client.ask_all(requests);
        for (size_t i = 0; i < listed.size(); i++) {
            const auto& [of, place] = listed[i];
            if (answers[i].found()) { found[of].listing[place.name] = std::move(answers[i].body); }
        }
        for (StoreAnswer& one : found) { all.push_back(std::move(one)); }
    }

    // The value that another process was the first to put there.
    std::string winner(const Place& place) {
        S3Answer answer = client.ask({"GET", key(place)});
        if (!answer.found()) { throw RunError("the value that was there is gone"); }
        return std::move(answer.body);
    }

    S3Request request_of(const StoreRequest& one) const {
        if (one.kind == Kind::remove && !one.name.empty()) { return {"DELETE", key({one.folder, one.name})}; }
        switch (one.kind) {
            case Kind::list:
            case Kind::remove:
            case Kind::folders: return {"GET", "", client.list_query(begin_of(one), "", delimiter_of(one))};
            case Kind::get: return {"GET", key({one.folder, one.name})};
            case Kind::put:
            case Kind::put_if_absent: break;
            default: throw std::logic_error("a bucket has no scripts");
        }
        return {"PUT", key({one.folder, one.name}), "", &one.value, one.kind == Kind::put_if_absent};
    }

    // The prefix of the keys to list: a folder's values, or all below folders whose names begin like this.
    std::string begin_of(const StoreRequest& one) const {
        if (one.kind != Kind::folders) { return path(one.folder); }
        const size_t last = one.folder.rfind('/') + 1;  // 0: there is only one part
        const std::string part = last < one.folder.size() ? file_name_of(one.folder.substr(last)) : "";
        return (last == 0 ? root + "/" : path(one.folder.substr(0, last - 1))) + part;
    }
    static std::string delimiter_of(const StoreRequest& one) { return one.kind == Kind::folders ? "" : "/"; }

    std::string path(const std::string& folder) const { return paths_to(root, folder).back() + "/"; }
    std::string key(const Place& place) const { return path(place.folder) + file_name_of(place.name); }

    // None: no value of ours has that key.
    std::optional<Place> place_of(const std::string& key) const {
        Place place;
        std::vector<std::string> parts;
        for (size_t begin = root.size() + 1, end = 0; end != std::string::npos; begin = end + 1) {
            end = key.find('/', begin);
            const std::optional<std::string> part = key_of_file_name(key.substr(begin, end - begin));
            if (!part) { return std::nullopt; }
            parts.push_back(*part);
        }
        if (parts.size() < 2) { return std::nullopt; }
        for (size_t i = 0; i + 1 < parts.size(); i++) { place.folder += (i > 0 ? "/" : "") + parts[i]; }
        place.name = parts.back();
        return place;
    }

    // All places in a listing whose first page is `page`.
    std::vector<Place> places_in(const StoreRequest& one, S3Answer page) {
        std::vector<Place> found;
        const std::string begin = client.prefix() + begin_of(one);
        while (page.found()) {
            std::string next;
            for (auto& [path, text] : texts_of_xml(page.body)) {
                if (path == "ListBucketResult/NextContinuationToken") { next = std::move(text); }
                if (path != "ListBucketResult/Contents/Key") { continue; }
                if (text.compare(0, begin.size(), begin) != 0) {
                    throw RunError(client.where() + " lists a key that was not asked for");
                }
                const std::optional<Place> place = place_of(text.substr(client.prefix().size()));
                if (place && (one.kind == Kind::folders || place->folder == one.folder)) {
                    found.push_back(*place);
                }
            }
            if (next.empty()) { break; }
            page = client.ask({"GET", "", client.list_query(begin_of(one), next, delimiter_of(one))});
        }
        return found;
    }

    static constexpr size_t small = 4096;  // bytes

    S3Client client;
    const std::string root;
    // By how many seconds a large write (2^i to 2^(i+1) bytes) takes longer to the store than a read.
    std::array<double, 64> leads{};
};
