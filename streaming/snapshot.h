// DilocoSnapshot: the state of Streaming DiLoCo after step C, for a checkpoint, copied to pinned host memory.
// Training does not pause for it. State that no exchange in flight will change is copied at C. A sync that
// was sent by C and is not applied yet is added when this worker receives it; a resumed run takes its mean
// from the file instead of the wire.
//
//     at C          global, momentum, tokens at the last sends; residuals of fragments that are not in flight
//     at a receive  the mean, unless no worker applies it; the report; then the fragment's residuals
//
// Between C and its receive a fragment is not sent, so its residuals, the sender's and the owner's, are still
// those of C. If no worker applies the sync, they are what they were before the send, and the resumed run
// restores the same. Copies at C run on a stream of their own, for which the main stream waits before the
// next update; copies at a receive run on the main stream. By then a received exchange no longer works on the
// residuals, and the fragment's next exchange waits for the main stream.
//
// The writer's thread waits until the last copy is complete. Memory: 8 bytes per value of the shard, 4 with
// error feedback and 4 / workers for owners, and 4 for each value in flight.
#pragma once
#include <algorithm>
#include <deque>
#include <stdexcept>
#include <string>
#include <vector>

#include "llmc/state.h"
#include "streaming/error_feedback.h"
#include "streaming/outer_state.h"
#include "streaming/sync_report.h"

// The prefix of the i-th sync in flight, in the names of a checkpoint's fields and sections.
inline std::string name_in_flight(size_t i) { return "in_flight." + std::to_string(i) + "."; }

class DilocoSnapshot : public OuterSnapshot {
public:
    // The state and the residuals must outlive the snapshot.
    // largest: values of the shard's largest fragment   in_flight: the most syncs at a time
    DilocoSnapshot(OuterState& state, ErrorFeedback& sender, ErrorFeedback& owner, long largest,
                   int in_flight)
        : state(state), sender(sender), owner(owner), global(add_array("global", state.count())),
          momentum(add_array("momentum", state.count())), residuals(add_array("residuals", sender.count())),
          owner_residuals(add_array("owner_residuals", owner.count())) {
        for (int i = 0; i < in_flight; i++) {
            means.push_back(&add_array(name_in_flight(size_t(i)) + "mean", largest));
        }
    }

    // Starts the copies. The previous snapshot must have been written or abandoned.
    void begin(const std::deque<Sync>& in_flight, const std::vector<uint64_t>& tokens_at_send,
               Stream& copies) {
        if (in_flight.size() > means.size()) { throw std::logic_error("more syncs than expected"); }
        OuterSnapshot::begin(in_flight.size());
        syncs.assign(in_flight.begin(), in_flight.end());
        for (Array* mean : means) { mean->count = 0; }
        fields.set("fragments", long(tokens_at_send.size()));
        fields.set("in_flight", long(syncs.size()));
        state.save(global.values, momentum.values, 0, state.count(), copies);
        for (int p = 0; p < int(tokens_at_send.size()); p++) {
            fields.set("tokens_at_send." + std::to_string(p), tokens_at_send[size_t(p)]);
            const bool flies = std::any_of(syncs.begin(), syncs.end(),
                                           [p](const Sync& sync) { return sync.fragment == p; });
            if (!flies) { save_residuals(p, copies); }
        }
        end_copies(copies);
    }

    // Called for every sync that is received; those that were not in flight at C are ignored.
    // mean: of an applied sync; must stay until main has passed this call
    void deliver(const SyncReport& report, const float* mean, Stream& main) {
        for (size_t i = 0; i < syncs.size() && is_awaited(); i++) {
            const Sync& sync = syncs[i];
            if (sync.number != report.sync) { continue; }
            if (report.applied()) {
                means[i]->count = sync.values;
                device::copy_to_host_later(means[i]->values.data(), mean, sync.values, main);
            }
            save_residuals(sync.fragment, main);
            const std::string prefix = name_in_flight(i);
            fields.set(prefix + "sync", sync.number);
            fields.set(prefix + "fragment", sync.fragment);
            fields.set(prefix + "send_step", sync.send_step);
            fields.set(prefix + "values", sync.values);
            add_report(fields, prefix, report);
            end_arrival(main);
        }
    }

private:
    void save_residuals(int fragment, Stream& stream) {
        sender.save(fragment, residuals.values, stream);
        owner.save(fragment, owner_residuals.values, stream);
    }

    OuterState& state;
    ErrorFeedback &sender, &owner;
    Array &global, &momentum, &residuals, &owner_residuals;
    std::vector<Array*> means;  // of the syncs below
    std::vector<Sync> syncs;    // that were in flight at C
};

// A sync that was in flight when a checkpoint was taken, as a resumed run receives it.
struct SavedSync {
    Sync sync;
    SyncReport report;
    HostBuffer<float> mean;  // (sync.values), once it was read; empty if no worker applies it
};

// The syncs in flight, in the order of sending, without their means.
inline std::vector<SavedSync> saved_syncs(const Fields& fields, long fragments, int workers) {
    std::vector<SavedSync> saved;
    const long count = fields.count_up_to(fragments, "in_flight");
    for (long i = 0; i < count; i++) {
        const std::string prefix = name_in_flight(size_t(i));
        const int p = int(fields.count_up_to(fragments - 1, prefix + "fragment"));
        const Sync sync{fields.integer(prefix + "sync"), p, fields.integer(prefix + "send_step"),
                        fields.integer(prefix + "values")};
        saved.push_back({sync, report_of(fields, prefix, sync, workers), {}});
    }
    return saved;
}

inline std::vector<uint64_t> saved_tokens(const Fields& fields, size_t fragments) {
    if (fields.integer("fragments") != long(fragments)) {
        throw UserError(format("the checkpoint has %ld fragments, but this run has %zu: resume with the "
                               "options that the run had", fields.integer("fragments"), fragments));
    }
    std::vector<uint64_t> tokens;
    for (size_t p = 0; p < fragments; p++) {
        tokens.push_back(fields.count("tokens_at_send." + std::to_string(p)));
    }
    return tokens;
}

// Reads the means of the syncs in flight. Throws a UserError for syncs that the schedule of this run does not
// have; one sent H - 1 or more steps ago cannot be in flight, as tau < H.
// values: of this process's shard of each fragment
inline void read_means(std::vector<SavedSync>& saved, const SavedState& state,
                       const std::vector<Fragment>& fragments, const std::vector<long>& values, long H) {
    const long step = state.step();
    for (size_t i = 0; i < saved.size(); i++) {
        const Sync& sync = saved[i].sync;
        const Fragment& fragment = fragments[size_t(sync.fragment)];
        const bool fits = sync.values == values[size_t(sync.fragment)] && sync.send_step <= step &&
                          sync.send_step > step - (H - 1) && is_sent(fragment, sync.send_step, H) &&
                          sync.number == sync_number(fragments, sync.fragment, sync.send_step, H) &&
                          (i == 0 || sync.number > saved[i - 1].sync.number);
        if (!fits) {
            throw UserError(format("%s has fragment %d, of %ld values, in flight as sync %ld since step %ld, "
                                   "but this run does not: resume with the options that the run had",
                                   state.path().c_str(), sync.fragment, sync.values, sync.number,
                                   sync.send_step));
        }
        if (!saved[i].report.applied()) { continue; }
        saved[i].mean = HostBuffer<float>(sync.values);
        state.read(name_in_flight(i) + "mean", saved[i].mean.data(), size_t(sync.values) * sizeof(float));
    }
}
