// The sync log's records as text, and the schedule by sync number. README.md lists the keys under which
// records lie in the store (llmc/run/log_store.h). Small values are text, so that a user may look at a run
// with redis-cli, or cat.
#pragma once
#include <xxhash.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "streaming/schedule.h"

// -----------------------------------------------------------------------------------------------------------
// The schedule by sync number

// Any P syncs in a row hold every fragment once.
class SyncSchedule {
public:
    SyncSchedule(const std::vector<Fragment>& fragments, long H) : H(H), places(fragments.size()) {
        for (int p = 0; p < int(fragments.size()); p++) { order.push_back({first_send(fragments[p], H), p}); }
        std::sort(order.begin(), order.end());
        for (size_t i = 0; i < order.size(); i++) { places[size_t(order[i].second)] = long(i); }
    }
    int fragments() const { return int(order.size()); }
    int fragment(long sync) const { return order[size_t(sync) % order.size()].second; }
    long index(long sync) const { return sync / fragments(); }  // among those of its fragment
    long sync(int fragment, long index) const { return index * fragments() + places[size_t(fragment)]; }
    // Of the fragment's first sync from number `sync` on.
    long index_from(int fragment, long sync) const {
        return (sync - places[size_t(fragment)] + fragments() - 1) / fragments();
    }
    long send_step(long sync) const { return order[size_t(sync) % order.size()].first + index(sync) * H; }
    // The first sync that is sent after `step`. Its number is also how many syncs are sent up to `step`.
    long first_after(long step) const {
        long sync = 0;
        for (const auto& [first, p] : order) { sync += (step - first + H) / H; }
        return sync;
    }

private:
    long H;
    std::vector<std::pair<long, int>> order;  // first send step and fragment
    std::vector<long> places;                 // of each fragment in it
};

// -----------------------------------------------------------------------------------------------------------
// Records

// The rows of run/fingerprint, "NAME VALUE" each, in any order. Two options of earlier versions are gone:
// rows that leave them unused are dropped, so that a run that such a version began is continued.
inline std::set<std::string> rows_of_options(const std::string& text) {
    std::set<std::string> rows;
    int workers = 0, merged_from = 0;  // syncs of so many workers were merged; 0: none
    std::istringstream in(text);
    for (std::string row; std::getline(in, row); rows.insert(row)) {
        sscanf(row.c_str(), "--workers %d", &workers);
        sscanf(row.c_str(), "--outer-exchange (merged from) %d", &merged_from);
    }
    const auto is_unused = [&](const std::string& row) {
        if (row.rfind("--outer-exchange (merged from) ", 0) != 0) { return row == "--fragment-offsets "; }
        return merged_from == 0 || merged_from > workers;
    };
    for (auto row = rows.begin(); row != rows.end();) {
        row = is_unused(*row) ? rows.erase(row) : std::next(row);
    }
    return rows;
}

// A worker's start, "w.i".
struct Incarnation {
    int worker = -1, number = 0;

    std::string text() const { return std::to_string(worker) + "." + std::to_string(number); }
    static Incarnation parse(const std::string& text) {
        Incarnation one;
        char dot;
        std::istringstream(text) >> one.worker >> dot >> one.number;
        return one;
    }
    bool operator==(const Incarnation& one) const { return worker == one.worker && number == one.number; }
    friend std::ostream& operator<<(std::ostream& out, const Incarnation& one) { return out << one.text(); }
    friend std::istream& operator>>(std::istream& in, Incarnation& one) {
        if (std::string text; in >> text) { one = parse(text); }
        return in;
    }
};

// The values with a space between any two.
template <class First, class... Rest>
std::string words(const First& first, const Rest&... rest) {
    std::ostringstream out;
    out << first;
    ((out << ' ' << rest), ...);
    return out.str();
}

inline std::string numbers(const std::vector<long>& values) {
    std::string text;
    for (long value : values) { text += (text.empty() ? "" : " ") + std::to_string(value); }
    return text;
}

inline std::vector<long> parse_numbers(const std::string& text) {
    std::vector<long> values;
    std::istringstream in(text);
    for (long value; in >> value;) { values.push_back(value); }
    return values;
}

inline uint64_t digest_of(const std::string& bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

inline size_t chunks_of(size_t bytes, size_t chunk) { return (bytes + chunk - 1) / chunk; }

// Of payloads and snapshots, "w.i.c".
inline std::string chunk_name(const Incarnation& who, size_t chunk) {
    return who.text() + "." + std::to_string(chunk);
}

// A line, in sent/s. A line that closes another worker's place has LogEntry's `waited` in `bytes` and, in
// `digest`, whether that worker is missing.
struct LogLine {
    uint64_t hash = 0;    // of the fragment's global parameters at the sender
    uint64_t tokens = 0;  // trained on since its last send that counted; 0: abstains
    size_t bytes = 0;     // of the payload
    uint64_t digest = 0;  // of the payload

    std::string text() const { return words(hash, tokens, bytes, digest); }
    static LogLine parse(const std::string& text) {
        LogLine line;
        std::istringstream(text) >> line.hash >> line.tokens >> line.bytes >> line.digest;
        return line;
    }
};

using LogLines = std::map<std::string, LogLine>;  // by incarnation

struct Contributor {
    Incarnation who;
    size_t bytes = 0;
    uint64_t digest = 0;
    uint64_t tokens = 0;
};

struct LogEntry {
    uint64_t hash = 0;  // of the fragment's global parameters at all contributors
    Incarnation decider;
    std::vector<Contributor> contributors;  // ascending, at most one start of each worker
    std::vector<int> abstained;             // also workers with another hash
    // For people: workers that were alive, not catching up, and had no line; and for how many milliseconds
    // the sync had been due at the decider.
    std::vector<int> missing;
    long waited = 0;

    bool counts(int worker) const {
        return std::any_of(contributors.begin(), contributors.end(),
                           [worker](const Contributor& one) { return one.who.worker == worker; });
    }
    bool knows(int worker) const {
        return counts(worker) || std::find(abstained.begin(), abstained.end(), worker) != abstained.end();
    }
    std::string text() const {
        std::string text = words(hash, decider, contributors.size());
        for (const Contributor& one : contributors) {
            text += " " + words(one.who, one.bytes, one.digest, one.tokens);
        }
        for (const std::vector<int>* workers : {&abstained, &missing}) {
            text += " " + std::to_string(workers->size());
            for (int worker : *workers) { text += " " + std::to_string(worker); }
        }
        return text + " " + std::to_string(waited);
    }
    static LogEntry parse(const std::string& text) {
        LogEntry entry;
        size_t count = 0;
        std::istringstream in(text);
        in >> entry.hash >> entry.decider >> count;
        for (Contributor one; count > 0 && in >> one.who >> one.bytes >> one.digest >> one.tokens; count--) {
            entry.contributors.push_back(one);
        }
        for (std::vector<int>* workers : {&entry.abstained, &entry.missing}) {
            count = 0;
            in >> count;
            for (int worker; count > 0 && in >> worker; count--) { workers->push_back(worker); }
        }
        in >> entry.waited;
        return entry;
    }
};

// A worker is alive while its count changes, by the clock of the worker that looks: no clocks are compared.
// It is waited for from the sync on that it promises, until it breaks the promise.
struct LogBeat {
    static constexpr long catches_up = -1, needs_snapshot = -2, ends = -3;
    static constexpr long nothing = std::numeric_limits<long>::max();  // it has not shown that it keeps pace

    int incarnation = 0;
    long count = 0;
    long promise = catches_up;  // the first sync that it will be in time for
    long newest = -1;           // the newest sync that it has sent, or applied after a restart or a snapshot

    std::string text() const { return format("%d %ld %ld %ld", incarnation, count, promise, newest); }
    static LogBeat parse(const std::string& text) {
        LogBeat beat;
        sscanf(text.c_str(), "%d %ld %ld %ld", &beat.incarnation, &beat.count, &beat.promise, &beat.newest);
        return beat;
    }
};

// A worker's position in the log: of each fragment, how many syncs are applied, and the hash after them.
struct LogBase {
    std::vector<long> positions;
    std::vector<uint64_t> hashes;

    long sum() const { return std::accumulate(positions.begin(), positions.end(), 0L); }
    bool operator==(const LogBase& other) const { return text() == other.text(); }
    std::string text() const {
        std::ostringstream out;
        for (size_t p = 0; p < positions.size(); p++) { out << positions[p] << ' ' << hashes[p] << ' '; }
        return out.str();
    }
    static LogBase parse(const std::string& text) {
        LogBase base;
        std::istringstream in(text);
        uint64_t hash;
        for (long position; in >> position >> hash;) {
            base.positions.push_back(position);
            base.hashes.push_back(hash);
        }
        return base;
    }
};

// What the log begins with, and the members: all that were there. The run's first sync waits for them.
struct LogBeginning {
    LogBase base;
    std::vector<Incarnation> members;  // a start of each worker

    std::string text() const {
        std::string text = base.text() + ";";
        for (const Incarnation& one : members) { text += " " + one.text(); }
        return text;
    }
    static LogBeginning parse(const std::string& text) {
        const size_t end = std::min(text.find(';'), text.size());
        LogBeginning beginning{LogBase::parse(text.substr(0, end)), {}};
        std::istringstream in(text.substr(std::min(end + 1, text.size())));
        for (Incarnation who; in >> who;) { beginning.members.push_back(who); }
        return beginning;
    }
};

// Of a snapshot.
struct LogOffer {
    Incarnation giver;
    size_t bytes = 0;
    uint64_t digest = 0;

    std::string text() const { return words(giver, bytes, digest); }
    static LogOffer parse(const std::string& text) {
        LogOffer offer;
        std::istringstream(text) >> offer.giver >> offer.bytes >> offer.digest;
        return offer;
    }
};
