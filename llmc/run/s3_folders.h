// S3Folders: values in named folders, in a bucket (s3.h): what the sync log of an elastic run lies in. The
// value of a name is the object PREFIX/ROOT/FOLDER/NAME, each part written as file names are (value_file.h).
// A bucket answers with the newest value that it has confirmed.
//
// Requests cost money: a listing brings names and ETags, and only values that are new since the last listing
// are fetched. Of values that are removed meanwhile, some may still be listed.
#pragma once
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
    // What is read: the value of a name, or all values of a folder.
    struct Read {
        Place place;
        bool is_list;
        bool found = false;
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

    std::optional<std::string> get(const std::string& folder, const std::string& name) {
        S3Answer answer = client.ask({"GET", key({folder, name})});
        return answer.found() ? std::optional<std::string>(std::move(answer.body)) : std::nullopt;
    }

    void put(const std::string& folder, const std::string& name, const std::string& value) {
        note({folder, name}, client.ask({"PUT", key({folder, name}), "", &value}).etag, value);
    }

    // Returns the value that is there afterwards, if asked for.
    std::string put_if_absent(const std::string& folder, const std::string& name, const std::string& value,
                              bool asks_winner) {
        while (true) {
            const bool only_if_absent = true;
            const S3Answer answer = client.ask({"PUT", key({folder, name}), "", &value, only_if_absent});
            if (!answer.is_taken()) { note({folder, name}, answer.etag, value); }
            if (!asks_winner) { return ""; }
            if (!answer.is_taken()) { return value; }
            if (std::optional<std::string> winner = get(folder, name)) { return *winner; }
        }
    }

    void remove(const std::string& folder, const std::string& name) { remove_all({{folder, name}}); }
    void remove_folder(const std::string& folder) { remove_all({{folder, ""}}); }

    Values list(const std::string& folder) {
        std::vector<Read> one = {{{folder, ""}, true}};
        read_all(one);
        return std::move(one[0].listing);
    }

    // The folders with a value in them whose names begin with `text`.
    Values folders(const std::string& text) {
        const size_t last = text.rfind('/') + 1;  // 0: there is only one part
        const std::string part = last < text.size() ? file_name_of(text.substr(last)) : "";
        const std::string begin = (last == 0 ? root : path(text.substr(0, last - 1))) + part;
        Values found;
        for (const Object& object : objects(begin, "", client.ask({"GET", "", client.list_query(begin)}))) {
            if (std::optional<Place> place = place_of(object.key)) { found[place->folder]; }
        }
        return found;
    }

    // At the same time, in no order.
    void read_all(std::vector<Read>& reads) {
        std::vector<S3Request> requests;
        for (const Read& read : reads) {
            const std::string begin = path(read.place.folder);
            requests.push_back(read.is_list ? S3Request{"GET", "", client.list_query(begin, "", "/")}
                                            : S3Request{"GET", key(read.place)});
        }
        std::vector<S3Answer> answers = client.ask_all(requests);
        std::vector<std::pair<Read*, Place>> missing;
        requests.clear();
        for (size_t i = 0; i < reads.size(); i++) {
            Read& read = reads[i];
            if (!read.is_list) {
                read.found = answers[i].found();
                if (read.found) { read.value = std::move(answers[i].body); }
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

    // At the same time, in no order.   places: a name, or without one the folder's values
    void remove_all(const std::vector<Place>& places) {
        std::vector<S3Request> lists, removals;
        std::vector<std::string> begins;
        for (const Place& place : places) {
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

private:
    struct Object {
        std::string key, etag;
    };
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
    std::map<std::string, std::map<std::string, Known>> known;
};
