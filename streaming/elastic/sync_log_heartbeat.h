// Shows that this process is alive, over a connection of its own: a payload may take a minute. Behind each
// beat it asks whether this still is the store that has the run. Like the sync log itself it only says what
// to ask.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "streaming/elastic/log_store.h"
#include "streaming/elastic/sync_log_records.h"

// What it has to show: a copy, so that it need not wait for a sync log that is at work.
struct LogPulse {
    std::string generation, folder;  // empty: nothing yet, or nothing any more
    int worker = 0;
    LogBeat beat;  // without its count

    bool operator==(const LogPulse& other) const {
        return folder == other.folder && worker == other.worker &&
               beat.incarnation == other.beat.incarnation && beat.promise == other.beat.promise &&
               beat.newest == other.beat.newest;
    }
};

class Heartbeat {
public:
    explicit Heartbeat(double interval) : interval(interval) {}

    // A beat that says something new does not wait.
    std::vector<StoreRequest> requests(const LogPulse& pulse, double now) {
        if (pulse.folder.empty() || (now < next && pulse == shown)) { return {}; }
        shown = pulse;
        next = now + interval;
        return {show(pulse.beat), {StoreRequest::get, "run", "generation", ""}};
    }

    // False: the store has lost the run, as SyncLog::check_generation() will see.   answer: the last one
    bool answer(const StoreAnswer& answer) {
        is_heard = !answer.lost && answer.found && answer.value == shown.generation;
        return answer.lost || is_heard;
    }

    // The last beat, of a process that ends and can still say so: it is not waited for any more.
    std::vector<StoreRequest> farewell() {
        LogBeat last = shown.beat;
        last.promise = LogBeat::ends;
        return is_heard ? std::vector<StoreRequest>{show(last)} : std::vector<StoreRequest>();
    }

    // Seconds until there is something to ask for, if the pulse stays as it is.
    double rest(double now) const { return std::clamp(next - now, 0.001, interval); }

private:
    StoreRequest show(LogBeat beat) {
        beat.count = ++count;
        return {StoreRequest::put, shown.folder, std::to_string(shown.worker), beat.text()};
    }

    double interval, next = 0;
    LogPulse shown;
    bool is_heard = false;  // by the store that has the run
    long count = 0;
};
