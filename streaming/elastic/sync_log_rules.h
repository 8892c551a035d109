// The rules that the sync log's safety depends on, one function each. A test breaks them one at a time and
// requires that the simulation finds out.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <map>
#include <string>

#include "streaming/elastic/log_store.h"
#include "streaming/elastic/sync_log_records.h"

class SyncLogRules {
public:
    virtual ~SyncLogRules() = default;

    // A start takes a number above those of all earlier starts (tokens, by number), and the number is its own
    // if its token is what lies there: nothing that an earlier start wrote is ever written again.
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

    // The decider must hold the majority's hash: of two halves neither continues.
    virtual bool is_majority(size_t holders, size_t of) const { return 2 * holders > of; }

    // A heartbeat shows who might send; only a line shows who has sent.
    virtual LogLines taken_as_sent(const LogLines& lines, const std::map<std::string, LogBeat>&,
                                   uint64_t) const {
        return lines;
    }

    // The first entry wins ...
    virtual StoreRequest::Kind entry_is_written_by() const { return StoreRequest::put_if_absent; }

    // ... and a worker that proposed another one uses the winner.
    virtual LogEntry decided(const LogEntry&, const LogEntry& winner) const { return winner; }

    // A worker need not read what it sent itself, but an earlier start of it may have sent something else.
    virtual bool is_own_payload(const Incarnation& who, const Incarnation& me) const { return who == me; }

    // A worker that ends has applied every sync that any worker can have sent by the last step.
    virtual bool is_of_run(long send_step, long last_step) const { return send_step <= last_step; }

    // The oldest sync of a fragment whose payloads are kept when its sync number `index` is decided: a worker
    // that is `retain` syncs behind needs them, and so do workers that restart from their checkpoints, two of
    // which reach to `durable`.
    virtual long oldest_kept(long index, long retain, long durable) const {
        return std::min(index - retain, durable);
    }

    // A snapshot is used when all of it is there and is what its giver wrote.
    virtual bool is_chunk(const StoreAnswer& answer) const { return answer.found; }
    virtual bool is_whole(const std::string& bytes, const LogOffer& offer) const {
        return bytes.size() == offer.bytes && digest_of(bytes) == offer.digest;
    }
};
