// The cause: the first failure of a run. When one process dies, others leave, and then seem to have died too.
// So the process that sees the first failure writes it into the store ("cause"), and all report that one.
#pragma once
#include <string>

#include "llmc/run/store.h"

struct Cause {
    std::string process, what;  // "worker 1 rank 0", "has stopped: the disk is full"

    std::string text() const { return process + " " + what; }
};

// Records a failure in the store unless one is already recorded. Returns the recorded one; or `seen`, if the
// store has failed, too.
inline Cause record_cause(Store& store, const Cause& seen) {
    try {
        const std::string first = store.set_if_absent("cause", seen.process + "\n" + seen.what);
        const size_t end = first.find('\n');
        return {first.substr(0, end), first.substr(end + 1)};
    } catch (const RunError&) { return seen; }
}

// The same for a failure seen by a transport that does not say which process failed, so that it may be only a
// consequence: first waits two seconds for a process that knows more to record the cause.
inline Cause find_cause(Store& store, const Cause& seen) {
    try {
        for (Patience patience(2); !patience.is_over() && !store.try_get("cause");) { patience.pause(); }
    } catch (const RunError&) {}  // record_cause() handles it
    return record_cause(store, seen);
}
