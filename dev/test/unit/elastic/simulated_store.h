// A store in memory for the simulation of the sync log (sync_log_simulation.h). At every request that changes
// a key it checks what must always hold for the keys of a run.
#pragma once
#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "streaming/elastic/sync_log.h"

// A rule of the protocol is broken.
struct Violation : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class SimulatedStore : public LogStore {
public:
    SimulatedStore(const SyncSchedule& schedule, long retain) : schedule(schedule), retain(retain) {}

    bool has_scripts = true;  // like Redis; a folder has none
    size_t places = 0;        // over a bucket: the workers, each of which has one line in a sync

    StoreAnswer perform(const StoreRequest& request) override {
        StoreAnswer answer;
        switch (request.kind) {
            case StoreRequest::get: {
                const auto folder = folders.find(request.folder);
                if (folder == folders.end() || !folder->second.count(request.name)) { break; }
                answer.found = true;
                answer.value = folder->second[request.name];
                break;
            }
            case StoreRequest::decide:
                if (has_scripts) { decide(request); }
                break;
            case StoreRequest::decision:
                answer = perform({StoreRequest::get, request.folder + "/entry", request.name});
                if (has_scripts && answer.found) { answer.listing = first_chunks(request, answer.value); }
                break;
            case StoreRequest::put:
                change(request);
                answer.value = request.value;
                break;
            case StoreRequest::put_if_absent:
                if (parts(request.folder).first == "payload") { check_same_payload(request); }
                if (!folders[request.folder].count(request.name)) { change(request); }
                if (request.asks_winner) { answer.value = folders[request.folder][request.name]; }
                break;
            case StoreRequest::remove:
                remove(request);
                break;
            case StoreRequest::list:
                if (folders.count(request.folder)) { answer.listing = folders[request.folder]; }
                break;
            case StoreRequest::folders:
                for (auto at = folders.lower_bound(request.folder);
                     at != folders.end() && at->first.rfind(request.folder, 0) == 0; ++at) {
                    answer.listing[at->first] = "";
                }
                break;
        }
        return answer;
    }

    void empty() { folders.clear(); }

    // As redis_scripts::decide does.
    void decide(const StoreRequest& request) {
        LogEntry entry;
        std::string who, awaited, dead;
        size_t least = 0;
        std::istringstream in_words(request.value);
        in_words >> entry.hash >> who >> least;
        std::getline(in_words.ignore(), awaited, ';');
        std::getline(in_words, dead);
        entry.decider = Incarnation::parse(who);
        std::map<int, std::pair<Incarnation, LogLine>> has;
        for (const auto& [name, text] : in(request.folder + "/sent/" + request.name)) {
            const LogLine line = LogLine::parse(text);
            const Incarnation sender = Incarnation::parse(name);
            if (line.text() != text || line.hash != entry.hash) { return; }
            if (!has.insert({sender.worker, {sender, line}}).second) { return; }
        }
        const auto is_missing = [&](long worker) { return has.count(int(worker)) == 0; };
        const std::vector<long> needed = parse_numbers(awaited), gone = parse_numbers(dead);
        if (has.size() < least || std::any_of(needed.begin(), needed.end(), is_missing)) { return; }
        for (const auto& [name, text] : in(request.folder + "/beat")) {
            const long worker = std::atol(name.c_str());
            const bool is_dead = std::find(gone.begin(), gone.end(), worker) != gone.end();
            int count, incarnation, promise;
            const bool may_send = sscanf(text.c_str(), "%d %d %1d", &incarnation, &count, &promise) == 3;
            if (may_send && is_missing(worker) && !is_dead) { return; }
        }
        for (const auto& [worker, one] : has) {
            const auto& [sender, line] = one;
            if (line.tokens == 0) {
                entry.abstained.push_back(worker);
            } else {
                entry.contributors.push_back({sender, line.bytes, line.digest, line.tokens});
            }
        }
        perform({StoreRequest::put_if_absent, request.folder + "/entry", request.name, entry.text()});
    }

    std::map<std::string, std::string> first_chunks(const StoreRequest& request, const std::string& entry) {
        std::map<std::string, std::string> chunks;
        const auto payloads = in(request.folder + "/payload/" + request.name);
        for (const Contributor& one : LogEntry::parse(entry).contributors) {
            const auto chunk = payloads.find(chunk_name(one.who, 0));
            if (chunk != payloads.end() && one.who.text() != request.value) { chunks.insert(*chunk); }
        }
        return chunks;
    }

    // Over a bucket: who wrote a line, and what it says.
    static std::pair<Incarnation, LogLine> written(const std::string& text) {
        const size_t space = text.find(' ');
        return {Incarnation::parse(text.substr(0, space)), LogLine::parse(text.substr(space))};
    }
    // The workers that have a line of their own.
    std::set<int> senders(const std::string& folder) {
        std::set<int> workers;
        for (const auto& [name, text] : in(folder)) {
            const int worker = std::atoi(name.c_str());
            if (places == 0 || written(text).first.worker == worker) { workers.insert(worker); }
        }
        return workers;
    }

    // What no worker does: a value is damaged, or forged.
    void forge(const std::string& folder, const std::string& name, const std::string& value) {
        folders[folder][name] = value;
    }

    bool has(const std::string& folder) const { return folders.count(folder) != 0; }
    std::string generation() { return folders.count("run") ? folders["run"]["generation"] : ""; }

    // Whether any worker has ever completed this run.   run: GENERATION/shard
    bool has_ended(const std::string& run) const { return ended.count(run) != 0; }

    // Every entry that was ever written, by its key.
    const std::map<std::string, LogEntry>& entries() const { return decided; }

    std::map<std::string, std::string> in(const std::string& folder) {
        return folders.count(folder) ? folders[folder] : std::map<std::string, std::string>();
    }

private:
    // {what, rest} of "GENERATION/shard/what/rest".
    static std::pair<std::string, std::string> parts(const std::string& folder) {
        const std::string run = run_of(folder);
        if (run == folder) { return {"", ""}; }
        const size_t at = run.size() + 1;
        const size_t slash = folder.find('/', at);
        return {folder.substr(at, slash - at), slash == std::string::npos ? "" : folder.substr(slash + 1)};
    }
    // "GENERATION/shard"
    static std::string run_of(const std::string& folder) {
        const size_t slash = folder.find('/');
        return slash == std::string::npos ? folder : folder.substr(0, folder.find('/', slash + 1));
    }
    bool is_now(const std::string& run) { return run.substr(0, run.find('/')) == generation(); }

    void change(const StoreRequest& request) {
        check_same_payload(request);
        const std::string what = parts(request.folder).first;
        if (what == "sent" && has(request.folder)) { check_line(request); }
        if (what == "entry") { check_entry(request); }
        if (parts(request.folder).first == "durable") { note_claim(request); }
        if (parts(request.folder).first == "done") { ended.insert(run_of(request.folder)); }
        folders[request.folder][request.name] = request.value;
        if (what == "sent" && places > 0) { note_lines(request.folder); }
    }

    // A line stays as it is, but for the payload behind it, which goes when nobody needs it.
    void check_line(const StoreRequest& request) {
        const auto lines = in(request.folder);
        const auto there = lines.find(request.name);
        if (there == lines.end() || !is_now(run_of(request.folder))) { return; }
        const auto line = [](const std::string& text) { return text.substr(0, text.find('\n')); };
        if (line(there->second) != line(request.value)) {
            throw Violation(format("line %s of sync %s is overwritten", request.name.c_str(),
                                   parts(request.folder).second.c_str()));
        }
        if (there->second != request.value) { check_removal(request.folder); }
    }

    // Over a bucket a sync is decided when all lines are there.
    void note_lines(const std::string& folder) {
        const std::string run = run_of(folder), key = run + "/entry/" + parts(folder).second;
        const auto lines = in(folder);
        if (lines.size() < places || !is_now(run)) { return; }
        std::map<uint64_t, size_t> votes;
        for (int worker : senders(folder)) { votes[written(lines.at(std::to_string(worker))).second.hash]++; }
        for (const auto& [hash, count] : votes) {
            if (2 * count <= senders(folder).size()) { continue; }
            LogEntry entry;
            entry.hash = hash;
            for (const auto& [name, text] : lines) {
                const auto [who, line] = written(text);
                if (who.worker != std::atoi(name.c_str())) {
                    entry.waited = std::max(entry.waited, long(line.bytes));
                } else if (line.tokens == 0 || line.hash != hash) {
                    entry.abstained.push_back(who.worker);
                } else {
                    entry.contributors.push_back({who, line.bytes, line.digest, line.tokens});
                }
            }
            decided.insert({key, entry});
        }
    }

    // A payload's name never gets other bytes. Earlier generations are exempt: a start that learned its
    // generation before the store came back empty may reuse a number there, but nobody believes it.
    void check_same_payload(const StoreRequest& request) {
        const std::string what = parts(request.folder).first;
        if (what != "payload" || !is_now(run_of(request.folder))) { return; }
        const uint64_t digest = digest_of(request.value);
        const auto [at, is_new] = payloads.insert({request.folder + "/" + request.name, digest});
        if (!is_new && at->second != digest) {
            throw Violation("two payloads under the name " + request.folder + "/" + request.name);
        }
    }

    void check_entry(const StoreRequest& request) {
        const std::string key = request.folder + "/" + request.name;
        const LogEntry entry = LogEntry::parse(request.value);
        const auto there = folders[request.folder].find(request.name);
        if (there != folders[request.folder].end() && there->second != request.value) {
            throw Violation("entry " + request.name + " is overwritten");
        }
        const std::string run = run_of(request.folder);
        std::set<int> workers;
        // A store that came back empty has lost the lines, and nobody believes a decision in the old run.
        for (const Contributor& one : is_now(run) ? entry.contributors : std::vector<Contributor>()) {
            const auto lines = in(run + "/sent/" + request.name);
            const auto line = lines.find(one.who.text());
            const std::string who = one.who.text() + " is counted in sync " + request.name;
            if (line == lines.end()) { throw Violation(who + " and has not sent"); }
            if (LogLine::parse(line->second).hash != entry.hash) {
                throw Violation(who + " on another hash");
            }
            if (!workers.insert(one.who.worker).second) { throw Violation(who + " twice"); }
        }
        decided.insert({key, entry});
    }

    // Keeps the highest claim, since a claim may be lowered after a sweep has read it and before the removal.
    void note_claim(const StoreRequest& request) {
        std::vector<long>& claim = claims[run_of(request.folder)][request.name];
        std::istringstream in(request.value);
        claim.resize(size_t(schedule.fragments()));
        for (long& position : claim) {
            long claimed = 0;
            in >> claimed;
            position = std::max(position, claimed);
        }
    }

    void remove(const StoreRequest& request) {
        if (!request.name.empty()) {
            const bool is_line = parts(request.folder).first == "sent" && places > 0;
            if (is_line && is_now(run_of(request.folder))) { throw Violation("a line is removed"); }
            const auto folder = folders.find(request.folder);
            if (folder == folders.end()) { return; }
            folder->second.erase(request.name);
            if (folder->second.empty()) { folders.erase(folder); }
            return;
        }
        const std::string what = parts(request.folder).first;
        if (what == "payload" || what == "sent") { check_removal(request.folder); }
        const bool are_lines = what == "sent" && places > 0;
        if (are_lines && is_now(run_of(request.folder))) { throw Violation("lines are removed"); }
        folders.erase(request.folder);
    }

    // Payloads stay for workers up to `retain` syncs behind, and for those with the two newest checkpoints.
    void check_removal(const std::string& folder) {
        const std::string run = run_of(folder);
        const long sync = std::atol(parts(folder).second.c_str());
        const int p = schedule.fragment(sync);
        long newest = -1, durable = 0;  // an index, a sync
        for (const auto& [key, entry] : decided) {
            const size_t slash = key.rfind('/');
            const long other = std::atol(key.c_str() + slash + 1);
            const bool is_one = key.substr(0, slash) == run + "/entry" && schedule.fragment(other) == p;
            if (is_one) { newest = std::max(newest, schedule.index(other)); }
        }
        std::vector<long> reach;
        for (const auto& [worker, positions] : claims[run]) {  // up to the oldest sync that it lacks
            reach.push_back(schedule.sync(0, positions[0]));
            for (int q = 1; q < schedule.fragments(); q++) {
                reach.back() = std::min(reach.back(), schedule.sync(q, positions[size_t(q)]));
            }
        }
        std::sort(reach.rbegin(), reach.rend());
        if (reach.size() > 1) { durable = reach[1]; }
        if (is_now(run) && (schedule.index(sync) >= newest - retain || sync >= durable)) {
            throw Violation("the payloads of sync " + std::to_string(sync) + " are removed too early");
        }
    }

    const SyncSchedule schedule;
    const long retain;
    std::map<std::string, std::map<std::string, std::string>> folders;
    std::map<std::string, uint64_t> payloads;
    std::map<std::string, LogEntry> decided;
    std::set<std::string> ended;
    std::map<std::string, std::map<std::string, std::vector<long>>> claims;  // by run and worker
};
