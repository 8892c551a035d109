// The rules that the sync log's safety depends on, one function each. A test breaks them one at a time and
// requires that the simulation finds out.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <string>

#include "llmc/run/log_store.h"
#include "llmc/run/spool.h"
#include "streaming/elastic/sync_log_records.h"

class SyncLogRules {
public:
    virtual ~SyncLogRules() = default;

    // A start takes a number above those of all earlier starts (taken: their tokens, by number). The number
    // is its own if its token lies there, so nothing that an earlier start wrote is ever written again.
    virtual int first_free(const std::map<std::string, std::string>& taken) const {
        int free = 1;
        for (const auto& [number, token] : taken) { free = std::max(free, std::atoi(number.c_str()) + 1); }
        return free;
    }
    virtual bool is_own_start(const std::string& there, const std::string& token) const {
        return there == token;
    }

    // A worker with other options than the run's has no part in it.
    virtual bool is_same_run(const std::string& fingerprint, const std::string& theirs) const {
        return rows_of_options(fingerprint) == rows_of_options(theirs);
    }

    // A payload is counted only on the global parameters that it was computed from, and only if its sender
    // has trained.
    virtual bool counts(const LogLine& line, uint64_t hash) const {
        return line.hash == hash && line.tokens > 0;
    }

    // The first entry wins. Every worker uses the one that it reads there, the decider included.
    virtual StoreRequest::Kind entry_is_written_by() const { return StoreRequest::put_if_absent; }

    // Over a bucket a worker's first line in a sync stays, and an entry needs a line in each worker's place:
    // its own, or one that closes the place. No line is ever removed, only the payload that follows it.
    virtual StoreRequest::Kind line_is_written_by() const { return StoreRequest::put_if_absent; }
    virtual bool are_all(size_t lines, int workers) const { return int(lines) >= workers; }
    virtual StoreRequest::Kind payload_goes_by() const { return StoreRequest::put; }

    // An entry that no worker of the run can have written is damaged or forged, and nobody acts on it.
    virtual bool is_possible(const LogEntry& entry, int workers, int min_workers) const {
        std::set<int> named;
        const auto is_new = [&](int worker) {
            return 0 <= worker && worker < workers && named.insert(worker).second;
        };
        for (const Contributor& one : entry.contributors) {
            if (!is_new(one.who.worker) || one.bytes == 0 || one.tokens == 0) { return false; }
        }
        return std::all_of(entry.abstained.begin(), entry.abstained.end(), is_new) &&
               int(named.size()) >= min_workers;
    }

    // Is `name` that of a start of one of the run's workers?
    virtual bool is_start(const Incarnation& who, const std::string& name, int workers) const {
        return who.text() == name && 0 <= who.worker && who.worker < workers && who.number > 0;
    }

    // A worker need not read what it sent itself, but an earlier start of it may have sent something else.
    virtual bool is_own_payload(const Incarnation& who, const Incarnation& me) const { return who == me; }

    // A worker that ends has applied every sync that any worker can have sent by the last step.
    virtual bool is_of_run(long send_step, long last_step) const { return send_step <= last_step; }

    // The oldest sync of a fragment whose payloads are kept when the fragment's sync `index` is decided. They
    // are needed by a worker that is `retain` syncs behind, and by workers that restart from checkpoints, two
    // of which reach up to `durable`.
    virtual long oldest_kept(long index, long retain, long durable) const {
        return std::min(index - retain, durable);
    }

    // A snapshot is used when all of it is there and is what its giver wrote.
    virtual bool is_chunk(const StoreAnswer& answer) const { return answer.found; }
    virtual bool is_whole(const Spool& snapshot, const LogOffer& offer) const {
        return snapshot.size() == offer.bytes && snapshot.digest() == offer.digest;
    }
};
