// DilocoSnapshot: the state of Streaming DiLoCo after step C, for a checkpoint, copied to pinned host memory.
// Training does not pause for it. Whatever no exchange is changing is copied at C. A sync that was sent by C
// and is not applied yet is added when this worker receives it; a resumed run takes its mean from the file
// instead of the wire.
//
//     at C          global, momentum, tokens at the last sends; residuals of fragments that are not in flight
//     at a receive  the mean, unless no worker applies it; the report; then the fragment's residuals
//
// Between C and its receive a fragment is not sent, so its residuals, the sender's and the owner's, are still
// those of C. If no worker applies the sync, they are those of before it, which the resumed run would restore
// as well. All copies run on the main stream: by then a received exchange no longer works on the residuals,
// and the fragment's next exchange starts behind main.
//
// The writer's thread waits until the last copy is complete. Memory: 8 bytes per value of the shard, 4 with
// error feedback and 4 / workers for owners, and 4 for each value in flight.
#pragma once
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
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
    // values: of the shard   largest: values of its largest fragment   in_flight: the most syncs at a time
    DilocoSnapshot(OuterState& state, ErrorFeedback& sender, ErrorFeedback& owner, long values, long largest,
                  int in_flight)
        : state(state), sender(sender), owner(owner), global(values), momentum(values),
          residuals(sender.count()), owner_residuals(owner.count()) {
        for (int i = 0; i < in_flight; i++) { means.emplace_back(largest); }
    }

    // Starts the copies. The previous snapshot must have been written or abandoned.
    void begin(const std::deque<Sync>& in_flight, const std::vector<uint64_t>& tokens_at_send, Stream& main) {
        std::lock_guard<std::mutex> lock(mutex);
        if (is_waiting()) { throw std::logic_error("a snapshot is taken while one is not complete"); }
        if (in_flight.size() > means.size()) { throw std::logic_error("more in flight than was said"); }
        tokens = tokens_at_send;
        syncs.clear();
        for (const Sync& sync : in_flight) { syncs.push_back({sync, {}}); }
        missing = syncs.size();
        abandoned = false;
        state.save(global.data(), momentum.data(), main);
        for (int p = 0; p < int(tokens.size()); p++) {
            const bool flies = std::any_of(syncs.begin(), syncs.end(),
                                           [&](const Awaited& one) { return one.sync.fragment == p; });
            if (!flies) { save_residuals(p, main); }
        }
        main.record(copied);
    }

    // Called for every sync that is received; those that were not in flight at C are ignored.
    // mean: of an applied sync; must stay until main has passed this call
    void deliver(const SyncReport& report, const float* mean, Stream& main) {
        std::lock_guard<std::mutex> lock(mutex);
        if (!is_waiting()) { return; }
        for (size_t i = 0; i < syncs.size(); i++) {
            Awaited& one = syncs[i];
            if (one.sync.number != report.sync) { continue; }
            if (report.applied()) {
                device::copy_to_host_later(means[i].data(), mean, one.sync.values, main);
            }
            save_residuals(one.sync.fragment, main);
            main.record(copied);
            one.report = report;
            one.report.idle_from = one.report.idle_until = Timestamp();  // which the loop reuses
            one.report.mean_square = nullptr;
            missing--;
        }
        changed.notify_all();
    }

    void wait() const override {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return abandoned || missing == 0; });
        if (abandoned) { throw RunError("the run ended before all that was on its way had arrived"); }
        const Event all = copied;
        lock.unlock();
        all.synchronize();
    }

    void abandon() override {
        std::lock_guard<std::mutex> lock(mutex);
        abandoned = missing > 0;
        changed.notify_all();
    }

    std::vector<StateSection> sections() const override {
        std::vector<StateSection> all;
        auto add = [&](const std::string& name, const HostBuffer<float>& values, long count) {
            if (count > 0) { all.push_back({name, values.data(), size_t(count) * sizeof(float)}); }
        };
        add("global", global, global.count());
        add("momentum", momentum, momentum.count());
        add("residuals", residuals, residuals.count());
        add("owner_residuals", owner_residuals, owner_residuals.count());
        for (size_t i = 0; i < syncs.size(); i++) {
            const Awaited& one = syncs[i];
            if (one.report.applied()) { add(name_in_flight(i) + "mean", means[i], one.sync.values); }
        }
        return all;
    }

    void add_fields(Fields& fields) const override {
        fields.set("fragments", long(tokens.size()));
        for (size_t p = 0; p < tokens.size(); p++) {
            fields.set("tokens_at_send." + std::to_string(p), tokens[p]);
        }
        fields.set("in_flight", long(syncs.size()));
        for (size_t i = 0; i < syncs.size(); i++) {
            const Sync& sync = syncs[i].sync;
            fields.set(name_in_flight(i) + "sync", sync.number);
            fields.set(name_in_flight(i) + "fragment", long(sync.fragment));
            fields.set(name_in_flight(i) + "send_step", sync.send_step);
            fields.set(name_in_flight(i) + "values", sync.values);
            add_report(fields, name_in_flight(i), syncs[i].report);
        }
    }

protected:
    // More has been copied on main since begin().
    void record(Stream& main) {
        std::lock_guard<std::mutex> lock(mutex);
        main.record(copied);
    }

private:
    // A sync that was in flight at C.
    struct Awaited {
        Sync sync;
        SyncReport report;  // once it has been received
    };

    bool is_waiting() const { return missing > 0 && !abandoned; }

    void save_residuals(int fragment, Stream& main) {
        sender.save(fragment, residuals.data(), main);
        owner.save(fragment, owner_residuals.data(), main);
    }

    OuterState& state;
    ErrorFeedback &sender, &owner;
    HostBuffer<float> global, momentum;  // (values)
    HostBuffer<float> residuals, owner_residuals;
    std::vector<HostBuffer<float>> means;  // (largest fragment) each, of the syncs below
    std::vector<uint64_t> tokens;          // of each fragment, when it was last sent
    std::vector<Awaited> syncs;
    Event copied;                          // after the last copy so far
    size_t missing = 0;                    // of the syncs
    bool abandoned = false;
    mutable std::mutex mutex;              // of the four above
    mutable std::condition_variable changed;
};

// A sync that was in flight when a checkpoint was taken, as a resumed run receives it.
struct SavedSync {
    Sync sync;
    SyncReport report;
    HostBuffer<float> mean;  // (sync.values); empty if no worker applies it
};

inline std::vector<float> read_floats(const SavedState& state, const std::string& name, long count) {
    std::vector<float> values(static_cast<size_t>(count));
    state.read(name, values.data(), values.size() * sizeof(float));
    return values;
}

inline void load_residuals(ErrorFeedback& feedback, const SavedState& state, const std::string& name,
                           Stream& main) {
    if (feedback.count() > 0) { feedback.load(read_floats(state, name, feedback.count()).data(), main); }
}

inline std::vector<uint64_t> saved_tokens(const Fields& fields, size_t fragments) {
    if (fields.integer("fragments") != long(fragments)) {
        throw UserError(format("the checkpoint is of %ld fragments, and here are %zu: resume with the "
                               "options that the run had", fields.integer("fragments"), fragments));
    }
    std::vector<uint64_t> tokens;
    for (size_t p = 0; p < fragments; p++) {
        tokens.push_back(fields.count("tokens_at_send." + std::to_string(p)));
    }
    return tokens;
}

// Refuses the state of an elastic worker: it may be ahead of the other workers or behind them, and in
// lock-step all are at the same step.
inline void refuse_elastic_state(const SavedState& state, const Fields& fields) {
    if (!fields.has("log.generation")) { return; }
    throw UserError(state.path() + " is of a run with --outer-transport store: resume it with that, or start "
                    "from its model (-e model_STEP.bin)");
}

// The syncs in flight, in the order of sending. Those sent H - 1 or more steps ago had been received, as
// tau < H. values: of this process's shard of each fragment Throws a UserError for those that the schedule
// of this run does not have.
inline std::vector<SavedSync> saved_syncs(const SavedState& state, const Fields& fields,
                                          const std::vector<Fragment>& fragments,
                                          const std::vector<long>& values, long H, int workers) {
    std::vector<SavedSync> saved;
    const long count = count_of(fields, "in_flight", long(fragments.size()));
    const long step = state.step();
    for (long i = 0; i < count; i++) {
        const std::string prefix = name_in_flight(size_t(i));
        const long p = fields.integer(prefix + "fragment");
        const Sync sync{fields.integer(prefix + "sync"), int(p), fields.integer(prefix + "send_step"),
                        fields.integer(prefix + "values")};
        const bool fits = p >= 0 && p < long(fragments.size()) && sync.values == values[size_t(p)] &&
                          sync.send_step <= step && sync.send_step > step - (H - 1) &&
                          is_sent(fragments[size_t(p)], sync.send_step, H) &&
                          sync.number == sync_number(fragments, int(p), sync.send_step, H) &&
                          (saved.empty() || sync.number > saved.back().sync.number);
        if (!fits) {
            throw UserError(format("%s has fragment %ld, of %ld values, on its way as sync %ld since step "
                                   "%ld, and here that is not so: resume with the options that the run had",
                                   state.path().c_str(), p, sync.values, sync.number, sync.send_step));
        }
        saved.push_back({sync, report_of(fields, prefix, sync, workers), {}});
        if (saved.back().report.applied()) {
            saved.back().mean = HostBuffer<float>(sync.values);
            state.read(prefix + "mean", saved.back().mean.data(), size_t(sync.values) * sizeof(float));
        }
    }
    return saved;
}
