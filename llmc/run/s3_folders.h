// S3Folders: values in named folders, in a bucket (s3.h): what the sync log of an elastic run lies in. The
// value of a name is the object PREFIX/ROOT/FOLDER/NAME, each part written as file names are (value_file.h).
// A bucket answers with the newest value that it has confirmed.
//
// Requests cost money: a listing brings names and ETags, and only values that are new since the last listing
// are fetched. Of values that are removed meanwhile, some may still be listed.
#pragma once
#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/run/s3.h"
#include "llmc/run/value_file.h"

class S3Folders {
public:
    using Values = std::map<std::string, std::string>;
    struct Place {
        std::string folder, name;
    };
    // What is read: the value of a name, all values of a folder, or the folders whose names begin so. Or the
    // value that is written.
    struct Access {
        enum Kind { get, list, folders, put, put_if_absent, remove };
        Kind kind;
        Place place;  // remove: a name, or without one the folder's values
        const std::string* value_to_put = nullptr;
        bool found = false;  // put_if_absent: another value is there
        std::string value = "";
        Values listing = {};
    };

    // root: with a '/' at its end. UserError if the bucket cannot be used.
    S3Folders(const std::string& url, std::string root, double silence)
        : client(url, silence), root(std::move(root)) {
        client.check();
    }

    static bool is_full(const std::exception& error) {
        return dynamic_cast<const S3Full*>(&error) != nullptr;
    }

    // At the same time, in no order. What is read beside a large value arrives when that does, so that of two
    // workers that write and read so, the later one finds the other's value.
    void access_all(std::vector<Access>& accesses) {
        if (accesses[0].kind == Access::remove) { return remove_all(accesses); }
        std::vector<S3Request> requests;
        for (const Access& one : accesses) { requests.push_back(request_of(one)); }
        const bool is_large = requests.size() > 1 && requests[0].body && requests[0].body->size() >= small;
        for (size_t i = 1; is_large && i < requests.size(); i++) { requests[i].after = lead; }
        std::vector<S3Answer> answers = client.ask_all(requests);
        if (is_large) { lead = std::max(0.0, answers[0].seconds - answers[1].seconds) + 0.01; }
        std::vector<std::pair<Access*, Place>> missing;
        requests.clear();
        for (size_t i = 0; i < accesses.size(); i++) {
            Access& read = accesses[i];
            if (read.kind == Access::folders) {
                for (const Object& object : objects(begin_of(read.place.folder), "", std::move(answers[i]))) {
                    if (std::optional<Place> place = place_of(object.key)) { read.listing[place->folder]; }
                }
                continue;
            }
            if (read.kind != Access::list) {
                const bool is_get = read.kind == Access::get;
                read.found = is_get ? answers[i].found() : answers[i].is_taken();
                if (is_get && read.found) { read.value = std::move(answers[i].body); }
                if (!is_get && !read.found) { note(read.place, answers[i].etag, *read.value_to_put); }
                continue;
            }
            std::map<std::string, Known> there;
            for (const Object& object : objects(path(read.place.folder), "/", std::move(answers[i]))) {
                const std::optional<Place> place = place_of(object.key);
                if (!place || place->folder != read.place.folder) { continue; }
                const Known& last = known[place->folder][place->name];
                if (last.etag == object.etag && !object.etag.empty()) {
                    read.listing[place->name] = last.value;
                    there[place->name] = last;
                } else {
                    missing.emplace_back(&read, *place);
                    requests.push_back({"GET", key(*place)});
                }
            }
            known[read.place.folder] = std::move(there);
        }
        answers = client.ask_all(requests);
        for (size_t i = 0; i < missing.size(); i++) {
            const auto& [read, place] = missing[i];
            if (!answers[i].found()) { continue; }  // it has been removed meanwhile
            note(place, answers[i].etag, answers[i].body);
            read->listing[place.name] = std::move(answers[i].body);
        }
    }

private:
    struct Object {
        std::string key, etag;
    };

    void remove_all(const std::vector<Access>& accesses) {
        std::vector<S3Request> lists, removals;
        std::vector<std::string> begins;
        for (const Access& access : accesses) {
            const Place& place = access.place;
            if (!place.name.empty()) {
                removals.push_back({"DELETE", key(place)});
                continue;
            }
            begins.push_back(path(place.folder));
            lists.push_back({"GET", "", client.list_query(begins.back(), "", "/")});
        }
        std::vector<S3Answer> answers = client.ask_all(lists);
        for (size_t i = 0; i < answers.size(); i++) {
            for (const Object& object : objects(begins[i], "/", std::move(answers[i]))) {
                removals.push_back({"DELETE", object.key});
            }
        }
        client.ask_all(removals);
    }

    S3Request request_of(const Access& access) const {
        const Place& place = access.place;
        switch (access.kind) {
            case Access::list: return {"GET", "", client.list_query(path(place.folder), "", "/")};
            case Access::folders: return {"GET", "", client.list_query(begin_of(place.folder))};
            case Access::get: return {"GET", key(place)};
            default: break;
        }
        return {"PUT", key(place), "", access.value_to_put, access.kind == Access::put_if_absent};
    }

    std::string begin_of(const std::string& text) const {
        const size_t last = text.rfind('/') + 1;  // 0: there is only one part
        const std::string part = last < text.size() ? file_name_of(text.substr(last)) : "";
        return (last == 0 ? root : path(text.substr(0, last - 1))) + part;
    }

    // A value as it was last read.
    struct Known {
        std::string etag, value;
    };

    void note(const Place& place, const std::string& etag, const std::string& value) {
        if (known.size() > most_known) { known.clear(); }
        if (value.size() < small) { known[place.folder][place.name] = {etag, value}; }
    }

    std::string path(const std::string& folder) const {
        std::string path = root;
        for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
            end = folder.find('/', begin);
            path += file_name_of(folder.substr(begin, end - begin)) + "/";
        }
        return path;
    }
    std::string key(const Place& place) const { return path(place.folder) + file_name_of(place.name); }

    // None: no value of ours has that key.
    std::optional<Place> place_of(const std::string& key) const {
        Place place;
        std::vector<std::string> parts;
        for (size_t begin = root.size(), end = 0; end != std::string::npos; begin = end + 1) {
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

    // All that a listing holds, whose first page is `page`.
    std::vector<Object> objects(const std::string& begin, const std::string& delimiter, S3Answer page) {
        std::vector<Object> found;
        while (page.found()) {
            std::string next;
            for (auto& [path, text] : texts_of_xml(page.body)) {
                if (path == "ListBucketResult/Contents/Key") {
                    const std::string& prefix = client.prefix();
                    if (text.compare(0, prefix.size() + begin.size(), prefix + begin) != 0) {
                        throw RunError(client.where() + " lists a key that was not asked for");
                    }
                    found.push_back({text.substr(prefix.size()), ""});
                } else if (path == "ListBucketResult/Contents/ETag" && !found.empty()) {
                    found.back().etag = std::move(text);
                } else if (path == "ListBucketResult/NextContinuationToken") {
                    next = std::move(text);
                }
            }
            if (next.empty()) { break; }
            page = client.ask({"GET", "", client.list_query(begin, next, delimiter)});
        }
        return found;
    }

    static constexpr size_t small = 4096, most_known = 64;  // bytes; folders

    S3Client client;
    const std::string root;
    double lead = 0;  // seconds by which a large value's way is longer than a question's
    std::map<std::string, std::map<std::string, Known>> known;
};
