// The first failure of a run. One death makes others leave, who then look dead too: so whoever sees the first
// writes it into the store ("cause"), and everyone reports that.
#pragma once
#include <string>

#include "llmc/run/store.h"

struct Cause {
    std::string process, what;  // "worker 1 rank 0", "has stopped: the disk is full"

    std::string text() const { return process + " " + what; }
};

// Writes down that `process` failed, unless someone else is already written down. Returns the record that
// counts. A store that has failed too must not hide the failure: then it is the record given.
inline Cause record_cause(Store& store, const Cause& seen) {
    try {
        const std::string first = store.set_if_absent("cause", seen.process + "\n" + seen.what);
        const size_t end = first.find('\n');
        return {first.substr(0, end), first.substr(end + 1)};
    } catch (const RunError&) {
        return seen;
    }
}

// The same where what was seen may be only a consequence, as of a transport that does not say who failed:
// whoever knows more may be about to write it down, and has two seconds for it.
inline Cause find_cause(Store& store, const Cause& seen) {
    try {
        for (Patience patience(2); !patience.is_over() && !store.try_get("cause");) { patience.pause(); }
    } catch (const RunError&) {}  // record_cause knows what to do
    return record_cause(store, seen);
}
